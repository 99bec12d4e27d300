"""Ranks, look-ups and functions on columns between DataFrames, in a batch and in a query that is restarted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

import tidegate as tg
from tests.spark.test_transform_streaming import Desk

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAMES = pa.table({"key": range(5), "name": [f"key {key}" for key in range(5)]})
NUMBERED = "id long, key long, nth long"


class Numbered(tg.KeyedBatchProcess):
    """Numbers the records of each key."""

    counts = tg.columns("n long", defaults={"n": 0})

    def process(self, batch: pa.RecordBatch, ctx: tg.BatchContext) -> tg.Batches:
        keys = ctx.keys
        nth = self.counts.get_many(keys)["n"].to_numpy()[keys.of] + keys.nth + 1
        self.counts.set_many(keys, n=nth[keys.last])
        return pa.record_batch([batch["id"], batch["key"], nth], names=["id", "key", "nth"])


def numbered(stream: Any) -> Any:
    return stream.key_by("key").process("numbered", Numbered(), returns=NUMBERED)


def squares(keys: pa.RecordBatch) -> pa.RecordBatch:
    known = [key for key in keys["key"].to_pylist() if key % 2 == 0]
    return pa.RecordBatch.from_pydict({"key": known, "square": [key * key for key in known]})


def test_a_batch_is_ranked_and_looked_up(spark: SparkSession) -> None:
    frame = spark.range(0, 600, 1, 3).selectExpr("id", "id % 7 AS key")

    def best(stream: Any) -> Any:
        named = stream.lookup_join("names", NAMES, on="key").lookup("squares", squares, "square long", on="key")
        return named.key_by("key").top("best", 2, by="id", descending=True).as_append()

    ranks = {(row.key, row.rank): row for row in tg.transform(frame, best, slots=2).collect()}
    assert {place: (row.id, row.name, row.square) for place, row in ranks.items()} == {
        (key, rank): (
            [id for id in range(600) if id % 7 == key][-rank],
            f"key {key}",
            key * key if key % 2 == 0 else None,
        )
        for key in range(5)
        for rank in (1, 2)
    }


def test_a_restarted_query_continues_with_the_columns_of_its_keys(spark: SparkSession, tmp_path: Path) -> None:
    desk = Desk(tmp_path, spark)
    for slots in (2, 3):
        desk.add(2)
        desk.run(desk.transform(numbered, slots=slots))
    rows = desk.rows()
    assert sorted(row.id for row in rows) == list(range(400))
    for key in range(7):
        assert sorted(row.nth for row in rows if row.key == key) == list(range(1, len(range(key, 400, 7)) + 1))
