"""Files in a backend's own form: their bytes are verified as they are, their rows come from snapshots/snapshot.py.

Here row files stand in for them: the manifest calls them native, and whoever reads their rows must go through the one reader
of a backend's own files, which in this test knows what they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.unit.cli.made import COUNTS, GROUPS, Made, run, run_json
from tidegate.hashing import hash_columns
from tidegate.keygroups import groups_of
from tidegate.snapshots import snapshot
from tidegate.snapshots.manifest import FileEntry, Manifest, PieceEntry
from tidegate.snapshots.row_files import row_reader
from tidegate.state.merging import resolved_rows
from tidegate.state.sections import Section, StateInfo
from tidegate.store.base import Store

KEYS = {"count": {f"k{i}": i for i in range(300)}}


def in_form(manifest: Manifest, form: str) -> Manifest:
    def changed(piece: PieceEntry) -> PieceEntry:
        return replace(piece, files=tuple(replace(file, form=form) for file in piece.files))

    return replace(
        manifest,
        operators={
            name: replace(entry, pieces=tuple(map(changed, entry.pieces))) for name, entry in manifest.operators.items()
        },
    )


class Database:
    """Where `NativeReader` stands: rows come by growing key-group, as a database has them."""

    def __init__(
        self,
        store: Store,
        files: Sequence[FileEntry],
        states: Sequence[StateInfo],
        *,
        key_group_count: int,
        scratch: str | None = None,
    ) -> None:
        assert all(file.form == "rocksdb" for file in files)
        self.layers = [row_reader(store, replace(file, form="rows")) for file in files]

    def read_sections(self, state: str, groups: range) -> Iterator[Section]:
        for rows in by_group(list(resolved_rows(state, self.layers, groups))):
            yield Section(state, groups, rows)

    def row_count(self, state: str) -> int:
        return 0


def by_group(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    if not batches:
        return []
    rows = pa.concat_batches(batches)
    groups = groups_of(hash_columns([rows.column("key")]), GROUPS)
    return [rows.take(pa.array(groups.argsort(kind="stable")))]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    monkeypatch.setattr(snapshot, "NativeReader", Database)
    made = Made(tmp_path / "snapshots")
    made.write(1, KEYS, states=[COUNTS])
    made.write(2, {"count": {"k1": -1, "new": 0}}, on=1, states=[COUNTS])
    for epoch in (1, 2):
        made.commit(in_form(made.manifests[epoch], "rocksdb"))
    return made


def test_bytes_and_rows_are_verified(made: Made) -> None:
    report = run_json("snapshots", "verify", made.path)
    assert report["ok"] and report["rows"] == 301
    path = made.path / next(made.manifests[2].files()).name
    content = bytearray(path.read_bytes())
    content[77] ^= 2
    path.write_bytes(content)
    result = run("snapshots", "verify", made.path, "--json")
    assert result.exit_code == 1
    assert [problem["what"] for problem in json.loads(result.stdout)["problems"]] == [
        "the checksum of the file doesn't match"
    ]


def test_keys_of_another_piece_are_found(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    first = in_form(made.manifests[2], "rocksdb").operators["counting"].pieces[0]

    class OfTheFirst(Database):
        def __init__(self, store: Store, files: Sequence[FileEntry], *rest: Any, **more: Any) -> None:
            super().__init__(store, first.files, *rest, **more)

        def read_sections(self, state: str, groups: range) -> Iterator[Section]:
            return super().read_sections(state, range(GROUPS))

    monkeypatch.setattr(snapshot, "NativeReader", OfTheFirst)
    result = run("snapshots", "verify", made.path, "--json")
    assert result.exit_code == 1
    [problem] = json.loads(result.stdout)["problems"]
    assert problem["what"].startswith("subtask 1: state 'count'") and "belong elsewhere" in problem["what"]


def test_a_database_that_can_not_be_read_is_a_problem_and_not_a_traceback(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Database):
        def read_sections(self, state: str, groups: range) -> Iterator[Section]:
            raise OSError("no such column family")

    monkeypatch.setattr(snapshot, "NativeReader", Broken)
    result = run("snapshots", "verify", made.path)
    assert result.exit_code == 1 and "no such column family" in result.stdout


def test_rows_that_do_not_come_by_key_group_are_not_exported(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Backwards(Database):
        def read_sections(self, state: str, groups: range) -> Iterator[Section]:
            for section in super().read_sections(state, groups):
                yield replace(section, rows=section.rows.take(pa.array(range(section.rows.num_rows)[::-1])))

    monkeypatch.setattr(snapshot, "NativeReader", Backwards)
    result = run("savepoint", "export", made.path, tmp_path / "savepoint")
    assert result.exit_code == 2 and "order of their key-groups" in result.stderr


def test_rows_are_not_counted_by_indexes(made: Made) -> None:
    found = run_json("snapshots", "show", made.path)["operators"]["counting"]
    assert [state["rows"] for state in found["states"]] == [None]
    assert {file["form"] for piece in found["pieces"] for file in piece["files"]} == {"rocksdb"}


def test_they_are_compared_and_exported(made: Made, tmp_path: Path) -> None:
    [state] = run_json("snapshots", "diff", made.path)["states"]
    assert (state["added"], state["removed"], state["changed"], state["unchanged"]) == (1, 0, 1, 299)
    run_json("savepoint", "export", made.path, tmp_path / "savepoint")
    assert run_json("snapshots", "verify", tmp_path / "savepoint")["ok"]
    [state] = run_json("snapshots", "diff", made.path, tmp_path / "savepoint")["states"]
    assert state["unchanged"] == 301
