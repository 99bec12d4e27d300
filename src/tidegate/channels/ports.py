"""The two ends of a channel, as the slot's loop sees them.

Nothing here blocks. Back-pressure: `Outlet.full` tells the sender to stop producing (it may still send control
elements); `Inlet.blocked` tells the transport to stop reading, and the sender's side fills up in turn.
"""

from __future__ import annotations

from typing import Protocol

from tidegate.channels.elements import Element
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

    def block(self) -> None:
        """Leave queued elements where they are and read no more from the wire."""

    def unblock(self) -> None: ...

    def close(self) -> None: ...
