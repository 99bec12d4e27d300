"""Declared types, and the strict way between Python values and Arrow columns."""

from __future__ import annotations

import math
from collections import OrderedDict
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import JobError, SchemaError
from tidegate.types import (
    batch_of,
    ddl_of,
    from_list,
    parse_duration_ms,
    parse_schema,
    parse_type,
    row_class,
    rows_of,
    to_list,
)

UTC_MOMENT = pa.timestamp("us", tz="UTC")

# ---------------------------------------------------------------------------------------------- declared types


class Colour(IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("ddl", "expected"),
    [
        ("boolean", pa.bool_()),
        ("byte", pa.int8()),
        ("tinyint", pa.int8()),
        ("short", pa.int16()),
        ("smallint", pa.int16()),
        ("int", pa.int32()),
        ("integer", pa.int32()),
        ("long", pa.int64()),
        ("bigint", pa.int64()),
        ("float", pa.float32()),
        ("real", pa.float32()),
        ("double", pa.float64()),
        ("string", pa.string()),
        ("varchar(10)", pa.string()),
        ("char( 3 )", pa.string()),
        ("binary", pa.binary()),
        ("date", pa.date32()),
        ("timestamp", UTC_MOMENT),
        ("timestamp_ltz", UTC_MOMENT),
        ("timestamp_ntz", pa.timestamp("us")),
        ("decimal", pa.decimal128(10, 0)),
        ("decimal(5)", pa.decimal128(5, 0)),
        ("dec(38,38)", pa.decimal128(38, 38)),
        ("numeric( 5 , 2 )", pa.decimal128(5, 2)),
        ("  LONG ", pa.int64()),
        ("Array<Double>", pa.list_(pa.float64())),
        ("array<array<int>>", pa.list_(pa.list_(pa.int32()))),
        ("map<string,long>", pa.map_(pa.string(), pa.int64())),
        ("map < string , map<int,array<int>> >", pa.map_(pa.string(), pa.map_(pa.int32(), pa.list_(pa.int32())))),
        ("struct<a:int,b: string>", pa.struct([("a", pa.int32()), ("b", pa.string())])),
        (
            "struct<a int NOT NULL COMMENT 'it''s', `b-c` array<int>>",
            pa.struct([pa.field("a", pa.int32(), nullable=False), ("b-c", pa.list_(pa.int32()))]),
        ),
    ],
)
def test_types_are_read_as_spark_writes_them(ddl: str, expected: pa.DataType) -> None:
    assert parse_type(ddl).equals(expected)
    assert parse_type(ddl_of(expected)).equals(expected)


@pytest.mark.parametrize(
    ("ddl", "expected"),
    [
        ("auction long, price double", "auction long, price double"),
        ("auction: long,price:double", "auction long, price double"),
        ("a long, b string NOT NULL COMMENT 'x, y'", "a long, b string NOT NULL"),
        ('a long not null comment "it\'s", b int', "a long NOT NULL, b int"),
        ("`a b` long, `c``d` int, `e` string", "`a b` long, `c``d` int, e string"),
        (
            "date date, not int, comment string COMMENT 'c', array array<int>",
            "date date, not int, comment string, array array<int>",
        ),
        ("A int, a int", "A int, a int"),
        ("a\n  long,\n  b int\n", "a long, b int"),
        ("struct<a:int,b:string>", "a int, b string"),
        ("struct struct<a:int>", "struct struct<a: int>"),
    ],
)
def test_schemas_are_read_as_spark_writes_them(ddl: str, expected: str) -> None:
    schema = parse_schema(ddl)
    assert ddl_of(schema) == expected
    assert parse_schema(expected).equals(schema)


