"""The heap backend: keyed state in the slot's own memory, in Python dictionaries.

The tables (heap_layers.py) hold the state and freeze it; here a frozen version is read by a background thread and becomes
sections of Arrow rows, cut by key-group (cutting.py), of the keys that changed since the last freeze.

No key-group is kept with an entry: it is computed when a snapshot is written (docs/adr/004).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import filterfalse, islice, repeat, starmap
from operator import is_, itemgetter
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import SchemaError
from tidegate.state.cutting import REST, Pace, cut_by_group
from tidegate.state.descriptors import Descriptor
from tidegate.state.heap_layers import (
    GONE,
    MAX_KEPT_ENTRIES,
    MAX_MISSING_SHARE,
    NO_KEY,
    Cursor,
    HeapTable,
    TimedEntries,
    nearly_covers,
)
from tidegate.state.heap_tables import HeapRow, make_table
from tidegate.state.heap_ttl import TimedTable
from tidegate.state.heap_ttl_tables import make_timed_table
from tidegate.state.sections import Section, StateInfo, deleted_schema
from tidegate.state.ttl import EXPIRES, expires_list, loaded
from tidegate.types import ddl_of, from_list, to_list

__all__ = ["NO_KEY", "Cursor", "FrozenHeap", "HeapBackend", "held_as_it_is", "key_list", "keys_to_arrow"]

T = TypeVar("T")


class HeapBackend:
    """The keyed states of one operator in one subtask. See `KeyedBackend` (dataflow/operators/base.py)."""

    def __init__(self, *, key_type: pa.DataType, key_group_count: int, now_ms: Callable[[], int] | None = None) -> None:
        """`now_ms` is the slot's clock. Only state with a ttl needs it."""
        self.cursor = Cursor()
        self._key_type = key_type
        self._key_group_count = key_group_count
        self._now_ms = now_ms
        self._tables: dict[str, HeapTable] = {}
        self._timed: list[TimedTable] = []

    def table(self, descriptor: Descriptor) -> HeapTable:
        """The state object for a descriptor. A name stands for one state."""
        info = descriptor.info(self._key_type)
        assert info.name not in self._tables, f"two states are named {info.name!r}"
        if descriptor.ttl is None:
            table = self._tables[info.name] = make_table(descriptor, info, self.cursor)
            return table
        assert self._now_ms is not None, f"state {info.name!r} has a ttl, and the backend no clock"
        timed = self._tables[info.name] = make_timed_table(descriptor, info, self.cursor, self._now_ms)
        self._timed.append(timed)
        return timed

    def load(self, state: str, rows: pa.RecordBatch, *, known: bool = False) -> None:
        """Takes rows of a snapshot in. Before the first record. `known`: what is frozen next builds on that snapshot."""
        table = self._tables[state]
        keys, expires = key_list(rows.column("key")), expires_list(rows)
        values = _tuples(rows.column("value")) if isinstance(table, HeapRow) else to_list(rows.column("value"))
        if isinstance(table, TimedTable):
            table.load_timed(keys, values, expires, known=known)
            return
        if expires is not None:
            assert self._now_ms is not None and not known, "the state had a ttl when the snapshot was written"
            left, _ = loaded(keys, values, expires, shape=table.info.shape, ttl=None, now_ms=self._now_ms())
            keys, values = [key for key, _, _ in left], [value for _, value, _ in left]
        table.load(keys, values, known=known)

    def begin_batch(self, keys: Sequence[Any]) -> None:
        """Everything is at hand."""

    def end_batch(self) -> None:
        """Nothing is written elsewhere."""

    def rows(self, state: str) -> Iterator[pa.RecordBatch]:
        table = self._tables[state]
        timed = table.written_at(table.now_ms()) if isinstance(table, TimedTable) else None
        entries = table.entries()
        yield _batch(table.info, list(entries), list(entries.values()), timed)

    def close(self) -> None:
        """The memory goes with the object."""

    def maintain(self, budget: int) -> None:
        for table in self._tables.values():
            table.tidy(budget)
        for timed in self._timed:
            timed.sweep(budget)

    def freeze(self) -> FrozenHeap:
        """What changed since the last freeze. Costs the same whatever the size of the state."""
        return FrozenHeap(list(self._tables.values()), self._key_group_count)


class FrozenHeap:
    """A `FrozenState`."""

    def __init__(self, tables: Sequence[HeapTable], key_group_count: int) -> None:
        self.states = tuple(table.info for table in tables)
        self._layers = [_FrozenLayer(table) for table in tables]
        self._key_group_count = key_group_count

    @property
    def complete(self) -> bool:
        return all(layer.complete for layer in self._layers)

    def sections(self) -> Iterator[Section]:
        for layer in self._layers:
            layer.take()
        for layer in self._layers:
            for deleted in (False, True):
                yield from cut_by_group(
                    layer.info.name, _emptying(layer.rows[deleted]), self._key_group_count, deleted=deleted
                )

    def release(self) -> None:
        for layer in self._layers:
            layer.layer.read = True


