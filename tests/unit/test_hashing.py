"""The stable hash: golden values from Spark 4.3.0, and that nothing but value and type decides it."""

from __future__ import annotations

import unicodedata
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import SchemaError
from tidegate.hashing import hash_columns, hash_value
from tidegate.types import from_list, parse_type

NAN = float("nan")

# (type, value, `SELECT xxhash64(CAST(value AS type))` on Spark 4.3.0). State on disk depends on them: never change one.
GOLDEN: list[tuple[str, Any, int]] = [
    ("boolean", True, -6698625589789238999),
    ("boolean", False, 3614696996920510707),
    ("byte", 1, -6698625589789238999),
    ("byte", -1, 2017008487422258757),
    ("short", 1, -6698625589789238999),
    ("short", -1, 2017008487422258757),
    ("int", 1, -6698625589789238999),
    ("int", 0, 3614696996920510707),
    ("int", -1, 2017008487422258757),
    ("int", 2**31 - 1, 1508894993788531228),
    ("long", 1, -7001672635703045582),
    ("long", 0, -5252525462095825812),
    ("long", -1, 3858142552250413010),
    ("long", 2**63 - 1, -3246596055638297850),
    ("long", -(2**63), -8619748838626508300),
    ("float", 1.0, 700633588856507837),
    ("float", 0.0, 3614696996920510707),
    ("float", -0.0, 3614696996920510707),
    ("float", NAN, 2692338816207849720),
    ("double", 1.0, -2162451265447482029),
    ("double", 0.0, -5252525462095825812),
    ("double", -0.0, -5252525462095825812),
    ("double", NAN, -3127944061524951246),
    ("double", float("inf"), 5810986238603807492),
    ("double", -1.5, -1519168156472177911),
    ("string", "", -7444071767201028348),
    ("string", "a", -8582455328737087284),
    ("string", "abcd", -6810745876291105281),
    ("string", "user-42", -7161311977867824759),
    ("string", "12345678", 6863040065134489090),
    ("string", "\u00e9", 2065146811275570100),
    ("string", "e\u0301", -2923010410306571269),
    ("string", "x" * 31, -1716462135722163746),
    ("string", "x" * 32, 1299777543150008824),
    ("string", "the quick brown fox jumps over the lazy dog, twice", 4753530439057395644),
    ("binary", b"", -7444071767201028348),
    ("binary", b"\x00", -8959994473701255385),
    ("binary", bytes(range(64)), -3582744155969569138),
    ("date", date(1970, 1, 1), 3614696996920510707),
    ("date", date(2024, 2, 29), 4183429117450946631),
    ("date", date(1969, 12, 31), 2017008487422258757),
    ("timestamp", datetime(2024, 2, 29, 12, 30, 15, 123456, tzinfo=UTC), 769841498231672207),
    ("timestamp_ntz", datetime(2024, 2, 29, 12, 30, 15, 123456), 769841498231672207),
    ("decimal(10,2)", Decimal("1.00"), 8713583529807266080),
    ("decimal(10,2)", Decimal("-12345678.90"), 8562530703369362178),
    ("decimal(18,0)", Decimal(1), -7001672635703045582),
    ("decimal(18,9)", Decimal("-1.000000000"), 3260247235862235443),
    ("decimal(19,0)", Decimal(1), 6668291691252061002),
    ("decimal(20,2)", Decimal("1.00"), 4409375254388155230),
    ("decimal(38,0)", Decimal(-128), -7898411661632158123),
    ("decimal(38,0)", Decimal(-129), -6459515886037897956),
    ("decimal(38,0)", Decimal("9" * 38), -47190729175993179),
    ("array<long>", [], 42),
    ("array<long>", [1, None, 2], -8198029865082835910),
    ("array<string>", ["a", "b"], -7357372313250070212),
    ("struct<a: long, b: string>", (1, "a"), -8527884376001292090),
    ("struct<a: long, b: string>", (None, "a"), -8582455328737087284),
    ("struct<a: long, b: string>", (None, None), 42),
    ("long", None, 42),
    ("string", None, 42),
]


@pytest.mark.parametrize(("ddl", "value", "expected"), GOLDEN)
def test_golden_hashes_of_spark(ddl: str, value: Any, expected: int) -> None:
    assert hash_value(value, parse_type(ddl)) == expected


@pytest.mark.parametrize("ddl", sorted({ddl for ddl, _, _ in GOLDEN}))
def test_golden_hashes_hold_within_large_batches_and_slices_of_them(ddl: str) -> None:
    chosen = [(value, expected) for of, value, expected in GOLDEN if of == ddl] * 40
    values, expected = [None, *(value for value, _ in chosen)], [42, *(expected for _, expected in chosen)]
    array = from_list(values, parse_type(ddl))
    assert hash_columns([array]).tolist() == expected
    for start, stop in ((1, len(array)), (3, 30), (5, 8), (7, 7)):
        assert hash_columns([array[start:stop]]).tolist() == expected[start:stop]


