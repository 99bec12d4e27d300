"""The jobs that benchmarks run: the keyed running sum (docs/benchmarks.md), and sinks that only count."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import tidegate as tg
from tidegate.driver.handle import Handle

KEYS = 100_000
SCHEMA = "key long, amount long"
_MIX = np.uint64(0x9E3779B97F4A7C15)


class KeyedSum(tg.KeyedProcess):
    """The user's function, as a user would write it."""

    total = tg.value("long", default=0)

    def process(self, record: Any, ctx: Any) -> Any:
        total = self.total.get() + record.amount
        self.total.set(total)
        yield record.key, total


class Records:
    """Keys spread over `keys`, in no order, the same for every run. Picklable, vectorised."""

    def __init__(self, keys: int = KEYS) -> None:
        self.keys = keys

    def __call__(self, split: int, start: int, count: int) -> dict[str, Any]:
        index = np.arange(start, start + count, dtype=np.uint64) * np.uint64(64) + np.uint64(split)
        mixed = index * _MIX
        mixed ^= mixed >> np.uint64(29)
        return {"key": (mixed % np.uint64(self.keys)).astype(np.int64), "amount": (mixed & np.uint64(63)).astype(np.int64)}


@dataclass(frozen=True)
class Discard(tg.Sink):
    """Takes everything, keeps nothing."""

    @property
    def changelogs(self) -> frozenset[tg.Changelog]:
        return frozenset(tg.Changelog)

    def open(self, context: tg.SinkContext) -> tg.SinkWriter:
        return _Discarding()


class _Discarding(tg.SinkWriter):
    def write(self, batch: pa.RecordBatch) -> None:
        pass


@dataclass(frozen=True)
class Throughput:
    """What a bounded run did."""

    records: int
    seconds: float
    epochs: int
    handle: Handle

    @property
    def records_per_s(self) -> float:
        return self.records / self.seconds


def keyed_sum_job(
    spark: Any,
    *,
    rows: int | None,
    every: str | None,
    keys: int = KEYS,
    slots: int = 2,
    rate: float | None = None,
    folder: str | None = None,
    max_batch_rows: int = 8192,
    backend: Any = None,
    heartbeat: str | None = None,
) -> tg.Job:
    """source → hash exchange → KeyedSum → sink, on Spark."""
    tuning = tg.Tuning(max_batch_rows=max_batch_rows)
    if heartbeat is not None:
        tuning = replace(tuning, heartbeat=heartbeat)
    job = tg.Job(
        "keyed sum",
        spark,
        slots=slots,
        restart=tg.NoRestart(),
        backend=backend,
        tuning=tuning,
        snapshots=tg.Snapshots(every=every, to=folder or tempfile.mkdtemp(prefix="tidegate-bench-")),
    )
    source = tg.sources.generator(Records(keys), schema=SCHEMA, rows=rows, rate=rate)
    job.source("records", source).key_by("key").process("sum", KeyedSum(), returns="key long, total long").to(
        "out", Discard()
    )
    return job


def measure(job: tg.Job, rows: int) -> Throughput:
    """Runs a bounded job; the clock runs from the moment all slots work until everything is committed."""
    handle = job.start()
    handle.wait("10 minutes")
    running_ms = handle.attempts[-1].running_ms
    final = handle.epochs[-1]
    assert running_ms is not None and final.completed_ms is not None
    complete = sum(epoch.completed_ms is not None for epoch in handle.epochs)
    return Throughput(rows, (final.completed_ms - running_ms) / 1000, complete, handle)


def session(slots: int = 2) -> Any:
    """A quiet local Spark session with at least that many task slots: the one that runs, or a new one."""
    from tidegate.spark.job import local_session

    spark = local_session(slots)
    if spark.sparkContext.defaultParallelism < slots:
        spark.stop()
        spark = local_session(slots)
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def records_in(handle: Handle, vertex: str) -> int:
    """As far as the slots have told."""
    return sum(counts["records_in"] for subtask, counts in handle.metrics.items() if subtask.startswith(vertex))


def wait_until(condition: Any, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it didn't happen in time"
        time.sleep(0.02)


def here() -> Path:
    return Path(__file__).resolve().parent
