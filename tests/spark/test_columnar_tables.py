"""Columnar state with windows as a DataFrame, and written from one."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

import tidegate as tg
from tests.unit.snapshots.test_columnar_state import expected_panes, made


def test_rows_by_key_and_window_are_read_changed_and_written(spark: SparkSession, tmp_path: Path) -> None:
    base = made(tmp_path, "heap")
    panes = tg.read_state(spark, str(base), "panes")
    assert panes.columns == ["key", "window", "value", "key_group", "epoch"]
    assert {(row.key, row.window): row.value.asDict() for row in panes.collect()} == expected_panes(3)
    doubled = panes.selectExpr("key", "window", "named_struct('n', value.n * 2) AS value")
    more = doubled.unionAll(spark.sql("SELECT 5L AS key, -3L AS window, named_struct('n', 1L) AS value"))
    to = str(tmp_path / "written")
    tg.write_state(more, to, operator="op", state="panes", base=str(base))
    written = tg.read_state(spark, to, "panes")
    expected = {identity: {"n": 2 * value["n"]} for identity, value in expected_panes(3).items()} | {(5, -3): {"n": 1}}
    assert {(row.key, row.window): row.value.asDict() for row in written.collect()} == expected
    sums = tg.read_state(spark, to, "sums")
    assert sums.count() == 99, "the other state is copied"
