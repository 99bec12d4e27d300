"""Loops in real processes: they end by themselves, and snapshots taken in the middle of them lose and double nothing."""

from __future__ import annotations

import json
import os
import random
import signal
from typing import Any

import pytest

import tidegate as tg
from tests.collatz import NUMBER, build_collatz, check_collatz, check_collatz_kept, first, numbers, steps_of
from tests.jobs import check_clean, committed, until
from tests.modes import MODES
from tests.unit.jobs.conftest import Bench
from tidegate.dataflow.stream import Stream
from tidegate.testing.processes import ProcessJob

SMALL = tg.Tuning(max_batch_rows=64, heartbeat="50 ms")


def reports(handle: tg.Handle) -> list[Any]:
    """Of the epochs that are complete."""
    return [report for report in handle.epochs if report.completed_ms is not None]


def collatz(bench: Bench, count: int, *, rate: float | None = None, gated: bool = False, **rest: Any) -> tg.Handle:
    """A gated one goes on at its rate until `open_gate`."""
    source = numbers(count, rate=rate, gate=bench.folder / "gate" if gated else None)
    return bench.start(build_collatz(bench.job(tuning=SMALL, **rest), source, tg.sinks.parquet(bench.out)))


@pytest.mark.parametrize("slots", [1, 2])
def test_a_loop_ends_when_nothing_goes_round_in_it_any_more(bench: Bench, slots: int) -> None:
    handle = collatz(bench, 2_000, slots=slots)
    assert handle.wait("1 minute") is tg.Status.FINISHED
    check_collatz(committed(bench.out), 2_000)
    check_clean(bench.snapshots, "job", bench.out)


@pytest.mark.parametrize("mode", ["exactly once", "unaligned", "at least once"])  # all of them: tests/faults
def test_kills_in_the_middle_of_a_loop_change_nothing(bench: Bench, mode: str) -> None:
    count, chance = 4_000, random.Random(mode)
    handle = collatz(bench, count, rate=2_000, gated=True, every="60 ms", **MODES[mode])
    until(lambda: any(went_round(report) for report in reports(handle)), "a snapshot of what goes round", handle=handle)
    os.kill(handle.attempts[-1].slots[chance.randrange(2)], signal.SIGKILL)
    until(lambda: handle.failures, "the loss to be noticed", handle=handle)
    bench.open_gate()
    assert handle.wait("1 minute") is tg.Status.FINISHED
    (check_collatz_kept if mode == "at least once" else check_collatz)(committed(bench.out), count)
    check_clean(bench.snapshots, "job", bench.out)


def went_round(report: Any) -> bool:
    return any(of["feedback_bytes"] > 0 for of in report.subtasks.values())


def test_a_loop_is_rescaled_with_what_goes_round_in_it(bench: Bench) -> None:
    count = 4_000
    handle = collatz(bench, count, rate=2_000, gated=True, every="60 ms")
    until(lambda: any(went_round(report) for report in reports(handle)), "a snapshot of what goes round", handle=handle)
    handle.rescale(slots=3)
    handle.rescale(slots=1)
    bench.open_gate()
    assert handle.wait("1 minute") is tg.Status.FINISHED
    check_collatz(committed(bench.out), count)


def test_a_drained_loop_runs_empty_first(bench: Bench) -> None:
    handle = collatz(bench, 10_000_000, rate=3_000, every="60 ms")
    until(lambda: len(reports(handle)) >= 3, "snapshots", handle=handle)
    handle.stop(drain=True)
    assert handle.wait("1 minute") is tg.Status.STOPPED
    out = sorted(committed(bench.out))
    assert out == [(id, steps_of(id), steps_of(id)) for id, *_ in out]
    by_split = [[id for id, *_ in out if id % 2 == split] for split in range(2)]
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
        limit = self.limit.get()
        assert limit is not None
        if steps >= limit:
            ctx.side("done", (number, n, steps))
        else:
            yield number, n + number, steps + 1


def test_a_loop_waits_for_its_other_inputs_to_end(bench: Bench) -> None:
    """The limits come long after the loop's own input has ended, and only they set its records going."""
    count = 300
    limits = tg.sources.generator(make_row=lambda id: (id, id % 7), schema="id long, limit long", rows=count, rate=400)

    def build_loop(job: ProcessJob) -> None:
        right = job.source("limits", limits, parallelism=1)

        def body(stream: Stream) -> tuple[Stream, Stream]:
            met = (
                stream.key_by("id")
                .connect(right.key_by("id"))
                .process("meet", Pair(), returns=NUMBER, side_outputs={"done": NUMBER})
            )
            return met, met.side_output("done")

        job.source("in", numbers(count)).iterate("until", body).to("out", tg.sinks.parquet(bench.out))

    bench.finish(build_loop)
    assert sorted(committed(bench.out)) == [(id, first(id) + id * (id % 7), id % 7) for id in range(count)]


