"""A user's function that fails: the job ends as its restart strategy says, and the user sees their own traceback."""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tests.jobs import committed, completed, until
from tests.unit.runtime.conftest import Bench
from tidegate.dataflow.contracts import SourceContext, SourceReader
from tidegate.errors import JobFailed
from tidegate.testing.processes import ProcessJob

ROWS = [(key, number) for number in range(100) for key in ("a", "b")]
SOURCE = tg.sources.rows(ROWS, "key string, number long")


class Fails(tg.KeyedProcess):
    """Fails at one record, in the method that it is told to."""

    count = tg.value("long", default=0)

    def __init__(self, where: str) -> None:
        self.where = where

    def open(self, ctx: Any) -> None:
        if self.where == "open":
            raise ConnectionError("no database at db:5432")

    def process(self, record: Any, ctx: Any) -> Iterator[tuple[Any, ...]]:
        self.count.set(self.count.get() + 1)
        if self.where == "process" and record == ("b", 42):
            self.look_up(record)
        if self.where == "service" and record == ("b", 42):
            raise ConnectionError("the prices are away")
        if self.where == "module" and record == ("b", 42):
            import prices_of_yesterday  # type: ignore[import-not-found]  # noqa: F401  (there is none)
        if self.where == "timer":
            ctx.timers.processing_time(ctx.now_ms())
        if self.where == "schema" and record.number == 42:
            yield record.key, "forty-two"
        yield record.key, self.count.get()

    def on_timer(self, at: int, ctx: Any) -> None:
        raise ZeroDivisionError(f"timer of {ctx.key}")

    def look_up(self, record: Any) -> None:
        raise KeyError(f"no price for {record.number}")


def failing(where: str) -> Callable[[ProcessJob], None]:
    def build(job: ProcessJob) -> None:
        stream = job.source("in", SOURCE).key_by("key").process("count words", Fails(where), returns="key string, n long")
        stream.to("out", tg.sinks.collect())

    return build


def run_to_failure(bench: Bench, build: Callable[[ProcessJob], None], restart: Any) -> tuple[tg.Handle, JobFailed]:
    job = bench.job(restart=restart)
    build(job)
    handle = bench.start(job)
    with pytest.raises(JobFailed) as failed:
        handle.wait(60)
    assert handle.status is tg.Status.FAILED
    return handle, failed.value


def test_without_restarts_the_first_failure_ends_the_job_in_the_users_own_terms(bench: Bench) -> None:
    handle, failed = run_to_failure(bench, failing("process"), tg.NoRestart())
    assert failed.operator == "count words"
    assert failed.record is not None and "key='b'" in failed.record and "number=42" in failed.record
    assert failed.user_traceback is not None
    assert failed.user_traceback.startswith("Traceback (most recent call last):")
    assert "self.look_up(record)" in failed.user_traceback and "in look_up" in failed.user_traceback
    assert failed.user_traceback.rstrip().endswith("KeyError: 'no price for 42'")
    assert "tidegate/" not in failed.user_traceback, "the engine's own frames"
    for told in ("'job' failed", "'count words'", "number=42", failed.user_traceback):
        assert told in str(failed)
    with pytest.raises(JobFailed, match="no price for 42"):
        handle.snapshot()
    assert len(handle.failures) == len(handle.attempts) == 1
    assert handle.failures[0].attempt == 1 and handle.failures[0].operator == "count words"
    assert handle.results("out") == []


def test_a_fixed_number_of_restarts_is_tried_and_then_the_users_error_is_told(bench: Bench) -> None:
    handle, failed = run_to_failure(bench, failing("service"), tg.FixedDelay(attempts=2, delay_ms=10))
    assert [failure.attempt for failure in handle.failures] == [1, 2, 3] == [a.attempt for a in handle.attempts]
    assert all(failure.user_traceback for failure in handle.failures), handle.failures
    assert "after 3 failures" in str(failed) and "the prices are away" in str(failed)


