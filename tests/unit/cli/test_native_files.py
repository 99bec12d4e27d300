"""Files in a backend's own form: their bytes are verified as they are, their rows come from snapshots/reading.py.

Here row files stand in for them: the manifest calls them native, and whoever reads their rows must go through
`restored_rows`, which in this test knows what they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.unit.cli.made import COUNTS, GROUPS, Made, run, run_json
from tidegate.hashing import hash_columns
from tidegate.keygroups import groups_of
from tidegate.snapshots.manifest import Manifest, PieceEntry
from tidegate.snapshots.reading import restored_rows

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


def rows_of_database(manifest: Manifest, operator: str, **rest: Any) -> Mapping[str, Iterable[pa.RecordBatch]]:
    """By growing key-group, as a database has them."""
    found = restored_rows(in_form(manifest, "rows"), operator, **rest)
    return {state: by_group(list(batches)) for state, batches in found.items()}


def by_group(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    if not batches:
        return []
    rows = pa.concat_batches(batches)
    groups = groups_of(hash_columns([rows.column("key")]), GROUPS)
    return [rows.take(pa.array(groups.argsort(kind="stable")))]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    for module in ("cli.verifying", "snapshots.exporting"):
        monkeypatch.setattr(f"tidegate.{module}.restored_rows", rows_of_database)
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
    def of_the_first(manifest: Manifest, operator: str, *, subtask: int, **rest: Any) -> Any:
        return rows_of_database(manifest, operator, subtask=0, **rest)

    monkeypatch.setattr("tidegate.cli.verifying.restored_rows", of_the_first)
    result = run("snapshots", "verify", made.path, "--json")
    assert result.exit_code == 1
    [problem] = json.loads(result.stdout)["problems"]
    assert problem["what"].startswith("subtask 1: state 'count'") and "belong elsewhere" in problem["what"]


def test_a_database_that_can_not_be_read_is_a_problem_and_not_a_traceback(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **rest: Any) -> Any:
        raise OSError("no such column family")

    monkeypatch.setattr("tidegate.cli.verifying.restored_rows", broken)
    result = run("snapshots", "verify", made.path)
    assert result.exit_code == 1 and "no such column family" in result.stdout


def test_rows_that_do_not_come_by_key_group_are_not_exported(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def backwards(manifest: Manifest, operator: str, **rest: Any) -> Any:
        return {
            state: [batch.take(pa.array(range(batch.num_rows)[::-1])) for batch in batches]
            for state, batches in rows_of_database(manifest, operator, **rest).items()
        }

    monkeypatch.setattr("tidegate.snapshots.exporting.restored_rows", backwards)
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
