"""`keyed-sum`: the record-wise keyed running sum, against Spark's own transformWithState and against a bare Python
loop."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import peers
from benchmarks.workloads import KEYS, Records, keyed_sum_job, measure, session

ROWS = 16_000_000
BARE_ROWS = 8_000_000
BATCH = 8192
WHAT = f"running sum over {KEYS:,} keys, record-wise, 2 slots, hash exchange, exactly-once snapshots every second"


def run(scale: float) -> Iterator[dict[str, Any]]:
    rows = int(ROWS * scale)
    measure(keyed_sum_job(session(), rows=rows // 8, every="1 s"), rows // 8)  # warm up
    ours = measure(keyed_sum_job(session(), rows=rows, every="1 s"), rows)
    common = {
        "name": "keyed-sum",
        "what": WHAT,
        "records": rows,
        "records_per_s": round(ours.records_per_s),
        "snapshots": ours.epochs,
    }
    bare = bare_loop(int(BARE_ROWS * scale))
    yield common | {
        "against": "bare python loop",
        "ratio": round(ours.records_per_s / bare, 4),
        "peer_records_per_s": round(bare),
    }
    peer = peers.transform_with_state(rows_per_batch=int(100_000 * scale), batches=2, keys=KEYS)
    ratio = ours.records_per_s / peer["records_per_s"]
    yield common | {
        "against": "pyspark transformWithState (rows)",
        "ratio": round(ratio, 1),
        "peer": peer,
        "peer_records_per_s": round(peer["records_per_s"]),
    }


def bare_loop(rows: int) -> float:
    """The same dictionary updates in two processes that do nothing else; records per second of both together."""
    ready = multiprocessing.get_context("spawn").Barrier(2)
    with multiprocessing.get_context("spawn").Pool(2, _take_barrier, (ready,)) as pool:
        seconds = pool.map(_bare, [(index, rows // 2) for index in range(2)], chunksize=1)
    return rows / max(seconds)


_ready: Any = None  # the barrier, in a process of the pool


def _take_barrier(ready: Any) -> None:
    global _ready
    _ready = ready


def _bare(task: tuple[int, int]) -> float:
    index, rows = task
    records = Records(KEYS // 2)  # each process has its half of the keys
    batches = [records(index, start, min(BATCH, rows - start)) for start in range(0, rows, BATCH)]
    totals: dict[int, int] = {}
    _ready.wait()
    started = time.perf_counter()
    for batch in batches:
        for key, amount in zip(batch["key"].tolist(), batch["amount"].tolist(), strict=True):
            totals[key] = totals.get(key, 0) + amount
    return time.perf_counter() - started
