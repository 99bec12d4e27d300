"""`tidegate snapshots verify`: whatever is wrong is found, and what is right is called right."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tests.jobs import build_ledger
from tests.unit.cli.made import COUNTS, GONE, GROUPS, OFFSETS, SCORES, STATES, Made, group_of, run, run_json
from tidegate.snapshots.manifest import FileEntry, PieceEntry, StateEntry
from tidegate.snapshots.savepoints import export_snapshot
from tidegate.snapshots.snapshot import Snapshot
from tidegate.state.sections import Section, StateInfo, StateKind
from tidegate.store.local import LocalStore
from tidegate.testing.processes import ProcessJob

BASE: dict[str, dict[str, Any]] = {
    "count": {f"k{i}": i for i in range(200)},
    "scores": {f"k{i}": {"a": i / 2} for i in range(50)},
}


@pytest.fixture
def made(tmp_path: Path) -> Made:
    made = Made(tmp_path / "snapshots")
    made.write(3, BASE, items=range(10))
    made.write(4, {"count": {"k1": 1000, "new": 5, "k2": GONE}, "scores": {"k3": GONE}}, on=3, items=range(4))
    return made


def problems(path: Path, *options: object) -> list[dict[str, Any]]:
    """At least one; and people are told the same ones."""
    result = run("snapshots", "verify", path, *options, "--json")
    assert result.exit_code == 1, result.output
    report = json.loads(result.stdout)
    assert report["problems"] and report["ok"] is False
    told = run("snapshots", "verify", path, *options)
    assert told.exit_code == 1
    for problem in report["problems"]:
        assert f"WRONG  epoch {problem['epoch']}  {problem['where']}: {problem['what']}" in told.stdout
    found: list[dict[str, Any]] = report["problems"]
    return found


def test_what_is_right_is_called_right(made: Made) -> None:
    for options in ([], ["--epoch", 3], ["--all"]):
        report = run_json("snapshots", "verify", made.path, *options)
        assert report["ok"] and report["problems"] == [] and report["notes"] == []
    assert report["epochs"] == [3, 4]
    files = {file.name: file.bytes for manifest in made.manifests.values() for file in manifest.files()}
    # Once each, though both snapshots list the files of the first.
    assert (report["files"], report["bytes"]) == (len(files), sum(files.values()))
    assert report["rows"] == 200 + 50 + 10 + 4 + 4
    assert "all of it is right" in run("snapshots", "verify", made.path).stdout


def test_every_file_is_read_once(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    read_bytes: dict[str, int] = {}
    real = LocalStore.read

    def counting(self: LocalStore, name: str, offset: int = 0, length: int | None = None) -> bytes:
        content = real(self, name, offset, length)
        read_bytes[name] = read_bytes.get(name, 0) + len(content)
        return content

    monkeypatch.setattr(LocalStore, "read", counting)
    run_json("snapshots", "verify", made.path, "--all")
    for file in made.manifests[4].files():
        # The index is read first, to know what follows, and again when its turn comes.
        assert file.bytes <= read_bytes[file.name] <= file.bytes + file.index_bytes + 20


def test_any_flipped_bit_in_any_file_of_a_snapshot_is_found(made: Made) -> None:
    rng = random.Random(1)
    paths = [made.path / file.name for file in made.manifests[4].files()] + [made.manifest_path(4)]
    for path in paths:
        whole = path.read_bytes()
        ends = {0, 3, 7, 8, len(whole) - 1, len(whole) - 9, len(whole) - 13, len(whole) - 20}
        for position in ends | {rng.randrange(len(whole)) for _ in range(40)}:
            damaged = bytearray(whole)
            damaged[position] ^= 1 << rng.randrange(8)
            path.write_bytes(damaged)
            result = run("snapshots", "verify", made.path, "--json")
            assert result.exit_code == 1, f"{path.name}: byte {position} of {len(whole)}"
            assert {problem["where"] for problem in json.loads(result.stdout)["problems"]} == {
                str(path.relative_to(made.path))
            }
        path.write_bytes(whole)
    assert run("snapshots", "verify", made.path).exit_code == 0


def test_any_truncation_of_any_file_of_a_snapshot_is_found(made: Made) -> None:
    rng = random.Random(2)
    paths = [made.path / file.name for file in made.manifests[4].files()] + [made.manifest_path(4)]
    for path in paths:
        whole = path.read_bytes()
        for kept in {0, 1, 8, len(whole) - 1, len(whole) - 20} | {rng.randrange(len(whole)) for _ in range(15)}:
            path.write_bytes(whole[:kept])
            assert run("snapshots", "verify", made.path).exit_code == 1, f"{path.name}: {kept} of {len(whole)}"
        path.write_bytes(whole + b"\0")
        assert run("snapshots", "verify", made.path).exit_code == 1
        path.write_bytes(whole)


def test_flips_and_truncations_of_a_savepoint_are_found(made: Made, tmp_path: Path) -> None:
    folder = tmp_path / "savepoint"
    export_snapshot(Snapshot(made.store, made.manifests[3]), LocalStore(folder), created_ms=1)
    assert run("snapshots", "verify", folder).exit_code == 0
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        whole = path.read_bytes()
        for position in range(0, len(whole), max(1, len(whole) // 20)):
            path.write_bytes(whole[:position] + bytes([whole[position] ^ 16]) + whole[position + 1 :])
            assert run("snapshots", "verify", folder).exit_code == 1
            path.write_bytes(whole[:position])
            assert run("snapshots", "verify", folder).exit_code == 1
        path.write_bytes(whole)


def test_all_problems_are_told_and_not_only_the_first(made: Made) -> None:
    names = [file.name for file in made.manifests[4].files()]
    (made.path / names[0]).unlink()
    content = bytearray((made.path / names[1]).read_bytes())
    content[100] ^= 1
    (made.path / names[1]).write_bytes(content)
    (made.path / names[2]).write_bytes(b"")
    found = problems(made.path)
    assert {problem["where"] for problem in found} == set(names[:3])
    assert [problem["what"] for problem in found if problem["where"] == names[0]] == ["the file is missing"]
    # The section and the file it is in.
    assert len([problem for problem in found if problem["where"] == names[1]]) == 2


def test_a_problem_of_an_older_snapshot_is_found_when_it_is_asked_for(made: Made) -> None:
    made.write(5, BASE)
    (made.path / next(made.manifests[3].files()).name).unlink()
    assert run("snapshots", "verify", made.path).exit_code == 0
    assert {problem["epoch"] for problem in problems(made.path, "--epoch", 3)} == {3}
    assert {problem["epoch"] for problem in problems(made.path, "--all")} == {3, 4}


def test_a_manifest_of_another_epoch_under_this_name_is_found(made: Made) -> None:
    made.manifest_path(4).write_bytes(made.manifest_path(3).read_bytes())
    assert "holds the manifest of epoch 3" in problems(made.path)[0]["what"]


def test_files_in_no_snapshot_are_a_note(made: Made) -> None:
    made.store.write("state/a0000000001-e0000000009-s00000-counting.tgs", [b"of an epoch that is being written"])
    report = run_json("snapshots", "verify", made.path)
    assert report["ok"] and "state/a0000000001-e0000000009-s00000-counting.tgs" in report["notes"][0]
    assert "note " in run("snapshots", "verify", made.path).stdout
    # Of one manifest alone nobody can tell what the others list.
    assert run_json("snapshots", "verify", made.manifest_path(4))["notes"] == []


def piece(subtask: int, start: int, stop: int) -> PieceEntry:
    return PieceEntry(subtask=subtask, key_groups=(start, stop), files=(), item_counts={})


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ([(0, 8), (9, 16)], "key-groups 8, before those of subtask 1, are in no piece"),
        ([(0, 8), (7, 16)], "key-groups 7 of subtask 1 are those of a subtask before it as well, or not in order"),
        ([(1, 8), (8, 16)], "key-groups 0, before those of subtask 0, are in no piece"),
        ([(0, 8), (8, 14)], "key-groups 14…16 (half-open) are in no piece"),
        ([(8, 16), (0, 8)], "key-groups 0…8 (half-open), before those of subtask 0, are in no piece"),
        ([(0, 16), (0, 16)], "key-groups 0…16 (half-open) of subtask 1 are those of a subtask before it as well"),
        ([(0, 0), (0, 0)], "key-groups 0…16 (half-open) are in no piece"),
    ],
)
def test_key_groups_that_do_not_tile_are_found(made: Made, ranges: list[tuple[int, int]], expected: str) -> None:
    made.change_pieces(4, *(piece(subtask, *bounds) for subtask, bounds in enumerate(ranges)))
    found = [problem["what"] for problem in problems(made.path) if problem["where"] == "operator 'counting'"]
    assert any(what.startswith(expected) for what in found), found


def test_every_gap_and_overlap_is_told(made: Made) -> None:
    made.change_pieces(4, piece(0, 0, 3), piece(1, 4, 8), piece(2, 6, 12))
    assert [problem["what"].split(" ")[1] for problem in problems(made.path)] == ["3,", "6…8", "12…16"]


def counts_of(*keys: str) -> pa.RecordBatch:
    return pa.record_batch([pa.array(keys), pa.array(range(len(keys)), pa.int64())], schema=COUNTS.schema)


def put(made: Made, *sections: Section, states: tuple[StateInfo, ...] = STATES) -> FileEntry:
    """Makes these the content of the newest snapshot's first piece."""
    [file] = made.write_file(4, 0, states, sections)
    first, second = made.manifests[4].operators["counting"].pieces
    made.change_pieces(4, replace(first, files=(file,), item_counts={}), second)
    return file


