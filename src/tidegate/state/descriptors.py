"""Descriptors: what the declarations in a class body (declaring.py) are when Python runs.

A descriptor describes a state (shape, Arrow types, how it is redistributed); it holds no data. When a subtask opens the
function, a state object is made for each descriptor and set on the function's instance under the attribute's name, where it
hides the descriptor. The state objects' methods are those of handles.py, the same on every backend.

When values are given to a state, they are checked against the declared type and converted to the form that they would have
after a recovery (values.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import pyarrow as pa

from tidegate import arguments
from tidegate.arguments import Duration
from tidegate.errors import JobError, SchemaError
from tidegate.state.column_ttl import TOUCHED_FIELD
from tidegate.state.evolution import MAP_KEY, Changes, check_changes
from tidegate.state.pickled import Pickled
from tidegate.state.sections import POSITION, WINDOW, StateInfo, StateKind
from tidegate.state.ttl import declared_ttl, expires_field
from tidegate.state.values import Form, form_of
from tidegate.state.vectors import VectorField
from tidegate.types import ddl_of, from_list, parse_schema, parse_type

# Spark DDL text such as "long" or "struct<a: long>", a pyarrow or pyspark type, or what `tg.pickled()` returns.
ItemType: TypeAlias = "str | pa.DataType | Pickled"
KeyType: TypeAlias = "str | pa.DataType"
Names: TypeAlias = "str | Sequence[str]"

# The functions that declare states other than keyed state. Those of keyed state have the names of the shapes.
_FUNCTIONS = {StateKind.SPLIT: "operator_list", StateKind.UNION: "operator_list", StateKind.BROADCAST: "broadcast_map"}


class Descriptor:
    """A declared state. `item` is the Arrow type of a value, list item or map value; `map_key` that of a map's key.

    `aliases` are former names of the state, `changes` describes how its type has changed. Pickled items have `item` binary.
    `as_tuples`: the state accepts and returns structs as tuples; only for a value without lists or maps in it, and without
    a ttl. `refuse(text, value)` makes the error for a value that doesn't fit. `map_key_parts` are the types of the parts of
    a map's key, if the key is text that holds several values.
    """

    def __init__(
        self,
        *,
        kind: StateKind,
        shape: str,
        item: ItemType,
        map_key: KeyType | None = None,
        name: str | None = None,
        alias: Names = (),
        added: Mapping[str, Any] | None = None,
        renamed: Mapping[str, str] | None = None,
        default: Any = None,
        add: Callable[[Any, Any], Any] | None = None,
        create: Callable[[], Any] | None = None,
        result: Callable[[Any], Any] | None = None,
        ttl: Duration | None = None,
        ttl_refresh: str = "write",
        as_tuples: bool = False,
    ) -> None:
        where = _FUNCTIONS.get(kind, shape)
        if name is not None:
            arguments.text(where, "name", name, "a name, or nothing for that of the attribute")
        for argument, given in (("added", added), ("renamed", renamed)):
            if given is not None and not isinstance(given, Mapping):
                arguments.refuse(where, argument, given, "a dict by the names of fields")
        self.kind = kind
        self.shape = shape
        self.ttl = declared_ttl(ttl, ttl_refresh)
        self.pickled = item if isinstance(item, Pickled) else None
        self.item = pa.binary() if self.pickled is not None else parse_type(item)
        self.map_key = None if map_key is None else _map_key(map_key)
        self.name = name
        self.aliases = _aliases(alias)
        inside = {StateKind.UNION: "item", StateKind.BROADCAST: "value"}.get(kind, "")
        self.changes = Changes(dict(added or {}), dict(renamed or {}), inside)
        check_changes(self.item, self.changes)
        self.default = default
        if default is not None and shape == "value":
            what = f"a state has default={default!r} and is declared with {self._item_text!r}"
            self.default = _converter(self.form, what)(default)
        self.add = add
        self.create = create
        self.result = result
        self.as_tuples = as_tuples
        self.refuse = _refused
        self.map_key_parts: Sequence[pa.DataType] = ()
        if self.pickled is not None and shape == "aggregating":
            self._wrap(self.pickled)

    def __set_name__(self, owner: type, attribute: str) -> None:
        if self.name is None:
            self.name = attribute

    @property
    def type(self) -> pa.DataType:
        """The Arrow type of the column `value` in a snapshot."""
        if self.map_key is not None and self.kind is StateKind.KEYED:
            return pa.map_(self.map_key, self.item)
        if self.map_key is not None:
            return pa.struct([pa.field("key", self.map_key), pa.field("value", self.item)])
        if self.shape in ("list", "timers") and self.kind is StateKind.KEYED:
            return pa.list_(self.item)
        if self.kind is StateKind.UNION:
            return pa.struct([pa.field("id", pa.string()), pa.field("item", self.item)])
        return self.item

    @property
    def form(self) -> Form:
        """The form in which a value, list item or map value is held."""
        if self.pickled is not None and self.shape != "aggregating":
            return self.pickled.form(self.name)
        return form_of(self.item)

    @property
    def key_form(self) -> Form:
        """The form in which a map's keys are held."""
        assert self.map_key is not None
        return form_of(self.map_key)

    def converter(self) -> Callable[[Any], Any]:
        """Return a function that converts a value, list item or map value to the form in which it is held."""
        return _converter(self.form, f"state {self.name!r} is declared with {self._item_text!r}", refuse=self.refuse)

    def key_converter(self) -> Callable[[Any], Any]:
        """Return such a function for a map's keys."""
        assert self.map_key is not None
        return _converter(
            self.key_form,
            f"state {self.name!r} is declared with keys of {ddl_of(self.map_key)!r}",
            none_allowed=False,
            refuse=self.refuse,
        )

    def info(self, key: pa.DataType | None = None) -> StateInfo:
        """Return what a manifest holds about this state; `key` is the type of the operator's key, for keyed state."""
        assert self.name is not None, "the descriptor was not declared in a class body and has no name="
        assert (key is not None) == (self.kind is StateKind.KEYED)
        fields = [pa.field("value", self.type)] if key is None else [pa.field("key", key), pa.field("value", self.type)]
        if self.ttl is not None:
            fields.append(expires_field(self.shape))
        metadata = {} if self.pickled is None else self.pickled.metadata()
        if self.map_key_parts:
            metadata[MAP_KEY] = f"({', '.join(map(ddl_of, self.map_key_parts))})".encode()
        return StateInfo(self.name, self.kind, self.shape, pa.schema(fields, metadata=metadata or None))

    def __repr__(self) -> str:
        of_items = "" if self.pickled is None else f" of {self.pickled}"
        return f"{self.shape} {self.name}: {ddl_of(self.type)}{of_items}"

    @property
    def _item_text(self) -> str:
        return ddl_of(self.item) if self.pickled is None else str(self.pickled)

    def _wrap(self, pickled: Pickled) -> None:
        """Pickle accumulators around the user's functions. Those may change an accumulator in place, but not bytes: so the
        state holds bytes, and the functions get the unpickled accumulator."""
        create, add, result = self.create, self.add, self.result
        assert create is not None and add is not None

        def held(accumulator: Any) -> Any:
            try:
                return pickled.held(accumulator)
            except SchemaError as error:
                raise SchemaError(f"state {self.name!r} is declared with {self._item_text!r}: {error}") from error

        self.create = lambda: held(create())
        self.add = lambda accumulator, item: held(add(pickled.handed_out(accumulator, self.name), item))
        self.result = lambda accumulator: (
            pickled.handed_out(accumulator, self.name)
            if result is None
            else result(pickled.handed_out(accumulator, self.name))
        )


