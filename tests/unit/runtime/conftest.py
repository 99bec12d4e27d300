"""What the tests that run jobs on plain processes share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import tidegate as tg
from tests.jobs import alive, build_ledger, until
from tidegate.runtime.job import Job
from tidegate.testing.processes import ProcessJob


class Bench:
    """A folder with a job's snapshots and its output, and the jobs that were started on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.snapshots = folder / "snapshots"
        self.out = folder / "out"
        self.handles: list[tg.Handle] = []

    def job(
        self,
        name: str = "job",
        *,
        slots: int = 2,
        every: Any = "100 ms",
        make: type[ProcessJob] = ProcessJob,
        restart: Any = None,
        tuning: tg.Tuning | None = None,
        **snapshots: Any,
    ) -> ProcessJob:
        return make(
            name,
            slots=slots,
            restart=restart or tg.FixedDelay(attempts=20, delay_ms=0),
            tuning=tuning or tg.Tuning(),
            snapshots=tg.Snapshots(to=str(self.snapshots), every=every, **snapshots),
        )

    def ledger(self, *, rows: int | None, rate: float | None = None, gated: bool = False, **rest: Any) -> tg.Handle:
        """A gated one goes on at its rate until `open_gate`."""
        return self.start(
            build_ledger(
                self.job(**rest),
                tg.sinks.parquet(self.out),
                rows=rows,
                rate=rate,
                gate=self.folder / "gate" if gated else None,
            )
        )

    def open_gate(self) -> None:
        (self.folder / "gate").touch()

    def start(self, job: Job) -> tg.Handle:
        handle = job.start()
        self.handles.append(handle)
        return handle

    def finish(self, build: Callable[[ProcessJob], object], **rest: Any) -> tg.Handle:
        """Runs a job of one's own to its end."""
        job = self.job(**rest)
        build(job)
        handle = self.start(job)
        assert handle.wait(60) is tg.Status.FINISHED
        return handle


@pytest.fixture(scope="module", autouse=True)
def functions_travel_by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """Those of a test module, as they do for a user who writes them in a notebook. By name, every slot would have to
    import the test module, and pytest with it."""
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture
def bench(tmp_path: Path, no_leaked_threads: None) -> Iterator[Bench]:
    """Ends the jobs that a test leaves running, and looks whether their processes are gone."""
    bench = Bench(tmp_path)
    yield bench
    for handle in bench.handles:
        if not handle.status.terminal:
            handle.cancel()
    for handle in bench.handles:
        for attempt in handle.attempts:
            for pid in attempt.slots.values():
                until(lambda pid=pid: not alive(pid), f"the end of process {pid}")


def stat_of(pid: int, name: str) -> int:
    """A line of /proc/<pid>/status in bytes, such as VmRSS."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {name} of {pid}, here is {os.getpid()}")
