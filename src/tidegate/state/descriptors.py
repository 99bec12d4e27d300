"""How a user's function declares its state: `count = tg.value("long", default=0)` in the class body.

A descriptor says what a state is (shape, Arrow types, how it is redistributed); it holds no data. When a subtask opens
the function, a state object is made for each descriptor and put on the function's instance under the attribute's name,
where it hides the descriptor. The state objects' methods are the protocols below, the same on every backend.

Values are checked against the declared type, and take the form that they would have after a recovery, when they are
given to a state (values.py). What a state hands out is the user's: changing it changes no state.

A declaration may change between two runs. What it says of that (`alias`, `added`, `renamed`) is for a snapshot that was
written under an earlier one, and may stay for ever: a snapshot that already has the present names and fields is taken in
as it is (evolution.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import pyarrow as pa

from tidegate.errors import JobError, SchemaError
from tidegate.state.evolution import MAP_KEY, Changes, check_changes
from tidegate.state.pickled import Pickled
from tidegate.state.sections import StateInfo, StateKind
from tidegate.state.ttl import Duration, declared_ttl, expires_field
from tidegate.state.values import Form, form_of
from tidegate.types import ddl_of, parse_type

# Spark DDL text such as "long" or "struct<a: long>", a pyarrow or pyspark type, or what `tg.pickled()` gives.
ItemType: TypeAlias = "str | pa.DataType | Pickled"
Names: TypeAlias = "str | Sequence[str]"


class ValueState(Protocol):
    """One value for the current key."""

    def get(self) -> Any: ...
    def set(self, value: Any) -> None: ...
    def clear(self) -> None: ...


class ListState(Protocol):
    """A list for the current key; appending does not read it."""

    def get(self) -> tuple[Any, ...]: ...
    def add(self, item: Any) -> None: ...
    def extend(self, items: Iterable[Any]) -> None: ...
    def replace(self, items: Iterable[Any]) -> None: ...
    def clear(self) -> None: ...


class MapState(Protocol):
    """A dictionary for the current key."""

    def get(self, item: Any, default: Any = None) -> Any: ...
    def put(self, item: Any, value: Any) -> None: ...
    def remove(self, item: Any) -> None: ...
    def items(self) -> Iterable[tuple[Any, Any]]: ...
    def keys(self) -> Iterable[Any]: ...
    def values(self) -> Iterable[Any]: ...
    def clear(self) -> None: ...
    def __contains__(self, item: Any) -> bool: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __len__(self) -> int: ...


class MergingState(Protocol):
    """Reducing and aggregating state: values go in one by one, the merged result comes out."""

    def get(self) -> Any: ...
    def add(self, item: Any) -> None: ...
    def clear(self) -> None: ...


class OperatorListState(Protocol):
    """A list that belongs to a subtask, not to a key."""

    def get(self) -> tuple[Any, ...]: ...
    def add(self, item: Any) -> None: ...
    def extend(self, items: Iterable[Any]) -> None: ...
    def replace(self, items: Iterable[Any]) -> None: ...
    def clear(self) -> None: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __len__(self) -> int: ...


class BroadcastState(MapState, Protocol):
    """A dictionary that is the same on every subtask. Writing is allowed in `process_broadcast` only."""


class Descriptor:
    """A declared state. `item` is the Arrow type of a value, list item or map value; `map_key` that of a map's key.

    `aliases` are names that the state had, `changes` says how its type came to be. Of pickled items `item` is binary.
    `as_tuples`: the state takes and gives its structs as tuples; that is for a value without lists or maps in it, and
    without a ttl. `refuse` makes the error for a value that doesn't fit, of a text and that value. `map_key_parts` are the
    types of which a map's key is made, where it is text that holds several values.
    """

    def __init__(
        self,
        *,
        kind: StateKind,
        shape: str,
        item: ItemType,
        map_key: str | pa.DataType | None = None,
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
        """How a value, list item or map value is held."""
        if self.pickled is not None and self.shape != "aggregating":
            return self.pickled.form(self.name)
        return form_of(self.item)

    @property
    def key_form(self) -> Form:
        """How a map's keys are held."""
        assert self.map_key is not None
        return form_of(self.map_key)

    def keeper(self) -> Callable[[Any], Any]:
        """A function that brings a value, list item or map value into the form in which it is held."""
        return _keeper(self.form, f"state {self.name!r} is declared with {self._item_text!r}", refuse=self.refuse)

    def key_keeper(self) -> Callable[[Any], Any]:
        """The same for a map's keys."""
        assert self.map_key is not None
        return _keeper(
            self.key_form,
            f"state {self.name!r} is declared with keys of {ddl_of(self.map_key)!r}",
            none_allowed=False,
            refuse=self.refuse,
        )

    def info(self, key: pa.DataType | None = None) -> StateInfo:
        """What a manifest says about this state; `key` is the type of the operator's key, for keyed state."""
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
        """An accumulator may be changed in place, which bytes can't. So the state sees bytes only, and the user's
        functions see what was pickled."""
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


