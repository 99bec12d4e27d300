"""When a batch counts as left out, by what a query's plan and its transform say."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from tidegate.snapshots.manifest import MicroBatch
from tidegate.spark.unused_batches import _look, _Seen, _Watched


class Text:
    def __init__(self, text: str) -> None:
        self._text = text

    def toString(self) -> str:
        return self._text


class Query:
    """A query as the JVM has it."""

    number = 0

    def __init__(self, plan: str) -> None:
        self._plan = plan

    def streamingQuery(self) -> Any:
        return self

    def lastExecution(self) -> Any:
        return SimpleNamespace(currentBatchId=lambda: self.number, analyzed=lambda: Text(self._plan))

    def runId(self) -> Text:
        return Text("run")

    def id(self) -> Text:
        return Text("q")


def test_a_batch_before_the_present_one_that_the_transform_has_not_completed(caplog: pytest.LogCaptureFixture) -> None:
    query = Query("Union\n+- CollectMetrics tidegate t in /s, transform 12ab34cd, [count_if(…) AS rows#1L]")
    streams = SimpleNamespace(active=lambda: [query])
    spark: Any = SimpleNamespace(_jsparkSession=SimpleNamespace(streams=lambda: streams))
    transform = SimpleNamespace(done=None)
    watched = {
        "tidegate t in /s, transform 12ab34cd": _Watched("t", spark, lambda: transform.done),
        "tidegate t in /s, transform 99999999": _Watched("another", spark, lambda: transform.done),
    }
    seen: dict[str, _Seen] = {}

    def look(number: int, done: int | None) -> int:
        query.number, transform.done = number, None if done is None else MicroBatch("q", done)
        _look(spark, watched, seen)
        return len(caplog.messages)

    assert look(7, None) == 0, "what an earlier run of the program has done isn't known"
    assert look(7, None) == 0, "it runs"
    assert look(8, 7) == look(9, 8) == look(9, 9) == 0
    assert look(11, 9) == 1
    assert re.match(
        "Job 't': Spark has committed micro-batch 10 of the query q without running the transform", caplog.messages[0]
    )
    assert look(12, 9) == 1, "once"
