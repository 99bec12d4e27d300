"""Batches without data: due timers, and a watermark that has moved, don't wait for the next record.

Spark runs a batch when a source has something new, or when one of its own stateful operators asks for a batch. The slots are
not such an operator. So if an operator of the pipeline sets alarms (`Operator.alarm_ms`), a stream of ours is united with
the input:

    slots ─► a time, with the snapshot of each batch ─► driver ─► Alarm ─► the stream: at every trigger Spark asks the
    stream whether it has something new, and it has when the time has come

Spark's log has the batches that the stream asked for, so a batch that runs again is the same.

The alarm is set before a batch ends, so the trigger that follows sees it. When a query is built, the alarm is set from the
newest snapshot. A query that begins with the state of another job has its first batch at once, since timers may be due. If
the alarm is wrong all the same, one batch too many runs, or a timer waits for data; the next batch sets the alarm again.

The stream is an object in the driver (alarm_stream.py). With versions of Spark that aren't known to accept such an object
it is a Python data source (alarm_source.py).

Not here: which operators set alarms, and why (dataflow/operators/grouped.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from tidegate.dataflow.operators.base import AT_ONCE_MS
from tidegate.dataflow.plan import Plan
from tidegate.driver.attempts import Restore
from tidegate.snapshots.catalog import SnapshotCatalog
from tidegate.store.base import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMN = "waking"
SCHEMA = f"{COLUMN} long"
COUNT = "wakings"  # what an offset counts
ENABLED = "spark.sql.streaming.noDataMicroBatches.enabled"
KNOWN_SPARK = ("4.2.", "4.3.")  # alarm_stream.py is known to work with these


class Alarm:
    """The time at which a query needs its next batch, None if it only waits for data. One thread sets the time and another
    one reads it: a single reference, which is replaced."""

    def __init__(self) -> None:
        self._at_ms: int | None = None

    def set(self, at_ms: int | None) -> None:
        self._at_ms = at_ms

    def goes_off(self) -> bool:
        at_ms = self._at_ms
        return at_ms is not None and time.time() * 1000 >= at_ms


class QueryAlarm(NamedTuple):
    """A query's alarm: how to set it, and the stream that asks for a batch when it goes off (None if no operator sets
    alarms). `forget` is to be called when no query can have the stream any more."""

    set_alarm: Callable[[int | None], None]
    stream: DataFrame | None
    forget: Callable[[], None]


NO_ALARM = QueryAlarm(lambda at_ms: None, None, lambda: None)


def alarm_of(plan: Plan, store: Store, restore: Restore, spark: SparkSession) -> QueryAlarm:
    """Return the alarm of a query whose snapshots are in the store. Before its first snapshot it begins with `restore`."""
    if not any(node.sets_alarm for node in plan.nodes):
        return NO_ALARM
    alarm = new_alarm(spark)
    if spark.conf.get(ENABLED) != "true":
        return alarm._replace(set_alarm=NO_ALARM.set_alarm)
    intact, _ = SnapshotCatalog(store).intact_manifests()
    of_batches = [each for each in intact if each.micro_batch is not None]
    if of_batches:
        alarm.set_alarm(max(of_batches, key=lambda each: each.epoch).stats.alarm_ms)
    elif restore.path is not None:
        alarm.set_alarm(AT_ONCE_MS)  # the state may have timers that are due; the first batch finds out
    return alarm


def new_alarm(spark: SparkSession) -> QueryAlarm:
    """Return an alarm that isn't set, with its stream."""
    if spark.version.startswith(KNOWN_SPARK):
        from py4j.protocol import Py4JError

        from tidegate.spark.alarm_stream import alarm_stream

        alarm = Alarm()
        with contextlib.suppress(Py4JError, TypeError):  # a vendor's Spark may lack one of the names
            return QueryAlarm(alarm.set, alarm_stream(alarm.goes_off, spark), NO_ALARM.forget)
    from tidegate.spark.alarm_source import AlarmFile, source_stream

    alarm_file = AlarmFile()
    return QueryAlarm(alarm_file.set, source_stream(alarm_file, spark), alarm_file.forget)
