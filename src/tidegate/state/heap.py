"""The heap backend: keyed state in dictionaries, frozen in O(1).

Theory of operation. A table is a stack of dictionaries: `live` takes every write; `frozen` are layers that a snapshot
was taken of (newest first, as a rule none or one); `base` holds the rest. A read looks at live, then frozen, then base. A
freeze pushes `live` onto `frozen` and starts an empty one: O(1), whatever the size of the state (the paper, section 4.2,
copies the table array and then shares chains; the layers are our copy-on-write). A background thread then reads frozen and
base, which nobody writes to meanwhile. When it is done, `merge` moves the frozen layers down into base in small steps between
batches, so that no step of the hot loop is long.

Invariants:
- only `live` is written by user functions; containers (lists, maps) are copied into `live` before they are changed;
- while `readers > 0`, frozen layers and base do not change;
- a deleted key is `GONE` in the layers above base, and absent from base.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.hashing import hash_columns
from tidegate.keygroups import groups_of
from tidegate.state.descriptors import Descriptor
from tidegate.state.sections import Section, StateInfo
from tidegate.types import from_list, to_list


class _Sentinel:
    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


UNSEEN: Any = _Sentinel("UNSEEN")
GONE: Any = _Sentinel("GONE")

# The writer gives the interpreter away after so many entries, for so long: the hot loop waits for at most one chunk.
WRITE_CHUNK_ENTRIES = 2048
WRITE_PAUSE_S = 0.0001


class Cursor:
    """The key that the user's function is at. One for all states of an operator."""

    __slots__ = ("key",)

    def __init__(self) -> None:
        self.key: Any = None


class HeapTable:
    """The layers of one state. Its subclasses add the methods that the user's function calls."""

    __slots__ = ("base", "copied", "cursor", "default", "descriptor", "frozen", "info", "live", "merging", "readers")

    def __init__(self, descriptor: Descriptor, info: StateInfo, cursor: Cursor) -> None:
        self.descriptor = descriptor
        self.info = info
        self.cursor = cursor
        self.default = descriptor.default
        self.copied = _copier(descriptor.item)
        self.live: dict[Any, Any] = {}
        self.frozen: tuple[dict[Any, Any], ...] = ()
        self.base: dict[Any, Any] = {}
        self.readers = 0
        self.merging: Iterator[tuple[Any, Any]] | None = None

    def below(self, key: Any) -> Any:
        """What the layers under `live` hold for the key, or GONE."""
        for layer in self.frozen:
            value = layer.get(key, UNSEEN)
            if value is not UNSEEN:
                return value
        return self.base.get(key, GONE)

    def clear(self) -> None:
        self.live[self.cursor.key] = GONE

    def freeze(self) -> tuple[dict[Any, Any], ...]:
        """The layers as they are now, newest first, base last. The caller releases them when it has read them."""
        if self.live:
            self.frozen = (self.live, *self.frozen)
            self.live = {}
        self.readers += 1
        return (*self.frozen, self.base)

    def release(self) -> None:
        assert self.readers > 0
        self.readers -= 1

    def merge(self, budget: int) -> int:
        """Moves up to `budget` entries of the oldest frozen layer into base; returns how much of the budget is left."""
        while budget > 0 and self.frozen and not self.readers:
            if self.merging is None:
                self.merging = iter(self.frozen[-1].items())
            base = self.base
            moved = 0
            for key, value in islice(self.merging, budget):
                moved += 1
                if value is GONE:
                    base.pop(key, None)
                else:
                    base[key] = value
            if moved < budget:
                self.frozen = self.frozen[:-1]
                self.merging = None
            budget -= moved + 1
        return budget

    def load(self, keys: Iterable[Any], values: Iterable[Any]) -> None:
        self.base.update(zip(keys, values, strict=True))

    def __len__(self) -> int:
        """The number of keys. It walks the layers: for tests and reports."""
        return sum(1 for _ in _visible((self.live, *self.frozen, self.base)))


class HeapValue(HeapTable):
    __slots__ = ()

    def get(self) -> Any:
        key = self.cursor.key
        value = self.live.get(key, UNSEEN)
        if value is UNSEEN:
            value = self.below(key)
        if value is GONE:
            return self.default
        return value

    def set(self, value: Any) -> None:
        self.live[self.cursor.key] = value


class HeapContainerValue(HeapValue):
    """A value that holds lists or dictionaries: what is handed out is a copy, so that changing it in place changes nothing
    that a snapshot is being written of."""

    __slots__ = ()

    def get(self) -> Any:
        assert self.copied is not None
        return self.copied(super().get())

    def set(self, value: Any) -> None:
        assert self.copied is not None
        super().set(self.copied(value))


