"""The channel that closes a loop: from an IterationTail back to its IterationHead, in the same slot.

It is like a `MemoryChannel`, but never full. If it could be full, a loop could wait for itself: the head for room in its
output, the body for room in the feedback, the feedback for the head. So batches beyond the memory bound go to disk
(`spill.py`), and the loop's head takes nothing from its other inputs while the channel is `crowded`.

Elements of all kinds stay in order. Control elements are never spilled; they are small and few. A channel belongs to one
thread.
"""

from __future__ import annotations

from itertools import islice

import pyarrow as pa

from tidegate.channels.element_queue import ElementQueue
from tidegate.channels.elements import Element
from tidegate.channels.spill import Spill
from tidegate.protocol.ids import ChannelId

# Stands in the queue for each batch. The batches themselves are in the spill.
_SPILLED = pa.record_batch([], schema=pa.schema([]))


class FeedbackChannel(ElementQueue):
    """Outlet and inlet in one."""

    def __init__(self, channel: ChannelId, schema: pa.Schema, *, memory_bytes: int) -> None:
        super().__init__(channel)
        self._memory_bytes = memory_bytes
        self._spill = Spill(schema, memory_bytes=memory_bytes)
        self._closed = False

    @property
    def full(self) -> bool:
        return False

    @property
    def crowded(self) -> bool:
        """True while the memory bound is exceeded."""
        return self._spill.byte_count > self._memory_bytes

    @property
    def queued_bytes(self) -> int:
        """The bytes that are queued in memory and on disk."""
        return self._spill.byte_count

    def send(self, element: Element) -> None:
        assert not self._closed, f"channel {self.channel} is closed"
        if isinstance(element, pa.RecordBatch):
            assert not self._ended, f"a batch after End on channel {self.channel}"
            self._spill.append(element)
            element = _SPILLED
        self._append(element, 0)

    def peek(self) -> Element | None:
        first = super().peek()
        return self._spill.peekleft() if first is _SPILLED else first

    def take(self) -> Element:
        first = super().take()
        return self._spill.popleft() if first is _SPILLED else first

    def overtake(self) -> list[pa.RecordBatch]:
        """Take out the first marker, and return copies of the batches ahead of it, which stay queued."""
        return list(islice(self._spill.batches(), len(super().overtake())))

    def close(self) -> None:
        """Close both ends, drop what was not taken, and free the disk space. Idempotent."""
        self._closed = True
        self._clear()
        self._spill.close()