@pytest.mark.parametrize(
    ("ddl", "message", "position"),
    [
        ("auction lon, price double", "the type of 'auction' (did you mean 'long'?)", 8),
        ("a xyzzy", "the type of 'a' (one of boolean, byte", 2),
        ("a int, b", "the type of 'b'", 8),
        ("a int,", "the name of a column", 6),
        ("", "the name of a column", 0),
        ("long", "the type of 'long'", 4),
        ("a int b int", "',' or the end of the schema", 6),
        ("a array<int", "'>'", 11),
        ("a map<int>", "','", 9),
        ("a array int", "'<'", 8),
        ("a struct<>", "the name of a field", 9),
        ("a struct<b>", "the type of 'b'", 10),
        ("a decimal(39,2)", "a precision from 1 to 38", 10),
        ("a decimal(5,6)", "a scale from 0 to 5", 12),
        ("a varchar", "'('", 9),
        ("a varchar(x)", "a length", 10),
        ("a int not", "'NULL'", 9),
        ("a int comment b", "quoted text", 14),
        ("ä int", "the name of a column in back-quotes, `ä`,", 0),
        ("a-b int", "the type of 'a'", 1),
        ("a int, b int, a long", "another name ('a' is taken)", 14),
        ("a struct<x:int, x:int>", "another name ('x' is taken)", 16),
        ("a int; drop table", "',' or the end of the schema", 5),
        ("a interval day", "the type of 'a'", 2),
        ("`` int", "the name of a column", 0),
    ],
)
def test_a_wrong_schema_is_quoted_with_the_place_and_what_is_expected(ddl: str, message: str, position: int) -> None:
    with pytest.raises(SchemaError) as refused:
        parse_schema(ddl)
    first, quoted, pointer = str(refused.value).split("\n")
    assert f"expected {message}" in first and f"at position {position}" in first
    assert quoted == "    " + ddl
    assert pointer == "    " + " " * position + "^"


@pytest.mark.parametrize("declared", ["", "lng", "long long", "array<>", "map<int,int", "decimal(0)", "struct<a>", "<"])
def test_a_wrong_type_is_refused(declared: str) -> None:
    with pytest.raises(SchemaError, match="can't read the type: expected"):
        parse_type(declared)


@pytest.mark.parametrize("declared", [int, None, 5, ["a long"], {"a": "long"}])
def test_what_declares_nothing_is_refused(declared: Any) -> None:
    with pytest.raises(SchemaError, match="can't read a type from"):
        parse_type(declared)
    with pytest.raises(SchemaError, match="can't read a schema from"):
        parse_schema(declared)


def test_arrow_types_are_taken_as_they_are_if_spark_has_them() -> None:
    for arrow in (pa.int64(), pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.timestamp("ns")):
        assert parse_type(arrow) is arrow
    schema = pa.schema([("a", pa.int64())], metadata={"k": "v"})
    assert parse_schema(schema) is schema
    nested = (pa.list_(pa.uint8()), pa.map_(pa.string(), pa.uint8()), pa.struct([("a", pa.float16())]))
    for missing in (pa.uint64(), pa.time64("us"), pa.duration("s"), *nested):
        with pytest.raises(SchemaError, match="Spark has no type for Arrow's"):
            parse_schema(pa.schema([("a", missing)]))
        assert ddl_of(missing) == str(missing)  # for messages


def test_a_schema_has_columns_and_each_once() -> None:
    with pytest.raises(SchemaError, match="at least one column"):
        parse_schema(pa.schema([]))
    with pytest.raises(SchemaError, match="'a' is in the schema twice"):
        parse_schema(pa.schema([("a", pa.int64()), ("b", pa.int64()), ("a", pa.string())]))


class LikePyspark:
    """What is used of pyspark's types; tests/spark has the real ones."""

    def __init__(self, json: Any) -> None:
        self._json = json

    def jsonValue(self) -> Any:
        return self._json


def test_pysparks_types_are_recognised_by_their_json() -> None:
    array = {"type": "array", "elementType": "integer", "containsNull": False}
    fields = [
        {"name": "a b", "type": "long", "nullable": False, "metadata": {}},
        {"name": "c", "type": array, "nullable": True, "metadata": {}},
        {"name": "d", "type": "decimal(10,2)", "nullable": True, "metadata": {}},
    ]
    schema = parse_schema(LikePyspark({"type": "struct", "fields": fields}))
    assert ddl_of(schema) == "`a b` long NOT NULL, c array<int>, d decimal(10,2)"
    assert not schema.field("c").type.value_field.nullable
    assert parse_type(LikePyspark("timestamp_ntz")) == pa.timestamp("us")
    with pytest.raises(SchemaError, match="pyspark's type 'udt' is not supported"):
        parse_type(LikePyspark({"type": "udt", "class": "x"}))
    with pytest.raises(SchemaError, match="can't read a schema from"):
        parse_schema(LikePyspark("long"))


# ---------------------------------------------------------------------------------------------- durations


