"""What Spark knows of the streaming queries of a session, through the gateway to its JVM.

A batch's time is what Spark logged before it ran the batch for the first time: in `current_timestamp()` and for its own
stateful operators, and the same when the batch runs again. So is the query's watermark, which Spark finds by all that
`withWatermark` says in the query, and by its setting for several of them. Python's API has neither; Spark 4.2 and 4.3 do.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tidegate.dataframes.queries import BatchTimes
from tidegate.errors import TidegateError
from tidegate.snapshots.manifest import MicroBatch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SparkQueries:
    """`dataframes.queries.Queries` of the session that a transform's DataFrame is of: its queries are started there."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def batch_times(self, batch: MicroBatch) -> BatchTimes:
        query = self._active(batch.query)
        execution = None if query is None else query.streamingQuery().lastExecution()
        if execution is None or execution.currentBatchId() != batch.number:
            raise TidegateError(
                f"micro-batch {batch.number} of the query {batch.query} is not what the query runs now: it "
                f"was stopped, or is run by another session than the transform's DataFrame is of"
            )
        logged = execution.offsetSeqMetadata()
        return BatchTimes(int(logged.batchTimestampMs()), int(logged.batchWatermarkMs()))

    def transforms_of(self, query: str, observed_as: str) -> set[str]:
        active = self._active(query)
        execution = None if active is None else active.streamingQuery().lastExecution()
        plan = "" if execution is None else str(execution.analyzed().toString())
        return transforms_in(plan, observed_as)

    def run_of(self, query: str) -> str | None:
        active = self._active(query)
        return None if active is None else str(active.runId().toString())

    def _active(self, query: str) -> Any:
        session: Any = self._spark._jsparkSession
        return session.streams().get(query)


def transforms_in(plan: str, observed_as: str) -> set[str]:
    """In the text of a plan."""
    return set(re.findall(rf"CollectMetrics {re.escape(observed_as)}(\w+)", plan))


def abandon_stage(spark: SparkSession, stage: int, why: str) -> None:
    """Spark doesn't try the stage again, and what needs it fails with these words."""
    context: Any = spark.sparkContext._jsc
    context.sc().cancelStage(stage, why)
