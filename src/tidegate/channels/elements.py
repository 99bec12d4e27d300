"""The elements that travel on a channel.

A channel is FIFO and carries seven kinds of element. A record batch is passed as the `pyarrow.RecordBatch` itself; the
others are the small classes below. `End` says that no record follows; markers still do, so that a subtask whose
input has ended takes part in snapshots like any other (there is no special case for finished sources).

There is one exception to the order: a marker may be taken out ahead of the records that are queued before it (unaligned
snapshots), which then are part of the snapshot. Inlets use `overtaken` for that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa

from tidegate.protocol.watermarks import MAX_WATERMARK_MS, MIN_WATERMARK_MS

__all__ = [
    "MAX_WATERMARK_MS",
    "MIN_WATERMARK_MS",
    "ControlElement",
    "Element",
    "End",
    "Held",
    "Idle",
    "Lap",
    "Marker",
    "Watermark",
    "overtaken",
]


@dataclass(frozen=True, slots=True)
class Marker:
    """Ends `epoch` on this channel.

    `base` is the newest epoch that was complete when this one was triggered (0: none): increments build on it. `full`: the
    snapshot builds on no earlier one.
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
    """The channel promises nothing about event time until its next watermark."""


@dataclass(frozen=True, slots=True)
class Held:
    """The channel's part of a loop has no more input, but records may still leave the loop: the end of event time is held
    back until the loop is quiet. Sent inside the loop, and to the next subtasks behind it."""

    loop: int


@dataclass(frozen=True, slots=True)
class End:
    """No record follows on this channel; markers may."""


@dataclass(frozen=True, slots=True)
class Lap:
    """Goes round a loop behind all records, to find out whether any are left in it (protocol/iteration.py).

    `number` counts the laps of this loop, from 1. `active`: there may still be records, since a subtask was stirred.
    """

    loop: int
    number: int
    active: bool


ControlElement: TypeAlias = Marker | Watermark | Idle | Held | End | Lap
Element: TypeAlias = pa.RecordBatch | ControlElement


def overtaken(queued: Iterable[Element]) -> tuple[int, list[pa.RecordBatch]]:
    """Return the position of the first marker, and the batches ahead of it. There is a marker."""
    batches: list[pa.RecordBatch] = []
    for position, element in enumerate(queued):
        if isinstance(element, Marker):
            return position, batches
        if isinstance(element, pa.RecordBatch):
            batches.append(element)
    raise AssertionError("no marker is queued")