@pytest.mark.parametrize(
    ("text", "expected_ms"),
    [
        ("1 s", 1_000),
        ("200 ms", 200),
        ("5 seconds", 5_000),
        ("1 minute", 60_000),
        ("2min", 120_000),
        ("1.5 hours", 5_400_000),
        ("1 day", 86_400_000),
        ("1 week", 604_800_000),
        ("1 Minute 30 s", 90_000),
        ("0 s", 0),
        ("1500 microseconds", 2),
        (" 10  milliseconds ", 10),
        (250, 250),
        (0, 0),
        (1.0, 1),
        (999.6, 1_000),
        (timedelta(seconds=1.5), 1_500),
    ],
)
def test_durations_are_read_in_milliseconds(text: Any, expected_ms: int) -> None:
    duration_ms = parse_duration_ms(text)
    assert duration_ms == expected_ms and type(duration_ms) is int


@pytest.mark.parametrize(
    "text",
    [
        "",
        "s",
        "5",
        "-1 s",
        "1 parsec",
        "1 s later",
        "1 s,",
        "10 us",
        "1 month",
        -1,
        0.1,
        math.nan,
        math.inf,
        True,
        None,
        timedelta(seconds=-1),
        timedelta(microseconds=1),
    ],
)
def test_what_is_no_duration_is_refused_with_examples(text: Any) -> None:
    with pytest.raises(JobError, match="'5 seconds'"):
        parse_duration_ms(text)


# ---------------------------------------------------------------------------------------------- values

MOMENTS = st.datetimes(timezones=st.just(UTC))
BERLIN = timezone(timedelta(hours=2))


def ints(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "boolean": st.booleans(),
    "byte": ints(8),
    "short": ints(16),
    "int": ints(32),
    "long": ints(64),
    "float": st.floats(width=32, allow_nan=False),
    "double": st.floats(allow_nan=False),
    "string": st.text(st.characters(exclude_categories=["Cs"])),
    "binary": st.binary(),
    "date": st.dates(),
    "timestamp": MOMENTS,
    "timestamp_ntz": st.datetimes(),
    "decimal(10,2)": st.decimals(-99_999_999, 99_999_999, places=2),
    "array<long>": st.lists(st.none() | ints(64)),
    "array<timestamp>": st.lists(st.none() | MOMENTS),
    "map<string,double>": st.dictionaries(st.text("ab"), st.none() | st.floats(allow_nan=False)),
    "map<long,map<int,date>>": st.dictionaries(ints(64), st.dictionaries(ints(32), st.dates())),
    "struct<a: int, b: string>": st.fixed_dictionaries({"a": st.none() | ints(32), "b": st.none() | st.text("xy")}),
    "struct<a: map<int,int>, b: struct<c: timestamp_ntz>>": st.fixed_dictionaries(
        {
            "a": st.none() | st.dictionaries(ints(32), ints(32)),
            "b": st.none() | st.fixed_dictionaries({"c": st.none() | st.datetimes()}),
        }
    ),
    "array<struct<a: date, b: array<map<int,int>>>>": st.lists(
        st.none()
        | st.fixed_dictionaries(
            {"a": st.none() | st.dates(), "b": st.none() | st.lists(st.none() | st.dictionaries(ints(32), ints(32)))}
        )
    ),
}


@pytest.mark.parametrize("ddl", VALUES)
@given(data=st.data())
def test_values_come_back_as_they_went_in(ddl: str, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.none() | VALUES[ddl], max_size=12))
    array = from_list(values, parse_type(ddl))
    array.validate(full=True)
    assert array.type == parse_type(ddl)
    assert to_list(array) == values
    start = data.draw(st.integers(0, len(values)))
    assert to_list(array[start:]) == values[start:]
    complete = [value for value in values if value is not None]
    back = to_list(from_list(tuple(complete), parse_type(ddl)))
    assert back == complete
    assert list(map(type, back)) == list(map(type, complete))


@pytest.mark.parametrize("ddl", VALUES)
def test_no_values_are_an_empty_column(ddl: str) -> None:
    empty = from_list([], parse_type(ddl))
    assert empty.type == parse_type(ddl) and to_list(empty) == []
    assert to_list(from_list([None, None], parse_type(ddl))) == [None, None]


