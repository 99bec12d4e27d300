"""`recovery`: a slot is killed. How long it takes until the job processes a new record, and how much of that is the restore.

At 10 MB, 100 MB and 1 GB of state, on both backends, with snapshots on a local disk. The time is split into what follows one
after the other:

- detection: from the kill to the end of the attempt;
- deployment: until all slots of the next attempt are ready, without the restore;
- restore: in the slot that takes longest. It is set against plain reads of as many bytes of the same files;
- first record: until a heartbeat (every 20 ms) reports one.
"""

from __future__ import annotations

import hashlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import tidegate as tg
from benchmarks.workloads import Discard, records_in, session, wait_until
from tidegate.driver.handle import Handle
from tidegate.snapshots.finding import find_snapshot
from tidegate.snapshots.snapshot import Snapshot

VALUE_BYTES = 1_000
SIZES = {"10 MB": 10_000, "100 MB": 100_000, "1 GB": 1_000_000}  # keys
BACKENDS = {"heap": tg.Heap(), "rocksdb": tg.RocksDB(memory="512 MB")}
JOB, SCHEMA = "recovery", "key long"
SPLITS = 2


class Keys:
    """All keys once, split by split."""

    def __init__(self, keys: int) -> None:
        self._keys = keys

    def __call__(self, split: int, start: int, count: int) -> dict[str, Any]:
        numbers = np.arange(start, start + count, dtype=np.int64) * SPLITS + split
        return {"key": numbers % self._keys}


class Texts(tg.KeyedProcess):
    """Keeps a text for each key."""

    text = tg.value("string")

    def process(self, record: Any, ctx: Any) -> Any:
        self.text.set(hashlib.shake_128(record.key.to_bytes(8)).hexdigest(VALUE_BYTES // 2))  # doesn't compress
        yield (record.key,)


def run(scale: float) -> Iterator[dict[str, Any]]:
    for size, full in SIZES.items():
        for backend, settings in BACKENDS.items():
            yield _measured(size, max(int(full * scale), 100), backend, settings)


def _measured(size: str, keys: int, backend: str, settings: Any) -> dict[str, Any]:
    folder = tempfile.mkdtemp(prefix="tidegate-bench-")
    job = tg.Job(
        JOB,
        session(4),
        slots=2,
        backend=settings,
        restart=tg.FixedDelay(attempts=3, delay=0),
        tuning=tg.Tuning(heartbeat="20 ms"),
        snapshots=tg.Snapshots(every="1 s", to=folder),
    )
    filled = job.source("all keys", tg.sources.generator(Keys(keys), schema=SCHEMA, rows=keys, splits=SPLITS))
    live = job.source("records", tg.sources.generator(Keys(keys), schema=SCHEMA, rate=2_000, splits=SPLITS))
    filled.union(live).key_by("key").process("texts", Texts(), returns=SCHEMA).to("out", Discard())
    handle = job.start()
    wait_until(lambda: records_in(handle, "v2") >= keys, timeout_s=600)
    handle.snapshot(timeout="5 minutes")  # after the keys: one that is under way may lack some of them
    handle.snapshot(timeout="5 minutes")
    killed_ms = time.time() * 1000
    os.kill(handle.attempts[-1].slots[1], signal.SIGKILL)
    wait_until(lambda: len(handle.attempts) == 2 and handle.attempts[-1].first_record_ms is not None, timeout_s=120)
    found = _split(handle, killed_ms)
    epoch = handle.attempts[-1].restored_epoch
    handle.cancel()
    restored_bytes = max(each.bytes for each in handle.attempts[-1].restored.values())
    plain_s_per_byte = min(_plain_s_per_byte(folder) for _ in range(3))
    return {
        "name": "recovery",
        "backend": backend,
        "state": size,
        "against": "plain reads of as many bytes of the snapshot, for the restore alone",
        "ratio": round(found["restore_ms"] / 1000 / (plain_s_per_byte * restored_bytes), 2),
        "what": f"{keys:,} keys with texts of {VALUE_BYTES} bytes, 2 slots, one killed, on a local disk",
        **found,
        "restored_bytes": sum(each.bytes for each in handle.attempts[-1].restored.values()),
        "epoch": epoch,
    }


def _split(handle: Handle, killed_ms: float) -> dict[str, int]:
    old, new = handle.attempts
    assert old.ended_ms is not None and new.running_ms is not None and new.first_record_ms is not None
    restore_ms = max(each.ms for each in new.restored.values())
    return {
        "kill_to_first_record_ms": round(new.first_record_ms - killed_ms),
        "detection_ms": round(old.ended_ms - killed_ms),
        "deployment_ms": round(new.running_ms - old.ended_ms - restore_ms),
        "restore_ms": round(restore_ms),
        "first_record_ms": new.first_record_ms - new.running_ms,
    }


def _plain_s_per_byte(folder: str) -> float:
    """Read the files of the newest snapshot, and do nothing with them."""
    snapshot: Snapshot = find_snapshot(f"{folder}/{JOB}")
    read_bytes, started = 0, time.perf_counter()
    for file in snapshot.manifest.files():
        for offset in range(0, file.bytes, 1 << 20):
            read_bytes += len(snapshot.store.read(file.name, offset, min(1 << 20, file.bytes - offset)))
    return (time.perf_counter() - started) / read_bytes
