"""Event time continues where it was: after a stop, a kill, at another parallelism and from a savepoint.

A window that was emitted stays closed: a record for it that comes after the restart is late, as it would have been before.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tidegate as tg
from tests.jobs import committed, until
from tests.unit.runtime.conftest import Bench
from tests.unit.runtime.test_job_backends import BACKENDS
from tidegate.testing.processes import ProcessJob

MINUTE_MS = 60_000
KEYS = 7
LATE = -1
RECORD = "key long, at long"

Row = tuple[int, int, int]


class Minutes(tg.KeyedProcess):
    """Counts the records of each minute of event time, and tells at its end. Those that come behind it are late."""

    counts = tg.map("long", "long")

    def process(self, record: Any, ctx: Any) -> Iterator[Row]:
        end = (record.at // MINUTE_MS + 1) * MINUTE_MS
        if end <= ctx.watermark_ms:
            yield record.key, end, LATE
            return
        self.counts.put(end, self.counts.get(end, 0) + 1)
        ctx.timers.event_time(end)

    def on_timer(self, at: int, ctx: Any) -> Iterator[Row]:
        yield ctx.key, at, self.counts.get(at)
        self.counts.remove(at)


class World:
    """A file that grows, and the job that reads it."""

    def __init__(self, bench: Bench, backend: str) -> None:
        self.bench = bench
        self.backend = backend
        self._in = bench.folder / "in"
        self._in.mkdir()

    def append(self, *times_ms: int, file: str = "records") -> None:
        """A record of each key at each of these times, and the file is flushed."""
        with (self._in / f"{file}.json").open("a") as lines:
            lines.writelines(json.dumps({"key": key, "at": at}) + "\n" for at in times_ms for key in range(KEYS))

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
        stream = job.source("in", source, parallelism=1).with_watermark("at", "0 s")
        stream.key_by("key").process("minutes", Minutes(), returns="key long, at long, n long").to(
            "out", tg.sinks.parquet(self.bench.out)
        )
        return self.bench.start(job)

    def wait(self, handle: tg.Handle, expected: set[Row]) -> None:
        """Until these rows are written; no others, and none twice."""
        until(lambda: expected <= set(committed(self.bench.out)), f"{sorted(expected)[:3]}…", handle=handle)
        assert sorted(committed(self.bench.out)) == sorted(expected)


def rows(minute: int, n: int) -> set[Row]:
    return {(key, minute * MINUTE_MS, n) for key in range(KEYS)}


@pytest.fixture(params=BACKENDS)
def world(bench: Bench, request: pytest.FixtureRequest) -> World:
    return World(bench, request.param)


Restart = Callable[[World, tg.Handle], tg.Handle]


def stopped_and_started(world: World, handle: tg.Handle) -> tg.Handle:
    handle.stop()
    world.append(2 * MINUTE_MS - 1)
    return world.start(slots=3)


def killed(world: World, handle: tg.Handle) -> tg.Handle:
    for pid in handle.attempts[-1].slots.values():
        os.kill(pid, signal.SIGKILL)
    world.append(2 * MINUTE_MS - 1)
    until(lambda: len(handle.attempts) == 2, "another attempt", handle=handle)
    return handle


def rescaled(world: World, handle: tg.Handle) -> tg.Handle:
    handle.rescale(slots=3)
    handle.rescale(slots=1)
    world.append(2 * MINUTE_MS - 1)
    return handle


def from_a_savepoint(world: World, handle: tg.Handle) -> tg.Handle:
    to = str(world.bench.folder / "savepoint")
    handle.stop(savepoint=to)
    shutil.rmtree(world.bench.folder / "snapshots")
    world.append(2 * MINUTE_MS - 1)
    return world.start(to="others", restore_from=to)


@pytest.mark.parametrize("restart", [stopped_and_started, killed, rescaled, from_a_savepoint])
def test_a_late_record_after_a_restart_does_not_open_a_window_that_was_emitted(world: World, restart: Restart) -> None:
    world.append(0, MINUTE_MS, 2 * MINUTE_MS - 1, 2 * MINUTE_MS + 1)
    handle = world.start()
    emitted = rows(1, 1) | rows(2, 2)
    world.wait(handle, emitted)
    handle = restart(world, handle)
    world.wait(handle, emitted | rows(2, LATE))
    world.append(3 * MINUTE_MS, 4 * MINUTE_MS + 1)
    world.wait(handle, emitted | rows(2, LATE) | rows(3, 1) | rows(4, 1))
    assert handle.stop() is tg.Status.STOPPED


def test_a_window_that_the_end_of_input_has_emitted_stays_closed_when_a_bounded_job_gets_more(world: World) -> None:
    world.append(0, MINUTE_MS, 2 * MINUTE_MS + 1)
    assert world.start(bounded=True).wait("1 minute") is tg.Status.FINISHED
    emitted = rows(1, 1) | rows(2, 1) | rows(3, 1)
    assert sorted(committed(world.bench.out)) == sorted(emitted)
    world.append(2 * MINUTE_MS + 2, 4 * MINUTE_MS, 4 * MINUTE_MS + 1, file="more")
    assert world.start(bounded=True, slots=3).wait("1 minute") is tg.Status.FINISHED
    assert sorted(committed(world.bench.out)) == sorted(emitted | rows(3, LATE) | rows(5, 2)), "what is later counts as ever"
    assert world.start(bounded=True, slots=1).wait("1 minute") is tg.Status.FINISHED
    assert sorted(committed(world.bench.out)) == sorted(emitted | rows(3, LATE) | rows(5, 2))


def test_a_window_that_a_drain_has_emitted_stays_closed_after_a_start_and_a_kill(world: World) -> None:
    world.append(0, MINUTE_MS, 2 * MINUTE_MS + 1)
    handle = world.start()
    world.wait(handle, rows(1, 1) | rows(2, 1))
    assert handle.stop(drain=True) is tg.Status.STOPPED
    emitted = rows(1, 1) | rows(2, 1) | rows(3, 1)
    handle = world.start(slots=3)
    world.append(3 * MINUTE_MS)
    until(lambda: [epoch for epoch in handle.epochs if epoch.completed_ms is not None], "a snapshot", handle=handle)
    for pid in handle.attempts[-1].slots.values():
        os.kill(pid, signal.SIGKILL)
    until(lambda: len(handle.attempts) == 2, "another attempt", handle=handle)
    world.append(2 * MINUTE_MS + 2)
    world.wait(handle, emitted | rows(3, LATE))
    assert handle.stop(drain=True) is tg.Status.STOPPED
    assert sorted(committed(world.bench.out)) == sorted(emitted | rows(3, LATE) | rows(4, 1))
