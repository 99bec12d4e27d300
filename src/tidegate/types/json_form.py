"""Frozen dataclasses as JSON and back: the codec of manifests, and of what slots and the coordinator send each other.

A dataclass is an object with a key for each field, a tuple is a list, a mapping is an object. The types of the fields are
all that there is to declare; dataclasses check their values themselves (`__post_init__`).

Reading is strict: an unknown key, a missing key and a value of another type are a `ValueError` that says where. Two
exceptions: a field with the metadata `OPTIONAL` has no key if it is None, and a class marked `lenient` may lack keys, which
then have their defaults, and have unknown ones, which are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
_Read = Callable[[object, str], Any]
OPTIONAL = {"optional": True}
"""The metadata of a field that has no key if it is None, its default."""


def formerly(name: str) -> dict[str, object]:
    """Return the metadata of such a field that was written under another name before, and is read under both."""
    return {**OPTIONAL, "formerly": name}


_PLAIN: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "an integer"),
    float: ((float, int), "a number"),
    str: ((str,), "text"),
}
_lenient: set[type] = set()


def lenient(kind: type[_T]) -> type[_T]:
    """Mark a class whose fields come and go between versions, such as measurements. All of them have defaults."""
    _lenient.add(kind)
    return kind


def to_json(value: Any) -> Any:
    kind: Any = type(value)
    if is_dataclass(value):
        return {
            name: to_json(held)
            for name, is_optional in _keys(kind)
            if (held := getattr(value, name)) is not None or not is_optional
        }
    if isinstance(value, Mapping):
        return {key: to_json(held) for key, held in value.items()}
    return [to_json(item) for item in value] if isinstance(value, tuple | list) else value


@cache
def _keys(kind: Any) -> list[tuple[str, bool]]:
    """Return the names of the fields, and whether each has no key if it is None."""
    return [(each.name, bool(each.metadata)) for each in fields(kind)]


def from_json(kind: type[_T], value: object, where: str) -> _T:
    """Return the object of this class. `where` names the value in messages."""
    hint: Any = kind
    read: _T = _reader(hint)(value, where)
    return read


@cache
def _reader(hint: Any) -> _Read:
    origin, arguments = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return _object_reader(hint)
    if origin is UnionType:
        (inner,) = (_reader(each) for each in arguments if each is not NoneType)
        return lambda value, where: None if value is None else inner(value, where)
    if origin is tuple:
        return _tuple_reader(arguments)
    if hint not in _PLAIN:
        held = _reader(arguments[1])
        return lambda value, where: {
            key: held(item, f"{where}[{key!r}]") for key, item in _checked(value, (dict,), "an object", where).items()
        }
    kinds, name = _PLAIN[hint]
    return lambda value, where: _checked(value, kinds, name, where)


def _object_reader(kind: Any) -> _Read:
    hints, is_lenient = get_type_hints(kind), kind in _lenient
    readers = {each.name: _reader(hints[each.name]) for each in fields(kind)}
    renamed = {each.metadata["formerly"]: each.name for each in fields(kind) if "formerly" in each.metadata}
    needed = {each.name for each in fields(kind) if not (is_lenient or each.metadata)}

    def read(value: object, where: str) -> Any:
        found = {renamed.get(key, key): held for key, held in _checked(value, (dict,), "an object", where).items()}
        if not needed <= found.keys() or not (is_lenient or found.keys() <= readers.keys()):
            raise ValueError(f"{where}: expected the keys {sorted(readers)}, found {sorted(found)}")
        values = {key: readers[key](held, f"{where}.{key}") for key, held in found.items() if key in readers}
        try:
            return kind(**values)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    return read


def _tuple_reader(arguments: tuple[Any, ...]) -> _Read:
    if arguments[-1] is not Ellipsis:
        readers = [_reader(each) for each in arguments]

        def read(value: object, where: str) -> Any:
            found = _checked(value, (list,), "a list", where)
            if len(found) != len(readers):
                raise ValueError(f"{where}: expected {len(readers)} values, found {found!r:.80}")
            return tuple(reader(item, where) for reader, item in zip(readers, found, strict=True))

        return read
    each = _reader(arguments[0])
    return lambda value, where: tuple(
        each(item, f"{where}[{index}]") for index, item in enumerate(_checked(value, (list,), "a list", where))
    )


def _checked(value: object, kinds: tuple[type, ...], name: str, where: str) -> Any:
    if type(value) not in kinds:  # a JSON true is an int to Python, not to us
        raise ValueError(f"{where}: expected {name}, found {value!r:.80}")
    return value
