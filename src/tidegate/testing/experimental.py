"""Snapshots by the protocols that the paper argues against, so that the difference can be measured."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate import arguments
from tidegate.errors import JobError
from tidegate.protocol.alignment import AlignmentMode
from tidegate.runtime.settings import Snapshots

PROTOCOLS = ("chandy_lamport", "stop_the_world")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentalSnapshots(Snapshots):
    """`tg.Snapshots` by another protocol, "chandy_lamport" or "stop_the_world". For benchmarks, not for jobs.

    "chandy_lamport" keeps the records under way of every channel in the snapshot (Chandy and Lamport, 1985);
    "stop_the_world" lets no source read while a snapshot is taken.
    """

    protocol: str

    def __post_init__(self) -> None:
        Snapshots.__post_init__(self)
        arguments.one_of("ExperimentalSnapshots", "protocol", self.protocol, PROTOCOLS)
        if self.mode != "exactly_once" or self.alignment_timeout is not None:
            raise JobError(
                f"ExperimentalSnapshots(protocol={self.protocol!r}) is a protocol of its own: "
                f"omit mode and alignment_timeout"
            )

    @property
    def alignment_mode(self) -> AlignmentMode:
        return AlignmentMode.LOGGING if self.protocol == "chandy_lamport" else AlignmentMode.EXACTLY_ONCE

    @property
    def halts_sources(self) -> bool:
        return self.protocol == "stop_the_world"
