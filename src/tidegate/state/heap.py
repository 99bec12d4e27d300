"""The heap backend: keyed state in the slot's own memory, in Python dictionaries.

The tables (heap_tables.py) hold the state and freeze it; here a frozen version is read by a background thread and becomes
sections of Arrow rows. That takes two passes. The first takes references to all keys and values, in small pieces, and
then lets go of the tables; only for values that are changed in place it makes Arrow rows at once. The second makes the
rest into Arrow rows and cuts them by key-group (cutting.py). So the loop is done with a snapshot early, whatever the
store does.

No key-group is kept with an entry: it is computed when a snapshot is written (docs/adr/004).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import SchemaError
from tidegate.state.cutting import Pace, cut_by_group
from tidegate.state.descriptors import Descriptor
from tidegate.state.heap_tables import GONE, NO_KEY, Changed, Cursor, HeapTable, make_table
from tidegate.state.sections import Section, StateInfo
from tidegate.types import ddl_of, from_list, to_list

__all__ = ["NO_KEY", "Cursor", "FrozenHeap", "HeapBackend", "held_as_it_is", "key_list"]

# Rests as multiples of the work before them. While entries are taken each write of the loop costs more, so that should
# not last; what follows may take its time.
TAKING_REST, WRITING_REST = 1.5, 4.0

Entries: TypeAlias = tuple[list[Any], list[Any]]      # keys, and the value of each


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
        table = self._tables[info.name] = make_table(descriptor, info, self.cursor)
        return table

    def load(self, state: str, rows: pa.RecordBatch) -> None:
        """Takes rows of a snapshot in. Only before the first record."""
        table = self._tables[state]
        table.load(key_list(rows.column("key")), to_list(rows.column("value")))

    def maintain(self, budget: int) -> None:
        """A small step of tidying up, between two batches. As many as there were records keep up with any load."""
        for table in self._tables.values():
            if not table.steady or table.dirty:
                table.tidy(budget)

    def freeze(self) -> FrozenHeap:
        return FrozenHeap(tuple(self._tables.values()), self.key_group_count)


class FrozenHeap:
    """The tables as they were at the freeze. Its sections are made by a background thread."""

    def __init__(self, tables: tuple[HeapTable, ...], key_group_count: int) -> None:
        self._tables = [_FrozenTable(table) for table in tables]
        self._key_group_count = key_group_count

    @property
    def states(self) -> tuple[StateInfo, ...]:
        return tuple(table.info for table in self._tables)

    def sections(self) -> Iterator[Section]:
        # All is taken before the first section goes on its way: how long that takes, the loop needn't know.
        rows = [table.take() for table in self._tables]
        for info, chunks in zip(self.states, rows, strict=True):
            yield from cut_by_group(info.name, chunks, self._key_group_count)

    def release(self) -> None:
        for table in self._tables:
            table.version.done = True


class _FrozenTable:
    """One table as it was at the freeze."""

    def __init__(self, table: HeapTable) -> None:
        self.info = table.info
        self.version = table.freeze()
        self._in_place = table.in_place

    def take(self) -> Iterable[pa.RecordBatch]:
        """The entries as Arrow rows. When it returns, nothing in the table is needed any more."""
        entries = self._entries()
        rows: Iterable[pa.RecordBatch]
        if self._in_place:
            rows = list(self._rows(entries))        # the values are about to be changed by the loop
        else:
            rows = self._rows(_emptying(list(entries)))
        self.version.done = True
        return rows

    def _entries(self) -> Iterator[Entries]:
        """Keys and their values at the freeze, some at a time."""
        pace = Pace(rest_factor=TAKING_REST)
        number = self.version.number
        for part in self.version.parts:
            all_keys, all_entries = iter(part), iter(part.values())
            while keys := list(islice(all_keys, pace.entries)):
                entries = list(islice(all_entries, len(keys)))
                values = [entry.at(number) if type(entry) is Changed else entry for entry in entries]
                if self.version.has_dead:
                    keys = [key for key, value in zip(keys, values, strict=True) if value is not GONE]
                    values = [value for value in values if value is not GONE]
                yield keys, values
                pace.rest_if_due()

    def _rows(self, entries: Iterable[Entries]) -> Iterator[pa.RecordBatch]:
        pace = Pace(rest_factor=WRITING_REST)
        for keys, values in entries:
            start = 0
            while start < len(keys):
                stop = start + pace.entries
                yield self._batch(keys[start:stop], values[start:stop])
                pace.rest_if_due()
                start = stop

    def _batch(self, keys: list[Any], values: list[Any]) -> pa.RecordBatch:
        key_type, value_type = (field.type for field in self.info.schema)
        try:
            columns = [_keys_to_arrow(keys, key_type), from_list(values, value_type)]
        except SchemaError as error:
            raise SchemaError(f"state {self.info.name!r} is declared as {ddl_of(value_type)}, and holds something else: "
                              f"{error}. Change the function or the declaration.") from error
        return pa.RecordBatch.from_arrays(columns, schema=self.info.schema)


def _emptying(entries: list[Entries]) -> Iterator[Entries]:
    """Lets go of what was used."""
    entries.reverse()
    while entries:
        yield entries.pop()


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
        return [None if length is None else tuple(islice(items, length))
                for length in pc.list_value_length(column).to_pylist()]
    if pa.types.is_dictionary(kind):
        return key_list(column.dictionary_decode())
    return to_list(column)


def held_as_it_is(kind: pa.DataType) -> bool:
    """Whether `key_list` is `to_list` for columns of this type."""
    return not (kind.num_fields or pa.types.is_floating(kind) or pa.types.is_dictionary(kind))


_NAN = float("nan")


def _keys_to_arrow(keys: Sequence[Any], key_type: pa.DataType) -> pa.Array:
    if not pa.types.is_struct(key_type):
        return from_list(keys, key_type)
    fields = list(key_type)
    columns = [_keys_to_arrow(column, field.type) for column, field in zip(zip(*keys, strict=True), fields, strict=True)]
    return pa.StructArray.from_arrays(columns, fields=fields)
