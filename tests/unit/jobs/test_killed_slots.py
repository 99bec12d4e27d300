"""Slots that crash, are killed, are stopped or come back from the dead: the committed output doesn't change."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import tidegate as tg
from tests.jobs import alive, build_ledger, check_clean, check_ledger, check_order, committed, completed, ledger_of, until
from tests.unit.jobs.conftest import Bench
from tidegate.control.launch import SlotLaunch
from tidegate.driver import coordinator
from tidegate.driver.deployment import Deployer
from tidegate.testing.processes import ProcessDeployer, ProcessDeployment, ProcessJob
from tidegate.testing.scripted import AwaitSnapshot, Crash, Kill, Pause, ScriptedSource

QUICK = tg.Tuning(heartbeat="50 ms", heartbeat_timeout="1500 ms")


class Number(tg.KeyedProcess):
    number = tg.value("long", default=0)

    def process(self, record: Any, ctx: Any) -> Any:
        self.number.set(self.number.get() + 1)
        yield record.key, self.number.get(), record.text


def test_crashes_written_as_data_change_nothing(bench: Bench) -> None:
    """A failure before any snapshot, one behind a snapshot, a kill behind one, and one at the very end."""
    scripts: list[list[Any]] = [
        [("a", "1"), ("b", "1"), Crash(times=2), ("a", "2"), AwaitSnapshot(times=2), ("a", "3"), Kill(), ("b", "2")],
        [("c", "1"), Pause("20 ms"), ("c", "2"), AwaitSnapshot(), ("d", "1"), Crash(), ("c", "3"), Kill()],
    ]
    source = ScriptedSource(*scripts, schema="key string, text string", memory=bench.folder / "marks")

    def build(job: ProcessJob) -> None:
        stream = job.source("in", source).key_by("key")
        stream.process("number", Number(), returns="key string, number long, text string").to(
            "out", tg.sinks.parquet(bench.out)
        )

    handle = bench.finish(build)
    rows = committed(bench.out)
    check_order(rows)
    assert sorted(rows) == [
        ("a", 1, "1"),
        ("a", 2, "2"),
        ("a", 3, "3"),
        ("b", 1, "1"),
        ("b", 2, "2"),
        ("c", 1, "1"),
        ("c", 2, "2"),
        ("c", 3, "3"),
        ("d", 1, "1"),
    ]
    assert len(list((bench.folder / "marks").iterdir())) == 5, "every crash happened"
    assert 3 <= len(handle.failures) <= 5, "two that happen at once are one failure"
    assert len(handle.attempts) == len(handle.failures) + 1
    check_clean(bench.snapshots, "job", bench.out)


@pytest.mark.parametrize("seed", range(2))
def test_a_killed_slot_is_replaced_and_the_output_is_that_of_a_run_without_faults(bench: Bench, seed: int) -> None:
    rows, kills, chance = 30_000, 3, random.Random(seed)
    handle = bench.ledger(rows=rows, rate=5_000, slots=2, gated=True)
    for kill in range(kills):
        until(
            lambda kill=kill: (
                len(handle.attempts) == kill + 1
                and handle.status is tg.Status.RUNNING
                and any(report.attempt == kill + 1 for report in handle.epochs)
            ),
            "an epoch of the new attempt",
            handle=handle,
        )
        time.sleep(chance.uniform(0, 0.15))  # somewhere in the epoch's life, or right behind it
        os.kill(handle.attempts[-1].slots[chance.randrange(2)], signal.SIGKILL)
        until(lambda kill=kill: len(handle.failures) == kill + 1, "the loss to be noticed", handle=handle)
    bench.open_gate()
    assert handle.wait("1 minute") is tg.Status.FINISHED, f"seed {seed}"
    assert all("was lost" in failure.message for failure in handle.failures)
    check_ledger(committed(bench.out), rows)
    check_clean(bench.snapshots, "job", bench.out)


def test_a_slot_that_says_nothing_is_given_up(bench: Bench) -> None:
    rows = 30_000
    handle = bench.ledger(rows=rows, rate=5_000, tuning=QUICK, gated=True)
    until(lambda: completed(handle), "a snapshot", handle=handle)
    stopped = handle.attempts[-1].slots[1]
    os.kill(stopped, signal.SIGSTOP)
    bench.open_gate()
    assert handle.wait("1 minute") is tg.Status.FINISHED
    assert [failure.message.split(":")[0] for failure in handle.failures] == ["slots [1] sent nothing for 1500 ms"]
    assert not alive(stopped)
    check_ledger(committed(bench.out), rows)
    check_clean(bench.snapshots, "job", bench.out)


class _Unreachable(ProcessDeployment):
    """Slots that nobody can end from outside, as behind a cut network."""

    def cancel(self) -> None:
        """Nobody hears it."""


class _UnreachableDeployer(ProcessDeployer):
    def deploy(self, attempt: int) -> ProcessDeployment:
        return _Unreachable(self._slots, self._payload, attempt, self._coordinator)


class UnreachableJob(ProcessJob):
    def _deployer(self, launch: SlotLaunch, coordinator: tuple[str, int]) -> Deployer:
        return _UnreachableDeployer(launch, coordinator)


def files_in(*folders: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for folder in folders for path in folder.rglob("*") if path.is_file()}


def test_a_zombie_ends_itself_and_changes_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/promises.md, row 13: an old slot is stopped, the new attempt commits, then the old one goes on."""
    monkeypatch.setattr(coordinator, "GONE_TIMEOUT_MS", 200)
    rows = 20_000
    handle = bench.ledger(rows=rows, rate=5_000, tuning=QUICK, make=UnreachableJob, gated=True)
    until(lambda: completed(handle), "a snapshot", handle=handle)
    zombies = list(handle.attempts[-1].slots.values())
    # In the middle of an epoch: a trigger is on its way to it, or a marker, or files are being written.
    until(lambda: handle.epochs[-1].completed_ms is None, "an epoch under way", handle=handle)
    for pid in zombies:
        os.kill(pid, signal.SIGSTOP)
    try:
        until(
            lambda: [epoch for epoch in handle.epochs if epoch.attempt == 2 and epoch.completed_ms],
            "a new commit",
            handle=handle,
        )
        assert all(map(alive, zombies))
    finally:
        for pid in zombies:
            os.kill(pid, signal.SIGCONT)
    until(lambda: not any(map(alive, zombies)), "the zombies to end themselves")
    bench.open_gate()
    assert handle.wait("1 minute") is tg.Status.FINISHED
    assert len(handle.attempts) == 2
    check_ledger(committed(bench.out), rows)


