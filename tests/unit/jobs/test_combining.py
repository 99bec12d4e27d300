"""Aggregates that are computed in part before the exchange, in whole jobs: what is restored, refused and shown."""

from __future__ import annotations

from typing import Any

import pytest

import tidegate as tg
from tests.jobs import committed
from tests.unit.jobs.conftest import Bench
from tests.unit.jobs.test_aggregates import KEYS, by_key, job_of, numbers
from tidegate.testing.processes import ProcessJob
from tidegate.testing.scripted import AwaitSnapshot, Kill, ScriptedSource


def combined(how: str | None) -> tg.Tuning:
    return tg.Tuning(combine=how, max_batch_rows=20)


@pytest.mark.parametrize(("before", "after"), [("50 ms", None), (None, "50 ms"), ("50 ms", "1 minute")])
def test_a_snapshot_does_not_depend_on_whether_records_are_combined(
    bench: Bench, before: str | None, after: str | None
) -> None:
    def build(keyed: tg.KeyedStream) -> tg.Stream:
        return keyed.aggregate("sums", rows=tg.count(), total=tg.sum("n"), first=tg.first("n"))

    job_of(bench, "heap", build, numbers(200), tuning=combined(before))
    job_of(bench, "heap", build, numbers(400), slots=3, tuning=combined(after))
    latest = {key: max(updates, key=lambda row: row[1]) for key, updates in by_key(committed(bench.out)).items()}
    assert latest == {key: (key, 40, sum(range(key, 400, KEYS)), key) for key in range(KEYS)}


@pytest.mark.parametrize("mode", ["exactly_once", "unaligned"])
def test_nothing_that_was_held_is_lost_or_counted_twice_when_a_slot_is_killed(bench: Bench, mode: Any) -> None:
    rows = [(f"k{i * i % 7}", i) for i in range(200)]
    script = [*rows[:100], AwaitSnapshot(times=2), *rows[100:120], Kill(), *rows[120:]]
    job = ProcessJob(
        "job",
        slots=2,
        restart=tg.FixedDelay(attempts=20, delay=0),
        snapshots=tg.Snapshots(to=str(bench.snapshots), every="50 ms", mode=mode),
        tuning=tg.Tuning(combine="1 minute", max_batch_rows=1),
    )
    source = ScriptedSource(script, schema="key string, n long", memory=bench.folder / "marks")
    counts = job.source("in", source).key_by("key").aggregate("sums", rows=tg.count(), total=tg.sum("n"))
    counts.as_append().to("out", tg.sinks.parquet(bench.out))
    handle = bench.start(job)
    assert handle.wait("1 minute") is tg.Status.FINISHED
    assert len(handle.attempts) == 2
    latest = {key: max(updates, key=lambda row: row[1]) for key, updates in by_key(committed(bench.out)).items()}
    assert latest == {key: (key, len(of), sum(n for _, n in of)) for key, of in by_key(rows).items()}


def test_explain_shows_where_records_are_combined() -> None:
    def shown(**tuning: Any) -> str:
        job = ProcessJob("job", slots=2, tuning=tg.Tuning(**tuning))
        keyed = job.source("in", numbers(10)).key_by("key")
        keyed.aggregate("sums", rows=tg.count(), total=tg.sum("n")).to("out", tg.sinks.collect())
        return job.explain()

    assert "└─ (sums)  combine" in shown()
    assert "input   v0 (sums), hash by key: key long, rows_count long, total_sum long" in shown()
    assert "combine" not in shown(combine=None)
    assert "combine" not in shown(chaining=False)
