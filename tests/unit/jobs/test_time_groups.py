"""Sources that are kept together in event time, in real processes: kills change nothing, and what has to go on while a
source waits goes on. How far they get apart is checked in tests/simulation/test_time_groups.py."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

import tidegate as tg
from tests.jobs import committed, until
from tests.unit.jobs.conftest import Bench
from tidegate.testing.processes import ProcessJob
from tidegate.testing.scripted import Pause, ScriptedSource

SECOND_MS = 1_000
KEYS = 4
FAST, SLOW = 6_000, 500  # records, for one minute each
RECORD = "key long, at long"
LATE = -1


def fast_record(number: int) -> tuple[int, int]:
    return number % KEYS, number * 60 * SECOND_MS // FAST


def slow_record(number: int) -> tuple[int, int]:
    return number % KEYS, number * 60 * SECOND_MS // SLOW


class Seconds(tg.KeyedProcess):
    """Counts the records of each second."""

    counts = tg.map("long", "long")

    def process(self, record: Any, ctx: Any) -> Iterator[tuple[int, int, int]]:
        end = (record.at // SECOND_MS + 1) * SECOND_MS
        if end <= ctx.watermark_ms:
            yield record.key, end, LATE
            return
        self.counts.put(end, self.counts.get(end, 0) + 1)
        ctx.timers.event_time(end)

    def on_timer(self, at: int, ctx: Any) -> Iterator[tuple[int, int, int | None]]:
        yield ctx.key, at, self.counts.get(at)
        self.counts.remove(at)


class DiesTwice:
    """Is killed twice on the way, when there is a snapshot to go back to."""

    def __init__(self, bench: Bench) -> None:
        self._flags = [str(bench.folder / f"flag-{number}") for number in range(2)]
        self._manifests = str(bench.snapshots / "job" / "manifests")

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        for number, flag in enumerate(self._flags):
            reached = batch.num_rows and batch.column("at")[-1].as_py() > (number + 1) * 15 * SECOND_MS
            if reached and not os.path.exists(flag) and any(Path(self._manifests).glob("*")):
                Path(flag).touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return batch


def build(job: ProcessJob, bench: Bench) -> None:
    fast = tg.sources.generator(make_row=fast_record, rows=FAST, schema=RECORD, splits=2)
    slow = tg.sources.generator(make_row=slow_record, rows=SLOW, rate=300, schema=RECORD)
    (
        job.source("fast", fast)
        .with_watermark("at", "0 s", max_ahead="2 s")
        .union(
            job.source("slow", slow, parallelism=1)
            .map_batches(DiesTwice(bench), returns=RECORD)
            .with_watermark("at", "0 s", max_ahead="2 s")
        )
        .key_by("key")
        .process("seconds", Seconds(), returns="key long, at long, n long")
        .to("out", tg.sinks.parquet(bench.out))
    )


def test_kills_change_nothing_of_what_comes_out(bench: Bench) -> None:
    job = bench.job(every="50 ms", tuning=tg.Tuning(max_batch_rows=50))
    build(job, bench)
    handle = bench.start(job)
    assert handle.wait("1 minute") is tg.Status.FINISHED
    assert len(handle.attempts) == 3 and handle.attempts[2].restored_epoch is not None
    expected = Counter(
        (key, (at // SECOND_MS + 1) * SECOND_MS)
        for key, at in [*map(fast_record, range(FAST)), *map(slow_record, range(SLOW))]
    )
    assert sorted(committed(bench.out)) == sorted((key, end, n) for (key, end), n in expected.items()), "and none is late"


class Forever(tg.KeyedProcess):
    def process(self, record: Any, ctx: Any) -> Iterator[tuple[int, int]]:
        yield record.key, ctx.watermark_ms


# Three batches of each of its two splits: up to two seconds ahead of the slow source, and the rest of a batch.
READ_AHEAD = 300


def waiting(bench: Bench, *, reads: int, **rest: Any) -> tg.Handle:
    """A job whose fast source has nothing to wait for but a source that pauses for an hour after its first record."""
    job = bench.job(tuning=tg.Tuning(max_batch_rows=50), **rest)
    fast = tg.sources.generator(make_row=fast_record, schema=RECORD, splits=2)
    script = [slow_record(0), Pause("1 hour"), slow_record(1)]
    slow = ScriptedSource(script, schema=RECORD, memory=bench.folder / "marks")
    (
        job.source("fast", fast)
        .with_watermark("at", "0 s", max_ahead="2 s", group="kept together")
        .union(job.source("slow", slow, parallelism=1).with_watermark("at", "0 s", max_ahead=0, group="kept together"))
        .key_by("key")
        .process("forever", Forever(), returns=RECORD)
        .to("out", tg.sinks.parquet(bench.out))
    )
    handle = bench.start(job)
    until(lambda: read_by_fast(handle) == reads and waited_ms(handle) > 300, "the fast source to wait", handle=handle)
    return handle


def waited_ms(handle: tg.Handle) -> int:
    return max((metrics["waited_ms"] for metrics in handle.metrics.values()), default=0)


def read_by_fast(handle: tg.Handle) -> int:
    return sum(metrics["records_in"] for subtask, metrics in handle.metrics.items() if subtask.startswith("v0["))


QUICK: dict[str, Any] = {"every": "20 ms"}


def test_snapshots_savepoints_and_stop_go_on_while_a_source_waits(bench: Bench) -> None:
    handle = waiting(bench, reads=READ_AHEAD, **QUICK)
    epoch = handle.epochs[-1].epoch
    until(lambda: handle.epochs[-1].epoch > epoch + 3, "snapshots", handle=handle)
    handle.savepoint(str(bench.folder / "savepoint"), timeout="30 s")
    assert handle.stop(timeout="30 s") is tg.Status.STOPPED
    assert read_by_fast(handle) == READ_AHEAD and len(committed(bench.out)) == READ_AHEAD + 1


def test_a_drain_ends_sources_that_wait(bench: Bench) -> None:
    handle = waiting(bench, reads=READ_AHEAD, **QUICK)
    assert handle.stop(drain=True, timeout="30 s") is tg.Status.STOPPED


def test_watermarks_that_were_restored_count_at_once_also_after_a_rescale(bench: Bench) -> None:
    handle = waiting(bench, reads=READ_AHEAD, **QUICK)
    handle.stop(timeout="30 s")
    again = waiting(bench, reads=0, slots=3, **QUICK)
    again.stop(timeout="30 s")
    assert len(committed(bench.out)) == READ_AHEAD + 1, "it is ahead of what the slow source had reached, as before"


def test_a_source_without_records_does_not_hold_up_the_others(bench: Bench) -> None:
    def job_of(job: ProcessJob) -> None:
        fast = tg.sources.generator(make_row=fast_record, rows=FAST, schema=RECORD, splits=2)
        never = tg.sources.json(bench.folder / "empty", schema=RECORD, stop_at_end=False)
        both = job.source("fast", fast).with_watermark("at", 0, max_ahead="1 s")
        both = both.union(job.source("never", never).with_watermark("at", 0, max_ahead="1 s"))
        both.key_by("key").process("forever", Forever(), returns=RECORD).to("out", tg.sinks.parquet(bench.out))

    (bench.folder / "empty").mkdir()
    job = bench.job(tuning=tg.Tuning(max_batch_rows=50), **QUICK)
    job_of(job)
    handle = bench.start(job)
    until(lambda: read_by_fast(handle) == FAST, "the fast source to be read", handle=handle)
    handle.stop(timeout="30 s")
