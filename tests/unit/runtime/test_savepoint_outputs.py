"""A savepoint stands by itself with the output, too: what it covers is committed, or can be from wherever it is restored."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tidegate as tg
from tests.jobs import build_ledger, check_ledger, committed, completed, until
from tests.unit.cli.made import run, run_json
from tests.unit.runtime.conftest import Bench
from tidegate.connectors.parquet_sink import OutputFolder, ParquetSink, ParquetSinkWriter
from tidegate.dataflow.contracts import SinkContext, SinkWriter
from tidegate.errors import CommitError, JobFailed, TidegateError
from tidegate.store.committed import committable_count
from tidegate.store.savepoints import find_restore_point
from tidegate.testing.processes import ProcessJob

ROWS = 20_000
BACKENDS = {"heap": tg.heap, "rocksdb": tg.rocksdb}


def ledger(
    bench: Bench,
    out: Path | tg.Sink,
    *,
    to: str = "snapshots",
    gate: str = "gate",
    every: Any = "100 ms",
    backend: str = "heap",
    slots: int = 2,
    make: Any = None,
    memory: Path | None = None,
    restart: Any = None,
    name: str = "out",
    **rest: Any,
) -> tg.Handle:
    job = ProcessJob(
        "job",
        slots=slots,
        restart=restart or tg.FixedDelay(attempts=3, delay_ms=0),
        backend=BACKENDS[backend](),
        snapshots=tg.Snapshots(to=str(bench.folder / to), every=every),
        **rest,
    )
    sink = (
        out
        if isinstance(out, tg.Sink)
        else tg.sinks.parquet(out)
        if make is None
        else make(address=str(out), row_group_rows=65_536, compression="zstd", memory=str(memory))
    )
    build_ledger(job, sink, rows=ROWS, rate=5_000, gate=bench.folder / gate, name=name)
    return bench.start(job)


def finishes(bench: Bench, handle: tg.Handle, *folders: Path, gate: str = "gate") -> None:
    """All that the job and its past wrote is the ledger's, each row once."""
    (bench.folder / gate).touch()
    assert handle.wait(60) is tg.Status.FINISHED
    assert handle.failures == []
    check_ledger([row for folder in folders for row in committed(folder)], ROWS)


def to_commit(path: Path) -> int:
    """How many committables a savepoint carries."""
    manifest = find_restore_point(str(path)).manifest
    return sum(piece.item_counts.get("__committables", 0) for piece in manifest.operators["out"].pieces)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["handle", "stop"])
def test_a_savepoint_is_begun_with_and_the_sink_has_a_new_folder(bench: Bench, how: str, backend: str) -> None:
    first, sp = ledger(bench, bench.out, backend=backend), bench.folder / "sp"
    until(lambda: completed(first), "a snapshot", handle=first)
    if how == "stop":
        first.stop(savepoint=str(sp))
    else:
        epoch = first.savepoint(str(sp)).epoch
        first.cancel()
        for part in bench.out.glob("part-*.parquet"):  # what came after it is computed once more
            if int(part.name.split("-")[2]) > epoch:
                part.unlink()
    before = committed(bench.out)
    bench.out.rename(bench.folder / "moved")  # another machine doesn't have it at all
    assert to_commit(sp) == 0

    again = ledger(bench, bench.folder / "new", to="elsewhere", restore_from=str(sp), backend=backend, slots=3)
    finishes(bench, again, bench.folder / "moved", bench.folder / "new")
    assert committed(bench.folder / "moved") == before


def test_savepoints_that_the_command_line_makes_carry_nothing_that_is_committed(bench: Bench) -> None:
    first = ledger(bench, bench.out)
    until(lambda: completed(first), "a snapshot", handle=first)
    asked, exported = bench.folder / "asked", bench.folder / "exported"
    assert run_json("savepoint", "create", bench.snapshots, asked)["to_commit"] == 0
    first.stop()
    assert run_json("savepoint", "export", bench.snapshots, exported)["to_commit"] == 0
    assert to_commit(asked) == to_commit(exported) == 0
    assert run_json("snapshots", "verify", exported)["ok"]
    bench.out.rename(bench.folder / "moved")
    again = ledger(bench, bench.folder / "new", to="elsewhere", restore_from=str(exported))
    finishes(bench, again, bench.folder / "moved", bench.folder / "new")


