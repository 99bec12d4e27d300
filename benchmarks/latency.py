"""`latency`: from a record's creation to the sink, at half of the measured capacity, with snapshots every second.

Records are created by the clock (open loop): record i exists from the moment i / rate, whether or not the job is ready
for it, so a stall counts against every record that had to wait.

There are two jobs: the running sum record by record, and the keyed sum in columns. What the second one emits are updates,
one for each key that a batch has, so its figure is the age of the newest record of each update.
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
from benchmarks.machine import Others
from benchmarks.workloads import KEYS, Discard, Records, measure, session

SECONDS = 15
WARM_UP_S = 4
BIN_NS = 10_000  # ages are counted in bins of this width
BIN_COUNT = 500_000  # the last one has everything that is older
SHOWN_S = 5  # of the picture
SPAN_MS = 10  # the picture has the oldest record of each such span


@dataclass(frozen=True)
class Kind:
    """One of the two jobs: its name, the records that its capacity is measured with, and the goal of its 99th percentile."""

    name: str
    capacity_rows: int
    goal_ms: int


PATHS = (Kind("record-wise", 8_000_000, 20), Kind("vectorised", 80_000_000, 10))


def run(scale: float) -> Iterator[dict[str, Any]]:
    """Yield a line for each job."""
    for path in PATHS:
        rows = int(path.capacity_rows * scale)
        unpaced = Clocked(rate=1e12, seconds=rows / 1e12)
        capacity = measure(_job(path.name, unpaced, Discard()), rows).records_per_s
        rate = capacity / 2
        with Others() as others:
            found = measured(path.name, rate, SECONDS * max(1.0, scale))
        yield {
            "name": "latency",
            "path": path.name,
            "against": f"{path.goal_ms} ms",
            "ratio": round(found.percentile_ms(99) / path.goal_ms, 3),
            **found.percentiles(),
            "records_per_s": round(rate),
            "capacity_records_per_s": round(capacity),
            "records": found.count,
            "cores_used_by_others": others.cores,
            "what": f"keyed sum over {KEYS:,} keys, {path.name}, 2 slots, hash exchange, snapshots every second, half of "
            f"the capacity",
            "over_time": found.over_time(),
        }


@dataclass(frozen=True)
class Ages:
    """How old records were at the sink, in bins; the oldest of each batch, with its time; and when there were snapshots."""

    bins: np.ndarray[Any, Any]
    batches: np.ndarray[Any, Any]  # rows of: when it came, in ns; its oldest record's age, in ns
    snapshots_ms: list[tuple[int, int]]  # when each was triggered, and complete

    @property
    def count(self) -> int:
        return int(self.bins.sum())

    def percentile_ms(self, percentile: float) -> float:
        below = np.cumsum(self.bins)
        at = int(np.searchsorted(below, percentile / 100 * below[-1]))
        return round((at + 0.5) * BIN_NS / 1e6, 2)

    def percentiles(self) -> dict[str, float]:
        return {f"p{str(at).replace('.', '')}_ms": self.percentile_ms(at) for at in (50, 99, 99.9)}

    def over_time(self) -> dict[str, Any]:
        """Return the oldest record of each span of the first seconds, in ms, and the snapshots, in ms from the beginning."""
        begin_ms = int(self.batches[:, 0].min()) // 1_000_000
        spans = (self.batches[:, 0] // 1_000_000 - begin_ms) // SPAN_MS
        oldest = np.zeros(SHOWN_S * 1000 // SPAN_MS)
        shown = spans < len(oldest)
        np.maximum.at(oldest, spans[shown], self.batches[shown, 1] / 1e6)
        return {
            "span_ms": SPAN_MS,
            "oldest_ms": [round(age, 1) for age in oldest.tolist()],
            "snapshots_ms": [
                [start - begin_ms, end - begin_ms]
                for start, end in self.snapshots_ms
                if 0 <= start - begin_ms < SHOWN_S * 1000
            ],
        }


def measured(path: str, rate: float, seconds: float, *, every: str | None = "1 s") -> Ages:
    """Run a job at this rate, and return the ages of its records."""
    folder = tempfile.mkdtemp(prefix="tidegate-latency-")
    handle = _job(path, Clocked(rate=rate, seconds=seconds + WARM_UP_S), Stopwatch(folder), every=every).start()
    handle.wait("10 minutes")
    return Ages(
        sum(np.load(file) for file in sorted(Path(folder).glob("*.bins.npy"))),
        np.concatenate([np.load(file) for file in sorted(Path(folder).glob("*.batches.npy"))]),
        [(each.triggered_ms, each.completed_ms) for each in handle.epochs if each.completed_ms is not None],
    )


def at_rate(rate: float, seconds: float) -> dict[str, Any]:
    """Return the figures of the record-wise job at this rate."""
    with Others() as others:
        found = measured("record-wise", rate, seconds)
    return {
        "records_per_s": round(rate),
        **found.percentiles(),
        "cores_used_by_others": others.cores,
        "over_time": found.over_time(),
    }


class Latest(tg.KeyedProcess):
    total = tg.value("long", default=0)

    def process(self, record: Any, ctx: Any) -> Any:
        total = self.total.get() + record.amount
        self.total.set(total)
        yield record.key, total, record.created_ns


def _job(path: str, source: Clocked, sink: tg.Sink, *, every: str | None = "1 s") -> tg.Job:
    job = tg.Job(
        "latency",
        session(),
        slots=2,
        restart=tg.NoRestart(),
        snapshots=tg.Snapshots(every=every, to=tempfile.mkdtemp(prefix="tidegate-bench-")),
    )
    keyed = job.source("records", source).key_by("key")
    if path == "record-wise":
        keyed.process("sum", Latest(), returns="key long, total long, created_ns long").to("out", sink)
    else:
        keyed.aggregate("totals", total=tg.sum("amount"), created_ns=tg.last("created_ns")).to("out", sink)
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
    """Counts how old each record was when it came, leaving out the warm-up."""

    folder: str

    @property
    def changelogs(self) -> frozenset[tg.Changelog]:
        return frozenset(tg.Changelog)

    def open(self, context: tg.SinkContext) -> tg.SinkWriter:
        return _StopwatchWriter(Path(self.folder) / str(context.subtask))


class _StopwatchWriter(tg.SinkWriter):
    def __init__(self, path: Path) -> None:
        self._path = path
        self._first_ns: int | None = None
        self._bins = np.zeros(BIN_COUNT, np.int64)
        self._batches: list[tuple[int, int]] = []

    def write(self, batch: pa.RecordBatch) -> None:
        now_ns = time.time_ns()
        if self._first_ns is None:
            self._first_ns = now_ns
        if now_ns - self._first_ns > WARM_UP_S * 1e9:
            ages_ns = now_ns - batch.column("created_ns").to_numpy()
            np.add.at(self._bins, np.minimum(ages_ns // BIN_NS, BIN_COUNT - 1), 1)
            self._batches.append((now_ns, int(ages_ns.max())))

    def pre_commit(self, epoch: int) -> Callable[[], tuple[str, ...]]:
        return lambda: ()

    def close(self) -> None:
        np.save(f"{self._path}.bins.npy", self._bins)
        np.save(f"{self._path}.batches.npy", np.array(self._batches, np.int64).reshape(-1, 2))
