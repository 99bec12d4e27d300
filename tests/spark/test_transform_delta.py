"""`tg.transform` and Delta tables, read and written by the `deltalake` package: Delta's own connector has no version for
Spark 4.3 yet (docs/dataframes.md; test_delta_connector.py has it on 4.2). A table is the input of a batch, and a query's
output is in one exactly once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from pyspark.errors import StreamingQueryException

import tidegate as tg
from tests.spark.test_transform import DiesOnce, check_counts, counted
from tests.spark.test_transform_streaming import COUNTS, Desk

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

QUERY = "counts"


def write_once(path: str, batch: DataFrame, number: int) -> None:
    """Delta keeps the number of the last micro-batch with the data, in one commit."""
    done = DeltaTable(path).transaction_version(QUERY) if DeltaTable.is_deltatable(path) else None
    if done is None or done < number:
        write_deltalake(
            path,
            batch.toArrow(),
            mode="append",
            commit_properties=CommitProperties(app_transactions=[Transaction(QUERY, number)]),
        )


def rows_of(spark: SparkSession, path: str) -> DataFrame:
    return spark.createDataFrame(DeltaTable(path).to_pyarrow_table())


def test_a_query_writes_a_delta_table_once_over_a_killed_slot_and_a_lost_commit(tmp_path: Path, spark: SparkSession) -> None:
    desk, table = Desk(tmp_path, spark), str(tmp_path / "table")
    desk.add(3)

    def run(*, lost: int | None) -> None:
        def write(batch: DataFrame, number: int) -> None:
            write_once(table, batch, number)
            if number == lost:
                raise RuntimeError("written, and Spark doesn't know")

        function = DiesOnce(str(tmp_path / "died"), 150)
        counts = desk.transform(lambda s: s.key_by("key").process("count", function, returns=COUNTS))
        query = (
            counts.writeStream.foreachBatch(write)
            .option("checkpointLocation", str(tmp_path / "query"))
            .trigger(availableNow=True)
            .start()
        )
        try:
            assert query.awaitTermination(240)
        finally:
            query.stop()

    with pytest.raises(StreamingQueryException, match="written, and Spark doesn't know"):
        run(lost=1)
    assert (tmp_path / "died").exists()
    run(lost=None)
    check_counts(rows_of(spark, table).collect(), range(300))


def test_a_delta_table_is_the_input_of_a_batch(tmp_path: Path, spark: SparkSession) -> None:
    table = str(tmp_path / "table")
    for first in (0, 300):
        events: Any = spark.range(first, first + 300).selectExpr("id", "id % 7 as key")
        write_deltalake(table, events.toArrow(), mode="append")
    check_counts(tg.transform(rows_of(spark, table), counted, slots=2).collect(), range(600))
