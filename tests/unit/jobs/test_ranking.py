"""Deduplicate and top in whole jobs: a killed slot changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

import tidegate as tg
from tests.jobs import committed
from tests.unit.jobs.conftest import Bench
from tests.unit.jobs.test_aggregates import BACKENDS, numbers
from tidegate.testing.processes import ProcessJob
from tidegate.testing.scripted import AwaitSnapshot, Kill, ScriptedSource

ROWS = [(f"k{i * i % 7}", i * 37 % 101, i) for i in range(200)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_slot_changes_neither_ranks_nor_first_records_nor_windows(bench: Bench, backend: str) -> None:
    script = [*ROWS[:100], AwaitSnapshot(times=2), *ROWS[100:120], Kill(), *ROWS[120:]]
    job = ProcessJob(
        "job",
        slots=2,
        backend=BACKENDS[backend],
        restart=tg.FixedDelay(attempts=20, delay=0),
        snapshots=tg.Snapshots(to=str(bench.snapshots), every="50 ms"),
    )
    source = ScriptedSource(script, schema="key string, n long, ts long", memory=bench.folder / "marks")
    keyed = job.source("in", source).with_watermark("ts", "0 s").key_by("key")
    keyed.deduplicate("first").to("out 1", tg.sinks.parquet(bench.folder / "first"))
    keyed.top("best", 3, by="n", descending=True).as_append().to("out 2", tg.sinks.parquet(bench.folder / "best"))
    keyed.window(tg.tumbling("ts", 50)).top("windows", 2, by="n", descending=True).to(
        "out 3", tg.sinks.parquet(bench.folder / "windows")
    )
    handle = bench.start(job)
    assert handle.wait("1 minute") is tg.Status.FINISHED
    assert len(handle.attempts) == 2 and handle.attempts[-1].restored_epoch is not None
    firsts: dict[str, Any] = {}
    for row in ROWS:
        firsts.setdefault(row[0], row)
    assert sorted(committed(bench.folder / "first")) == sorted(firsts.values())
    ranks = {(row[0], row[3]): row for row in committed(bench.folder / "best")}
    assert sorted(ranks.values()) == sorted(row for key in firsts for row in best(key, range(200), 3))
    assert sorted(committed(bench.folder / "windows")) == sorted(
        (*row[:3], start, start + 50, row[3])
        for start in range(0, 200, 50)
        for key in firsts
        for row in best(key, range(start, start + 50), 2)
    )


def best(key: str, numbers: range, count: int) -> list[Any]:
    of_key = sorted((row for row in ROWS if row[0] == key and row[2] in numbers), key=lambda row: -row[1])
    return [(*row, rank) for rank, row in enumerate(of_key[:count], start=1)]


def test_explain_shows_what_is_kept_and_what_is_emitted() -> None:
    job = ProcessJob("job", slots=2)
    keyed = job.source("in", numbers(10)).key_by("key")
    keyed.top("best", 3, by=["n", "key"], descending=[True, False]).to("out 2", tg.sinks.collect())
    keyed.deduplicate("last", keep="last", order_by="n").to("out 3", tg.sinks.collect())
    told = job.explain()
    assert "best · top · 3 by n DESC, key" in told
    assert "state   ranks  keyed columns<struct<n: long>>" in told
    assert "emits   upserts by key, rank" in told
    assert "last · deduplicate · the last by n" in told
