"""`latency`: from a record's creation to the sink, at half of the measured capacity, with snapshots every second.

Records are created by the clock (open loop): record i exists from the moment i / rate, whether or not the job is ready
for it, so a stall counts against every record that had to wait.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import tidegate as tg
from benchmarks.workloads import KEYS, Records, measure, session

CAPACITY_ROWS = 8_000_000
SECONDS = 15
WARM_UP_S = 4


def run(scale: float) -> Iterator[dict[str, Any]]:
    rows = int(CAPACITY_ROWS * scale)
    unpaced = Clocked(rate=1e12, seconds=rows / 1e12)
    capacity = measure(_job(unpaced, tempfile.mkdtemp(prefix="tidegate-latency-")), rows).records_per_s
    rate = capacity / 2
    latencies_ms = _latencies_ms(rate, SECONDS * max(1.0, scale))
    p50, p99 = (float(np.percentile(latencies_ms, at)) for at in (50, 99))
    yield {
        "name": "latency",
        "against": "20 ms",
        "ratio": round(p99 / 20, 3),
        "p50_ms": round(p50, 2),
        "p99_ms": round(p99, 2),
        "p999_ms": round(float(np.percentile(latencies_ms, 99.9)), 2),
        "records_per_s": round(rate),
        "capacity_records_per_s": round(capacity),
        "records": len(latencies_ms),
        "what": f"running sum over {KEYS:,} keys, 2 slots, hash exchange, snapshots every second, half of the capacity",
    }


class Latest(tg.KeyedProcess):
    total = tg.value("long", default=0)

    def process(self, record: Any, ctx: Any) -> Any:
        total = self.total.get() + record.amount
        self.total.set(total)
        yield record.key, total, record.created_ns


def _latencies_ms(rate: float, seconds: float) -> np.ndarray[Any, Any]:
    folder = tempfile.mkdtemp(prefix="tidegate-latency-")
    _job(Clocked(rate=rate, seconds=seconds + WARM_UP_S), folder).start().wait("10 minutes")
    return np.concatenate([np.load(file) for file in sorted(Path(folder).glob("*.npy"))])


def _job(source: Clocked, folder: str) -> tg.Job:
    job = tg.Job(
        "latency",
        session(),
        slots=2,
        restart=tg.NoRestart(),
        snapshots=tg.Snapshots(every="1 s", to=tempfile.mkdtemp(prefix="tidegate-bench-")),
    )
    job.source("records", source).key_by("key").process("sum", Latest(), returns="key long, total long, created_ns long").to(
        "out", Stopwatch(folder)
    )
    return job


@dataclass(frozen=True)
class Clocked(tg.Source):
    """Records that come into being at a steady rate, each with the time it was due."""

    rate: float
    seconds: float

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([("key", pa.int64()), ("amount", pa.int64()), ("created_ns", pa.int64())])

    @property
    def bounded(self) -> bool:
        return True

    def open(self, context: tg.SourceContext) -> tg.SourceReader:
        return _ClockedReader(self, context)


class _ClockedReader(tg.SourceReader):
    def __init__(self, source: Clocked, context: tg.SourceContext) -> None:
        self._subtask = context.subtask
        self._per_ns = source.rate / context.parallelism / 1e9
        self._rows = int(source.rate / context.parallelism * source.seconds)
        self._schema = source.schema
        self._records = Records()
        self._next = 0
        self._started_ns: int | None = None

    def poll(self, max_rows: int) -> pa.RecordBatch | None:
        now_ns = time.time_ns()
        if self._started_ns is None:
            self._started_ns = now_ns
        due = min(self._rows, int((now_ns - self._started_ns) * self._per_ns))
        count = min(max_rows, due - self._next)
        if count <= 0:
            return None
        columns = self._records(self._subtask, self._next, count)
        created_ns = self._started_ns + (np.arange(self._next, self._next + count) / self._per_ns).astype(np.int64)
        self._next += count
        return pa.record_batch([columns["key"], columns["amount"], created_ns], schema=self._schema)

    def offsets(self) -> Mapping[str, Any]:
        return {str(self._subtask): self._next}

    @property
    def finished(self) -> bool:
        return self._next >= self._rows


@dataclass(frozen=True)
class Stopwatch(tg.Sink):
    """Writes how old each record was when it came, leaving out the warm-up."""

    folder: str

    def open(self, context: tg.SinkContext) -> tg.SinkWriter:
        return _StopwatchWriter(Path(self.folder) / f"{context.subtask}.npy")


class _StopwatchWriter(tg.SinkWriter):
    def __init__(self, file: Path) -> None:
        self._file = file
        self._first_ns: int | None = None
        self._ages: list[np.ndarray[Any, Any]] = []

    def write(self, batch: pa.RecordBatch) -> None:
        now_ns = time.time_ns()
        if self._first_ns is None:
            self._first_ns = now_ns
        if now_ns - self._first_ns > WARM_UP_S * 1e9:
            self._ages.append((now_ns - batch.column("created_ns").to_numpy()) / 1e6)

    def pre_commit(self, epoch: int) -> Callable[[], tuple[str, ...]]:
        return lambda: ()

    def close(self) -> None:
        np.save(self._file, np.concatenate([np.zeros(0), *self._ages]))
