"""What Spark knows of the streaming queries of a session, through the gateway to its JVM.

Spark logs a batch's time before it runs the batch for the first time, and takes the logged time when the batch runs again:
for `current_timestamp()` and for its own stateful operators. The same holds for the query's watermark, which Spark computes
from every `withWatermark` in the query and from its setting for several watermarks. Python's API has neither; the JVM's
classes in Spark 4.2 and 4.3 have both.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tidegate.dataframes.queries import BatchTimes
from tidegate.errors import JobError, TidegateError
from tidegate.snapshots.manifest import MicroBatch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SparkQueries:
    """`dataframes.queries.Queries` of the session of a transform's DataFrame, in which its queries are started."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def batch_times(self, batch: MicroBatch) -> BatchTimes:
        query = self._active(batch.query)
        if query is None:
            raise JobError(
                f"query {batch.query} isn't active in the session of the transform's DataFrame: it was stopped, or it "
                f"belongs to another session, as a union does if its first DataFrame is of that session. Build the "
                f"transform and the query from DataFrames of one session"
            )
        execution = query.streamingQuery().lastExecution()
        if execution is None or execution.currentBatchId() != batch.number:
            raise TidegateError(
                f"query {batch.query} no longer runs micro-batch {batch.number}: it was stopped and started again meanwhile"
            )
        logged = execution.offsetSeqMetadata()
        return BatchTimes(int(logged.batchTimestampMs()), int(logged.batchWatermarkMs()))

    def transforms_of(self, query: str, observed_as: str) -> set[str]:
        active = self._active(query)
        execution = None if active is None else active.streamingQuery().lastExecution()
        return set() if execution is None else transforms_in(str(execution.analyzed().toString()), observed_as)

    def run_of(self, query: str) -> str | None:
        active = self._active(query)
        return None if active is None else str(active.runId().toString())

    def _active(self, query: str) -> Any:
        session: Any = self._spark._jsparkSession
        return session.streams().get(query)


def transforms_in(plan: str, observed_as: str) -> set[str]:
    """Return the ends of all names beginning with `observed_as` that a plan's text observes."""
    return set(re.findall(rf"CollectMetrics {re.escape(observed_as)}(\w+)", plan))


def abandon_stage(spark: SparkSession, stage: int, why: str) -> None:
    """Make Spark give up the stage; the action or query that needs the stage fails with the text `why`."""
    context: Any = spark.sparkContext._jsc
    context.sc().cancelStage(stage, why)
