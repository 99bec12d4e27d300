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
from typing import Any, TypeAlias, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import SchemaError
from tidegate.state.cutting import Pace, cut_by_group
from tidegate.state.descriptors import Descriptor
from tidegate.state.heap_tables import GONE, NO_KEY, Cursor, HeapTable, make_table
from tidegate.state.sections import Section, StateInfo
from tidegate.types import ddl_of, from_list, to_list

__all__ = ["NO_KEY", "Cursor", "FrozenHeap", "HeapBackend", "held_as_it_is", "key_list"]

# Rests as multiples of the work before them. While entries are taken each write of the loop costs more, so that should
# not last; what follows may take its time.
TAKING_REST, WRITING_REST = 1.0, 4.0

SHARD_ENTRIES = 32_768

Entries: TypeAlias = tuple[list[Any], list[Any]]      # keys, and the value of each
T = TypeVar("T")


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
        """A small step of tidying up, between two batches."""
        for table in self._tables.values():
            if table.versions or table.waste or not table.steady:
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
        for table in self._tables:
            table.take()
        for table in self._tables:
            yield from cut_by_group(table.info.name, table.rows(), self._key_group_count)

    def release(self) -> None:
        for table in self._tables:
            table.version.released = True


class _FrozenTable:
    """One table as it was at the freeze."""

    def __init__(self, table: HeapTable) -> None:
        self.info = table.info
        self.version = table.freeze()
        self._in_place = table.in_place
        self._entries: list[Entries] = []
        self._log: list[tuple[list[Any], list[Any], int]] = []
        self._rows: list[pa.RecordBatch] = []

    def take(self) -> None:
        """Takes references to all entries. When it returns, the loop needs to log no more."""
        pace = Pace(rest_factor=TAKING_REST)
        for part in self.version.parts:
            all_keys, all_values = iter(part), iter(part.values())
            while keys := list(islice(all_keys, pace.entries)):
                self._entries.append((keys, list(islice(all_values, len(keys)))))
                pace.rest_if_due()
        # After the entries, as the theory wants it, and before the loop stops logging.
        self._log = self.version.log_so_far()
        if self._in_place:
            self._rows = list(self._to_rows())      # the loop is about to change the values
        self.version.taken = True

    def rows(self) -> Iterable[pa.RecordBatch]:
        return _emptying(self._rows) if self._in_place else self._to_rows()

    def _to_rows(self) -> Iterator[pa.RecordBatch]:
        """The entries as they were at the freeze, some at a time."""
        pace = Pace(rest_factor=WRITING_REST)
        was = Corrections(self._log, pace)
        for keys, values in _emptying(self._entries):
            start = 0
            while start < len(keys):
                stop = start + pace.entries
                rows = self._batch(keys[start:stop], was.corrected(keys[start:stop], values[start:stop]))
                if rows.num_rows:
                    yield rows
                pace.rest_if_due()
                start = stop

    def _batch(self, keys: list[Any], values: list[Any]) -> pa.RecordBatch:
        if self.version.has_dead:
            keys = [key for key, value in zip(keys, values, strict=True) if value is not GONE]
            values = [value for value in values if value is not GONE]
        key_type, value_type = (field.type for field in self.info.schema)
        try:
            columns = [_keys_to_arrow(keys, key_type), from_list(values, value_type)]
        except SchemaError as error:
            raise SchemaError(f"state {self.info.name!r} is declared as {ddl_of(value_type)}, and holds something else: "
                              f"{error}. Change the function or the declaration.") from error
        return pa.RecordBatch.from_arrays(columns, schema=self.info.schema)


class Corrections:
    """What the keys in a log held at the freeze: what was logged for them first.

    It is spread over dictionaries of about `SHARD_ENTRIES`, none of which takes long to grow.
    """

    def __init__(self, log: list[tuple[list[Any], list[Any], int]], pace: Pace) -> None:
        self._mask = mask = (1 << (sum(count for _, _, count in log) // SHARD_ENTRIES).bit_length()) - 1
        self._was: list[dict[Any, Any]] = [{} for _ in range(mask + 1)]
        for keys, values, count in reversed(log):
            stop = count
            while stop:
                start = max(0, stop - pace.entries)
                # Backwards, so that what was logged first has the last word.
                some = zip(keys[start:stop][::-1], values[start:stop][::-1], strict=True)
                if mask:
                    for key, value in some:
                        self._was[hash(key) & mask][key] = value
                else:
                    self._was[0].update(some)
                pace.rest_if_due()
                stop = start

    def corrected(self, keys: list[Any], values: list[Any]) -> list[Any]:
        was, mask = self._was, self._mask
        if mask:
            return [was[hash(key) & mask].get(key, value) for key, value in zip(keys, values, strict=True)]
        return list(map(was[0].get, keys, values)) if was[0] else values


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
