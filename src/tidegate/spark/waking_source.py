# ruff: noqa: N802  (Spark's names)
"""The stream that wakes the slots where there is no data: Spark asks it at every trigger (spark/waking.py says for what).

It runs in a Python process that Spark starts beside the driver for each query. An offset counts the rows that were given.

A query waits for that process, and the first one of a session for three more. So its code travels by value, and uses nothing
that imports Tidegate or pandas: each of the two takes longer to import than everything that the process does.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark import cloudpickle
from pyspark.sql.datasource import DataSource, DataSourceReader, SimpleDataSourceStreamReader
from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow

from tidegate.spark.waking import ALARM, COLUMN, NEVER, SCHEMA

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

FORMAT = "tidegate_waking"
COUNT = "wakings"

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def waking_source(name: str) -> type[DataSource]:
    """Under a name of its own."""
    class Named(WakingSource):
        @classmethod
        def name(cls) -> str:
            return f"{FORMAT}_{name}"

    return Named


class WakingSource(DataSource):
    def schema(self) -> str:
        return SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        return NoRows()

    def simpleStreamReader(self, schema: StructType) -> WakingReader:
        return WakingReader(Path(self.options[ALARM]))


class NoRows(DataSourceReader):
    """The source as a table, for `waking.prepare`."""

    def read(self, partition: Any) -> Iterator[Any]:
        return iter(())


class WakingReader(SimpleDataSourceStreamReader, SupportsTriggerAvailableNow):
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
