"""Users' functions on columns in whole jobs: through a crash, and in a changed program at another number of slots."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import tidegate as tg
from tests.jobs import committed
from tests.unit.jobs.conftest import Bench
from tests.unit.jobs.test_aggregates import BACKENDS, job_of, numbers
from tidegate.snapshots.finding import find_snapshot
from tidegate.snapshots.state_tables import state_table
from tidegate.testing.processes import ProcessJob
from tidegate.testing.scripted import AwaitSnapshot, Kill, ScriptedSource


class Nth(tg.KeyedBatchProcess):
    """Emits for every record which one of its key it is, and the sum so far."""

    sums = tg.columns("n long, total long", defaults={"n": 0, "total": 0})

    def process(self, batch: pa.RecordBatch, ctx: tg.BatchContext) -> tg.Batches:
        """Take a batch."""
        keys = ctx.keys
        before = self.sums.get_many(keys)
        count, total, values = before["n"].to_numpy(), before["total"].to_numpy(), batch["n"].to_numpy()
        order = np.argsort(keys.of, kind="stable")
        sums, so_far = np.cumsum(values[order]), np.empty(len(order), np.int64)
        so_far[order] = sums - (sums - values[order])[np.searchsorted(keys.of[order], keys.of[order])]
        nth, running = count[keys.of] + keys.nth + 1, total[keys.of] + so_far
        self.sums.set_many(keys, n=nth[keys.last], total=running[keys.last])
        return pa.record_batch([batch["key"], batch["n"], nth, running], names=["key", "n", "nth", "total"])


class Changed(tg.KeyedBatchProcess):
    """One column has another name, one is gone, one is new; the state has another name, too."""

    now = tg.columns("count long, factor long", defaults={"count": 0, "factor": 10}, alias="sums", renamed={"count": "n"})

    def process(self, batch: pa.RecordBatch, ctx: tg.BatchContext) -> tg.Batches:
        """Take a batch."""
        keys = ctx.keys
        before = self.now.get_many(keys)
        count, factor = before["count"].to_numpy(), before["factor"].to_numpy()
        self.now.set_many(keys, count=count + np.bincount(keys.of))
        return pa.record_batch([batch["key"], batch["n"], count[keys.of] + keys.nth + 1, factor[keys.of]], schema=OUT)


OUT = pa.schema([("key", pa.int64()), ("n", pa.int64()), ("nth", pa.int64()), ("total", pa.int64())])


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_record_counts_once_though_a_slot_is_killed(bench: Bench, backend: str) -> None:
    rows = [(f"k{i * i % 7}", i) for i in range(200)]
    script = [*rows[:100], AwaitSnapshot(times=2), *rows[100:120], Kill(), *rows[120:]]
    source = ScriptedSource(script, schema="key string, n long", memory=bench.folder / "marks")
    handle = job_of(
        bench, backend, lambda keyed: keyed.process("nth", Nth(), "key string, n long, nth long, total long"), source
    )
    assert len(handle.attempts) == 2 and handle.attempts[-1].restored_epoch is not None
    seen: dict[str, list[int]] = {}
    expected: list[Any] = []
    for key, n in rows:
        seen.setdefault(key, []).append(n)
        expected.append((key, n, len(seen[key]), sum(seen[key])))
    assert sorted(committed(bench.out)) == sorted(expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_changed_program_keeps_what_it_still_has_at_another_number_of_slots(bench: Bench, backend: str) -> None:
    job_of(bench, backend, lambda keyed: keyed.process("nth", Nth(), OUT), numbers(200))
    table = state_table(find_snapshot(str(bench.snapshots / "job")), "sums", "nth")
    found = [row for part in table.parts(None) for batch in table.read(part) for row in batch.to_pylist()]
    assert sorted((row["key"], row["value"]["n"], row["value"]["total"]) for row in found) == [
        (key, 20, sum(range(key, 200, 10))) for key in range(10)
    ]
    job_of(bench, backend, lambda keyed: keyed.process("nth", Changed(), OUT), numbers(400), slots=3)
    after = [row for row in committed(bench.out) if row[1] >= 200]
    assert sorted(after) == sorted((n % 10, n, n // 10 + 1, 10) for n in range(200, 400))


def test_explain_shows_the_columns_of_state() -> None:
    job = ProcessJob("job", slots=2)
    job.source("in", numbers(10)).key_by("key").process("nth", Nth(), OUT).to("out", tg.sinks.collect())
    told = job.explain()
    assert "nth · keyed batch process" in told
    assert "state   sums  keyed columns<struct<n: long, total: long>>" in told


def test_state_of_another_kind_is_refused_when_the_job_is_built() -> None:
    class OfRecords(tg.KeyedBatchProcess):
        count = tg.value("long")

        def process(self, batch: pa.RecordBatch, ctx: tg.BatchContext) -> tg.Batches:
            return None

    class OfColumns(tg.KeyedProcess):
        count = tg.columns("n long")

        def process(self, record: Any, ctx: tg.Context) -> tg.Rows:
            return None

    keyed = ProcessJob("job", slots=1).source("in", numbers(10)).key_by("key")
    for function, declared in ((OfRecords(), "tg.value"), (OfColumns(), "tg.columns")):
        with pytest.raises(tg.GraphError, match=rf"declares the state 'count' as {declared}\(…\)\. A KeyedBatchProcess has"):
            keyed.process("op", function)
