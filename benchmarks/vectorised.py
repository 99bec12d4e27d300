"""`vectorised`: a keyed sum in columns (`keyed.aggregate`), against Spark SQL's own streaming aggregate, the record-wise
path, and the bare kernel."""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa

import tidegate as tg
from benchmarks import peers
from benchmarks.snapshot_overhead import HEARTBEAT, turns
from benchmarks.workloads import Discard, Records, keyed_sum_job, measure, records_in, session, wait_until
from tidegate.state.key_index import KeyIndex

INTEGERS, STRINGS = 100_000, 1_000_000  # keys
ROWS, RECORD_WISE_ROWS, KERNEL_ROWS = 100_000_000, 16_000_000, 60_000_000
BATCH = 65_536
PAIRS = 12
SPARK_BATCH_ROWS, SPARK_BATCHES = 4_000_000, 6


@dataclass(frozen=True)
class Text:
    """The records of `Records`, whose keys are texts."""

    keys: int

    def __call__(self, split: int, start: int, count: int) -> dict[str, Any]:
        records = Records(self.keys)(split, start, count)
        return {"key": _texts(self.keys).take(pa.array(records["key"])), "amount": records["amount"]}


@cache
def _texts(keys: int) -> pa.Array:
    return pa.array([f"user-{key:07}" for key in range(keys)])


def aggregate_job(
    spark: Any, *, keys: int, text: bool, rows: int | None, every: str | None, heartbeat: str = "1 s"
) -> tg.Job:
    """source → hash exchange → aggregate → sink, on Spark."""
    job = tg.Job(
        "keyed aggregate",
        spark,
        slots=2,
        restart=tg.NoRestart(),
        tuning=tg.Tuning(heartbeat=heartbeat),
        snapshots=tg.Snapshots(every=every, to=tempfile.mkdtemp(prefix="tidegate-bench-")),
    )
    make, kind = (Text(keys), "string") if text else (Records(keys), "long")
    source = tg.sources.generator(make, schema=f"key {kind}, amount long", rows=rows)
    totals = job.source("records", source).key_by("key").aggregate("totals", total=tg.sum("amount"))
    totals.to("out", Discard())
    return job


def run(scale: float) -> Iterator[dict[str, Any]]:
    """Yield a line for each comparison."""
    yield from _against_spark(scale, INTEGERS, text=False)
    yield from _against_spark(scale, STRINGS, text=True)
    yield _with_snapshots(scale)


def _against_spark(scale: float, keys: int, *, text: bool) -> Iterator[dict[str, Any]]:
    rows = int(ROWS * scale) // (4 if text else 1)
    measure(aggregate_job(session(), keys=keys, text=text, rows=rows // 10, every="1 s"), rows // 10)  # warm up
    ours = measure(aggregate_job(session(), keys=keys, text=text, rows=rows, every="1 s"), rows)
    kind = "string" if text else "integer"
    common = {
        "name": "vectorised",
        "what": f"keyed sum over {keys:,} {kind} keys in columns, 2 slots, hash exchange, snapshots every second",
        "keys": f"{keys:,} {kind}",
        "records": rows,
        "records_per_s": round(ours.records_per_s),
        "snapshots": ours.epochs,
    }
    peer = peers.sql_aggregate(
        rows_per_batch=max(int(SPARK_BATCH_ROWS * scale), 10_000), batches=SPARK_BATCHES, keys=keys, text=text
    )
    yield _compared(common, "Spark SQL streaming aggregate", ours.records_per_s, peer["records_per_s"]) | {"peer": peer}
    kernel = bare_kernel(int(KERNEL_ROWS * scale) // (4 if text else 1), keys=keys, text=text)
    yield _compared(common, "bare kernel (index and sum), two processes", ours.records_per_s, kernel)
    if not text:
        rows = int(RECORD_WISE_ROWS * scale)
        record_wise = measure(keyed_sum_job(session(), rows=rows, every="1 s"), rows)
        yield _compared(common, "record-wise keyed sum", ours.records_per_s, record_wise.records_per_s)


def _compared(common: dict[str, Any], against: str, ours: float, theirs: float) -> dict[str, Any]:
    return common | {"against": against, "ratio": round(ours / theirs, 3), "peer_records_per_s": round(theirs)}


def _with_snapshots(scale: float) -> dict[str, Any]:
    """Compare turns with snapshots and without, in one job."""
    handle = aggregate_job(session(), keys=INTEGERS, text=False, rows=None, every=None, heartbeat=HEARTBEAT).start()
    wait_until(lambda: records_in(handle, "v0") >= 100 * INTEGERS, timeout_s=120)
    for _ in range(3):
        handle.snapshot()
    pairs = turns(handle, max(3, int(PAIRS * scale)), counted="v0")  # v1 gets partial aggregates
    handle.cancel()
    ratios = [taken / without for taken, without in pairs]
    return {
        "name": "vectorised",
        "against": "the same job without snapshots",
        "ratio": round(statistics.median(ratios), 4),
        "what": f"keyed sum over {INTEGERS:,} integer keys in columns, all of which change; turns with a snapshot every "
        f"second and without, median of the pairs",
        "pairs": [round(ratio, 4) for ratio in ratios],
        "records_per_s": round(statistics.median(taken for taken, _ in pairs)),
    }


def bare_kernel(rows: int, *, keys: int, text: bool) -> float:
    """Look up keys and add to sums, in two processes that do nothing else. Return the records per second of both."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(2, _take_barrier, (context.Barrier(2),)) as pool:
        seconds = pool.map(_kernel, [(index, rows // 2, keys // 2, text) for index in range(2)], chunksize=1)
    return rows / max(seconds)


_ready: Any = None  # the barrier, in a process of the pool


def _take_barrier(ready: Any) -> None:
    global _ready
    _ready = ready


def _kernel(task: tuple[int, int, int, bool]) -> float:
    split, rows, keys, text = task  # each process has its half of the keys
    make = Text(keys) if text else Records(keys)
    made = [make(split, number * BATCH, BATCH) for number in range(16)]
    batches = [(pa.array(each["key"]), each["amount"]) for each in made]
    index, sums = KeyIndex(batches[0][0].type), np.zeros(2 * keys, np.int64)
    for key, _ in batches:
        index.rows_of([key])
    _ready.wait()
    started = time.perf_counter()
    for number in range(rows // BATCH):
        key, amount = batches[number % len(batches)]
        np.add.at(sums, index.rows_of([key])[0], amount)
    return (time.perf_counter() - started) * rows / (rows // BATCH * BATCH)
