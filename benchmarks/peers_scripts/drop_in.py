"""Two stateful processors on Spark's transformWithState, over files; prints one JSON object.

`sum` is the least that a processor can do: one state is read and set for each key. `downtime` is what the example in
Spark's programming guide does: it looks when a sensor was seen last, and moves the timer that is to tell of its silence.

RocksDB with changelog checkpointing, one shuffle partition per core, rows rather than pandas (which is several times slower
with so many keys), no output: what a careful user would set. `benchmarks/drop_in.py` runs the very same class and the same
stream on Tidegate. The first micro-batches, which start processes and create the state of all keys, are not counted.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from pyspark.sql import DataFrame, GroupedData, Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor

FILES_PER_BATCH = 2
# On a local disk, and without Hadoop's native library, Spark starts ten processes for each file of its own log (readlink and
# chmod), which takes a tenth of a second from every micro-batch on any engine. Written in this way a file needs two.
LOG_FILES = (
    "spark.sql.streaming.checkpointFileManagerClass",
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager",
)
SILENCE_MS = 3_600_000  # no timer fires: how many would is a matter of how long the batches take


class RunningSum(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self.sum = handle.getValueState("sum", "total long, n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        total, n = self.sum.get() or (0, 0)
        for row in rows:
            total += row.amount
            n += 1
        self.sum.update((total, n))
        yield Row(key=key[0], total=total, n=n)


class DowntimeDetector(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self.handle = handle
        self.last_seen = handle.getValueState("last_seen", "at_ms long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        seen_ms = max(row.at_ms for row in rows)
        last_ms = self.last_seen.get()[0] if self.last_seen.exists() else 0
        if last_ms < seen_ms:
            for timer in self.handle.listTimers():
                self.handle.deleteTimer(timer)
            self.last_seen.update((seen_ms,))
            self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + SILENCE_MS)
        yield Row(key=key[0], seen_ms=seen_ms, gap_ms=seen_ms - last_ms)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield Row(key=key[0], seen_ms=self.last_seen.get()[0], gap_ms=None)


class Case(NamedTuple):
    processor: StatefulProcessor
    state: str
    reads: str
    output: str
    time_mode: str


CASES = {
    "sum": Case(RunningSum(), "sum", "key long, amount long", "key long, total long, n long", "None"),
    "downtime": Case(
        DowntimeDetector(), "last_seen", "key long, at_ms long", "key long, seen_ms long, gap_ms long", "ProcessingTime"
    ),
}


def grouped(spark: SparkSession, folder: str, case: Case) -> GroupedData:
    """The input. A micro-batch is `FILES_PER_BATCH` files."""
    return spark.readStream.schema(case.reads).option("maxFilesPerTrigger", FILES_PER_BATCH).parquet(folder).groupBy("key")


def measure(result: DataFrame, folder: str, *, warm_up_batches: int, batches: int) -> dict[str, Any]:
    """Runs the query over so many batches; what those behind the first ones took. It is stopped when they are done, since
    Spark goes on with empty ones as long as there are timers."""
    result.sparkSession.conf.set(*LOG_FILES)
    query = (
        result.writeStream.format("noop")
        .outputMode("update")
        .option("checkpointLocation", folder)
        .trigger(availableNow=True)
        .start()
    )
    while query.isActive and not _has_done(query, warm_up_batches + batches):
        time.sleep(0.2)
    counted = [progress for progress in query.recentProgress if progress["numInputRows"]][-batches:]
    query.stop()
    error = query.exception()
    if error is not None:
        raise error
    rows = sum(progress["numInputRows"] for progress in counted)
    seconds = sum(progress["durationMs"]["triggerExecution"] for progress in counted) / 1000
    return {
        "records": rows,
        "batches": len(counted),
        "seconds": round(seconds, 2),
        "records_per_s": round(rows / seconds, 1),
    }


def _has_done(query: Any, batches: int) -> bool:
    """To ask for the last progress costs little; for all of them, a good part of a core."""
    last = query.lastProgress
    return last is not None and last["batchId"] >= batches - 1


def main(name: str, folder: str, warm_up_batches: str, batches: str) -> None:
    from peer_session import peer_session  # beside this script

    spark, case = peer_session("transformWithState"), CASES[name]
    result = grouped(spark, folder, case).transformWithState(case.processor, case.output, "Update", case.time_mode)
    print(json.dumps(measure(result, tempfile.mkdtemp(), warm_up_batches=int(warm_up_batches), batches=int(batches))))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
