# ruff: noqa: N802  (Spark's names)
"""The stream that wakes the slots where there is no data: Spark asks it at every trigger (spark/waking.py says for what).

It runs in a Python process that Spark starts beside the driver for each query. An offset counts the rows that were given.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, SimpleDataSourceStreamReader
from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow

from tidegate.spark.waking import NEVER

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

FORMAT = "tidegate_waking"
ALARM = "alarm"         # the option that names the alarm's file
COUNT = "wakings"


def waking_source(name: str) -> type[DataSource]:
    """Under a name of its own."""
    class Named(WakingSource):
        @classmethod
        def name(cls) -> str:
            return f"{FORMAT}_{name}"

    return Named


class WakingSource(DataSource):
    def schema(self) -> str:
        return "waking long"

    def simpleStreamReader(self, schema: StructType) -> WakingReader:
        return WakingReader(Path(self.options[ALARM]))


class WakingReader(SimpleDataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, alarm: Path) -> None:
        self._alarm = alarm

    def initialOffset(self) -> dict[str, Any]:
        return {COUNT: 0}

    def read(self, start: dict[str, Any]) -> tuple[Iterator[tuple[int]], dict[str, Any]]:
        end = {COUNT: start[COUNT] + (start[COUNT] == 0 or self._goes_off())}
        return self.readBetweenOffsets(start, end), end

    def readBetweenOffsets(self, start: dict[str, Any], end: dict[str, Any]) -> Iterator[tuple[int]]:
        return iter([(number,) for number in range(start[COUNT], end[COUNT])])

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
