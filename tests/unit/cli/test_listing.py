"""`tidegate snapshots list` and `show`, and what all commands have in common."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from tests.unit.cli.made import GONE, GROUPS, Made, run, run_json
from tidegate.snapshots.savepoints import export_snapshot
from tidegate.snapshots.snapshot import Snapshot

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    made = Made(tmp_path / "snapshots")
    made.write(3, {"count": {f"k{i}": i for i in range(100)}, "scores": {"k1": {"a": 1.0}}}, items=[7, 8, 9])
    made.write(5, {"count": {"k1": 1000, "k2": GONE}}, on=3, items=[10])
    made.write(6, {"count": {"k1": 1}}, ending="stopped")
    return made


def test_snapshots_are_listed_with_what_they_share(made: Made) -> None:
    rows = run_json("snapshots", "list", made.path)["snapshots"]
    assert [(row["epoch"], row["attempt"], row["ending"], row["job"]) for row in rows] == [
        (3, 1, None, "job"),
        (5, 1, None, "job"),
        (6, 1, "stopped", "job"),
    ]
    base = sum(file.bytes for file in made.manifests[3].files())
    delta = sum(file.bytes for file in made.manifests[5].files()) - base
    last = sum(file.bytes for file in made.manifests[6].files())
    assert [(row["bytes"], row["shared_bytes"], row["new_bytes"]) for row in rows] == [
        (base, 0, base),
        (base + delta, base, delta),
        (last, 0, last),
    ]
    assert [row["files"] for row in rows] == [2, 2 + len(set(made.manifests[5].files()) - set(made.manifests[3].files())), 1]
    assert rows[0]["created"] == "2023-11-14T22:13:20+00:00"


def test_a_table_for_people_says_the_same(made: Made) -> None:
    result = run("snapshots", "list", made.path)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert str(made.path) in lines[0]
    assert lines[1].split() == ["epoch", "attempt", "created", "size", "files", "shared", "new", "ending"]
    assert [line.split()[0] for line in lines[2:]] == ["3", "5", "6"]
    assert lines[-1].endswith("stopped")


@pytest.mark.parametrize("form", [str, lambda path: path.as_uri(), lambda path: f"{path}/", os.path.relpath])
def test_a_path_may_be_that_of_all_jobs_of_a_job_or_of_a_manifest(made: Made, form: object) -> None:
    assert callable(form)
    for path, epochs in [(made.folder, [3, 5, 6]), (made.path, [3, 5, 6]), (made.manifest_path(5), [5])]:
        if path.suffix == ".json" and form(path).endswith("/"):
            continue
        rows = run_json("snapshots", "list", form(path))["snapshots"]
        assert [row["epoch"] for row in rows] == epochs


def test_within_the_folder_itself_a_short_path_is_enough(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made.path)
    assert run_json("snapshots", "show", ".")["epoch"] == 6
    assert run_json("snapshots", "show", f"manifests/{made.manifest_path(5).name}")["epoch"] == 5
    monkeypatch.chdir(made.path / "manifests")
    assert run_json("snapshots", "show", made.manifest_path(5).name)["epoch"] == 5


def test_a_folder_of_several_jobs_is_listed_whole_and_elsewhere_one_must_be_chosen(made: Made) -> None:
    Made(made.folder, job="another").write(1, {"count": {"x": 1}})
    rows = run_json("snapshots", "list", made.folder)["snapshots"]
    assert [(row["job"], row["epoch"]) for row in rows] == [("another", 1), ("job", 3), ("job", 5), ("job", 6)]
    for command in ("show", "verify", "diff"):
        result = run("snapshots", command, made.folder)
        assert result.exit_code == 2
        assert "2 jobs" in result.stderr and "another" in result.stderr
    assert run("snapshots", "show", made.folder / "another").exit_code == 0


def test_a_savepoint_is_shown_with_its_graph_and_versions(made: Made, tmp_path: Path) -> None:
    from tidegate.store.local import LocalStore

    target = tmp_path / "savepoint"
    export_snapshot(
        Snapshot(made.store, made.manifests[3]),
        LocalStore(target),
        created_ms=1,
        graph="source → counting",
        versions={"tidegate": "1.2.3"},
    )
    assert [row["savepoint"] for row in run_json("snapshots", "list", target)["snapshots"]] == [True]
    for path in (target, target / "savepoint.json"):
        found = run_json("snapshots", "show", path)
        assert found["savepoint"]["versions"] == {"tidegate": "1.2.3"}
        text = run("snapshots", "show", path).stdout
        assert "source → counting" in text and "tidegate 1.2.3" in text
    assert run("snapshots", "verify", target).exit_code == 0


def test_show_tells_all_that_is_in_a_snapshot(made: Made) -> None:
    found = run_json("snapshots", "show", made.path, "--epoch", 3)
    assert (found["job"], found["epoch"], found["key_group_count"]) == ("job", 3, GROUPS)
    operator = found["operators"]["counting"]
    assert operator["parallelism"] == 2
    assert [(state["name"], state["kind"], state["shape"], state["rows"]) for state in operator["states"]] == [
        ("count", "keyed", "value", 100),
        ("scores", "keyed", "map", 1),
        ("offsets", "split", "list", 3),
    ]
    assert operator["states"][0]["type"] == "key string, value int64"
    assert [piece["key_groups"] for piece in operator["pieces"]] == [[0, 8], [8, 16]]
    files = {file["name"]: file["bytes"] for piece in operator["pieces"] for file in piece["files"]}
    assert files == {file.name: file.bytes for file in made.manifests[3].files()}
    text = run("snapshots", "show", made.path, "--epoch", 3).stdout
    for expected in ("counting", "scores", "key string, value int64", "0…8", "8…16", *files):
        assert expected in text


def test_rows_of_a_chain_are_not_guessed(made: Made) -> None:
    states = run_json("snapshots", "show", made.path, "--epoch", 5)["operators"]["counting"]["states"]
    assert [state["rows"] for state in states] == [None, None, 1]


def test_user_text_is_not_taken_for_markup(made: Made) -> None:
    made.write(9, {"count": {"[red]x": 1}}, operator="[bold]odd[/nothing]")
    result = run("snapshots", "show", made.path)
    assert result.exit_code == 0
    assert "operator [bold]odd[/nothing]" in result.stdout


def test_a_manifest_that_can_not_be_read_is_listed_as_such(made: Made) -> None:
    made.manifest_path(5).write_bytes(b"torn")
    result = run("snapshots", "list", made.path, "--json")
    assert result.exit_code == 1
    rows = json.loads(result.stdout)["snapshots"]
    assert "not a whole manifest" in rows[1]["problem"]
    assert [row["epoch"] for row in rows] == [3, 5, 6]
    assert "unreadable" in run("snapshots", "list", made.path).stdout
    shown = run("snapshots", "show", made.path, "--epoch", 5)
    assert shown.exit_code == 2 and "not a whole manifest" in shown.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["snapshots", "list", "nowhere"],
        ["snapshots", "show", "nowhere"],
        ["snapshots", "verify", "nowhere"],
        ["snapshots", "diff", "nowhere", "nowhere"],
        ["savepoint", "create", "nowhere", "to"],
        ["savepoint", "export", "nowhere", "to"],
        ["snapshots", "show", "{path}", "--epoch", "4"],
        ["snapshots", "verify", "{path}", "--epoch", "4"],
        ["snapshots", "verify", "{path}", "--epoch", "3", "--all"],
        ["snapshots", "verify", "{path}", "--epoch", "three"],
        ["snapshots", "diff", "{path}", "{path}", "--epochs", "3", "4"],
        ["snapshots", "diff", "{path}", "--epochs", "3"],
        ["snapshots", "diff", "{path}", "--keys", "-1"],
        ["snapshots", "list", "file://elsewhere/x"],
        ["snapshots", "list", "ftp://elsewhere/x"],
        ["snapshots", "list", "http://[::1/x"],
        ["snapshots", "list", ""],
        ["snapshots", "list", "{path}/manifests/0000000077-a0000000001.json"],
        ["snapshots", "show", "{path}/manifests/0000000077-a0000000001.json"],
        ["snapshots", "show", "{path}/manifests/0000000003-a0000000001.json/x"],
        ["snapshots", "show", "{path}/state"],
        ["savepoint", "export", "{path}", "{path}"],
        ["snapshots", "burn", "{path}"],
    ],
)
def test_what_can_not_be_answered_is_one_line_and_exit_code_2(made: Made, arguments: list[str]) -> None:
    result = run(*(argument.format(path=made.path) for argument in arguments))
    if arguments[:2] == ["snapshots", "list"] and "0000000077" in arguments[2]:
        assert result.exit_code == 1  # a listing says of each what is wrong with it
        return
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    message = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(message) == 1 and len(message[0]) > 20
    assert "Traceback" not in result.stderr


def test_secrets_in_an_address_are_not_shown() -> None:
    result = run(
        "snapshots",
        "list",
        "s3://key:secret@bucket/folder?endpoint_override=127.0.0.1:1&scheme=http&connect_timeout=0.1&request_timeout=0.1",
    )
    assert result.exit_code == 2
    assert "secret" not in result.output


def test_the_command_runs_as_a_program_of_its_own(made: Made) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tidegate.cli.main", "snapshots", "list", str(made.path), "--json"],
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert [row["epoch"] for row in json.loads(done.stdout)["snapshots"]] == [3, 5, 6]
    assert done.stderr == b""
    nowhere = subprocess.run(
        [sys.executable, "-m", "tidegate.cli.main", "snapshots", "verify", "nowhere"],
        check=False,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert nowhere.returncode == 2 and b"Traceback" not in nowhere.stderr


def test_the_script_that_is_installed_is_this_one() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["tidegate"].partition(":")
    assert callable(getattr(import_module(module), function))
