"""Batches without data: timers that are due, and a watermark that has moved, don't wait for the next record.

Spark runs a batch when a source has something new, or when a stateful operator of its own asks for one. The slots are none
of its operators. So if an operator of the pipeline wakes (`Operator.alarm_ms`), a stream of ours is united with the input:

    slots ─► a time, with the snapshot of each batch ─► driver ─► Alarm ─► the stream, which Spark asks at every trigger
    whether there is something new: there is when the time has come

Spark's log says which batches it asked for, so a batch that runs again is the same one.

The alarm is set before a batch can end, so that whoever asks for the next one knows of it. When a query is built it is set
from the newest snapshot. A query that begins with the state of something else has its first batch at once, since timers may
be due. If the alarm is wrong after all, one batch too many is run, or a timer waits for data: the next batch sets it again.

The stream is an object of the driver's own (alarm_stream.py), or a Python data source (alarm_source.py) with a version of
Spark of which it isn't known that it takes such objects.

Not here: who wants to be woken, and why (dataflow/operators/grouped.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tidegate.dataflow.operators.base import AT_ONCE_MS
from tidegate.dataflow.plan import Plan
from tidegate.driver.attempts import Restore
from tidegate.driver.reports import alarm_ms_of
from tidegate.snapshots.catalog import SnapshotCatalog
from tidegate.store.base import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMN = "waking"
SCHEMA = f"{COLUMN} long"
COUNT = "wakings"  # what an offset counts
ENABLED = "spark.sql.streaming.noDataMicroBatches.enabled"
# The versions of Spark that alarm_stream.py is known to work with.
KNOWN_SPARK = ("4.2.", "4.3.")


class AnyAlarm(Protocol):
    """When the next batch of a query is wanted though there may be no data."""

    def set(self, at_ms: int | None) -> None:
        """By the time of day; None: not before there is data."""

    def forget(self) -> None:
        """No query can ask for it any more."""


class Alarm:
    """An alarm that the driver looks at. One thread sets it and another one asks: it is one reference, which is replaced."""

    def __init__(self) -> None:
        self._at_ms: int | None = None

    def set(self, at_ms: int | None) -> None:
        self._at_ms = at_ms

    def forget(self) -> None:
        """It goes with the object."""

    def goes_off(self) -> bool:
        at_ms = self._at_ms
        return at_ms is not None and time.time() * 1000 >= at_ms


class QueryAlarm(NamedTuple):
    """What wakes a query: how its alarm is set, the stream that asks for a batch whenever it goes off (None if no operator
    wakes), and what to call when no query can have the stream any more."""

    set_alarm: Callable[[int | None], None]
    stream: DataFrame | None
    forget: Callable[[], None]


def alarm_of(plan: Plan, store: Store, restore: Restore, spark: SparkSession) -> QueryAlarm:
    """Return what wakes a query whose snapshots are in the store; before its first one it begins with `restore`."""
    if not any(node.sets_alarm for node in plan.nodes):
        return QueryAlarm(_unheard, None, _nothing)
    alarm, stream = alarm_and_stream(spark)
    if spark.conf.get(ENABLED) != "true":
        return QueryAlarm(_unheard, stream, alarm.forget)
    of_batches = [each for each in SnapshotCatalog(store).manifests() if each.micro_batch is not None]
    if of_batches:
        alarm.set(alarm_ms_of(max(of_batches, key=lambda each: each.epoch).stats.get("subtasks", {})))
    elif restore.path is not None:
        alarm.set(AT_ONCE_MS)  # it may bring timers that are due; the first batch finds out
    return QueryAlarm(alarm.set, stream, alarm.forget)


def alarm_and_stream(spark: SparkSession) -> tuple[AnyAlarm, DataFrame]:
    """An alarm that isn't set, and its stream."""
    if spark.version.startswith(KNOWN_SPARK):
        from py4j.protocol import Py4JError

        from tidegate.spark.alarm_stream import alarm_stream

        alarm = Alarm()
        with contextlib.suppress(Py4JError, TypeError):  # a vendor's Spark, which has left something out
            return alarm, alarm_stream(alarm.goes_off, spark)
    from tidegate.spark.alarm_source import AlarmFile, source_stream

    alarm_file = AlarmFile()
    return alarm_file, source_stream(alarm_file, spark)


def _unheard(at_ms: int | None) -> None:
    """Nobody is to be woken."""


def _nothing() -> None:
    """There is nothing to forget."""
