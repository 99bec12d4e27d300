# ruff: noqa: N802  (Spark's names)
"""The stream that asks Spark for a batch without data, as a Python data source: the public way, and the slow one.

The source runs in a Python process that Spark starts beside the driver for each query, and reads the alarm from a file. An
offset counts the rows that were given. A query's very first batch always has a row: Spark runs a batch as soon as it meets a
source of this kind that it doesn't know.

A query waits half a second for that process, and the first query of a session two seconds more for three others. A version
of Spark that accepts an object in the driver needs none of them (alarm_stream.py). This module travels by value and doesn't
import Tidegate or pandas there: each of the two imports takes longer than everything else that the process does.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
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
from tidegate.spark.tables import register_under_own_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

FORMAT = "tidegate_waking"
ALARM = "alarm"  # the option that names the alarm's file
NEVER = "never"

_registered: WeakKeyDictionary[SparkSession, str] = WeakKeyDictionary()
_lock = threading.Lock()
_logger = logging.getLogger(__name__)

cloudpickle.register_pickle_by_value(sys.modules[__name__])


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
        """Return the rows as a batch of nulls. To convert Python's values, Arrow would import pandas."""
        import pyarrow as pa

        count = end[COUNT] - start[COUNT]
        return iter([pa.RecordBatch.from_arrays([pa.nulls(count, pa.int64())], names=[COLUMN])] if count else [])

    def commit(self, end: dict[str, Any]) -> None:
        """There is nothing to release."""

    def prepareForTriggerAvailableNow(self) -> None:
        """Timers that become due while the query runs count as available, as with Spark's own operators."""

    def _goes_off(self) -> bool:
        try:
            at = self._alarm.read_text()
        except FileNotFoundError:
            return True
        return at != NEVER and time.time() * 1000 >= int(at)


class AlarmFile:
    """An alarm that a reader in another process looks at.

    The file is in a folder of the driver's process, which is deleted when that process ends. The file is replaced as a
    whole. If it is gone (some machines clean such folders up), the reader reports that the alarm goes off, and the next
    batch sets it again. So a file that can't be written is removed: one batch too many does less harm than an error in a
    batch that is complete.
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
    """Return the stream. Its schema is given, so that Spark doesn't start a Python process to ask for it."""
    with _lock:
        if spark not in _registered:
            _registered[spark] = register_under_own_name(spark, AlarmSource, FORMAT)
    return spark.readStream.format(_registered[spark]).schema(SCHEMA).option(ALARM, str(alarm.path)).load()


@functools.cache
def _own_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tidegate-alarms-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
