"""Savepoints of jobs on plain processes: taken while they run, when they stop and by request; moved; begun with."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tidegate as tg
from tests.jobs import build_ledger, check_clean, check_ledger, check_order, committed, completed, until
from tests.unit.runtime.conftest import Bench
from tidegate.errors import AlreadyExists, JobError, JobFailed, TidegateError
from tidegate.store.layout import job_address
from tidegate.store.savepoints import find_restore_point
from tidegate.testing.processes import ProcessJob

ROWS = 20_000


def ledger(
    bench: Bench,
    *,
    slots: int = 2,
    to: str = "snapshots",
    every: Any = "100 ms",
    rate: float = 5_000,
    retain: int = 2,
    **rest: Any,
) -> tg.Handle:
    """Of `ROWS` records; it goes on at its rate until the gate is opened."""
    job = ProcessJob(
        "job",
        slots=slots,
        restart=tg.FixedDelay(attempts=20, delay_ms=0),
        snapshots=tg.Snapshots(to=str(bench.folder / to), every=every, retain=retain),
        **rest,
    )
    build_ledger(job, tg.sinks.parquet(bench.out), rows=ROWS, rate=rate, gate=bench.folder / "gate")
    return bench.start(job)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def check_finishes(bench: Bench, handle: tg.Handle, to: str) -> None:
    bench.open_gate()
    assert handle.wait(60) is tg.Status.FINISHED
    check_ledger(committed(bench.out), ROWS)
    check_clean(bench.folder / to, "job", bench.out)


def test_a_savepoint_of_a_running_job_is_begun_with_at_another_parallelism(bench: Bench) -> None:
    handle = ledger(bench, every=None)
    until(lambda: handle.status is tg.Status.RUNNING, "the job to run")
    until(lambda: sum(counts["records_in"] for counts in handle.metrics.values()), "records", handle=handle)
    info = handle.savepoint(str(bench.folder / "sp"))
    assert handle.status is tg.Status.RUNNING
    assert info.path == str(bench.folder / "sp") and info.bytes > 0
    assert completed(handle) == [info.epoch] and handle.epochs[-1].full
    assert handle.cancel() is tg.Status.CANCELLED
    before = committed(bench.out)
    assert 0 < len(before) < ROWS
    shutil.rmtree(bench.folder / "snapshots")  # nothing in the savepoint refers to it
    (bench.folder / "sp").rename(bench.folder / "moved")

    again = ledger(bench, slots=3, to="elsewhere", restore_from=str(bench.folder / "moved"))
    check_finishes(bench, again, "elsewhere")
    assert again.attempts[0].restored_epoch == info.epoch
    assert again.attempts[0].restored_from == (bench.folder / "moved").as_uri()
    assert again.epochs[0].epoch > info.epoch
    assert committed(bench.out)[: len(before)] == before


@pytest.mark.parametrize("drain", [False, True])
def test_a_job_that_is_stopped_with_a_savepoint_goes_on_from_it(bench: Bench, drain: bool) -> None:
    handle = ledger(bench)
    until(lambda: completed(handle), "a snapshot", handle=handle)
    assert handle.stop(savepoint=str(bench.folder / "sp"), drain=drain) is tg.Status.STOPPED
    point = find_restore_point(str(bench.folder / "sp"))
    assert point.manifest.epoch == handle.epochs[-1].epoch
    assert point.manifest.ending == ("drain" if drain else "stop")
    check_clean(bench.snapshots, "job", bench.out)
    before = contents(bench.folder / "sp")

    again = ledger(bench, slots=1, to="elsewhere", restore_from=str(bench.folder / "sp" / "savepoint.json"))
    check_finishes(bench, again, "elsewhere")
    assert contents(bench.folder / "sp") == before, "it isn't ours to touch"


def test_a_savepoint_says_what_is_in_it(bench: Bench) -> None:
    handle = ledger(bench)
    info = handle.savepoint(str(bench.folder / "sp"))
    manifest = find_restore_point(str(bench.folder / "sp")).manifest
    assert manifest.savepoint is not None
    assert manifest.job == "job" and manifest.key_group_count == 128
    assert {("number", "keyed"), ("total", "keyed")} <= {
        (state.name, state.kind) for state in manifest.operators["ledger"].states
    }
    assert "Logical graph" in manifest.savepoint.graph and "Physical plan: 2 slots" in manifest.savepoint.graph
    assert {"tidegate", "python"} <= manifest.savepoint.versions.keys()
    assert set(manifest.savepoint.operator_bytes) == set(manifest.operators)
    assert sum(manifest.savepoint.operator_bytes.values()) == info.bytes
    assert all(len(piece.files) <= 1 for entry in manifest.operators.values() for piece in entry.pieces)
    assert (bench.folder / "sp").stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in (bench.folder / "sp").rglob("*") if path.is_file())


def test_the_same_program_can_be_started_again_and_again(bench: Bench) -> None:
    first = ledger(bench)
    until(lambda: completed(first), "a snapshot", handle=first)
    first.stop(savepoint=str(bench.folder / "sp"))
    epochs = [first.epochs[-1].epoch]
    for slots, end in ((3, tg.Handle.stop), (2, tg.Handle.cancel)):
        handle = ledger(bench, slots=slots, to="elsewhere", restore_from=str(bench.folder / "sp"))
        until(lambda handle=handle: completed(handle), "a snapshot", handle=handle)
        end(handle)
        assert handle.attempts[0].restored_epoch >= epochs[-1]
        epochs.append(completed(handle)[-1])
    last = ledger(bench, to="elsewhere")
    check_finishes(bench, last, "elsewhere")
    assert last.attempts[0].restored_from is None


def test_a_claimed_savepoint_is_gone_once_it_isnt_needed(bench: Bench) -> None:
    first = ledger(bench)
    first.stop(savepoint=str(bench.folder / "sp"))
    second = ledger(bench, to="elsewhere", every="1 h", restore_from=str(bench.folder / "sp"), claim=True)
    until(lambda: second.status is tg.Status.RUNNING, "the job to run", handle=second)
    os.kill(second.attempts[-1].slots[0], signal.SIGKILL)
    until(lambda: len(second.attempts) == 2 and second.status is tg.Status.RUNNING, "a restart", handle=second)
    assert second.attempts[-1].restored_from is not None, "there is no snapshot of its own yet"
    second.snapshot()
    until(lambda: not (bench.folder / "sp").exists(), "the end of the savepoint", handle=second)
    second.cancel()
    third = ledger(bench, to="elsewhere", restore_from=str(bench.folder / "sp"), claim=True)
    check_finishes(bench, third, "elsewhere")


def test_snapshots_of_another_run_and_a_savepoint_are_a_contradiction(bench: Bench) -> None:
    first = ledger(bench)
    until(lambda: completed(first), "a snapshot", handle=first)
    first.stop(savepoint=str(bench.folder / "sp"))
    refused = ledger(bench, restore_from=str(bench.folder / "sp"))
    with pytest.raises(JobFailed, match=r"RestoreError: the job has snapshots of its own .*Snapshots\(to=…\)"):
        refused.wait(60)
    assert refused.attempts == []
    check_finishes(bench, ledger(bench), "snapshots")


def test_a_path_with_nothing_there_is_told_before_anything_is_deployed(bench: Bench) -> None:
    handle = ledger(bench, restore_from=str(bench.folder / "nowhere"))
    with pytest.raises(JobFailed, match=r"neither a savepoint .* nor a job's folder of snapshots .*: nothing is there"):
        handle.wait(60)
    assert handle.attempts == []
    with pytest.raises(JobError, match="no restore_from"):
        ledger(bench, claim=True)


def test_another_jobs_snapshots_can_be_begun_with(bench: Bench) -> None:
    first = ledger(bench)
    until(lambda: completed(first), "a snapshot", handle=first)
    first.stop()
    again = ledger(bench, slots=3, to="elsewhere", restore_from=str(bench.folder / "snapshots" / "job"))
    check_finishes(bench, again, "elsewhere")
    assert again.attempts[0].restored_epoch == first.epochs[-1].epoch


def test_further_snapshots_and_failures_after_a_savepoint_change_nothing(bench: Bench) -> None:
    """docs/promises.md, row 3: retain 1; savepoint; incremental; restore."""
    handle = ledger(bench, retain=1)
    until(lambda: completed(handle), "a snapshot", handle=handle)
    info = handle.savepoint(str(bench.folder / "sp"))
    before = contents(bench.folder / "sp")
    until(lambda: completed(handle)[-1] > info.epoch + 2, "further snapshots", handle=handle)
    os.kill(handle.attempts[-1].slots[1], signal.SIGKILL)
    until(lambda: len(handle.attempts) == 2 and handle.status is tg.Status.RUNNING, "a restart", handle=handle)
    assert handle.attempts[-1].restored_epoch > info.epoch
    check_finishes(bench, handle, "snapshots")
    assert contents(bench.folder / "sp") == before
    point = find_restore_point(str(bench.folder / "sp"))
    for file in point.manifest.files():
        assert point.store.size(file.name) == file.bytes


def test_a_folder_in_use_is_refused_and_the_job_goes_on(bench: Bench) -> None:
    handle = ledger(bench)
    (bench.folder / "sp").mkdir()
    (bench.folder / "sp" / "mine").touch()
    for ask in (lambda to: handle.savepoint(to), lambda to: handle.stop(savepoint=to)):
        with pytest.raises(AlreadyExists, match="not empty"):
            ask(str(bench.folder / "sp"))
    seen = len(completed(handle))
    until(lambda: len(completed(handle)) > seen, "another snapshot", handle=handle)
    assert os.listdir(bench.folder / "sp") == ["mine"]
    handle.cancel()
    with pytest.raises(TidegateError, match="is cancelled: no savepoint was taken"):
        handle.savepoint(str(bench.folder / "other"))
    check_order(committed(bench.out))


REQUEST = """
import sys
from tidegate.store.savepoints import request_savepoint, wait_for_savepoint
job, to = sys.argv[1:]
info = wait_for_savepoint(job, request_savepoint(job, to))
print(info.epoch, info.path)
"""


def test_another_process_asks_for_a_savepoint(bench: Bench) -> None:
    handle = ledger(bench)
    until(lambda: handle.status is tg.Status.RUNNING, "the job to run")
    job = job_address(str(bench.snapshots), "job")
    asked = subprocess.run(
        [sys.executable, "-c", REQUEST, job, "sp"], cwd=bench.folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert asked.returncode == 0, asked.stderr
    epoch, path = asked.stdout.split()
    assert path == str(bench.folder / "sp")
    assert find_restore_point(path).manifest.epoch == int(epoch)
    assert list((bench.snapshots / "job" / "requests").iterdir()) == []
    assert handle.status is tg.Status.RUNNING
