"""How a user's function declares its state: `count = tg.value("long", default=0)` in the class body.

Type checkers see the state that the function will have under that name (`handles.py`): a `ValueState[int]` for the
declaration above. They recognise the scalar types by their DDL names. States of other types hold `Any`, and so do maps whose
keys are neither strings nor integers, or whose values are dates, timestamps or binary. When Python runs, a declaration is a
`Descriptor`, which the state replaces when a subtask opens the function.

A declaration may change between two runs. `alias`, `added` and `renamed` are for a snapshot that was written under an
earlier declaration, and may stay forever: a snapshot that already has the present names and fields is loaded unchanged
(evolution.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import date, datetime
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, TypeVar, Unpack, overload

from tidegate import arguments
from tidegate.arguments import Duration
from tidegate.state.descriptors import DeclaredColumns, Descriptor, ItemType, KeyType, Names
from tidegate.state.handles import (
    AggregatingState,
    BroadcastState,
    ColumnsState,
    ListState,
    MapState,
    OperatorListState,
    ReducingState,
    ValueState,
)
from tidegate.state.sections import StateKind

Whole: TypeAlias = Literal["long", "bigint", "int", "integer", "short", "smallint", "byte", "tinyint"]
Real: TypeAlias = Literal["double", "float", "real"]
Text: TypeAlias = Literal["string"]
Bool: TypeAlias = Literal["boolean"]
Binary: TypeAlias = Literal["binary"]
Day: TypeAlias = Literal["date"]
Moment: TypeAlias = Literal["timestamp", "timestamp_ltz", "timestamp_ntz"]
Redistribute: TypeAlias = Literal["split", "union"]
Refresh: TypeAlias = Literal["write", "read"]

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault  # Python's own has defaults from 3.13 on

    In = TypeVarWithDefault("In", default=Any)  # a lambda has no type for its items
else:
    In = TypeVar("In")
Acc = TypeVar("Acc")
Out = TypeVar("Out")


class Declared(TypedDict, total=False):
    """The options of every declaration. See `value`."""

    name: str | None
    alias: Names
    added: Mapping[str, Any] | None
    renamed: Mapping[str, str] | None


class Keyed(Declared, total=False):
    """The further options of declarations of keyed state."""

    ttl: Duration | None
    ttl_refresh: Refresh


@overload
def value(type: Whole, *, default: int, **options: Unpack[Keyed]) -> ValueState[int]: ...
@overload
def value(type: Whole, *, default: None = None, **options: Unpack[Keyed]) -> ValueState[int | None]: ...
@overload
def value(type: Real, *, default: float, **options: Unpack[Keyed]) -> ValueState[float]: ...
@overload
def value(type: Real, *, default: None = None, **options: Unpack[Keyed]) -> ValueState[float | None]: ...
@overload
def value(type: Text, *, default: str, **options: Unpack[Keyed]) -> ValueState[str]: ...
@overload
def value(type: Text, *, default: None = None, **options: Unpack[Keyed]) -> ValueState[str | None]: ...
@overload
def value(type: Bool, *, default: bool, **options: Unpack[Keyed]) -> ValueState[bool]: ...
@overload
def value(type: Bool, *, default: None = None, **options: Unpack[Keyed]) -> ValueState[bool | None]: ...
@overload
def value(type: Binary, *, default: bytes, **options: Unpack[Keyed]) -> ValueState[bytes]: ...
@overload
def value(type: Binary, *, default: None = None, **options: Unpack[Keyed]) -> ValueState[bytes | None]: ...
@overload
def value(type: Day, *, default: date, **options: Unpack[Keyed]) -> ValueState[date]: ...
@overload
def value(type: Day, *, default: None = None, **options: Unpack[Keyed]) -> ValueState[date | None]: ...
@overload
def value(type: Moment, *, default: datetime, **options: Unpack[Keyed]) -> ValueState[datetime]: ...
@overload
def value(type: Moment, *, default: None = None, **options: Unpack[Keyed]) -> ValueState[datetime | None]: ...
@overload
def value(type: ItemType, *, default: Any = None, **options: Unpack[Keyed]) -> ValueState[Any]: ...
def value(
    type: ItemType,
    *,
    default: Any = None,
    name: str | None = None,
    alias: Names = (),
    added: Mapping[str, Any] | None = None,
    renamed: Mapping[str, str] | None = None,
    ttl: Duration | None = None,
    ttl_refresh: Refresh = "write",
) -> Any:
    """Declare one value for each key. `get` returns `default` if nothing was set.

    `ttl="1 day"`: the value is forgotten if it wasn't set for that long, by the time of `ctx.now_ms()`; with
    `ttl_refresh="read"`, if it was neither set nor read. Items of lists and entries of maps expire one by one, and `len`
    doesn't count as a read.

    For snapshots of an earlier program: `alias` is the name that the state had (or a list of names); `added={"b": 0}` is the
    value of a new field in structs that were written without it (None if it isn't given); `renamed={"new": "old"}` has the
    former name of a field. Names of nested fields are joined by dots, without names for lists and maps: `"address.zip"`.
    """
    return Descriptor(
        kind=StateKind.KEYED,
        shape="value",
        item=type,
        default=default,
        name=name,
        alias=alias,
        added=added,
        renamed=renamed,
        ttl=ttl,
        ttl_refresh=ttl_refresh,
    )


@overload
def list_(type: Whole, **options: Unpack[Keyed]) -> ListState[int]: ...
@overload
def list_(type: Real, **options: Unpack[Keyed]) -> ListState[float]: ...
@overload
def list_(type: Text, **options: Unpack[Keyed]) -> ListState[str]: ...
@overload
def list_(type: Bool, **options: Unpack[Keyed]) -> ListState[bool]: ...
@overload
def list_(type: Binary, **options: Unpack[Keyed]) -> ListState[bytes]: ...
@overload
def list_(type: Day, **options: Unpack[Keyed]) -> ListState[date]: ...
@overload
def list_(type: Moment, **options: Unpack[Keyed]) -> ListState[datetime]: ...
@overload
def list_(type: ItemType, **options: Unpack[Keyed]) -> ListState[Any]: ...
def list_(
    type: ItemType,
    *,
    name: str | None = None,
    alias: Names = (),
    added: Mapping[str, Any] | None = None,
    renamed: Mapping[str, str] | None = None,
    ttl: Duration | None = None,
    ttl_refresh: Refresh = "write",
) -> Any:
    """Declare a list for each key. `alias`, `added`, `renamed`, `ttl` and `ttl_refresh` are as in `value`."""
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


@overload
def map_(key: Text, value: Whole, **options: Unpack[Keyed]) -> MapState[str, int]: ...
@overload
def map_(key: Text, value: Real, **options: Unpack[Keyed]) -> MapState[str, float]: ...
@overload
def map_(key: Text, value: Text, **options: Unpack[Keyed]) -> MapState[str, str]: ...
@overload
def map_(key: Text, value: Bool, **options: Unpack[Keyed]) -> MapState[str, bool]: ...
@overload
def map_(key: Text, value: ItemType, **options: Unpack[Keyed]) -> MapState[str, Any]: ...
@overload
def map_(key: Whole, value: Whole, **options: Unpack[Keyed]) -> MapState[int, int]: ...
@overload
def map_(key: Whole, value: Real, **options: Unpack[Keyed]) -> MapState[int, float]: ...
@overload
def map_(key: Whole, value: Text, **options: Unpack[Keyed]) -> MapState[int, str]: ...
@overload
def map_(key: Whole, value: Bool, **options: Unpack[Keyed]) -> MapState[int, bool]: ...
@overload
def map_(key: Whole, value: ItemType, **options: Unpack[Keyed]) -> MapState[int, Any]: ...
@overload
def map_(key: KeyType, value: ItemType, **options: Unpack[Keyed]) -> MapState[Any, Any]: ...
def map_(
    key: KeyType,
    value: ItemType,
    *,
    name: str | None = None,
    alias: Names = (),
    added: Mapping[str, Any] | None = None,
    renamed: Mapping[str, str] | None = None,
    ttl: Duration | None = None,
    ttl_refresh: Refresh = "write",
) -> Any:
    """Declare a dictionary for each key. The options are as in `value`."""
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


@overload
def reducing(type: Whole, function: Callable[[int, int], int], **options: Unpack[Keyed]) -> ReducingState[int]: ...
@overload
def reducing(type: Real, function: Callable[[float, float], float], **options: Unpack[Keyed]) -> ReducingState[float]: ...
@overload
def reducing(type: Text, function: Callable[[str, str], str], **options: Unpack[Keyed]) -> ReducingState[str]: ...
@overload
def reducing(type: Bool, function: Callable[[bool, bool], bool], **options: Unpack[Keyed]) -> ReducingState[bool]: ...
@overload
def reducing(type: Binary, function: Callable[[bytes, bytes], bytes], **options: Unpack[Keyed]) -> ReducingState[bytes]: ...
@overload
def reducing(type: Day, function: Callable[[date, date], date], **options: Unpack[Keyed]) -> ReducingState[date]: ...
@overload
def reducing(
    type: Moment, function: Callable[[datetime, datetime], datetime], **options: Unpack[Keyed]
) -> ReducingState[datetime]: ...
@overload
def reducing(type: ItemType, function: Callable[[Any, Any], Any], **options: Unpack[Keyed]) -> ReducingState[Any]: ...
def reducing(
    type: ItemType,
    function: Callable[[Any, Any], Any],
    *,
    name: str | None = None,
    alias: Names = (),
    added: Mapping[str, Any] | None = None,
    renamed: Mapping[str, str] | None = None,
    ttl: Duration | None = None,
    ttl_refresh: Refresh = "write",
) -> Any:
    """Declare a merged item for each key: `function(merged, item)`, such as `max`, merges each item that is added with those
    before. `get` returns None before the first. The options are as in `value`."""
    arguments.function("reducing", "function", function, "a function of the merged item and the next one, such as max")
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


@overload
def aggregating(
    type: ItemType,
    *,
    create: Callable[[], Acc],
    add: Callable[[Acc, In], Acc],
    result: Callable[[Acc], Out],
    **options: Unpack[Keyed],
) -> AggregatingState[In, Out]: ...
@overload
def aggregating(
    type: ItemType,
    *,
    create: Callable[[], Acc],
    add: Callable[[Acc, In], Acc],
    result: None = None,
    **options: Unpack[Keyed],
) -> AggregatingState[In, Acc]: ...
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
    ttl_refresh: Refresh = "write",
) -> Any:
    """Declare an accumulator of `type` for each key: `create` makes it, `add(accumulator, item)` adds an item, and `get`
    returns `result(accumulator)`. The options are as in `value`.

    `add` returns the accumulator, a new one or the one it was given, which it may change in place. `get` returns None before
    the first item. Type checkers take the types of items and results from the annotations of `add` and `result`.
    """
    arguments.function("aggregating", "create", create, "a function without arguments that makes an accumulator")
    arguments.function("aggregating", "add", add, "a function of the accumulator and an item")
    if result is not None:
        arguments.function("aggregating", "result", result, "a function of the accumulator, or None")
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


def columns(
    columns: Any,
    *,
    defaults: Mapping[str, Any] | None = None,
    name: str | None = None,
    alias: Names = (),
    renamed: Mapping[str, str] | None = None,
    ttl: Duration | None = None,
) -> ColumnsState:
    """Declare columns of state for each key of a `KeyedBatchProcess`: `totals = tg.columns("n long, total double")`.

    A key without state has the `defaults`, such as `defaults={"n": 0}`, and nulls in the other columns. A column with a
    default is never null. `ttl`, `alias` and `renamed` are as in `tg.value`; a new column has its default, or null, for keys
    that a snapshot has without it.
    """
    declared: Any = DeclaredColumns(columns, defaults=defaults, name=name, alias=alias, renamed=renamed, ttl=ttl)
    found: ColumnsState = declared
    return found


@overload
def operator_list(
    type: Whole, *, redistribute: Redistribute = ..., **options: Unpack[Declared]
) -> OperatorListState[int]: ...
@overload
def operator_list(
    type: Real, *, redistribute: Redistribute = ..., **options: Unpack[Declared]
) -> OperatorListState[float]: ...
@overload
def operator_list(
    type: Text, *, redistribute: Redistribute = ..., **options: Unpack[Declared]
) -> OperatorListState[str]: ...
@overload
def operator_list(
    type: Bool, *, redistribute: Redistribute = ..., **options: Unpack[Declared]
) -> OperatorListState[bool]: ...
@overload
def operator_list(
    type: Binary, *, redistribute: Redistribute = ..., **options: Unpack[Declared]
) -> OperatorListState[bytes]: ...
@overload
def operator_list(
    type: Day, *, redistribute: Redistribute = ..., **options: Unpack[Declared]
) -> OperatorListState[date]: ...
@overload
def operator_list(
    type: Moment, *, redistribute: Redistribute = ..., **options: Unpack[Declared]
) -> OperatorListState[datetime]: ...
@overload
def operator_list(
    type: ItemType, *, redistribute: Redistribute = ..., **options: Unpack[Declared]
) -> OperatorListState[Any]: ...
def operator_list(
    type: ItemType,
    *,
    redistribute: Redistribute = "split",
    name: str | None = None,
    alias: Names = (),
    added: Mapping[str, Any] | None = None,
    renamed: Mapping[str, str] | None = None,
) -> Any:
    """Declare a list for each subtask. A restore distributes the items over the subtasks (`redistribute="split"`), or gives
    every subtask all of them (`"union"`)."""
    arguments.one_of("operator_list", "redistribute", redistribute, ("split", "union"))
    return Descriptor(
        kind=StateKind(redistribute),
        shape="list",
        item=type,
        name=name,
        alias=alias,
        added=added,
        renamed=renamed,
    )


@overload
def broadcast_map(key: Text, value: Whole, **options: Unpack[Declared]) -> BroadcastState[str, int]: ...
@overload
def broadcast_map(key: Text, value: Real, **options: Unpack[Declared]) -> BroadcastState[str, float]: ...
@overload
def broadcast_map(key: Text, value: Text, **options: Unpack[Declared]) -> BroadcastState[str, str]: ...
@overload
def broadcast_map(key: Text, value: Bool, **options: Unpack[Declared]) -> BroadcastState[str, bool]: ...
@overload
def broadcast_map(key: Text, value: ItemType, **options: Unpack[Declared]) -> BroadcastState[str, Any]: ...
@overload
def broadcast_map(key: Whole, value: Whole, **options: Unpack[Declared]) -> BroadcastState[int, int]: ...
@overload
def broadcast_map(key: Whole, value: Real, **options: Unpack[Declared]) -> BroadcastState[int, float]: ...
@overload
def broadcast_map(key: Whole, value: Text, **options: Unpack[Declared]) -> BroadcastState[int, str]: ...
@overload
def broadcast_map(key: Whole, value: Bool, **options: Unpack[Declared]) -> BroadcastState[int, bool]: ...
@overload
def broadcast_map(key: Whole, value: ItemType, **options: Unpack[Declared]) -> BroadcastState[int, Any]: ...
@overload
def broadcast_map(key: KeyType, value: ItemType, **options: Unpack[Declared]) -> BroadcastState[Any, Any]: ...
def broadcast_map(
    key: KeyType,
    value: ItemType,
    *,
    name: str | None = None,
    alias: Names = (),
    added: Mapping[str, Any] | None = None,
    renamed: Mapping[str, str] | None = None,
) -> Any:
    """Declare a dictionary that is the same in every subtask, written by the broadcast side of a `BroadcastProcess`."""
    return Descriptor(
        kind=StateKind.BROADCAST,
        shape="map",
        item=value,
        map_key=key,
        name=name,
        alias=alias,
        added=added,
        renamed=renamed,
    )
