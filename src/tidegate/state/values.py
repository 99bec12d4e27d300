"""The form in which state holds values: one for each Arrow type, and never an object that the user holds too.

A user may give a tuple for a struct, an int for a double, a numpy number for a long. What comes back from a snapshot is
a dict, a float, an int. If state held what was given, a function would see other values after a recovery than without one,
and might fail only then. So a value is converted to the form that a snapshot gives it when it is given to a state.

Lists and dicts can be changed in place while a snapshot of them is written. So they are copied on their way in and on their
way out.

Invariants:
- `held(value)` is, type for type, what the value would be after a snapshot: `to_list(from_list([value], type))[0]`.
- Neither `held(value)` nor `copied(value)` shares a list or dict with its argument.

Not here: whether an int is too large for its column. That is an error when a snapshot is written.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any

import pyarrow as pa

from tidegate.types import from_list, to_list


class NoSuchValue:
    """A Python type that no value of a state has."""


@dataclass(frozen=True, slots=True)
class Form:
    """How values of one Arrow type are held.

    `held` makes what is held of what the user gave, `copied` what the user gets of what is held. `copied` is None where
    that is the very same, because it can't be changed in place. `plain`: a value of exactly this Python type is held as it
    is; all others go through `held`. `long` is the Python type of values that have any length: what is built up in place
    in such a value isn't looked through again at every step.
    """

    held: Callable[[Any], Any]
    plain: type = NoSuchValue
    copied: Callable[[Any], Any] | None = None
    long: type = NoSuchValue


@lru_cache(maxsize=1024)
def form_of(arrow: pa.DataType) -> Form:
    if pa.types.is_list(arrow) or pa.types.is_large_list(arrow):
        return _form_of_lists(arrow)
    if pa.types.is_map(arrow):
        return _form_of_maps(arrow)
    if pa.types.is_struct(arrow):
        return _form_of_structs(arrow)
    if pa.types.is_timestamp(arrow) and arrow.unit == "us":
        return _form_of_moments(arrow)
    plain = _PLAIN.get(arrow.id, NoSuchValue)

    def held(value: Any) -> Any:
        return value if type(value) is plain or value is None else _through_arrow(value, arrow)

    return Form(held, plain)


def detached(value: Any) -> Any:
    """Return a copy of a value of any kind, or the value itself if it can't be changed in place."""
    kind = type(value)
    if kind in _ATOMS or (issubclass(kind, tuple) and _ATOMS.issuperset(map(type, value))):
        return value
    return copy.deepcopy(value)


_PLAIN: dict[int, type] = {
    pa.bool_().id: bool,
    pa.int8().id: int,
    pa.int16().id: int,
    pa.int32().id: int,
    pa.int64().id: int,
    pa.float64().id: float,
    pa.string().id: str,
    pa.large_string().id: str,
    pa.binary().id: bytes,
    pa.large_binary().id: bytes,
    pa.date32().id: date,
}
_ATOMS = frozenset({type(None), bool, int, float, str, bytes, date, datetime, Decimal})


def _through_arrow(value: Any, arrow: pa.DataType) -> Any:
    """Return the value in the form that a snapshot gives it. Raise `SchemaError` if it isn't of this type."""
    return to_list(from_list([value], arrow))[0]


def _form_of_moments(arrow: pa.DataType) -> Form:
    zone = None if arrow.tz is None else UTC

    def held(value: Any) -> Any:
        return value if value is None or (type(value) is datetime and value.tzinfo is zone) else _through_arrow(value, arrow)

    return Form(held)


def _form_of_lists(arrow: pa.DataType) -> Form:
    item = form_of(arrow.value_type)
    plain_items = frozenset({item.plain, type(None)})

    def held(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value if value is None else _through_arrow(value, arrow)
        return list(value) if plain_items.issuperset(map(type, value)) else [item.held(each) for each in value]

    def copied(value: Any) -> Any:
        if value is None:
            return None
        return list(value) if item.copied is None else list(map(item.copied, value))

    return Form(held, copied=copied, long=list)


def _form_of_maps(arrow: pa.DataType) -> Form:
    key, item = form_of(arrow.key_type), form_of(arrow.item_type)

    def held(value: Any) -> Any:
        if not isinstance(value, dict):
            return value if value is None else _through_arrow(value, arrow)
        return {key.held(each): item.held(of_it) for each, of_it in value.items()}

    def copied(value: Any) -> Any:
        if value is None:
            return None
        return dict(value) if item.copied is None else {each: item.copied(of_it) for each, of_it in value.items()}

    return Form(held, copied=copied, long=dict)


def _form_of_structs(arrow: pa.DataType) -> Form:
    forms = {field.name: form_of(field.type) for field in arrow}
    names = tuple(forms)
    containers = {name: form.copied for name, form in forms.items() if form.copied is not None}

    def held(value: Any) -> Any:
        if isinstance(value, tuple) and len(value) == len(names):
            value = dict(zip(names, value, strict=True))
        elif not isinstance(value, dict) or value.keys() != forms.keys():
            return value if value is None else _through_arrow(value, arrow)
        return {name: form.held(value[name]) for name, form in forms.items()}

    def copied(value: Any) -> Any:
        if value is None:
            return None
        twin = dict(value)
        for name, copy_of in containers.items():
            twin[name] = copy_of(twin[name])
        return twin

    has_length = any(form.long is not NoSuchValue for form in forms.values())
    return Form(held, copied=copied, long=dict if has_length else NoSuchValue)
