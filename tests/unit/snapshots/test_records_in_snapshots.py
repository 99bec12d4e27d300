"""State of records in snapshots: as tables, compared, evolved, replaced, at another parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import tidegate as tg
from tests.unit.cli.made import GROUPS, run, run_json
from tests.unit.snapshots.test_columnar_state import BACKENDS, rows, snapshot_of, subtask_of
from tidegate.errors import JobError, RestoreError
from tidegate.snapshots.manifest import Manifest, OperatorEntry, PieceEntry, StateEntry
from tidegate.snapshots.state_changes import changes_table
from tidegate.snapshots.state_tables import state_table
from tidegate.snapshots.state_writing import columns_beside_key, declared_info, planned_writing
from tidegate.snapshots.writing import PieceWriter
from tidegate.state.descriptors import Columns, Records
from tidegate.state.evolution import DeclaredState, evolve
from tidegate.state.vectors import VectorField
from tidegate.store.local import LocalStore

KEYS = np.arange(20)
BUFFER = Records("buffer", [pa.field("n", pa.int32())], [VectorField("seen", pa.int64(), 0)], windowed=True)


@pytest.fixture(params=BACKENDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Make snapshots of three epochs of two subtasks. Each adds a record to each key; in the second, the first record of
    key 3 is marked, and in the third deleted."""
    store = LocalStore(tmp_path / "job")
    make = BACKENDS[request.param]
    backends = [make().create(key_type=pa.int64(), key_group_count=GROUPS, now_ms=lambda: 0) for _ in range(2)]
    tables = [backend.record_state(BUFFER).window(0) for backend in backends]
    writers = [
        PieceWriter("op", store=store, attempt=1, subtask=subtask, parallelism=2, key_group_count=GROUPS)
        for subtask in range(2)
    ]
    for epoch in (1, 2, 3):
        pieces: list[PieceEntry] = []
        entries: tuple[StateEntry, ...] = ()
        for subtask, (backend, table) in enumerate(zip(backends, tables, strict=True)):
            mine = KEYS[subtask_of(KEYS, 2) == subtask]
            table.append([pa.array(mine)], [pa.array(mine * 10 + epoch, pa.int32())])
            for _, found in table.matches([pa.array([3])]):
                if epoch == 2:
                    table.change(found[:1])
                    table.vectors["seen"].values[found[:1]] = 7
                if epoch == 3:
                    table.delete(found[:1])
            frozen = backend.freeze()
            written = writers[subtask].write(frozen, epoch=epoch, base=epoch - 1, full=False)
            frozen.release()
            pieces, entries = [*pieces, *written.pieces], written.states
        operators = {"op": OperatorEntry(2, entries, tuple(pieces))}
        manifest = Manifest("job", epoch, 1, 1, GROUPS, None, operators)
        store.create(f"manifests/{epoch:010}-a0000000001.json", manifest.to_bytes())
    for backend in backends:
        backend.close()
    return tmp_path / "job"


def held(found: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    by_key: dict[int, list[dict[str, Any]]] = {}
    for row in sorted(found, key=lambda row: row["position"]):
        by_key.setdefault(row["key"], []).append(row["value"])
    return by_key


def expected(epoch: int) -> dict[int, list[dict[str, Any]]]:
    found = {key: [{"n": key * 10 + each, "seen": 0} for each in range(1, epoch + 1)] for key in KEYS.tolist()}
    if epoch == 2:
        found[3][0]["seen"] = 7
    if epoch == 3:
        del found[3][0]
    return found


def test_records_are_a_table_and_compared_by_key_window_and_position(folder: Path) -> None:
    for epoch in (1, 2, 3):
        table = state_table(snapshot_of(folder, epoch), "buffer", None)
        assert table.schema.names == ["key", "window", "position", "value", "key_group", "epoch"]
        assert held(rows(table)) == expected(epoch)
    changes = rows(changes_table(snapshot_of(folder, 2), snapshot_of(folder, 3), "buffer", None))
    assert sorted(row["change"] for row in changes) == ["added"] * 20 + ["removed"]
    names = [str(folder / "manifests" / f"{epoch:010}-a0000000001.json") for epoch in (2, 3)]
    assert run("snapshots", "verify", names[1]).exit_code == 0
    (difference,) = run_json("snapshots", "diff", *names, "--keys", "1")["states"]
    assert (difference["added"], difference["removed"], difference["unchanged"]) == (20, 1, 39)


def test_records_keep_their_order_at_another_parallelism_and_evolve(folder: Path) -> None:
    snapshot = snapshot_of(folder, 2)
    now = Records(
        "buffer",
        [pa.field("n", pa.int64()), pa.field("new", pa.string())],
        [VectorField("seen", pa.int64(), 0)],
        windowed=True,
    )
    was = next(state.info for state in snapshot.manifest.operators["op"].states)
    evolved = evolve(was, DeclaredState(now.info(pa.int64()), changes=now.changes))
    assert evolved.convert is not None
    found: dict[int, list[int]] = {}
    for subtask in range(3):
        backend = tg.Heap().create(key_type=pa.int64(), key_group_count=GROUPS, now_ms=lambda: 0)
        table = backend.record_state(now).window(0)
        for batch in snapshot.rows("op", subtask=subtask, parallelism=3)["buffer"]:
            backend.load("buffer", evolved.convert(batch), known=False)
        mine = KEYS[subtask_of(KEYS, 3) == subtask]
        table.append([pa.array(mine)], [pa.array(mine), pa.nulls(len(mine), pa.string())])
        for probes, at in table.matches([pa.array(mine)]):
            for key, n in zip(mine[probes].tolist(), table.column("n", at).to_pylist(), strict=True):
                found.setdefault(key, []).append(n)
    assert found == {key: [key * 10 + 1, key * 10 + 2, key] for key in KEYS.tolist()}
    with pytest.raises(RestoreError, match="records can't become a keyed columns"):
        evolve(was, DeclaredState(Columns("buffer", [VectorField("n", pa.int32())], windowed=True).info(pa.int64())))


def test_records_are_replaced_by_position(folder: Path, tmp_path: Path) -> None:
    base = snapshot_of(folder, 3)
    assert columns_beside_key(base, "op", "buffer") == ["window", "position"]
    info = declared_info(base, "op", "buffer", key=pa.int64(), value=BUFFER.type, shape=None, expiring=False)
    writing = planned_writing(
        target=str(tmp_path / "target"),
        base=base,
        operator="op",
        info=info,
        add=False,
        job=None,
        key_group_count=None,
        parallelism=1,
    )
    value = pa.array([{"n": 1, "seen": 0}] * 2, BUFFER.type)
    subtask = int(subtask_of(np.array([3]), 2)[0])
    for positions, is_right in (([4, 5], True), ([4, 4], False)):
        columns = [pa.array([3, 3]), pa.array([0, 0]), pa.array(positions), value]
        batch = pa.RecordBatch.from_arrays(columns, schema=info.schema)
        if is_right:
            assert writing.write_piece(subtask, [batch]).files
        else:
            with pytest.raises(JobError, match="more than once"):
                writing.write_piece(subtask, [batch])
