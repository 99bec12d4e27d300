"""Failures that no restart can cure end the job at the first attempt; those that one may cure don't."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tidegate as tg
from tests.unit.runtime.conftest import Bench
from tidegate.errors import JobFailed
from tidegate.testing.processes import ProcessJob

RESTARTS = tg.FixedDelay(attempts=10, delay_ms=0)
NUMBERS = tg.sources.rows([(number,) for number in range(10)], "number long")


def run_to_failure(bench: Bench, build: Callable[[ProcessJob], None]) -> tuple[tg.Handle, JobFailed]:
    job = bench.job(restart=RESTARTS)
    build(job)
    handle = bench.start(job)
    with pytest.raises(JobFailed) as failed:
        handle.wait(60)
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
