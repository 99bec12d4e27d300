"""From rows of a keyed state to sections: sorted by key-group, in a background thread, beside a busy hot loop.

The thread that writes a snapshot shares the interpreter's lock with the loop that processes records, and large state must
not slow down the loop more than small state. So the work is cut into pieces of bounded size:

- Python objects become Arrow columns in *chunks* of about `TURN_S` of work (`Pace`), with rests between them;
- chunks are joined to *batches* of about `BATCH_ROWS` rows, or of fewer if these have many bytes (types/limits.py). Numpy
  and Arrow hash and sort a batch by key-group without the lock. To take the lock back is expensive too, so batches are
  larger than chunks. If there are as many loops as processors, a thread without the lock takes the processor from a loop,
  so there are rests between batches as well;
- sections are cut from the sorted batches: one group if it has many rows, several groups together up to `SECTION_ROWS` if
  they have few, and about `BATCH_ROWS` rows at most.

No call that holds the lock takes longer if there is more state, and nothing large is freed at once.

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
from tidegate.types.limits import runs

TURN_S = 0.001  # how long the writer works before it rests
REST, MOST_REST = 1.0, 4.0  # times as long as the work before it: beside an idle loop, and beside a busy one
SMOOTHING = 0.25  # the weight of the newest turn in the estimate of how busy the loop is
MIN_CHUNK_ENTRIES, MAX_CHUNK_ENTRIES = 64, 8192
BATCH_ROWS = 1 << 14
SECTION_ROWS = 1 << 12

T = TypeVar("T")

# Rows in order of their key-groups, and where each group starts in them, with the end of the last group.
SortedRows: TypeAlias = tuple[pa.RecordBatch, np.ndarray[Any, Any]]


class _Thread(threading.local):
    rests = True
    busy = 0.5  # how much of a processor the other threads of the process use: nearly all of that is the loop's


_thread = _Thread()


@contextlib.contextmanager
def without_rests() -> Iterator[None]:
    """Omit the rests of this thread, while the loop beside it has nothing to do."""
    _thread.rests = False
    try:
        yield
    finally:
        _thread.rests = True


class Pace:
    """Short turns of work with rests between them. The thread takes no more than half of the time that the loop leaves free,
    but a fifth of all time even if the loop is never idle, so that the work ends (docs/adr/036). `rest_factor` is how long a
    rest lasts at least, in times of the turn before it; 0 means that the thread doesn't rest.

    `entries` is the number of entries for the next chunk, estimated from the chunks before.
    """

    def __init__(self, *, rest_factor: float) -> None:
        self.entries = 1024
        self._rest_factor = rest_factor
        self._started_s = time.thread_time()
        self._looked = time.perf_counter(), time.process_time(), self._started_s

    def rest_if_due(self) -> None:
        """Rest if the turn is over; to be called after every chunk. Time spent waiting for the lock doesn't count."""
        spent_s = time.thread_time() - self._started_s
        if spent_s < TURN_S / 2:
            self.entries = min(MAX_CHUNK_ENTRIES, self.entries * 2)
            return
        if spent_s > TURN_S:
            self.entries = max(MIN_CHUNK_ENTRIES, self.entries // 2)
        if _thread.rests:
            time.sleep(spent_s * (max(self._rest_factor, self._wanted_rest()) if self._rest_factor else 0))
        self._started_s = time.thread_time()

    def _wanted_rest(self) -> float:
        now = time.perf_counter(), time.process_time(), time.thread_time()
        wall_s, all_s, own_s = (end - start for end, start in zip(now, self._looked, strict=True))
        if wall_s > 0:
            self._looked = now
            _thread.busy += SMOOTHING * (min(max((all_s - own_s) / wall_s, 0.0), 1.0) - _thread.busy)
        free = 1 - _thread.busy
        return min(2 / free - 1, MOST_REST) if free > 0 else MOST_REST


def rested(things: Iterable[T]) -> Iterator[T]:
    """Yield the things, with rests between them. The caller's work on a thing counts as well."""
    pace = Pace(rest_factor=REST)
    for thing in things:
        yield thing
        pace.rest_if_due()


def cut_by_group(
    state: str, chunks: Iterable[pa.RecordBatch], key_group_count: int, *, deleted: bool = False
) -> Iterator[Section]:
    """Return the rows of all chunks as sections, by ascending key-group. The rows of a key stay in their order."""
    batches = [_sorted(pa.concat_batches(batch), key_group_count) for batch in rested(_batches(chunks))]
    if not batches:
        return
    ends = np.sum([starts for _, starts in batches], axis=0)  # ends[g]: rows in the groups before g
    first = int(np.searchsorted(ends, 0, side="right")) - 1  # the first group that has rows
    while ends[first] < ends[-1]:
        stop = int(np.searchsorted(ends, min(ends[first] + SECTION_ROWS, ends[-1]), side="left"))
        stop = max(stop, first + 1)
        for rows in in_batches(rows.slice(starts[first], starts[stop] - starts[first]) for rows, starts in batches):
            yield Section(state, range(first, stop), rows, deleted)
        first = stop
    while batches:
        batches.pop()  # one by one, so that the lock can change hands in between


def in_batches(parts: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Return the rows of all parts in batches of about `BATCH_ROWS` rows, the last one of fewer. No batch is empty."""
    for batch in _batches(part for part in parts if part.num_rows):
        yield batch[0] if len(batch) == 1 else pa.concat_batches(batch)


def _batches(chunks: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    return runs(chunks, max_rows=BATCH_ROWS)


def _sorted(rows: pa.RecordBatch, key_group_count: int) -> SortedRows:
    groups: Any = groups_of(hash_columns([rows.column("key")]), key_group_count).astype(np.uint16)
    order = np.argsort(groups, kind="stable")  # a radix sort, for numbers of 16 bits
    starts = np.zeros(key_group_count + 1, dtype=np.int64)
    np.cumsum(np.bincount(groups, minlength=key_group_count), out=starts[1:])
    return rows.take(pa.array(order)), starts
