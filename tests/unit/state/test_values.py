"""Values have one form, whatever the user gave, and share nothing with the user's objects."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, namedtuple
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import SchemaError
from tidegate.state.values import NoSuchValue, detached, form_of
from tidegate.types import from_list, parse_type, to_list

Point = namedtuple("Point", ["x", "y"])


class Colour(IntEnum):
    RED = 1


NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)

# A type, what may be given, what is held.
FORMS: list[tuple[str, Any, Any]] = [
    ("long", 5, 5),
    ("long", np.int32(5), 5),
    ("long", Colour.RED, 1),
    ("long", None, None),
    ("double", 5, 5.0),
    ("double", 2.5, 2.5),
    ("double", np.float64(2.5), 2.5),
    ("float", 0.1, float(np.float32(0.1))),
    ("float", 1, 1.0),
    ("boolean", True, True),
    ("boolean", np.bool_(True), True),
    ("string", "a", "a"),
    ("binary", bytearray(b"a"), b"a"),
    ("binary", memoryview(b"a"), b"a"),
    ("decimal(10,2)", Decimal("1.5"), Decimal("1.50")),
    ("decimal(10,2)", 3, Decimal("3.00")),
    ("date", date(2024, 5, 1), date(2024, 5, 1)),
    ("timestamp", NOON, NOON),
    ("timestamp", NOON.astimezone(timezone(timedelta(hours=2))), NOON),
    ("timestamp_ntz", NOON.replace(tzinfo=None), NOON.replace(tzinfo=None)),
    ("array<double>", [1, 2.5, None], [1.0, 2.5, None]),
    ("array<double>", (1.5,), [1.5]),
    ("array<long>", np.array([1, 2]), [1, 2]),
    ("array<long>", [], []),
    ("array<array<long>>", [(1,), None], [[1], None]),
    ("map<string, double>", {"a": 1}, {"a": 1.0}),
    ("map<string, long>", defaultdict(int, a=1), {"a": 1}),
    ("map<long, array<long>>", {np.int64(1): (2,)}, {1: [2]}),
    ("struct<x: long, y: double>", (1, 2), {"x": 1, "y": 2.0}),
    ("struct<x: long, y: double>", Point(1, 2), {"x": 1, "y": 2.0}),
    ("struct<x: long, y: double>", {"y": 2.5, "x": 1}, {"x": 1, "y": 2.5}),
    ("struct<x: long, y: double>", OrderedDict(x=1, y=2.5), {"x": 1, "y": 2.5}),
    ("struct<x: long, p: struct<x: long, y: double>>", (1, (2, 3)), {"x": 1, "p": {"x": 2, "y": 3.0}}),
    ("struct<x: long, y: array<long>>", {"x": None, "y": None}, {"x": None, "y": None}),
]


@pytest.mark.parametrize(("declared", "given", "held"), FORMS)
def test_a_value_is_held_as_a_snapshot_would_give_it_back(declared: str, given: Any, held: Any) -> None:
    arrow = parse_type(declared)
    taken = form_of(arrow).held(given)
    assert exactly(taken) == exactly(held)
    assert exactly(to_list(from_list([taken], arrow))[0]) == exactly(held)
    assert exactly(form_of(arrow).held(taken)) == exactly(held)


def exactly(value: Any) -> Any:
    """Tells 1 from 1.0 and True, also inside."""
    if isinstance(value, dict):
        return [(exactly(key), exactly(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [exactly(item) for item in value]
    return type(value).__name__, repr(value)


@pytest.mark.parametrize(
    ("declared", "given"),
    [
        ("long", 1.0),
        ("long", True),
        ("long", "1"),
        ("double", "1"),
        ("double", False),
        ("boolean", 1),
        ("string", b"a"),
        ("string", 1),
        ("binary", "a"),
        ("date", NOON),
        ("timestamp", NOON.replace(tzinfo=None)),
        ("timestamp_ntz", NOON),
        ("decimal(4,2)", Decimal("123.45")),
        ("decimal(4,2)", 1.5),
        ("array<long>", "12"),
        ("array<long>", {1, 2}),
        ("array<long>", [1, "2"]),
        ("array<long>", [1, True]),
        ("map<string, long>", [("a", 1)]),
        ("map<string, long>", {"a": "b"}),
        ("map<string, long>", {1: 1}),
        ("struct<x: long, y: long>", (1,)),
        ("struct<x: long, y: long>", {"x": 1}),
        ("struct<x: long, y: long>", {"x": 1, "z": 1}),
        ("struct<x: long>", [1]),
        ("struct<x: long, y: long>", {"x": 1, "y": "1"}),
        ("struct<x: array<long>>", {"x": [1.5]}),
    ],
)
def test_a_value_of_another_type_is_refused(declared: str, given: Any) -> None:
    with pytest.raises(SchemaError):
        form_of(parse_type(declared)).held(given)


_values = {
    "array<long>": st.lists(st.integers(-5, 5) | st.none(), max_size=4),
    "array<struct<x: array<long>>>": st.lists(
        st.fixed_dictionaries({"x": st.lists(st.integers(0, 3), max_size=2)}), max_size=3
    ),
    "map<string, array<string>>": st.dictionaries(
        st.text(max_size=2), st.lists(st.text(max_size=2), max_size=2), max_size=3
    ),
    "struct<a: map<long, long>, b: long>": st.fixed_dictionaries(
        {"a": st.dictionaries(st.integers(0, 3), st.integers(0, 3), max_size=2), "b": st.none() | st.integers(0, 3)}
    ),
}


@pytest.mark.parametrize("declared", _values)
@given(data=st.data())
def test_containers_are_copied_on_their_way_in_and_out(declared: str, data: st.DataObject) -> None:
    value = data.draw(_values[declared])
    form = form_of(parse_type(declared))
    assert form.copied is not None and form.plain is NoSuchValue
    for taken in (form.held(value), form.copied(value)):
        assert taken == value
        assert not containers(taken) & containers(value)


def containers(value: Any) -> set[int]:
    if isinstance(value, dict):
        return {id(value)}.union(*map(containers, value.values()))
    if isinstance(value, list):
        return {id(value)}.union(*map(containers, value))
    return set()


def test_null_stays_null() -> None:
    for declared in ("long", "array<long>", "map<string, long>", "struct<x: long>", "timestamp"):
        form = form_of(parse_type(declared))
        assert form.held(None) is None
        assert form.copied is None or form.copied(None) is None


@pytest.mark.parametrize(
    ("declared", "long"),
    [
        ("long", NoSuchValue),
        ("struct<x: long, y: struct<z: long>>", NoSuchValue),
        ("array<long>", list),
        ("map<string, long>", dict),
        ("struct<x: long, y: array<long>>", dict),
    ],
)
def test_what_can_grow_is_known(declared: str, long: type) -> None:
    assert form_of(parse_type(declared)).long is long


@pytest.mark.parametrize("value", [1, "a", None, (1, "a"), Point(1, 2.0), NOON, Decimal(1)])
def test_what_can_t_change_is_not_copied(value: Any) -> None:
    assert detached(value) is value


@pytest.mark.parametrize("value", [[1], {"a": [1]}, (1, [2]), Point([1], 2), {1, 2}])
def test_what_can_change_is_copied_to_the_bottom(value: Any) -> None:
    before = copy.deepcopy(value)
    twin = detached(value)
    assert twin == before and type(twin) is type(value)
    assert not containers(twin) & containers(value)