@pytest.mark.parametrize("value", [value for ddl, value, _ in GOLDEN if ddl == "string" and value is not None])
def test_golden_hashes_hold_for_texts_of_one_length(value: str) -> None:
    expected = next(hash_ for ddl, text, hash_ in GOLDEN if (ddl, text) == ("string", value))
    array = pa.array([value] * 40)
    assert hash_columns([array]).tolist() == [expected] * 40
    assert hash_columns([array[3:]]).tolist() == [expected] * 37


@given(st.integers(1, 100), st.integers(17, 40), st.binary(min_size=400, max_size=400), st.integers(0, 9))
def test_texts_of_one_length_hash_as_each_alone(length: int, count: int, noise: bytes, start: int) -> None:
    values = [(noise * 11)[place * length : (place + 1) * length] for place in range(count + start)]
    column, seeds = pa.array(values, pa.binary()), pa.array(range(count + start))
    one_by_one = [
        hash_columns([seeds[place : place + 1], column[place : place + 1]])[0] for place in range(start, len(values))
    ]
    assert hash_columns([seeds[start:], column[start:]]).tolist() == one_by_one


def test_golden_hashes_of_keys_of_several_columns() -> None:
    a, b, c = pa.array([7]), pa.array(["a"]), pa.array([1.5])
    assert hash_columns([a, b, c]).tolist() == [-6153498008827818204]
    assert hash_columns([b, a, c]).tolist() == [6882610869193972217]


def test_a_struct_hashes_as_its_columns() -> None:
    columns = [pa.array([1, 2, None]), pa.array(["a", None, None])]
    struct = pa.StructArray.from_arrays(columns, names=["a", "b"])
    assert hash_columns([struct]).tolist() == hash_columns(columns).tolist()
    for key in ((2, None), {"a": 2, "b": None}):
        assert hash_value(key, struct.type) == hash_columns(columns)[1]


# docs/promises.md, row 15: what Python or Unicode calls equal, or doesn't, must not decide where state is.


def test_one_true_and_one_point_zero_are_one_key_only_where_the_type_says_so() -> None:
    assert hash_value(1, parse_type("double")) == hash_value(1.0, parse_type("double"))
    assert hash_value(1, parse_type("long")) != hash_value(1.0, parse_type("double"))
    assert hash_value(1, parse_type("int")) != hash_value(1, parse_type("long"))
    for ddl, value in (("long", True), ("long", 1.0), ("double", True), ("boolean", 1), ("string", 1), ("long", "1")):
        with pytest.raises(SchemaError):
            hash_value(value, parse_type(ddl))


def test_numpys_numbers_hash_as_pythons() -> None:
    assert hash_value(np.int32(5), parse_type("long")) == hash_value(5, parse_type("long"))
    assert hash_value(np.float64(2.5), parse_type("double")) == hash_value(2.5, parse_type("double"))


@pytest.mark.parametrize("ddl", ["float", "double"])
def test_minus_zero_is_zero(ddl: str) -> None:
    assert -0.0 == 0.0 and str(-0.0) != str(0.0)
    assert hash_value(-0.0, parse_type(ddl)) == hash_value(0.0, parse_type(ddl))
    assert len(set(hash_columns([from_list([0.0, -0.0] * 20, parse_type(ddl))]).tolist())) == 1


@pytest.mark.parametrize("bits", [0x7FF8 << 48, 0xFFF8 << 48, 0x7FF0 << 48 | 1, 0xFFF7 << 48 | 0x1234, 2**64 - 1])
def test_every_nan_is_one_key(bits: int) -> None:
    numbers = np.array([bits] * 20, dtype=np.uint64).view(np.float64)
    assert np.isnan(numbers).all()
    assert set(hash_columns([pa.array(numbers, from_pandas=False)]).tolist()) == {hash_value(NAN, parse_type("double"))}


@pytest.mark.parametrize("bits", [0x7FC0_0000, 0xFFC0_0000, 0x7F80_0001, 0xFFFF_FFFF])
def test_every_nan_of_32_bits_is_one_key(bits: int) -> None:
    numbers = np.array([bits] * 20, dtype=np.uint32).view(np.float32)
    assert np.isnan(numbers).all()
    assert set(hash_columns([pa.array(numbers, from_pandas=False)]).tolist()) == {hash_value(NAN, parse_type("float"))}


def test_infinity_is_no_nan() -> None:
    assert len({hash_value(value, parse_type("double")) for value in (NAN, float("inf"), -float("inf"))}) == 3


def test_composed_and_decomposed_text_are_two_keys_as_in_spark() -> None:
    composed, decomposed = (unicodedata.normalize(form, "Ångström") for form in ("NFC", "NFD"))
    assert composed != decomposed
    assert hash_value(composed, parse_type("string")) != hash_value(decomposed, parse_type("string"))


