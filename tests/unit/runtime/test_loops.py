"""Loops in real processes: they end by themselves, and snapshots taken in the middle of them lose and double nothing."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import pytest

import tidegate as tg
from tests.jobs import check_clean, committed, until
from tests.unit.runtime.conftest import Bench
from tidegate.testing.processes import ProcessJob

NUMBER = "id long, n long, steps long"
MODES: dict[str, dict[str, Any]] = {
    "exactly once": {},
    "unaligned": {"mode": "unaligned"},
    "with a time-out": {"alignment_timeout": "20 ms"},
    "Chandy and Lamport": {"experimental_protocol": "chandy_lamport"},
    "stop the world": {"experimental_protocol": "stop_the_world"},
}
SMALL = tg.Tuning(max_batch_rows=64, heartbeat_ms=50)


def reports(handle: tg.Handle) -> list[Any]:
    """Of the epochs that are complete."""
    return [report for report in handle.epochs if report.completed_ms is not None]


def following(n: int) -> int:
    """Collatz: halve the even, triple the odd and add one."""
    return n // 2 if n % 2 == 0 else 3 * n + 1


def steps_of(n: int) -> int:
    steps = 0
    while n != 1:
        n, steps = following(n), steps + 1
    return steps


class Step(tg.KeyedProcess):
    """One round for one number. How often each record has been here is its key's state, and must be its steps."""

    rounds = tg.map("long", "long")

    def process(self, record: Any, ctx: Any) -> Any:
        seen = self.rounds.get(record.id, 0)
        self.rounds.put(record.id, seen + 1)
        if record.n == 1:
            ctx.side("done", (record.id, record.steps, seen))
        else:
            yield record.id, following(record.n), record.steps + 1


def numbers(count: int, rate: float | None = None) -> tg.Source:
    return tg.sources.generator(make_row=lambda number: (number, number + 1, 0), schema=NUMBER, rows=count, rate=rate, splits=2)


def collatz(stream: tg.Stream) -> tuple[tg.Stream, tg.Stream]:
    stepped = stream.key_by("id").process("step", Step(), returns=NUMBER, side_outputs={"done": "id long, steps long, seen long"})
    return stepped, stepped.side_output("done")


def build(bench: Bench, job: ProcessJob, count: int, rate: float | None = None) -> ProcessJob:
    job.source("in", numbers(count, rate)).iterate("collatz", collatz).to("out", tg.sinks.parquet(bench.out))
    return job


def expected(count: int) -> list[tuple[int, int, int]]:
    return [(number, steps_of(number + 1), steps_of(number + 1)) for number in range(count)]


@pytest.mark.parametrize("slots", [1, 2])
def test_a_loop_ends_when_nothing_goes_round_in_it_any_more(bench: Bench, slots: int) -> None:
    handle = bench.start(build(bench, bench.job(slots=slots), 2_000))
    assert handle.wait(60) is tg.Status.FINISHED
    assert sorted(committed(bench.out)) == expected(2_000)
    check_clean(bench.snapshots, "job", bench.out)


@pytest.mark.parametrize("mode", MODES)
def test_kills_in_the_middle_of_a_loop_change_nothing(bench: Bench, mode: str) -> None:
    count, chance = 6_000, random.Random(mode)
    handle = bench.start(build(bench, bench.job(every="60 ms", tuning=SMALL, **MODES[mode]), count, rate=2_000))
    for kill in range(2):
        until(lambda kill=kill: any(report.attempt == kill + 1 for report in reports(handle)), "a snapshot of the attempt",
              handle=handle)
        time.sleep(chance.uniform(0, 0.3))
        os.kill(handle.attempts[-1].slots[chance.randrange(2)], signal.SIGKILL)
        until(lambda kill=kill: len(handle.failures) == kill + 1, "the loss to be noticed", handle=handle)
    assert handle.wait(60) is tg.Status.FINISHED
    assert sorted(committed(bench.out)) == expected(count)
    logged = [of["feedback_bytes"] for report in reports(handle) for of in report.subtasks.values()]
    assert max(logged) > 0, "what went round was part of some snapshot"


def test_a_loop_is_rescaled_with_what_goes_round_in_it(bench: Bench) -> None:
    count = 6_000
    handle = bench.start(build(bench, bench.job(every="60 ms", tuning=SMALL), count, rate=3_000))
    until(lambda: len(reports(handle)) >= 3, "snapshots", handle=handle)
    handle.rescale(slots=3)
    handle.rescale(slots=1)
    assert handle.wait(60) is tg.Status.FINISHED
    assert sorted(committed(bench.out)) == expected(count)


def test_a_drained_loop_runs_empty_first(bench: Bench) -> None:
    handle = bench.start(build(bench, bench.job(every="60 ms", tuning=SMALL), 10_000_000, rate=3_000))
    until(lambda: len(reports(handle)) >= 3, "snapshots", handle=handle)
    handle.stop(drain=True)
    assert handle.wait(60) is tg.Status.STOPPED
    out = sorted(committed(bench.out))
    assert out == [(number, steps_of(number + 1), steps_of(number + 1)) for number, *_ in out]
    by_split = [[number for number, *_ in out if number % 2 == split] for split in range(2)]
    assert all(ids == list(range(split, split + 2 * len(ids), 2)) for split, ids in enumerate(by_split)), "all that was read"