FITTING: list[tuple[str, Any, Any]] = [
    ("double", 3, 3.0),
    ("double", 2**53, float(2**53)),
    ("float", 3, 3.0),
    ("float", 1.1, float(np.float32(1.1))),
    ("decimal(5,2)", 7, Decimal("7.00")),
    ("decimal(5,2)", Decimal("1.5"), Decimal("1.50")),
    ("long", np.int16(4), 4),
    ("double", np.float32(0.5), 0.5),
    ("double", np.int64(2), 2.0),
    ("boolean", np.True_, True),
    ("long", Colour.RED, 1),
    ("string", np.str_("a"), "a"),
    ("binary", bytearray(b"x"), b"x"),
    ("array<long>", (1, 2), [1, 2]),
    ("array<long>", np.array([1, 2]), [1, 2]),
    ("map<string,int>", OrderedDict(a=1), {"a": 1}),
    ("struct<a: int, b: string>", (1, "x"), {"a": 1, "b": "x"}),
    ("struct<a: struct<b: int>>", ((1,),), {"a": {"b": 1}}),
    ("timestamp", datetime(2020, 1, 1, 2, tzinfo=BERLIN), datetime(2020, 1, 1, 0, tzinfo=UTC)),
    ("double", math.inf, math.inf),
]


@pytest.mark.parametrize(("ddl", "value", "expected"), FITTING)
@pytest.mark.parametrize("count", [1, 300])
def test_values_that_fit_exactly_are_taken(ddl: str, value: Any, expected: Any, count: int) -> None:
    back = to_list(from_list([value] * count, parse_type(ddl)))
    assert back == [expected] * count
    assert type(back[0]) is type(expected)


MISFITS: list[tuple[str, Any]] = [
    # docs/promises.md, row 15: what Python calls equal is not the same value of a type.
    ("long", True),
    ("long", np.True_),
    ("long", 1.0),
    ("double", True),
    ("float", False),
    ("boolean", 1),
    ("boolean", 1.0),
    ("decimal(5,2)", True),
    ("byte", True),
    ("array<long>", [True]),
    ("array<double>", [0.5, True]),
    # Nothing is cut, rounded or turned into text.
    ("long", 1.5),
    ("long", math.nan),
    ("long", "1"),
    ("long", Decimal(1)),
    ("long", Decimal("1.5")),
    ("long", b"1"),
    ("long", np.float64(1.0)),
    ("long", np.datetime64("2020-01-01", "ns")),
    ("long", date(2020, 1, 1)),
    ("int", 2.0),
    ("double", "1.0"),
    ("double", Decimal("1.5")),
    ("string", 1),
    ("string", b"x"),
    ("string", str),
    ("string", "\ud800"),
    ("binary", "x"),
    ("binary", [1]),
    ("decimal(5,2)", 1.5),
    ("decimal(5,2)", "1.5"),
    ("decimal(5,2)", Decimal("1.234")),
    ("decimal(5,2)", Decimal(12345)),
    ("decimal(5,2)", Decimal("NaN")),
    ("date", datetime(2020, 1, 1, 12)),
    ("date", 1),
    ("date", "2020-01-01"),
    ("timestamp", date(2020, 1, 1)),
    ("timestamp", 1),
    ("timestamp", 1.5),
    ("timestamp", "2020-01-01"),
    ("timestamp", datetime(2020, 1, 1)),
    ("timestamp_ntz", datetime(2020, 1, 1, tzinfo=UTC)),
    # Ranges.
    ("byte", 128),
    ("short", -32769),
    ("int", 2**31),
    ("long", 2**63),
    ("long", -(2**63) - 1),
    ("long", 2**70),
    ("double", 2**53 + 1),
    ("double", 2**70),
    ("float", 2**24 + 1),
    # Nested values.
    ("array<long>", [1.5]),
    ("array<long>", 1),
    ("array<long>", {1: 2}),
    ("array<long>", "12"),
    ("array<long>", b"12"),
    ("array<long>", np.array([1.5])),
    ("array<string>", "ab"),
    ("map<string,long>", {"a": 1.5}),
    ("map<string,long>", {1: 1}),
    ("map<string,long>", {None: 1}),
    ("map<string,long>", [("a", 1)]),
    ("struct<a: int>", {"a": 1.5}),
    ("struct<a: int>", {"b": 1}),
    ("struct<a: int>", {}),
    ("struct<a: int>", (1, 2)),
    ("struct<a: int>", [("a", 1)]),
    ("struct<a: int, b: int>", {"a": 1}),
    ("struct<a: int NOT NULL>", {"a": None}),
    ("array<struct<a: map<int,int>>>", [{"a": {1: "x"}}]),
]


