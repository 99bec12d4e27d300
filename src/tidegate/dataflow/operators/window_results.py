"""What is made of the records of a window, when it is complete: the results of a function, or of a join.

An operator (record_windows.py) hands over the records of some keys at a time, all of one window: a `Group` for each of its
inputs. Records are in the order of the keys, and within a key in the order in which they arrived.

Joins work on whole columns, in pieces of bounded size. Functions are called once for each key.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa

from tidegate.dataflow.aggregates.base import BoolArray, IntArray
from tidegate.dataflow.operators.returned import taker
from tidegate.dataflow.operators.user_code import RAISED, blame, fit
from tidegate.errors import SchemaError
from tidegate.state.columns import key_list
from tidegate.types import ddl_of, rows_of

PAIRS = 65_536
"""About how many rows of a join are made at a time."""


class KeyedWindow(NamedTuple):
    """The window of which a function gets the records. `key` is the key's value, a tuple if it has several columns, or None
    without a key. `start` and `end` are of the time column's type: numbers for a long, otherwise datetimes. They are None
    for a window of a number of records."""

    key: Any
    start: Any
    end: Any


@dataclass(frozen=True, slots=True)
class Group:
    """Records of some keys, and how many each key has."""

    records: pa.RecordBatch
    counts: IntArray

    @property
    def starts(self) -> IntArray:
        found: IntArray = np.cumsum(self.counts) - self.counts
        return found


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of the windows, by key: of the time column's type, or null."""

    start: pa.Array
    end: pa.Array


class WindowResults(ABC):
    """Makes results of the records of windows."""

    calls_functions: ClassVar[bool]
    """Whether a function of the user's is called for each key, so that only few keys are to be given at a time."""

    @abstractmethod
    def of(
        self, operator: str, schema: pa.Schema, keys: Sequence[pa.Array], bounds: Bounds, groups: Sequence[Group]
    ) -> Iterator[pa.RecordBatch]:
        """Return the results of these keys. Without a key column there are no `keys`. For joins, no key comes twice."""

    @property
    @abstractmethod
    def text(self) -> str:
        """What `explain` shows."""


@dataclass(frozen=True, slots=True)
class CallFunction(WindowResults):
    """Calls a function with each key's window and its records: a batch for each input, or a list of named tuples."""

    calls_functions: ClassVar[bool] = True
    function: Callable[..., Any]
    as_rows: bool

    def of(
        self, operator: str, schema: pa.Schema, keys: Sequence[pa.Array], bounds: Bounds, groups: Sequence[Group]
    ) -> Iterator[pa.RecordBatch]:
        count = len(groups[0].counts)
        values = [key_list(column) for column in keys]
        of_keys: Iterable[Any] = (
            values[0] if len(values) == 1 else zip(*values, strict=True) if values else repeat(None, count)
        )
        of_windows = bounds.start.to_pylist(), bounds.end.to_pylist()
        inputs = [self._slices(group) for group in groups]
        rows: list[Any] = []
        take = taker(self.function, rows)
        for key, start, end, *records in zip(of_keys, *of_windows, *inputs, strict=True):
            try:
                given = self.function(KeyedWindow(key, start, end), *records)
                if given is None:
                    continue
                if not isinstance(given, pa.RecordBatch | pa.Table):
                    take(given)
                    continue
            except RAISED as error:
                blame(operator, error, at=f"the window from {start} to {end} of key {key!r}")
            if rows:
                yield from fit(operator, rows, schema)
                rows.clear()
            yield from _fitting(operator, given, schema)
        if rows:
            yield from fit(operator, rows, schema)

    def _slices(self, group: Group) -> Iterator[Any]:
        places = zip(group.starts.tolist(), group.counts.tolist(), strict=True)
        if not self.as_rows:
            return (group.records.slice(start, count) for start, count in places)
        records = list(rows_of(group.records))
        return (records[start : start + count] for start, count in places)

    @property
    def text(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)