class Columns(Descriptor):
    """A columnar state: for each key, or for each key and window if `windowed`, a row with a value of each field. Operators
    declare it, and work on it in whole batches (column_table.py)."""

    def __init__(
        self,
        name: str | None,
        fields: Sequence[VectorField],
        *,
        windowed: bool = False,
        alias: Names = (),
        renamed: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            kind=StateKind.KEYED,
            shape="columns",
            item=pa.struct([field.arrow for field in fields]),
            name=name,
            alias=alias,
            added={
                field.name: field.default
                for field in fields
                if field.default is not None and field.name not in (renamed or {})
            },
            renamed=renamed,
        )
        self.fields = tuple(fields)
        self.windowed = windowed

    def info(self, key: pa.DataType | None = None) -> StateInfo:
        info = super().info(key)
        if not self.windowed:
            return info
        assert key is not None
        return StateInfo(info.name, info.kind, info.shape, info.schema.insert(1, pa.field(WINDOW, pa.int64())))


class Records(Descriptor):
    """A state of records by key, or by key and window if `windowed`: many for each key, in the order of their arrival.
    `columns` are those of the records, `fields` are values beside them that may change. Operators declare it, and work on it
    in whole batches (record_table.py)."""

    def __init__(
        self,
        name: str,
        columns: Sequence[pa.Field],
        fields: Sequence[VectorField] = (),
        *,
        windowed: bool = False,
        alias: Names = (),
        renamed: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            kind=StateKind.KEYED,
            shape="records",
            item=pa.struct([*(pa.field(each.name, each.type) for each in columns), *(field.arrow for field in fields)]),
            name=name,
            alias=alias,
            added={field.name: field.default for field in fields if field.default is not None},
            renamed=renamed,
        )
        self.columns = tuple(columns)
        self.fields = tuple(fields)
        self.windowed = windowed

    def info(self, key: pa.DataType | None = None) -> StateInfo:
        info = super().info(key)
        assert key is not None
        own = [WINDOW, POSITION] if self.windowed else [POSITION]
        schema = info.schema
        for place, name in enumerate(own, 1):
            schema = schema.insert(place, pa.field(name, pa.int64()))
        return StateInfo(info.name, info.kind, info.shape, schema)


