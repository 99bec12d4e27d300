"""Keys and values as RocksDB's bytes."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import SchemaError
from tidegate.hashing import hash_columns
from tidegate.keygroups import groups_of
from tidegate.state.columns import key_list, keys_to_arrow
from tidegate.state.rocks_keys import KeySpelling, as_list, in_order, read_column, spelled_column
from tidegate.state.rocks_values import value_spelling
from tidegate.types import parse_type, to_list

GROUPS = 7
_NAN = float(np.array([0xFFF8_0000_0000_0001], np.uint64).view(np.float64)[0])
_longs = st.none() | st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 2)
_texts = st.none() | st.text(max_size=3) | st.sampled_from(["", "a", "aa", "\0", "a\0"])
_doubles = st.none() | st.floats() | st.sampled_from([0.0, -0.0, _NAN, float("nan")])
KEYS: dict[str, Any] = {
    "long": _longs,
    "string": _texts,
    "double": _doubles,
    "boolean": st.none() | st.booleans(),
    "binary": st.none() | st.binary(max_size=3),
    "date": st.none() | st.dates(),
    "decimal(20, 2)": st.none() | st.decimals(-1000, 1000, places=2),
    "timestamp": st.none() | st.datetimes(datetime(1900, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)),
    "array<double>": st.none() | st.lists(_doubles, max_size=3),
    "array<string>": st.none() | st.lists(_texts, max_size=3),
    "struct<a: long, b: string>": st.tuples(_longs, _texts),
    "struct<a: string, b: struct<c: double, d: array<string>>>": st.tuples(
        _texts, st.tuples(_doubles, st.none() | st.lists(_texts, max_size=2))
    ),
}
VALUES = [
    ("long", [1, None, -(2**63), 2**63 - 1]),
    ("int", [1, None]),
    ("float", [0.5, None, float("inf")]),
    ("double", [0.1, -0.0, None]),
    ("boolean", [True, False, None]),
    ("string", ["", "é", None]),
    ("binary", [b"", b"\0\xff", None]),
    ("date", [date(1, 1, 1), None]),
    ("decimal(20, 2)", [Decimal("1.50"), None]),
    ("timestamp", [datetime(2024, 1, 1, 1, 2, 3, 4, tzinfo=UTC), None]),
    ("timestamp_ntz", [datetime(1, 1, 1), None]),
    ("array<long>", [[], [1, None], None]),
    ("array<binary>", [[b"\xff", None], None]),
    ("map<string, double>", [{"b": 0.1, "a": None}, {}, None]),
    ("map<date, decimal(5, 1)>", [{date(2024, 1, 1): Decimal("1.0")}]),
    ("array<map<long, timestamp>>", [[{2: datetime(2024, 1, 1, tzinfo=UTC), 1: None}, None]]),
    ("struct<a: long, b: array<struct<c: string>>>", [{"a": 1, "b": [{"c": None}, None]}, None, {"a": None, "b": None}]),
    ("struct<a: timestamp, b: binary>", [{"a": datetime(2024, 1, 1, tzinfo=UTC), "b": b"x"}, {"a": None, "b": None}]),
]


@pytest.mark.parametrize("kind", KEYS)
@given(data=st.data())
def test_bytes_are_equal_where_keys_are_and_no_key_begins_with_another(kind: str, data: Any) -> None:
    given_keys = data.draw(st.lists(KEYS[kind], min_size=1, max_size=12))
    column = pa.array([_as_dicts(key, parse_type(kind)) for key in given_keys], parse_type(kind))
    held = key_list(column)
    spelling = KeySpelling(column.type, GROUPS)
    spelled = as_list(spelling.spelled(column, prefix=b"\0\1"))
    for one, its in zip(held, spelled, strict=True):
        for other, others in zip(held, spelled, strict=True):
            same = one is other or one == other
            assert (its == others) == same
            assert same or not others.startswith(its)
    groups = groups_of(hash_columns([column]), GROUPS).tolist()
    assert [int.from_bytes(each[2:4]) for each in spelled] == groups
    places, order = in_order(spelling.spelled(column, prefix=b"\0\1"))
    assert places == sorted(spelled) == [spelled[place] for place in order]
    assert as_list(spelling.spelled(keys_to_arrow(held, column.type), prefix=b"\0\1")) == spelled, "as the tables hold them"
    back, ends = spelling.read([each + b"behind" for each in spelled], skip=4)
    assert back.type == column.type and repr(key_list(back)) == repr(held)
    assert ends == list(map(len, spelled))


def _as_dicts(key: Any, kind: pa.DataType) -> Any:
    if not pa.types.is_struct(kind) or key is None:
        return key
    return {field.name: _as_dicts(each, field.type) for field, each in zip(kind, key, strict=True)}


def test_a_slice_of_a_column_is_spelled_as_a_column_of_its_own() -> None:
    for kind, keys in (
        ("long", [1, 2, 3, 4]),
        ("string", ["a", "b", None, "d"]),
        ("array<long>", [[1], [2, 3], None, [4]]),
        ("boolean", [True, False, None, True]),
    ):
        column = pa.array(keys, parse_type(kind))
        assert spelled_column(column[1:3]) == spelled_column(pa.array(keys[1:3], parse_type(kind)))


@pytest.mark.parametrize(("kind", "values"), VALUES)
def test_values_come_back_as_they_were(kind: str, values: list[Any]) -> None:
    arrow = parse_type(kind)
    spelling = value_spelling(arrow)
    spelled = spelling.spelled(values)
    assert all(type(each) is bytes for each in spelled)
    assert repr(spelling.values(spelled)) == repr([spelling.value(each) for each in spelled]) == repr(values)
    column = spelling.column(spelled)
    assert column.type == arrow and repr(to_list(column)) == repr(values)
    assert spelling.values([]) == [] and len(spelling.column([])) == 0


@pytest.mark.parametrize(
    ("kind", "value"), [("long", 2**70), ("int", 2**40), ("string", "\ud800"), ("array<long>", ["a", b"b"])]
)
def test_what_doesn_t_fit_is_refused(kind: str, value: Any) -> None:
    with pytest.raises(SchemaError):
        value_spelling(parse_type(kind)).spelled([value])


def test_a_map_s_keys_are_read_from_behind_a_key() -> None:
    spelled = spelled_column(pa.array(["x", "yy", None]))
    assert to_list(read_column([b"--" + each for each in spelled], [2] * 3, pa.string())[0]) == ["x", "yy", None]
