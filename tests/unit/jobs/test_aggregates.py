"""Aggregates in whole jobs: through a crash, at another number of slots, in a changed program, and as a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

import tidegate as tg
from tests.jobs import committed, until
from tests.unit.jobs.conftest import Bench
from tidegate.control.settings import Backend
from tidegate.snapshots.finding import find_snapshot
from tidegate.snapshots.state_tables import state_table
from tidegate.testing.processes import ProcessJob
from tidegate.testing.scripted import AwaitSnapshot, Kill, ScriptedSource

BACKENDS: dict[str, Backend] = {"heap": tg.Heap(), "rocksdb": tg.RocksDB(memory="16 MB")}
KEYS = 10


def numbers(count: int) -> tg.Source:
    """Record i has the key i % 10."""
    return tg.sources.generator(make_row=lambda i: (i % KEYS, i), schema="key long, n long", rows=count, splits=2)


def job_of(
    bench: Bench,
    backend: str,
    build: Callable[[tg.KeyedStream], tg.Stream],
    source: tg.Source,
    *,
    slots: int = 2,
    **rest: Any,
) -> tg.Handle:
    job = ProcessJob(
        "job",
        slots=slots,
        backend=BACKENDS[backend],
        restart=tg.FixedDelay(attempts=20, delay=0),
        snapshots=tg.Snapshots(to=str(bench.snapshots), every="50 ms"),
        **rest,
    )
    build(job.source("in", source).key_by("key")).as_append().to("out", tg.sinks.parquet(bench.out))
    handle = bench.start(job)
    assert handle.wait("1 minute") is tg.Status.FINISHED
    return handle


def by_key(rows: list[Any]) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = defaultdict(list)
    for row in rows:
        found[row[0]].append(row)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_running_aggregates_count_every_record_once_though_a_slot_is_killed(bench: Bench, backend: str) -> None:
    rows = [(f"k{i * i % 7}", i) for i in range(200)]
    script = [*rows[:100], AwaitSnapshot(times=2), *rows[100:120], Kill(), *rows[120:]]
    source = ScriptedSource(script, schema="key string, n long", memory=bench.folder / "marks")
    handle = job_of(
        bench,
        backend,
        lambda keyed: keyed.running("run", nth=tg.count(), total=tg.sum("n"), low=tg.min("n"), all=tg.collect_list("n")),
        source,
    )
    assert len(handle.attempts) == 2 and handle.attempts[-1].restored_epoch is not None
    seen: dict[str, list[int]] = defaultdict(list)
    expected = []
    for key, n in rows:
        seen[key].append(n)
        expected.append((key, n, len(seen[key]), sum(seen[key]), seen[key][0], list(seen[key])))
    assert sorted(committed(bench.out)) == sorted(expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_last_update_of_each_key_is_its_result_though_a_slot_is_killed(bench: Bench, backend: str) -> None:
    rows = [(f"k{i * i % 7}", i) for i in range(200)]
    script = [*rows[:100], AwaitSnapshot(times=2), *rows[100:120], Kill(), *rows[120:]]
    source = ScriptedSource(script, schema="key string, n long", memory=bench.folder / "marks")
    handle = job_of(bench, backend, lambda keyed: keyed.aggregate("sums", rows=tg.count(), mean=tg.mean("n")), source)
    assert len(handle.attempts) == 2
    latest = {key: max(updates, key=lambda row: row[1]) for key, updates in by_key(committed(bench.out)).items()}
    assert sorted(latest.values()) == sorted(
        (key, len(of_key), sum(row[1] for row in of_key) / len(of_key)) for key, of_key in by_key(rows).items()
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_changed_program_keeps_what_it_still_has_at_another_number_of_slots(bench: Bench, backend: str) -> None:
    """One aggregate stays, one has another name, one is gone, one is new, and one computes something else."""
    job_of(
        bench,
        backend,
        lambda keyed: keyed.running("before", rows=tg.count(), total=tg.sum("n"), low=tg.min("n"), end=tg.min("n")),
        numbers(200),
    )
    job_of(
        bench,
        backend,
        lambda keyed: keyed.running(
            "after",
            rows=tg.count(),
            grand_total=tg.sum("n"),
            average=tg.mean("n"),
            end=tg.max("n"),
            renamed={"grand_total": "total"},
            alias="before",
        ),
        numbers(400),
        slots=3,
    )
    after = [row for row in committed(bench.out) if row[1] >= 200]
    assert sorted(after) == sorted(
        (
            n % KEYS,
            n,
            n // KEYS + 1,
            sum(range(n % KEYS, n + 1, KEYS)),
            (n + 200 + n % KEYS) / 2,  # of the numbers from 200 on
            n,
        )
        for n in range(200, 400)
    )


@pytest.mark.parametrize(("before", "after"), [("heap", "rocksdb"), ("rocksdb", "heap")])
def test_a_savepoint_has_the_aggregates_for_another_backend(bench: Bench, before: str, after: str) -> None:
    def build(backend: str, folder: str, source: tg.Source, **rest: Any) -> tg.Handle:
        snapshots = tg.Snapshots(to=str(bench.folder / folder), every="50 ms")
        job = ProcessJob("job", slots=2, backend=BACKENDS[backend], snapshots=snapshots, **rest)
        keyed = job.source("in", source).key_by("key")
        keyed.running("run", nth=tg.count(), top=tg.max_by("key", by="n"), all=tg.collect_set("n % 3")).to(
            "out", tg.sinks.parquet(bench.out)
        )
        return bench.start(job)

    def endless(rate: float | None, rows: int | None) -> tg.Source:
        return tg.sources.generator(
            make_row=lambda i: (i % KEYS, i), schema="key long, n long", rows=rows, rate=rate, splits=2
        )

    first = build(before, "first", endless(500, None))
    until(lambda: len(committed(bench.out)) > 100 if bench.out.exists() else False, "output of the first job")
    first.stop(savepoint=str(bench.folder / "savepoint"))
    count = len(committed(bench.out)) + 200
    second = build(after, "second", endless(None, count), restore_from=str(bench.folder / "savepoint"))
    assert second.wait("1 minute") is tg.Status.FINISHED
    found = sorted(committed(bench.out), key=lambda row: row[1])
    assert [row[:4] for row in found] == [(n % KEYS, n, n // KEYS + 1, n % KEYS) for n in range(count)]
    assert all(sorted(row[4]) == sorted({m % 3 for m in range(row[0], row[1] + 1, KEYS)}) for row in found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_aggregates_are_a_table_in_a_snapshot(bench: Bench, backend: str) -> None:
    job_of(bench, backend, lambda keyed: keyed.aggregate("sums", n=tg.count(), average=tg.mean("n")), numbers(100))
    table = state_table(find_snapshot(str(bench.snapshots / "job")), "aggregates", None)
    found = [row for part in table.parts(None) for batch in table.read(part) for row in batch.to_pylist()]
    assert sorted((row["key"], row["value"]["n_count"], row["value"]["average_mean_sum"]) for row in found) == [
        (key, 10, float(sum(range(key, 100, KEYS)))) for key in range(KEYS)
    ]


def test_explain_shows_aggregates_their_state_and_what_they_emit() -> None:
    job = ProcessJob("job", slots=2)
    keyed = job.source("in", numbers(10)).key_by("key")
    keyed.aggregate("sums", rows=tg.count(), total=tg.sum("n * 2")).to("out", tg.sinks.collect())
    told = job.explain()
    assert "sums · aggregate · rows=count(), total=sum(n * 2)" in told
    assert "state   aggregates  keyed columns<struct<rows_count: long, total_sum: long>>" in told
    assert "emits   upserts by key" in told


def test_collect_brings_every_update_of_a_key_in_its_order() -> None:
    job = ProcessJob("job", slots=2)
    job.source("in", numbers(50)).key_by("key").aggregate("sums", rows=tg.count()).to("out", tg.sinks.collect())
    handle = job.start()
    assert handle.wait("1 minute") is tg.Status.FINISHED
    updates = by_key(handle.results("out"))
    assert {key: rows[-1][1] for key, rows in updates.items()} == dict.fromkeys(range(KEYS), 5)
    assert all([row[1] for row in rows] == sorted({row[1] for row in rows}) for rows in updates.values())