def test_loops_in_loops(bench: Bench) -> None:
    """The inner one counts a record's n down to a multiple of 10, the outer one does that again until it is 0."""
    count = 400

    def inner(stream: Stream) -> tuple[Stream, Stream]:
        down = stream.rebalance().map(lambda r: (r.id, r.n - 1, r.steps + 1), returns=NUMBER, name="down")
        return (down.filter(lambda r: r.n % 10 != 0, name="again"), down.filter(lambda r: r.n % 10 == 0, name="tens"))

    def outer(stream: Stream) -> tuple[Stream, Stream]:
        tens = stream.key_by("id").process("pass", Pass(), returns=NUMBER).iterate("inner", inner)
        return tens.filter(lambda r: r.n > 0, name="more"), tens.filter(lambda r: r.n <= 0, name="zero")

    def build_loops(job: ProcessJob) -> None:
        source = tg.sources.generator(make_row=lambda id: (id, id % 40 + 1, 0), schema=NUMBER, rows=count, splits=2)
        job.source("in", source).iterate("outer", outer).to("out", tg.sinks.parquet(bench.out))

    bench.finish(build_loops, slots=2)
    assert sorted(committed(bench.out)) == [(number, 0, number % 40 + 1) for number in range(count)]


class Pass(tg.KeyedProcess):
    seen = tg.value("long", default=0)

    def process(self, record: Any, ctx: Any) -> Any:
        self.seen.set(self.seen.get() + 1)
        yield tuple(record)


def test_feedback_past_its_memory_goes_to_disk(bench: Bench) -> None:
    """Every record comes back five-fold a few times: far more than fits into the memory that it has."""

    def body(stream: Stream) -> tuple[Stream, Stream]:
        many = stream.key_by("id").process("many", Many(), returns=NUMBER)
        return many.filter(lambda r: r.steps < 4, name="again"), many.filter(lambda r: r.steps == 4, name="enough")

    def build_loop(job: ProcessJob) -> None:
        job.source("in", numbers(200)).iterate("flood", body).key_by("id").process(
            "count", Count(), returns="id long, count long"
        ).to("out", tg.sinks.parquet(bench.out))

    bench.finish(build_loop, tuning=tg.Tuning(loop_memory=20_000))
    most: dict[int, int] = {}
    for number, count in committed(bench.out):
        most[number] = max(count, most.get(number, 0))
    assert most == dict.fromkeys(range(200), 5**4)


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


class OnceRound(tg.KeyedProcess):
    """Goes round when event time has come to it, and tells how far that was."""

    def process(self, record: Any, ctx: Any) -> None:
        ctx.timers.event_time(record.id)

    def on_timer(self, at: int, ctx: Any) -> Any:
        ctx.side("done", (at, ctx.watermark_ms))


@pytest.mark.parametrize("splits", [1, 2])
def test_event_time_goes_on_in_a_loop_though_one_of_its_inputs_has_ended(bench: Bench, splits: int) -> None:
    """With one split, one of the two slots has nothing to read. It must not hold time back until the other has ended."""
    source = tg.sources.generator(make_row=lambda id: (id, id, 0), schema=NUMBER, rows=300, rate=300, splits=splits)

    def body(stream: Stream) -> tuple[Stream, Stream]:
        waited = stream.key_by("n").process("wait", OnceRound(), returns=NUMBER, side_outputs={"done": "id long, at long"})
        return waited, waited.side_output("done")

    def build(job: ProcessJob) -> None:
        job.source("in", source).with_watermark("id", 0).iterate("round", body).to("out", tg.sinks.parquet(bench.out))

    bench.finish(build)
    rows = committed(bench.out)
    assert sorted(id for id, _ in rows) == list(range(300))
    assert len({at_ms for _, at_ms in rows}) > 2, "timers fire when they are due, and not all at the end"


class EveryTime(tg.KeyedProcess):
    def process(self, record: Any, ctx: Any) -> None:
        ctx.timers.event_time(record.id)

    def on_timer(self, at: int, ctx: Any) -> Any:
        yield at, ctx.watermark_ms


def test_event_time_goes_on_behind_the_head_of_a_loop_though_one_of_its_inputs_has_ended(bench: Bench) -> None:
    """With one split, one of the two slots has nothing to read. What leaves the loop comes from the head itself."""
    source = tg.sources.generator(make_row=lambda id: (id, id, 0), schema=NUMBER, rows=300, rate=300, splits=1)

    def body(stream: tg.Stream) -> tuple[tg.Stream, tg.Stream]:
        round_once = stream.filter(lambda record: record.steps == 0).key_by("n").process("once", Once(), returns=NUMBER)
        return round_once, stream.filter(lambda record: record.steps > 0)

    def build(job: ProcessJob) -> None:
        looped = job.source("in", source).with_watermark("id", 0).iterate("round", body)
        timed = looped.key_by("id").process("time", EveryTime(), returns="id long, at long")
        timed.to("out", tg.sinks.parquet(bench.out))

    bench.finish(build)
    rows = committed(bench.out)
    assert sorted(id for id, _ in rows) == list(range(300))
    assert len({at_ms for _, at_ms in rows}) > 2, "timers fire when they are due, and not all at the end"