def value(
    type: ItemType,
    *,
    default: Any = None,
    name: str | None = None,
    alias: Names = (),
    added: Mapping[str, Any] | None = None,
    renamed: Mapping[str, str] | None = None,
    ttl: Duration | None = None,
    ttl_refresh: str = "write",
) -> Any:
    """One value for each key. `default` is what `get` returns where nothing was set.

    `ttl="1 day"`: it is forgotten when it wasn't set for so long, by what `ctx.now_ms()` says; with `ttl_refresh="read"`,
    neither set nor read. Of lists and maps each item by itself, and `len` doesn't count as reading.

    For snapshots of an earlier program: `alias` is the name that the state had (or a list of them); `added={"b": 0}` gives
    a field of a struct that is new a value in what is there already (None without it); `renamed={"new": "old"}` says what
    a field was called. Fields inside fields are joined by dots, and lists and maps need no name: `"address.zip"`.
    """
    declared = Descriptor(
        kind=StateKind.KEYED,
        shape="value",
        item=type,
        name=name,
        alias=alias,
        added=added,
        renamed=renamed,
        ttl=ttl,
        ttl_refresh=ttl_refresh,
    )
    what = f"a state has default={default!r} and is declared with {declared._item_text!r}"
    declared.default = _keeper(declared.form, what)(default)
    return declared


def list_(
    type: ItemType,
    *,
    name: str | None = None,
    alias: Names = (),
    added: Mapping[str, Any] | None = None,
    renamed: Mapping[str, str] | None = None,
    ttl: Duration | None = None,
    ttl_refresh: str = "write",
) -> Any:
    """A list for each key. `alias`, `added`, `renamed`, `ttl` and `ttl_refresh` are as in `value`, here and below."""
    return Descriptor(
        kind=StateKind.KEYED,
        shape="list",
        item=type,
        name=name,
        alias=alias,
        added=added,
        renamed=renamed,
        ttl=ttl,
        ttl_refresh=ttl_refresh,
    )


def map_(
    key: str | pa.DataType,
    value: ItemType,
    *,
    name: str | None = None,
    alias: Names = (),
    added: Mapping[str, Any] | None = None,
    renamed: Mapping[str, str] | None = None,
    ttl: Duration | None = None,
    ttl_refresh: str = "write",
) -> Any:
    """A dictionary for each key."""
    return Descriptor(
        kind=StateKind.KEYED,
        shape="map",
        item=value,
        map_key=key,
        name=name,
        alias=alias,
        added=added,
        renamed=renamed,
        ttl=ttl,
        ttl_refresh=ttl_refresh,
    )


