# ruff: noqa: N803  (Spark's names)
"""Several runs of one micro-batch: for a second action, after a failure, after a restart. All of them give the same output,
and none takes the place of a complete snapshot before it is complete itself."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PythonException, StreamingQueryException
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

import tidegate as tg
from tests.spark.test_transform import check_counts
from tests.spark.test_transform_streaming import ROWS, Desk, batches, noted_runs
from tidegate.dataframes.gathering import Run
from tidegate.errors import JobError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BACKENDS = [
    pytest.param(tg.Heap(), id="heap"),
    pytest.param(tg.RocksDB(memory="64 MB"), id="rocksdb", marks=pytest.mark.long),
]
LONG_BACKENDS = [pytest.param(tg.Heap(), id="heap"), pytest.param(tg.RocksDB(memory="64 MB"), id="rocksdb")]
TTL_MS = 400


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    return noted_runs(monkeypatch)


@pytest.fixture
def desk(tmp_path: Path, spark: SparkSession) -> Desk:
    return Desk(tmp_path, spark)


class Clocked(tg.KeyedProcess):
    """Counts, and tells all that depends on the clock. `order` is a file that says what shall go wrong."""

    count = tg.value("long", default=0)
    lately = tg.value("long", default=0, ttl=f"{TTL_MS} ms")

    def __init__(self, order: Path) -> None:
        self.order = str(order)

    def process(self, event: Any, ctx: Any) -> Iterator[tuple[Any, ...]]:
        if event.id % 50 == 49 and os.path.exists(self.order):
            self.follow()
        self.count.set(self.count.get() + 1)
        self.lately.set(self.lately.get() + 1)
        ctx.timers.processing_time(ctx.now_ms() + event.id % 3 * TTL_MS)
        yield event.id, event.key, self.count.get(), f"{ctx.now_ms()} {self.lately.get()}"

    def follow(self) -> None:
        """An order to die is for one slot only; another one may just have taken it."""
        with contextlib.suppress(FileNotFoundError):
            if Path(self.order).read_text() == "die":
                os.unlink(self.order)
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the second run is one too many")

    def on_timer(self, at: int, ctx: Any) -> Iterator[tuple[Any, ...]]:
        yield -1, ctx.key, self.count.get(), f"{ctx.now_ms()} timer {at}"


TOLD = "id long, key long, n long, told string"


def clocked(desk: Desk, **rest: Any) -> DataFrame:
    frame: DataFrame = desk.transform(
        lambda s: s.key_by("key").process("count", Clocked(desk.folder / "order"), returns=TOLD), **rest
    )
    return frame


def run_foreach(desk: Desk, frame: DataFrame, write: Callable[[DataFrame, int], None]) -> None:
    query = (
        frame.writeStream.foreachBatch(write)
        .trigger(availableNow=True)
        .option("checkpointLocation", str(desk.folder / "checkpoint"))
        .start()
    )
    try:
        assert query.awaitTermination(240)
    finally:
        query.stop()


def lose_shuffle_files(spark: SparkSession) -> None:
    """As if an executor was lost: what an action needs of them is computed again."""
    context: Any = spark.sparkContext._jsc
    newest = context.sc().newShuffleId()
    for number in range(max(0, newest - 20), newest):
        context.sc().cleaner().get().doCleanupShuffle(number, True)


def check(rows: list[Any], files: int) -> None:
    check_counts([row for row in rows if row.id >= 0], range(files * ROWS))
    # Two batches may set a timer for the same time, if their times are just so far apart: it fires once for each.
    batches = {(row.key, int(row.told.split()[0]), row.id % 3 * TTL_MS) for row in rows if row.id >= 0}
    was_set = Counter((key, now_ms + delay_ms) for key, now_ms, delay_ms in batches)
    fired = Counter((row.key, int(row.told.split()[2])) for row in rows if row.id < 0)
    assert fired and fired <= was_set, "each timer fires once"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_run_gives_the_same_and_one_that_fails_leaves_the_first_ones_snapshot(
    desk: Desk, runs: list[Run], backend: Any
) -> None:
    desk.add(3)
    order = desk.folder / "order"
    found: list[Any] = []

    def write(batch: DataFrame, number: int) -> None:
        first = sorted(batch.collect())
        lose_shuffle_files(desk.spark)
        time.sleep(TTL_MS / 1000)  # by the clock everything would be different now
        if number == 1:
            order.write_text("fail")
            with pytest.raises((PythonException, Py4JJavaError), match="the second run is one too many"):
                batch.collect()
            order.unlink()
        else:
            assert sorted(batch.collect()) == first
        found.extend(first)

    run_foreach(desk, clocked(desk, backend=backend), write)
    assert [number for number, _ in batches(runs)] == [0, 0, 1, 1, 2, 2]
    check(found, 3)
    assert {row.told.split()[1] for row in found if row.id == 2 * ROWS} == {"1"}, "the others have expired"
    assert sum(row.id < 0 for row in found) > 0
    assert desk.snapshots() == [1, 2]
    desk.add(1)
    run_foreach(desk, clocked(desk, backend=backend), lambda batch, number: found.extend(batch.collect()))
    check(found, 4)


@pytest.mark.long
@pytest.mark.parametrize("backend", LONG_BACKENDS)
def test_a_second_run_whose_process_is_killed_gives_the_same(desk: Desk, backend: Any) -> None:
    desk.add(3)
    found: list[Any] = []

    def write(batch: DataFrame, number: int) -> None:
        first = sorted(batch.collect())
        lose_shuffle_files(desk.spark)
        (desk.folder / "order").write_text("die")
        assert sorted(batch.collect()) == first
        assert not (desk.folder / "order").exists()
        found.extend(first)

    run_foreach(desk, clocked(desk, backend=backend), write)
    check(found, 3)


@pytest.mark.long
@pytest.mark.parametrize("backend", LONG_BACKENDS)
def test_a_batch_that_runs_again_after_a_restart_gives_the_same(desk: Desk, backend: Any) -> None:
    """By the time that Spark's log has for it, at another number of slots."""
    desk.add(4)
    found: dict[int, list[Any]] = {}
    again: list[int] = []

    def write(batch: DataFrame, number: int) -> None:
        rows = sorted(batch.collect())
        if number in found:
            again.append(number)
            assert rows == found[number]
            return
        found[number] = rows
        if number % 2:
            raise ConnectionError("the sink is down")

    for slots in (2, 1):
        with pytest.raises(StreamingQueryException, match="the sink is down"):
            run_foreach(desk, clocked(desk, backend=backend, slots=slots), write)
        time.sleep(2 * TTL_MS / 1000)
    run_foreach(desk, clocked(desk, backend=backend), write)
    assert again == [1, 3] and sorted(found) == [0, 1, 2, 3]
    check([row for rows in found.values() for row in rows], 4)