class DeclaredColumns(Columns):
    """What `tg.columns` declares: a columnar state of a user's function. `declared` are the user's columns; with a ttl there
    is one more field, the time of the last write."""

    def __init__(
        self,
        columns: Any,
        *,
        defaults: Mapping[str, Any] | None = None,
        name: str | None = None,
        alias: Names = (),
        renamed: Mapping[str, str] | None = None,
        ttl: Duration | None = None,
    ) -> None:
        schema = parse_schema(columns)
        if defaults is not None and not isinstance(defaults, Mapping):
            arguments.refuse("columns", "defaults", defaults, "a dict by the names of columns")
        given = dict(defaults or {})
        _check_columns(schema, given)
        self.declared = tuple(VectorField(field.name, field.type, given.get(field.name)) for field in schema)
        declared = declared_ttl(ttl, "write")
        self.ttl_ms = None if declared is None else declared.ms
        touched = () if self.ttl_ms is None else (TOUCHED_FIELD,)
        super().__init__(name, [*self.declared, *touched], alias=alias, renamed=renamed)


def _check_columns(schema: pa.Schema, defaults: Mapping[str, Any]) -> None:
    for column, default in defaults.items():
        if column not in schema.names:
            there = ", ".join(map(repr, schema.names))
            raise JobError(f"columns: defaults has {column!r}, which is not declared; the columns are {there}")
        kind = schema.field(column).type
        try:
            from_list([default], kind)
        except SchemaError as error:
            raise SchemaError(
                f"columns: {column!r} is declared with {ddl_of(kind)!r}, and its default doesn't fit: {error}"
            ) from error
    for field in schema:
        if field.name.startswith("__"):
            raise JobError(f"columns: names beginning with '__' are the engine's: give {field.name!r} another name")
        if not field.nullable and defaults.get(field.name) is None:
            raise JobError(f"columns: {field.name!r} is NOT NULL: give what a new key has, defaults={{{field.name!r}: …}}")


def _refused(text: str, given: Any) -> SchemaError:
    return SchemaError(text)


def _converter(
    form: Form, declared: str, *, none_allowed: bool = True, refuse: Callable[[str, Any], SchemaError] = _refused
) -> Callable[[Any], Any]:
    held = form.held

    def convert(value: Any) -> Any:
        try:
            if value is None and not none_allowed:
                raise SchemaError("None can't be a key of a map")
            return held(value)
        except SchemaError as error:
            raise refuse(f"{declared}: {error}", value) from error.__cause__

    return convert


def _map_key(declared: Any) -> pa.DataType:
    if isinstance(declared, Pickled):
        raise JobError("a map state's key can't be pickled, since equal keys must be found again: use a string or a number")
    key = parse_type(declared)
    if key.num_fields:
        raise JobError(
            f"a map state's key is of type {ddl_of(key)}; Python can't look up lists and dicts: use a string or a number"
        )
    return key


def _aliases(alias: Any) -> tuple[str, ...]:
    aliases = (alias,) if isinstance(alias, str) else tuple(alias) if isinstance(alias, Collection) else (alias,)
    if not all(isinstance(each, str) and each and not each.startswith("__") for each in aliases):
        raise JobError(f"a state has alias={alias!r}: give the name that it had, or a list of names")
    return aliases


def descriptors_of(function: object) -> Mapping[str, Descriptor]:
    """Return the states that a function declares, by attribute, base classes first."""
    found: dict[str, Descriptor] = {}
    for owner in reversed(type(function).__mro__):
        for attribute, declared in vars(owner).items():
            if isinstance(declared, Descriptor):
                found[attribute] = declared
            else:
                found.pop(attribute, None)
    names = [descriptor.name for descriptor in found.values()]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise JobError(
            f"{type(function).__name__} declares two states named {sorted(map(str, twice))}: give one of them another name="
        )
    claimed = names + [alias for descriptor in found.values() for alias in descriptor.aliases]
    twice = {name for name in claimed if claimed.count(name) > 1}
    if twice:
        raise JobError(
            f"{type(function).__name__} has an alias= that is the name or alias of another state, or its own: "
            f"{sorted(map(str, twice))}. What a snapshot holds under a name goes to one state"
        )
    return found
