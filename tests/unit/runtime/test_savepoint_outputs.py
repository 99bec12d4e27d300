"""A savepoint stands by itself with the output, too: what it covers is committed, or can be from wherever it is restored."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import tidegate as tg
from tests.jobs import build_ledger, check_ledger, committed, completed, until
from tests.unit.runtime.conftest import Bench
from tidegate.store.savepoints import find_restore_point
from tidegate.testing.processes import ProcessJob

ROWS = 20_000
BACKENDS = {"heap": tg.heap, "rocksdb": tg.rocksdb}


def ledger(bench: Bench, out: Path, *, to: str = "snapshots", gate: str = "gate", every: Any = "100 ms",
           backend: str = "heap", slots: int = 2, **rest: Any) -> tg.Handle:
    job = ProcessJob("job", slots=slots, restart=tg.FixedDelay(attempts=2, delay_ms=0), backend=BACKENDS[backend](),
                     snapshots=tg.Snapshots(to=str(bench.folder / to), every=every), **rest)
    build_ledger(job, tg.sinks.parquet(out), rows=ROWS, rate=5_000, gate=bench.folder / gate)
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
        for part in bench.out.glob("part-*.parquet"):       # what came after it is computed once more
            if int(part.name.split("-")[2]) > epoch:
                part.unlink()
    before = committed(bench.out)
    bench.out.rename(bench.folder / "moved")                # another machine doesn't have it at all
    assert to_commit(sp) == 0

    again = ledger(bench, bench.folder / "new", to="elsewhere", restore_from=str(sp), backend=backend, slots=3)
    finishes(bench, again, bench.folder / "moved", bench.folder / "new")
    assert committed(bench.folder / "moved") == before
