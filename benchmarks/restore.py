"""`restore`: a subtask takes its state in, over reading the same files and doing nothing with them.

Per backend: all keys of one subtask, from a chain of a base and ten deltas (heap), and from RocksDB's own files.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

import tidegate as tg
from tidegate.snapshots.manifest import FileEntry, Manifest, OperatorEntry
from tidegate.snapshots.native import download
from tidegate.snapshots.snapshot import Snapshot
from tidegate.snapshots.writing import PieceWriter
from tidegate.store.opening import open_store

KEYS = 2_000_000
GROUPS = 128
DELTAS = 10
BACKENDS = {"heap": tg.Heap(), "rocksdb": tg.RocksDB(memory="512 MB")}


def run(scale: float) -> Iterator[dict[str, Any]]:
    keys = int(KEYS * scale)
    for name, settings in BACKENDS.items():
        store = open_store(tempfile.mkdtemp(prefix="tidegate-bench-"))
        manifest = _written(settings, store, keys)
        files = list(manifest.files())
        size_bytes = sum(file.bytes for file in files)
        plain_s = min(_plain_s(store, files) for _ in range(3))
        restore_s = min(_restore_s(settings, store, manifest, keys) for _ in range(3))
        yield {
            "name": "restore",
            "backend": name,
            "against": "plain reads of the same files",
            "ratio": round(restore_s / plain_s, 2),
            "bytes": size_bytes,
            "what": f"{keys:,} keys (long to long), one subtask, {len(files)} files",
            "restore_s": round(restore_s, 3),
            "s_per_gb": round(restore_s / size_bytes * 1e9, 1),
            "plain_s_per_gb": round(plain_s / size_bytes * 1e9, 2),
            "keys_per_s": round(keys / restore_s),
        }


def _table(settings: Any, native: Path | None = None) -> tuple[Any, Any]:
    backend = settings.create(key_type=pa.int64(), key_group_count=GROUPS, now_ms=lambda: 0, native=native)
    return backend, backend.table(tg.value("long", default=0, name="total"))


def _written(settings: Any, store: Any, keys: int) -> Manifest:
    backend, total = _table(settings)
    writer = PieceWriter("sum", store=store, attempt=1, subtask=0, parallelism=1, key_group_count=GROUPS)
    written: OperatorEntry | None = None
    for epoch in range(1, DELTAS + 2):
        changed = range(keys) if epoch == 1 else range(epoch, keys, 100)
        for start in range(changed.start, changed.stop, changed.step * 8192):
            some = list(range(start, min(start + changed.step * 8192, changed.stop), changed.step))
            backend.begin_batch(some)
            for backend.cursor.key in some:
                total.set(backend.cursor.key * epoch)
            backend.end_batch()
        frozen = backend.freeze()
        written = writer.write(frozen, epoch=epoch, base=epoch - 1, full=False)
        frozen.release()
    backend.close()
    assert written is not None
    return Manifest(
        job="restore",
        epoch=DELTAS + 1,
        attempt=1,
        created_ms=0,
        key_group_count=GROUPS,
        ending=None,
        operators={"sum": written},
    )


def _plain_s(store: Any, files: list[FileEntry]) -> float:
    started = time.perf_counter()
    for file in files:
        for offset in range(0, file.bytes, 1 << 20):
            store.read(file.name, offset, min(1 << 20, file.bytes - offset))
    return time.perf_counter() - started


def _restore_s(settings: Any, store: Any, manifest: Manifest, keys: int) -> float:
    started = time.perf_counter()
    native = [file for file in manifest.files() if file.form != "rows"]
    if native:
        with tempfile.TemporaryDirectory() as folder:
            download(store, native, Path(folder))
            backend, total = _table(settings, Path(folder))
    else:
        backend, total = _table(settings)
        for state, batches in Snapshot(store, manifest).rows("sum").items():
            for rows in batches:
                backend.load(state, rows, known=True)
    seconds = time.perf_counter() - started
    backend.cursor.key = keys - 1
    assert total.get(), "the last key is there"
    backend.close()
    return seconds
