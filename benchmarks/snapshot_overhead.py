"""`snapshot-overhead`: throughput with a snapshot every second over throughput without any.

One job, which takes all it can get, in turns of some seconds with snapshots and without. So both are measured on the same
processes and the same memory, a few seconds apart; two runs of the very same job differ by a tenth and more. The beginning
of a turn is left out: what the last snapshot of the turn before has left to do (moving what was frozen) belongs to that
one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.workloads import KEYS, keyed_sum_job, records_in, session, wait_until
from tidegate.driver.handle import Handle

PAIRS = 24
TURN_S = 4
LEFT_OUT_S = 1
HEARTBEAT = "50 ms"  # how often the slots tell what they have done


def run(scale: float) -> Iterator[dict[str, Any]]:
    handle = keyed_sum_job(session(), rows=None, every=None, heartbeat=HEARTBEAT).start()
    wait_until(lambda: records_in(handle, "v1") >= 20 * KEYS, timeout_s=120)
    for _ in range(3):
        handle.snapshot()
    pairs = turns(handle, max(3, int(PAIRS * scale)))
    snapshots = len(handle.epochs) - 3
    handle.cancel()
    ratios = [taken / without for taken, without in pairs]
    yield {
        "name": "snapshot-overhead",
        "against": "the same job without snapshots",
        "ratio": round(statistics.median(ratios), 4),
        "what": f"running sum over {KEYS:,} keys, all of which change, 2 slots; turns of {TURN_S} s with a snapshot "
        f"every second and without, median of the pairs",
        "pairs": [round(ratio, 4) for ratio in ratios],
        "snapshots": snapshots,
        "records_per_s": round(statistics.median(taken for taken, _ in pairs)),
    }


def turns(handle: Handle, count: int, *, counted: str = "v1") -> list[tuple[float, float]]:
    """Return pairs of turns of a running job: records per second with snapshots, and without. They are counted as they come
    into the vertex `counted`."""
    pairs = []
    for turn in range(count):
        order = (True, False) if turn % 2 else (False, True)
        measured = {taken: _records_per_s(handle, counted, snapshots=taken) for taken in order}
        pairs.append((measured[True], measured[False]))
    return pairs


def _records_per_s(handle: Handle, counted: str, *, snapshots: bool) -> float:
    started_s = time.monotonic()
    for second in range(TURN_S):
        time.sleep(max(0.0, started_s + second - time.monotonic()))
        if second == LEFT_OUT_S:
            since_s, before = time.monotonic(), records_in(handle, counted)
        if snapshots:
            handle.snapshot()
    time.sleep(max(0.0, started_s + TURN_S - time.monotonic()))
    return (records_in(handle, counted) - before) / (time.monotonic() - since_s)
