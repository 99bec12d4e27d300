"""A state of a snapshot as a table: typed columns, a row for each entry, read by key-group, in parts.

Keyed state has these columns, in this order: those of the key, under their names; `window` for columnar state with windows;
`map_key` for an entry of a map; `position` for an item of a list; `value` (for a timer `at_ms`); `expires` if the state has
a ttl; `key_group`; `epoch`. With `per="key"` lists and maps stay whole, with a row for each key.

State without keys has `subtask`, `position`, `id` for an item of a union list, `map_key` for broadcast state, `value` and
`epoch`. Every subtask holds a copy of a union list: rows with the same id are one item.

The table is the same whatever the form of the pieces: chains are merged, and native files are read as rows. It includes
entries that have expired since the snapshot was taken.

A part is what one reader reads: key-groups, as half-open ranges. Parts follow the pieces of the snapshot, since native files
can only be opened as a whole; pieces of row files are cut, or combined, to about `PART_BYTES`.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import JobError, NotFound, SchemaError
from tidegate.hashing import hash_columns
from tidegate.keygroups import groups_of, overlap
from tidegate.snapshots.manifest import ROWS, Manifest, PieceEntry, StateEntry
from tidegate.snapshots.snapshot import Snapshot
from tidegate.state.evolution import described
from tidegate.state.sections import row_identity
from tidegate.state.ttl import COLLECTIONS, EXPIRES
from tidegate.types import ddl_of

PART_BYTES = 12 * 1024 * 1024

# Key-groups, as half-open ranges.
GroupRanges: TypeAlias = tuple[tuple[int, int], ...]

KEY_GROUP, EPOCH, SUBTASK, POSITION = "key_group", "epoch", "subtask", "position"
MAP_KEY, VALUE, AT_MS = "map_key", "value", "at_ms"
MOMENT = pa.timestamp("us", tz="UTC")


class Table(Protocol):
    """A table that can be read as a DataFrame."""

    @property
    def schema(self) -> pa.Schema: ...

    @property
    def keys(self) -> KeyColumns | None:
        """Return the columns of the key, None if the table isn't cut by key-group."""

    def parts(self, groups: Collection[int] | None, *, count: int | None = None) -> list[GroupRanges]:
        """Return parts with these key-groups (None: all). `count` is the wanted number, which is not exact."""

    def read(self, part: GroupRanges) -> Iterator[pa.RecordBatch]: ...


# Finding a state in a snapshot.


def find_state(manifest: Manifest, state: str | None, operator: str | None) -> tuple[str, StateEntry]:
    """Return the operator and the state that are meant. Errors list the states that exist."""
    if operator is not None and operator not in manifest.operators:
        raise NotFound(f"the snapshot has no operator {operator!r}{_near(operator, manifest.operators)}. {listed(manifest)}")
    names = [operator] if operator is not None else list(manifest.operators)
    found = [(name, entry) for name in names for entry in manifest.operators[name].states if entry.name == state]
    if state is None:
        raise JobError(f"no state is named: give the option 'state'. {listed(manifest)}")
    if not found:
        of_it = "" if operator is None else f" in operator {operator!r}"
        near = _near(state, [entry.name for name in names for entry in manifest.operators[name].states])
        raise NotFound(f"the snapshot has no state {state!r}{of_it}{near}. {listed(manifest)}")
    if len(found) > 1:
        raise JobError(
            f"state {state!r} is in the operators {', '.join(repr(name) for name, _ in found)}: say which one "
            f"is meant, with the option 'operator'"
        )
    return found[0]


def listed(manifest: Manifest) -> str:
    """Return a text that lists the states of the job's functions, and the names of the engine's own states."""
    states = [(name, entry) for name, operator in manifest.operators.items() for entry in operator.states]
    lines = [
        f"  operator {name!r}, state {entry.name!r}: {described(entry.kind, entry.shape, entry.arrow_schema())}"
        for name, entry in states
        if not entry.name.startswith("__")
    ]
    own = [f"{entry.name} of {name!r}" for name, entry in states if entry.name.startswith("__")]
    text = "Give one of these:\n" + "\n".join(lines) if lines else "Its functions have no state."
    return text + (f"\nThe engine's own states are {', '.join(own)}." if own else "")