KEYS_BY_GROUP = {group: [key for key in (f"x{i}" for i in range(500)) if group_of(key) == group] for group in range(GROUPS)}


def test_a_key_in_a_section_of_another_key_group_is_found(made: Made) -> None:
    stray, right = KEYS_BY_GROUP[5][0], KEYS_BY_GROUP[2][:3]
    file = put(made, Section("count", range(2, 3), counts_of(*right)), Section("count", range(3, 5), counts_of(stray)))
    [problem] = problems(made.path)
    assert problem["where"] == file.name
    assert problem["what"] == (
        f"state 'count': 1 of 1 keys in a section of key-groups 3…5 (half-open) belong elsewhere; "
        f"the first is {stray!r}, of key-group 5"
    )


def test_a_key_that_is_in_its_section_but_not_of_this_piece_is_found(made: Made) -> None:
    # A restore would pass it over: it looks for that key-group in the other piece.
    stray = KEYS_BY_GROUP[12][0]
    put(made, Section("count", range(GROUPS), counts_of(KEYS_BY_GROUP[1][0], stray)))
    [problem] = problems(made.path)
    assert "1 of 2 keys in a piece of key-groups 0…8 (half-open) belong elsewhere" in problem["what"]
    assert f"the first is {stray!r}" in problem["what"]