@pytest.mark.parametrize("what", ["folder", "manifest"])
def test_a_jobs_own_snapshots_are_begun_with_and_the_sink_has_a_new_folder(bench: Bench, what: str) -> None:
    first = ledger(bench, bench.out)
    until(lambda: len(completed(first)) > 1, "two snapshots", handle=first)
    first.cancel()
    folder = bench.snapshots / "job"
    newest = max((folder / "manifests").iterdir())
    again = ledger(bench, bench.folder / "new", to="elsewhere", restore_from=str(folder if what == "folder" else newest))
    finishes(bench, again, bench.out, bench.folder / "new")


def consume(folder: Path, into: Path) -> None:
    """Takes the committed files away, as who processes them may do at any moment."""
    into.mkdir(exist_ok=True)
    for part in folder.glob("part-*.parquet"):
        part.rename(into / part.name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slot_is_killed_and_committed_files_are_taken_away_all_the_time(bench: Bench, backend: str) -> None:
    taken = bench.folder / "taken"
    handle = ledger(bench, bench.out, backend=backend, make=AttackedSink, memory=bench.folder / "marks")

    def killed_twice_and_restored() -> bool:
        consume(bench.out, taken)
        return len(handle.failures) == 2 and completed(handle)[-1:] > [handle.attempts[-1].restored_epoch or 0]

    until(
        killed_twice_and_restored,
        "two kills and a snapshot",
        handle=handle,
    )
    handle.cancel()
    consume(bench.out, taken)
    again = ledger(bench, bench.out, backend=backend, slots=3)
    finishes(bench, again, taken, bench.out)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackedSink(ParquetSink):
    """Its process is killed twice: right before its first commit, and right behind the first commit of the next attempt."""

    memory: str

    def open(self, context: SinkContext) -> SinkWriter:
        return _AttackedWriter(self, OutputFolder(self.address), context)


class _AttackedWriter(ParquetSinkWriter):
    def __init__(self, sink: AttackedSink, folder: OutputFolder, context: SinkContext) -> None:
        super().__init__(sink, folder, context)
        self._marks = Path(sink.memory)

    def commit(self, committables: Any) -> None:
        if not committables:
            return
        self._strike("before")
        super().commit(committables)
        if self._context.attempt > 1:
            self._strike("behind")

    def _strike(self, name: str) -> None:
        self._marks.mkdir(exist_ok=True)
        try:
            (self._marks / name).touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("how", ["handle", "stop"])
def test_a_slot_is_killed_between_the_completion_of_a_savepoints_epoch_and_its_commit(bench: Bench, how: str) -> None:
    first = ledger(bench, bench.out, every=None, make=AttackedSink, memory=bench.folder / "marks")
    until(lambda: sum(counts["records_in"] for counts in first.metrics.values()), "records", handle=first)
    sp = bench.folder / "sp"
    if how == "stop":
        assert first.stop(savepoint=str(sp)) is tg.Status.STOPPED
        epoch = completed(first)[-1]
    else:
        epoch = first.savepoint(str(sp)).epoch
        first.cancel()
    assert len(first.failures) >= 1 and epoch > completed(first)[0], "that of the first attempt was given up"
    assert find_restore_point(str(sp)).manifest.epoch == epoch and to_commit(sp) == 0
    consume(bench.out, bench.folder / "moved")
    shutil.rmtree(bench.out)
    again = ledger(bench, bench.folder / "new", to="elsewhere", restore_from=str(sp))
    finishes(bench, again, bench.folder / "moved", bench.folder / "new")


DRIVER = """
import os, signal, sys
from pathlib import Path
from tests.unit.runtime import test_savepoint_outputs as outputs
from tests.unit.runtime.conftest import Bench
from tidegate.runtime import hosting
from tidegate.store.catalog import SnapshotCatalog

class Doomed(SnapshotCatalog):
    def commit(self, manifest):
        super().commit(manifest)
        if manifest.epoch == 3:
            os.kill(os.getpid(), signal.SIGKILL)        # it is complete, and nobody was told

hosting.SnapshotCatalog = Doomed
bench = Bench(Path(sys.argv[1]))
outputs.ledger(bench, bench.out, backend=sys.argv[2]).wait()
"""


@pytest.mark.parametrize("backend", ["heap", pytest.param("rocksdb", marks=pytest.mark.long)])
def test_a_driver_is_killed_between_completion_and_commit_and_the_snapshot_is_exported(bench: Bench, backend: str) -> None:
    """Nobody knows whether the output was committed. Two jobs begin with the export, and the job itself goes on."""
    doomed = subprocess.run([sys.executable, "-c", DRIVER, str(bench.folder), backend], timeout=60, check=False)
    assert doomed.returncode == -signal.SIGKILL
    sp = bench.folder / "sp"
    assert run_json("savepoint", "export", bench.snapshots, sp)["to_commit"] == to_commit(sp) > 0
    assert {int(part.name.split("-")[2]) for part in bench.out.glob("part-*")} < {0, 1, 2, 3}, "epoch 3 isn't committed"
    before = sorted(committed(bench.out))
    runs = [("elsewhere", "new", "g1"), ("beyond", "newer", "g2")]
    for to, folder, gate in runs:
        handle = ledger(bench, bench.folder / folder, to=to, gate=gate, restore_from=str(sp), backend=backend)
        finishes(bench, handle, bench.out, bench.folder / folder, gate=gate)
        consume(bench.out, bench.folder / "kept")
        shutil.copytree(bench.folder / "kept", bench.out, dirs_exist_ok=True)
    assert len(before) < len(committed(bench.out))
    consume(bench.out, bench.folder / "gone")  # the job itself: what was committed is no longer where it was
    finishes(bench, ledger(bench, bench.out, backend=backend), bench.folder / "kept", bench.out)


def test_output_that_is_really_gone_is_an_error_at_once(bench: Bench) -> None:
    """Without the receipts, because the whole folder of pending files was deleted."""
    doomed = subprocess.run([sys.executable, "-c", DRIVER, str(bench.folder), "heap"], timeout=60, check=False)
    assert doomed.returncode == -signal.SIGKILL
    assert "nobody knows whether they were committed" in run(
        "savepoint", "export", bench.snapshots, bench.folder / "sp"
    ).stdout.replace("\n", " ")
    shutil.rmtree(bench.out / "_tidegate")
    ways: list[tuple[str, dict[str, Any]]] = [("snapshots", {}), ("elsewhere", {"restore_from": str(bench.folder / "sp")})]
    for to, rest in ways:
        handle = ledger(bench, bench.out, to=to, **rest)
        with pytest.raises(JobFailed, match=rf"can't commit part-out-3-.* in {bench.out}: its pending file .* is gone"):
            handle.wait(60)
        assert len(handle.failures) == 1, "no restart brings it back"


# A sink that is taken out of the program, or gets another name.


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sink_is_taken_out_when_its_output_is_committed(bench: Bench, backend: str) -> None:
    first = ledger(bench, bench.out, backend=backend)
    until(lambda: completed(first), "a snapshot", handle=first)
    first.stop()
    assert committable_count(find_restore_point(str(bench.snapshots / "job")).manifest), "the case is not what it should be"
    assert not tg.plan_restore(_renamed_sink(bench), str(bench.snapshots / "job")).refusals
    again = ledger(bench, bench.folder / "new", name="other", backend=backend)
    finishes(bench, again, bench.out, bench.folder / "new")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sink_is_not_taken_out_while_it_has_output_to_commit(bench: Bench, backend: str) -> None:
    doomed = subprocess.run([sys.executable, "-c", DRIVER, str(bench.folder), backend], timeout=60, check=False)
    assert doomed.returncode == -signal.SIGKILL
    without = ledger(bench, bench.folder / "new", name="other", backend=backend)
    with pytest.raises(JobFailed, match=r"drop_state=\['out'\]"):
        without.wait(60)
    assert tg.plan_restore(_renamed_sink(bench), str(bench.snapshots / "job")).refusals
    finishes(bench, ledger(bench, bench.out, backend=backend), bench.out)


def _renamed_sink(bench: Bench) -> ProcessJob:
    job = ProcessJob("job", slots=2, snapshots=tg.Snapshots(to=str(bench.folder / "nowhere")))
    build_ledger(job, tg.sinks.parquet(bench.folder / "new"), rows=ROWS, name="other")
    return job


# A two-phase sink of a user's own.


@dataclass(frozen=True)
class Ledgers(tg.Sink):
    """Transactions are files. To commit one that isn't prepared is an error, even if it was committed before: the outside
    forgets what is committed. `broken`: there is no commit that works."""

    folder: str
    broken: bool = False

    def open(self, context: SinkContext) -> SinkWriter:
        return _Transactions(self, context)


class _Transactions(SinkWriter):
    def __init__(self, sink: Ledgers, context: SinkContext) -> None:
        self._folder, self._broken, self._context = Path(sink.folder), sink.broken, context
        self._folder.mkdir(exist_ok=True)
        self._rows: list[Any] = []

    def write(self, batch: Any) -> None:
        self._rows += [list(row.values()) for row in batch.to_pylist()]

    def pre_commit(self, epoch: int) -> Any:
        rows, self._rows = self._rows, []
        name = f"{epoch}-{self._context.subtask}-{self._context.attempt}"

        def prepare() -> Any:
            (self._folder / f"{name}.prepared").write_text(json.dumps(rows))
            return (name,)

        return prepare if rows else lambda: ()

    def commit(self, committables: Any) -> None:
        for name in committables:
            if self._broken:
                raise CommitError("the outside is away")
            try:
                (self._folder / f"{name}.prepared").rename(self._folder / f"{name}.committed")
            except FileNotFoundError:
                raise CommitError(f"there is no transaction {name}", final=True) from None


def test_a_sink_of_ones_own_commits_nothing_again_once_the_commit_is_confirmed(bench: Bench) -> None:
    sink, sp = Ledgers(str(bench.folder / "transactions")), bench.folder / "sp"
    first = ledger(bench, sink)
    until(lambda: completed(first), "a snapshot", handle=first)
    first.stop()
    second = ledger(bench, sink, slots=3)  # its own snapshots
    until(lambda: completed(second), "a snapshot", handle=second)
    second.savepoint(str(sp))
    second.cancel()
    for name in (bench.folder / "transactions").glob("*.committed"):
        name.rename(name.with_suffix(".kept"))
    third = ledger(bench, sink, to="elsewhere", restore_from=str(sp))
    third.stop()
    assert first.failures == second.failures == third.failures == []


@pytest.mark.parametrize("restart", [tg.NoRestart(), tg.FixedDelay(attempts=1, delay_ms=0)])
def test_a_savepoint_whose_commit_fails_is_none(bench: Bench, restart: Any) -> None:
    handle = ledger(bench, Ledgers(str(bench.folder / "transactions"), broken=True), every=None, restart=restart)
    until(lambda: sum(counts["records_in"] for counts in handle.metrics.values()), "records", handle=handle)
    with pytest.raises(TidegateError, match=r"before|the outside is away"):
        handle.savepoint(str(bench.folder / "sp"))
    with pytest.raises(JobFailed, match="the outside is away"):
        handle.wait(60)
    assert not (bench.folder / "sp").exists() or not list((bench.folder / "sp").rglob("*.json"))
