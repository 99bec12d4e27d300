"""Jobs on a real Spark, `local[4]`: what a user sees from start to end."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tidegate as tg
from tests.jobs import build_ledger, check_clean, check_ledger, check_order, committed, completed, until
from tidegate.errors import JobError, JobFailed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RESTARTS = tg.FixedDelay(attempts=10, delay=0)


class Desk:
    """The folders of one test, the session, and the jobs that it started."""

    def __init__(self, folder: Path, spark: SparkSession) -> None:
        self.folder = folder
        self.spark = spark
        self.snapshots = folder / "snapshots"
        self.out = folder / "out"
        self.handles: list[tg.Handle] = []

    def job(
        self,
        name: str = "job",
        *,
        slots: int | None = 2,
        every: Any = "200 ms",
        restart: Any = RESTARTS,
        tuning: tg.Tuning | None = None,
    ) -> tg.Job:
        return tg.Job(
            name,
            self.spark,
            slots=slots,
            restart=restart,
            tuning=tuning,
            snapshots=tg.Snapshots(to=str(self.snapshots), every=every),
        )

    def ledger(
        self, *, rows: int | None, rate: float | None = None, out: str = "out", gated: bool = False, **rest: Any
    ) -> tg.Handle:
        """A gated one goes on at its rate until `open_gate`."""
        job = self.job(**rest)
        build_ledger(
            job, tg.sinks.parquet(self.folder / out), rows=rows, rate=rate, gate=self.folder / "gate" if gated else None
        )
        return self.start(job)

    def open_gate(self) -> None:
        (self.folder / "gate").touch()

    def start(self, job: tg.Job) -> tg.Handle:
        handle = job.start()
        self.handles.append(handle)
        return handle


@pytest.fixture
def desk(tmp_path: Path, spark: SparkSession) -> Iterator[Desk]:
    desk = Desk(tmp_path, spark)
    yield desk
    for handle in desk.handles:
        if not handle.status.terminal:
            handle.cancel()


# --- output that is right at every moment ------------------------------------------------------------------------------


class CountByKey(tg.KeyedProcess):
    count = tg.value("long", default=0)

    def process(self, event: Any, ctx: Any) -> Iterator[tuple[int, int, int]]:
        self.count.set(self.count.get() + 1)
        yield event.id, event.key, self.count.get()


def add_file(folder: Path, ids: range) -> None:
    rows = pa.table({"id": list(ids), "key": [number % 17 for number in ids]})
    hidden = folder / f"_{ids.start}.parquet"
    pq.write_table(rows, hidden)
    hidden.rename(folder / f"events-{ids.start}.parquet")


def look(spark: SparkSession, out: Path) -> set[int]:
    """What a reader sees now: the ids, after checking that all of it makes sense."""
    rows = [tuple(row) for row in spark.read.parquet(str(out)).collect()]
    ids = {number for number, _, _ in rows}
    assert len(ids) == len(rows), "a record was seen twice"
    assert all(key == number % 17 for number, key, _ in rows)
    counts = Counter(key for _, key, _ in rows)
    for key, count in counts.items():
        numbers = sorted(n for _, of, n in rows if of == key)
        assert numbers == list(range(1, count + 1)), f"key {key} has {numbers}"
    return ids


def test_a_folder_is_read_as_it_grows_and_the_output_is_right_at_every_moment(desk: Desk) -> None:
    source = desk.folder / "in"
    source.mkdir()
    add_file(source, range(500))
    job = desk.job()
    events = job.source("events", tg.sources.parquet(source, schema="id long, key long", discover_every="100 ms"))
    events.key_by("key").process("count", CountByKey(), returns="id long, key long, n long").to(
        "out", tg.sinks.parquet(desk.out)
    )
    handle = desk.start(job)
    until(lambda: handle.status is tg.Status.RUNNING, "the job to run", handle=handle)

    seen: set[int] = set()
    for part in range(1, 5):
        now = look(desk.spark, desk.out)
        assert seen <= now, "what a reader has seen is gone"
        seen = now
        add_file(source, range(part * 500, part * 500 + 500))

    def all_of_it() -> bool:
        nonlocal seen
        now = look(desk.spark, desk.out)
        assert seen <= now
        seen = now
        return len(now) == 2_500

    until(all_of_it, "everything to be committed", handle=handle)
    assert handle.stop() is tg.Status.STOPPED
    assert look(desk.spark, desk.out) == set(range(2_500))
    assert len(completed(handle)) >= 2 and handle.failures == []
    check_clean(desk.snapshots, "job", desk.out)


# --- the handle --------------------------------------------------------------------------------------------------------


def test_a_job_is_stopped_and_cancelled_and_goes_on_at_other_numbers_of_slots(desk: Desk) -> None:
    rows = 20_000
    first = desk.ledger(rows=rows, rate=5_000, slots=2, gated=True)
    assert first.status in (tg.Status.STARTING, tg.Status.RUNNING)
    until(lambda: completed(first), "a snapshot", handle=first)
    assert (first.stop(), first.status) == (tg.Status.STOPPED, tg.Status.STOPPED)
    assert first.epochs[-1].ending == "stop" and first.epochs[-1].duration_ms is not None

    second = desk.ledger(rows=rows, rate=5_000, slots=3, gated=True)
    until(lambda: completed(second), "a snapshot", handle=second)
    assert second.cancel() is tg.Status.CANCELLED
    assert second.attempts[0].restored_epoch == first.epochs[-1].epoch

    desk.open_gate()
    last = desk.ledger(rows=rows, slots=1, gated=True)
    assert last.wait("1 minute") is tg.Status.FINISHED
    assert first.failures == second.failures == last.failures == []
    check_ledger(committed(desk.out), rows)
    check_clean(desk.snapshots, "job", desk.out)


def test_without_a_number_the_job_takes_the_slots_that_the_session_has(desk: Desk) -> None:
    handle = desk.ledger(rows=4_000, slots=None)
    assert handle.wait("1 minute") is tg.Status.FINISHED
    assert sorted(handle.attempts[0].slots) == [0, 1, 2, 3]
    assert len(set(handle.attempts[0].slots.values())) == 4, "each in a process of its own"
    check_ledger(committed(desk.out), 4_000)
    # They are free again: this stage, too, needs all four at once.
    assert desk.spark.sparkContext.parallelize(range(4), 4).barrier().mapPartitions(list).count() == 4


def test_two_jobs_run_in_one_session_at_once(desk: Desk) -> None:
    one = desk.ledger(rows=20_000, rate=5_000, name="one", out="one", gated=True)
    two = desk.ledger(rows=20_000, rate=5_000, name="two", out="two", gated=True)
    until(lambda: one.status is two.status is tg.Status.RUNNING and completed(one) and completed(two), "both to run")
    desk.open_gate()
    assert one.wait("1 minute") is two.wait("1 minute") is tg.Status.FINISHED
    for name in ("one", "two"):
        check_ledger(committed(desk.folder / name), 20_000)
        check_clean(desk.snapshots, name, desk.folder / name)


# --- what goes wrong ---------------------------------------------------------------------------------------------------


class Divides(tg.KeyedProcess):
    def process(self, record: Any, ctx: Any) -> Iterator[tuple[int, float]]:
        yield record.key, self.ratio(record)

    def ratio(self, record: Any) -> float:
        return 1 / int(record.amount - 500)


def test_an_error_in_a_users_function_is_told_with_their_traceback(desk: Desk) -> None:
    job = desk.job(restart=tg.FixedDelay(attempts=1, delay=0))
    rows = [(key, amount) for amount in range(495, 505) for key in range(3)]
    job.source("in", tg.sources.rows(rows, "key long, amount long")).key_by("key").process(
        "divide", Divides(), returns="key long, ratio double"
    ).to("out", tg.sinks.collect())
    with pytest.raises(JobFailed) as failed:
        job.run()
    assert failed.value.operator == "divide"
    assert failed.value.record is not None and "amount=500" in failed.value.record
    assert failed.value.user_traceback is not None
    assert "in ratio" in failed.value.user_traceback
    assert failed.value.user_traceback.rstrip().endswith("ZeroDivisionError: division by zero")
    assert "py4j" not in str(failed.value) and "java" not in str(failed.value)


def test_more_slots_than_spark_has_are_refused_at_once(desk: Desk) -> None:
    job = build_ledger(desk.job(slots=8), tg.sinks.parquet(desk.out), rows=10)
    started = time.monotonic()
    with pytest.raises(JobError, match=r"slots=8.*local\[4\].*has 4 task slots.*slots=4 or fewer.*master\('local\[8\]'\)"):
        job.start()
    assert time.monotonic() - started < 5


def test_slots_that_are_taken_by_others_are_waited_for_and_then_asked_about(desk: Desk) -> None:
    holder = desk.ledger(rows=None, rate=1_000, name="holder", slots=3)
    until(lambda: holder.status is tg.Status.RUNNING, "the first job to run", handle=holder)
    waiting = desk.ledger(
        rows=1_000, name="waiting", out="other", restart=tg.NoRestart(), tuning=tg.Tuning(deploy_timeout="2 s")
    )
    with pytest.raises(JobFailed, match=r"slots \[0, 1\] were not ready within 2000 ms.*are they there and free\?"):
        waiting.wait("1 minute")
    patient = desk.ledger(rows=1_000, name="patient", out="other")
    time.sleep(1)
    assert patient.status is tg.Status.STARTING
    holder.cancel()
    assert patient.wait("1 minute") is tg.Status.FINISHED


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_python_process_that_is_killed_or_stopped_is_replaced(desk: Desk, blow: signal.Signals) -> None:
    rows = 20_000
    handle = desk.ledger(
        rows=rows, rate=5_000, tuning=tg.Tuning(heartbeat="100 ms", heartbeat_timeout="1500 ms"), gated=True
    )
    until(lambda: completed(handle), "a snapshot", handle=handle)
    victim = handle.attempts[-1].slots[1]
    os.kill(victim, blow)
    struck_ms = time.time() * 1000
    running_ms = until(
        lambda: len(handle.attempts) == 2 and handle.attempts[1].running_ms, "the next attempt", handle=handle
    )
    print(
        f"{blow.name}: noticed after {handle.failures[0].at_ms - struck_ms:.0f} ms, "
        f"running again after {running_ms - struck_ms:.0f} ms"
    )
    desk.open_gate()
    assert handle.wait("1 minute") is tg.Status.FINISHED
    assert len(handle.failures) == 1
    assert handle.attempts[1].restored_epoch is not None
    until(lambda: not Path(f"/proc/{victim}").exists(), "the end of the old process")
    check_ledger(committed(desk.out), rows)
    check_clean(desk.snapshots, "job", desk.out)


def test_a_reader_sees_an_empty_table_before_the_first_commit(desk: Desk) -> None:
    handle = desk.ledger(rows=None, rate=100, every=None)
    until(lambda: handle.status is tg.Status.RUNNING, "the job to run", handle=handle)
    read = desk.spark.read.parquet(str(desk.out))
    assert read.count() == 0 and read.columns == ["key", "number", "total"]
    handle.snapshot()
    check_order(until(lambda: committed(desk.out), "rows", handle=handle))
