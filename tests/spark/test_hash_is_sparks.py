"""Tidegate's hash against Spark's own `xxhash64`, and Tidegate's types against Spark's own, on a real Spark."""

from __future__ import annotations

import random
import struct
import unicodedata
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import lit, pmod, xxhash64
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import ArrayType, LongType, MapType, StringType, StructField, StructType, _parse_datatype_string

from tidegate.hashing import hash_columns
from tidegate.keygroups import groups_of
from tidegate.types import ddl_of, from_list, parse_schema, parse_type

ROW_COUNT = 400


def of_bits(code: str, bits: int) -> float:
    number: float = struct.unpack(f"<{code}", bits.to_bytes(8 if code == "d" else 4, "little"))[0]
    return number


def texts(dice: random.Random) -> list[str]:
    """Every length from 0 to 100 bytes and more, in several scripts, composed and decomposed."""
    words = [
        "",
        "é",
        "e\u0301",
        unicodedata.normalize("NFD", "Ångström"),
        unicodedata.normalize("NFC", "Ångström"),
        "日本語",
        "😀" * 9,
        "\x00",
        "\x00" * 33,
        "x" * 5000,
    ]
    words += ["".join(dice.choice("abcdefghijklmnop") for _ in range(length)) for length in range(101)]
    words += ["".join(dice.choice("aäß€語😀\u0301") for _ in range(dice.randrange(40))) for _ in range(ROW_COUNT)]
    return words


def decimals(dice: random.Random, *, precision: int, scale: int) -> list[Decimal]:
    limit = 10**precision - 1
    edges = [0, 1, -1, 127, 128, -128, -129, 255, 256, 32767, 32768, -32768, -32769, 2**63 - 1, 2**63, -(2**63), limit]
    spread = [dice.randrange(10 ** dice.randrange(1, precision + 1)) * dice.choice((1, -1)) for _ in range(ROW_COUNT)]
    exact = Context(prec=precision)
    return [Decimal(unscaled).scaleb(-scale, exact) for unscaled in [*edges, -limit, *spread] if abs(unscaled) <= limit]


def samples(ddl: str, dice: random.Random) -> list[Any]:
    if ddl in ("byte", "short", "int", "long"):
        bits = {"byte": 8, "short": 16, "int": 32, "long": 64}[ddl] - 1
        return [0, 1, -1, 2**bits - 1, -(2**bits), *(dice.randrange(-(2**bits), 2**bits) for _ in range(ROW_COUNT))]
    if ddl in ("float", "double"):
        odd_nan = of_bits("f", 0xFFC1_2345) if ddl == "float" else of_bits("d", 0xFFF8_0000_1234_5678)
        smallest = of_bits("f", 1) if ddl == "float" else 5e-324
        numbers = [0.0, -0.0, 1.0, -1.0, float("nan"), odd_nan, -float("nan"), float("inf"), -float("inf"), smallest]
        return [*numbers, *(float(np.float32(dice.gauss(0, 1e6))) for _ in range(ROW_COUNT))]
    if ddl == "boolean":
        return [True, False]
    if ddl == "string":
        return texts(dice)
    if ddl == "binary":
        return [*(text.encode() for text in texts(dice)), *(dice.randbytes(length) for length in range(101))]
    if ddl == "date":
        return [
            date(1970, 1, 1),
            date(1, 1, 1),
            date(9999, 12, 31),
            *(date(1900, 1, 1) + timedelta(days=dice.randrange(90_000)) for _ in range(ROW_COUNT)),
        ]
    if ddl in ("timestamp", "timestamp_ntz"):
        zone = UTC if ddl == "timestamp" else None
        return [
            datetime(1970, 1, 1, tzinfo=zone),
            datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=zone),
            *(
                datetime(1950, 1, 1, tzinfo=zone) + timedelta(microseconds=dice.randrange(9 * 10**15))
                for _ in range(ROW_COUNT)
            ),
        ]
    if ddl.startswith("decimal"):
        arrow = parse_type(ddl)
        return decimals(dice, precision=arrow.precision, scale=arrow.scale)
    raise AssertionError(ddl)


