"""What travels on a channel.

A channel is FIFO and carries five kinds of element. A record batch is passed as the `pyarrow.RecordBatch` itself; the
others are the small classes below. `End` says that no record follows; markers still do, so that a subtask whose
input has ended takes part in snapshots like any other (there is no special case for finished sources).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa

from tidegate.protocol.watermarks import MAX_WATERMARK_MS, MIN_WATERMARK_MS

__all__ = ["MAX_WATERMARK_MS", "MIN_WATERMARK_MS", "Element", "End", "Idle", "Marker", "Watermark"]


@dataclass(frozen=True, slots=True)
class Marker:
    """Ends `epoch` on this channel.

    `base` is the newest epoch that was complete when this one was triggered (0: none): increments build on it. `full`: the
    snapshot shall build on nothing.
    """

    epoch: int
    base: int = 0
    full: bool = False


@dataclass(frozen=True, slots=True)
class Watermark:
    """No record with an event time of `at_ms` or less follows on this channel."""

    at_ms: int


@dataclass(frozen=True, slots=True)
class Idle:
    """The channel says nothing about event time until its next batch or watermark."""


@dataclass(frozen=True, slots=True)
class End:
    """No record follows on this channel; markers may."""


Element: TypeAlias = pa.RecordBatch | Marker | Watermark | Idle | End
