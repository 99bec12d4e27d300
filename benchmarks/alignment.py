"""`alignment-vs-state`, `alignment-vs-parallelism`, `alignment-vs-shuffles`: what the time of alignment depends on.

The paper's evaluation (Carbone et al. 2017, §5), scaled to one machine. A subtask aligns from the first marker of an
epoch until the last one of its inputs; meanwhile the channels that are ahead stand still. Of an epoch we take, for each
shuffle, the subtask that took longest, and the sum over the shuffles: so long can alignment hold up a record on its way.
The figure is the median over the epochs. Records come at a fixed rate, well below what the job could take; at full speed
the figure would be the length of the queues.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

import tidegate as tg
from benchmarks.workloads import SCHEMA, Discard, Records, records_in, session, wait_until
from tidegate.runtime.reports import EpochReport

EPOCHS = 150
WARM_UP_EPOCHS = 10
PAUSE_S = 0.1  # between two snapshots

STATE_BYTES = (10_000_000, 100_000_000, 1_000_000_000)
VALUE_BYTES = 10_000
STATE_RATE = 100_000  # records per second

SLOTS = (2, 4, 8)
SHUFFLES = (1, 2, 3, 4, 5)
KEYS = 10_000
RATE = 40_000


def against_state(scale: float) -> Iterator[dict[str, Any]]:
    sizes = [int(size * scale) for size in STATE_BYTES]
    what = (
        f"2 slots, one shuffle, {STATE_RATE:,} records per second over all keys, values of {VALUE_BYTES:,} bytes on the "
        f"heap, median over the epochs"
    )
    lines: list[dict[str, Any]] = []
    for size in sizes:
        source = Filling(keys=size // VALUE_BYTES, rate=STATE_RATE)
        epochs = _epochs(source, slots=2, shuffles=1, count=EPOCHS, first_records=source.keys)
        lines.append({"name": "alignment-vs-state", "state_bytes": size} | _measures(epochs) | {"what": what})
        yield _compared(lines[-1], lines[0], f"{sizes[0] / 1e6:g} MB of state")
    medians = [line["alignment_ms"] for line in lines]
    yield {
        "name": "alignment-vs-state",
        "against": "the shortest of the sizes",
        "what": what,
        "ratio": round(max(medians) / min(medians), 3),
        "alignment_ms_by_size": medians,
        "goal": "at most 1.5",
    }


def against_parallelism(scale: float) -> Iterator[dict[str, Any]]:
    what = (
        f"one shuffle, {RATE:,} records per second in all over {KEYS:,} keys, median over the epochs; all slots on "
        f"the cores of one machine"
    )
    lines: list[dict[str, Any]] = []
    for slots in SLOTS:
        epochs = _epochs(_records(), slots=slots, shuffles=1, count=int(EPOCHS * scale))
        lines.append({"name": "alignment-vs-parallelism", "slots": slots} | _measures(epochs) | {"what": what})
        yield _compared(lines[-1], lines[0], f"{SLOTS[0]} slots")


def against_shuffles(scale: float) -> Iterator[dict[str, Any]]:
    what = f"2 slots, {RATE:,} records per second over {KEYS:,} keys, median over the epochs"
    lines: list[dict[str, Any]] = []
    for shuffles in SHUFFLES:
        epochs = _epochs(_records(), slots=2, shuffles=shuffles, count=int(EPOCHS * scale))
        lines.append({"name": "alignment-vs-shuffles", "shuffles": shuffles} | _measures(epochs) | {"what": what})
        yield _compared(lines[-1], lines[0], f"{SHUFFLES[0]} shuffle")


# The job, and its epochs.


class Hop(tg.KeyedProcess):
    """A running sum beside a value that may be large, and on to another key."""

    total = tg.value("long", default=0)
    filling = tg.value("binary")

    def process(self, record: Any, ctx: Any) -> Any:
        if record.amount < 0:
            self.filling.set(random.Random(record.key).randbytes(-record.amount))
            return
        total = self.total.get() + record.amount
        self.total.set(total)
        yield (record.key * 31 + 7) % KEYS, total & 63


def _job(source: tg.Source, folder: str, *, slots: int, shuffles: int) -> tg.Job:
    job = tg.Job(
        "alignment",
        session(slots),
        slots=slots,
        restart=tg.NoRestart(),
        tuning=tg.Tuning(heartbeat="200 ms"),
        snapshots=tg.Snapshots(every=None, to=folder),
    )
    stream = job.source("records", source)
    for number in range(1, shuffles + 1):
        stream = stream.key_by("key").process(f"hop {number}", Hop(), returns=SCHEMA)
    stream.to("out", Discard())
    return job


def _epochs(source: tg.Source, *, slots: int, shuffles: int, count: int, first_records: int = 1) -> list[EpochReport]:
    """Snapshots one after the other, once this many records have come."""
    # A gigabyte of state is not left behind.
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-", ignore_cleanup_errors=True) as folder:
        handle = _job(source, folder, slots=slots, shuffles=shuffles).start()
        wait_until(lambda: records_in(handle, "v1") >= first_records, timeout_s=120)
        epochs = []
        for _ in range(WARM_UP_EPOCHS + count):
            epochs.append(handle.snapshot("2 minutes"))
            time.sleep(PAUSE_S)
        handle.cancel()
    return epochs[WARM_UP_EPOCHS:]


def _alignment_ms(epoch: EpochReport) -> float:
    longest: dict[str, float] = {}
    for subtask, measured in epoch.subtasks.items():
        vertex = subtask.split("[")[0]
        longest[vertex] = max(longest.get(vertex, 0.0), measured["alignment_ms"])
    return sum(longest.values())


def _measures(epochs: Sequence[EpochReport]) -> dict[str, Any]:
    alignments_ms = [_alignment_ms(epoch) for epoch in epochs]
    p25, p50, p75 = (round(float(np.percentile(alignments_ms, at)), 3) for at in (25, 50, 75))
    return {
        "alignment_ms": p50,
        "alignment_p25_ms": p25,
        "alignment_p75_ms": p75,
        "epochs": len(epochs),
        "snapshot_ms": statistics.median(epoch.duration_ms or 0 for epoch in epochs),
        "snapshot_bytes": epochs[-1].bytes,
    }


def _compared(line: dict[str, Any], smallest: Mapping[str, Any], against: str) -> dict[str, Any]:
    return line | {"against": against, "ratio": round(line["alignment_ms"] / smallest["alignment_ms"], 3)}


# Where the records come from.


def _records() -> tg.Source:
    return tg.sources.generator(Records(KEYS), schema=SCHEMA, rate=RATE)


@dataclass(frozen=True)
class Filling(tg.Source):
    """Every key once, as fast as it is taken, to fill the state; then records of all keys at a steady rate."""

    keys: int
    rate: float

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([("key", pa.int64()), ("amount", pa.int64())])

    @property
    def bounded(self) -> bool:
        return False

    def open(self, context: tg.SourceContext) -> tg.SourceReader:
        return _FillingReader(self, context)


class _FillingReader(tg.SourceReader):
    def __init__(self, source: Filling, context: tg.SourceContext) -> None:
        self._schema = source.schema
        self._subtask = context.subtask
        self._to_fill = np.arange(context.subtask, source.keys, context.parallelism, dtype=np.int64)
        self._per_s = source.rate / context.parallelism
        self._records = Records(source.keys)
        self._next = 0
        self._started_s: float | None = None

    def poll(self, max_rows: int) -> pa.RecordBatch | None:
        if len(self._to_fill):
            some, self._to_fill = self._to_fill[: max_rows // 8], self._to_fill[max_rows // 8 :]
            return pa.record_batch([some, np.full(len(some), -VALUE_BYTES)], schema=self._schema)
        now_s = time.monotonic()
        self._started_s = self._started_s or now_s
        count = min(max_rows, int((now_s - self._started_s) * self._per_s) - self._next)
        if count <= 0:
            return None
        made = self._records(self._subtask, self._next, count)
        self._next += count
        return pa.record_batch([made["key"], made["amount"]], schema=self._schema)

    def offsets(self) -> Mapping[str, Any]:
        return {str(self._subtask): self._next}

    @property
    def finished(self) -> bool:
        return False
