"""From rows of a keyed state to sections: sorted by key-group, in a background thread, beside a busy hot loop.

Whoever writes a snapshot shares the interpreter's lock with the loop that processes records, and the loop must not feel
how large the state is. So the work is cut into pieces of bounded size:

- Python objects become Arrow columns in *chunks* of about `TURN_S` of work (`Pace`), with rests between them;
- chunks are put together to *batches* of about `BATCH_ROWS` rows, which are hashed and sorted by key-group. That is done by
  numpy and Arrow without the lock. Taking the lock back has its price, too, so batches are larger than chunks; but if there
  are as many loops as processors, a thread without the lock takes the processor from a loop, so there are rests as well;
- sections are cut from the sorted batches: a group of its own where there are many rows, several groups together up to
  `SECTION_ROWS` where there are few, and about `BATCH_ROWS` rows at most.

No call that holds the lock takes longer the more state there is, and nothing large is freed at once.

Not here: which rows there are (heap.py), and how they are written (format.py).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa

from tidegate.hashing import hash_columns
from tidegate.keygroups import groups_of
from tidegate.state.sections import Section

TURN_S = 0.001  # how long the writer works before it rests
REST = 1.0  # as long as the work before it, times this
MIN_CHUNK_ENTRIES, MAX_CHUNK_ENTRIES = 64, 8192
BATCH_ROWS = 1 << 14
SECTION_ROWS = 1 << 12

T = TypeVar("T")

# Rows in order of their key-groups, and where each group starts in them (one more than there are groups).
SortedRows: TypeAlias = tuple[pa.RecordBatch, np.ndarray[Any, Any]]


class _Thread(threading.local):
    rests = True


_thread = _Thread()


@contextlib.contextmanager
def without_rests() -> Iterator[None]:
    """For a thread beside a loop that has nothing to do."""
    _thread.rests = False
    try:
        yield
    finally:
        _thread.rests = True


class Pace:
    """Short turns with rests between them, which are `rest_factor` times as long as the turns.

    `entries` is how many entries make a good chunk, as far as one can tell.
    """

    def __init__(self, *, rest_factor: float) -> None:
        self.entries = 1024
        self._rest_factor = rest_factor
        self._started_s = time.thread_time()

    def rest_if_due(self) -> None:
        """Called after every chunk. The thread's own time counts, not what it spent waiting for the lock."""
        spent_s = time.thread_time() - self._started_s
        if spent_s < TURN_S / 2:
            self.entries = min(MAX_CHUNK_ENTRIES, self.entries * 2)
            return
        if spent_s > TURN_S:
            self.entries = max(MIN_CHUNK_ENTRIES, self.entries // 2)
        if _thread.rests:
            time.sleep(spent_s * self._rest_factor)
        self._started_s = time.thread_time()


def rested(things: Iterable[T]) -> Iterator[T]:
    """The things, with rests between them. What is done with one of them counts as well."""
    pace = Pace(rest_factor=REST)
    for thing in things:
        yield thing
        pace.rest_if_due()


def cut_by_group(
    state: str, chunks: Iterable[pa.RecordBatch], key_group_count: int, *, deleted: bool = False
) -> Iterator[Section]:
    """The rows of all chunks as sections, by growing key-group. The rows of a key stay in the order they came in."""
    batches = [_sorted(pa.concat_batches(batch), key_group_count) for batch in rested(_batches(chunks))]
    if not batches:
        return
    ends = np.sum([starts for _, starts in batches], axis=0)  # ends[g]: rows in the groups before g
    first = int(np.searchsorted(ends, 0, side="right")) - 1  # the first group that has any
    while ends[first] < ends[-1]:
        stop = int(np.searchsorted(ends, min(ends[first] + SECTION_ROWS, ends[-1]), side="left"))
        stop = max(stop, first + 1)
        for rows in in_batches(rows.slice(starts[first], starts[stop] - starts[first]) for rows, starts in batches):
            yield Section(state, range(first, stop), rows, deleted)
        first = stop
    while batches:
        batches.pop()  # one by one, so that the lock can change hands in between


def in_batches(parts: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows of all parts, in batches of about `BATCH_ROWS` at most. None of them is empty."""
    for batch in _batches(part for part in parts if part.num_rows):
        yield batch[0] if len(batch) == 1 else pa.concat_batches(batch)


def _batches(chunks: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    batch: list[pa.RecordBatch] = []
    row_count = 0
    for chunk in chunks:
        batch.append(chunk)
        row_count += chunk.num_rows
        if row_count >= BATCH_ROWS:
            yield batch
            batch, row_count = [], 0
    if batch:
        yield batch


def _sorted(rows: pa.RecordBatch, key_group_count: int) -> SortedRows:
    groups: Any = groups_of(hash_columns([rows.column("key")]), key_group_count).astype(np.uint16)
    order = np.argsort(groups, kind="stable")  # a radix sort, for numbers of 16 bits
    starts = np.zeros(key_group_count + 1, dtype=np.int64)
    np.cumsum(np.bincount(groups, minlength=key_group_count), out=starts[1:])
    return rows.take(pa.array(order)), starts