class Pair(tg.CoProcess):
    """What goes round meets the limits from outside: it leaves when it has passed its limit."""

    limit = tg.value("long")
    waiting = tg.list("struct<id: long, n: long, steps: long>")

    def process_left(self, record: Any, ctx: Any) -> Any:
        if self.limit.get() is None:
            self.waiting.add({"id": record.id, "n": record.n, "steps": record.steps})
        else:
            yield from self._moved(record.id, record.n, record.steps, ctx)

    def process_right(self, record: Any, ctx: Any) -> Any:
        self.limit.set(record.limit)
        for each in self.waiting.get():
            yield from self._moved(each["id"], each["n"], each["steps"], ctx)
        self.waiting.clear()

    def _moved(self, number: int, n: int, steps: int, ctx: Any) -> Any:
        if steps >= self.limit.get():
            ctx.side("done", (number, n, steps))
        else:
            yield number, n + number, steps + 1


def test_a_loop_waits_for_its_other_inputs_to_end(bench: Bench) -> None:
    """The limits come long after the loop's own input has ended, and only they set its records going."""
    count = 300
    limits = tg.sources.generator(make_row=lambda number: (number, number % 7), schema="id long, limit long", rows=count, rate=400)

    def build_loop(job: ProcessJob) -> None:
        right = job.source("limits", limits, parallelism=1)

        def body(stream: tg.Stream) -> tuple[tg.Stream, tg.Stream]:
            met = stream.key_by("id").connect(right.key_by("id")).process(
                "meet", Pair(), returns=NUMBER, side_outputs={"done": NUMBER})
            return met, met.side_output("done")

        job.source("in", numbers(count)).iterate("until", body).to("out", tg.sinks.parquet(bench.out))

    bench.finish(build_loop)
    assert sorted(committed(bench.out)) == [(number, number + 1 + number * (number % 7), number % 7)
                                            for number in range(count)]


def test_loops_in_loops(bench: Bench) -> None:
    """The inner one counts a record's n down to a multiple of 10, the outer one does that again until it is 0."""
    count = 400

    def inner(stream: tg.Stream) -> tuple[tg.Stream, tg.Stream]:
        down = stream.rebalance().map(lambda r: (r.id, r.n - 1, r.steps + 1), returns=NUMBER, name="down")
        return (down.filter(lambda r: r.n % 10 != 0, name="again"), down.filter(lambda r: r.n % 10 == 0, name="tens"))

    def outer(stream: tg.Stream) -> tuple[tg.Stream, tg.Stream]:
        tens = stream.key_by("id").process("pass", Pass(), returns=NUMBER).iterate("inner", inner)
        return tens.filter(lambda r: r.n > 0, name="more"), tens.filter(lambda r: r.n <= 0, name="zero")

    def build_loops(job: ProcessJob) -> None:
        job.source("in", tg.sources.generator(make_row=lambda number: (number, number % 40 + 1, 0), schema=NUMBER, rows=count,
                                              splits=2)).iterate("outer", outer).to("out", tg.sinks.parquet(bench.out))

    bench.finish(build_loops, slots=2)
    assert sorted(committed(bench.out)) == [(number, 0, number % 40 + 1) for number in range(count)]


class Pass(tg.KeyedProcess):
    seen = tg.value("long", default=0)

    def process(self, record: Any, ctx: Any) -> Any:
        self.seen.set(self.seen.get() + 1)
        yield tuple(record)


def test_feedback_past_its_memory_goes_to_disk(bench: Bench) -> None:
    """Every record comes back five-fold a few times: far more than a thousandth of it fits into memory."""

    def body(stream: tg.Stream) -> tuple[tg.Stream, tg.Stream]:
        many = stream.key_by("id").process("many", Many(), returns=NUMBER)
        return many.filter(lambda r: r.steps < 5, name="again"), many.filter(lambda r: r.steps == 5, name="enough")

    def build_loop(job: ProcessJob) -> None:
        job.source("in", numbers(200)).iterate("flood", body).key_by("id").process(
            "count", Count(), returns="id long, count long").to("out", tg.sinks.parquet(bench.out))

    bench.finish(build_loop, tuning=tg.Tuning(loop_memory_bytes=20_000))
    most: dict[int, int] = {}
    for number, count in committed(bench.out):
        most[number] = max(count, most.get(number, 0))
    assert most == dict.fromkeys(range(200), 5**5)


class Many(tg.KeyedProcess):
    seen = tg.value("long", default=0)

    def process(self, record: Any, ctx: Any) -> Any:
        for _ in range(5):
            yield record.id, record.n, record.steps + 1


class Count(tg.KeyedProcess):
    count = tg.value("long", default=0)

    def process(self, record: Any, ctx: Any) -> Any:
        self.count.set(self.count.get() + 1)
        yield record.id, self.count.get()