def test_a_deleted_key_in_the_wrong_place_is_found(made: Made) -> None:
    rows = pa.record_batch([pa.array([KEYS_BY_GROUP[5][0]])], names=["key"])
    put(made, Section("count", range(3, 4), rows, deleted=True))
    assert "belong elsewhere" in problems(made.path)[0]["what"]


def test_a_state_that_is_not_what_the_manifest_says_is_found(made: Made) -> None:
    other = StateInfo("count", StateKind.KEYED, "value", pa.schema([("key", pa.string()), ("value", pa.float64())]))
    rows = pa.record_batch([pa.array(KEYS_BY_GROUP[1][:1]), pa.array([1.5])], schema=other.schema)
    unknown = replace(SCORES, name="unknown")
    put(made, Section("count", range(1, 2), rows), states=(other, unknown))
    found = [problem["what"] for problem in problems(made.path)]
    assert any("value double) in the file" in what for what in found)
    assert any("a state 'unknown' that the manifest doesn't list" in what for what in found)
    kind = replace(COUNTS, kind=StateKind.SPLIT, schema=OFFSETS.schema)
    put(made, Section("count", None, pa.record_batch([pa.array([1], pa.int64())], schema=OFFSETS.schema)), states=(kind,))
    assert any("is split" in problem["what"] for problem in problems(made.path))


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_a_wrong_count_of_operator_state_is_found(made: Made, count: int) -> None:
    first, second = made.manifests[4].operators["counting"].pieces
    made.change_pieces(4, replace(first, item_counts={"offsets": count} if count else {}), second)
    assert "has 2 rows" in problems(made.path)[0]["what"]


def test_items_of_an_earlier_epoch_count_no_more(made: Made) -> None:
    made.write(5, {}, on=4)
    assert [piece.item_counts for piece in made.manifests[5].operators["counting"].pieces] == [{}, {}]
    assert run("snapshots", "verify", made.path).exit_code == 0


def test_items_without_any_file_are_found(made: Made) -> None:
    first, second = made.manifests[4].operators["counting"].pieces
    made.change_pieces(4, replace(first, files=(), item_counts={"offsets": 3}), second)
    assert "has 0 rows in no file" in problems(made.path)[0]["what"]


@pytest.mark.parametrize(
    "change",
    [
        lambda file: replace(file, bytes=file.bytes + 1),
        lambda file: replace(file, checksum=file.checksum ^ 1),
        lambda file: replace(file, index_checksum=file.index_checksum ^ 1),
        lambda file: replace(file, index_bytes=file.index_bytes - 8),
        lambda file: replace(file, index_bytes=file.bytes),
        lambda file: replace(file, name="state/a0000000001-e0000000003-s00007-counting.tgs"),
    ],
)
def test_a_manifest_that_is_wrong_about_a_file_is_found(made: Made, change: Callable[[FileEntry], FileEntry]) -> None:
    first, second = made.manifests[4].operators["counting"].pieces
    made.change_pieces(4, replace(first, files=(change(first.files[0]), *first.files[1:])), second)
    assert problems(made.path)[0]["where"] == change(first.files[0]).name


def test_operators_without_keyed_state_need_no_key_groups(made: Made) -> None:
    manifest = made.manifests[4]
    entry = StateEntry.of(StateInfo("offsets", StateKind.SPLIT, "list", OFFSETS.schema))
    plain = replace(manifest.operators["counting"], states=(entry,), pieces=(piece(0, 0, 0), piece(1, 0, 0)))
    made.commit(replace(manifest, operators={"plain": plain}))
    assert run("snapshots", "verify", made.path).exit_code == 0


def test_what_a_real_job_writes_is_right(tmp_path: Path) -> None:
    job = ProcessJob("real", slots=2, snapshots=tg.Snapshots(to=str(tmp_path / "snapshots"), every="50 ms", retain=5))
    build_ledger(job, tg.sinks.parquet(tmp_path / "out"), rows=20_000, rate=20_000)
    job.run()
    report = run_json("snapshots", "verify", tmp_path / "snapshots", "--all")
    assert report["ok"] and report["rows"] > 0
    listing = run_json("snapshots", "list", tmp_path / "snapshots")["snapshots"]
    assert [row["epoch"] for row in listing] == report["epochs"]
