"""The interfaces of the two ends of a channel.

Nothing here blocks. Back-pressure: while `Outlet.full`, the sender stops producing (it may still send control
elements); while `Inlet.blocked`, the transport stops reading, so that the sender's side fills up.

A marker can be taken in its turn like everything else, or ahead of other elements: `marker` returns it wherever it is in
the queue, `overtake` takes it out, and `hurry` reads on beyond the bound of the queue until it is there. Only the receiver
is involved, not the sender.
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
        """True once the bound of queued bytes or elements is exceeded. Control elements may be sent anyway."""

    def send(self, element: Element) -> None: ...

    def close(self) -> None: ...


class Inlet(Protocol):
    channel: ChannelId
    blocked: bool

    def __len__(self) -> int:
        """Return the number of elements that can be taken now."""

    def peek(self) -> Element | None: ...

    def take(self) -> Element:
        """Take the oldest element. Called only if `len(self) > 0`."""

    def marker(self) -> Marker | None:
        """Return the first marker in the queue, even if the channel is blocked. This costs next to nothing."""

    def overtake(self) -> list[pa.RecordBatch]:
        """Take that marker out of the queue, and return the batches ahead of it. These, and everything else ahead of it,
        stay queued. Called only if there is a `marker()`."""

    def hurry(self, on: bool) -> None:
        """While on, read beyond the bound, to reach a marker behind it, unless the channel is blocked."""

    def block(self) -> None:
        """Leave queued elements in the queue, and stop reading from the connection."""

    def unblock(self) -> None: ...

    def close(self) -> None: ...