class Once(tg.KeyedProcess):
    def process(self, record: Any, ctx: Any) -> Any:
        yield record.id, record.n, 1


class RoundFirst(OnceRound):
    def process(self, record: Any, ctx: Any) -> Any:
        if record.steps:
            super().process(record, ctx)
        else:
            yield record.id, record.n, 1


def test_records_that_come_back_do_not_make_an_idle_slot_hold_time_back(bench: Bench) -> None:
    """One file: one slot has no split. It is idle, and stays so though records go round in it."""
    (bench.folder / "in").mkdir()
    with (bench.folder / "in" / "records.json").open("w") as lines:
        lines.writelines(json.dumps({"id": id, "n": id % 7, "steps": 0}) + "\n" for id in range(100))

    def body(stream: Stream) -> tuple[Stream, Stream]:
        waited = stream.key_by("n").process("wait", RoundFirst(), returns=NUMBER, side_outputs={"done": "id long, at long"})
        return waited, waited.side_output("done")

    job = bench.job()
    source = tg.sources.json(bench.folder / "in", schema=NUMBER, discover_every="20 ms")
    (
        job.source("in", source)
        .with_watermark("id", 0, idle_after="50 ms")
        .iterate("round", body)
        .to("out", tg.sinks.parquet(bench.out))
    )
    handle = bench.start(job)
    until(lambda: committed(bench.out), "the first records", handle=handle)
    with (bench.folder / "in" / "records.json").open("a") as lines:
        lines.writelines(json.dumps({"id": id, "n": id % 7, "steps": 0}) + "\n" for id in range(100, 200))
    until(lambda: len(committed(bench.out)) == 199, "all but the last record", handle=handle, patience_s=20)
    assert {at_ms for _, at_ms in committed(bench.out)} <= {98, 99, 198}


class LongWay(tg.KeyedProcess):
    def process(self, record: Any, ctx: Any) -> Any:
        if record.steps == 3_000:
            ctx.side("done", (record.id, record.n, record.steps))
        else:
            yield record.id, record.n, record.steps + 1


class WhereTimeWas(tg.KeyedProcess):
    def process(self, record: Any, ctx: Any) -> Any:
        if record.id < 0:
            yield record.id, record.n, ctx.watermark_ms


def test_what_is_behind_a_loop_waits_for_its_records_though_its_input_has_ended(bench: Bench) -> None:
    """And though another stream, which it is united with there, goes on."""
    history = tg.sources.generator(make_row=lambda id: (-1, 10, 0), schema=NUMBER, rows=1)
    live = tg.sources.generator(make_row=lambda id: (id, 1_000 + id, 0), schema=NUMBER, rows=1_500, rate=1_000)

    def body(stream: tg.Stream) -> tuple[tg.Stream, tg.Stream]:
        went = stream.key_by("id").process("go round", LongWay(), returns=NUMBER, side_outputs={"done": NUMBER})
        return went, went.side_output("done")

    def build(job: ProcessJob) -> None:
        left = job.source("history", history, parallelism=1).with_watermark("n", 0, name="w1").iterate("round", body)
        right = job.source("live", live, parallelism=1).with_watermark("n", 0, name="w2")
        (
            left.union(right)
            .key_by("id")
            .process("look", WhereTimeWas(), returns="id long, n long, watermark long")
            .to("out", tg.sinks.parquet(bench.out))
        )

    bench.finish(build, slots=1)
    ((_, at_ms, watermark_ms),) = committed(bench.out)
    assert at_ms > watermark_ms


class WaitTwice(tg.KeyedProcess):
    """Every record waits for event time, goes round, waits again, and leaves."""

    steps = tg.value("long")

    def process(self, record: Any, ctx: Any) -> None:
        self.steps.set(record.steps)
        ctx.timers.event_time(record.id + 10)

    def on_timer(self, at: int, ctx: Any) -> Any:
        if self.steps.get() == 1:
            ctx.side("done", (ctx.key, 1))
        else:
            yield ctx.key, ctx.key, 1


@pytest.mark.parametrize("slots", [1, 2])
def test_timers_that_are_set_in_a_loop_after_the_end_of_time_fire(bench: Bench, slots: int) -> None:
    source = tg.sources.generator(make_row=lambda id: (id, id, 0), schema=NUMBER, rows=50)

    def body(stream: tg.Stream) -> tuple[tg.Stream, tg.Stream]:
        sides = {"done": "id long, n long"}
        went = stream.key_by("id").process("wait twice", WaitTwice(), returns=NUMBER, side_outputs=sides)
        return went, went.side_output("done")

    def build(job: ProcessJob) -> None:
        job.source("in", source).with_watermark("id", 0).iterate("round", body).to("out", tg.sinks.parquet(bench.out))

    bench.finish(build, slots=slots)
    assert sorted(committed(bench.out)) == [(id, 1) for id in range(50)]