def reducing(
    type: ItemType,
    function: Callable[[Any, Any], Any],
    *,
    name: str | None = None,
    alias: Names = (),
    added: Mapping[str, Any] | None = None,
    renamed: Mapping[str, str] | None = None,
    ttl: Duration | None = None,
    ttl_refresh: str = "write",
) -> Any:
    """`function(merged, item)` over the items added for each key, such as `max`; `get` is None before the first."""
    return Descriptor(
        kind=StateKind.KEYED,
        shape="reducing",
        item=type,
        add=function,
        name=name,
        alias=alias,
        added=added,
        renamed=renamed,
        ttl=ttl,
        ttl_refresh=ttl_refresh,
    )


def aggregating(
    type: ItemType,
    *,
    create: Callable[[], Any],
    add: Callable[[Any, Any], Any],
    result: Callable[[Any], Any] | None = None,
    name: str | None = None,
    alias: Names = (),
    added: Mapping[str, Any] | None = None,
    renamed: Mapping[str, str] | None = None,
    ttl: Duration | None = None,
    ttl_refresh: str = "write",
) -> Any:
    """An accumulator of `type` for each key: made by `create`, moved on by `add(accumulator, item)`, read by `result`.

    `add` returns the accumulator, a new one or the one it was given, which it may change in place. `get` is None before
    the first item.
    """
    return Descriptor(
        kind=StateKind.KEYED,
        shape="aggregating",
        item=type,
        create=create,
        add=add,
        result=result,
        name=name,
        alias=alias,
        added=added,
        renamed=renamed,
        ttl=ttl,
        ttl_refresh=ttl_refresh,
    )


def operator_list(
    type: ItemType,
    *,
    redistribute: str = "split",
    name: str | None = None,
    alias: Names = (),
    added: Mapping[str, Any] | None = None,
    renamed: Mapping[str, str] | None = None,
) -> Any:
    """A list for each subtask. At a restore its items are dealt out (`split`), or everyone gets all of them (`union`)."""
    if redistribute not in ("split", "union"):
        raise JobError(f"redistribute={redistribute!r}: operator list state is redistributed by 'split' or 'union'")
    return Descriptor(
        kind=StateKind(redistribute), shape="list", item=type, name=name, alias=alias, added=added, renamed=renamed
    )


def broadcast_map(
    key: str | pa.DataType,
    value: ItemType,
    *,
    name: str | None = None,
    alias: Names = (),
    added: Mapping[str, Any] | None = None,
    renamed: Mapping[str, str] | None = None,
) -> Any:
    """A dictionary that every subtask holds alike, written by the broadcast side of a `BroadcastProcess`."""
    return Descriptor(
        kind=StateKind.BROADCAST, shape="map", item=value, map_key=key, name=name, alias=alias, added=added, renamed=renamed
    )


def _refused(text: str, given: Any) -> SchemaError:
    return SchemaError(text)


def _keeper(
    form: Form, declared: str, *, none_allowed: bool = True, refuse: Callable[[str, Any], SchemaError] = _refused
) -> Callable[[Any], Any]:
    kept = form.kept

    def keep(value: Any) -> Any:
        try:
            if value is None and not none_allowed:
                raise SchemaError("None is no key of a map")
            return kept(value)
        except SchemaError as error:
            raise refuse(f"{declared}: {error}", value) from error.__cause__

    return keep


def _map_key(declared: Any) -> pa.DataType:
    if isinstance(declared, Pickled):
        raise JobError("a map state's key can't be pickled, since equal keys must be found again: use a text or a number")
    key = parse_type(declared)
    if key.num_fields:
        raise JobError(
            f"a map state's key is of type {ddl_of(key)}; Python can't look up lists and dicts: use a text or a number"
        )
    return key


def _aliases(alias: Any) -> tuple[str, ...]:
    aliases = (alias,) if isinstance(alias, str) else tuple(alias)
    if not all(isinstance(each, str) and each and not each.startswith("__") for each in aliases):
        raise JobError(f"a state has alias={alias!r}: give the name that it had, or a list of names")
    return aliases


def descriptors_of(function: object) -> Mapping[str, Descriptor]:
    """The states a function declares, by attribute, base classes first."""
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