def test_a_zombie_that_wakes_up_after_the_end_leaves_the_output_as_it_is(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "GONE_TIMEOUT_MS", 200)
    rows = 10_000
    handle = bench.ledger(rows=rows, rate=5_000, tuning=QUICK, make=UnreachableJob, gated=True)
    until(lambda: completed(handle), "a snapshot", handle=handle)
    zombies = list(handle.attempts[-1].slots.values())
    for pid in zombies:
        os.kill(pid, signal.SIGSTOP)
    bench.open_gate()
    try:
        assert handle.wait("1 minute") is tg.Status.FINISHED
        committed_files = {path: at for path, at in files_in(bench.out).items() if "_tidegate" not in path}
        kept = files_in(bench.snapshots)
        assert all(map(alive, zombies))
    finally:
        for pid in zombies:
            os.kill(pid, signal.SIGCONT)
    until(lambda: not any(map(alive, zombies)), "the zombies to end themselves")
    assert {path: at for path, at in files_in(bench.out).items() if "_tidegate" not in path} == committed_files
    now = files_in(bench.snapshots)
    assert kept.items() <= now.items(), "what was there is as it was"
    check_ledger(committed(bench.out), rows)


def test_slots_end_themselves_when_their_driver_is_gone(tmp_path: Path) -> None:
    program = (
        "import sys, time, tidegate as tg\n"
        "from tests.jobs import build_ledger, completed, until\n"
        "from tidegate.testing.processes import ProcessJob\n"
        "job = ProcessJob('orphans', slots=2, snapshots=tg.Snapshots(to=sys.argv[1] + '/snapshots', every='100 ms'))\n"
        "handle = build_ledger(job, tg.sinks.parquet(sys.argv[1] + '/out'), rows=None, rate=2_000).start()\n"
        "until(lambda: completed(handle), 'a snapshot', handle=handle)\n"
        "print(*handle.attempts[-1].slots.values(), flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        slots = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(slots) == 2 and all(map(alive, slots))
        driver.kill()
    until(lambda: not any(map(alive, slots)), "the slots to end themselves")
    # What they had committed is there, and a new driver goes on from it.
    rows = 20_000
    job = build_ledger(
        ProcessJob("orphans", slots=1, snapshots=tg.Snapshots(to=str(tmp_path / "snapshots"))),
        tg.sinks.parquet(tmp_path / "out"),
        rows=rows,
    )
    assert job.run() is tg.Status.FINISHED
    check_ledger(committed(tmp_path / "out"), rows)
    check_clean(tmp_path / "snapshots", "orphans", tmp_path / "out")


@pytest.mark.parametrize("backend", [tg.Heap(), tg.RocksDB()], ids=["heap", "rocksdb"])
def test_two_jobs_of_one_name_that_share_a_sinks_folder_leave_each_others_output_alone(
    bench: Bench, tmp_path: Path, backend: Any
) -> None:
    """Each has snapshots of its own, and so attempts of its own: those of one are no older than those of the other."""
    rows = 6_000

    def started(name: str, every: str | None) -> tg.Handle:
        job = ProcessJob(
            "job",
            slots=1,
            backend=backend,
            restart=tg.FixedDelay(attempts=9, delay=0),
            tuning=QUICK,
            snapshots=tg.Snapshots(to=str(tmp_path / name), every=every),
        )
        return bench.start(
            build_ledger(
                job, tg.sinks.parquet(bench.out, row_group_rows=50), rows=rows, rate=3_000, gate=tmp_path / f"gate {name}"
            )
        )

    other = started("other", None)
    until(lambda: [*(bench.out / "_tidegate").glob("*.parquet")], "output that is pending until the end", handle=other)
    one = started("one", "60 ms")
    for kill in range(2):
        until(
            lambda kill=kill: (
                len(one.attempts) == kill + 1
                and one.status is tg.Status.RUNNING
                and any(each.attempt == kill + 1 and each.completed_ms is not None for each in one.epochs)
            ),
            "a snapshot",
            handle=one,
        )
        os.kill(one.attempts[-1].slots[0], signal.SIGKILL)
        until(lambda kill=kill: len(one.failures) == kill + 1, "the loss", handle=one)
    for name in ("one", "other"):
        (tmp_path / f"gate {name}").touch()
    assert [handle.wait("1 minute") for handle in (one, other)] == [tg.Status.FINISHED] * 2
    assert other.failures == []
    assert sorted(committed(bench.out)) == sorted(2 * ledger_of(rows))
    for name in ("one", "other"):
        check_clean(tmp_path / name, "job", bench.out)
