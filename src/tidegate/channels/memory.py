"""A channel between two subtasks of one slot: a bounded queue that is its own outlet and inlet.

To the slot's loop it behaves like a TCP channel: FIFO, `full` once its bound is exceeded (control elements may still be
sent), nothing to take while blocked. Batches are immutable and aren't copied. A channel belongs to one thread. Elements
are in the queue as soon as they are sent, so there is nothing to hurry.
"""

from __future__ import annotations

import pyarrow as pa

from tidegate.channels.element_queue import ElementQueue
from tidegate.channels.elements import Element
from tidegate.protocol.ids import ChannelId

MAX_ELEMENTS = 64
MAX_QUEUED_BYTES = 4 << 20


class MemoryChannel(ElementQueue):
    def __init__(
        self, channel: ChannelId, *, max_elements: int = MAX_ELEMENTS, max_queued_bytes: int = MAX_QUEUED_BYTES
    ) -> None:
        super().__init__(channel)
        self._max_elements = max_elements
        self._max_queued_bytes = max_queued_bytes
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
        self._append(element, element_bytes)

    def close(self) -> None:
        """Close either end. What was sent before can still be taken."""
        self._closed = True
