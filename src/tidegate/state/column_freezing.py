"""Frozen versions of columnar tables, read by another thread while the loop writes on.

Theory of operation. A frozen version is a list of the rows that changed since the freeze before, and nothing is copied when
it is made. The loop notes in an *undo log* what a row was, before it changes the row for the first time after the freeze.
The reader copies the present values of its rows first, in turns with rests (cutting.py), and looks at the log afterwards:
if a row is in the log, its old values are there; otherwise it hadn't changed when it was copied. It makes no difference
whether a copied value was half written, or which of two values it was, if the log has the row.

Several versions may wait for their readers. Only the newest one's log grows, and each version knows the next one: what a
row was at a freeze is in the first log, from that freeze on, that has it.

Arrays that grow are replaced: the old array holds what was written until then, which is all that the reader needs, since
later writes of a row are in a log first. A row of a deleted key is reused only when no version needs it, so its values and
its key stay. Rows that are reused were without a key at the freeze, which the log says too.

A version holds all rows of the table instead of those that changed if these are many, because a later merge with
nearly everything costs more than writing everything.

Invariant: in what a version holds, each key is once, either set or deleted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from tidegate.errors import SchemaError
from tidegate.state.cutting import REST, Pace
from tidegate.state.key_index import KeyIndex
from tidegate.state.key_store import Array, IntArray
from tidegate.state.sections import POSITION, WINDOW, StateInfo, deleted_schema
from tidegate.state.vectors import VectorField, column_from, structs

if TYPE_CHECKING:
    from tidegate.state.versioned_table import VersionedTable

TURN_ROWS = 1 << 14
# If more than this share of the rows changed, all are written.
MAX_CHANGED_SHARE = 0.5
OBJECT_ROWS = 1 << 10  # objects become columns under the interpreter's lock

Values = tuple[Array, "Array | None"]


@dataclass(slots=True, eq=False)
class Undo:
    """What some rows were before a change: whether they had a key, and their values by field if these will be written."""

    rows: IntArray
    alive: bool
    values: dict[str, Values] | None


class FrozenTable:
    """One version of a table. The loop makes it; `take` is called once, by one other thread. `read`: nothing of the table is
    needed any more. If values are lists or dictionaries, that is so when they have become columns, since the loop changes
    them in place from then on."""

    def __init__(self, table: VersionedTable, *, changed: list[IntArray], deleted: list[list[pa.Array]]) -> None:
        self.table = table
        self.top = table.top
        self.entry_count = table.row_count
        self.next: FrozenTable | None = None
        self.log: list[Undo] = []
        self.freed: list[IntArray] = []  # rows to be reused when this version and those before it are read
        self.read = not changed
        self.complete = not self.entry_count  # whether the rows are all of the table; known after `take`
        self._changed = changed
        self._deleted = deleted

    def take(self, pace: Pace) -> Taken:
        """Copy what the version holds, and let the rows go that only it needed."""
        rows, alive, values = self._copied(pace)
        self._undo(rows, alive, values)
        keep = np.flatnonzero(alive)
        self.complete = len(keep) == self.entry_count
        taken = Taken([], [], values, keep, self._deleted)
        for start in range(0, len(keep), TURN_ROWS):
            some = rows[keep[start : start + TURN_ROWS]]
            taken.keys.append(self.table.keys(some))
            taken.kept.append(self.table.kept(some))
            pace.rest_if_due()
        self.read = not any(vector.field.type.num_fields for vector in self.table.vectors.values())
        self._changed, self._deleted = [], []
        return taken

    def _copied(self, pace: Pace) -> tuple[IntArray, Array, dict[str, Values]]:
        """Return the rows in order, whether they have a key now, and their present values."""
        table = self.table
        changed_count = sum(map(len, self._changed))
        if table.writes_all and changed_count > MAX_CHANGED_SHARE * self.entry_count:
            rows = np.arange(self.top)
        else:
            rows = np.unique(np.concatenate(self._changed)).astype(np.int64) if self._changed else np.empty(0, np.int64)
        alive = np.empty(len(rows), bool)
        values: dict[str, Values] = {
            name: (np.empty(len(rows), vector.values.dtype), None if vector.valid is None else np.empty(len(rows), bool))
            for name, vector in table.vectors.items()
        }
        for start in range(0, len(rows), TURN_ROWS):
            part = slice(start, start + TURN_ROWS)
            some = rows[part]
            alive[part] = table.stamps.take(some) >= 0
            for name, (found, valid) in values.items():
                vector = table.vectors[name]
                found[part] = vector.values.take(some)
                if valid is not None and vector.valid is not None:
                    valid[part] = vector.valid.take(some)
            pace.rest_if_due()
        return rows, alive, values

    def _undo(self, rows: IntArray, alive: Array, values: dict[str, Values]) -> None:
        """Replace what has changed since the freeze. The first entry for a row counts, so it is the last to be put."""
        logs: list[list[Undo]] = []
        version: FrozenTable | None = self
        while version is not None:
            logs.append(version.log)
            version = version.next
        if not len(rows):
            return
        for log in reversed(logs):
            for entry in reversed(log):
                at = np.searchsorted(rows, entry.rows)
                at[at == len(rows)] = 0
                here = rows[at] == entry.rows
                at = at[here]
                alive[at] = entry.alive
                for name, (old, old_valid) in (entry.values or {}).items():
                    found, valid = values[name]
                    found[at] = old[here]
                    if valid is not None and old_valid is not None:
                        valid[at] = old_valid[here]


@dataclass(slots=True, eq=False)
class Taken:
    """What a version holds: keys, and fields that never change, in parts of `TURN_ROWS`; the values of all rows, which of
    those count, and deleted keys."""

    keys: list[list[pa.Array]]
    kept: list[Mapping[str, pa.Array]]
    values: dict[str, Values]
    keep: IntArray
    deleted: list[list[pa.Array]]


class FrozenColumns:
    """One version of a columnar state: of its tables that changed. `dropped` are tables of windows that were dropped, which
    nobody changes any more; `has_all_tables`: there is no table that didn't change."""

    def __init__(
        self,
        info: StateInfo,
        fields: Sequence[VectorField],
        versions: Mapping[int | None, FrozenTable],
        dropped: Sequence[tuple[int | None, VersionedTable]],
        *,
        has_all_tables: bool,
    ) -> None:
        self.info = info
        self.complete = False  # known after `take`
        self.rows: dict[bool, list[pa.RecordBatch]] = {False: [], True: []}  # set, and deleted
        self._fields = fields
        self._versions = versions
        self._dropped = dropped
        self._has_all_tables = has_all_tables

    def take(self) -> None:
        """Fill `rows`. The loop may change the state meanwhile."""
        pace = Pace(rest_factor=REST)
        taken = {at: version.take(pace) for at, version in self._versions.items()}
        self.complete = self._has_all_tables and all(version.complete for version in self._versions.values())
        deleted = {at: list(each.deleted) for at, each in taken.items()}
        for at, table in self._dropped:
            deleted.setdefault(at, []).extend(table.keys_of_earlier_versions())
        for at, keys in deleted.items():
            rows = []
            if at in taken:
                rows = list(self._rows(at, taken[at], pace))
                self._versions[at].read = True
            self.rows[False] += rows
            self.rows[True] += deleted_taken(keys, rows, self.info.schema, at, pace)

    def release(self) -> None:
        """Let the rows go that only this version needs."""
        for version in self._versions.values():
            version.read = True

    def _rows(self, at: int | None, taken: Taken, pace: Pace) -> Iterator[pa.RecordBatch]:
        has_objects = any(field.has_objects and field.name in taken.values for field in self._fields)
        step = OBJECT_ROWS if has_objects else TURN_ROWS
        for number, (keys, kept) in enumerate(zip(taken.keys, taken.kept, strict=True)):
            part = taken.keep[number * TURN_ROWS : (number + 1) * TURN_ROWS]
            for start in range(0, len(part), step):
                some = part[start : start + step]
                values = {
                    name: (found[some], None if valid is None else valid[some])
                    for name, (found, valid) in taken.values.items()
                }
                here = [column.slice(start, step) for column in keys]
                same = {name: column.slice(start, step) for name, column in kept.items()}
                yield snapshot_rows(here, same, values, self._fields, self.info.schema, at)
                pace.rest_if_due()