def test_an_error_that_comes_twice_at_the_same_record_ends_the_job(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    handle, failed = run_to_failure(bench, failing("process"), tg.FixedDelay(attempts=9, delay_ms=10))
    assert [failure.attempt for failure in handle.failures] == [1, 2]
    assert failed.operator == "count words" and "number=42" in (failed.record or "")
    assert str(failed).endswith(
        "It failed twice at the same record, in attempts 1 and 2, so a restart doesn't help: the job ends."
    )
    first, second = reports(caplog)
    assert first.levelname == "WARNING" and second.levelname == "ERROR"
    told = first.getMessage()
    slot = handle.failures[0].where
    assert slot is not None and re.fullmatch(r"slot [01] \(host .+, pid \d+\)", slot)
    assert told.startswith(f"Job 'job', attempt 1, {slot}: operator 'count words' raised at record ")
    assert "KeyError: 'no price for 42'\n" in told and "self.look_up(record)" in told and "src/tidegate/" not in told
    assert told.endswith("\nRestarting from the beginning in 0.01 s (restart 1 of 9).")
    assert second.getMessage().endswith("so a restart doesn't help: the job ends.")


def test_a_service_that_is_away_is_given_all_the_time_that_restarts_take(bench: Bench) -> None:
    handle, _ = run_to_failure(bench, failing("service"), tg.FixedDelay(attempts=4, delay_ms=10))
    assert len(handle.failures) == 5


def test_a_module_that_isnt_there_ends_the_job_at_once_and_says_how_to_send_it(bench: Bench) -> None:
    handle, failed = run_to_failure(bench, failing("module"), tg.FixedDelay(attempts=9, delay_ms=10))
    assert len(handle.failures) == 1
    assert "No module named 'prices_of_yesterday'" in str(failed) and sys.executable in str(failed)
    assert "addPyFile('prices_of_yesterday.py')" in str(failed)


def test_output_that_doesnt_fit_ends_the_job_at_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    handle, _ = run_to_failure(bench, failing("schema"), tg.FixedDelay(attempts=9, delay_ms=10))
    assert len(handle.failures) == 1
    (report,) = reports(caplog)
    assert report.levelname == "ERROR" and report.getMessage().endswith("A restart doesn't help: the job ends.")


def test_subtasks_that_fail_at_different_records_in_turn_end_the_job(bench: Bench) -> None:
    """Which of them is the first may change from attempt to attempt."""

    def fail(record: Any) -> tuple[Any, ...]:
        raise ValueError(f"bad record {record.number}")

    def build(job: ProcessJob) -> None:
        source = tg.sources.generator(make_row=lambda i: (str(i % 7), i), schema="key string, number long", splits=3)
        job.source("in", source).map(fail, returns="n long", name="parse").to("out", tg.sinks.collect())

    handle, failed = run_to_failure(bench, build, tg.FixedDelay(attempts=9, delay_ms=10))
    records = [failure.record for failure in handle.failures]
    assert len(records) == len(set(records)) + 1 <= 4 and "It failed twice at the same record" in str(failed)


def reports(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What was logged about the job, as users see it without setting anything."""
    return [record for record in caplog.records if record.name == "tidegate.job" and record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("open", "ConnectionError: no database at db:5432"),
        ("timer", "ZeroDivisionError: timer of "),
        ("schema", "'n'.*'forty-two'"),
    ],
)
def test_every_method_of_a_function_is_covered(bench: Bench, where: str, told: str) -> None:
    _, failed = run_to_failure(bench, failing(where), tg.NoRestart())
    assert "'count words'" in str(failed)
    assert re.search(told, str(failed))


class _BrokenReader(SourceReader):
    def poll(self, max_rows: int) -> pa.RecordBatch | None:
        raise TimeoutError("the broker is gone")

    def offsets(self) -> dict[str, int]:
        return {}

    @property
    def finished(self) -> bool:
        return False


class BrokenSource(tg.Source):
    schema = pa.schema([("n", pa.int64())])
    bounded = False

    def open(self, context: SourceContext) -> SourceReader:
        return _BrokenReader()


def test_a_source_of_ones_own_is_blamed_by_its_name(bench: Bench) -> None:
    def build(job: ProcessJob) -> None:
        job.source("orders", BrokenSource()).to("out", tg.sinks.collect())

    _, failed = run_to_failure(bench, build, tg.NoRestart())
    assert failed.operator == "orders"
    assert "TimeoutError: the broker is gone" in str(failed)


def test_an_error_behind_a_shuffle_is_told_by_the_slot_that_had_it(bench: Bench) -> None:
    """The slots upstream lose their channels at the same moment; their complaint must not hide the cause."""

    def fail(record: Any) -> tuple[Any, ...]:
        raise ValueError(f"bad record {record.number}")

    def build(job: ProcessJob) -> None:
        source = tg.sources.generator(make_row=lambda i: (str(i % 7), i), schema="key string, number long", splits=3)
        job.source("in", source).rebalance().map(fail, returns="n long", name="parse").to("out", tg.sinks.collect())

    handle, failed = run_to_failure(bench, build, tg.NoRestart())
    assert failed.operator == "parse" and "ValueError: bad record" in str(failed), handle.failures


def test_a_function_that_fails_now_and_then_only_delays_the_job(bench: Bench) -> None:
    marks = bench.folder / "failed-once"

    def now_and_then(record: Any) -> tuple[Any, ...]:
        if record.number == 50 and not marks.exists():
            marks.touch()
            raise OSError("try again")
        return tuple(record)

    def build(job: ProcessJob) -> None:
        stream = job.source("in", SOURCE).map(now_and_then, returns="key string, number long")
        stream.to("out", tg.sinks.parquet(bench.out))

    handle = bench.finish(build, restart=tg.Exponential(initial_ms=10, maximum_ms=100))
    assert [failure.user_traceback is not None for failure in handle.failures] == [True]
    assert sorted(committed(bench.out)) == sorted(ROWS)


def restarting(bench: Bench) -> tg.Handle:
    """A job that waits long for its next attempt."""
    job = bench.job(restart=tg.FixedDelay(attempts=9, delay_ms=600_000))
    failing("service")(job)
    handle = bench.start(job)
    until(lambda: handle.status is tg.Status.RESTARTING, "the failure", handle=handle)
    return handle


def test_a_restarting_job_is_stopped_at_once_with_the_reason(bench: Bench) -> None:
    handle = restarting(bench)
    began_s = time.monotonic()
    with pytest.raises(JobFailed, match=r"(?s)the prices are away.*The job was stopped while it was restarting"):
        handle.stop()
    assert time.monotonic() - began_s < 30 and handle.status is tg.Status.FAILED


def test_a_restarting_job_cant_be_drained_nor_leave_a_savepoint_and_says_why(bench: Bench) -> None:
    handle = restarting(bench)
    asks: list[dict[str, Any]] = [{"drain": True}, {"savepoint": str(bench.folder / "savepoint")}]
    for asked in asks:
        with pytest.raises(tg.JobError, match=r"(?s)while it is restarting.*the prices are away") as refused:
            handle.stop(**asked)
        assert isinstance(refused.value.__cause__, JobFailed)
    assert handle.status is tg.Status.RESTARTING
    with pytest.raises(TimeoutError, match=r"(?s)still restarting after 0.1 s. Its last failure .*the prices are away"):
        handle.wait(0.1)


def test_a_restarting_job_is_rescaled_when_it_is_known_to_run(bench: Bench) -> None:
    """That its slots are ready says nothing: it fails again at the first record."""
    job = bench.job(restart=tg.FixedDelay(attempts=2, delay_ms=300))
    failing("service")(job)
    handle = bench.start(job)
    until(lambda: handle.status is tg.Status.RESTARTING, "the failure", handle=handle)
    with pytest.raises(JobFailed, match="the prices are away"):
        handle.rescale(slots=3)
    assert handle.status is tg.Status.FAILED and len(handle.attempts) == 3
    assert sorted(handle.attempts[-1].slots) == [0, 1, 2]
    assert handle.slots == [], "their processes have ended"


def test_a_job_that_comes_back_at_another_parallelism_is_rescaled_with_a_snapshot(bench: Bench) -> None:
    is_back = bench.folder / "is-back"

    def look_up(record: Any) -> tuple[Any, ...]:
        if not is_back.exists():
            raise ConnectionError("the prices are away")
        return tuple(record)

    job = bench.job(restart=tg.FixedDelay(attempts=9, delay_ms=300), every=None)
    source = tg.sources.generator(make_row=lambda i: (i,), schema="n long", rate=500)
    job.source("in", source).map(look_up, returns="n long", name="look up").to("out", tg.sinks.parquet(bench.out))
    handle = bench.start(job)
    until(lambda: handle.status is tg.Status.RESTARTING, "the failure", handle=handle)
    threading.Timer(1.0, is_back.touch).start()
    handle.rescale(slots=3)
    assert is_back.exists() and handle.status is tg.Status.RUNNING and completed(handle)
    assert [each.slot for each in handle.slots] == [0, 1, 2]
    assert committed(bench.out), "the snapshot is of a job that has got somewhere"
    assert handle.stop() is tg.Status.STOPPED and handle.slots == []
    numbers: dict[int, list[int]] = {}
    for (number,) in committed(bench.out):
        numbers.setdefault(number % 8, []).append(number)
    assert all(sorted(of) == list(range(split, split + 8 * len(of), 8)) for split, of in numbers.items())