class HeapReducing(HeapValue):
    __slots__ = ()

    def add(self, item: Any) -> None:
        key = self.cursor.key
        merged = self.live.get(key, UNSEEN)
        if merged is UNSEEN:
            merged = self.below(key)
        assert self.descriptor.add is not None
        self.live[key] = item if merged is GONE else self.descriptor.add(merged, item)


class HeapAggregating(HeapTable):
    __slots__ = ()

    def get(self) -> Any:
        key = self.cursor.key
        accumulator = self.live.get(key, UNSEEN)
        if accumulator is UNSEEN:
            accumulator = self.below(key)
        if accumulator is GONE:
            return None
        return accumulator if self.descriptor.result is None else self.descriptor.result(accumulator)

    def add(self, item: Any) -> None:
        key = self.cursor.key
        accumulator = self.live.get(key, UNSEEN)
        if accumulator is UNSEEN:
            accumulator = self.below(key)
            if accumulator is not GONE and self.copied is not None:
                accumulator = self.copied(accumulator)      # `add` may change it in place
        assert self.descriptor.add is not None and self.descriptor.create is not None
        self.live[key] = self.descriptor.add(self.descriptor.create() if accumulator is GONE else accumulator, item)


class _HeapContainer(HeapTable):
    """A list or dictionary for each key, copied into `live` before its first change after a freeze."""

    __slots__ = ()

    def _seen(self) -> Any:
        key = self.cursor.key
        held = self.live.get(key, UNSEEN)
        if held is UNSEEN:
            held = self.below(key)
        return () if held is GONE else held

    def _own(self, kind: type[list[Any]] | type[dict[Any, Any]]) -> Any:
        key = self.cursor.key
        held = self.live.get(key, UNSEEN)
        if held is UNSEEN:
            held = self.below(key)
            held = self.live[key] = kind() if held is GONE else kind(held)
        elif held is GONE:
            held = self.live[key] = kind()
        return held


class HeapList(_HeapContainer):
    __slots__ = ()

    def get(self) -> tuple[Any, ...]:
        return tuple(self._seen() if self.copied is None else map(self.copied, self._seen()))

    def add(self, item: Any) -> None:
        self._own(list).append(item)

    def extend(self, items: Iterable[Any]) -> None:
        self._own(list).extend(items)

    def replace(self, items: Iterable[Any]) -> None:
        self.live[self.cursor.key] = list(items) or GONE


class HeapMap(_HeapContainer):
    __slots__ = ()

    def get(self, item: Any, default: Any = None) -> Any:
        held = self._seen()
        value = held.get(item, default) if held else default
        return value if self.copied is None else self.copied(value)

    def put(self, item: Any, value: Any) -> None:
        self._own(dict)[item] = value

    def remove(self, item: Any) -> None:
        if item in self._seen():
            held = self._own(dict)
            del held[item]
            if not held:
                self.clear()

    def items(self) -> Iterable[tuple[Any, Any]]:
        return tuple((item, self.get(item)) for item in self._seen())

    def keys(self) -> Iterable[Any]:
        return tuple(self._seen())

    def values(self) -> Iterable[Any]:
        return tuple(self.get(item) for item in self._seen())

    def __contains__(self, item: Any) -> bool:
        return item in self._seen()

    def __len__(self) -> int:
        return len(self._seen())


_TABLES: dict[str, type[HeapTable]] = {
    "value": HeapValue, "list": HeapList, "map": HeapMap, "reducing": HeapReducing, "aggregating": HeapAggregating,
    "timers": HeapValue,
}


class HeapBackend:
    """All keyed state of one operator in one subtask."""

    def __init__(self, *, key_type: pa.DataType, key_group_count: int) -> None:
        self.key_type = key_type
        self.key_group_count = key_group_count
        self.cursor = Cursor()
        self._tables: dict[str, HeapTable] = {}

    def table(self, descriptor: Descriptor) -> Any:
        """The state object for a descriptor, to be called by the user's function."""
        info = descriptor.info(self.key_type)
        assert info.name not in self._tables, f"state {info.name!r} is declared twice"
        kind = _TABLES[descriptor.shape]
        if kind is HeapValue and descriptor.shape == "value" and _copier(descriptor.item) is not None:
            kind = HeapContainerValue
        table = self._tables[info.name] = kind(descriptor, info, self.cursor)
        return table

    def load(self, state: str, rows: pa.RecordBatch) -> None:
        """Takes rows of a snapshot in. Only before the first record."""
        table = self._tables[state]
        table.load(key_list(rows.column("key")), to_list(rows.column("value")))

    def maintain(self, budget: int) -> None:
        """A small step of merging, between two batches. Twice the records since the last step keeps up with any load."""
        for table in self._tables.values():
            if table.frozen:
                budget = table.merge(budget)
                if budget <= 0:
                    return

    def freeze(self) -> FrozenHeap:
        return FrozenHeap(tuple(self._tables.values()), self.key_group_count)