@dataclass(frozen=True, slots=True)
class JoinRecords(WindowResults):
    """Joins the records of each key; null equals nothing. A row has the columns of both sides, with a part of the key once
    if it has one name, and the bounds. `key_columns` has the index of such a part of the key by its name."""

    calls_functions: ClassVar[bool] = False
    how: str
    left: tuple[str, ...]
    right: tuple[str, ...]
    key_columns: tuple[tuple[str, int], ...]

    def of(
        self, operator: str, schema: pa.Schema, keys: Sequence[pa.Array], bounds: Bounds, groups: Sequence[Group]
    ) -> Iterator[pa.RecordBatch]:
        left, right = groups
        of_left = np.repeat(np.arange(len(left.counts)), left.counts)
        has_both = (left.counts > 0) & (right.counts > 0)
        for part in keys if any(part.null_count for part in keys) else ():
            has_both &= np.asarray(part.is_valid())  # null equals nothing
        matches = np.where(has_both, right.counts, 0)[of_left]
        if self.how in ("semi", "anti"):
            wanted = np.flatnonzero((matches > 0) == (self.how == "semi"))
            pieces: Iterable[tuple[IntArray, IntArray, IntArray]] = [(of_left[wanted], wanted, wanted)]
        else:
            pieces = self._pairs(right, of_left, matches, has_both)
        for of_keys, of_lefts, of_rights in pieces:
            if len(of_keys):
                yield self._rows(schema, keys, bounds, groups, (of_keys, of_lefts, of_rights))

    def _pairs(
        self, right: Group, of_left: IntArray, matches: IntArray, has_both: BoolArray
    ) -> Iterator[tuple[IntArray, IntArray, IntArray]]:
        """Yield keys, records of the left input and records of the right one, or -1."""
        keeps_left, keeps_right = self.how in ("left", "full"), self.how in ("right", "full")
        sizes = np.maximum(matches, 1) if keeps_left else matches
        ends = np.cumsum(sizes)
        first = 0
        while first < len(sizes):
            done = int(ends[first - 1]) if first else 0
            last = max(first + 1, int(np.searchsorted(ends, done + PAIRS, side="right")))
            some = np.arange(first, last)
            lefts = np.repeat(some, sizes[first:last])
            places = np.arange(len(lefts)) - np.repeat(ends[first:last] - sizes[first:last] - done, sizes[first:last])
            rights = np.where(matches[lefts] > 0, right.starts[of_left[lefts]] + places, -1)
            yield of_left[lefts], lefts, rights
            first = last
        if keeps_right:
            of_right = np.repeat(np.arange(len(right.counts)), right.counts)
            alone = np.flatnonzero(~has_both[of_right])
            for start in range(0, len(alone), PAIRS):
                some = alone[start : start + PAIRS]
                yield of_right[some], np.full(len(some), -1, np.int64), some

    def _rows(
        self,
        schema: pa.Schema,
        keys: Sequence[pa.Array],
        bounds: Bounds,
        groups: Sequence[Group],
        numbers: tuple[IntArray, IntArray, IntArray],
    ) -> pa.RecordBatch:
        of_keys, *of_inputs = numbers
        parts = dict(self.key_columns)
        columns = {name: keys[part].take(pa.array(of_keys)) for name, part in parts.items()}
        for group, names, places in zip(groups, (self.left, self.right), of_inputs, strict=True):
            index = pa.array(places, mask=places < 0)
            columns |= {name: group.records.column(name).take(index) for name in names if name not in parts}
        own = [columns[field.name] for field in list(schema)[:-2]]
        ends = [each.take(pa.array(of_keys)) for each in (bounds.start, bounds.end)]
        return pa.RecordBatch.from_arrays([*own, *ends], schema=schema)

    @property
    def text(self) -> str:
        return f"{self.how} join"


def _fitting(operator: str, given: pa.RecordBatch | pa.Table, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    if not given.schema.equals(schema):
        raise SchemaError(
            f"operator {operator!r} is declared with returns={ddl_of(schema)!r}, and its function gave "
            f"{ddl_of(given.schema)!r}. Give record batches of the declared schema (RecordBatch.cast may help), or change "
            f"returns=."
        )
    batches = given.to_batches() if isinstance(given, pa.Table) else [given]
    yield from (batch for batch in batches if batch.num_rows)
