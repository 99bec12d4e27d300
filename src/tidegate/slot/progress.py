"""The signs of life of a slot that works on much state.

A restore is one long call in the slot's loop, so the slot sends no heartbeats meanwhile. `RestoreProgress` reports instead
that bytes are read and rows are loaded. A snapshot is written in the background. `WriteProgress` reports with the heartbeats
that its bytes get further. Both report only what has moved, so that the coordinator finds out if a slot hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa

from tidegate.control.clock import Clock
from tidegate.control.messages import Message, Restoring, Writing
from tidegate.store.base import CountedStore, Store


class RestoreProgress:
    """The restore of one slot. `store` is for its reads. `look` is called with each report, and raises an error if the slot
    takes too much memory."""

    def __init__(
        self,
        slot: int,
        store: Store,
        *,
        tell: Callable[[Message], None],
        clock: Clock,
        every_ms: int,
        look: Callable[[], object] = lambda: None,
    ) -> None:
        self.store = CountedStore(store, self.moved)
        self._slot = slot
        self._tell = tell
        self._clock = clock
        self._every_ms = every_ms
        self._look = look
        self._due_ms = clock.monotonic_ms() + every_ms

    def moved(self) -> None:
        """Report that the restore has advanced, if the last report is long enough ago."""
        now_ms = self._clock.monotonic_ms()
        if now_ms >= self._due_ms:
            self._due_ms = now_ms + self._every_ms
            self._look()
            self._tell(Restoring(self._slot, self.store.read_bytes))

    def rows(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a state, and report that those before were loaded: that may take longer than to read them."""
        for batch in batches:
            yield batch
            self.moved()


class WriteProgress:
    """The snapshots that one slot writes. `store` is for what the writers write, and read to merge."""

    def __init__(self, slot: int, store: Store, *, tell: Callable[[Message], None]) -> None:
        self.store = CountedStore(store)
        self._slot = slot
        self._tell = tell
        self._epoch = 0
        self._before_bytes = 0
        self._moved_bytes = 0  # at the last report

    def begin(self, epoch: int) -> None:
        """Note that a part of this epoch's snapshot is about to be written."""
        if epoch > self._epoch:
            self._epoch = epoch
            self._before_bytes, self._moved_bytes = self.store.written_bytes, self._all_bytes()

    def report(self) -> None:
        """Report how far the newest snapshot has got, if it has advanced. Called while one is written."""
        moved_bytes = self._all_bytes()
        if moved_bytes > self._moved_bytes:
            self._moved_bytes = moved_bytes
            self._tell(Writing(self._slot, self._epoch, self.store.written_bytes - self._before_bytes))

    def _all_bytes(self) -> int:
        return self.store.read_bytes + self.store.written_bytes
