"""`handle.rescale`: a running job goes on at another parallelism, with everything that it holds."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tidegate as tg
from tests.jobs import LEDGER, GatedSource, Ledger, check_clean, check_ledger, committed, completed, records, until
from tests.unit.runtime.conftest import Bench
from tidegate.connectors.generator import GeneratorSource
from tidegate.errors import GraphError, JobError
from tidegate.store.catalog import SnapshotCatalog
from tidegate.store.layout import job_address
from tidegate.store.opening import open_store
from tidegate.testing.processes import ProcessJob

ROWS = 12_000
SPLITS = 6
MINUTE_MS = 60_000
RULES = [("a", 1), ("b", 2), ("a", 3), ("c", 4), ("b", None)]


def timed(split: int, start: int, count: int) -> dict[str, np.ndarray]:
    return {**records(split, start, count), "at": np.arange(start, start + count, dtype=np.int64) * 1_000}


class Minutes(tg.KeyedProcess):
    """Counts the records of each minute of event time, and tells at its end."""

    counts = tg.map("long", "long")

    def process(self, record: Any, ctx: Any) -> None:
        end = (record.at // MINUTE_MS + 1) * MINUTE_MS
        self.counts.put(end, self.counts.get(end, 0) + 1)
        ctx.timers.event_time(end + 60 * MINUTE_MS)

    def on_timer(self, at: int, ctx: Any) -> Iterator[tuple[Any, ...]]:
        end = at - 60 * MINUTE_MS
        yield ctx.key, end, self.counts.get(end)
        self.counts.remove(end)


class Reveal(tg.BroadcastProcess):
    """Tells which rules it knows."""

    factors = tg.broadcast_map("string", "long")

    def process(self, record: Any, ctx: Any) -> Iterator[tuple[Any, ...]]:
        if len(self.factors.items()) == 2:
            yield ctx.parallelism, sum(factor for _, factor in self.factors.items())

    def process_broadcast(self, rule: Any, ctx: Any) -> None:
        if rule.factor is None:
            self.factors.remove(rule.name)
        else:
            self.factors.put(rule.name, rule.factor)


class Hoard(tg.Process):
    """Keeps a number for each record, and tells with its first record what it was given when it began."""

    kept = tg.operator_list("long", redistribute="split")
    runs = tg.operator_list("string", redistribute="union")

    def open(self, ctx: Any) -> None:
        self.given: Any = (ctx.parallelism, ctx.subtask, len(self.kept.get()), sorted(self.runs.get()))
        self.runs.replace([f"{ctx.subtask} of {ctx.parallelism}"])

    def process(self, record: Any, ctx: Any) -> Iterator[tuple[Any, ...]]:
        self.kept.add(1)
        if self.given is not None:
            yield self.given
            self.given = None


def everything(bench: Bench, *, slots: int, every: Any = "150 ms", retain: int = 2) -> tg.Handle:
    """Keyed state, timers, broadcast state, operator state of both kinds, offsets, and four sinks with committables."""
    job = ProcessJob(
        "job",
        slots=slots,
        restart=tg.FixedDelay(attempts=20, delay_ms=0),
        tuning=tg.Tuning(heartbeat_ms=50),
        snapshots=tg.Snapshots(to=str(bench.snapshots), every=every, retain=retain),
    )
    generator = tg.sources.generator(timed, schema="key long, amount long, at long", rows=ROWS, rate=500, splits=SPLITS)
    assert isinstance(generator, GeneratorSource)
    source = job.source("records", GatedSource(generator=generator, gate=str(bench.folder / "gate")))
    rules = job.source("rules", tg.sources.rows(RULES, "name string, factor long"), parallelism=1)

    def sink(name: str) -> tg.Sink:
        return tg.sinks.parquet(bench.folder / name)

    source.key_by("key").process("ledger", Ledger(), returns=LEDGER).to("out", sink("out"))
    source.with_watermark("at", "0 s").key_by("key").process("minutes", Minutes(), returns="key long, end long, n long").to(
        "minutes out", sink("minutes")
    )
    source.key_by("key").connect(rules.broadcast()).process("reveal", Reveal(), returns="of int, total long").to(
        "revealed", sink("revealed")
    )
    source.rebalance().process("hoard", Hoard(), returns="of int, subtask int, kept int, runs array<string>").to(
        "hoarded", sink("hoarded")
    )
    return bench.start(job)


def minutes_of(rows: int) -> list[tuple[int, int, int]]:
    counts: Counter[tuple[int, int]] = Counter()
    for split in range(SPLITS):
        made = timed(split, 0, (rows - split + SPLITS - 1) // SPLITS)
        counts.update(zip(made["key"].tolist(), ((made["at"] // MINUTE_MS + 1) * MINUTE_MS).tolist(), strict=True))
    return sorted((key, end, count) for (key, end), count in counts.items())


def check_all(bench: Bench, handle: tg.Handle) -> None:
    bench.open_gate()
    assert handle.wait(90) is tg.Status.FINISHED
    check_ledger(committed(bench.out), ROWS)
    assert sorted(committed(bench.folder / "minutes")) == minutes_of(ROWS)
    check_clean(bench.snapshots, "job", bench.out)


def has_gone_on(bench: Bench, handle: tg.Handle, slots: int) -> None:
    """Until each of the slots has told what it was given, and that is committed."""

    def told() -> bool:
        return {row[1] for row in committed(bench.folder / "hoarded") if row[0] == slots} == set(range(slots))

    until(told, f"output of all {slots} slots", handle=handle)
    until(lambda: any(row[0] == slots for row in committed(bench.folder / "revealed")), "the rules", handle=handle)


def test_everything_follows_from_two_slots_to_four_to_one(bench: Bench) -> None:
    handle = everything(bench, slots=2)
    has_gone_on(bench, handle, 2)
    handle.rescale(slots=4)
    assert handle.status is tg.Status.RUNNING and sorted(handle.attempts[-1].slots) == [0, 1, 2, 3]
    has_gone_on(bench, handle, 4)
    handle.rescale(slots=1)
    has_gone_on(bench, handle, 1)
    check_all(bench, handle)
    assert handle.failures == []
    assert [len(attempt.slots) for attempt in handle.attempts] == [2, 4, 1]
    finals = [report for report in handle.epochs if report.ending == "stop"]
    assert [report.epoch for report in finals] == [attempt.restored_epoch for attempt in handle.attempts[1:]]
    assert all(report.full for report in finals)

    given = {(row[0], row[1]): row[2:] for row in committed(bench.folder / "hoarded")}
    four = [given[4, subtask] for subtask in range(4)]
    assert max(kept for kept, _ in four) - min(kept for kept, _ in four) <= 1 and sum(kept for kept, _ in four) > 0
    assert all(runs == ["0 of 2", "1 of 2"] for _, runs in four)
    kept, runs = given[1, 0]
    assert kept > sum(kept for kept, _ in four) and runs == [f"{subtask} of 4" for subtask in range(4)]
    assert {total for parallelism, total in committed(bench.folder / "revealed") if parallelism != 2} == {7}


def test_the_reports_tell_how_long_it_took(bench: Bench) -> None:
    handle = everything(bench, slots=1)
    has_gone_on(bench, handle, 1)
    handle.rescale(slots=2)
    first = until(lambda: handle.attempts[-1].first_record_ms, "a record", handle=handle)
    old, new = handle.attempts
    stopped = next(report for report in handle.epochs if report.ending == "stop")
    times = [stopped.triggered_ms, stopped.completed_ms, old.ended_ms, old.gone_ms, new.claimed_ms, new.running_ms, first]
    assert None not in times
    assert times == sorted(times), times


def parallelism(bench: Bench, epoch: int) -> dict[str, int]:
    manifest = SnapshotCatalog(open_store(job_address(str(bench.snapshots), "job"))).load(epoch)
    return {name: manifest.operators[name].parallelism for name in ("ledger", "minutes")}


def test_single_operators_are_rescaled_and_stay_so(bench: Bench) -> None:
    handle = everything(bench, slots=2, retain=100)
    has_gone_on(bench, handle, 2)
    handle.rescale(operators={"ledger": 1})
    assert parallelism(bench, handle.snapshot().epoch) == {"ledger": 1, "minutes": 2}
    handle.rescale(slots=3)
    assert parallelism(bench, handle.snapshot().epoch) == {"ledger": 1, "minutes": 3}
    handle.rescale(operators={"ledger": 3, "minutes": 2})
    assert parallelism(bench, handle.snapshot().epoch) == {"ledger": 3, "minutes": 2}
    check_all(bench, handle)
    assert handle.failures == []


@pytest.mark.parametrize(
    ("asked", "error", "text"),
    [
        (dict(slots=200), GraphError, "128 key-groups"),
        (dict(slots=0), GraphError, "at least one"),
        (dict(operators={"ledgr": 1}), JobError, r"no operator 'ledgr' to rescale; there are \['hoard'"),
        (dict(operators={"ledger": 3}), GraphError, "more than the job's 2 slots"),
        (dict(operators={"ledger": 0}), JobError, "at least one"),
    ],
)
def test_what_cant_be_is_refused_before_anything_is_stopped(
    bench: Bench, asked: dict[str, Any], error: type[Exception], text: str
) -> None:
    handle = everything(bench, slots=2)
    until(lambda: completed(handle), "a snapshot", handle=handle)
    with pytest.raises(error, match=text):
        handle.rescale(**asked)
    seen = len(completed(handle))
    until(lambda: len(completed(handle)) > seen, "another snapshot", handle=handle)
    assert len(handle.attempts) == 1 and all(report.ending is None for report in handle.epochs)


def test_a_slot_that_dies_meanwhile_costs_a_restart_at_the_new_parallelism(bench: Bench) -> None:
    handle = everything(bench, slots=2, every="1 h")
    until(lambda: handle.status is tg.Status.RUNNING, "the job to run")
    until(lambda: sum(counts["records_in"] for counts in handle.metrics.values()), "records", handle=handle)
    os.kill(handle.attempts[-1].slots[1], signal.SIGSTOP)  # so that the final epoch can't complete
    asking = threading.Thread(target=handle.rescale, kwargs={"slots": 3})
    asking.start()
    until(lambda: handle.epochs and handle.epochs[-1].ending == "stop", "the final epoch", handle=handle)
    os.kill(handle.attempts[-1].slots[1], signal.SIGKILL)
    asking.join(60)
    assert handle.status is tg.Status.RUNNING
    assert len(handle.attempts[-1].slots) == 3 and len(handle.failures) == 1
    check_all(bench, handle)


def test_results_of_collect_sinks_keep_accumulating(bench: Bench) -> None:
    job = ProcessJob("job", slots=2, snapshots=tg.Snapshots(to=str(bench.snapshots), every="100 ms"))
    generator = tg.sources.generator(records, schema="key long, amount long", rows=3_000, rate=1_000, splits=SPLITS)
    assert isinstance(generator, GeneratorSource)
    source = job.source("records", GatedSource(generator=generator, gate=str(bench.folder / "gate")))
    source.key_by("key").process("ledger", Ledger(), returns=LEDGER).to("out", tg.sinks.collect())
    handle = bench.start(job)
    before = until(lambda: handle.results("out"), "results", handle=handle)
    handle.rescale(slots=3)
    (bench.folder / "gate").touch()
    assert handle.wait(60) is tg.Status.FINISHED
    # Not in front: of the epoch that was being delivered then, another slot's part may come before.
    assert not Counter(before) - Counter(handle.results("out"))
    check_ledger(handle.results("out"), 3_000)


def test_a_job_that_has_ended_is_not_rescaled(bench: Bench, tmp_path: Path) -> None:
    handle = everything(bench, slots=1)
    until(lambda: completed(handle), "a snapshot", handle=handle)
    handle.stop()
    with pytest.raises(JobError, match="was not rescaled: it is stopped"):
        handle.rescale(slots=2)
