"""Streaming transforms use Spark's Python processes one after the other, and never at the same time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import tidegate as tg
from tests.spark.test_transform_streaming import Desk

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SLOTS = 3       # as no other test has them: none of its processes are waiting here
COUNTS = "id long, key long, n long, pid long"


class CountsInItsProcess(tg.KeyedProcess):
    """Counts, says in which process, and leaves a file when it is closed."""

    n = tg.value("long", default=0)

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def process(self, row: Any, ctx: Any) -> Iterator[tuple[int, int, int, int]]:
        self.n.set(self.n.get() + 1)
        yield row.id, row.key, self.n.get(), os.getpid()

    def close(self) -> None:
        (self._folder / f"closed in {os.getpid()}").touch()


class Own(Desk):
    """A query in a folder of its own."""

    def __init__(self, folder: Path, spark: SparkSession) -> None:
        folder.mkdir()
        super().__init__(folder, spark)

    def transform(self, pipeline: Any = None, **rest: Any) -> DataFrame:
        counted: DataFrame = super().transform(
            lambda rows: rows.key_by("key").process("count", CountsInItsProcess(self.folder), returns=COUNTS), slots=SLOTS)
        return counted

    def run(self, frame: DataFrame | None = None, **rest: Any) -> None:
        self.add(2)
        super().run(frame, **rest)
        self.check()

    @property
    def processes(self) -> set[int]:
        return {row.pid for row in self.rows()}

    @property
    def closed(self) -> set[int]:
        return {int(path.name.split()[-1]) for path in self.folder.glob("closed in *")}


@pytest.mark.long
def test_a_transform_takes_the_processes_of_one_whose_query_is_over(tmp_path: Path, spark: SparkSession) -> None:
    first, second, third = (Own(tmp_path / name, spark) for name in ("first", "second", "third"))
    frame = first.transform()
    first.run(frame)
    assert len(first.processes) == SLOTS and not first.closed
    second.run(second.transform())
    assert second.processes == first.processes
    assert first.closed == first.processes, "the state of the first one is in nobody's way"
    third.run(third.transform())
    assert third.processes == first.processes
    first.run(frame)        # whose processes the third one has taken over: it has its state from the snapshot
    third.run(third.transform())


@pytest.mark.long
def test_transforms_that_may_run_at_the_same_time_have_processes_of_their_own(tmp_path: Path, spark: SparkSession) -> None:
    first, second = (Own(tmp_path / name, spark) for name in ("first", "second"))
    frames = [each.transform() for each in (first, second)]
    first.run(frames[0])
    second.run(frames[1])
    assert len(first.processes | second.processes) == 2 * SLOTS
