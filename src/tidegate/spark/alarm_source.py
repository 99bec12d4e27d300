# ruff: noqa: N802  (Spark's names)
"""The stream that wakes the slots when there is no data, as a Python data source: the public way, and the slow one.

It runs in a Python process that Spark starts beside the driver for each query, and looks at an alarm in a file. An offset
counts the rows that were given. A query's very first batch has a row in any case: Spark runs one as soon as it meets such a
source that it doesn't know.

A query waits half a second for that process, and the first one of a session two more for three others. A version of Spark
that takes an object of the driver's has no need of them (alarm_stream.py). The code travels by value, and uses nothing that
imports Tidegate or pandas: each of the two takes longer to import than everything that the process does.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from pyspark import cloudpickle
from pyspark.sql.datasource import DataSource, SimpleDataSourceStreamReader
from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow

from tidegate.spark.alarm import COLUMN, COUNT, SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

FORMAT = "tidegate_waking"
ALARM = "alarm"  # the option that names the alarm's file
NEVER = "never"

_registered: WeakKeyDictionary[SparkSession, str] = WeakKeyDictionary()
_lock = threading.Lock()
_logger = logging.getLogger(__name__)
_folder: Path | None = None

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def alarm_source(name: str) -> type[DataSource]:
    """Under a name of its own."""

    class Named(AlarmSource):
        @classmethod
        def name(cls) -> str:
            return f"{FORMAT}_{name}"

    return Named


class AlarmSource(DataSource):
    def schema(self) -> str:
        return SCHEMA

    def simpleStreamReader(self, schema: StructType) -> AlarmReader:
        return AlarmReader(Path(self.options[ALARM]))


class AlarmReader(SimpleDataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, alarm: Path) -> None:
        self._alarm = alarm

    def initialOffset(self) -> dict[str, Any]:
        return {COUNT: 0}

    def read(self, start: dict[str, Any]) -> tuple[Iterator[Any], dict[str, Any]]:
        end = {COUNT: start[COUNT] + (start[COUNT] == 0 or self._goes_off())}
        return self.readBetweenOffsets(start, end), end

    def readBetweenOffsets(self, start: dict[str, Any], end: dict[str, Any]) -> Iterator[Any]:
        """Return Arrow's own batch, of nulls: to make one of Python's values, Arrow would import pandas."""
        import pyarrow as pa

        count = end[COUNT] - start[COUNT]
        return iter([pa.RecordBatch.from_arrays([pa.nulls(count, pa.int64())], names=[COLUMN])] if count else [])

    def commit(self, end: dict[str, Any]) -> None:
        """There is nothing to let go of."""

    def prepareForTriggerAvailableNow(self) -> None:
        """What is due is available, be it that it becomes so while the query runs: Spark's own operators ask likewise."""

    def _goes_off(self) -> bool:
        try:
            at = self._alarm.read_text()
        except FileNotFoundError:
            return True
        return at != NEVER and time.time() * 1000 >= int(at)


class AlarmFile:
    """An alarm that a reader in another process looks at.

    The file is in a folder of the driver's own, which goes with its process. It is replaced as a whole. If it is gone
    (some machines tidy such folders up) a reader takes the alarm to go off, and the batch that follows sets it again. So a
    file that can't be written is removed: a batch too many does less harm than an error in a batch that is complete.
    """

    def __init__(self) -> None:
        self.path = _own_folder() / uuid.uuid4().hex
        self.set(None)

    def set(self, at_ms: int | None) -> None:
        written = self.path.with_suffix(".new")
        try:
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            written.write_text(NEVER if at_ms is None else str(at_ms))
            os.replace(written, self.path)
        except OSError as error:
            _logger.warning("The alarm of a query can't be written to %s: %s. It goes off at once", self.path, error)
            self.forget()

    def forget(self) -> None:
        for path in (self.path, self.path.with_suffix(".new")):
            with contextlib.suppress(OSError):
                path.unlink()


def source_stream(alarm: AlarmFile, spark: SparkSession) -> DataFrame:
    """With a schema, so that Spark doesn't ask a Python process for it."""
    with _lock:
        if spark not in _registered:
            # A name of its own for each session: Spark 4.3.0 neither knows what another session has registered, nor lets it
            # be registered once more, where the other one is the first of its process.
            source = alarm_source(uuid.uuid4().hex)
            spark.dataSource.register(source)
            _registered[spark] = source.name()
    return spark.readStream.format(_registered[spark]).schema(SCHEMA).option(ALARM, str(alarm.path)).load()


def _own_folder() -> Path:
    global _folder
    with _lock:
        if _folder is None or not _folder.is_dir():
            _folder = Path(tempfile.mkdtemp(prefix="tidegate-alarms-"))
            atexit.register(shutil.rmtree, _folder, ignore_errors=True)
        return _folder
