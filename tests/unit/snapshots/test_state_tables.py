"""State as tables, without Spark: every shape, from a chain of row files and from RocksDB's own files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tidegate as tg
from tests.unit.cli.made import GONE, GROUPS, Made, group_of
from tidegate.errors import JobError, NotFound, SchemaError
from tidegate.snapshots.finding import find_snapshot
from tidegate.snapshots.manifest import FileEntry, Manifest, OperatorEntry, PieceEntry, StateEntry
from tidegate.snapshots.snapshot import Snapshot
from tidegate.snapshots.snapshot_tables import TABLES, SnapshotTable
from tidegate.snapshots.state_changes import changes_table
from tidegate.snapshots.state_tables import Table, planned_parts, state_table
from tidegate.snapshots.writing import PieceWriter
from tidegate.state.cutting import cut_by_group
from tidegate.state.sections import StateInfo, StateKind
from tidegate.store.local import LocalStore

KEYS = range(200)
NOW_MS = 1_700_000_000_000
BACKENDS: dict[str, Callable[[], Any]] = {"heap": tg.Heap, "rocksdb": tg.RocksDB}
STATES = {
    "count": tg.value("long", name="count"),
    "recent": tg.list("string", name="recent"),
    "scores": tg.map("string", "double", name="scores"),
    "seen": tg.value("long", name="seen", ttl="1 day"),
    "visits": tg.map("string", "int", name="visits", ttl="1 hour"),
}


def rows(table: Table, groups: Iterable[int] | None = None, *, count: int | None = None) -> list[dict[str, Any]]:
    parts = table.parts(None if groups is None else set(groups), count=count)
    found = [row for part in parts for batch in table.read(part) for row in batch.to_pylist()]
    return sorted(found, key=lambda row: str([(name, value) for name, value in row.items() if name != "change"]))


def fill(table: Any, name: str, key: int, epoch: int) -> None:
    if name in ("count", "seen"):
        table.set(key * epoch)
    elif name == "recent":
        table.extend([f"{key}", "again"] if epoch == 1 else ["later"])
    else:
        for entry in range(key % 3):
            table.put(f"e{entry}", entry + epoch)


@pytest.fixture(params=BACKENDS)
def snapshot(request: pytest.FixtureRequest, tmp_path: Path) -> Snapshot:
    """Two subtasks' pieces of two epochs: every key, then every tenth once more, and key 7 is gone."""
    store = LocalStore(tmp_path / "job")
    pieces: list[PieceEntry] = []
    entries: tuple[StateEntry, ...] = ()
    for subtask in range(2):
        backend = BACKENDS[request.param]().create(key_type=pa.int64(), key_group_count=GROUPS, now_ms=lambda: NOW_MS)
        tables = {name: backend.table(descriptor) for name, descriptor in STATES.items()}
        writer = PieceWriter("op", store=store, attempt=1, subtask=subtask, parallelism=2, key_group_count=GROUPS)
        written: OperatorEntry | None = None
        mine = [key for key in KEYS if group_of(key, pa.int64()) * 2 // GROUPS == subtask]
        for epoch in (1, 2):
            keys = mine if epoch == 1 else [key for key in mine if key % 10 == 0 or key == 7]
            backend.begin_batch(keys)
            for backend.cursor.key in keys:
                for name, table in tables.items():
                    if epoch == 2 and backend.cursor.key == 7:
                        table.clear()
                    else:
                        fill(table, name, backend.cursor.key, epoch)
            backend.end_batch()
            frozen = backend.freeze()
            written = writer.write(frozen, epoch=epoch, base=epoch - 1, full=False)
            frozen.release()
        backend.close()
        assert written is not None
        pieces += written.pieces
        entries = written.states
    manifest = Manifest(
        job="job",
        epoch=2,
        attempt=1,
        created_ms=NOW_MS,
        key_group_count=GROUPS,
        ending=None,
        operators={"op": OperatorEntry(2, entries, tuple(pieces))},
    )
    store.create("manifests/0000000002-a0000000001.json", manifest.to_bytes())
    return find_snapshot(str(tmp_path / "job"))


def expected(name: str) -> Iterator[tuple[int, Any]]:
    """By key: its value, a list, or a dict."""
    for key in KEYS:
        again = key % 10 == 0
        if key == 7:
            continue
        if name in ("count", "seen"):
            yield key, key * (2 if again else 1)
        elif name == "recent":
            yield key, [str(key), "again", *(["later"] if again else [])]
        else:
            yield key, {f"e{entry}": entry + (2 if again else 1) for entry in range(key % 3)}


def test_a_value_has_a_row_for_each_key(snapshot: Snapshot) -> None:
    table = state_table(snapshot, "count", None)
    assert table.schema.names == ["key", "value", "key_group", "epoch"]
    assert {(row["key"], row["value"]) for row in rows(table)} == set(expected("count"))
    assert all(row["key_group"] == group_of(row["key"], pa.int64()) and row["epoch"] == 2 for row in rows(table))


def test_lists_and_maps_have_a_row_for_each_entry(snapshot: Snapshot) -> None:
    found = {(row["key"], row["position"], row["value"]) for row in rows(state_table(snapshot, "recent", "op"))}
    assert found == {(key, at, item) for key, items in expected("recent") for at, item in enumerate(items)}
    found = {(row["key"], row["map_key"], row["value"]) for row in rows(state_table(snapshot, "scores", None))}
    assert found == {(key, item, value) for key, entries in expected("scores") for item, value in entries.items()}


def test_or_one_for_each_key(snapshot: Snapshot) -> None:
    found = {row["key"]: row["value"] for row in rows(state_table(snapshot, "recent", None, per="key"))}
    assert found == dict(expected("recent"))
    found = {row["key"]: dict(row["value"]) for row in rows(state_table(snapshot, "scores", None, per="key"))}
    assert {key: value for key, value in found.items() if value} == {k: v for k, v in expected("scores") if v}


def test_what_expires_says_when(snapshot: Snapshot) -> None:
    day = datetime.fromtimestamp(NOW_MS / 1000 + 86_400, UTC)
    hour = datetime.fromtimestamp(NOW_MS / 1000 + 3_600, UTC)
    found = rows(state_table(snapshot, "seen", None))
    assert {(row["key"], row["value"]) for row in found} == set(expected("seen"))
    assert {row["expires"] for row in found} == {day}
    found = rows(state_table(snapshot, "visits", None))
    assert {(row["key"], row["map_key"], row["value"]) for row in found} == {
        (key, item, value) for key, entries in expected("visits") for item, value in entries.items()
    }
    assert {row["expires"] for row in found} == {hour}


def test_only_the_key_groups_that_are_asked_for_are_read(snapshot: Snapshot) -> None:
    table = state_table(snapshot, "count", None)
    everything = rows(table)
    for groups in ({3}, {0, 15}, set(range(5, 11)), set()):
        assert rows(table, groups) == [row for row in everything if row["key_group"] in groups]
    assert rows(table, count=7) == everything


def test_ends_that_are_not_known_are_null(tmp_path: Path) -> None:
    """Rows of a time when the state had no ttl, beside others."""
    made = Made(tmp_path)
    kind = pa.schema([("key", pa.string()), ("value", pa.list_(pa.int64())), ("expires", pa.list_(pa.int64()))])
    info = StateInfo("timed", StateKind.KEYED, "list", kind)
    batch = pa.record_batch([["a", "b"], [[1, 2], [3]], [None, [NOW_MS]]], schema=kind)
    file = made.write_file(1, 0, [info], cut_by_group("timed", [batch], GROUPS))
    entry = OperatorEntry(
        1, (StateEntry.of(StateInfo("timed", StateKind.KEYED, "list", kind)),), (PieceEntry(0, (0, GROUPS), file, {}),)
    )
    made.commit(
        Manifest(job="job", epoch=1, attempt=1, created_ms=1, key_group_count=GROUPS, ending=None, operators={"op": entry})
    )
    found = rows(state_table(find_snapshot(str(made.path)), "timed", None))
    assert [(row["key"], row["position"], row["value"], row["expires"] is None) for row in found] == [
        ("a", 0, 1, True),
        ("a", 1, 2, True),
        ("b", 0, 3, False),
    ]


def test_a_key_of_several_columns_has_them_back(tmp_path: Path) -> None:
    made = Made(tmp_path)
    key = pa.struct([("shop", pa.string()), ("id", pa.int64())])
    info = StateInfo("n", StateKind.KEYED, "value", pa.schema([("key", key), ("value", pa.int64())]))
    made.write(1, {}, states=[info])
    batch = pa.record_batch([pa.array([{"shop": "a", "id": 1}, {"shop": None, "id": 2}], key), [10, 20]], schema=info.schema)
    file = made.write_file(1, 0, [info], cut_by_group("n", [batch], GROUPS))
    entry = made.manifests[1].operators["counting"]
    made.commit(
        Manifest(
            job="job",
            epoch=1,
            attempt=1,
            created_ms=1,
            key_group_count=GROUPS,
            ending=None,
            operators={"op": OperatorEntry(1, entry.states, (PieceEntry(0, (0, GROUPS), file, {}),))},
        )
    )
    snapshot = find_snapshot(str(made.path))
    assert [(row["shop"], row["id"], row["value"]) for row in rows(state_table(snapshot, "n", None))] == [
        ("a", 1, 10),
        (None, 2, 20),
    ]
    assert state_table(snapshot, "n", None, key=["s", "i"]).schema.names[:2] == ["s", "i"]
    assert state_table(snapshot, "n", None, key=["whole"]).schema.field("whole").type == key
    with pytest.raises(JobError, match="has 2 columns"):
        state_table(snapshot, "n", None, key=["a", "b", "c"])
    with pytest.raises(SchemaError, match="'value' twice"):
        state_table(snapshot, "n", None, key=["value", "b"])


def test_state_without_keys(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.write(1, {"count": {"a": 1}}, items=[5, 6, 7])
    found = rows(state_table(find_snapshot(str(made.path)), "offsets", None))
    assert [(row["subtask"], row["position"], row["value"]) for row in found] == [(0, 0, 5), (0, 1, 7), (1, 0, 6)]


def test_what_is_not_there_is_told_with_all_there_is(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.write(1, {"count": {"a": 1}})
    made.write(2, {"count": {"a": 2}}, on=1)
    snapshot = find_snapshot(str(made.path))
    with pytest.raises(NotFound, match=r"no state 'cuont'(.|\n)*state 'count': keyed value long by string"):
        state_table(snapshot, "cuont", None)
    with pytest.raises(JobError, match=r"no state is named(.|\n)*'scores'"):
        state_table(snapshot, None, None)
    with pytest.raises(NotFound, match="no operator 'sum'"):
        state_table(snapshot, "count", "sum")
    with pytest.raises(NotFound, match=r"epoch 5 is not a complete snapshot .* there are: 1, 2"):
        find_snapshot(str(made.path), epoch=5)
    assert find_snapshot(str(made.path), epoch=1).manifest.epoch == 1
    both = Manifest(
        job="job",
        epoch=3,
        attempt=1,
        created_ms=1,
        key_group_count=GROUPS,
        ending=None,
        operators=dict.fromkeys(("one", "two"), snapshot.manifest.operators["counting"]),
    )
    made.commit(both)
    with pytest.raises(JobError, match="in the operators 'one', 'two': say which"):
        state_table(find_snapshot(str(made.path)), "count", None)


def test_a_snapshot_that_was_released_meanwhile_is_told_so(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.write(1, {"count": {"a": 1}})
    table = state_table(find_snapshot(str(made.path)), "count", None)
    for file in made.manifests[1].files():
        made.store.delete(file.name)
    with pytest.raises(NotFound, match="has probably released epoch 1"):
        rows(table)


def test_the_manifests_as_tables(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.write(1, {"count": {"a": 1, "b": 2}}, items=[1])
    made.write(2, {"count": {"a": 2}}, on=1, items=[1])
    path = str(made.path)
    found = {name: rows(SnapshotTable(find_snapshot(path), name, path=path)) for name in TABLES}
    assert [(row["epoch"], row["files"]) for row in found["snapshots"]] == [(1, 2), (2, 4)]
    assert found["snapshots"][1]["new_bytes"] < found["snapshots"][1]["bytes"]
    assert [row["operator"] for row in found["operators"]] == ["counting"]
    assert {(row["state"], row["rows"]) for row in found["states"]} == {("count", None), ("scores", None), ("offsets", 1)}
    assert sum(row["bytes"] for row in found["sizes"]) == found["operators"][0]["bytes"]
    one = find_snapshot(path, epoch=1)
    assert {(row["state"], row["rows"]) for row in rows(SnapshotTable(one, "states", path=path))} >= {("count", 2)}
    with pytest.raises(JobError, match="there are 'snapshots', 'operators'"):
        SnapshotTable(one, "stats", path=path)


# What changed.


def test_what_changed_between_two_snapshots(tmp_path: Path) -> None:
    made = Made(tmp_path)
    nan = float("nan")
    made.write(
        1,
        {"count": {f"k{i}": i for i in range(50)}, "scores": {"a": {"x": 1.0, "y": nan}, "b": {"x": 1.0}}},
        items=[5, 6, 6],
    )
    made.write(
        2,
        {"count": {"k1": GONE, "k2": 200, "k3": 3, "new": 7}, "scores": {"a": {"y": nan, "x": 1.0}, "b": {"x": 2.0}}},
        on=1,
        items=[6, 5, 8],
    )
    before, after = (find_snapshot(str(made.path), epoch=epoch) for epoch in (1, 2))
    found = {
        (row["change"], row["key"], row["before"], row["after"]) for row in rows(changes_table(before, after, "count", None))
    }
    assert found == {("removed", "k1", 1, None), ("changed", "k2", 2, 200), ("added", "new", None, 7)}
    found_in_maps = rows(changes_table(before, after, "scores", None))
    assert [(row["change"], row["key"]) for row in found_in_maps] == [("changed", "b")]
    of_items = {(row["change"], row["before"], row["after"]) for row in rows(changes_table(before, after, "offsets", None))}
    assert of_items == {("removed", 6, None), ("added", None, 8)}
    assert rows(changes_table(after, after, "count", None)) == []
    some = rows(changes_table(before, after, "count", None), {group_of("k2")})
    assert "k2" in [row["key"] for row in some] and {row["key_group"] for row in some} == {group_of("k2")}


def test_changes_at_another_parallelism_and_from_nothing(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.write(1, {})
    made.write(2, {"count": {f"k{i}": i for i in range(50)}}, parallelism=3)
    made.write(3, {})
    snapshots = {epoch: find_snapshot(str(made.path), epoch=epoch) for epoch in (1, 2, 3)}
    assert [row["change"] for row in rows(changes_table(snapshots[1], snapshots[2], "count", None))] == ["added"] * 50
    assert [row["change"] for row in rows(changes_table(snapshots[2], snapshots[3], "count", None))] == ["removed"] * 50


# Parts.


@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=6),
    st.sets(st.integers(0, 63)),
    st.sampled_from([None, 1, 3, 40]),
    st.booleans(),
)
def test_parts_hold_each_wanted_group_once(sizes: list[int], wanted: set[int], count: int | None, native: bool) -> None:
    bounds = np.linspace(0, 64, len(sizes) + 1).astype(int).tolist()
    files = [
        FileEntry(f"f{index}", size * 1_000_000, 0, form="rocksdb" if native else "rows") for index, size in enumerate(sizes)
    ]
    pieces = [
        PieceEntry(index, (bounds[index], bounds[index + 1]), (file,) if file.bytes else (), {})
        for index, file in enumerate(files)
    ]
    parts = planned_parts(pieces, sorted(wanted), count=count)
    found = [group for part in parts for start, stop in part for group in range(start, stop)]
    held = [group for piece in pieces if piece.files for group in range(*piece.key_groups)]
    assert sorted(found) == sorted(wanted & set(held)) and len(found) == len(set(found))
    if native:
        in_parts = [
            {
                index
                for index, piece in enumerate(pieces)
                for start, _ in part
                if piece.key_groups[0] <= start < piece.key_groups[1]
            }
            for part in parts
        ]
        assert sum(map(len, in_parts)) == len(set().union(*in_parts)), "a database is opened once"