@pytest.mark.parametrize(("ddl", "value"), MISFITS)
@pytest.mark.parametrize("fitting_count", [0, 3, 1000])
def test_a_value_that_does_not_fit_is_refused_with_its_index(ddl: str, value: Any, fitting_count: int) -> None:
    fitting: dict[str, list[Any]] = {"long": [5, 0, 1], "double": [0.5, 0.0, 1.0], "string": ["a", "b", "c"]}
    values = (fitting.get(ddl, [None]) * fitting_count)[:fitting_count]
    with pytest.raises(SchemaError, match=rf"at index {fitting_count} is no {ddl.split('<')[0].split('(')[0]}"):
        from_list([*values, value, *values], parse_type(ddl))


def test_a_refusal_shows_the_value_and_says_what_to_do() -> None:
    with pytest.raises(SchemaError, match=r"^1\.5 at index 1 is no long: it is of the Python type float$"):
        from_list([1, 1.5], pa.int64())
    with pytest.raises(SchemaError, match=r"datetime.datetime\(2020, 1, 1, 0, 0\) .* give it a time zone"):
        from_list([datetime(2020, 1, 1)], UTC_MOMENT)
    with pytest.raises(SchemaError, match="drop its time zone, or declare timestamp"):
        from_list([datetime(2020, 1, 1, tzinfo=UTC)], pa.timestamp("us"))
    with pytest.raises(SchemaError) as refused:
        from_list(["x" * 10_000], pa.int64())
    assert len(str(refused.value)) < 200


def test_a_bool_is_found_among_many_numbers_wherever_it_is() -> None:
    columns: dict[str, list[Any]] = {
        "long": list(range(-500, 500)),
        "double": [n / 2 for n in range(1000)],
        "int": [0, 1] * 500,
    }
    for ddl, numbers in columns.items():
        for index in (0, 499, 500, 501, 999):
            for hidden in (True, False):
                values = [*numbers[:index], hidden, *numbers[index + 1 :]]
                with pytest.raises(SchemaError, match=rf"^{hidden} at index {index} is no {ddl}: .* bool$"):
                    from_list(values, parse_type(ddl))


def test_nan_and_minus_zero_come_back_as_they_are() -> None:
    for ddl in ("float", "double"):
        nan, minus_zero, null = to_list(from_list([math.nan, -0.0, None], parse_type(ddl)))
        assert math.isnan(nan) and math.copysign(1, minus_zero) == -1 and null is None


def test_text_is_never_normalised() -> None:
    texts = ["\u00e9", "e\u0301", "\u1e9b\u0323", ""]
    assert to_list(from_list(texts, pa.string())) == texts


def test_columns_spelled_differently_by_arrow_are_read_too() -> None:
    plain = pa.array(["a", None, "b"])
    assert to_list(plain.dictionary_encode()) == to_list(plain.cast(pa.large_string())) == ["a", None, "b"]
    moments = pa.array([datetime(2020, 1, 1, 12, 30, 15), None])
    for unit in ("s", "ms", "us", "ns"):
        assert to_list(moments.cast(pa.timestamp(unit))) == [datetime(2020, 1, 1, 12, 30, 15), None]
        zoned = moments.cast(pa.timestamp(unit)).cast(pa.timestamp(unit, tz="Europe/Berlin"))
        assert to_list(zoned) == [datetime(2020, 1, 1, 12, 30, 15, tzinfo=UTC), None]
    assert to_list(from_list(["a", None], pa.dictionary(pa.int32(), pa.string()))) == ["a", None]
    assert to_list(pa.array([[date(2020, 1, 1)], None], type=pa.large_list(pa.date32()))) == [[date(2020, 1, 1)], None]


@pytest.mark.parametrize(
    "array",
    [
        pa.array([2**62], type=pa.timestamp("us")),
        pa.array([None, -(2**62)], type=pa.timestamp("s", tz="UTC")),
        pa.array([2**31 - 1], type=pa.date32()),
        pa.array([-(2**31)], type=pa.date32()),
    ],
)
def test_moments_that_python_cannot_hold_are_an_error_not_a_number(array: pa.Array) -> None:
    with pytest.raises(SchemaError, match="years 1 to 9999"):
        to_list(array)


# ---------------------------------------------------------------------------------------------- rows

SCHEMA = parse_schema("auction long, price double, note string")
ROWS = [(1, 1.5, "a"), (2, 2.0, None), (None, None, "")]


