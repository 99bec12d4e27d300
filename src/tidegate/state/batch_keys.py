"""The keys of a batch, each once: what a function on columns looks its state up with.

A batch has records of one key in several places, and its state is read and written once for each key. `Keys` has the
distinct keys, and says for each record which of them is its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.errors import JobError
from tidegate.state.key_index import KeyIndex

Indices: TypeAlias = npt.NDArray[np.int64]


class Keys:
    """The distinct keys of a batch, in the order of their first records: `ctx.keys`.

    `keys.of[i]` is the index of record i's key, so `np.bincount(keys.of)` counts the records of each key, and
    `values[keys.of]` brings values by key to the records.
    """

    __slots__ = ("_of", "columns")

    def __init__(self, columns: pa.RecordBatch, of: Indices) -> None:
        self.columns = columns
        """The key's columns, with a row for each key."""
        self._of = of

    @property
    def of(self) -> Indices:
        """For each record, the index of its key; -1 if `where` has left the key out."""
        return self._of

    @property
    def first(self) -> Indices:
        """For each key, the index of its first record."""
        here = np.flatnonzero(self._of >= 0)[::-1]
        first = np.empty(len(self), np.int64)
        first[self._of[here]] = here  # of an index that repeats, the last value stays
        return first

    @property
    def last(self) -> Indices:
        """For each key, the index of its last record."""
        here = np.flatnonzero(self._of >= 0)
        last = np.empty(len(self), np.int64)
        last[self._of[here]] = here
        return last

    @property
    def nth(self) -> Indices:
        """For each record, how many records of its key are before it in the batch."""
        order = np.argsort(self._of, kind="stable")
        return places_in_groups(self._of[order])[inverse(order)]

    def where(self, mask: Any) -> Keys:
        """Return the keys for which the mask (a numpy or Arrow array of booleans) is true."""
        keep = np.asarray(mask, bool)
        if keep.shape != (len(self),):
            raise JobError(f"where() takes a mask with a value for each of the {len(self)} keys, and got {keep.size} values")
        number = np.where(keep, np.cumsum(keep) - 1, -1)
        number = np.append(number, -1)  # for records whose key was left out before
        return Keys(self.columns.filter(pa.array(keep)), number[self._of])

    def __len__(self) -> int:
        return int(self.columns.num_rows)

    def __repr__(self) -> str:
        return f"<{len(self)} keys of {len(self._of)} records>"


def keys_of(names: Sequence[str], columns: Sequence[pa.Array]) -> Keys:
    """Return the distinct keys of records that have these key columns."""
    plain = [column.dictionary_decode() if pa.types.is_dictionary(column.type) else column for column in columns]
    of = _numbers(plain)
    distinct = int(of.max()) + 1 if len(of) else 0
    first = np.empty(distinct, np.int64)
    first[of[::-1]] = np.arange(len(of) - 1, -1, -1)
    taken = pa.array(first)
    return Keys(pa.RecordBatch.from_arrays([column.take(taken) for column in plain], names=list(names)), of)


def places_in_groups(groups: Indices) -> Indices:
    """Return for each of some sorted numbers how many equal ones are before it."""
    numbers = np.arange(len(groups))
    starts = np.zeros(len(groups), np.int64)
    begins = np.flatnonzero(np.diff(groups)) + 1
    starts[begins] = begins
    return numbers - np.maximum.accumulate(starts) if len(groups) else starts


def inverse(order: Indices) -> Indices:
    """Return where each index is in an order."""
    back = np.empty(len(order), np.int64)
    back[order] = np.arange(len(order))
    return back


def _numbers(columns: Sequence[pa.Array]) -> Indices:
    """Number the distinct keys in the order of their first records, and return each record's number."""
    if any(column.type.num_fields for column in columns):
        return _numbers_by_index(columns)
    numbers = _encoded(columns[0])
    for column in columns[1:]:
        # Encoded again after each column, so that a product of two numbers fits.
        numbers = _encoded(pa.array(numbers * (len(column) + 1) + _encoded(column)))
    return numbers


def _encoded(column: pa.Array) -> Indices:
    if pa.types.is_floating(column.type):
        # Zero has one form, and so has NaN: as everywhere in keys (columns.py).
        values = column.to_numpy(zero_copy_only=False) + 0.0
        values[np.isnan(values)] = np.nan
        column = pa.array(values, column.type, mask=column.is_null().to_numpy(zero_copy_only=False))
    return np.asarray(column.dictionary_encode(null_encoding="encode").indices, np.int64)


def _numbers_by_index(columns: Sequence[pa.Array]) -> Indices:
    """Do the same for structs and lists, which Arrow doesn't encode."""
    kinds = [column.type for column in columns]
    key_type = kinds[0] if len(kinds) == 1 else pa.struct([pa.field(str(place), kind) for place, kind in enumerate(kinds)])
    rows = KeyIndex(key_type).rows_of(columns)[0]
    return _encoded(pa.array(rows))
