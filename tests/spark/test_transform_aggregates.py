"""Aggregates between DataFrames: the operators of a job, in `tg.transform`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

import tidegate as tg
from tidegate.errors import GraphError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def events(spark: SparkSession) -> DataFrame:
    return spark.range(0, 600, 1, 3).selectExpr("id", "id % 7 AS key")


def test_running_aggregates_between_data_frames_are_those_of_each_key(spark: SparkSession) -> None:
    def numbered(stream: Any) -> Any:
        return stream.key_by("key").running("nth", nth=tg.count(), total=tg.sum("id * 2"))

    rows = tg.transform(events(spark), numbered).collect()
    assert sorted(row.id for row in rows) == list(range(600))
    for key in range(7):
        of_key = sorted((row.nth, row.total, row.id) for row in rows if row.key == key)
        assert [nth for nth, _, _ in of_key] == list(range(1, len(of_key) + 1))
        assert [total for _, total, _ in of_key] == [
            sum(2 * n for *_, n in of_key[:end]) for end in range(1, len(of_key) + 1)
        ]


def test_a_data_frame_takes_the_updates_of_an_aggregate_as_records_of_their_own(spark: SparkSession) -> None:
    def counts(stream: Any) -> Any:
        return stream.key_by("key").aggregate("counts", n=tg.count())

    with pytest.raises(GraphError, match=r"upserts by \(key\).*\.as_append\(\)"):
        tg.transform(events(spark), counts)
    rows = tg.transform(events(spark), lambda stream: counts(stream).as_append()).collect()
    assert {key: max(row.n for row in rows if row.key == key) for key in range(7)} == {
        key: len(range(key, 600, 7)) for key in range(7)
    }


def test_changes_of_data_frames_are_joined_and_aggregated(spark: SparkSession) -> None:
    names = spark.createDataFrame([(key, f"key {key % 3}") for key in range(5)], "key long, name string")

    def sizes(events: Any, names: Any) -> Any:
        named = events.key_by("key").join("named", names.key_by("key"), how="left")
        return named.key_by("name").aggregate("sizes", n=tg.count()).as_append()

    rows = tg.transform({"events": events(spark), "names": names}, sizes).collect()
    left = Counter[Any]()
    for row in rows:
        left[row.name, row.n] += 1 if row.row_kind == "+I" else -1
    of_key = [len(range(key, 600, 7)) for key in range(7)]
    assert +left == Counter(
        [("key 0", of_key[0] + of_key[3]), ("key 1", of_key[1] + of_key[4]), ("key 2", of_key[2]), (None, sum(of_key[5:]))]
    )
