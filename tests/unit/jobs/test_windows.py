"""Windows in whole jobs: what was emitted stays closed, after a stop, a kill, at another parallelism, from a savepoint."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

import tidegate as tg
from tests.jobs import committed, until
from tests.unit.jobs.conftest import Bench
from tests.unit.jobs.test_event_time_goes_on import (
    KEYS,
    MINUTE_MS,
    RECORD,
    Restart,
    World,
    from_a_savepoint,
    killed,
    rescaled,
    stopped_and_started,
)
from tests.unit.jobs.test_job_backends import BACKENDS
from tidegate.testing.processes import ProcessJob

Row = tuple[Any, ...]


class WindowWorld(World):
    """Counts the records of each minute, as windows do it."""

    lateness: str | None = None

    def start(self, *, slots: int = 2, to: str = "snapshots", bounded: bool = False, **rest: Any) -> tg.Handle:
        job = ProcessJob(
            "job",
            slots=slots,
            restart=tg.FixedDelay(attempts=20, delay=0),
            backend=BACKENDS[self.backend],
            snapshots=tg.Snapshots(to=str(self.bench.folder / to), every="100 ms"),
            **rest,
        )
        source = tg.sources.json(self._in, schema=RECORD, discover_every="20 ms", stop_at_end=bounded)
        counts = (
            job.source("in", source, parallelism=1)
            .with_watermark("at", "0 s")
            .key_by("key")
            .window(tg.tumbling("at", "1 min"), allowed_lateness=self.lateness, late="late")
            .aggregate("minutes", n=tg.count())
        )
        counts.as_append().to("out", tg.sinks.parquet(self.bench.out))
        counts.side_output("late").to("late out", tg.sinks.parquet(self.bench.folder / "late"))
        return self.bench.start(job)

    def wait_late(self, handle: tg.Handle, *times_ms: int) -> None:
        late = {(key, at) for key in range(KEYS) for at in times_ms}
        found = self.bench.folder / "late"
        until(lambda: found.exists() and late <= set(committed(found)), "late records", handle=handle)
        assert sorted(committed(found)) == sorted(late)


def rows(minute: int, n: int) -> set[Row]:
    return {(key, (minute - 1) * MINUTE_MS, minute * MINUTE_MS, n) for key in range(KEYS)}


@pytest.fixture(params=BACKENDS)
def world(bench: Bench, request: pytest.FixtureRequest) -> WindowWorld:
    return WindowWorld(bench, request.param)


@pytest.mark.parametrize("restart", [stopped_and_started, killed, rescaled, from_a_savepoint])
def test_a_window_that_was_emitted_stays_closed_after_a_restart(world: WindowWorld, restart: Restart) -> None:
    world.append(0, MINUTE_MS, 2 * MINUTE_MS - 1, 2 * MINUTE_MS + 1)
    handle = world.start()
    emitted = rows(1, 1) | rows(2, 2)
    world.wait(handle, emitted)
    handle = restart(world, handle)
    world.wait_late(handle, 2 * MINUTE_MS - 1)
    world.append(3 * MINUTE_MS, 4 * MINUTE_MS + 1)
    world.wait(handle, emitted | rows(3, 1) | rows(4, 1))
    assert handle.stop() is tg.Status.STOPPED


def test_a_late_record_within_the_lateness_fires_its_window_again_after_a_kill(world: WindowWorld) -> None:
    world.lateness = "1 min"
    world.append(0, MINUTE_MS + 1)
    handle = world.start()
    world.wait(handle, rows(1, 1))
    until(lambda: [epoch for epoch in handle.epochs if epoch.completed_ms is not None], "a snapshot", handle=handle)
    for pid in handle.attempts[-1].slots.values():
        os.kill(pid, signal.SIGKILL)
    world.append(5)
    world.wait(handle, rows(1, 1) | rows(1, 2))
    world.append(2 * MINUTE_MS + 1)
    world.wait(handle, rows(1, 1) | rows(1, 2) | rows(2, 1))
    world.append(6)
    world.wait_late(handle, 6)
    assert handle.stop() is tg.Status.STOPPED


def test_a_window_that_the_end_of_input_has_emitted_stays_closed_when_a_bounded_job_gets_more(world: WindowWorld) -> None:
    world.append(0, MINUTE_MS, 2 * MINUTE_MS + 1)
    assert world.start(bounded=True).wait("1 minute") is tg.Status.FINISHED
    emitted = rows(1, 1) | rows(2, 1) | rows(3, 1)
    assert sorted(committed(world.bench.out)) == sorted(emitted)
    world.append(2 * MINUTE_MS + 2, 4 * MINUTE_MS, 4 * MINUTE_MS + 1, file="more")
    assert world.start(bounded=True, slots=3).wait("1 minute") is tg.Status.FINISHED
    assert sorted(committed(world.bench.out)) == sorted(emitted | rows(5, 2)), "what is later counts as ever"


def test_one_subtask_computes_the_windows_of_a_stream_without_key(bench: Bench) -> None:
    def build(job: ProcessJob) -> None:
        source = tg.sources.rows([(at, at * 10) for at in range(10)], "at long, n long")
        stream = job.source("in", source).with_watermark("at", 2)
        stream.window(tg.sliding("at", 4, 2)).aggregate("all", n=tg.count(), total=tg.sum("n")).to(
            "out", tg.sinks.parquet(bench.out)
        )

    bench.finish(build)
    assert sorted(committed(bench.out)) == [
        (start, start + 4, len(seen := range(max(start, 0), min(start + 4, 10))), sum(seen) * 10)
        for start in range(-2, 10, 2)
    ]
