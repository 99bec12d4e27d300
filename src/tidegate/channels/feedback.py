"""The channel that closes a loop: from an IterationTail back to its IterationHead, in the same slot.

It is like a `MemoryChannel`, but never full. If it could be full, a loop could wait for itself: the head for room in its
output, the body for room in the feedback, the feedback for the head. So batches beyond the memory bound go to disk
(`spill.py`), and the loop's head takes nothing from its other inputs while the channel is `crowded`.

Elements of all kinds stay in order. Control elements are never spilled; they are small and few. A channel belongs to one
thread.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

import pyarrow as pa

from tidegate.channels.elements import Element, End, Marker
from tidegate.channels.spill import Spill
from tidegate.protocol.ids import ChannelId


class FeedbackChannel:
    """Outlet and inlet in one. `_order` has None for each batch; the batches themselves are in the spill."""

    def __init__(self, channel: ChannelId, schema: pa.Schema, *, memory_bytes: int) -> None:
        self.channel = channel
        self.blocked = False
        self._memory_bytes = memory_bytes
        self._spill = Spill(schema, memory_bytes=memory_bytes)
        self._order: deque[Element | None] = deque()
        self._markers: deque[Marker] = deque()  # those in the queue
        self._ended = False
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
            self._order.append(None)
            return
        if isinstance(element, Marker):
            self._markers.append(element)
        elif isinstance(element, End):
            self._ended = True
        self._order.append(element)

    def __len__(self) -> int:
        return 0 if self.blocked else len(self._order)

    def peek(self) -> Element | None:
        if not self._order or self.blocked:
            return None
        first = self._order[0]
        return self._spill.peekleft() if first is None else first

    def take(self) -> Element:
        assert not self.blocked, f"channel {self.channel} is blocked"
        first = self._order.popleft()
        if first is None:
            return self._spill.popleft()
        if self._markers and first is self._markers[0]:
            self._markers.popleft()
        return first

    def marker(self) -> Marker | None:
        return self._markers[0] if self._markers else None

    def overtake(self) -> list[pa.RecordBatch]:
        """Take out the first marker, and return copies of the batches ahead of it, which stay queued."""
        marker = self._markers.popleft()
        position = next(at for at, element in enumerate(self._order) if element is marker)
        batch_count = sum(element is None for element in islice(self._order, position))
        del self._order[position]
        return list(islice(self._spill.batches(), batch_count))

    def hurry(self, on: bool) -> None:
        """Do nothing: every element that was sent is in the queue."""

    def block(self) -> None:
        self.blocked = True

    def unblock(self) -> None:
        self.blocked = False

    def close(self) -> None:
        """Close both ends, drop what was not taken, and free the disk space. Idempotent."""
        self._closed = True
        self._order.clear()
        self._markers.clear()
        self._spill.close()
