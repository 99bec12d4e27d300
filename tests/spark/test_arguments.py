"""What can't be an argument of the functions around DataFrames is a `JobError` that names it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import tidegate as tg

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Count(tg.KeyedProcess):
    count = tg.value("long", default=0)

    def process(self, record: Any, ctx: tg.Context) -> tg.Rows:
        return None


@pytest.fixture(scope="module")
def frame(spark: SparkSession) -> DataFrame:
    return spark.range(3).withColumnRenamed("id", "key").selectExpr("key", "key AS value")


def passed_on(stream: tg.Stream) -> tg.Stream:
    return stream


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"pipeline": 3}, "transform(pipeline=3): give a function"),
        ({"name": 3}, "a job needs a name"),
        ({"slots": "2"}, "slots='2': give a number"),
        ({"restore_from": 3}, "transform(restore_from=3): give the folder"),
        ({"savepoint_to": 3}, "transform(savepoint_to=3): give the folder"),
        ({"drain": "yes"}, "transform(drain='yes'): give True or False"),
        ({"backend": "heap"}, "backend='heap': give tg.Heap()"),
        ({"tuning": 3}, "tuning=3: give tg.Tuning"),
        ({"drop_state": "count"}, "drop_state='count'): give a list of names"),
        ({"snapshots": "folder"}, "snapshots= is for streaming DataFrames"),
    ],
)
def test_transform(frame: DataFrame, wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(tg.JobError) as refused:
        tg.transform(frame, **{"pipeline": passed_on, **wrong})
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"path": 3}, "read_state(path=3): give the folder"),
        ({"state": None}, "read_state(state=None): give the name"),
        ({"operator": 3}, "read_state(operator=3): give the name"),
        ({"key": 3}, "read_state(key=3): give a list of names"),
        ({"key_groups": 3}, "read_state(key_groups=3): give a list or a range"),
        ({"key_groups": ["x"]}, "read_state(key_groups='x'): give a whole number"),
        ({"epoch": "last"}, "'epoch' is 'last'"),
        ({"diff": 1.5}, "read_state(diff=1.5): give a whole number"),
        ({"spark": "spark"}, "register('spark'): give a SparkSession"),
    ],
)
def test_read_state(spark: SparkSession, wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(tg.JobError) as refused:
        tg.read_state(**{"spark": spark, "path": "folder", "state": "count", **wrong})
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"df": [(1, 2)]}, "write_state([(1, 2)], …): give a DataFrame"),
        ({"to": 3}, "write_state(to=3): give a text"),
        ({"operator": None}, "write_state(operator=None): give a text"),
        ({"state": 3}, "write_state(state=3): give the name of a state, or its declaration"),
        ({"base": 3}, "write_state(base=3): give a text"),
        ({"add": "yes"}, "write_state(add='yes'): give True or False"),
        ({"key": 3}, "write_state(key=3): give a list of names"),
        ({"job": 3}, "write_state(job=3): give a text"),
        ({"shape": 3}, "write_state(shape=3): give a text"),
        ({"key_group_count": "128"}, "write_state(key_group_count='128'): give a whole number"),
        ({"parallelism": 1.5}, "write_state(parallelism=1.5): give a whole number"),
    ],
)
def test_write_state(frame: DataFrame, wrong: dict[str, Any], told: str) -> None:
    good = {"df": frame, "to": "memory://w", "operator": "count", "state": Count.count}
    with pytest.raises(tg.JobError) as refused:
        tg.write_state(**{**good, **wrong})
    assert told in str(refused.value)
