"""`tidegate savepoint create` and `export`."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

import tidegate as tg
from tests.jobs import build_ledger, until
from tests.unit.cli.made import GONE, Made, run, run_json
from tidegate.store.local import LocalStore
from tidegate.store.savepoints import SavepointInfo, answer_request, open_requests
from tidegate.testing.processes import ProcessJob

BASE: dict[str, dict[str, Any]] = {
    "count": {f"k{i}": i for i in range(300)},
    "scores": {f"k{i}": {"a": i / 2} for i in range(50)},
}


@pytest.fixture
def made(tmp_path: Path) -> Made:
    made = Made(tmp_path / "snapshots")
    made.write(3, BASE, items=range(10))
    made.write(4, {"count": {"k1": 1000, "new": 5, "k2": GONE}, "scores": {"k3": GONE}}, on=3, items=range(5))
    return made


@pytest.mark.parametrize("epoch", [3, 4])
def test_an_export_is_the_same_state_in_one_file_per_piece(made: Made, tmp_path: Path, epoch: int) -> None:
    to = tmp_path / "savepoint"
    made_one = run_json("savepoint", "export", made.folder, to, "--epoch", epoch)
    assert made_one["epoch"] == epoch
    found = run_json("snapshots", "show", to)
    assert found["savepoint"]["versions"].keys() >= {"tidegate", "python"}
    assert [len(piece["files"]) for piece in found["operators"]["counting"]["pieces"]] == [1, 1]
    assert made_one["bytes"] == found["bytes"]
    assert run_json("snapshots", "verify", to)["ok"]
    compared = run_json("snapshots", "diff", made.path, to, "--epochs", epoch, epoch)
    assert compared["structure"] == []
    assert [(each["added"], each["removed"], each["changed"]) for each in compared["states"]] == [(0, 0, 0)] * 3
    assert [each["unchanged"] for each in compared["states"]] == ([300, 50, 10] if epoch == 3 else [300, 49, 5])


def test_the_newest_is_exported_by_default_and_a_savepoint_can_be_moved(made: Made, tmp_path: Path) -> None:
    result = run("savepoint", "export", made.path, tmp_path / "savepoint")
    assert result.exit_code == 0 and "savepoint of epoch 4" in result.stdout
    os.rename(tmp_path / "savepoint", tmp_path / "moved")
    assert run("snapshots", "verify", tmp_path / "moved").exit_code == 0
    assert run("savepoint", "export", tmp_path / "moved", tmp_path / "again").exit_code == 0


def test_large_chains_are_merged_block_by_block(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.state.merging.BLOCK_ROWS", 50)
    monkeypatch.setattr("tidegate.state.cutting.SECTION_ROWS", 5)
    assert run("savepoint", "export", made.path, tmp_path / "savepoint").exit_code == 0
    assert run_json("snapshots", "verify", tmp_path / "savepoint")["ok"]
    compared = run_json("snapshots", "diff", made.path, tmp_path / "savepoint")
    assert [each["unchanged"] for each in compared["states"]] == [300, 49, 5]


def test_nothing_is_exported_into_a_folder_that_is_not_empty(made: Made, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    result = run("savepoint", "export", made.path, tmp_path / "full")
    assert result.exit_code == 2 and "not empty" in result.stderr
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["letter.txt"]


def test_a_corrupt_snapshot_is_not_exported(made: Made, tmp_path: Path) -> None:
    path = made.path / next(made.manifests[4].files()).name
    content = bytearray(path.read_bytes())
    content[300] ^= 1
    path.write_bytes(content)
    for epoch in (3, 4):
        result = run("savepoint", "export", made.path, tmp_path / "savepoint", "--epoch", epoch)
        assert result.exit_code == 2 and "checksum" in result.stderr
        assert not [path for path in (tmp_path / "savepoint").rglob("*") if path.is_file()]


def test_create_asks_the_job_and_waits_for_its_answer(made: Made, tmp_path: Path) -> None:
    made.store.create("attempts/0000000001", b"{}")
    asked: list[str] = []

    def answer() -> None:
        store = LocalStore(made.path)
        while not asked:
            for request in open_requests(store, now_ms=0):
                asked.append(request.to)
                answer_request(store, request.id, SavepointInfo(path=request.to, epoch=7, bytes=123))

    job = threading.Thread(target=answer)
    job.start()
    try:
        found = run_json("savepoint", "create", made.folder, tmp_path / "to", "--timeout", 30)
    finally:
        asked.append("over")
        job.join()
    assert asked[0] == str(tmp_path / "to")
    assert found == {"path": str(tmp_path / "to"), "epoch": 7, "bytes": 123, "to_commit": 0}
    assert made.store.list("requests") == []


def test_a_job_that_does_not_run_is_not_waited_for_without_end(made: Made, tmp_path: Path) -> None:
    made.store.create("attempts/0000000001", b"{}")
    result = run("savepoint", "create", made.path, tmp_path / "to", "--timeout", 0.3)
    assert result.exit_code == 2 and "does it run?" in result.stderr
    assert made.store.list("requests") == []


def test_a_running_job_makes_a_savepoint_for_another_process(tmp_path: Path) -> None:
    job = ProcessJob("asked", slots=2, snapshots=tg.Snapshots(to=str(tmp_path / "snapshots"), every="200 ms"))
    build_ledger(job, tg.sinks.parquet(tmp_path / "out"), rows=None, rate=5_000)
    handle = job.start()
    try:
        until(lambda: list((tmp_path / "snapshots").rglob("attempts/" + "[0-9]" * 10)), "an attempt was claimed")
        found = run_json("savepoint", "create", tmp_path / "snapshots", tmp_path / "savepoint", "--timeout", 60)
    finally:
        handle.cancel()
    assert found["epoch"] >= 1
    assert run_json("snapshots", "verify", tmp_path / "savepoint")["ok"]