class _FrozenLayer:
    """One table's part of a frozen version."""

    def __init__(self, table: HeapTable) -> None:
        self.info = table.info
        self.layer = table.freeze()
        self.complete = False
        self.rows: dict[bool, list[pa.RecordBatch]] = {False: [], True: []}  # set, and deleted

    def take(self) -> None:
        """Turns the entries into rows."""
        layer, changes = self.layer, self.layer.changes
        pace = Pace(rest_factor=REST)
        all_keys, all_values = iter(changes), iter(changes.values())
        set_count = expired_count = 0
        while keys := list(islice(all_keys, pace.entries)):
            values = list(islice(all_values, len(keys)))
            expired = 0
            if layer.timed is not None:
                values, expired = layer.timed.left(values)
                expired_count += expired
            if expired or layer.may_hold_gone:
                keys, values = self._without_gone(keys, values)
            if keys:
                self.rows[False].append(_batch(self.info, keys, values, layer.timed))
                set_count += len(keys)
            pace.rest_if_due()
        if layer.below is None:
            self.complete = set_count + expired_count == layer.entry_count
        else:
            layer.missing = _missing(changes, layer.below, pace)
            self.complete = layer.missing is not None
            if layer.missing:
                # To write everything is cheaper than to merge nearly everything with older files.
                self.rows[False].append(_batch(self.info, list(layer.missing), list(layer.missing.values())))
        layer.may_hold_gone = bool(self.rows[True])  # a key that was deleted may have been set again
        layer.read = True
        if layer.is_private:
            while len(changes) > MAX_KEPT_ENTRIES:  # to drop it whole would be one long step
                deque(starmap(changes.popitem, repeat((), pace.entries)), maxlen=0)
                pace.rest_if_due()
            changes.clear()

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
    """What is only below; None where that is much. Nobody writes to what is below until the layer was read."""
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


def _batch(info: StateInfo, keys: list[Any], values: list[Any], timed: TimedEntries | None = None) -> pa.RecordBatch:
    value_type = info.schema.field("value").type
    ends: list[list[Any]] = []
    if timed is not None:
        values, *ends = timed.columns(values)
    try:
        columns = [keys_to_arrow(keys, info.schema.field("key").type), _column(values, value_type)]
        columns += [from_list(each, info.schema.field(EXPIRES).type) for each in ends]
    except SchemaError as error:
        raise SchemaError(
            f"state {info.name!r} of type {ddl_of(value_type)} holds a value that can't be written: {error}"
        ) from error
    return pa.RecordBatch.from_arrays(columns, schema=info.schema)


def _column(values: Sequence[Any], arrow: pa.DataType) -> pa.Array:
    """As `from_list`, for what is held in its form already (values.py). No bool can hide among such numbers, and to look for
    one would let go of the interpreter's lock several times for each chunk."""
    code = _NUMBERS.get(arrow.id)
    if code is not None:
        try:
            return pa.Array.from_buffers(arrow, len(values), [None, pa.py_buffer(array(code, values))])
        except (TypeError, OverflowError):
            pass  # there is a null, or one is too large
    if pa.types.is_struct(arrow) and arrow.num_fields and not any(field.type.num_fields for field in arrow):
        # Where there are lists in it, an accumulator may have been changed in place: `from_list` looks at everything.
        try:
            columns = (
                list(map(list, zip(*values, strict=True)))
                if values and type(values[0]) is tuple
                # HeapRow's
                else [list(map(itemgetter(field.name), values)) for field in arrow]
            )
        except TypeError:
            return from_list(values, arrow)  # there is a null
        fields = list(arrow)
        return pa.StructArray.from_arrays(
            [_column(column, field.type) for column, field in zip(columns, fields, strict=True)], fields=fields
        )
    return from_list(values, arrow)


def _tuples(column: pa.Array) -> list[Any]:
    return list(zip(*map(to_list, column.flatten()), strict=True))


# The codes of Python's arrays.
_NUMBERS = {pa.int8().id: "b", pa.int16().id: "h", pa.int32().id: "i", pa.int64().id: "q", pa.float64().id: "d"}


def _emptying(things: list[T]) -> Iterator[T]:
    """Lets go of what was used."""
    things.reverse()
    while things:
        yield things.pop()


def key_list(column: pa.Array) -> list[Any]:
    """Keys as the tables hold them: hashable, and equal where they are one key. A struct and an array are tuples (so is
    a key of several columns); NaN and zero have one form each."""
    kind = column.type
    if pa.types.is_struct(kind):
        return list(zip(*map(key_list, column.flatten()), strict=True))
    if pa.types.is_floating(kind):
        return [_NAN if key != key else key + 0.0 if key is not None else None for key in to_list(column)]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        items = iter(key_list(column.flatten()))
        return [
            None if length is None else tuple(islice(items, length)) for length in pc.list_value_length(column).to_pylist()
        ]
    if pa.types.is_dictionary(kind):
        return key_list(column.dictionary_decode())
    return to_list(column)


def held_as_it_is(kind: pa.DataType) -> bool:
    """Whether `key_list` is `to_list` for columns of this type."""
    return not (kind.num_fields or pa.types.is_floating(kind) or pa.types.is_dictionary(kind))


_NAN = float("nan")


def keys_to_arrow(keys: Sequence[Any], key_type: pa.DataType) -> pa.Array:
    """The way back from `key_list`."""
    if not pa.types.is_struct(key_type):
        return _column(keys, key_type)
    fields = list(key_type)
    columns = [keys_to_arrow(column, field.type) for column, field in zip(zip(*keys, strict=True), fields, strict=True)]
    return pa.StructArray.from_arrays(columns, fields=fields)
