"""The index of a table of records: which rows each key has, in the order of arrival, for whole columns of keys at once.

Theory of operation. Each key has a number (key_index.py) and a *run*: a part of one array of row numbers, `_entries`. A run
has room for a power of two of rows. A run that is full moves to the end of the array, with twice the room, and leaves waste
behind. So the records of a key are beside one another, and a look-up of many keys is a gather from one array, whether a key
has one record or a million.

A row that is removed becomes a gap in its run. A run of which more than half is gaps is closed up; the whole array is made
again when more than half of it is waste. Both are amortised over the rows that were removed or added.

A position is given to a record once, and grows with time. What is loaded may come in any order: then all runs are sorted by
position before they are used next.

A key without records is unknown. Its number, like the rows, is reused when the rows are freed.

Not here: what belongs to a row (record_table.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.state.key_index import KeyIndex
from tidegate.state.key_store import Array, IntArray, grown

MIN_ENTRIES = 1024
_GAP = -1
_NO_ROWS: IntArray = np.empty(0, np.int64)


class RecordIndex:
    """The rows of the records of one table."""

    def __init__(self, key_type: pa.DataType) -> None:
        self._keys = KeyIndex(key_type)
        self.count = 0  # records
        self.top = 0  # all rows are below
        self.positions = np.empty(0, np.int64)  # by row
        self._owners = np.empty(0, np.int32)  # by row: the number of its key
        self._places = np.empty(0, np.int32)  # by row: its place in `_entries`
        self._is_last = np.empty(0, bool)  # by row: whether its key's number is freed with it
        self._entries = np.empty(0, np.int32)
        self._end = 0  # of what is used of `_entries`
        self._waste = 0  # what belongs to no run
        # By the number of a key: where its run starts, how many rows and gaps are in it, and how many fit into it.
        self._starts = np.zeros(0, np.int64)
        self._lengths = np.zeros(0, np.int64)
        self._gaps = np.zeros(0, np.int64)
        self._rooms = np.zeros(0, np.int64)
        self.whole = np.zeros(0, bool)  # whether all records of the key are here, if some may be elsewhere
        self._is_sorted = True
        self._reusable: list[IntArray] = []

    # Records and keys.

    def append(self, keys: Sequence[pa.Array], positions: IntArray, *, whole: bool = True) -> IntArray:
        """Add a record for each key, behind those that the key has; return their rows. The positions ascend. `whole`:
        there are no other records of keys that are new here."""
        self._sort()
        owners, rows = self._begin(keys, positions, whole=whole)
        self._link(owners, rows)
        return rows

    def load(self, keys: Sequence[pa.Array], positions: IntArray, *, relinked: bool = False) -> IntArray:
        """Add records in any order. `relinked`: the caller sorts the runs of their keys."""
        owners, rows = self._begin(keys, positions, whole=True)
        self._link(owners, rows)
        self._is_sorted = self._is_sorted and relinked
        return rows

    def numbers(self, keys: Sequence[pa.Array]) -> IntArray:
        """Return the number of each key, or -1 if it has no records."""
        return self._keys.find(keys)

    def counts(self, numbers: IntArray) -> IntArray:
        """Return how many records the keys with these numbers have; 0 for -1."""
        if not self.count:
            return np.zeros(len(numbers), np.int64)
        known = np.maximum(numbers, 0)
        return np.where(numbers < 0, 0, self._lengths[known] - self._gaps[known])

    def matches(self, numbers: IntArray, limit: int) -> Iterator[tuple[IntArray, IntArray]]:
        """Return for keys with these numbers (-1 has no records) pairs of an index in `numbers` and a row, in the order of
        the indices and then of arrival, at most `limit` at a time. Nothing may be added or removed meanwhile."""
        self._sort()
        asking = np.flatnonzero(numbers >= 0)
        known = numbers[asking]
        lengths = self._lengths[known]
        ends = np.cumsum(lengths)
        # So that the place of the i-th entry of all these runs is i + shift.
        shifts = self._starts[known] - (ends - lengths)
        total = int(ends[-1]) if len(ends) else 0
        for start in range(0, total, limit):
            some = np.arange(start, min(start + limit, total))
            first = int(np.searchsorted(ends, start, side="right"))
            last = int(np.searchsorted(ends, some[-1], side="right")) + 1
            bounds = np.minimum(ends[first:last], some[-1] + 1) - start
            which = np.repeat(np.arange(first, last), np.diff(bounds, prepend=0))
            rows = self._entries.take(some + shifts[which]).astype(np.int64)
            there = rows >= 0
            if there.all():
                yield asking[which], rows
            elif there.any():
                yield asking[which[there]], rows[there]

    def rows_of(self, numbers: IntArray) -> IntArray:
        """Return all rows of the keys with these numbers, each once."""
        parts = [rows for _, rows in self.matches(np.unique(numbers[numbers >= 0]), 1 << 62)]
        return parts[0] if parts else _NO_ROWS

    def numbers_in_use(self) -> IntArray:
        """Return the numbers of all keys."""
        return np.flatnonzero(self._rooms)

    def relink(self, numbers: IntArray) -> None:
        """Bring the runs of these keys into the order of positions."""
        numbers = np.unique(numbers)
        rows = self.rows_of(numbers)
        owners = self._owners[rows].astype(np.int64)
        order = np.lexsort((self.positions[rows], owners))
        self._lengths[numbers] = self._gaps[numbers] = 0
        self._link(owners[order], rows[order])

    # What a table calls (`RowIndex`).

    def keys(self, rows: IntArray) -> list[pa.Array]:
        """Return the keys and positions of rows that were not freed. Other threads may call this too."""
        return [*self._keys.keys(self._owners.take(rows).astype(np.int64)), pa.array(self.positions.take(rows))]

    def remove(self, rows: IntArray) -> None:
        """Forget these rows, each of which is there once. They are not reused until they are freed."""
        self.count -= len(rows)
        self._entries[self._places[rows]] = _GAP
        numbers, firsts, counts = np.unique(self._owners[rows], return_index=True, return_counts=True)
        numbers = numbers.astype(np.int64)
        self._gaps[numbers] += counts
        is_empty = self._gaps[numbers] == self._lengths[numbers]
        empty = numbers[is_empty]
        if len(empty):
            self._keys.remove(empty)
            self._is_last[rows[firsts[is_empty]]] = True
            self._waste += int(self._rooms[empty].sum())
            self._lengths[empty] = self._gaps[empty] = self._rooms[empty] = 0
        left = numbers[~is_empty]
        thin = left[self._gaps[left] * 2 > self._lengths[left]]
        if len(thin):
            self._close_up(thin)

    def free(self, rows: IntArray) -> None:
        """Let removed rows be reused, and the numbers of keys whose last records they were."""
        last = rows[self._is_last[rows]]
        if len(last):
            self._is_last[last] = False
            self._keys.free(self._owners[last].astype(np.int64))
        self._reusable.append(rows)

    def renumber(self, rows: IntArray) -> None:
        """Let row i be what `rows[i]` is now; these are all rows. No row may wait to be freed."""
        assert len(rows) == self.count
        owners = self._owners[rows].astype(np.int64)
        self.positions = self.positions[rows]
        # The numbers of keys in the order of the first of their rows.
        numbers, first, inverse = np.unique(owners, return_index=True, return_inverse=True)
        order = np.argsort(first)
        new_numbers = np.empty(len(order), np.int64)
        new_numbers[order] = np.arange(len(order))
        whole = self.whole[numbers[order]]
        self._keys.renumber(numbers[order])
        self._owners = new_numbers[inverse].astype(np.int32)
        self._is_last = np.zeros(len(rows), bool)
        self._places = np.empty(len(rows), np.int32)
        self._starts, self._lengths, self._gaps, self._rooms = (np.zeros(len(order), np.int64) for _ in range(4))
        self.whole = whole
        self._reusable, self.top = [], self.count
        # Rows are reused, so their numbers are not in the order of arrival.
        self._relink_all(np.argsort(self.positions, kind="stable"))

    @property
    def nbytes(self) -> int:
        """The memory of the index, the keys included."""
        by_row = (self.positions, self._owners, self._places, self._is_last, self._entries)
        by_key = (self._starts, self._lengths, self._gaps, self._rooms, self.whole)
        return self._keys.nbytes + sum(array.nbytes for array in (*by_row, *by_key))

    # Inside.

    def _begin(self, keys: Sequence[pa.Array], positions: IntArray, *, whole: bool) -> tuple[IntArray, IntArray]:
        owners, added = self._keys.rows_of(keys)
        if len(added):
            used, count = len(self._starts), self._keys.top
            for name in ("_starts", "_lengths", "_gaps", "_rooms", "whole"):
                setattr(self, name, _grown(getattr(self, name), used, count))
            self.whole[added] = whole
        rows = self._new_rows(len(owners))
        used = len(self.positions)
        for name in ("positions", "_owners", "_places", "_is_last"):
            setattr(self, name, _grown(getattr(self, name), used, self.top))
        self.positions[rows] = positions
        self._owners[rows] = owners
        self.count += len(rows)
        return owners, rows

    def _link(self, owners: IntArray, rows: IntArray) -> None:
        """Append these rows to the runs of their keys."""
        if not len(rows):
            return
        if self._waste * 2 > max(self._end, MIN_ENTRIES):
            self._make_again()
        order = np.argsort(owners, kind="stable")
        in_order = owners[order]
        begins = np.append(0, np.flatnonzero(np.diff(in_order)) + 1)
        numbers, counts = in_order[begins], np.diff(begins, append=len(rows))
        needed = self._lengths[numbers] + counts
        full = needed > self._rooms[numbers]
        if full.any():
            self._move(numbers[full], needed[full])
        at = self._starts[numbers] + self._lengths[numbers]
        places = np.arange(len(rows)) + np.repeat(at - begins, counts)
        self._entries[places] = rows[order]
        self._places[rows[order]] = places
        self._lengths[numbers] += counts

    def _move(self, numbers: IntArray, needed: IntArray) -> None:
        """Move runs to the end of the array, with room for so many rows."""
        rooms = _powers_of_two(needed)
        starts = self._end + np.cumsum(rooms) - rooms
        used, self._end = self._end, int(starts[-1] + rooms[-1])
        self._entries = grown(self._entries, used, self._end)
        self._copy(numbers, starts)
        self._waste += int(self._rooms[numbers].sum())
        self._starts[numbers], self._rooms[numbers] = starts, rooms

    def _copy(self, numbers: IntArray, starts: IntArray) -> None:
        lengths = self._lengths[numbers]
        moved = self._entries[_ranges(self._starts[numbers], lengths)]
        places = _ranges(starts, lengths)
        self._entries[places] = moved
        there = moved >= 0
        self._places[moved[there]] = places[there]

    def _close_up(self, numbers: IntArray) -> None:
        """Remove the gaps of these runs."""
        lengths, gaps = self._lengths[numbers], self._gaps[numbers]
        rows = self._entries[_ranges(self._starts[numbers], lengths)]
        rows = rows[rows >= 0]
        self._lengths[numbers], self._gaps[numbers] = lengths - gaps, 0
        places = _ranges(self._starts[numbers], lengths - gaps)
        self._entries[places] = rows
        self._places[rows] = places

    def _make_again(self) -> None:
        """Make the array of all runs again, without gaps and waste."""
        numbers = self.numbers_in_use()
        rows = self._entries[_ranges(self._starts[numbers], self._lengths[numbers])].astype(np.int64)
        self._relink_all(rows[rows >= 0])

    def _sort(self) -> None:
        if self._is_sorted:
            return
        self._is_sorted = True
        numbers = self.numbers_in_use()
        rows = self._entries[_ranges(self._starts[numbers], self._lengths[numbers])].astype(np.int64)
        rows = rows[rows >= 0]
        self._relink_all(rows[np.argsort(self.positions[rows], kind="stable")])

    def _relink_all(self, rows: IntArray) -> None:
        """Make all runs of these rows, which are in the order of arrival within their keys."""
        self._lengths[:] = self._gaps[:] = self._rooms[:] = 0
        self._end = self._waste = 0
        self._entries = np.empty(0, np.int32)
        self._link(self._owners[rows].astype(np.int64), rows)

    def _new_rows(self, count: int) -> IntArray:
        """Return rows that are not in use: freed ones first."""
        parts: list[IntArray] = []
        while count and self._reusable:
            rows = self._reusable.pop()
            if len(rows) > count:
                self._reusable.append(rows[count:])
                rows = rows[:count]
            parts.append(rows)
            count -= len(rows)
        parts.append(np.arange(self.top, self.top + count))
        self.top += count
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _grown(values: Array, used: int, count: int) -> Array:
    """Return an array of at least `count` elements, of which the new ones are zero."""
    more = grown(values, used, count)
    if len(more) > used:
        more[used:] = 0
    return more


def _ranges(starts: Any, lengths: Any) -> IntArray:
    """Return the numbers from each start on, as many as its length says, one range after the other."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    found: IntArray = np.arange(total) + np.repeat(starts - (ends - lengths), lengths)
    return found


def _powers_of_two(counts: Any) -> IntArray:
    """Return for each count the least power of two that is not smaller."""
    exponents = np.frexp(np.maximum(counts - 1, 0).astype(np.float64))[1]
    powers: IntArray = np.left_shift(np.int64(1), exponents.astype(np.int64))
    return powers
