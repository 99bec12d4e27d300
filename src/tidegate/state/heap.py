"""The heap backend: keyed state in the slot's own memory, in Python dictionaries.

The tables (heap_layers.py) hold the state and freeze it, behind cells (heap_cells.py). Here a background thread reads a
frozen version and turns the keys that changed since the last freeze into sections of Arrow rows, cut by key-group
(cutting.py).

Entries don't hold their key-group: it is computed when a snapshot is written (docs/adr/004).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import filterfalse, islice, repeat, starmap
from operator import is_
from typing import Any, ClassVar, TypeVar

import pyarrow as pa

from tidegate.errors import SchemaError
from tidegate.state.backend import CellBackend
from tidegate.state.cells import GONE
from tidegate.state.column_freezing import FrozenColumns
from tidegate.state.column_table import ColumnState
from tidegate.state.columns import column_of, held_list, key_list, keys_to_arrow
from tidegate.state.cutting import REST, Pace, cut_by_group
from tidegate.state.heap_cells import (
    HeapEntries,
    HeapExpiringThings,
    HeapExpiringValue,
    HeapItems,
    HeapRow,
    HeapThings,
    HeapTimers,
    HeapValue,
    HeapValues,
)
from tidegate.state.heap_layers import MAX_MISSING_SHARE, MAX_REUSED_ENTRIES, HeapTable, nearly_covers
from tidegate.state.record_table import RecordState
from tidegate.state.sections import Section, StateInfo, deleted_schema
from tidegate.state.shapes import Row, Shape, Value
from tidegate.state.vectors import VectorField
from tidegate.types import ddl_of, shown
from tidegate.types.limits import ColumnTooLarge

T = TypeVar("T")


class HeapBackend(CellBackend):
    """The keyed states of one operator in one subtask."""

    fast_shapes: ClassVar[Mapping[type[Shape], type[Shape]]] = {Value: HeapValue, Row: HeapRow}
    expiring_shapes: ClassVar[Mapping[type[Shape], type[Shape]]] = {Value: HeapExpiringValue}
    expiring_things = HeapExpiringThings

    def make_cells(self, info: StateInfo, *, as_tuples: bool, in_place: bool) -> HeapTable:
        kinds: dict[str, type[HeapTable]] = {"list": HeapItems, "map": HeapEntries, "timers": HeapTimers}
        return kinds.get(info.shape, HeapThings if in_place else HeapValues)(info, as_tuples=as_tuples)

    def make_columns(self, info: StateInfo, fields: Sequence[VectorField]) -> ColumnState:
        return ColumnState(info, fields)

    def make_records(self, info: StateInfo, columns: Sequence[pa.Field], fields: Sequence[VectorField]) -> RecordState:
        return RecordState(info, columns, fields)

    def load_rows(self, state: str, rows: pa.RecordBatch, *, known: bool) -> None:
        if state in self.columns:
            self.columns[state].load(rows, known=known)
            return
        table = self.cells[state]
        table.load(key_list(rows.column("key")), held_list(rows.column("value"), as_tuples=table.as_tuples), known=known)

    def all_rows(self, state: str) -> Iterator[pa.RecordBatch]:
        if state in self.columns:
            yield from self.columns[state].rows()
            return
        table = self.cells[state]
        held = table.held()
        yield from _batches(table, list(held), list(held.values()))

    def close(self) -> None:
        """The memory goes with the object."""

    def tidy(self, budget: int) -> None:
        for table in self.cells.values():
            table.tidy(budget)
        for state in self.columns.values():
            state.tidy()

    def freeze_rows(self) -> FrozenHeap:
        """Return what changed since the last freeze, in a time that doesn't depend on the size of the state."""
        return FrozenHeap(
            list(self.cells.values()), [state.freeze() for state in self.columns.values()], self.key_group_count
        )


class FrozenHeap:
    """A `FrozenState`."""

    def __init__(self, tables: Sequence[HeapTable], columns: Sequence[FrozenColumns], key_group_count: int) -> None:
        self.states = (*(table.info for table in tables), *(each.info for each in columns))
        self._parts: list[_FrozenLayer | FrozenColumns] = [*map(_FrozenLayer, tables), *columns]
        self._key_group_count = key_group_count

    @property
    def complete(self) -> bool:
        return all(part.complete for part in self._parts)

    def sections(self) -> Iterator[Section]:
        for part in self._parts:
            part.take()
        for part in self._parts:
            for deleted in (False, True):
                yield from cut_by_group(
                    part.info.name, _emptying(part.rows[deleted]), self._key_group_count, deleted=deleted
                )

    def release(self) -> None:
        for part in self._parts:
            part.release()


