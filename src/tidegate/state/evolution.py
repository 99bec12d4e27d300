"""Schema evolution: loading state that was written under another declaration.

A new declaration may add, drop, rename and reorder fields of structs, widen numbers, and let fields be null, in the value
and in lists, maps and structs inside it. Everything else is refused, with both types and what can be done. The type of a
key of keyed state must stay, because the key's hash decides where its state is.

A conversion is a function from an Arrow array to an Arrow array, composed once from the two types. It works on whole columns
and shares what stays the same. It never fails and never rounds: a step that could is refused when the types are compared,
before any value is converted.

Paths. The path of a field consists of the field names that lead to it, joined by dots, from the type that the user declared:
`added={"address.zip": ""}`. Lists and maps have no name in it: in `array<struct<price: int>>` and in
`map<string, struct<price: int>>` the path is `price`. Messages put `value.` before it.

Not here: manifests and files. Whether a snapshot has a state, and under which name, is found in snapshots/plan.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from tidegate.errors import JobError, RestoreError, SchemaError
from tidegate.state.pickled import Pickled, pickled_version, shown, unreadable
from tidegate.state.sections import StateInfo, StateKind, by_text, row_identity
from tidegate.state.ttl import EXPIRES
from tidegate.types import ddl_of, from_list

Convert: TypeAlias = Callable[[pa.Array], pa.Array]
ConvertRows: TypeAlias = Callable[[pa.RecordBatch], pa.RecordBatch]

MAP_KEY = b"tidegate.map_key"
"""In a schema's metadata: the types of the parts of a map's key."""

POSSIBLE = (
    "What is possible: add a field of a struct (with added={<field>: <default>} if None won't do), drop a field, "
    "rename one (renamed={<new>: <old>}), widen a number (byte → short → int → long; float → double; byte, short "
    "and int → double; byte and short → float; a decimal to one with as many digits on both sides of the point, "
    "or more), let a field be null; rename a state or an operator (alias=<old name>); drop state by its name "
    "(drop_state=['<operator>.<state>'] or ['<operator>'])"
)


@dataclass(frozen=True, slots=True)
class Advice:
    """Texts for messages: what to do about a state whose name {was} is not declared any more (`alias`), and all changes that
    are `possible`. Users replace what is between < and >; {state} is the state that continues the old one."""

    alias: str = "give alias={was!r} to the state that continues it"
    possible: str = POSSIBLE

    def alias_of(self, was: str, new: Sequence[str]) -> str:
        """Return the text for a state that `was`, which one of the `new` states (not in the snapshot) may continue."""
        state = repr(new[0]) if len(new) == 1 else "<state>"
        said = self.alias.format(was=was, state=state)
        if state not in said or len(new) == 1:
            return said
        return f"{said}, where <state> is {' or '.join(map(repr, new)) or 'a state that is new'}"


IN_A_CLASS = Advice()


@dataclass(frozen=True, slots=True)
class Changes:
    """Declared changes of a type: `added` has defaults of new fields, `renamed` the old names of fields, both by path.
    `inside` is the name of the column's field that has the user's type, if the column is a struct around it."""

    added: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    inside: str = ""


@dataclass(frozen=True, slots=True)
class DeclaredState:
    """A state as the job declares it now."""

    info: StateInfo
    aliases: tuple[str, ...] = ()
    changes: Changes = field(default_factory=Changes)
    pickled: Pickled | None = None


@dataclass(frozen=True, slots=True)
class Evolved:
    """How a state evolves. `convert` converts rows of the snapshot to the present schema; None if they have it. `notes`
    describe the changes, `dropped` are the fields that the present schema doesn't have."""

    convert: ConvertRows | None = None
    notes: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


