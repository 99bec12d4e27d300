"""Snapshots by the protocols that the paper argues against, so that the difference can be measured."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate import arguments
from tidegate.control.settings import Snapshots
from tidegate.errors import JobError
from tidegate.protocol.alignment import AlignmentMode

PROTOCOLS = ("chandy_lamport", "stop_the_world")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentalSnapshots(Snapshots):
    """`tg.Snapshots` by another protocol, "chandy_lamport" or "stop_the_world". For benchmarks, not for jobs.

    "chandy_lamport" puts the records in flight of every channel into the snapshot (Chandy and Lamport, 1985);
    "stop_the_world" stops all sources while a snapshot is taken.
    """

    protocol: str

    def __post_init__(self) -> None:
        Snapshots.__post_init__(self)
        arguments.one_of("ExperimentalSnapshots", "protocol", self.protocol, PROTOCOLS)
        if self.mode != "exactly_once" or self.alignment_timeout is not None:
            raise JobError(
                f"ExperimentalSnapshots(protocol={self.protocol!r}) has an alignment of its own: omit mode and "
                f"alignment_timeout"
            )

    @property
    def alignment_mode(self) -> AlignmentMode:
        return AlignmentMode.LOGGING if self.protocol == "chandy_lamport" else AlignmentMode.EXACTLY_ONCE

    @property
    def halts_sources(self) -> bool:
        return self.protocol == "stop_the_world"