def _near(word: str, words: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, words, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


# Columns.


@dataclass(frozen=True, slots=True)
class KeyColumns:
    """The columns of a key. `whole` is the type that is hashed."""

    names: tuple[str, ...]
    types: tuple[pa.DataType, ...]
    whole: pa.DataType

    @classmethod
    def of(cls, key: pa.DataType, names: Sequence[str] = ()) -> KeyColumns:
        """Name the columns: as the user did, otherwise like the fields of a struct, or `key`."""
        fields = list(key) if pa.types.is_struct(key) else []
        if fields and len(names) != 1:
            if names and len(names) != len(fields):
                raise JobError(f"the key has {len(fields)} columns ({ddl_of(key)}), and the option 'key' names {len(names)}")
            return cls(tuple(names) or tuple(field.name for field in fields), tuple(field.type for field in fields), key)
        if len(names) > 1:
            raise JobError(f"the key is one column ({ddl_of(key)}), and the option 'key' names {len(names)}")
        return cls(tuple(names) or ("key",), (key,), key)

    @property
    def is_split(self) -> bool:
        return self.types != (self.whole,)

    def fields(self) -> list[pa.Field]:
        return [pa.field(name, kind) for name, kind in zip(self.names, self.types, strict=True)]

    def columns(self, keys: pa.Array) -> list[pa.Array]:
        columns: list[pa.Array] = keys.flatten() if self.is_split else [keys]
        return columns


def table_schema(fields: Iterable[pa.Field]) -> pa.Schema:
    schema = pa.schema(fields)
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise SchemaError(
            f"the table would have the column {twice[0]!r} twice: give the key's columns other names, with "
            f'the option \'key\' (such as "id" or "first, second")'
        )
    return schema


@dataclass(frozen=True, slots=True)
class _Entries:
    """How the column `value` of keyed state becomes columns. With `split` there is a row for each item or entry."""

    shape: str
    schema: pa.Schema
    split: bool

    @classmethod
    def of(cls, state: StateEntry, per: str) -> _Entries:
        collection = state.shape in (*COLLECTIONS, "timers")
        return cls(state.shape, state.arrow_schema(), collection and per == "entry")

    def fields(self) -> list[pa.Field]:
        kind = self.schema.field("value").type
        name = AT_MS if self.shape == "timers" else VALUE
        fields = [pa.field(name, kind)]
        if beside := row_identity(self.schema):
            fields = [*map(self.schema.field, beside), *fields]
        elif self.split and self.shape == "map":
            fields = [pa.field(MAP_KEY, kind.key_type), pa.field(VALUE, kind.item_type)]
        elif self.split:
            fields = [*([pa.field(POSITION, pa.int32())] if self.shape == "list" else []), pa.field(name, kind.value_type)]
        if EXPIRES in self.schema.names:
            whole = self.shape in COLLECTIONS and not self.split
            fields.append(pa.field(EXPIRES, pa.list_(MOMENT) if whole else MOMENT))
        return fields

    def columns(self, rows: pa.RecordBatch) -> tuple[np.ndarray[Any, Any] | None, list[pa.Array]]:
        """Return the columns, and for each of their rows the index of the row it comes from (None: the same index)."""
        values = rows.column("value")
        ends = _moments(rows.column(EXPIRES)) if EXPIRES in rows.schema.names else None
        if beside := row_identity(rows.schema):
            return None, [*map(rows.column, beside), values]
        if not self.split:
            return None, [values] if ends is None else [values, ends]
        bounds = values.offsets.to_numpy()
        counts, here = np.diff(bounds), slice(int(bounds[0]), int(bounds[-1]))
        parents = np.repeat(np.arange(len(counts)), counts)
        if self.shape == "map":
            columns = [values.keys[here], values.items[here]]
        else:
            position = np.arange(len(parents)) - np.repeat(bounds[:-1] - bounds[0], counts)
            columns = [*([pa.array(position.astype(np.int32))] if self.shape == "list" else []), values.values[here]]
        if ends is not None:
            columns.append(pa.nulls(len(parents), MOMENT) if ends.null_count else ends.flatten())
        return parents, columns

    def alike(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Yield the rows, in batches in which either all collections have expiry times or none has."""
        if not self.split:
            yield rows
            return
        if rows.column("value").null_count:
            rows = rows.filter(rows.column("value").is_valid())
        missing = rows.column(EXPIRES).is_null() if EXPIRES in rows.schema.names else None
        if missing is None or not rows.column(EXPIRES).null_count:
            yield rows
        else:
            yield rows.filter(missing)
            yield rows.filter(pc.invert(missing))


def _moments(ends: pa.Array) -> pa.Array:
    """Convert milliseconds into timestamps."""
    in_ms = pa.timestamp("ms", tz="UTC")
    if pa.types.is_list(ends.type):
        return ends.cast(pa.list_(in_ms)).cast(pa.list_(MOMENT))
    return ends.cast(in_ms).cast(MOMENT)


# Tables.


class KeyedTable:
    """The table of a keyed state."""

    def __init__(
        self, snapshot: Snapshot, operator: str, state: StateEntry, *, key: Sequence[str] = (), per: str = "entry"
    ) -> None:
        if per not in ("entry", "key"):
            raise JobError(f"the option 'per' is {per!r}: a row is for each 'entry' of a list or map, or for each 'key'")
        self._rows = KeyedRows(snapshot, operator, state)
        self._epoch = snapshot.manifest.epoch
        self._group_count = snapshot.manifest.key_group_count
        self._entries = _Entries.of(state, per)
        self.keys = KeyColumns.of(state.arrow_schema().field("key").type, key)
        self.schema = table_schema(
            [*self.keys.fields(), *self._entries.fields(), pa.field(KEY_GROUP, pa.int32()), pa.field(EPOCH, pa.int64())]
        )

    def parts(self, groups: Collection[int] | None, *, count: int | None = None) -> list[GroupRanges]:
        return self._rows.parts(groups, count=count)

    def read(self, part: GroupRanges) -> Iterator[pa.RecordBatch]:
        for whole in self._rows.read(part):
            for rows in self._entries.alike(whole):
                batch = self._batch(rows)
                if batch.num_rows:
                    yield batch

    def _batch(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        keys = rows.column("key")
        beside = [*self.keys.columns(keys), pa.array(groups_of(hash_columns([keys]), self._group_count))]
        parents, columns = self._entries.columns(rows)
        if parents is not None:
            indices = pa.array(parents)
            beside = [column.take(indices) for column in beside]
        *of_key, groups = beside
        epochs = pa.array(np.full(len(groups), self._epoch, dtype=np.int64))
        return pa.RecordBatch.from_arrays([*of_key, *columns, groups, epochs], schema=self.schema)


class UncutTable:
    """A table that isn't cut by key-group: it has one part."""

    keys = None

    def parts(self, groups: Collection[int] | None, *, count: int | None = None) -> list[GroupRanges]:
        return [()]


class ItemsTable(UncutTable):
    """The table of a state without keys."""

    def __init__(self, snapshot: Snapshot, operator: str, state: StateEntry) -> None:
        self._snapshot = snapshot
        self._operator = operator
        self._pieces = snapshot.manifest.operators[operator].pieces
        self._state = state.name
        kind = state.arrow_schema().field("value").type
        names = tuple(field.name for field in kind) if pa.types.is_struct(kind) else ()
        wrapped = {"union": ("id", "item"), "broadcast": ("key", "value")}.get(state.kind)
        self._is_split = names == wrapped
        fields = [pa.field(VALUE, kind)]
        if self._is_split:
            fields = [
                pa.field("id" if state.kind == "union" else MAP_KEY, kind.field(0).type),
                pa.field(VALUE, kind.field(1).type),
            ]
        self.schema = table_schema(
            [pa.field(SUBTASK, pa.int32()), pa.field(POSITION, pa.int64()), *fields, pa.field(EPOCH, pa.int64())]
        )

    def read(self, part: GroupRanges) -> Iterator[pa.RecordBatch]:
        for piece in self._pieces:
            position = 0
            for rows in item_rows(self._snapshot, self._operator, piece, self._state):
                values = rows.column("value")
                at = np.arange(position, position + len(values), dtype=np.int64)
                position += len(values)
                yield pa.RecordBatch.from_arrays(
                    [
                        pa.array(np.full(len(values), piece.subtask, dtype=np.int32)),
                        pa.array(at),
                        *(values.flatten() if self._is_split else [values]),
                        pa.array(np.full(len(values), self._snapshot.manifest.epoch, dtype=np.int64)),
                    ],
                    schema=self.schema,
                )


def state_table(
    snapshot: Snapshot, state: str | None, operator: str | None, *, key: Sequence[str] = (), per: str = "entry"
) -> Table:
    name, entry = find_state(snapshot.manifest, state, operator)
    if entry.kind == "keyed":
        return KeyedTable(snapshot, name, entry, key=key, per=per)
    return ItemsTable(snapshot, name, entry)


# Rows, as a snapshot has them: `key`, perhaps `window`, `value` and, with a ttl, `expires`.


class KeyedRows:
    """The merged rows of a keyed state."""

    def __init__(self, snapshot: Snapshot, operator: str, state: StateEntry) -> None:
        self._snapshot = snapshot
        self._operator = operator
        self._entry = snapshot.manifest.operators[operator]
        self._state = state.name
        self.schema = state.arrow_schema()

    def parts(self, groups: Collection[int] | None, *, count: int | None = None) -> list[GroupRanges]:
        wanted = range(self._snapshot.manifest.key_group_count) if groups is None else sorted(set(groups))
        return planned_parts(self._entry.pieces, wanted, count=count)

    def read(self, part: GroupRanges) -> Iterator[pa.RecordBatch]:
        for piece in self._entry.pieces:
            ranges = [groups for bounds in part if (groups := overlap(range(*bounds), range(*piece.key_groups)))]
            if ranges and piece.files:
                reader = self._snapshot.piece(self._operator, piece)
                for groups in ranges:
                    yield from still_there(self._snapshot, reader.keyed(self._state, groups))


def item_rows(snapshot: Snapshot, operator: str, piece: PieceEntry, state: str) -> Iterator[pa.RecordBatch]:
    """Return the rows of a state without keys in a piece."""
    return still_there(snapshot, snapshot.piece(operator, piece).items(state))


def still_there(snapshot: Snapshot, rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the rows. If a file is gone, the error gives the probable reason."""
    try:
        yield from rows
    except NotFound as error:
        epoch = snapshot.manifest.epoch
        released = (
            ""
            if snapshot.is_savepoint
            else (
                f". The job has probably released epoch {epoch} meanwhile: read a savepoint, or let the job keep more "
                f"snapshots with Snapshots(retain=…)"
            )
        )
        raise NotFound(f"{error}{released}") from error


def planned_parts(pieces: Sequence[PieceEntry], wanted: Sequence[int], *, count: int | None = None) -> list[GroupRanges]:
    """Cut the wanted key-groups along the pieces and by size; `count` is the wanted number of parts instead of a size."""
    sizes = {piece.subtask: sum(file.bytes for file in piece.files) for piece in pieces}
    part_bytes = max(1, sum(sizes.values()) // count) if count else PART_BYTES
    parts: list[GroupRanges] = []
    part: list[tuple[int, int]] = []
    part_size = 0.0
    for piece in pieces:
        mine = [group for group in wanted if piece.key_groups[0] <= group < piece.key_groups[1]]
        if not mine or not piece.files:
            continue
        group_bytes = sizes[piece.subtask] / (piece.key_groups[1] - piece.key_groups[0])
        is_native = any(file.form != ROWS for file in piece.files)
        step = len(mine) if is_native else min(len(mine), max(1, round(part_bytes / max(group_bytes, 1e-9))))
        for start in range(0, len(mine), step):
            some = mine[start : start + step]
            if part and part_size + len(some) * group_bytes > part_bytes:
                parts.append(tuple(part))
                part, part_size = [], 0.0
            part += _ranges(some)
            part_size += len(some) * group_bytes
    return [*parts, tuple(part)] if part else parts


def _ranges(groups: Sequence[int]) -> list[tuple[int, int]]:
    """[3, 4, 5, 9] → [(3, 6), (9, 10)]."""
    ranges: list[tuple[int, int]] = []
    for group in groups:
        if ranges and ranges[-1][1] == group:
            ranges[-1] = (ranges[-1][0], group + 1)
        else:
            ranges.append((group, group + 1))
    return ranges
