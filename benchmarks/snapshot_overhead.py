"""`snapshot-overhead`: throughput with a snapshot every second over throughput without any."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.workloads import KEYS, keyed_sum_job, measure, session

ROWS = 12_000_000
PAIRS = 5


def run(scale: float) -> Iterator[dict[str, Any]]:
    rows = int(ROWS * scale)
    measure(keyed_sum_job(session(), rows=rows // 8, every=None), rows // 8)           # warm up
    ratios, snapshots = [], 0
    for turn in range(PAIRS):
        # The two are run in alternating order, so that a machine that warms up or tires favours neither.
        order: list[str | None] = ["1 s", None] if turn % 2 else [None, "1 s"]
        measured = {every: measure(keyed_sum_job(session(), rows=rows, every=every), rows) for every in order}
        ratios.append(measured["1 s"].records_per_s / measured[None].records_per_s)
        snapshots += measured["1 s"].epochs
    yield {"name": "snapshot-overhead", "against": "the same job without snapshots",
           "ratio": round(statistics.median(ratios), 4),
           "what": f"running sum over {KEYS:,} keys, 2 slots, snapshots every second", "records": rows,
           "pairs": [round(ratio, 4) for ratio in ratios], "snapshots": snapshots}
