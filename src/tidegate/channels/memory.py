"""A channel between two subtasks of one slot: a bounded queue that is its own outlet and inlet.

To the slot's loop it behaves like a TCP channel: FIFO, `full` once its bound is exceeded (control elements may still be
sent), nothing to take while blocked. Batches are immutable and aren't copied. A channel belongs to one thread. Elements
are in the queue as soon as they are sent, so there is nothing to hurry.
"""

from __future__ import annotations

from collections import deque

import pyarrow as pa

from tidegate.channels.elements import Element, End, Marker, overtaken
from tidegate.protocol.ids import ChannelId

MAX_ELEMENTS = 64
MAX_QUEUED_BYTES = 4 << 20


class MemoryChannel:
    def __init__(
        self, channel: ChannelId, *, max_elements: int = MAX_ELEMENTS, max_queued_bytes: int = MAX_QUEUED_BYTES
    ) -> None:
        self.channel = channel
        self.blocked = False
        self._max_elements = max_elements
        self._max_queued_bytes = max_queued_bytes
        self._queue: deque[tuple[Element, int]] = deque()
        self._queued_bytes = 0
        self._markers: deque[Marker] = deque()  # those in the queue
        self._ended = False
        self._closed = False

    @property
    def full(self) -> bool:
        return len(self._queue) > self._max_elements or self._queued_bytes > self._max_queued_bytes

    def send(self, element: Element) -> None:
        assert not self._closed, f"channel {self.channel} is closed"
        element_bytes = 0
        if isinstance(element, pa.RecordBatch):
            assert not self._ended, f"a batch after End on channel {self.channel}"
            # What the batch keeps alive, which for a slice is more than its rows. `nbytes` takes 50 times as long.
            element_bytes = element.get_total_buffer_size()
        elif isinstance(element, Marker):
            self._markers.append(element)
        elif isinstance(element, End):
            self._ended = True
        self._queue.append((element, element_bytes))
        self._queued_bytes += element_bytes

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
        del self._queue[position]
        self._markers.popleft()
        return batches

    def hurry(self, on: bool) -> None:
        """Do nothing: every element that was sent is in the queue."""

    def block(self) -> None:
        self.blocked = True

    def unblock(self) -> None:
        self.blocked = False

    def close(self) -> None:
        """Close either end. What was sent before can still be taken."""
        self._closed = True
