"""`backend-throughput`: the keyed sum on RocksDB, over the heap and over Spark's transformWithState (on RocksDB as well).

A million keys, of which a tenth take four of five records; RocksDB's memory is enough for those, not for all.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

import tidegate as tg
from benchmarks import peers
from benchmarks.workloads import SCHEMA, Discard, KeyedSum, Records, measure, session

KEYS = 1_000_000
HOT_SHARE, HOT_RECORDS = 10, 80  # of a hundred
ROWS = 8_000_000
MEMORY = "128 MB"


class Skewed:
    """`Records`, most of them of a few keys."""

    def __init__(self, keys: int) -> None:
        self._records = Records(keys)
        self._hot = keys * HOT_SHARE // 100

    def __call__(self, split: int, start: int, count: int) -> dict[str, Any]:
        made = self._records(split, start, count)
        hot = (np.arange(start, start + count) * 2_654_435_761 >> 7) % 100 < HOT_RECORDS
        made["key"] = np.where(hot, made["key"] % self._hot, made["key"])
        return made


def run(scale: float) -> Iterator[dict[str, Any]]:
    keys, rows = int(KEYS * scale), int(ROWS * scale)
    what = (
        f"running sum over {keys:,} keys, {HOT_RECORDS} % of the records of {HOT_SHARE} % of them, 2 slots, hash "
        f"exchange, snapshots every second"
    )
    measure(_job(tg.Heap(), keys, rows // 8), rows // 8)  # warm up
    heap = measure(_job(tg.Heap(), keys, rows), rows).records_per_s
    rocks = measure(_job(tg.RocksDB(memory=MEMORY), keys, rows), rows).records_per_s
    common = {
        "name": "backend-throughput",
        "backend": "rocksdb",
        "memory": MEMORY,
        "what": what,
        "records": rows,
        "records_per_s": round(rocks),
    }
    yield common | {"against": "the heap backend", "ratio": round(rocks / heap, 4), "peer_records_per_s": round(heap)}
    peer = peers.transform_with_state(rows_per_batch=int(100_000 * scale), batches=2, keys=keys)
    yield common | {
        "against": "pyspark transformWithState (rows)",
        "ratio": round(rocks / peer["records_per_s"], 1),
        "peer_records_per_s": round(peer["records_per_s"]),
        "peer": peer,
    }


def _job(backend: Any, keys: int, rows: int) -> tg.Job:
    job = tg.Job(
        "backends",
        session(),
        slots=2,
        restart=tg.NoRestart(),
        backend=backend,
        snapshots=tg.Snapshots(every="1 s", to=tempfile.mkdtemp(prefix="tidegate-bench-")),
    )
    job.source("records", tg.sources.generator(Skewed(keys), schema=SCHEMA, rows=rows)).key_by("key").process(
        "sum", KeyedSum(), returns="key long, total long"
    ).to("out", Discard())
    return job
