"""`steady`: what a job takes after 5,000 epochs over what it took after 500: memory, open files, threads, stored files.

A keyed sum on two slots, each a process, with a transactional sink and snapshots as fast as they go. The number of keys
is fixed, so nothing has a reason to grow. Memory is what is resident; the figure of each point is the median of samples
over a hundred epochs before it. The driver is a new process, so that it holds nothing else.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

import tidegate as tg
from benchmarks.workloads import SCHEMA, KeyedSum, Records
from tidegate.driver.handle import Handle
from tidegate.testing.processes import ProcessJob

EPOCHS = 5_000
EARLY_EPOCH = 500
SAMPLED_EPOCHS = 100  # before each of the two points
SAMPLES_PER_S = 10
KEYS = 1_000
RATE = 5_000.0
BACKENDS: dict[str, tg.Backend] = {"heap": tg.Heap(), "rocksdb": tg.RocksDB(memory="64 MB")}
WHAT = {
    "driver_bytes": "memory of the driver",
    "slots_bytes": "memory of the slots",
    "open_files": "open files of driver and slots",
    "threads": "threads of driver and slots",
    "store_objects": "files in the job's store",
}


def run(scale: float) -> Iterator[dict[str, Any]]:
    epochs = max(int(EPOCHS * scale), EARLY_EPOCH + 2 * SAMPLED_EPOCHS)
    for backend in BACKENDS:
        command = [sys.executable, "-m", "benchmarks.steady", backend, str(epochs)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=Path(__file__).parent.parent)
        found = json.loads(done.stdout)
        for measure, what in WHAT.items():
            early, late = found["early"][measure], found["late"][measure]
            yield {
                "name": "steady",
                "backend": backend,
                "measure": what,
                "against": f"epoch {EARLY_EPOCH}",
                "ratio": round(late / early, 4),
                "early": early,
                "late": late,
                "what": f"{what} at epoch {epochs:,}; keyed sum over {KEYS:,} keys, 2 slots (processes), a transactional "
                f"sink, {RATE:,.0f} records a second",
                "epochs_per_s": found["epochs_per_s"],
            }


@dataclass(frozen=True)
class Promised(tg.Sink):
    """Promises something in each epoch, and has nothing to do when it is committed."""

    def open(self, context: tg.SinkContext) -> tg.SinkWriter:
        return _Promising()


class _Promising(tg.SinkWriter):
    def write(self, batch: pa.RecordBatch) -> None:
        pass

    def pre_commit(self, epoch: int) -> Callable[[], Sequence[str]]:
        return lambda: [f"output of epoch {epoch}"]


def measure(backend: str, epochs: int) -> dict[str, Any]:
    """Run the job for this many epochs in this process, and return what it took early and late."""
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as folder:
        job = ProcessJob(
            "steady",
            slots=2,
            backend=BACKENDS[backend],
            snapshots=tg.Snapshots(every="1 ms", to=folder),
            restart=tg.NoRestart(),
        )
        source = tg.sources.generator(Records(KEYS), schema=SCHEMA, rate=RATE)
        sums = job.source("records", source).key_by("key").process("sum", KeyedSum(), returns="key long, total long")
        sums.to("out", Promised())
        handle = job.start()
        try:
            early = _sampled(handle, EARLY_EPOCH, folder)
            early_s = time.monotonic()
            late = _sampled(handle, epochs, folder)
            per_s = (epochs - EARLY_EPOCH) / (time.monotonic() - early_s)
        finally:
            handle.cancel()
    return {"early": early, "late": late, "epochs_per_s": round(per_s, 1)}


def _sampled(handle: Handle, until_epoch: int, folder: str) -> dict[str, float]:
    """Wait for the epoch, and return the median of each measure over the epochs before it."""
    samples: list[dict[str, int]] = []
    while (epoch := _newest(handle)) < until_epoch:
        assert not handle.status.terminal, handle.failures
        if epoch >= until_epoch - SAMPLED_EPOCHS:
            samples.append(_sample(handle, folder))
        time.sleep(1 / SAMPLES_PER_S)
    return {measure: statistics.median(sample[measure] for sample in samples) for measure in WHAT}


def _newest(handle: Handle) -> int:
    return max((report.epoch for report in handle.epochs[-2:]), default=0)


def _sample(handle: Handle, folder: str) -> dict[str, int]:
    slots = [slot.pid for slot in handle.slots]
    everyone = [os.getpid(), *slots]
    return {
        "driver_bytes": _resident_bytes(os.getpid()),
        "slots_bytes": sum(map(_resident_bytes, slots)),
        "open_files": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in everyone),
        "threads": sum(len(os.listdir(f"/proc/{pid}/task")) for pid in everyone),
        "store_objects": sum(len(files) for _, _, files in os.walk(folder)),
    }


def _resident_bytes(pid: int) -> int:
    """Return the resident memory of the process. What it shares with the process that it was forked from counts, since that
    is copied little by little when it is touched."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
