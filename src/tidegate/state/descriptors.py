"""How a user's function declares its state: `count = tg.value("long", default=0)` in the class body.

A descriptor says what a state is (shape, Arrow types, how it is redistributed); it holds no data. When a subtask opens
the function, a state object is made for each descriptor and put on the function's instance under the attribute's name,
where it hides the descriptor. The state objects' methods are the protocols below, the same on every backend.

Values are checked against the declared type, and take the form that they would have after a recovery, when they are
given to a state (values.py). What a state hands out is the user's: changing it changes no state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import pyarrow as pa

from tidegate.errors import JobError, SchemaError
from tidegate.state.sections import StateInfo, StateKind
from tidegate.state.values import Form, form_of
from tidegate.types import ddl_of, parse_type


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
    """A declared state. `item` is the Arrow type of a value, list item or map value; `map_key` that of a map's key."""

    def __init__(self, *, kind: StateKind, shape: str, item: str | pa.DataType,
                 map_key: str | pa.DataType | None = None, name: str | None = None, default: Any = None,
                 add: Callable[[Any, Any], Any] | None = None, create: Callable[[], Any] | None = None,
                 result: Callable[[Any], Any] | None = None) -> None:
        self.kind = kind
        self.shape = shape
        self.item = parse_type(item)
        self.map_key = None if map_key is None else parse_type(map_key)
        if self.map_key is not None and self.map_key.num_fields:
            raise JobError(f"a map state's key is of type {ddl_of(self.map_key)}; Python can't look up lists and dicts: "
                           f"use a text or a number")
        self.name = name
        self.default = default
        self.add = add
        self.create = create
        self.result = result

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
        return form_of(self.item)

    @property
    def key_form(self) -> Form:
        """How a map's keys are held."""
        assert self.map_key is not None
        return form_of(self.map_key)

    def keeper(self) -> Callable[[Any], Any]:
        """A function that brings a value, list item or map value into the form in which it is held."""
        return _keeper(self.item, f"state {self.name!r} is declared with")

    def key_keeper(self) -> Callable[[Any], Any]:
        """The same for a map's keys."""
        assert self.map_key is not None
        return _keeper(self.map_key, f"state {self.name!r} is declared with keys of", none_allowed=False)

    def info(self, key: pa.DataType | None = None) -> StateInfo:
        """What a manifest says about this state; `key` is the type of the operator's key, for keyed state."""
        assert self.name is not None, "the descriptor was not declared in a class body and has no name="
        assert (key is not None) == (self.kind is StateKind.KEYED)
        fields = [pa.field("value", self.type)] if key is None else [pa.field("key", key), pa.field("value", self.type)]
        return StateInfo(self.name, self.kind, self.shape, pa.schema(fields))

    def __repr__(self) -> str:
        return f"{self.shape} {self.name}: {ddl_of(self.type)}"


def value(type: str | pa.DataType, *, default: Any = None, name: str | None = None) -> Any:
    """One value for each key. `default` is what `get` returns where nothing was set."""
    declared = Descriptor(kind=StateKind.KEYED, shape="value", item=type, name=name)
    declared.default = _keeper(declared.item, f"a state has default={default!r} and is declared with")(default)
    return declared


def list_(type: str | pa.DataType, *, name: str | None = None) -> Any:
    """A list for each key."""
    return Descriptor(kind=StateKind.KEYED, shape="list", item=type, name=name)


def map_(key: str | pa.DataType, value: str | pa.DataType, *, name: str | None = None) -> Any:
    """A dictionary for each key."""
    return Descriptor(kind=StateKind.KEYED, shape="map", item=value, map_key=key, name=name)


def reducing(type: str | pa.DataType, function: Callable[[Any, Any], Any], *, name: str | None = None) -> Any:
    """`function(merged, item)` over the items added for each key, such as `max`; `get` is None before the first."""
    return Descriptor(kind=StateKind.KEYED, shape="reducing", item=type, add=function, name=name)


def aggregating(type: str | pa.DataType, *, create: Callable[[], Any], add: Callable[[Any, Any], Any],
                result: Callable[[Any], Any] | None = None, name: str | None = None) -> Any:
    """An accumulator of `type` for each key: made by `create`, moved on by `add(accumulator, item)`, read by `result`.

    `add` returns the accumulator, a new one or the one it was given, which it may change in place. `get` is None before
    the first item.
    """
    return Descriptor(kind=StateKind.KEYED, shape="aggregating", item=type, create=create, add=add, result=result,
                      name=name)


def operator_list(type: str | pa.DataType, *, redistribute: str = "split", name: str | None = None) -> Any:
    """A list for each subtask. At a restore its items are dealt out (`split`), or everyone gets all of them (`union`)."""
    if redistribute not in ("split", "union"):
        raise JobError(f"redistribute={redistribute!r}: operator list state is redistributed by 'split' or 'union'")
    return Descriptor(kind=StateKind(redistribute), shape="list", item=type, name=name)


def broadcast_map(key: str | pa.DataType, value: str | pa.DataType, *, name: str | None = None) -> Any:
    """A dictionary that every subtask holds alike, written by the broadcast side of a `BroadcastProcess`."""
    return Descriptor(kind=StateKind.BROADCAST, shape="map", item=value, map_key=key, name=name)


def _keeper(arrow: pa.DataType, declared: str, *, none_allowed: bool = True) -> Callable[[Any], Any]:
    kept = form_of(arrow).kept

    def keep(value: Any) -> Any:
        try:
            if value is None and not none_allowed:
                raise SchemaError("None is no key of a map")
            return kept(value)
        except SchemaError as error:
            raise SchemaError(f"{declared} {ddl_of(arrow)!r}: {error}") from None

    return keep


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
        raise JobError(f"{type(function).__name__} declares two states named {sorted(map(str, twice))}: give one of "
                       f"them another name=")
    return found
