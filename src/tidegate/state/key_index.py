"""The index of a columnar table: a row number for each key, for whole columns of keys at once, in numpy.

Theory of operation. A table of row numbers with open addressing is probed for all keys of a batch together: each round
looks at one place for each key that is still looking, and most keys find theirs in the first round. A place holds a row
number, or that it is free, or that the key there was removed.

Each key has a code of 64 bits, and each row the code of its key. A key of one column of integers, dates, timestamps,
booleans or floats is its own code, and equal codes mean equal keys. All other keys have their hash (hashing.py) as code,
and if two codes are equal the keys are compared (key_store.py): a collision of hashes costs a comparison, and never joins
two keys. Null is a key like any other. What one key is, is what `key_list` (columns.py) makes equal.

New keys take their places in rounds as well: all keys that look at one free place write their number there, the one whose
number stays has won, and the other ones find the winner's key there, which may be their own.

Memory. At most half of the table's places are taken, by keys or by removed ones. When removed keys fill it, or when only an
eighth is taken, the table is made again, in a size that fits the keys that are there. That costs as much as there are
keys, and happens only after as many keys were added or removed: it is amortised.

`remove` makes a key unknown, and its row keeps what it has until `free` allows its reuse: a reader of a frozen version may
still need the row. Rows are numbered from 0 and reused, so vectors by row stay as short as the largest number of keys.

Not here: what belongs to a key (column_table.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.hashing import hash_columns
from tidegate.state.key_store import Array, IntArray, NumberStore, grown, leaf_types, leaves_of, store_of, struct_of

_FREE, _REMOVED, _CLAIMED = -1, -2, -3  # a place that is claimed in this round by the key i holds _CLAIMED - i
_MIN_BITS = 4
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing: the upper bits of the product are well mixed

_NO_ROWS: IntArray = np.empty(0, np.int64)


class KeyIndex:
    """The rows of the keys of one table. `hash_of` computes the codes of keys that are not integers."""

    def __init__(self, key_type: pa.DataType, *, hash_of: Callable[[Sequence[pa.Array]], Any] = hash_columns) -> None:
        self._key_type = key_type
        self._hash_of = hash_of
        stores = [store_of(kind) for kind in leaf_types(key_type)]
        first = stores[0] if len(stores) == 1 else None
        # If a key is its own code: the store of the codes. Otherwise `_hashes` has the codes.
        self._codes = first if isinstance(first, NumberStore) and first.has_code else None
        self._stores = stores
        self._hashes = np.empty(0, np.int64)
        self._null_row = -1  # of null, if a key is its own code: null has none
        self._bits = _MIN_BITS
        self._table = np.full(1 << _MIN_BITS, _FREE, np.int32)
        self._taken = 0  # places of the table that are not free
        self.count = 0  # keys
        self.top = 0  # all rows are below
        self._reusable: list[IntArray] = []  # rows, the last ones first

    def rows_of(self, keys: Sequence[pa.Array]) -> tuple[IntArray, IntArray]:
        """Return the row of each key, and which rows are new."""
        rows, added = self._look_up(keys, add=True)
        return rows, added[0] if len(added) == 1 else np.concatenate(added) if added else _NO_ROWS

    def find(self, keys: Sequence[pa.Array]) -> IntArray:
        """Return the row of each key, or -1."""
        return self._look_up(keys, add=False)[0]

    def keys(self, rows: IntArray) -> list[pa.Array]:
        """Return the keys of rows that were not freed, as columns. Other threads may call this too."""
        leaves = [store.take(rows) for store in self._stores]
        if pa.types.is_struct(self._key_type):
            return [struct_of(leaves, field.type) for field in self._key_type]
        return [struct_of(leaves, self._key_type)]

    def remove(self, rows: IntArray) -> None:
        """Forget the keys of these rows, each of which is there once. The rows are not reused until they are freed."""
        self.count -= len(rows)
        if self._null_row >= 0 and (is_null := rows == self._null_row).any():
            self._null_row = -1
            rows = rows[~is_null]
        table, mask = self._table, len(self._table) - 1
        at = self._first_places(self._codes_of(rows))
        while len(rows):
            found = table.take(at) == rows
            table[at[found]] = _REMOVED
            rows, at = rows[~found], (at[~found] + 1) & mask
        if self.count * 8 < len(table) > 1 << _MIN_BITS:
            self._rehash()

    def free(self, rows: IntArray) -> None:
        """Let the rows of removed keys be reused."""
        for store in self._stores:
            store.free(rows)
        self._reusable.append(rows)

    def renumber(self, rows: IntArray) -> None:
        """Let row i be what `rows[i]` is now; these are the rows of all keys. No row may wait to be freed."""
        assert len(rows) == self.count
        self._stores = [store.renumbered(rows) for store in self._stores]
        if self._codes is not None:
            assert isinstance(self._stores[0], NumberStore)
            self._codes = self._stores[0]
        else:
            self._hashes = self._hashes[rows]
        if self._null_row >= 0:
            self._null_row = int(np.flatnonzero(rows == self._null_row)[0])
        self._reusable, self.top = [], self.count
        self._rehash()

    @property
    def nbytes(self) -> int:
        """The memory of the index, the keys included."""
        return self._table.nbytes + self._hashes.nbytes + sum(store.nbytes for store in self._stores)

    # Looking up.

    def _look_up(self, keys: Sequence[pa.Array], *, add: bool) -> tuple[IntArray, list[IntArray]]:
        leaves = leaves_of(keys)
        assert len(leaves) == len(self._stores), f"{len(leaves)} columns for a key of {len(self._stores)}"
        if self._codes is None:
            codes = np.asarray(self._hash_of(leaves))
            given = [store.given(leaf) for store, leaf in zip(self._stores, leaves, strict=True)]
            return self._look_up_codes(codes, given, add=add)
        given = [self._codes.given(leaves[0])]
        codes, valid = given[0]
        if valid is None:
            return self._look_up_codes(codes, given, add=add)
        rows = np.empty(len(codes), np.int64)
        there = np.flatnonzero(valid)
        part = codes[there]
        rows[there], added = self._look_up_codes(part, [(part, None)], add=add)
        if self._null_row < 0 and add:
            new = self._new_rows(1)
            self._codes.put(new, (codes, valid), np.flatnonzero(~valid)[:1])
            self._null_row = int(new[0])
            self.count += 1
            added.append(new)
        rows[~valid] = self._null_row
        return rows, added

    def _look_up_codes(self, codes: Array, given: list[Any], *, add: bool) -> tuple[IntArray, list[IntArray]]:
        rows, missing = self._found(codes, given)
        added: list[IntArray] = []
        while add and len(missing):
            room = len(self._table) // 2 - self._taken
            if room < min(len(missing), len(self._table) // 4):
                self._rehash(len(self._table) // 4)
                continue
            some, missing = missing[:room], missing[room:]
            new = self._add(some, codes, given, rows)
            added += new
            if len(missing) and 2 * sum(map(len, new)) < len(some):
                # Keys repeat. Those of the rest may be there by now, however many records each of them has.
                rows[missing], missing = self._probed(codes, given, missing)
        return rows, added

    def _found(self, codes: Array, given: list[Any]) -> tuple[IntArray, IntArray]:
        """Return the row of each key, or -1, and where the keys are that have none."""
        rows, missing = self._probed(codes, None, None)
        if self._codes is None:
            # By their hashes alone so far. Now the keys are compared, and those that another key hid are looked up again.
            there = np.flatnonzero(rows >= 0)
            hidden = there[~self._equal(rows[there], given, there)]
            if len(hidden):
                rows[hidden], more = self._probed(codes, given, hidden)
                missing = np.sort(np.concatenate([missing, more]))
        return rows, missing

    def _probed(self, codes: Array, given: list[Any] | None, places: IntArray | None) -> tuple[IntArray, IntArray]:
        """Return the rows with these codes (those at these places), or -1, and the places that have none. With `given` the
        keys are compared as well."""
        table, mask = self._table, len(self._table) - 1
        at = self._first_places(codes if places is None else codes[places])
        rows = table.take(at).astype(np.int64)
        left = np.flatnonzero(~self._same(rows, codes, given, places))
        missing: list[IntArray] = []
        looked, at = rows[left], at[left]
        while len(left):
            is_free = looked == _FREE
            if is_free.any():
                rows[left[is_free]] = -1
                missing.append(left[is_free])
                left, at = left[~is_free], at[~is_free]
            at = (at + 1) & mask
            looked = table.take(at).astype(np.int64)
            hit = self._same(looked, codes, given, left if places is None else places[left])
            rows[left[hit]] = looked[hit]
            left, at, looked = left[~hit], at[~hit], looked[~hit]
        found = missing[0] if len(missing) == 1 else np.sort(np.concatenate(missing)) if missing else _NO_ROWS
        return rows, found if places is None else places[found]

    def _add(self, left: IntArray, codes: Array, given: list[Any], rows: IntArray) -> list[IntArray]:
        """Add keys that are not there, and set their `rows`. A key may come several times. There is room for all."""
        table, mask = self._table, len(self._table) - 1
        added: list[IntArray] = []
        at = self._first_places(codes[left])
        while len(left):
            looked = table.take(at).astype(np.int64)
            free = np.flatnonzero(looked == _FREE)
            if len(free):
                claims = (_CLAIMED - free).astype(np.int32)
                table[at[free]] = claims
                won = free[table.take(at[free]) == claims]
                new = self._new_rows(len(won))
                self._put(new, codes, given, left[won])
                table[at[won]] = new
                self._taken += len(won)
                self.count += len(won)
                added.append(new)
                looked = table.take(at).astype(np.int64)
            hit = self._same(looked, codes, given, left)
            rows[left[hit]] = looked[hit]
            left, at = left[~hit], (at[~hit] + 1) & mask
        return added

    def _same(self, rows: IntArray, codes: Array, given: list[Any] | None, places: IntArray | None) -> Array:
        """Return whether these rows have the codes at these places (all places if None), and the keys if these are `given`.
        Below 0 there is no row."""
        mine = self._hashes if self._codes is None else self._codes.values
        if not len(mine):
            return np.zeros(len(rows), bool)
        same: Array = mine.take(rows, mode="clip") == (codes if places is None else codes[places])
        same &= rows >= 0
        if self._codes is None and given is not None:
            hits = np.flatnonzero(same)
            same[hits] = self._equal(rows[hits], given, hits if places is None else places[hits])
        return same

    def _equal(self, rows: IntArray, given: list[Any], places: IntArray) -> Array:
        """Return whether these rows have the keys at these places."""
        same = np.ones(len(rows), bool)
        if len(rows):
            for store, each in zip(self._stores, given, strict=True):
                same &= store.equal(rows, each, places)
        return same

    # Rows and places.

    def _put(self, rows: IntArray, codes: Array, given: list[Any], places: IntArray) -> None:
        for store, each in zip(self._stores, given, strict=True):
            store.put(rows, each, places)
        if self._codes is None:
            hashes = grown(self._hashes, len(self._hashes), int(rows.max()) + 1)
            hashes[rows] = codes[places]
            self._hashes = hashes

    def _new_rows(self, count: int) -> IntArray:
        """Return rows that no key has: freed ones first."""
        parts: list[IntArray] = []
        while count and self._reusable:
            rows = self._reusable.pop()
            if len(rows) > count:
                self._reusable.append(rows[:-count])
                rows = rows[-count:]
            parts.append(rows)
            count -= len(rows)
        if count:
            parts.append(np.arange(self.top, self.top + count))
            self.top += count
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _codes_of(self, rows: IntArray) -> Array:
        codes: Array = self._hashes[rows] if self._codes is None else self._codes.values[rows]
        return codes

    def _first_places(self, codes: Array) -> IntArray:
        words = codes.astype(np.int64, copy=False).view(np.uint64)
        places: IntArray = ((words * _FACTOR) >> np.uint64(64 - self._bits)).view(np.int64)
        return places

    def _rehash(self, room: int = 0) -> None:
        """Make the table again without the places of removed keys, with room for this many new keys."""
        old = self._table
        rows = old[old >= 0].astype(np.int64)
        if self.top == self.count:  # after `renumber` the numbers in the table mean nothing
            rows = np.arange(self.top)
            rows = rows[rows != self._null_row]
        self._bits = max(_MIN_BITS, (2 * (len(rows) + room) - 1).bit_length())
        self._table = table = np.full(1 << self._bits, _FREE, np.int32)
        self._taken = len(rows)
        mask = len(table) - 1
        at = self._first_places(self._codes_of(rows))
        while len(rows):
            free = table.take(at) == _FREE
            table[at[free]] = rows[free]
            lost = table.take(at) != rows
            rows, at = rows[lost], (at[lost] + 1) & mask
