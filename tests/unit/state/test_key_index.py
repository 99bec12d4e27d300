"""The vectorised key index, compared with a dictionary over the keys that `key_list` makes."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.hashing import hash_columns
from tidegate.state.columns import key_list
from tidegate.state.key_index import KeyIndex
from tidegate.types import parse_type

_OTHER_NAN = float(np.array([0xFFF8_0000_0000_0001], np.uint64).view(np.float64)[0])

KEYS: dict[str, list[Any]] = {
    "long": [None, 0, 1, -1, -2, -3, 2**63 - 1, -(2**63), 7, 1 << 40],
    "int": [None, 0, 1, -1, -2, 2**31 - 1, -(2**31)],
    "byte": [None, 0, 1, -1, -2],
    "boolean": [None, True, False],
    "date": [None, *(np.array([0, 1, -1], "datetime64[D]").tolist())],
    "timestamp_ntz": [None, *(np.array([0, 1, -1], "datetime64[us]").tolist())],
    "double": [None, 0.0, -0.0, 1.0, float("nan"), _OTHER_NAN, float("-inf")],
    "float": [None, 0.0, -0.0, 0.5, float("nan")],
    "string": [None, "", "a", "b", "é", "e\u0301", "12345678", "123456789", "a" * 50, "a" * 49 + "b"],
    "binary": [None, b"", b"\0", b"\0\0", b"a"],
    "decimal(10,2)": [None, Decimal("1.50"), Decimal("-1.50"), Decimal(0)],
    "decimal(38,2)": [None, Decimal("1.50"), Decimal("-1.50"), Decimal(10) ** 30],
    "array<double>": [None, [], [0.0], [-0.0], [float("nan"), None], [None]],
    "struct<a: long, b: string>": [
        {"a": 1, "b": "x"},
        {"a": 1, "b": None},
        {"a": None, "b": "x"},
        {"a": None, "b": None},
        {"a": 2, "b": "x"},
    ],
    "struct<a: double, b: struct<c: double, d: date>>": [
        {"a": 0.0, "b": {"c": float("nan"), "d": None}},
        {"a": -0.0, "b": {"c": _OTHER_NAN, "d": None}},
        {"a": 0.0, "b": {"c": 0.0, "d": None}},
        {"a": 1.0, "b": None},
        {"a": 1.0, "b": {"c": None, "d": None}},
    ],
}
_HASHES = {"hashed": hash_columns, "two hashes": lambda columns: hash_columns(columns) & 1}
# Keys that are not their own codes, for which hashes may collide.
_HASHED = [
    key_type for key_type in KEYS if key_type.split("<")[0] in ("string", "binary", "decimal(10,2)", "array", "struct")
]


def columns_of(values: list[Any], kind: pa.DataType) -> list[pa.Array]:
    array = pa.array(values, kind)
    return array.flatten() if pa.types.is_struct(kind) else [array]


def plain(columns: list[pa.Array], kind: pa.DataType) -> list[Any]:
    return list(zip(*map(key_list, columns), strict=True)) if pa.types.is_struct(kind) else key_list(columns[0])


@pytest.mark.parametrize(
    ("key_type", "hashes"), [*((key_type, "hashed") for key_type in KEYS), *((kind, "two hashes") for kind in _HASHED)]
)
@given(data=st.data())
def test_each_key_has_one_row_whatever_comes_and_goes(key_type: str, hashes: str, data: st.DataObject) -> None:
    kind = parse_type(key_type)
    index = KeyIndex(kind, hash_of=_HASHES[hashes])
    rows_by_key: dict[Any, int] = {}
    some_keys = st.lists(st.sampled_from(KEYS[key_type]), max_size=12)
    for operation, values in data.draw(
        st.lists(st.tuples(st.sampled_from(["add", "add", "find", "remove", "renumber"]), some_keys), max_size=12)
    ):
        columns = columns_of(values, kind)
        keys = plain(columns, kind)
        if operation == "add":
            rows, added = index.rows_of(columns)
            assert len(set(added.tolist())) == len(set(keys) - set(rows_by_key)), "each new key is new once"
            assert not set(added.tolist()) & set(rows_by_key.values()), "a row is of one key"
            rows_by_key.update(zip(keys, rows.tolist(), strict=True))
        elif operation == "remove":
            gone = [key for key in dict.fromkeys(keys) if key in rows_by_key]
            rows = np.array([rows_by_key.pop(key) for key in gone], np.int64)
            index.remove(rows)
            index.free(rows)
        elif operation == "renumber":
            old = np.array(sorted(rows_by_key.values()), np.int64)
            index.renumber(old)
            numbers = {row: number for number, row in enumerate(old.tolist())}
            rows_by_key = {key: numbers[row] for key, row in rows_by_key.items()}
        assert index.find(columns).tolist() == [rows_by_key.get(key, -1) for key in keys]
        rows = np.array(list(rows_by_key.values()), np.int64)
        assert plain(index.keys(rows), kind) == list(rows_by_key)
        assert index.count == len(rows_by_key) <= index.top


@pytest.mark.parametrize("key_type", ["long", "int", "double", "string", "struct<a: long, b: string>"])
def test_many_keys_are_found_and_their_memory_goes_when_they_go(key_type: str) -> None:
    kind, count = parse_type(key_type), 50_000
    numbers = np.random.default_rng(1).permutation(count)
    column = pa.array(numbers)
    columns = [column, column.cast(pa.string())] if pa.types.is_struct(kind) else [column.cast(kind)]
    index = KeyIndex(kind)
    empty_bytes = index.nbytes
    rows, added = index.rows_of(columns)
    assert sorted(rows.tolist()) == sorted(added.tolist()) == list(range(count))
    again = [part.take(pa.array(numbers)) for part in columns]
    assert (index.find(again) == rows[numbers]).all()
    assert [part.to_pylist() for part in index.keys(rows)] == [part.to_pylist() for part in columns]
    for start in range(0, count, 1000):
        index.remove(rows[start : start + 1000])
        index.free(rows[start : start + 1000])
    assert index.count == 0 and (index.find(columns) == -1).all()
    index.renumber(np.empty(0, np.int64))
    assert index.nbytes <= empty_bytes + 1024


def test_rows_and_places_are_used_again_if_keys_come_and_go() -> None:
    for kind in (pa.int64(), pa.string()):
        index, bytes_held = KeyIndex(kind), 0
        for start in range(0, 100_000, 1_000):
            rows, _ = index.rows_of([pa.array(range(start, start + 1_000)).cast(kind)])
            index.remove(rows)
            index.free(rows)
            if start == 20_000:
                bytes_held = index.nbytes
        assert index.top == 1_000
        assert index.nbytes <= bytes_held


def test_a_row_that_is_not_freed_keeps_its_key() -> None:
    index = KeyIndex(pa.string())
    rows, _ = index.rows_of([pa.array(["a", "b", None])])
    index.remove(rows)
    others, _ = index.rows_of([pa.array(["c", "a"])])
    assert not set(others.tolist()) & set(rows.tolist())
    assert index.keys(rows)[0].to_pylist() == ["a", "b", None]
    index.free(rows)
    assert index.keys(others)[0].to_pylist() == ["c", "a"]


def test_a_slice_of_a_column_has_the_keys_of_the_slice() -> None:
    for values in (
        [1, 2, None, 3, 2],
        [1.0, -0.0, None, float("inf"), 0.0],
        ["a", "bb", None, "", "bb"],
        [True, False, None] * 2,
    ):
        column = pa.array(values).slice(1)
        index = KeyIndex(column.type)
        rows, _ = index.rows_of([column])
        assert index.keys(rows)[0].equals(column)
        assert (index.find([column.slice(2)]) == rows[2:]).all()


@pytest.mark.parametrize("kind", ["long", "string"])
def test_many_records_of_few_new_keys_take_few_rounds(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = 0
    add = KeyIndex._add

    def counted(self: KeyIndex, *arguments: Any) -> Any:
        nonlocal rounds
        rounds += 1
        return add(self, *arguments)

    monkeypatch.setattr(KeyIndex, "_add", counted)
    values = [number * number % 11 for number in range(20_000)]
    column = pa.array(values if kind == "long" else list(map(str, values)), parse_type(kind))
    rows, added = KeyIndex(column.type).rows_of([column])
    assert len(added) == len(set(values)) == len(set(rows.tolist())) == len(set(zip(rows.tolist(), values, strict=True)))
    assert rounds <= 8, "each round adds as many records as there is room for keys in a table that is still small"