def test_rows_are_named_tuples_with_the_columns_in_order() -> None:
    rows = rows_of(batch_of(ROWS, SCHEMA))
    assert rows == ROWS
    first: Any = rows[0]
    assert (first.auction, first.price, first.note) == ROWS[0]
    assert type(first) is row_class(SCHEMA) is row_class(parse_schema("auction long, price double, note string"))
    assert repr(first) == "Row(auction=1, price=1.5, note='a')"


def test_rows_of_any_kind_make_the_same_batch() -> None:
    class Bid(NamedTuple):
        a: Any
        b: Any
        c: Any

    expected = batch_of(ROWS, SCHEMA)
    assert expected.schema.equals(SCHEMA)
    assert batch_of([list(row) for row in ROWS], SCHEMA).equals(expected)
    assert batch_of([Bid(*row) for row in ROWS], SCHEMA).equals(expected)
    assert batch_of(rows_of(expected), SCHEMA).equals(expected)
    assert batch_of(tuple(ROWS), SCHEMA).equals(expected)
    as_dicts = [dict(reversed(list(zip(SCHEMA.names, row, strict=True)))) for row in ROWS]
    assert batch_of(as_dicts, SCHEMA).equals(expected)
    assert batch_of([as_dicts[0], *ROWS[1:]], SCHEMA).equals(expected)


def test_no_rows_are_an_empty_batch() -> None:
    empty = batch_of([], SCHEMA)
    assert empty.num_rows == 0 and empty.schema.equals(SCHEMA) and rows_of(empty) == []


def test_slices_of_a_batch_give_their_rows() -> None:
    batch = batch_of([(n, n / 2, str(n)) for n in range(100)], SCHEMA)
    assert rows_of(batch[40:43]) == [(40, 20.0, "40"), (41, 20.5, "41"), (42, 21.0, "42")]


def test_names_that_no_named_tuple_can_have_are_reached_by_getattr() -> None:
    schema = parse_schema("`a b` long, class long, _id long, count long, index long, _fields long")
    row: Any = rows_of(batch_of([(1, 2, 3, 4, 5, 6)], schema))[0]
    assert [getattr(row, name) for name in ("a b", "class", "_id", "count", "index")] == [1, 2, 3, 4, 5]
    assert tuple(row) == (1, 2, 3, 4, 5, 6)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(1, 1.5, "a"), (1, 1.5)], r"row 1 \(1, 1.5\) has 2 values; expected 3: auction long, price double, note string"),
        ([(1, 1.5, "a", "b")], r"row 0 .* has 4 values; expected 3"),
        ([(1, 1.5, "a"), [], (2, 2.0, "b")], r"row 1 \[\] has 0 values"),
        ([(1, 1.5, "a"), "abc"], r"row 1 is 'abc', of type str; expected a tuple, list or dict"),
        ([{"auction", "price", "note"}], "row 0 is .*, of type set"),
        ([None], "row 0 is None, of type NoneType"),
        ([{"auction": 1, "price": 1.5}], "row 0 .* doesn't have exactly the columns auction long, price double, note"),
        ([(1, 1.5, "a"), {"auction": 1, "price": 1.5, "note": "a", "x": 1}], "row 1 .* doesn't have exactly the columns"),
        ([(1, 1.5, "a"), (2, "2", "b")], "column 'price': '2' at index 1 is no double"),
        ([(1.5, 1.5, "a")], r"column 'auction': 1\.5 at index 0 is no long"),
    ],
)
def test_a_wrong_row_is_refused_by_row_or_column(rows: list[Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        batch_of(rows, SCHEMA)


def test_a_bare_value_is_no_row_even_where_there_is_one_column() -> None:
    for bare in ("w", "word", 5):
        with pytest.raises(SchemaError, match=r"also for one column: \(value,\)"):
            batch_of([bare], parse_schema("word string"))
    assert rows_of(batch_of([("word",)], parse_schema("word string"))) == [("word",)]
    assert rows_of(batch_of([{"word": "w"}], parse_schema("word string"))) == [("w",)]


def test_a_column_declared_not_null_has_no_null() -> None:
    schema = parse_schema("a long NOT NULL, b string NOT NULL")
    assert batch_of([(1, "x")], schema).num_rows == 1
    with pytest.raises(SchemaError, match="column 'b' is NOT NULL, but row 1 has None there"):
        batch_of([(1, "x"), (2, None)], schema)
