"""The fixtures: what each holds, how it is written and how it is read.

A fixture is an archive with a snapshot, and the rows of all its states as JSON. `after.json.xz` has the rows of the state
when the program has gone on from there to the end of its input; it is one for all fixtures of the program.
"""

from __future__ import annotations

import json
import lzma
import tarfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

import tidegate as tg
from tests.formats.program import HALF, ROWS, UNSTEADY, VOLATILE, every_shape, in_flight
from tidegate.snapshots.finding import find_snapshot
from tidegate.snapshots.manifest import FORMAT_VERSION
from tidegate.snapshots.snapshot import Snapshot

ROOT = Path(__file__).parent
FOLDER = ROOT / f"manifest-{FORMAT_VERSION}"  # where fixtures are written
JOB_FOLDER, SAVEPOINT = "snapshots", "savepoint"
Rows = dict[str, list[str]]

BACKENDS: dict[str, Callable[[], tg.Backend]] = {"heap": tg.Heap, "rocksdb": lambda: tg.RocksDB(memory="16 MB")}


def rows_of(snapshot: Snapshot, *, steady: bool = False) -> Rows:
    """Return the rows of every state, as sorted lines of JSON. `steady`: without what depends on the clock, on the number of
    slots or on how records came together in batches."""
    return {
        f"{operator} · {state}": _lines(batches, steady=steady)
        for operator in snapshot.manifest.operators
        for state, batches in snapshot.rows(operator).items()
        if not (steady and ((operator, state) in VOLATILE or (state.startswith("__") and "timers" not in state)))
    }


def _lines(batches: Iterable[pa.RecordBatch], *, steady: bool) -> list[str]:
    rows = [row for batch in batches for row in batch.to_pylist()]
    return sorted(json.dumps(_steady(row) if steady else row, default=_plain, sort_keys=True) for row in rows)


def _steady(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {name: _steady(inner) for name, inner in value.items() if name not in UNSTEADY}
    return value


def _plain(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def read_all(handle: tg.Handle, rows: int) -> None:
    """Wait until all rows were read, and are in a complete snapshot."""
    deadline_s = time.monotonic() + 60
    while len(handle.results("seen")) < rows:
        assert not handle.failures, handle.failures
        assert time.monotonic() < deadline_s, f"{len(handle.results('seen'))} of {rows} rows"
        time.sleep(0.02)


def pack(folder: Path, name: str, rows: Rows) -> None:
    FOLDER.mkdir(exist_ok=True)
    with tarfile.open(FOLDER / f"{name}.tar.xz", "w:xz", preset=9) as archive:
        archive.add(folder, arcname=folder.name)
    write_json(name, rows)


def unpack(name: str, into: Path) -> None:
    """Unpack a fixture, such as "manifest-2/own-heap"."""
    with tarfile.open(ROOT / f"{name}.tar.xz") as archive:
        archive.extractall(into, filter="data")


def write_json(name: str, rows: Rows) -> None:
    (FOLDER / f"{name}.json.xz").write_bytes(lzma.compress(json.dumps(rows, indent=0, sort_keys=True).encode(), preset=9))


def read_json(name: str) -> Rows:
    rows: Rows = json.loads(lzma.decompress((ROOT / f"{name}.json.xz").read_bytes()))
    return rows


# Writing them.


def write_savepoint(folder: Path, backend: str, name: str) -> None:
    """A savepoint in the middle of the input, and the state at its end."""
    handle = every_shape(str(folder / JOB_FOLDER), backend=BACKENDS[backend](), rows=HALF).start()
    read_all(handle, HALF)
    handle.stop(savepoint=str(folder / SAVEPOINT))
    pack(folder / SAVEPOINT, name, rows_of(find_snapshot(str(folder / SAVEPOINT))))


def write_own(folder: Path, backend: str, name: str) -> None:
    """A job's own snapshots, in the backend's own form: a base and what follows it."""
    handle = every_shape(str(folder / JOB_FOLDER), backend=BACKENDS[backend](), rows=HALF).start()
    read_all(handle, HALF)
    handle.snapshot()
    handle.cancel()
    pack(folder / JOB_FOLDER, name, rows_of(find_snapshot(str(folder / JOB_FOLDER / "formats"))))


def write_in_flight(folder: Path, backend: str, name: str) -> None:
    """A snapshot with records that were under way."""
    handle = in_flight(str(folder / JOB_FOLDER), backend=BACKENDS[backend](), gate=folder / "gate").start()
    while handle.status is not tg.Status.RUNNING:
        time.sleep(0.02)
    time.sleep(0.5)
    handle.snapshot()
    handle.cancel()
    rows = rows_of(find_snapshot(str(next((folder / JOB_FOLDER).iterdir()))))
    assert any(found for state, found in rows.items() if "flight" in state or "channel" in state), rows.keys()
    pack(folder / JOB_FOLDER, name, rows)


def write_end(folder: Path) -> None:
    """The state at the end of the input, without any restore."""
    handle = every_shape(str(folder / JOB_FOLDER), backend=tg.Heap(), rows=len(ROWS)).start()
    read_all(handle, len(ROWS))
    handle.stop(savepoint=str(folder / SAVEPOINT))
    write_json("after", rows_of(find_snapshot(str(folder / SAVEPOINT)), steady=True))