def rows_of_table(
    table: VersionedTable, rows: IntArray, fields: Sequence[VectorField], schema: pa.Schema, window: int | None
) -> pa.RecordBatch:
    """Return rows of a table as those of a snapshot."""
    values = {
        name: (vector.values[rows], None if vector.valid is None else vector.valid[rows])
        for name, vector in table.vectors.items()
    }
    return snapshot_rows(table.keys(rows), table.kept(rows), values, fields, schema, window)


def snapshot_rows(
    keys: list[pa.Array],
    kept: Mapping[str, pa.Array],
    values: Mapping[str, Values],
    fields: Sequence[VectorField],
    schema: pa.Schema,
    window: int | None,
) -> pa.RecordBatch:
    """Return rows in the schema of the state."""
    try:
        columns = [kept[field.name] if field.name in kept else column_from(field, *values[field.name]) for field in fields]
    except SchemaError as error:
        raise SchemaError(f"state {schema.field('value').type} holds a value that can't be written: {error}") from error
    value = structs(columns, schema.field("value").type, len(keys[0]))
    return pa.RecordBatch.from_arrays([*identity(keys, window, schema), value], schema=schema)


def deleted_taken(
    deleted: Sequence[list[pa.Array]],
    set_rows: Sequence[pa.RecordBatch],
    schema: pa.Schema,
    window: int | None,
    pace: Pace,
) -> Iterator[pa.RecordBatch]:
    """Return deleted keys, each once, without those that are set again in `set_rows`."""
    if not deleted:
        return
    if POSITION in schema.names:  # a position is given once: what was deleted comes once, and is not set again
        for keys in deleted:
            yield pa.RecordBatch.from_arrays(identity(keys, window, schema), schema=deleted_schema(schema))
            pace.rest_if_due()
        return
    key_type = schema.field("key").type
    index = KeyIndex(key_type)
    for keys in deleted:
        for start in range(0, len(keys[0]), TURN_ROWS):
            index.rows_of([column.slice(start, TURN_ROWS) for column in keys])
            pace.rest_if_due()
    is_gone = np.ones(index.top, bool)
    for rows in set_rows:
        found = index.find([rows.column("key")])
        is_gone[found[found >= 0]] = False
        pace.rest_if_due()
    gone = np.flatnonzero(is_gone)
    for start in range(0, len(gone), TURN_ROWS):
        keys = index.keys(gone[start : start + TURN_ROWS])
        yield pa.RecordBatch.from_arrays(identity(keys, window, schema), schema=deleted_schema(schema))
        pace.rest_if_due()


def identity(keys: list[pa.Array], window: int | None, schema: pa.Schema) -> list[pa.Array]:
    """Return the columns that identify a row of a snapshot."""
    key_type = schema.field("key").type
    positions = keys[-1:] if POSITION in schema.names else []
    keys = keys[: len(keys) - len(positions)]
    key = pa.StructArray.from_arrays(keys, fields=list(key_type)) if pa.types.is_struct(key_type) else keys[0]
    windows = [] if window is None else [pa.repeat(pa.scalar(window, schema.field(WINDOW).type), len(key))]
    return [key, *windows, *positions]