@pytest.mark.long
def test_a_batch_that_was_written_is_skipped_when_it_runs_again(desk: Desk) -> None:
    """The state is that of the first run, and stays."""
    desk.add(3)
    found: dict[int, list[Any]] = {}

    def write(batch: DataFrame, number: int) -> None:
        if number not in found:
            found[number] = batch.collect()
            if number == 1:
                raise ConnectionError("the acknowledgement was lost")

    with pytest.raises(StreamingQueryException, match="the acknowledgement was lost"):
        run_foreach(desk, desk.transform(), write)
    run_foreach(desk, desk.transform(), write)
    check_counts([row for rows in found.values() for row in rows], range(3 * ROWS))


class Lately(StatefulProcessor):
    """One of Spark's, with a ttl and timers of processing time."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.lately = handle.getValueState("lately", "n long", TTL_MS)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        (n,) = self.lately.get() if self.lately.exists() else (0,)
        n += len(list(rows))
        self.lately.update((n,))
        now = timerValues.getCurrentProcessingTimeInMs()
        self.handle.registerTimer(now + 1 + key[0] * TTL_MS)
        yield Row(key=key[0], told=f"{now} {n}")

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield Row(key=key[0], told=f"{timerValues.getCurrentProcessingTimeInMs()} {expiredTimerInfo.getExpiryTimeInMs()}")


@pytest.mark.long
@pytest.mark.parametrize("backend", LONG_BACKENDS)
def test_a_processor_of_sparks_sees_the_time_of_the_batch(desk: Desk, backend: Any) -> None:
    desk.add(3)
    times: list[set[str]] = []

    def write(batch: DataFrame, number: int) -> None:
        first = sorted(batch.collect())
        lose_shuffle_files(desk.spark)
        time.sleep(TTL_MS / 1000)
        assert sorted(batch.collect()) == first
        times.append({row.told.split()[0] for row in first})

    frame = tg.transform_with_state(
        desk.stream().groupBy("key"),
        Lately(),
        "key long, told string",
        "Append",
        "ProcessingTime",
        name="lately",
        slots=2,
        backend=backend,
        snapshots=tg.Snapshots(to=str(desk.folder / "snapshots")),
    )
    run_foreach(desk, frame, write)
    assert all(len(each) <= 1 for each in times), "one time, whichever slot"
    logged = [(desk.folder / "checkpoint" / "offsets" / str(number)).read_text() for number in range(len(times))]
    assert all(f'"batchTimestampMs":{each.pop()}' in log for each, log in zip(times, logged, strict=True) if each)


# --- names -------------------------------------------------------------------------------------------------------------


def test_transforms_do_not_share_a_folder_unnoticed(desk: Desk) -> None:
    desk.add(1)
    with pytest.raises(JobError, match=r"give name=…, another one for each transform"):
        tg.transform(desk.stream(), lambda s: s, slots=2, snapshots=tg.Snapshots(to=str(desk.folder)))
    one, other = desk.transform(), desk.transform(lambda s: s.filter(lambda row: row.id >= 0))
    with pytest.raises(
        StreamingQueryException,
        match=r"cancelled because JobError: this query has another transform named "
        r"'counts' with the same folder .* a name of its own",
    ):
        desk.run(one.drop("n").union(other))
    assert desk.snapshots() == [], "neither has written anything"
    with pytest.raises(JobError, match="this query has another transform named 'counts'"):
        desk.transform(data=one)
    also = tg.transform(
        desk.stream(), lambda s: s, name="counts", slots=2, snapshots=tg.Snapshots(to=f"{desk.folder}/./snapshots")
    )
    with pytest.raises(StreamingQueryException, match=r"this query has another transform named 'counts' with the same"):
        desk.run(one.drop("n").union(also))
    named = tg.transform(
        desk.stream(), lambda s: s, name="others", slots=2, snapshots=tg.Snapshots(to=f"{desk.folder}/snapshots")
    )
    for each in (one, desk.transform()):  # as built before, and built again
        desk.run(each.selectExpr("id", "n").union(named))
        desk.add(1)
    assert sorted(row.id for row in desk.rows()) == sorted(2 * list(range(2 * ROWS)))


@pytest.mark.long
def test_a_query_that_runs_keeps_its_folder(desk: Desk) -> None:
    frame = desk.transform()
    query = desk.start(frame, trigger={"processingTime": "0 seconds"})
    try:
        desk.add(1)
        query.processAllAvailable()
        for same, what in ((frame, "is in two running streaming queries"), (desk.transform(), "the running query")):
            with pytest.raises(StreamingQueryException, match=what):
                run_foreach(desk_beside(desk), same, lambda batch, number: print(batch.count()))
        desk.add(1)
        query.processAllAvailable()
    finally:
        query.stop()
    desk.check()


def desk_beside(desk: Desk) -> Desk:
    """For a checkpointLocation of its own."""
    return Desk(desk.folder / f"beside-{time.monotonic_ns()}", desk.spark)
