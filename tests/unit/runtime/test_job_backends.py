"""A job gives the same output whatever its backend is, through kills, and when the backend or the parallelism changes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tidegate as tg
from tests.jobs import build_ledger, check_clean, check_ledger, committed, completed, until
from tests.unit.runtime.conftest import Bench
from tidegate.runtime.settings import Backend
from tidegate.store.catalog import SnapshotCatalog
from tidegate.store.layout import job_address
from tidegate.store.manifest import Manifest
from tidegate.store.opening import open_store
from tidegate.testing.processes import ProcessJob

ROWS = 20_000
BACKENDS: dict[str, Backend] = {"heap": tg.Heap(), "rocksdb": tg.RocksDB(memory="16 MB")}


def ledger(
    bench: Bench, backend: str, *, slots: int = 2, rate: float = 5_000, every: Any = "100 ms", **snapshots: Any
) -> tg.Handle:
    job = ProcessJob(
        "job",
        slots=slots,
        restart=tg.FixedDelay(attempts=20, delay=0),
        backend=BACKENDS[backend],
        snapshots=tg.Snapshots(to=str(bench.snapshots), every=every, **snapshots),
    )
    build_ledger(job, tg.sinks.parquet(bench.out), rows=ROWS, rate=rate, gate=bench.folder / "gate")
    return bench.start(job)


def newest(bench: Bench) -> Manifest:
    catalog = SnapshotCatalog(open_store(job_address(str(bench.snapshots), "job")))
    return catalog.load(catalog.epochs()[-1])


def forms(bench: Bench) -> set[str]:
    return {file.form for piece in newest(bench).operators["ledger"].pieces for file in piece.files}


def finish(bench: Bench, handle: tg.Handle) -> None:
    bench.open_gate()
    assert handle.wait("1 minute") is tg.Status.FINISHED
    check_ledger(committed(bench.out), ROWS)
    check_clean(bench.snapshots, "job", bench.out)


def more(handle: tg.Handle, count: int) -> None:
    before = len(completed(handle))
    until(lambda: len(completed(handle)) >= before + count, f"{count} more snapshots", handle=handle)


@pytest.mark.parametrize("backend", BACKENDS)
def test_killed_slots_come_back_with_their_state(bench: Bench, backend: str) -> None:
    handle = ledger(bench, backend)
    for _ in range(3):
        more(handle, 3)
        assert forms(bench) == {"rows" if backend == "heap" else "rocksdb"}
        attempts = len(handle.attempts)
        os.kill(handle.attempts[-1].slots[0], signal.SIGKILL)
        until(
            lambda attempts=attempts: len(handle.attempts) > attempts and handle.status is tg.Status.RUNNING,
            "the next attempt",
            handle=handle,
        )
    finish(bench, handle)


def test_only_new_files_of_rocksdb_are_uploaded(bench: Bench) -> None:
    handle = ledger(bench, "rocksdb")
    more(handle, 4)
    pieces = newest(bench).operators["ledger"].pieces
    files = [file for piece in pieces for file in piece.files if file.local.endswith(".sst")]
    epochs = {file.name.split("-e")[1][:10] for file in files}
    assert len(files) >= 3 and len(epochs) >= 2, "files of several epochs make up one snapshot"
    finish(bench, handle)


MOVES = [("heap", "rocksdb"), ("rocksdb", "heap"), ("rocksdb", "rocksdb")]
QUICK_MOVES = [("heap", "rocksdb", 3), ("rocksdb", "heap", 1), ("rocksdb", "rocksdb", 2), ("rocksdb", "rocksdb", 3)]


@pytest.mark.parametrize(
    ("first", "second", "slots"),
    [
        pytest.param(*move, slots, marks=() if (*move, slots) in QUICK_MOVES else pytest.mark.long)
        for move in MOVES
        for slots in (1, 2, 3)
    ],
)
@pytest.mark.parametrize("clean", [True, False])
def test_a_job_goes_on_with_another_backend_at_another_parallelism(
    bench: Bench, first: str, second: str, slots: int, clean: bool
) -> None:
    """After a stop the snapshot is rows; after a cancel it is what the backend had."""
    handle = ledger(bench, first)
    more(handle, 2)
    assert (handle.stop() if clean else handle.cancel()).terminal
    assert forms(bench) == {"rows" if clean or first == "heap" else "rocksdb"}
    again = ledger(bench, second, slots=slots)
    assert until(lambda: again.attempts and again.attempts[0].restored_epoch, "the restore", handle=again)
    more(again, 2)
    finish(bench, again)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slot_that_comes_back_reads_its_local_copies(bench: Bench, backend: str) -> None:
    """The state files in the store are made unreadable while no slot runs: only the copies can bring the job back."""
    copies = bench.folder / "copies"
    handle = ledger(bench, backend, local_copies=str(copies), every=None)
    until(lambda: sum(counts["records_in"] for counts in handle.metrics.values()), "records", handle=handle)
    handle.snapshot()
    assert handle.cancel() is tg.Status.CANCELLED
    assert len(list(copies.rglob("*e0000000001*"))) >= 4, "what the slots wrote"
    hidden = {path: path.read_bytes() for path in bench.snapshots.rglob("state/*")}
    for path, content in hidden.items():
        path.write_bytes(bytes(len(content)))

    again = ledger(bench, backend, local_copies=str(copies), every=None)
    until(lambda: again.status is tg.Status.RUNNING, "the job to run", handle=again)
    assert again.attempts[-1].restored_epoch == 1 and not again.failures
    for path, content in hidden.items():
        if path.exists():
            path.write_bytes(content)
    finish(bench, again)


KEYS, LETTERS = 100_000, 4_000


def twice(split: int, start: int, count: int) -> dict[str, Any]:
    """Every key, then every key again."""
    return {"key": np.arange(start, start + count, dtype=np.int64) % KEYS}


class Remember(tg.KeyedProcess):
    """A long text for each key, and whether it is still the same when the key comes again."""

    text = tg.value("string")

    def process(self, record: Any, ctx: Any) -> Any:
        expected = f"{record.key:08d}" * (LETTERS // 8)
        held = self.text.get()
        if held is None:
            self.text.set(expected)
        else:
            yield record.key, held == expected


def test_a_state_far_larger_than_its_memory_runs_and_recovers(bench: Bench) -> None:
    """400 MB of text in one slot, in 16 MB. The process itself, its code and its batches take a good 200 MB."""
    job = ProcessJob(
        "job",
        slots=1,
        restart=tg.FixedDelay(attempts=5, delay=0),
        backend=tg.RocksDB(memory="16 MB"),
        tuning=tg.Tuning(max_batch_rows=512),
        snapshots=tg.Snapshots(to=str(bench.snapshots), every="500 ms"),
    )
    source = tg.sources.generator(twice, schema="key long", rows=2 * KEYS, splits=1)
    job.source("keys", source).key_by("key").process("remember", Remember(), returns="key long, same boolean").to(
        "out", tg.sinks.collect()
    )
    handle = bench.start(job)
    until(lambda: any(epoch.bytes > 1_000_000 for epoch in handle.epochs), "a snapshot with much in it", handle=handle)
    os.kill(handle.attempts[-1].slots[0], signal.SIGKILL)
    until(lambda: len(handle.attempts) == 2 and handle.attempts[-1].slots, "the next attempt", handle=handle)
    largest_kb = 0
    while not handle.status.terminal:
        status = Path(f"/proc/{handle.attempts[-1].slots[0]}/status")
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
            largest_kb = max(largest_kb, int(found[1]) if found else 0)
        time.sleep(0.05)
    assert handle.wait("1 s") is tg.Status.FINISHED
    assert sorted(handle.results("out")) == [(key, True) for key in range(KEYS)]
    assert 0 < largest_kb < 400_000, "not even the text alone would fit"
