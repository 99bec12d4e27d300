"""Batches without data: timers that are due, and a watermark that has moved, don't wait for the next record.

Spark runs a batch when a source has something new, or when a stateful operator of its own asks for one. The slots are none
of its operators. So where an operator of the pipeline wakes (`Operator.wake_ms`), a source of ours is united with the input:

    slots ─► a time, with the snapshot of each batch ─► driver ─► Alarm, a small file ─► WakingReader, in a process beside
    the driver, whom Spark asks at every trigger whether there is something new: there is when the time has come.

What it gives is one row of no input (`TICK`), which keeps Spark from leaving the slots out; they find no record, and end
their epoch as ever. Spark's log says which batches had such a row, so that a batch that runs again is the same one.

The alarm is set before a batch can end, so that whoever asks for the next one knows of it. When a query is built it is set
from the newest snapshot. Where it isn't right after all, one batch too many is run, or a timer waits for data: the next
batch sets it anew. A query's very first batch has a row in any case: Spark runs one as soon as it meets a source that it
doesn't know.

Not here: who wants to be woken, and why (dataflow/operators/grouped.py). The reader is in spark/waking_source.py, since
PySpark is imported when it is needed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from tidegate.dataflow.operators.grouped import GroupedSpec
from tidegate.dataflow.plan import Plan
from tidegate.runtime.reports import wake_ms_of
from tidegate.store.base import Store
from tidegate.store.catalog import SnapshotCatalog

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ENABLED = "spark.sql.streaming.noDataMicroBatches.enabled"
NEVER = "never"
ALARM = "alarm"         # the option that names the alarm's file
COLUMN = "waking"
SCHEMA = f"{COLUMN} long"

_registered: WeakKeyDictionary[SparkSession, str] = WeakKeyDictionary()
_registering = threading.Lock()
_lock = threading.Lock()
_folder: Path | None = None


class Alarm:
    """When the next batch of a query is wanted though there may be no data. It is set on the driver, for a reader to see.

    The file is in a folder of the driver's own, which goes with its process. It is replaced as a whole. Where it is gone
    (some machines tidy such folders up) a reader takes the alarm to go off, and the batch that follows sets it anew.
    """

    def __init__(self) -> None:
        self.path = _own_folder() / uuid.uuid4().hex
        self.set(None)

    def set(self, at_ms: int | None) -> None:
        """By the time of day; None: not before there is data."""
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        written = self.path.with_suffix(".new")
        written.write_text(NEVER if at_ms is None else str(at_ms))
        os.replace(written, self.path)


def alarm_of(plan: Plan, store: Store, spark: SparkSession) -> tuple[Callable[[int | None], None], DataFrame | None]:
    """What sets the alarm of a query whose snapshots are in the store, and a stream that has a row whenever it goes off;
    None where no operator wakes."""
    if not any(isinstance(node.spec, GroupedSpec) and node.spec.wakes for node in plan.nodes):
        return _unheard, None
    alarm = Alarm()
    if spark.conf.get(ENABLED) != "true":
        return _unheard, _stream(alarm, spark)
    of_batches = [each for each in SnapshotCatalog(store).manifests() if each.micro_batch is not None]
    if of_batches:
        alarm.set(wake_ms_of(max(of_batches, key=lambda each: each.epoch).stats.get("subtasks", {})))
    return alarm.set, _stream(alarm, spark)


def _unheard(at_ms: int | None) -> None:
    """Nobody is to be woken."""


def prepare(spark: SparkSession) -> None:
    """Start what the first such stream of a session needs, while the rest of the query is built: Spark has one Python
    process look for sources, one make ours, and one plan how it is read, as a stream or, here, as a table."""
    from pyspark import InheritableThread

    def plan_one() -> None:
        with contextlib.suppress(Exception):        # the query that needs the stream gets the error
            table: Any = spark.read.format(_format(spark)).schema(SCHEMA).option(ALARM, "").load()
            table._jdf.queryExecution().executedPlan()

    if spark not in _registered:
        InheritableThread(target=plan_one, name="tidegate-waking", daemon=True).start()


def _stream(alarm: Alarm, spark: SparkSession) -> DataFrame:
    """With a schema, so that Spark doesn't ask a Python process for it."""
    return spark.readStream.format(_format(spark)).schema(SCHEMA).option(ALARM, str(alarm.path)).load()


def _format(spark: SparkSession) -> str:
    """Return the name of the session's source, which is registered now if it isn't yet."""
    from tidegate.spark.waking_source import waking_source

    with _registering:
        if spark not in _registered:
            # A name of its own for each session: Spark 4.3.0 neither knows what another session has registered, nor lets it
            # be registered once more, where the other one is the first of its process.
            source = waking_source(uuid.uuid4().hex)
            spark.dataSource.register(source)
            _registered[spark] = source.name()
        return _registered[spark]


def _own_folder() -> Path:
    global _folder
    with _lock:
        if _folder is None or not _folder.is_dir():
            _folder = Path(tempfile.mkdtemp(prefix="tidegate-alarms-"))
            atexit.register(shutil.rmtree, _folder, ignore_errors=True)
        return _folder
