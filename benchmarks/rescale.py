"""`rescale`: a running job goes from 2 slots to 4 and back. How long it stands still, and how much of its state is read."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import tidegate as tg
from benchmarks.incremental import Rounds
from benchmarks.workloads import SCHEMA, Discard, KeyedSum, Records, records_in, session, wait_until

KEYS = 1_000_000


def run(scale: float) -> Iterator[dict[str, Any]]:
    keys = int(KEYS * scale)
    job = tg.Job(
        "rescale",
        session(4),
        slots=2,
        restart=tg.NoRestart(),
        tuning=tg.Tuning(heartbeat="20 ms"),
        snapshots=tg.Snapshots(every="1 s", to=tempfile.mkdtemp(prefix="tidegate-bench-")),
    )
    filled = job.source("all keys", Rounds(keys=keys, per_round=0))
    live = job.source("records", tg.sources.generator(Records(keys), schema=SCHEMA, rate=20_000))
    filled.union(live).key_by("key").process("sum", KeyedSum(), returns="key long, total long").to("out", Discard())
    handle = job.start()
    wait_until(lambda: records_in(handle, "v2") >= keys, timeout_s=300)
    for slots in (4, 2):
        before = len(handle.attempts)
        handle.rescale(slots=slots)
        attempt = handle.attempts[-1]
        assert len(handle.attempts) == before + 1, handle.failures
        wait_until(lambda: handle.attempts[-1].first_record_ms is not None, timeout_s=60)
        attempt = handle.attempts[-1]
        final = next(epoch for epoch in reversed(handle.epochs) if epoch.attempt == handle.attempts[-2].attempt)
        assert attempt.first_record_ms is not None and final.completed_ms is not None
        read_bytes = sum(restored.bytes for restored in attempt.restored.values())
        yield {
            "name": "rescale",
            "against": "the bytes of the state",
            "ratio": round(read_bytes / final.bytes, 4),
            "what": f"{keys:,} keys, {2 if slots == 4 else 4} to {slots} slots, heap, on 2 cores",
            "slots": slots,
            "stop_to_first_record_ms": attempt.first_record_ms - final.triggered_ms,
            "final_snapshot_ms": final.completed_ms - final.triggered_ms,
            "restore_ms": round(max(restored.ms for restored in attempt.restored.values())),
            "read_bytes": read_bytes,
            "state_bytes": final.bytes,
        }
    handle.cancel()
