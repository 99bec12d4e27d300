"""Native files as rows: where they are downloaded to, and that nothing of them is left there."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

import tidegate as tg
from tests import declaring
from tidegate.snapshots.manifest import Manifest
from tidegate.snapshots.snapshot import Snapshot
from tidegate.snapshots.writing import PieceWriter
from tidegate.store.memory import MemoryStore


def _snapshot_of_rocksdb(folder: Path, store: MemoryStore) -> Manifest:
    backend = tg.RocksDB(memory="32 MB", folder=str(folder)).create(
        key_type=pa.int64(), key_group_count=16, now_ms=lambda: 0
    )
    total = backend.table(declaring.value("long", default=0, name="total"))
    backend.begin_batch([1, 2, 3])
    for backend.cursor.key in (1, 2, 3):
        total.set(7)
    backend.end_batch()
    frozen = backend.freeze()
    writer = PieceWriter("sum", store=store, attempt=1, subtask=0, parallelism=1, key_group_count=16)
    written = writer.write(frozen, epoch=1, base=0, full=False)
    frozen.release()
    backend.close()
    return Manifest(
        job="sums",
        epoch=1,
        attempt=1,
        created_ms=0,
        key_group_count=16,
        ending=None,
        operators={"sum": written},
    )


def test_native_files_are_downloaded_to_the_folder_that_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "system").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "system"))
    store = MemoryStore()
    manifest = _snapshot_of_rocksdb(tmp_path / "database", store)
    there: set[str] = set()
    keys: list[int] = []
    rows = Snapshot(store, manifest, scratch=str(tmp_path / "set")).rows("sum")
    for batch in rows["total"]:
        keys += batch.column("key").to_pylist()
        there |= {path.name[:16] for path in (tmp_path / "set").rglob("tidegate-*")}
    del rows
    assert sorted(keys) == [1, 2, 3]
    assert "tidegate-native-" in there
    assert list((tmp_path / "system").iterdir()) == [] and list((tmp_path / "set").iterdir()) == []