def evolve(was: StateInfo, now: DeclaredState) -> Evolved:
    """Return how a state of a snapshot becomes the state that is declared now. Raise `RestoreError` if it can't."""
    new = now.info
    if (was.kind, was.shape) != (new.kind, new.shape):
        raise RestoreError(f"a {was.kind.value} {was.shape} can't become a {new.kind.value} {new.shape}")
    beside, now_beside = row_identity(was.schema), row_identity(new.schema)
    if beside != now_beside:
        raise RestoreError(f"state {by_text(beside)} can't become state {by_text(now_beside)}")
    version = pickled_version(was.schema)
    if (version is None) != (now.pickled is None):
        raise RestoreError("values that were pickled can't become others, nor the other way round")
    _check_map_key(was.schema, new.schema)
    converts: dict[str, Convert | None] = {}
    notes: list[str] = []
    if new.kind is StateKind.KEYED:
        converts["key"] = _key_conversion(was.schema.field("key").type, new.schema.field("key").type, notes)
    before, after = was.schema.field("value").type, new.schema.field("value").type
    walk = _Walk(now.changes)
    convert = walk.between(before, after, "")
    walk.check()
    notes += walk.notes
    if now.pickled is not None:
        assert version is not None
        if version > now.pickled.version or (version < now.pickled.version and now.pickled.migrate is None):
            raise RestoreError(f"it {unreadable(version, now.pickled)}")
        if version < now.pickled.version:
            notes.append(f"version {version} → {now.pickled.version}")
        convert = _then(convert, _unpickling(now.pickled, new))
    converts["value"] = convert
    if (EXPIRES in was.schema.names) != (EXPIRES in new.schema.names):
        notes.append("has a ttl now" if EXPIRES in new.schema.names else "has no ttl any more")
    if not any(converts.values()):
        return Evolved(notes=tuple(notes))
    # The backend handles the ends of values (ttl.py): it gets them as they are in the snapshot.
    schema = pa.schema(
        [new.schema.field(column.name) if column.name in converts else column for column in was.schema],
        metadata=new.schema.metadata,
    )

    def convert_rows(rows: pa.RecordBatch) -> pa.RecordBatch:
        columns = [
            column if (convert := converts.get(name)) is None else convert(column)
            for name, column in zip(schema.names, rows.columns, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    return Evolved(convert_rows, tuple(notes), tuple(walk.dropped))


def _check_map_key(was: pa.Schema, now: pa.Schema) -> None:
    """Compare the parts of a map's key that is text of several values: the map's type doesn't show their types."""
    before, after = ((schema.metadata or {}).get(MAP_KEY) for schema in (was, now))
    if before is not None and after is not None and before != after and (b"," in before or b"," in after):
        raise RestoreError(
            f"a key of the map was {before.decode()} and is now {after.decode()}; the fields of such a key "
            f"must keep their types and their order"
        )


def check_changes(declared: pa.DataType, changes: Changes) -> None:
    """Raise `JobError` if `added` or `renamed` has a path that the type doesn't have, or a default that doesn't fit."""
    fields = dict(_fields(declared, ""))
    for argument, paths in (("added", changes.added), ("renamed", changes.renamed)):
        for path in paths:
            if path not in fields:
                there = f"it has {', '.join(map(repr, fields))}" if fields else "it has no fields"
                raise JobError(
                    f"{argument}={{{path!r}: …}}: the type {ddl_of(declared)} has no such field; {there}. Fields "
                    f"inside fields are joined by dots"
                )
    for path, default in changes.added.items():
        if path in changes.renamed:
            raise JobError(f"the field {path!r} is both in added= and in renamed=: remove it from one of them")
        try:
            _default(fields[path], default)
        except SchemaError as error:
            raise SchemaError(
                f"added={{{path!r}: {default!r}}} and the field is declared with {ddl_of(fields[path].type)!r}: {error}"
            ) from None
    for path, old in changes.renamed.items():
        if type(old) is not str or old in ("", fields[path].name):
            raise JobError(f"renamed={{{path!r}: {old!r}}}: give the name that the field had before")
    for path in changes.renamed:
        ring = _ring(path, changes.renamed)
        if ring:
            raise JobError(
                f"by renamed= the fields {', '.join(map(repr, ring))} take each other's names, and a snapshot "
                f"doesn't show whether that has happened. Rename one of them to a third name, run the program "
                f"once, and rename the other fields after that"
            )


def _ring(path: str, renamed: Mapping[str, str]) -> list[str]:
    """Return the fields that take each other's names in a ring, beginning with this one; none if it isn't in a ring."""
    parent, dot, _ = path.rpartition(".")
    ring, at = [path], f"{parent}{dot}{renamed[path]}"
    while at in renamed and at not in ring:
        ring.append(at)
        at = f"{parent}{dot}{renamed[at]}"
    return ring if at == path else []


def described(kind: str, shape: str, schema: pa.Schema) -> str:
    """Return a state's declaration for a message: kind, shape and types."""
    version = pickled_version(schema)
    value = ddl_of(schema.field("value").type)
    if version is not None:
        value = f"{value} of {shown(version)}" if value != "binary" else shown(version)
    of_key = f" by {ddl_of(schema.field('key').type)}" if kind == StateKind.KEYED.value else ""
    of_key += "".join(f" and {name}" for name in row_identity(schema))
    return f"{kind} {shape} {value}{of_key}"


# ------------------------------------------------------------------------------------------- from type to type


class _Walk:
    """Compares two types recursively and collects changes and problems."""

    def __init__(self, changes: Changes) -> None:
        prefix = f"{changes.inside}." if changes.inside else ""
        self._inside = prefix
        self._added = {prefix + path: default for path, default in changes.added.items()}
        self._renamed = {prefix + path: old for path, old in changes.renamed.items()}
        self.notes: list[str] = []
        self.dropped: list[str] = []
        self.problems: list[str] = []

    def check(self) -> None:
        if self.problems:
            raise RestoreError("; ".join(self.problems))

    def between(self, old: pa.DataType, new: pa.DataType, path: str, *, key: bool = False) -> Convert | None:
        """Return the conversion; None if the types are the same, or if there is a problem. In a map's key only numbers may
        change."""
        if old.equals(new):
            return None
        if pa.types.is_struct(old) and pa.types.is_struct(new) and not key:
            return self._struct(old, new, path)
        if _is_list(old) and (_is_list(new) and old.id in (new.id, pa.list_(pa.null()).id)):
            self._check_null(old.value_field, new.value_field, path, "an item")
            return _over_lists(new, self.between(old.value_type, new.value_type, path, key=key))
        if pa.types.is_map(old) and pa.types.is_map(new) and old.keys_sorted == new.keys_sorted:
            self._check_null(old.item_field, new.item_field, path, "a value")
            return _over_maps(
                new,
                self.between(old.key_type, new.key_type, path, key=True),
                self.between(old.item_type, new.item_type, path, key=key),
            )
        if _widens(old, new):
            self.notes.append(f"{self._shown(path)} {ddl_of(old)} → {ddl_of(new)}")
            return lambda array: array.cast(new)
        self._problem(path, f"{_text(old, new)} can't become {_text(new, old)}" + _reason(old, new, key))
        return None

    def _struct(self, old: pa.DataType, new: pa.DataType, path: str) -> Convert:
        parts: list[tuple[int | None, Convert | None]] = []
        used: set[int] = set()
        for declared in new:
            at = f"{path}.{declared.name}" if path else declared.name
            index = self._source(old, new, declared.name, at)
            if index is None:
                parts.append((None, None if at in self._renamed else self._new(declared, at)))
                continue
            was = old.field(index)
            if index in used:
                self._problem(at, f"two fields are to be the old {was.name!r}")
            used.add(index)
            if was.name != declared.name:
                self.notes.append(f"{self._shown(at)} was {was.name!r}")
            self._check_null(was, declared, at, "it")
            parts.append((index, self.between(was.type, declared.type, at)))
        gone = [
            self._shown(f"{path}.{was.name}" if path else was.name) for index, was in enumerate(old) if index not in used
        ]
        self.notes += [f"{each} dropped" for each in gone]
        self.dropped += gone
        return _over_structs(new, parts)

    def _source(self, old: pa.DataType, new: pa.DataType, name: str, path: str) -> int | None:
        """Return the index of the old field: the one with the same name, else the one with the former name; None if the
        field is new."""
        names = [was.name for was in old]
        former = self._renamed.get(path)
        if former is not None and former in names and name in names and new.get_field_index(former) < 0:
            self._problem(
                path,
                f"the snapshot has both {name!r} and its old name {former!r}, and only one can be the field: omit "
                f"renamed=, or drop one of them first and rename after that",
            )
        for candidate in (name, former):
            if candidate in names:
                return names.index(candidate)
        if former is not None:  # otherwise the values under the field's real name would be dropped
            self._problem(
                path,
                f"the snapshot has neither {name!r} nor {former!r}, its name in renamed=; it has "
                f"{', '.join(map(repr, names)) or 'no fields'}. Give the name that the field had, or remove "
                f"it from renamed= if it is new",
            )
        return None

    def _new(self, declared: pa.Field, path: str) -> Convert | None:
        if path not in self._added:
            if not declared.nullable:
                self._problem(path, f"it is new and NOT NULL: give it a default, added={{{self._relative(path)!r}: …}}")
            self.notes.append(f"{self._shown(path)} added (None)")
            return lambda array: pa.nulls(len(array), declared.type)
        self.notes.append(f"{self._shown(path)} added ({self._added[path]!r})")
        default = _default(declared, self._added[path])
        return lambda array: default.take(pa.array(np.zeros(len(array), dtype=np.int64)))

    def _check_null(self, old: pa.Field, new: pa.Field, path: str, what: str) -> None:
        if old.nullable and not new.nullable:
            self._problem(path, f"{what} could be null, and is NOT NULL now")

    def _problem(self, path: str, text: str) -> None:
        self.problems.append(f"{self._shown(path)}: {text}")

    def _relative(self, path: str) -> str:
        return path.removeprefix(self._inside)

    def _shown(self, path: str) -> str:
        relative = "" if f"{path}." == self._inside else self._relative(path)
        return f"value.{relative}" if relative else "value"


def _widens(old: pa.DataType, new: pa.DataType) -> bool:
    """Return whether every value of the old type is exactly a value of the new type."""
    types = pa.types
    if types.is_signed_integer(old):
        digits = old.bit_width - 1
        exact = {pa.float32().id: 24, pa.float64().id: 53}.get(new.id, 0)
        return bool(digits <= (new.bit_width - 1 if types.is_signed_integer(new) else exact))
    if types.is_decimal128(old) and types.is_decimal128(new):
        return bool(new.scale >= old.scale and new.precision - new.scale >= old.precision - old.scale)
    return (old, new) in _WIDER


_WIDER = frozenset({(pa.float32(), pa.float64()), (pa.string(), pa.large_string()), (pa.binary(), pa.large_binary())})


def _reason(old: pa.DataType, new: pa.DataType, key: bool) -> str:
    numbers = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
    if all(any(is_number(kind) for is_number in numbers) for kind in (old, new)):
        return ", which can't hold all of its numbers"
    return " as the key of a map" if key else ""


def _text(shown_type: pa.DataType, beside: pa.DataType) -> str:
    """Return Spark's name of a type, or Arrow's if both types have the same name in Spark."""
    return str(shown_type) if ddl_of(shown_type) == ddl_of(beside) else ddl_of(shown_type)


def _key_conversion(old: pa.DataType, new: pa.DataType, notes: list[str]) -> Convert | None:
    """Return the conversion of keys. Only the names of their columns may change, which are not part of the hash."""
    if old.equals(new):
        return None
    names = [[part.name for part in kind] if pa.types.is_struct(kind) else [] for kind in (old, new)]
    if names[0] and [part.type for part in old] == [part.type for part in new]:
        if any(name in names[1] and names[1][index] != name for index, name in enumerate(names[0])):
            raise RestoreError(
                f"the key's columns were in the order {names[0]} and are now in the order {names[1]}, and the order is "
                f"part of the hash that decides where a key's state is: restore the order in key_by"
            )
        if names[0] != names[1]:
            notes.append(f"key columns {', '.join(names[0])} → {', '.join(names[1])}")
        return _over_structs(new, [(index, None) for index in range(new.num_fields)])
    raise RestoreError(
        f"its key was {_text(old, new)} and is now {_text(new, old)}; the type of a key can't change, not even to "
        f"a wider one, since its hash decides where its state is: convert the column to the old type with map "
        f"before key_by"
    )


def _fields(kind: pa.DataType, path: str) -> list[tuple[str, pa.Field]]:
    """Return every struct field inside a type, by path."""
    if pa.types.is_struct(kind):
        named = [(f"{path}.{part.name}" if path else part.name, part) for part in kind]
        return [each for at, part in named for each in ((at, part), *_fields(part.type, at))]
    if _is_list(kind):
        return _fields(kind.value_type, path)
    return _fields(kind.item_type, path) if pa.types.is_map(kind) else []


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _default(declared: pa.Field, value: Any) -> pa.Array:
    """Return a default as a column of one row."""
    if value is None and not declared.nullable:
        raise SchemaError("it is NOT NULL, so None can't be its default")
    return from_list([value], declared.type)


# --------------------------------------------------------------------------------------------- array to array
# Containers are made from buffers: so their type is exactly the declared one, and what stays the same is shared.


def _over_structs(new: pa.DataType, parts: Sequence[tuple[int | None, Convert | None]]) -> Convert:
    """Convert structs. `parts` has for each new field the index of the old field and its conversion; for a field without an
    old one, None and a function that makes it for a struct array."""

    def convert(array: pa.Array) -> pa.Array:
        children = []
        for index, of_part in parts:
            child = array if index is None else array.field(index)
            children.append(child if of_part is None else of_part(child))
        return pa.Array.from_buffers(new, len(array), [_validity(array)], children=children)

    return convert


def _over_lists(new: pa.DataType, of_items: Convert | None) -> Convert:
    wide = pa.types.is_large_list(new)

    def convert(array: pa.Array) -> pa.Array:
        offsets, here = _extent(array, wide=wide)
        items = array.values[here]
        return pa.Array.from_buffers(
            new, len(array), [_validity(array), offsets], children=[items if of_items is None else of_items(items)]
        )

    return convert


def _over_maps(new: pa.DataType, of_keys: Convert | None, of_items: Convert | None) -> Convert:
    entries = pa.struct([new.key_field, new.item_field])

    def convert(array: pa.Array) -> pa.Array:
        offsets, here = _extent(array, wide=False)
        columns = [
            column if of_column is None else of_column(column)
            for column, of_column in ((array.keys[here], of_keys), (array.items[here], of_items))
        ]
        inner = pa.Array.from_buffers(entries, len(columns[0]), [None], children=columns)
        return pa.Array.from_buffers(new, len(array), [_validity(array), offsets], children=[inner])

    return convert


def _extent(array: pa.Array, *, wide: bool) -> tuple[pa.Buffer, slice]:
    """Return the offsets of an array's lists within its own items, and the slice of its own items."""
    bounds = array.offsets.to_numpy()
    first, last = (int(bounds[0]), int(bounds[-1])) if len(bounds) else (0, 0)
    offsets = (bounds if len(bounds) else np.zeros(1)) - first
    return pa.py_buffer(offsets.astype(np.int64 if wide else np.int32)), slice(first, last)


def _validity(array: pa.Array) -> pa.Buffer | None:
    return array.is_valid().buffers()[1] if array.null_count else None


def _unpickling(now: Pickled, new: StateInfo) -> Convert:
    """Return the conversion of a column's pickled values to the present version, at any depth of the column."""
    kind = new.schema.field("value").type

    def of_values(values: pa.Array) -> pa.Array:
        return now.taken_in(values, new.name)

    if pa.types.is_struct(kind):  # id and item, or key and value
        return _over_structs(kind, [(0, None), (1, of_values)])
    if pa.types.is_map(kind):
        return _over_maps(kind, None, of_values)
    return _over_lists(kind, of_values) if _is_list(kind) else of_values


def _then(first: Convert | None, second: Convert) -> Convert:
    return second if first is None else lambda array: second(first(array))
