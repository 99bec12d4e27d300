"""Aggregates give what Spark SQL's functions of the same names give, in value and in type, on the same records."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import tidegate as tg
from tidegate.dataflow.aggregates.aggregation import Aggregation
from tidegate.dataflow.aggregates.numpy_columns import grouped, held_vectors
from tidegate.types import ddl_of, parse_schema

DDL = (
    "k long, tiny byte, whole int, big long, real double, single float, money decimal(10,2), wide decimal(38,4), "
    "word string, flag boolean, day date, at timestamp"
)
WHEN = datetime(2026, 1, 1, tzinfo=UTC)
COLUMNS = [part.split()[0] for part in DDL.split(", ")][1:]
NUMBERS = ["tiny", "whole", "big", "real", "single", "money", "wide"]
ORDERED = [*NUMBERS, "word", "flag", "day", "at"]

# Of Tidegate, of Spark.
CASES: dict[str, tuple[tg.Aggregate, str]] = {
    "count": (tg.count(), "count(*)"),
    **{f"count {name}": (tg.count(name), f"count({name})") for name in COLUMNS},
    **{f"sum {name}": (tg.sum(name), f"sum({name})") for name in NUMBERS if name != "wide"},
    **{f"mean {name}": (tg.mean(name), f"avg({name})") for name in NUMBERS if name != "wide"},
    **{f"variance {name}": (tg.variance(name), f"var_samp({name})") for name in NUMBERS},
    **{f"stddev {name}": (tg.stddev(name), f"stddev({name})") for name in NUMBERS},
    "var_pop": (tg.variance("real", population=True), "var_pop(real)"),
    "stddev_pop": (tg.stddev("real", population=True), "stddev_pop(real)"),
    **{f"min {name}": (tg.min(name), f"min({name})") for name in ORDERED},
    **{f"max {name}": (tg.max(name), f"max({name})") for name in ORDERED},
    # By what is different in every record: of equal ones Spark takes any.
    **{f"max_by {name}": (tg.max_by(name, by="unique"), f"max_by({name}, unique)") for name in COLUMNS},
    **{f"min_by {name}": (tg.min_by(name, by="unique"), f"min_by({name}, unique)") for name in COLUMNS},
    **{f"last {name}": (tg.last(name, by="unique"), f"max_by({name}, unique)") for name in COLUMNS},
    **{f"distinct {name}": (tg.count_distinct(name), f"count(distinct {name})") for name in COLUMNS},
    **{f"set {name}": (tg.collect_set(name), f"sort_array(collect_set({name}))") for name in COLUMNS},
    **{f"list {name}": (tg.collect_list(name), f"sort_array(collect_list({name}))") for name in COLUMNS},
    "any": (tg.any("flag"), "any(flag)"),
    "all": (tg.all("flag"), "every(flag)"),
    "sum of an expression": (tg.sum("CAST(whole AS long) * 2 + tiny"), "sum(CAST(whole AS long) * 2 + tiny)"),
    "any of an expression": (tg.any("real > 2 AND flag"), "any(real > 2 AND flag)"),
    "mean of an expression": (tg.mean("real / 3 + money"), "avg(real / 3 + money)"),
}


def records(seed: int) -> list[tuple[Any, ...]]:
    """Keys 0 to 9; key 8 has nulls only, key 9 one record."""
    rng = Random(seed)
    values = (
        lambda: rng.randint(-128, 127),
        lambda: rng.randint(-(2**31), 2**31 - 1),
        lambda: rng.randint(-(2**55), 2**55),
        lambda: rng.choice([0.5, -0.25, 3.0, 1e10, rng.random()]),
        lambda: rng.choice([0.5, -0.25, 3.0]),
        lambda: Decimal(rng.randint(-(10**10) + 1, 10**10 - 1)).scaleb(-2),
        lambda: Decimal(rng.randint(-(10**20), 10**20)).scaleb(-4),
        lambda: rng.choice(["", "a", "ä", "zebra", "🌊", "￿"]),
        lambda: rng.random() < 0.7,
        lambda: date(2026, 1, 1) + timedelta(days=rng.randint(-400, 400)),
        lambda: WHEN + timedelta(microseconds=rng.randint(0, 10**13)),
    )
    rows = []
    for number in range(400):
        key = rng.randint(0, 8)
        row = [None if key == 8 or rng.random() < 0.2 else make() for make in values]
        rows.append((key, *row, (number * 7919) % 1009))
    return [*rows, (9, *(make() for make in values), 2000)]


def of_tidegate(schema: pa.Schema, rows: list[tuple[Any, ...]]) -> tuple[pa.Schema, dict[int, dict[str, Any]]]:
    aggregation = Aggregation("test", {name: ours for name, (ours, _) in CASES.items()}, schema)
    batch = pa.RecordBatch.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema=schema)
    vectors = held_vectors(aggregation.accumulators, 10)
    for start in range(0, len(rows), 97):
        part = batch.slice(start, 97)
        aggregation.add(vectors, part.column("k").to_numpy(), aggregation.inputs(part))
    keys = grouped(batch.column("k").to_numpy()).rows
    results = pa.RecordBatch.from_arrays(aggregation.results(vectors, keys), schema=pa.schema(aggregation.fields))
    return results.schema, dict(zip(keys.tolist(), results.to_pylist(), strict=True))


def same(ours: Any, spark: Any) -> bool:
    if isinstance(ours, list):
        return len(ours) == len(spark) and all(map(same, sorted(ours), spark))
    if isinstance(ours, float) and spark is not None:
        return math.isclose(ours, spark, rel_tol=1e-9)
    return bool(ours == spark)


@pytest.fixture(scope="module")
def both(spark: SparkSession) -> tuple[tuple[pa.Schema, Any], tuple[pa.Schema, Any]]:
    ddl = DDL + ", unique long"
    schema, rows = parse_schema(ddl), records(7)
    frame = spark.createDataFrame(rows, ddl)
    result = frame.groupBy("k").agg(*(_expr(theirs).alias(name) for name, (_, theirs) in CASES.items())).toArrow()
    names = [name for name in result.schema.names if name != "k"]
    return of_tidegate(schema, rows), (
        result.select(names).schema,
        {row["k"]: row for row in result.to_pylist()},
    )


def _expr(text: str) -> Any:
    from pyspark.sql.functions import expr

    return expr(text)


@pytest.mark.parametrize("case", CASES)
def test_an_aggregate_gives_sparks_values_and_type(case: str, both: Any) -> None:
    (our_schema, ours), (their_schema, theirs) = both
    assert ddl_of(our_schema.field(case).type) == ddl_of(their_schema.field(case).type)
    assert sorted(ours) == sorted(theirs) == list(range(10))
    for key, row in ours.items():
        assert same(row[case], theirs[key][case]), (key, row[case], theirs[key][case])
