"""Failures that no restart can cure end the job at the first attempt; those that one may cure don't."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tidegate as tg
from tests.jobs import completed, until
from tests.unit.jobs.conftest import Bench
from tidegate.control.launch import SlotLaunch
from tidegate.driver.deployment import Deployer
from tidegate.errors import GraphError, JobFailed
from tidegate.testing.processes import ProcessJob

RESTARTS = tg.FixedDelay(attempts=10, delay=0)
NUMBERS = tg.sources.rows([(number,) for number in range(10)], "number long")


def run_to_failure(bench: Bench, build: Callable[[ProcessJob], object]) -> tuple[tg.Handle, JobFailed]:
    job = bench.job(restart=RESTARTS)
    build(job)
    handle = bench.start(job)
    with pytest.raises(JobFailed) as failed:
        handle.wait("1 minute")
    return handle, failed.value


def lines(folder: Path, *texts: str) -> tg.Source:
    folder.mkdir(exist_ok=True)
    (folder / "log.json").write_text("".join(f"{text}\n" for text in texts))
    return tg.sources.json(folder, schema="number long", stop_at_end=True)


def test_a_bad_line_ends_the_job_at_once_and_once_it_is_corrected_the_job_goes_on(bench: Bench) -> None:
    def build(job: ProcessJob, second: str) -> None:
        source = lines(bench.folder / "in", '{"number": 1}', second)
        job.source("in", source).to("out", tg.sinks.collect())

    handle, failed = run_to_failure(bench, lambda job: build(job, '{"number": "two"}'))
    assert len(handle.attempts) == len(handle.failures) == 1
    assert handle.failures[0].permanent
    for told in ("SourceError: log.json in ", "line 2", '{"number": "two"}'):
        assert told in str(failed)
    again = bench.finish(lambda job: build(job, '{"number": 2}'))
    assert again.results("out") == [(1,), (2,)]


def test_output_that_doesnt_fit_its_schema_ends_the_job_at_once_and_names_the_operator(bench: Bench) -> None:
    def build(job: ProcessJob) -> None:
        stream = job.source("in", NUMBERS).map(lambda record: (str(record.number),), returns="n long", name="to text")
        stream.to("out", tg.sinks.collect())

    handle, failed = run_to_failure(bench, build)
    assert len(handle.attempts) == len(handle.failures) == 1
    assert "SchemaError: operator 'to text'" in str(failed)


def test_a_snapshot_that_doesnt_fit_the_source_ends_the_job_at_once(bench: Bench) -> None:
    def build(job: ProcessJob, count: int) -> None:
        rows = [(number,) for number in range(count)]
        job.source("in", tg.sources.rows(rows, "number long")).to("out", tg.sinks.collect())

    bench.finish(lambda job: build(job, 10))
    handle, failed = run_to_failure(bench, lambda job: build(job, 5))
    assert len(handle.attempts) == 1
    assert "RestoreError: the snapshot was taken when 10 rows" in str(failed)


def test_what_ended_the_job_is_told_and_not_an_earlier_failure(bench: Bench) -> None:
    failed_before = bench.folder / "failed-before"

    def first_one_then_the_other(record: Any) -> tuple[Any, ...]:
        if not failed_before.exists():
            failed_before.touch()
            raise ConnectionError("no database at db:5432")
        return (str(record.number),)

    def build(job: ProcessJob) -> None:
        stream = job.source("in", NUMBERS).map(first_one_then_the_other, returns="n long", name="look up")
        stream.to("out", tg.sinks.collect())

    handle, failed = run_to_failure(bench, build)
    assert [failure.permanent for failure in handle.failures] == [False, True]
    assert len(handle.attempts) == 2, "a user's function that raises is worth another attempt"
    assert "SchemaError: operator 'look up'" in str(failed) and "db:5432" not in str(failed)


def out_in(folder: Path) -> Callable[[ProcessJob], None]:
    def build(job: ProcessJob) -> None:
        job.source("in", NUMBERS).to("out", tg.sinks.parquet(folder))

    return build


@pytest.mark.parametrize(
    ("below", "told"),
    [
        ("file/out", "A part of the path is a file and not a folder"),
        ("x" * 300, "longer than the file system allows"),
        ("/proc/out", "No folder can be created there: give another path"),
    ],
)
def test_a_sink_whose_folder_cant_be_written_ends_the_job_at_once(bench: Bench, below: str, told: str) -> None:
    (bench.folder / "file").touch()
    handle, failed = run_to_failure(bench, out_in(bench.folder / below))
    assert len(handle.failures) == 1 and handle.failures[0].permanent
    assert told in str(failed) and f"host {socket.gethostname()}" in str(failed) and "tg.sinks.parquet(…)" in str(failed)


def test_a_folder_that_becomes_a_file_ends_a_job_that_reads_it_at_once(bench: Bench) -> None:
    (bench.folder / "in").touch()
    source = tg.sources.json(bench.folder / "in" / "logs", schema="number long")
    handle, failed = run_to_failure(bench, lambda job: job.source("in", source).to("out", tg.sinks.collect()))
    assert len(handle.failures) == 1
    assert "NotADirectoryError" in str(failed) and "A part of the path is a file and not a folder" in str(failed)


def test_a_folder_that_isnt_there_says_what_to_do(bench: Bench) -> None:
    source = tg.sources.json(bench.folder / "none", schema="number long", stop_at_end=True)
    handle, failed = run_to_failure(bench, lambda job: job.source("in", source).to("out", tg.sinks.collect()))
    assert len(handle.failures) == 1
    assert f"there is no {bench.folder / 'none'} on host" in str(failed) and "omit stop_at_end" in str(failed)


@pytest.mark.parametrize("gone", ["state", "manifests", "attempts"])
def test_snapshots_that_cant_be_written_any_more_end_the_job_at_once(bench: Bench, gone: str) -> None:
    """A file in the place of a folder stands for rights that were taken away: the tests may run as root."""
    handle = bench.ledger(rows=None, rate=2_000, restart=tg.FixedDelay(attempts=9, delay=0))
    until(lambda: completed(handle), "a snapshot", handle=handle)
    folder = bench.snapshots / "job" / gone
    folder.rename(folder.with_name("away"))
    folder.touch()
    if gone == "attempts":
        os.kill(next(iter(handle.attempts[-1].slots.values())), signal.SIGKILL)
    with pytest.raises(JobFailed, match="A part of the path is a file and not a folder"):
        handle.wait("1 minute")
    assert handle.failures[-1].permanent and len(handle.attempts) == 1


def test_a_full_disk_is_tried_again(bench: Bench) -> None:
    tries = bench.folder / "tries"

    def full_at_first(record: Any) -> tuple[Any, ...]:
        if not tries.exists():
            tries.touch()
            raise OSError(errno.ENOSPC, "No space left on device")
        return tuple(record)

    handle = bench.finish(
        lambda job: job.source("in", NUMBERS).map(full_at_first, returns="number long").to("out", tg.sinks.collect())
    )
    assert [failure.permanent for failure in handle.failures] == [False]


GIVEN: dict[str, Any] = {"a number": 5, "a text": "five", "a dict": {"n": 5}, "one row": (5, 6)}


@pytest.mark.parametrize("what", [*GIVEN])
def test_a_process_that_returns_something_else_than_rows_says_so(bench: Bench, what: str) -> None:
    class Returns(tg.Process):
        def process(self, record: Any, ctx: Any) -> Any:
            return GIVEN[what]

    def build(job: ProcessJob) -> None:
        job.source("in", NUMBERS).process("give", Returns(), returns="n long").to("out", tg.sinks.collect())

    handle, failed = run_to_failure(bench, build)
    assert len(handle.failures) == 1 and failed.operator == "give" and "number=0" in str(failed.record)
    assert (
        f"SchemaError: Returns.process returned {GIVEN[what]!r}, and not several rows. Give each row with `yield"
        in (str(failed).splitlines()[1])
    )


def test_a_function_that_exits_ends_the_job_at_once_and_says_what_to_do(bench: Bench) -> None:
    def leave(record: Any) -> Any:
        sys.exit(3)

    def build(job: ProcessJob) -> None:
        job.source("in", NUMBERS).map(leave, returns="n long", name="leave").to("out", tg.sinks.collect())

    handle, failed = run_to_failure(bench, build)
    assert len(handle.failures) == 1 and "SystemExit: 3" in str(failed) and "sys.exit(3)" in str(failed)
    assert "A function must not end its process" in str(failed) and "handle.stop()" in str(failed)


def test_what_is_called_for_no_rows_must_not_be_a_generator(bench: Bench) -> None:
    class Opens(tg.Process):
        def open(self, ctx: Any) -> Any:
            yield

        def process(self, record: Any, ctx: Any) -> None: ...

    with pytest.raises(GraphError, match=r"Opens.open is a generator.*its body would never run. Remove its yield"):
        bench.job().source("in", NUMBERS).process("give", Opens())


class OnAnotherHost(ProcessJob):
    """Its slots see another folder under the same name, as if they were on a host that doesn't share the driver's disk."""

    def _deployer(self, launch: SlotLaunch, coordinator: tuple[str, int]) -> Deployer:
        return super()._deployer(replace(launch, store=f"{launch.store}-on-another-host"), coordinator)


def test_a_folder_of_snapshots_that_only_the_slots_see_ends_the_job_at_its_first_epoch(tmp_path: Path) -> None:
    job = OnAnotherHost("job", slots=2, snapshots=tg.Snapshots(every="10 ms", to=str(tmp_path)), restart=RESTARTS)
    job.source("in", tg.sources.generator(make_row=lambda i: (i,), schema="n long", rate=100)).to("out", tg.sinks.collect())
    handle = job.start()
    with pytest.raises(JobFailed) as failed:
        handle.wait("1 minute")
    assert len(handle.attempts) == 1 and handle.failures[0].permanent
    assert not any(epoch.completed_ms for epoch in handle.epochs)
    for told in ("state/a0000000001-e0000000001-s0000", str(tmp_path), socket.gethostname(), "Snapshots(to="):
        assert told in str(failed.value)