class _FrozenLayer:
    """One table's part of a frozen version."""

    def __init__(self, table: HeapTable) -> None:
        self.info = table.info
        self.table = table
        self.layer = table.freeze()
        self.complete = False
        self.rows: dict[bool, list[pa.RecordBatch]] = {False: [], True: []}  # set, and deleted

    def take(self) -> None:
        """Turn the entries into rows."""
        layer, changes = self.layer, self.layer.changes
        pace = Pace(rest_factor=REST)
        all_keys, all_values = iter(changes), iter(changes.values())
        set_count = 0
        while keys := list(islice(all_keys, pace.entries)):
            values = list(islice(all_values, len(keys)))
            if layer.may_hold_gone:
                keys, values = self._without_gone(keys, values)
            if keys:
                self.rows[False] += _batches(self.table, keys, values)
                set_count += len(keys)
            pace.rest_if_due()
        if layer.below is None:
            self.complete = set_count == layer.entry_count
        else:
            layer.missing = _missing(changes, layer.below, pace)
            self.complete = layer.missing is not None
            if layer.missing:
                # Writing everything is cheaper than merging nearly everything with older files.
                self.rows[False] += _batches(self.table, list(layer.missing), list(layer.missing.values()))
        layer.may_hold_gone = bool(self.rows[True])  # a key that was deleted may have been set again
        layer.read = True
        if layer.is_private:
            while len(changes) > MAX_REUSED_ENTRIES:  # to drop all at once would be one long step
                deque(starmap(changes.popitem, repeat((), pace.entries)), maxlen=0)
                pace.rest_if_due()
            changes.clear()

    def release(self) -> None:
        self.layer.read = True

    def _without_gone(self, keys: list[Any], values: list[Any]) -> tuple[list[Any], list[Any]]:
        if any(map(is_, values, repeat(GONE))):
            gone = [key for key, value in zip(keys, values, strict=True) if value is GONE]
            self.rows[True].append(
                pa.RecordBatch.from_arrays(
                    [keys_to_arrow(gone, self.info.schema.field("key").type)], schema=deleted_schema(self.info.schema)
                )
            )
            keys = [key for key, value in zip(keys, values, strict=True) if value is not GONE]
            values = [value for value in values if value is not GONE]
        return keys, values


def _missing(changes: dict[Any, Any], below: dict[Any, Any], pace: Pace) -> dict[Any, Any] | None:
    """Return the entries that only `below` has; None if there are many. `below` doesn't change until the layer was read."""
    if not nearly_covers(changes, below):
        return None
    missing: dict[Any, Any] = {}
    all_keys = iter(below)
    while keys := list(islice(all_keys, pace.entries)):
        missing |= {key: below[key] for key in filterfalse(changes.__contains__, keys)}
        if len(missing) > MAX_MISSING_SHARE * len(below):
            return None
        pace.rest_if_due()
    return missing


def _batches(table: HeapTable, keys: list[Any], values: list[Any]) -> Iterator[pa.RecordBatch]:
    """Return entries as rows: one batch, or several if they have too many bytes for one."""
    try:
        batch = _batch(table, keys, values)
    except ColumnTooLarge as error:
        if len(keys) <= 1:
            raise ColumnTooLarge(f"state {table.info.name!r}, key {shown(keys[0])}: {error}") from error
        half = len(keys) // 2
        yield from _batches(table, keys[:half], values[:half])
        yield from _batches(table, keys[half:], values[half:])
    else:
        yield batch


def _batch(table: HeapTable, keys: list[Any], values: list[Any]) -> pa.RecordBatch:
    schema = table.info.schema
    value_type = schema.field("value").type
    try:
        columns = [
            keys_to_arrow(keys, schema.field("key").type),
            column_of(values, value_type, as_tuples=table.as_tuples),
        ]
    except ColumnTooLarge:
        raise
    except SchemaError as error:
        raise SchemaError(
            f"state {table.info.name!r} of type {ddl_of(value_type)} holds a value that can't be written: {error}. "
            f"Change the function or the declaration"
        ) from error
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _emptying(things: list[T]) -> Iterator[T]:
    """Yield the things, and hold none of them after that."""
    things.reverse()
    while things:
        yield things.pop()