def test_nulls_leave_the_seed_so_a_null_column_does_not_count() -> None:
    numbers, nulls = pa.array([1, 2, 3]), pa.nulls(3, pa.string())
    assert hash_columns([numbers, nulls]).tolist() == hash_columns([numbers]).tolist()
    assert hash_columns([nulls, numbers]).tolist() == hash_columns([numbers]).tolist()
    assert hash_columns([pa.nulls(3)]).tolist() == [42, 42, 42]


def test_what_lies_under_a_null_does_not_count() -> None:
    validity, data = pa.py_buffer(bytes([0b101])), pa.py_buffer(np.array([7, 8, 9]).tobytes())
    array = pa.Array.from_buffers(pa.int64(), 3, [validity, data])
    assert array.to_pylist() == [7, None, 9]
    assert hash_columns([array]).tolist() == [hash_value(value, pa.int64()) for value in (7, None, 9)]


@given(st.lists(st.one_of(st.none(), st.binary(max_size=80)), min_size=17, max_size=60), st.data())
def test_a_rows_hash_does_not_depend_on_its_batch(values: list[bytes | None], data: st.DataObject) -> None:
    alone = [hash_value(value, pa.binary()) for value in values]
    array = pa.array(values, type=pa.binary())
    assert hash_columns([array]).tolist() == alone
    start = data.draw(st.integers(0, len(values)))
    stop = data.draw(st.integers(start, len(values)))
    assert hash_columns([array[start:stop]]).tolist() == alone[start:stop]
    numbers = pa.array(range(len(values)))
    both = [hash_value(pair, parse_type("struct<a: long, b: binary>")) for pair in enumerate(values)]
    assert hash_columns([numbers, array]).tolist() == both


@pytest.mark.parametrize("length", [*range(101), 1023, 1024, 1025, 5000])
def test_rows_of_any_length_hash_alone_as_among_others(length: int) -> None:
    text = bytes(index * 7 % 256 for index in range(length))
    alone = hash_value(text, pa.binary())
    for count in (17, 100):  # many of this length; and one among short ones
        assert set(hash_columns([pa.array([text] * count)]).tolist()) == {alone}
        assert hash_columns([pa.array([b"short"] * count + [text])])[-1] == alone


def test_rows_of_all_lengths_hash_together_as_alone() -> None:
    texts = [bytes(index * 11 % 256 for index in range(length * 67 % 211)) for length in range(211)]
    assert {len(text) for text in texts} == set(range(211))
    assert hash_columns([pa.array(texts)]).tolist() == [hash_value(text, pa.binary()) for text in texts]


def test_large_strings_dictionaries_and_bytes_hash_as_strings() -> None:
    plain = pa.array(["", "a", None, "x" * 70, "a", "é"] * 10)
    expected = hash_columns([plain]).tolist()
    for spelled in (
        plain.cast(pa.large_string()),
        plain.dictionary_encode(),
        plain.cast(pa.binary()),
        plain.cast(pa.large_binary()),
    ):
        assert hash_columns([spelled]).tolist() == expected
        assert hash_columns([spelled[7:31]]).tolist() == expected[7:31]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_the_unit_of_a_timestamp_does_not_count(unit: str) -> None:
    seconds = pa.array([0, 1, -1, 1_700_000_000, None]).cast(pa.timestamp("s"))
    assert (
        hash_columns([seconds.cast(pa.timestamp(unit, tz="UTC"))]).tolist()
        == hash_columns([seconds.cast(pa.timestamp("us"))]).tolist()
    )


def test_hashing_leaves_its_input_alone() -> None:
    for array in (pa.array(range(50)), pa.array(["x" * n for n in range(50)]), pa.array([0.5, -0.0] * 25)):
        before = array.to_pylist()
        hash_columns([array, array])
        assert array.to_pylist() == before


@pytest.mark.parametrize("ddl", ["map<string, long>", "array<map<int, int>>", "struct<a: int, m: map<int, int>>"])
def test_maps_are_refused_as_keys_even_where_there_is_no_data(ddl: str) -> None:
    with pytest.raises(SchemaError, match=r"map<.*> can't be a key"):
        hash_columns([pa.array([], type=parse_type(ddl))])
    with pytest.raises(SchemaError, match="can't be a key"):
        hash_columns([pa.array([1, 2]), pa.nulls(2, parse_type(ddl))])


def test_types_that_spark_does_not_have_are_refused_as_keys() -> None:
    with pytest.raises(SchemaError, match="uint64"):
        hash_columns([pa.array([1], type=pa.uint64())])


def test_no_rows_have_no_hashes() -> None:
    for ddl in ("long", "string", "double", "decimal(38,0)", "array<int>", "struct<a: int>"):
        hashes = hash_columns([pa.array([], type=parse_type(ddl))])
        assert hashes.dtype == np.int64 and len(hashes) == 0
