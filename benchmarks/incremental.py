"""`incremental`: how much a snapshot writes when one key in a hundred has changed, over a full snapshot."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

import tidegate as tg
from benchmarks.workloads import Discard, KeyedSum, records_in, session, wait_until
from tidegate.store.catalog import SnapshotCatalog
from tidegate.store.layout import job_address
from tidegate.store.manifest import Manifest
from tidegate.store.opening import open_store

KEYS = 1_000_000
CHANGED = 0.01
EPOCHS = 20
BACKENDS = {"heap": tg.Heap(), "rocksdb": tg.RocksDB(memory="512 MB")}


def run(scale: float) -> Iterator[dict[str, Any]]:
    keys = int(KEYS * scale)
    for name, backend in BACKENDS.items():
        full_bytes, written = _written_bytes(backend, keys)
        mean = sum(written) / len(written)
        yield {
            "name": "incremental",
            "backend": name,
            "against": "a full snapshot",
            "ratio": round(mean / full_bytes, 4),
            "what": f"state of {keys:,} keys, {CHANGED:.0%} changed per epoch, mean over {EPOCHS} epochs",
            "full_bytes": full_bytes,
            "mean_bytes": round(mean),
            "largest_bytes": max(written),
        }


def _written_bytes(backend: Any, keys: int) -> tuple[int, list[int]]:
    folder = tempfile.mkdtemp(prefix="tidegate-bench-")
    job = tg.Job(
        "incremental",
        session(),
        slots=2,
        restart=tg.NoRestart(),
        backend=backend,
        tuning=tg.Tuning(heartbeat="100 ms"),
        snapshots=tg.Snapshots(every=None, to=folder, retain=2),
    )
    job.source("records", Rounds(keys=keys, per_round=int(keys * CHANGED))).key_by("key").process(
        "sum", KeyedSum(), returns="key long, total long"
    ).to("out", Discard())
    handle = job.start()
    catalog = SnapshotCatalog(open_store(job_address(folder, "incremental")))
    written: list[int] = []
    before: set[str] = set()
    full_bytes = 0
    for number in range(EPOCHS + 1):
        expected = keys + number * int(keys * CHANGED)
        wait_until(lambda expected=expected: records_in(handle, "v1") >= expected, timeout_s=300)
        files = _files(catalog.load(handle.snapshot("5 minutes").epoch))
        if number:
            written.append(sum(size for file, size in files.items() if file not in before))
        else:
            full_bytes = sum(files.values())
        before = set(files)
    handle.cancel()
    return full_bytes, written


def _files(manifest: Manifest) -> dict[str, int]:
    return {file.name: file.bytes for piece in manifest.operators["sum"].pieces for file in piece.files}


@dataclass(frozen=True)
class Rounds(tg.Source):
    """Every key once; then, after each snapshot, some others of them."""

    keys: int
    per_round: int

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([("key", pa.int64()), ("amount", pa.int64())])

    @property
    def bounded(self) -> bool:
        return False

    def open(self, context: tg.SourceContext) -> tg.SourceReader:
        return _RoundsReader(self, context)


class _RoundsReader(tg.SourceReader):
    def __init__(self, source: Rounds, context: tg.SourceContext) -> None:
        self._source = source
        self._subtask, self._step = context.subtask, context.parallelism
        self._next = 0
        self._allowed = source.keys

    def poll(self, max_rows: int) -> pa.RecordBatch | None:
        count = min(max_rows * self._step, self._allowed - self._next)
        if count <= 0:
            return None
        index = np.arange(self._next, self._next + count, dtype=np.int64)
        self._next += count
        # Each run of `keys` numbers is every key once, in no order.
        keys = (index[index % self._step == self._subtask] * 7_368_787) % self._source.keys
        return pa.record_batch([keys, np.ones(len(keys), dtype=np.int64)], schema=self._source.schema)

    def offsets(self) -> Mapping[str, Any]:
        if self._next == self._allowed:
            self._allowed += self._source.per_round
        return {str(self._subtask): self._next}

    @property
    def finished(self) -> bool:
        return False