ATOMIC = [
    "boolean",
    "byte",
    "short",
    "int",
    "long",
    "float",
    "double",
    "string",
    "binary",
    "date",
    "timestamp",
    "timestamp_ntz",
    "decimal(5,2)",
    "decimal(18,0)",
    "decimal(19,0)",
    "decimal(20,5)",
    "decimal(38,0)",
    "decimal(38,10)",
]


def with_nulls(values: list[Any], dice: random.Random) -> list[Any]:
    return [None, *(None if dice.random() < 0.1 else value for value in values), None]


def column(ddl: str, *, seed: str = "") -> pa.Array:
    dice = random.Random(ddl + seed)
    return from_list(with_nulls(samples(ddl, dice), dice), parse_type(ddl))


def frame(spark: SparkSession, columns: list[pa.Array]) -> DataFrame:
    return spark.createDataFrame(pa.table(columns, names=[f"c{index}" for index in range(len(columns))]))


def sparks_hashes(spark: SparkSession, columns: list[pa.Array]) -> list[int]:
    data = frame(spark, columns)
    hashes: list[int] = data.select(xxhash64(*data.columns).alias("hash")).toArrow().column("hash").to_pylist()
    return hashes


@pytest.mark.parametrize("ddl", ATOMIC)
def test_a_column_hashes_as_in_spark(spark: SparkSession, ddl: str) -> None:
    array = column(ddl)
    assert hash_columns([array]).tolist() == sparks_hashes(spark, [array])


@pytest.mark.parametrize("ddl", ATOMIC)
def test_a_small_slice_hashes_as_in_spark(spark: SparkSession, ddl: str) -> None:
    array = column(ddl)
    expected = sparks_hashes(spark, [array])
    for start in range(0, len(array), 7):
        assert hash_columns([array[start : start + 7]]).tolist() == expected[start : start + 7]


def test_keys_of_several_columns_hash_as_in_spark(spark: SparkSession) -> None:
    dice = random.Random(1)
    arrays = {ddl: column(ddl) for ddl in ATOMIC}
    for _ in range(12):
        chosen = [arrays[ddl] for ddl in dice.sample(ATOMIC, dice.randrange(2, 6))]
        row_count = min(map(len, chosen))
        starts = [dice.randrange(len(array) - row_count + 1) for array in chosen]
        columns = [array[start : start + row_count] for array, start in zip(chosen, starts, strict=True)]
        assert hash_columns(columns).tolist() == sparks_hashes(spark, columns)


NESTED: dict[str, list[Any]] = {
    "array<long>": [[], [1], [1, 2, 3], [None], [None, 1], None, list(range(50))],
    "array<string>": [[], ["a"], ["a", None, "x" * 40], [""], None],
    "array<array<double>>": [[[]], [], [[0.0], [-0.0, 1.5], None], None],
    "struct<a: int, b: string>": [{"a": 1, "b": "x"}, {"a": None, "b": None}, None, {"a": 2, "b": None}],
    "struct<a: struct<b: double, c: array<int>>, d: date>": [
        {"a": {"b": 1.5, "c": [1, None]}, "d": date(2020, 1, 2)},
        {"a": None, "d": None},
        None,
    ],
    "array<struct<a: long, b: decimal(20,2)>>": [
        [{"a": 1, "b": Decimal("1.50")}, None, {"a": None, "b": Decimal("-99999999999999.99")}],
        [],
        None,
    ],
}


@pytest.mark.parametrize("ddl", NESTED)
@pytest.mark.parametrize("repeats", [1, 20])
def test_nested_keys_hash_as_in_spark(spark: SparkSession, ddl: str, repeats: int) -> None:
    array = from_list(NESTED[ddl] * repeats, parse_type(ddl))
    assert hash_columns([array]).tolist() == sparks_hashes(spark, [array])
    assert hash_columns([array[1:]]).tolist() == sparks_hashes(spark, [array])[1:]


