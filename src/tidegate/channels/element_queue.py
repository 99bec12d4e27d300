"""The queue that every inlet has: first in, first out, except that a marker can be taken out ahead of other elements."""

from __future__ import annotations

from collections import deque

import pyarrow as pa

from tidegate.channels.elements import Element, End, Marker, overtaken
from tidegate.protocol.ids import ChannelId


class ElementQueue:
    """The receiving end of a channel (`ports.Inlet`) without its transport, which calls `_append`."""

    def __init__(self, channel: ChannelId) -> None:
        self.channel = channel
        self.blocked = False
        self._queue: deque[tuple[Element, int]] = deque()  # each with its size in bytes
        self._queued_bytes = 0
        self._markers: deque[Marker] = deque()  # those in the queue
        self._ended = False

    def __len__(self) -> int:
        return 0 if self.blocked else len(self._queue)

    def peek(self) -> Element | None:
        return self._queue[0][0] if self._queue and not self.blocked else None

    def take(self) -> Element:
        assert not self.blocked, f"channel {self.channel} is blocked"
        element, element_bytes = self._queue.popleft()
        self._queued_bytes -= element_bytes
        if self._markers and element is self._markers[0]:
            self._markers.popleft()
        return element

    def marker(self) -> Marker | None:
        return self._markers[0] if self._markers else None

    def overtake(self) -> list[pa.RecordBatch]:
        position, batches = overtaken(element for element, _ in self._queue)
        self._queued_bytes -= self._queue[position][1]
        del self._queue[position]
        self._markers.popleft()
        return batches

    def hurry(self, on: bool) -> None:
        """Do nothing: within a slot every element that was sent is in the queue."""

    def block(self) -> None:
        self.blocked = True

    def unblock(self) -> None:
        self.blocked = False

    def _append(self, element: Element, element_bytes: int) -> None:
        if isinstance(element, Marker):
            self._markers.append(element)
        elif isinstance(element, End):
            self._ended = True
        self._queue.append((element, element_bytes))
        self._queued_bytes += element_bytes

    def _clear(self) -> None:
        self._queue.clear()
        self._markers.clear()
        self._queued_bytes = 0
