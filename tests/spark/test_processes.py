"""Streaming transforms use Spark's Python processes one after the other, and never at the same time."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import tidegate as tg
from tests.spark.test_transform_streaming import Desk
from tidegate.spark import processes, unused_batches

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SLOTS = 3       # as no other test has them: none of its processes are waiting here
COUNTS = "id long, key long, n long, pid long"


def doubled(rows: Any) -> Any:
    return rows.map(lambda row: (2 * row.id,), returns="id long")


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


def collected(spark: SparkSession) -> None:
    """What nothing refers to any more is gone, here and in Spark's JVM."""
    for _ in range(3):
        gc.collect()
        spark._jvm.System.gc()
        time.sleep(0.05)


def places() -> int:
    return len(processes._places)


@pytest.fixture
def no_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the places that other tests have left. Nothing is started in those that a test with this makes."""
    monkeypatch.setattr(processes, "_places", [])


@pytest.mark.usefixtures("no_places")
def test_transforms_that_are_never_started_leave_their_places_when_they_are_gone(
        tmp_path: Path, spark: SparkSession) -> None:
    desk = Own(tmp_path / "built", spark)
    before = places()
    first, second = desk.transform(), desk.transform()      # built together, and started together, as far as we know
    assert places() == before + 2
    derived = first.select("id")
    first.createOrReplaceTempView("kept")
    del first
    collected(spark)
    third = desk.transform()
    assert places() == before + 3, "a query may still be started with what was made of it"
    del derived
    collected(spark)
    fourth = desk.transform()
    assert places() == before + 4, "or with a view"
    spark.catalog.dropTempView("kept")
    del second, third, fourth
    for _ in range(6):          # as in a notebook
        collected(spark)
        desk.transform()
    assert places() <= before + 5, "what is garbage may be found out one transform later"


@pytest.mark.usefixtures("no_places")
def test_a_transform_that_can_not_be_made_leaves_its_place(spark: SparkSession) -> None:
    tenant = Resident(has_begun=False, query=None, is_settled=False)

    def fails() -> DataFrame:
        raise ValueError("no such column")

    before = places()
    for _ in range(3):
        with pytest.raises(ValueError, match="no such column"):
            processes.in_own_processes(spark, tenant, SLOTS, fails)
        assert processes.VARIABLE not in spark.sparkContext.environment
    assert places() == before + 1


@dataclass
class Resident:
    """A tenant that a test decides about. `lock` is taken while a batch runs."""

    has_begun: bool = True
    query: str | None = "00000000-0000-0000-0000-000000000000"      # which doesn't run
    is_settled: bool = True
    lock: Any = field(default_factory=threading.Lock)

    def move_out(self) -> bool:
        return not self.lock.locked()


@pytest.fixture
def rent(spark: SparkSession, no_places: None) -> Callable[..., int]:
    """The place of a new tenant."""
    def place(tenant: Resident, *, gone: bool = False) -> int:
        return processes._place_for(processes._Let(tenant, SLOTS, spark, lambda: gone))

    return place


def test_a_place_is_not_taken_over_while_a_batch_runs_and_nobody_waits_for_it(rent: Callable[..., int]) -> None:
    first, second = Resident(), Resident()
    place = rent(first)
    with first.lock:            # it was started again, a moment ago
        other = rent(second)
    assert other != place
    assert rent(Resident(query=None)) == place, "which is over now"


@pytest.mark.parametrize("tenant", [Resident(is_settled=False), Resident(query=None, is_settled=False)])
def test_only_who_has_settled_or_never_began_leaves_a_place_at_once(rent: Callable[..., int], tenant: Resident) -> None:
    place = rent(tenant, gone=True)
    assert rent(Resident(is_settled=False)) != place, "there may be more processes than slots"
    never = rent(Resident(has_begun=False), gone=True)
    assert rent(Resident(is_settled=False)) == never


def test_a_place_whose_tenant_can_not_be_ended_stays_the_tenants(rent: Callable[..., int]) -> None:
    class Stuck(Resident):
        def move_out(self) -> bool:
            raise RuntimeError("can't start new thread")

    stuck = Stuck()
    place = rent(stuck)
    assert rent(Resident(is_settled=False)) != place
    assert processes._places[place].tenant is stuck


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


def test_the_driver_keeps_nothing_of_transforms_that_nobody_can_run(spark: SparkSession, tmp_path: Path) -> None:
    """Streaming ones and those of batches, whether they were run or not."""
    def known() -> tuple[int, int]:
        gatherings = sys.modules["tidegate.spark.transform"]._gatherings.values()
        return sum(len(each._transforms) for each in gatherings), len(unused_batches._watched)

    def build(number: int) -> None:
        tg.transform(spark.range(3), doubled, slots=2).collect()
        Own(tmp_path / str(number), spark).transform()

    def counted() -> tuple[int, int]:
        collected(spark)
        tg.transform(spark.range(3), doubled, slots=2)      # whoever builds one looks through the others
        return known()

    before = counted()
    for number in range(3):
        build(number)
    assert known() > before
    for _ in range(3):
        after = counted()       # what is garbage may be found out one transform later
    assert after[0] <= before[0] + 1 and after[1] <= before[1]


@pytest.mark.parametrize("fails", ["to pack it", "to unite its inputs", "in Spark"])
def test_the_driver_keeps_nothing_of_a_transform_that_can_not_be_built(
        spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    transform: Any = sys.modules["tidegate.spark.transform"]
    lock = threading.Lock()

    def pipeline(rows: Any) -> Any:
        if fails == "to pack it":
            return rows.key_by("key").process("count", CountsInItsProcess(lock), returns=COUNTS)  # type: ignore[arg-type]
        return rows

    def raises(*_: Any, **__: Any) -> Any:
        raise tg.JobError("can't be sent to its slots")

    class Frame:
        mapInArrow = raises  # noqa: N815  (Spark's name)

    tg.transform(spark.range(3), doubled, slots=2)      # so that there is a gathering
    if fails == "to unite its inputs":
        monkeypatch.setattr(transform, "_together", raises)
    elif fails == "in Spark":
        monkeypatch.setattr(transform, "_together", lambda *_, **__: Frame())

    def known() -> tuple[set[str], set[str]]:
        return ({each for gathering in transform._gatherings.values() for each in gathering._transforms},
                set(unused_batches._watched))

    before = known()
    stream = Own(tmp_path / "own", spark)
    with pytest.raises(tg.JobError, match="can't be sent to its slots"):
        Desk.transform(stream, pipeline)
    assert known()[0] <= before[0] and known()[1] <= before[1]
