"""`snapshot-protocols`: what each way to take a snapshot does to the stream, at the usual load and under back-pressure.

At the usual load: the throughput of a job that takes all it can get, with a snapshot every second, over the same without
snapshots; and how old records are at the sink when they come at a third of that speed (at half of it two cores are nearly
full as it is). Of these, the figure is the 99th percentile of the records that were under way at some time between the
trigger and the completion of a snapshot.

Under back-pressure the sink is slow, so that all queues before it are full. There the figure is how long a snapshot takes.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import tidegate as tg
from benchmarks.latency import Clocked
from benchmarks.workloads import KEYS, Discard, Records, measure, records_in, session, wait_until
from tidegate.runtime.reports import EpochReport
from tidegate.testing import ExperimentalSnapshots

PROTOCOLS: dict[str, Mapping[str, Any]] = {
    "no snapshots": {"every": None},
    "aligned": {},
    "unaligned": {"mode": "unaligned"},
    "at least once": {"mode": "at_least_once"},
    "Chandy-Lamport": {"protocol": "chandy_lamport"},
    "stop the world": {"protocol": "stop_the_world"},
}
TIMED_OUT = {"aligned, 200 ms": {"alignment_timeout": "200 ms"}}

ROWS = 4_000_000
ROUNDS = 3
SECONDS = 10
WARM_UP_S = 4

SINK_RATE = 10_000  # records per second that the slow sink takes
SLOW_KEYS = 10_000
PADDED = "key long, created_ns long, pad string"
PAD_BYTES = 1_000
SLOW_BATCH_ROWS = 256
FILL_S = 3
SLOW_SNAPSHOTS = 3

Ages = np.ndarray[Any, Any]


def run(scale: float) -> Iterator[dict[str, Any]]:
    yield from _at_usual_load(scale)
    yield from _under_back_pressure(scale)


# At the usual load.


def _at_usual_load(scale: float) -> Iterator[dict[str, Any]]:
    what = (
        f"two keyed sums over {KEYS:,} keys, one behind the other, 2 slots, a snapshot every second; latency at a third "
        f"of the throughput without snapshots, of records under way during a snapshot"
    )
    per_s = _throughputs(int(ROWS * scale))
    full = per_s["no snapshots"]
    for name, settings in PROTOCOLS.items():
        ages, epochs = _latencies(settings, rate=full / 3)
        during = _under_way(ages, epochs) if epochs else ages
        yield {
            "name": "snapshot-protocols",
            "load": "usual",
            "protocol": name,
            "against": "no snapshots",
            "what": what,
            "ratio": round(per_s[name] / full, 4),
            "records_per_s": round(per_s[name]),
            "p99_ms": _percentile_ms(during, 99),
            "p50_ms": _percentile_ms(during, 50),
            "p99_of_all_ms": _percentile_ms(ages, 99),
        } | _costs(epochs)


def _throughputs(rows: int) -> dict[str, float]:
    """Records per second, the better of the rounds, each in another order."""
    measured: dict[str, list[float]] = {name: [] for name in PROTOCOLS}
    unpaced = Clocked(rate=1e12, seconds=rows / 1e12)
    measure(_job(unpaced, {}, Discard()), rows)  # warm up
    for turn in range(ROUNDS):
        for name in list(PROTOCOLS)[:: -1 if turn % 2 else 1]:
            measured[name].append(measure(_job(unpaced, PROTOCOLS[name], Discard()), rows).records_per_s)
    return {name: max(each) for name, each in measured.items()}


def _latencies(settings: Mapping[str, Any], *, rate: float) -> tuple[Ages, list[EpochReport]]:
    folder = tempfile.mkdtemp(prefix="tidegate-ages-")
    handle = _job(Clocked(rate=rate, seconds=WARM_UP_S + SECONDS), settings, Watch(folder)).start()
    handle.wait("10 minutes")
    ages = _ages(folder)
    ages = ages[:, ages[1] > ages[1].min() + WARM_UP_S * 1e9]
    return ages, [
        epoch
        for epoch in handle.epochs
        if epoch.completed_ms is not None and epoch.ending is None and epoch.triggered_ms * 1e6 > ages[1].min()
    ]


class Total(tg.KeyedProcess):
    total = tg.value("long", default=0)

    def process(self, record: Any, ctx: Any) -> Any:
        total = self.total.get() + record.amount
        self.total.set(total)
        yield (record.key * 31 + 7) % KEYS, total & 63, record.created_ns


def _job(source: tg.Source, settings: Mapping[str, Any], sink: tg.Sink) -> tg.Job:
    job = tg.Job("protocols", session(), slots=2, restart=tg.NoRestart(), snapshots=_snapshots(settings))
    stream = job.source("records", source)
    for name in ("first", "second"):
        stream = stream.key_by("key").process(name, Total(), returns="key long, amount long, created_ns long")
    stream.to("out", sink)
    return job


# Under back-pressure.


def _under_back_pressure(scale: float) -> Iterator[dict[str, Any]]:
    what = (
        f"two keyed functions in 2 slots before one sink that takes {SINK_RATE:,} records of {PAD_BYTES:,} bytes per "
        f"second, all queues full; how long a snapshot takes, median of {SLOW_SNAPSHOTS}"
    )
    took_ms: dict[str, float] = {}
    for name, settings in (PROTOCOLS | TIMED_OUT).items():
        ages, epochs = _slow(settings, max(1, int(SLOW_SNAPSHOTS * scale)))
        per_s = ages.shape[1] / np.ptp(ages[0]) * 1e9
        line = {
            "name": "snapshot-protocols",
            "load": "back-pressure",
            "protocol": name,
            "what": what,
            "records_per_s": round(per_s),
            "p99_ms": _percentile_ms(ages, 99),
            "p50_ms": _percentile_ms(ages, 50),
        }
        if name == "no snapshots":
            yield line | {"against": "what the sink could take", "ratio": round(per_s / SINK_RATE, 4)}
            continue
        costs = _costs(epochs)
        took_ms[name] = costs["snapshot_ms"]
        yield line | costs | {"against": "aligned", "ratio": round(took_ms[name] / took_ms["aligned"], 4)}
    yield {
        "name": "snapshot-protocols",
        "load": "back-pressure",
        "against": "an unaligned snapshot",
        "ratio": round(took_ms["aligned"] / took_ms["unaligned"], 1),
        "goal": "at least 5",
        "what": what,
        "aligned_ms": took_ms["aligned"],
        "unaligned_ms": took_ms["unaligned"],
    }


class PassOn(tg.KeyedProcess):
    seen = tg.value("long", default=0)

    def process(self, record: Any, ctx: Any) -> Any:
        self.seen.set(self.seen.get() + 1)
        yield (record.key * 31 + 7) % SLOW_KEYS, record.created_ns, record.pad


def _slow(settings: Mapping[str, Any], snapshots: int) -> tuple[Ages, list[EpochReport]]:
    """From when the queues are full."""
    folder = tempfile.mkdtemp(prefix="tidegate-ages-")
    job = tg.Job(
        "slow sink",
        session(),
        slots=2,
        restart=tg.NoRestart(),
        snapshots=_snapshots({**settings, "every": None}),
        tuning=tg.Tuning(max_batch_rows=SLOW_BATCH_ROWS),
    )
    stream = job.source("records", tg.sources.generator(_padded, schema=PADDED))
    for name in ("first", "second"):
        stream = stream.key_by("key").process(name, PassOn(), returns=PADDED)
    stream.to("out", Watch(folder, rate=SINK_RATE), parallelism=1)
    handle = job.start()
    wait_until(lambda: records_in(handle, "v2") > 0, timeout_s=60)
    time.sleep(FILL_S)
    since_ns = time.time_ns()
    if settings.get("every", ...) is None:
        epochs = []
        time.sleep(FILL_S)
    else:
        epochs = [handle.snapshot("2 minutes") for _ in range(snapshots)]
    handle.cancel()
    ages = _ages(folder)
    return ages[:, ages[0] > since_ns], epochs


def _padded(split: int, start: int, count: int) -> dict[str, Any]:
    """Wide records, each made when it is asked for. (So they are not replayable: nothing is restored here.)"""
    made = Records(SLOW_KEYS)(split, start, count)
    pads = pa.array(["x" * PAD_BYTES]).take(pa.array(np.zeros(count, dtype=np.int64)))
    return {"key": made["key"], "created_ns": np.full(count, time.time_ns()), "pad": pads}


# What both measure.


def _snapshots(settings: Mapping[str, Any]) -> tg.Snapshots:
    kind = ExperimentalSnapshots if "protocol" in settings else tg.Snapshots
    return kind(**{"every": "1 s", "to": tempfile.mkdtemp(prefix="tidegate-bench-"), **settings})


def _costs(epochs: Sequence[EpochReport]) -> dict[str, Any]:
    """Of a snapshot, medians: its time, the longest times of a subtask, and what was under way and had to be kept."""
    if not epochs:
        return {}
    of = {name: statistics.median(epoch.measured[name] for epoch in epochs) for name in epochs[0].measured}
    return {
        "snapshots": len(epochs),
        "snapshot_ms": statistics.median(epoch.duration_ms or 0 for epoch in epochs),
        "alignment_ms": round(of["alignment_ms"], 3),
        "logging_ms": round(of["logging_ms"], 3),
        "write_ms": round(of["write_ms"], 1),
        "in_flight_bytes": round(of["in_flight_bytes"]),
    }


def _under_way(ages: Ages, epochs: Sequence[EpochReport]) -> Ages:
    """Those of the records that were between source and sink at some time of one of these snapshots."""
    arrived, created = ages
    found = np.zeros(len(arrived), dtype=bool)
    for epoch in epochs:
        assert epoch.completed_ms is not None
        found |= (created <= epoch.completed_ms * 1e6) & (arrived >= epoch.triggered_ms * 1e6)
    return ages[:, found]


def _percentile_ms(ages: Ages, percentile: float) -> float:
    arrived, created = ages
    return round(float(np.percentile(arrived - created, percentile)) / 1e6, 2)


@dataclass(frozen=True)
class Watch(tg.Sink):
    """Writes down, into a file for each subtask, when each record came and when it was made; at most `rate` per second."""

    folder: str
    rate: float | None = None

    def open(self, context: tg.SinkContext) -> tg.SinkWriter:
        return _WatchWriter(Path(self.folder) / f"{context.subtask}.ages", self.rate)


class _WatchWriter(tg.SinkWriter):
    def __init__(self, path: Path, rate: float | None) -> None:
        self._file = path.open("wb", buffering=0)  # nothing is lost when the job is cancelled
        self._rate = rate

    def write(self, batch: pa.RecordBatch) -> None:
        if self._rate is not None:
            time.sleep(batch.num_rows / self._rate)
        created = batch.column("created_ns").to_numpy()
        self._file.write(np.column_stack([np.full(len(created), time.time_ns()), created]).tobytes())

    def close(self) -> None:
        self._file.close()


def _ages(folder: str) -> Ages:
    """Two rows: when each record came, and when it was made, both in ns."""
    return np.concatenate([np.fromfile(file, dtype=np.int64).reshape(-1, 2) for file in Path(folder).glob("*.ages")]).T