class FrozenHeap:
    """The tables as they were at the freeze. Its sections are made by a background thread."""

    def __init__(self, tables: tuple[HeapTable, ...], key_group_count: int) -> None:
        self._tables = tables
        self._layers = tuple(table.freeze() for table in tables)
        self._key_group_count = key_group_count

    @property
    def states(self) -> tuple[StateInfo, ...]:
        return tuple(table.info for table in self._tables)

    def sections(self) -> Iterator[Section]:
        for table, layers in zip(self._tables, self._layers, strict=True):
            rows = _rows(table.info, layers)
            if rows is not None:
                yield from _cut_by_group(table.info.name, rows, self._key_group_count)

    def release(self) -> None:
        for table in self._tables:
            table.release()


def key_list(column: pa.Array) -> list[Any]:
    """Keys as the tables hold them: a value for one key column, a tuple for several; NaN and zero in one form each."""
    if pa.types.is_struct(column.type):
        return list(zip(*(key_list(field) for field in column.flatten()), strict=True))
    if pa.types.is_floating(column.type):
        return [_NAN if key != key else key + 0.0 if key is not None else None for key in to_list(column)]
    return to_list(column)


_NAN = float("nan")


def _visible(layers: tuple[dict[Any, Any], ...]) -> Iterator[tuple[Any, Any]]:
    """Every key's newest entry, deleted ones left out."""
    for depth, layer in enumerate(layers):
        above = layers[:depth]
        for key, value in layer.items():
            if value is not GONE and not any(key in upper for upper in above):
                yield key, value


def _rows(info: StateInfo, layers: tuple[dict[Any, Any], ...]) -> pa.Table | None:
    """The visible entries as Arrow, made in chunks between which the interpreter is given away."""
    entries = _visible(layers)
    chunks: list[pa.RecordBatch] = []
    key_type, value_type = (field.type for field in info.schema)
    while chunk := list(islice(entries, WRITE_CHUNK_ENTRIES)):
        keys, values = zip(*chunk, strict=True)
        chunks.append(pa.record_batch([_keys_to_arrow(keys, key_type), from_list(values, value_type)], schema=info.schema))
        time.sleep(WRITE_PAUSE_S)
    return pa.Table.from_batches(chunks) if chunks else None


def _keys_to_arrow(keys: tuple[Any, ...], key_type: pa.DataType) -> pa.Array:
    if not pa.types.is_struct(key_type):
        return from_list(keys, key_type)
    columns = zip(*keys, strict=True)
    fields = [key_type.field(index) for index in range(key_type.num_fields)]
    arrays = [from_list(column, field.type) for column, field in zip(columns, fields, strict=True)]
    return pa.StructArray.from_arrays(arrays, fields=fields)


def _cut_by_group(state: str, table: pa.Table, key_group_count: int) -> Iterator[Section]:
    """Sorts by key-group (stable) and cuts. Hash, sort and take run without the interpreter's lock."""
    rows = table.combine_chunks().to_batches()[0]
    groups = groups_of(hash_columns([rows.column("key")]), key_group_count)
    order = np.argsort(groups, kind="stable")
    rows = rows.take(pa.array(order))
    starts = np.searchsorted(groups[order], np.arange(key_group_count + 1))
    for group in np.flatnonzero(np.diff(starts)).tolist():
        start, stop = int(starts[group]), int(starts[group + 1])
        yield Section(state, group, rows.slice(start, stop - start))


def _copier(type: pa.DataType) -> Callable[[Any], Any] | None:
    """A deep copy for values of nested types; None where values can't be changed in place."""
    if pa.types.is_list(type) or pa.types.is_large_list(type):
        inner = _copier(type.value_type)
        return lambda held: held if held is None else list(held) if inner is None else [inner(item) for item in held]
    if pa.types.is_map(type):
        inner_item = _copier(type.item_type)
        return lambda held: (held if held is None else dict(held) if inner_item is None
                             else {key: inner_item(item) for key, item in dict(held).items()})
    if pa.types.is_struct(type):
        inners = {type.field(index).name: _copier(type.field(index).type) for index in range(type.num_fields)}
        return lambda held: (held if not isinstance(held, dict)
                             else {name: (inner(item) if (inner := inners.get(name)) is not None else item)
                                   for name, item in held.items()})
    return None