def test_what_arrow_spells_differently_hashes_as_in_spark(spark: SparkSession) -> None:
    plain = column("string")
    expected = sparks_hashes(spark, [plain])
    assert hash_columns([plain.cast(pa.large_string())]).tolist() == expected
    assert hash_columns([plain.dictionary_encode()]).tolist() == expected
    assert hash_columns([plain.cast(pa.binary())]).tolist() == expected
    moments = column("timestamp_ntz")
    milliseconds = moments.cast(pa.timestamp("ms"), safe=False)
    assert hash_columns([milliseconds]).tolist() == sparks_hashes(spark, [milliseconds.cast(pa.timestamp("us"))])
    nanoseconds = moments.cast(pa.timestamp("ns"))
    assert hash_columns([nanoseconds]).tolist() == sparks_hashes(spark, [moments])


@pytest.mark.parametrize("key_group_count", [1, 2, 127, 128, 1000])
def test_sparks_pmod_of_the_hash_is_the_key_group(spark: SparkSession, key_group_count: int) -> None:
    array = column("long")
    data = frame(spark, [array])
    groups = data.select(pmod(xxhash64("c0"), lit(key_group_count)).alias("g")).toArrow().column("g").to_pylist()
    assert groups_of(hash_columns([array]), key_group_count).tolist() == groups
    assert set(groups) <= set(range(key_group_count))


@pytest.mark.parametrize(
    "ddl",
    [
        "a long, b string",
        "A BIGINT, b: String NOT NULL COMMENT 'it''s'",
        "`a b` int, `c``d` tinyint, 1x smallint",
        "a decimal, b decimal(5), c dec(38, 10), d numeric(4,4)",
        "a timestamp, b timestamp_ntz, c timestamp_ltz, d date",
        "a real, b float, c double, d boolean, e binary, f byte, g short",
        "a array<int>, b map<string, array<map<int,double>>>",
        "a struct<x:int, `y z`: struct<q string NOT NULL COMMENT 'x'>>",
        "date date, not int, comment string COMMENT 'c', struct struct<array:int>",
        "struct<a:int,b:string>",
    ],
)
def test_a_schema_in_ddl_is_read_as_spark_reads_it(spark: SparkSession, ddl: str) -> None:
    sparks = _parse_datatype_string(ddl)
    assert isinstance(sparks, StructType)
    expected = to_arrow_schema(sparks, timezone="UTC")
    assert parse_schema(ddl).equals(parse_schema(sparks))
    assert [(f.name, f.type, f.nullable) for f in parse_schema(ddl)] == [(f.name, f.type, f.nullable) for f in expected]
    assert parse_schema(ddl_of(parse_schema(ddl))).equals(parse_schema(ddl))
    assert parse_schema(_parse_datatype_string(ddl_of(parse_schema(ddl)))).equals(parse_schema(ddl))


def test_bounded_strings_are_strings(spark: SparkSession) -> None:
    ddl = "a varchar(10), b char(3), c character(2)"
    assert ddl_of(parse_schema(ddl)) == "a string, b string, c string"
    assert parse_schema(_parse_datatype_string(ddl)).equals(parse_schema(ddl))


def test_pysparks_own_types_keep_their_nullability() -> None:
    declared = StructType(
        [
            StructField("a b", LongType(), nullable=False),
            StructField("tags", ArrayType(StringType(), containsNull=False)),
            StructField("counts", MapType(StringType(), LongType(), valueContainsNull=False)),
        ]
    )
    parsed = parse_schema(declared)
    assert ddl_of(parsed) == "`a b` long NOT NULL, tags array<string>, counts map<string,long>"
    assert not parsed.field("tags").type.value_field.nullable
    assert not parsed.field("counts").type.item_field.nullable
    assert parse_type(LongType()) == pa.int64()
