"""Columnar state in snapshots: as tables, compared, verified, rescaled, converted, replaced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import tidegate as tg
from tests.unit.cli.made import GROUPS, run, run_json
from tidegate.errors import JobError, RestoreError
from tidegate.hashing import hash_columns
from tidegate.keygroups import groups_of
from tidegate.snapshots.finding import find_snapshot
from tidegate.snapshots.manifest import Manifest, OperatorEntry, PieceEntry, StateEntry
from tidegate.snapshots.snapshot import Snapshot
from tidegate.snapshots.state_changes import changes_table
from tidegate.snapshots.state_tables import Table, state_table
from tidegate.snapshots.state_writing import columns_beside_key, declared_info, planned_writing
from tidegate.snapshots.writing import PieceWriter
from tidegate.state.column_table import VectorField
from tidegate.state.descriptors import Columns
from tidegate.state.evolution import DeclaredState, evolve
from tidegate.store.local import LocalStore

BACKENDS: dict[str, Callable[[], Any]] = {"heap": tg.Heap, "rocksdb": tg.RocksDB}
KEYS = range(100)
PLAIN = Columns("sums", [VectorField("n", pa.int32(), 0), VectorField("total", pa.float64())])
WINDOWED = Columns("panes", [VectorField("n", pa.int64(), 0)], windowed=True)

Held = dict[tuple[int, int | None], dict[str, Any]]


def rows(table: Table) -> list[dict[str, Any]]:
    return [row for part in table.parts(None) for batch in table.read(part) for row in batch.to_pylist()]


def subtask_of(keys: np.ndarray[Any, Any], parallelism: int) -> np.ndarray[Any, Any]:
    groups: np.ndarray[Any, Any] = groups_of(hash_columns([pa.array(keys)]), GROUPS) * parallelism // GROUPS
    return groups


@pytest.fixture(params=BACKENDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return made(tmp_path, request.param)


def made(tmp_path: Path, name: str) -> Path:
    """Make snapshots of three epochs of two subtasks. In the second each tenth key changes and key 7 goes, and in the third
    the window 0 is dropped, and made again for key 1."""
    store = LocalStore(tmp_path / "job")
    backends = [BACKENDS[name]().create(key_type=pa.int64(), key_group_count=GROUPS, now_ms=lambda: 0) for _ in range(2)]
    states = [(backend.column_state(PLAIN), backend.column_state(WINDOWED)) for backend in backends]
    writers = [
        PieceWriter("op", store=store, attempt=1, subtask=subtask, parallelism=2, key_group_count=GROUPS)
        for subtask in range(2)
    ]
    all_keys = np.arange(len(KEYS))
    for epoch in (1, 2, 3):
        pieces: list[PieceEntry] = []
        entries: tuple[StateEntry, ...] = ()
        for subtask, (backend, (plain, windowed)) in enumerate(zip(backends, states, strict=True)):
            mine = all_keys[subtask_of(all_keys, 2) == subtask]
            some = mine if epoch == 1 else mine[mine % 10 == 0]
            table = plain.table()
            at = table.rows_of([pa.array(some)])
            table.change(at)
            table.vectors["n"].values[at] += epoch
            table.vectors["total"].values[at], table.vectors["total"].valid[at] = some / 2, True
            for window in (0, 1000) if epoch == 1 else ():
                pane = windowed.window(window)
                at = pane.rows_of([pa.array(some)])
                pane.change(at)
                pane.vectors["n"].values[at] = some + window
            if epoch == 2:
                table.delete(table.find([pa.array(mine[mine == 7])]))
            if epoch == 3:
                windowed.drop(0)
                windowed.window(0).rows_of([pa.array(mine[mine == 1])])
            frozen = backend.freeze()
            written = writers[subtask].write(frozen, epoch=epoch, base=epoch - 1, full=False)
            frozen.release()
            pieces, entries = [*pieces, *written.pieces], written.states
        manifest = Manifest(
            job="job",
            epoch=epoch,
            attempt=1,
            created_ms=1,
            key_group_count=GROUPS,
            ending=None,
            operators={"op": OperatorEntry(2, entries, tuple(pieces))},
        )
        store.create(f"manifests/{epoch:010}-a0000000001.json", manifest.to_bytes())
    for backend in backends:
        backend.close()
    return tmp_path / "job"


def snapshot_of(folder: Path, epoch: int) -> Snapshot:
    return find_snapshot(str(folder / "manifests" / f"{epoch:010}-a0000000001.json"))


def expected_plain(epoch: int) -> dict[int, dict[str, Any]]:
    return {
        key: {"n": (1 if key % 10 else sum(range(epoch + 1))), "total": key / 2} for key in KEYS if key != 7 or epoch == 1
    }


def expected_panes(epoch: int) -> dict[tuple[int, int], dict[str, Any]]:
    found = {(key, window): {"n": key + window} for key in KEYS for window in (0, 1000)}
    if epoch == 3:
        found = {(key, window): value for (key, window), value in found.items() if window} | {(1, 0): {"n": 0}}
    return found


def test_columnar_state_is_a_table_by_key_and_window(folder: Path) -> None:
    for epoch in (1, 2, 3):
        snapshot = snapshot_of(folder, epoch)
        plain = state_table(snapshot, "sums", None)
        assert plain.schema.names == ["key", "value", "key_group", "epoch"]
        assert {row["key"]: row["value"] for row in rows(plain)} == expected_plain(epoch)
        panes = state_table(snapshot, "panes", None)
        assert panes.schema.names == ["key", "window", "value", "key_group", "epoch"]
        found = rows(panes)
        assert {(row["key"], row["window"]): row["value"] for row in found} == expected_panes(epoch)
        assert len(found) == len(expected_panes(epoch))


def test_changes_are_by_key_and_window(folder: Path) -> None:
    one, two, three = (snapshot_of(folder, epoch) for epoch in (1, 2, 3))
    assert rows(changes_table(one, two, "panes", None)) == []
    found = rows(changes_table(two, three, "panes", None))
    assert sorted((row["change"], row["key"], row["window"]) for row in found) == sorted(
        [("changed", 1, 0), *(("removed", key, 0) for key in KEYS if key != 1)]
    )
    assert {row["key"] for row in rows(changes_table(one, two, "sums", None))} == {7, *range(0, 100, 10)}


def test_the_command_line_verifies_compares_and_describes_it(folder: Path) -> None:
    names = [str(folder / "manifests" / f"{epoch:010}-a0000000001.json") for epoch in (2, 3)]
    for name in names:
        assert run("snapshots", "verify", name).exit_code == 0
    differences = {each["state"]: each for each in run_json("snapshots", "diff", *names, "--keys", "3")["states"]}
    panes = differences["panes"]
    assert (panes["added"], panes["removed"], panes["changed"], panes["unchanged"]) == (0, 99, 1, 100)
    assert all(window == 0 for _, window in (example["key"] for example in panes["examples"]))
    shown = {each["name"]: each["type"] for each in run_json("snapshots", "show", names[0])["operators"]["op"]["states"]}
    assert shown["panes"] == "key int64, window int64, value struct<n: int64>"


@pytest.mark.parametrize("parallelism", [1, 3])
def test_each_subtask_of_another_parallelism_gets_the_rows_of_its_keys(folder: Path, parallelism: int) -> None:
    snapshot = snapshot_of(folder, 3)
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for subtask in range(parallelism):
        backend = tg.Heap().create(key_type=pa.int64(), key_group_count=GROUPS, now_ms=lambda: 0)
        sums, panes = backend.column_state(PLAIN), backend.column_state(WINDOWED)
        restored = snapshot.rows("op", subtask=subtask, parallelism=parallelism)
        for state, batches in restored.items():
            for batch in batches:
                backend.load(state, batch, known=False)
        loaded = {(row["key"], row["window"]): row["value"] for batch in backend.rows("panes") for row in batch.to_pylist()}
        assert set(subtask_of(np.array(sorted({key for key, _ in loaded})), parallelism).tolist()) <= {subtask}
        assert not found.keys() & loaded.keys()
        found |= loaded
        assert len(sums.table()) == sum(batch.num_rows for batch in backend.rows("sums"))
        assert list(panes.windows()) in ([0, 1000], [1000])
    assert found == expected_panes(3)


def test_fields_may_be_added_dropped_and_widened(folder: Path) -> None:
    snapshot = snapshot_of(folder, 2)
    now = Columns(
        "sums", [VectorField("late", pa.int64(), 5), VectorField("n", pa.int64(), 0), VectorField("max", pa.int64())]
    )
    was = next(state.info for state in snapshot.manifest.operators["op"].states if state.name == "sums")
    evolved = evolve(was, DeclaredState(now.info(pa.int64()), changes=now.changes))
    assert evolved.convert is not None
    backend = tg.Heap().create(key_type=pa.int64(), key_group_count=GROUPS, now_ms=lambda: 0)
    table = backend.column_state(now).table()
    for batch in snapshot.rows("op", subtask=0, parallelism=1)["sums"]:
        backend.load("sums", evolved.convert(batch), known=False)
    held = {row["key"]: row["value"] for batch in backend.rows("sums") for row in batch.to_pylist()}
    assert held == {key: {"late": 5, "n": value["n"], "max": None} for key, value in expected_plain(2).items()}
    assert table.vectors["late"].valid is None


def test_state_by_key_can_t_become_state_by_key_and_window() -> None:
    one, other = Columns("panes", WINDOWED.fields), WINDOWED
    for was, now in ((one, other), (other, one)):
        with pytest.raises(RestoreError, match="key and window"):
            evolve(was.info(pa.int64()), DeclaredState(now.info(pa.int64())))


def test_rows_by_key_and_window_are_written_once_each(folder: Path, tmp_path: Path) -> None:
    base = snapshot_of(folder, 3)
    assert columns_beside_key(base, "op", "panes") == ["window"] and not columns_beside_key(base, "op", "sums")
    info = declared_info(base, "op", "panes", key=pa.int64(), value=WINDOWED.type, shape=None, expiring=False)
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
    key = pa.array([3, 3])
    windows = [pa.array([0, 10]), pa.array([10, 10])]
    batches = [
        pa.RecordBatch.from_arrays([key, window, pa.array([{"n": 1}, {"n": 2}], WINDOWED.type)], schema=info.schema)
        for window in windows
    ]
    subtask = int(subtask_of(np.array([3]), 2)[0])
    assert writing.write_piece(subtask, [batches[0]]).files
    with pytest.raises(JobError, match="more than once"):
        writing.write_piece(subtask, [batches[1]])
