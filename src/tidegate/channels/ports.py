"""The two ends of a channel, as the slot's loop sees them.

Nothing here blocks. Back-pressure: `Outlet.full` tells the sender to stop producing (it may still send control
elements); `Inlet.blocked` tells the transport to stop reading, and the sender's side fills up in turn.

A marker can be taken in its turn like everything else, or ahead of it: `marker` shows it wherever it is in the queue,
`overtake` takes it out, and `hurry` brings it here though the queue is longer than it should be. Only the receiver does
anything for this; a sender doesn't know.
"""

from __future__ import annotations

from typing import Protocol

import pyarrow as pa

from tidegate.channels.elements import Element, Marker
from tidegate.protocol.ids import ChannelId


class Outlet(Protocol):
    channel: ChannelId

    @property
    def full(self) -> bool:
        """True once the bound of queued bytes or elements is passed. Markers and watermarks may be sent anyway."""

    def send(self, element: Element) -> None: ...

    def close(self) -> None: ...


class Inlet(Protocol):
    channel: ChannelId
    blocked: bool

    def __len__(self) -> int:
        """The number of elements that can be taken now."""

    def peek(self) -> Element | None: ...

    def take(self) -> Element:
        """The oldest element. Called only where `len(self) > 0`."""

    def marker(self) -> Marker | None:
        """The first marker in the queue, wherever it is, and also where the channel is blocked. Costs next to nothing."""

    def overtake(self) -> list[pa.RecordBatch]:
        """Take that marker out of the queue. The batches that were ahead of it are returned, and stay queued, as does
        everything else that was ahead. Called only where there is a `marker()`."""

    def hurry(self, on: bool) -> None:
        """While on, read past the bound, so that a marker behind it comes into sight; not where blocked."""

    def block(self) -> None:
        """Leave queued elements where they are and read no more from the wire."""

    def unblock(self) -> None: ...

    def close(self) -> None: ...
