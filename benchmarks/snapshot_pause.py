"""`snapshot-pause`: the longest stop of the hot loop that a snapshot causes, as the state grows.

For every snapshot: the longest step of the loop between the freeze and the end of the background write, less the
longest step in just as long a time before it (what the machine does to the loop anyway, and the more of it the longer
one looks). That holds the freeze and every wait for the interpreter that the writing thread causes. Batches are small
here, so that a step is short beside a stop. The figure for a size is the median over its snapshots.

For RocksDB it is the synchronous part alone, the freeze: what is dirty is handed over to a thread. That one holds the
interpreter's lock now and then, to write some entries and to link RocksDB's files; `stop_ms` has what the loop feels of
it, measured as for the heap.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import tidegate as tg
from benchmarks.workloads import keyed_sum_job, records_in, session, wait_until

SIZES = (10_000, 100_000, 1_000_000)
SNAPSHOTS = 20
BATCH_ROWS = 64


def run(scale: float) -> Iterator[dict[str, Any]]:
    yield from _heap(scale)
    yield from _rocksdb(scale)


def _rocksdb(scale: float) -> Iterator[dict[str, Any]]:
    measured = {keys: _pause_ms(keys, max(3, int(SNAPSHOTS * scale)), tg.RocksDB(memory="512 MB")) for keys in SIZES}
    pauses = {keys: freeze_ms for keys, (_, freeze_ms, _) in measured.items()}
    yield {
        "name": "snapshot-pause",
        "backend": "rocksdb",
        "against": f"the pause at {SIZES[0]:,} keys",
        "keys": SIZES[-1],
        "ratio": round(pauses[SIZES[-1]] / pauses[SIZES[0]], 3),
        "what": "the synchronous part of a snapshot",
        "pause_ms": {f"{keys:,}": round(pause, 3) for keys, pause in pauses.items()},
        "stop_ms": {f"{keys:,}": round(stop, 3) for keys, (stop, _, _) in measured.items()},
    }


def _heap(scale: float) -> Iterator[dict[str, Any]]:
    pauses: dict[int, float] = {}
    for keys in SIZES:
        pauses[keys], freeze_ms, snapshots = _pause_ms(keys, max(3, int(SNAPSHOTS * scale)), tg.Heap())
        yield {
            "name": "snapshot-pause",
            "against": "the loop without a snapshot",
            "keys": keys,
            "ratio": round(pauses[keys], 3),
            "unit": "ms longer",
            "freeze_ms": round(freeze_ms, 3),
            "snapshots": snapshots,
        }
    yield {
        "name": "snapshot-pause",
        "against": f"the pause at {SIZES[0]:,} keys",
        "keys": SIZES[-1],
        "ratio": round(pauses[SIZES[-1]] / pauses[SIZES[0]], 3),
        "what": "longest stop of the hot loop caused by a snapshot",
        "pause_ms": {f"{keys:,}": round(pause, 3) for keys, pause in pauses.items()},
    }


def _pause_ms(keys: int, snapshots: int, backend: Any) -> tuple[float, float, int]:
    """The longest stop, the freeze alone, and of how many snapshots."""
    handle = keyed_sum_job(session(), rows=None, every="1 s", keys=keys, max_batch_rows=BATCH_ROWS, backend=backend).start()
    # Until then the state is still growing: each record brings one key of all of them, in no order.
    wait_until(lambda: records_in(handle, "v1") >= 8 * keys, timeout_s=300)
    skipped = len(handle.epochs) + 1

    def complete() -> list[Any]:
        return [epoch for epoch in handle.epochs[skipped:] if epoch.completed_ms is not None]

    wait_until(lambda: len(complete()) >= snapshots, timeout_s=60 + 10 * snapshots)
    inner = [stats for epoch in complete() for subtask, stats in epoch.subtasks.items() if subtask.startswith("v1")]
    handle.cancel()
    longer = [stats["longest_step_ms"] - stats["quiet_step_ms"] for stats in inner]
    return statistics.median(longer), statistics.median(stats["pause_ms"] for stats in inner), len(inner)
