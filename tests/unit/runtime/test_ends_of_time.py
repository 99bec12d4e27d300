"""Inputs of one operator that end at different times: event time ends with the last, and no timer is left out."""

from __future__ import annotations

from typing import Any

import tidegate as tg
from tests.jobs import committed
from tests.unit.runtime.conftest import Bench
from tidegate.protocol.watermarks import MAX_WATERMARK_MS
from tidegate.testing.processes import ProcessJob

RECORD = "id long, at long"
SHORT = tg.sources.generator(make_row=lambda id: (id, id), schema=RECORD, rows=10)
LONG = tg.sources.generator(make_row=lambda id: (100 + id, id), schema=RECORD, rows=200, rate=400)


class WaitForIt(tg.KeyedProcess):
    def process(self, record: Any, ctx: Any) -> None:
        assert ctx.watermark_ms < MAX_WATERMARK_MS
        ctx.timers.event_time(record.at)

    def on_timer(self, at: int, ctx: Any) -> Any:
        yield ctx.key, at


def test_time_that_is_made_of_several_inputs_ends_with_the_last_of_them(bench: Bench) -> None:
    def build(job: ProcessJob) -> None:
        short = job.source("short", SHORT, parallelism=1).with_watermark("at", 0, name="of short")
        both = short.union(job.source("long", LONG, parallelism=1)).with_watermark("at", 0, name="of both")
        both.key_by("id").process("wait", WaitForIt(), returns=RECORD).to("out", tg.sinks.parquet(bench.out))

    bench.finish(build, slots=1)
    assert sorted(id for id, _ in committed(bench.out)) == [*range(10), *range(100, 300)]


class WaitOnTheRight(tg.CoProcess):
    def process_left(self, record: Any, ctx: Any) -> None:
        pass

    def process_right(self, record: Any, ctx: Any) -> None:
        ctx.timers.event_time(record.at)

    def on_timer(self, at: int, ctx: Any) -> Any:
        yield ctx.key, at


def test_timers_of_an_input_without_event_time_fire_after_the_other_one_has_ended(bench: Bench) -> None:
    def build(job: ProcessJob) -> None:
        left = job.source("short", SHORT, parallelism=1).with_watermark("at", 0).key_by("id")
        right = job.source("long", LONG, parallelism=1).key_by("id")
        left.connect(right).process("wait", WaitOnTheRight(), returns=RECORD).to("out", tg.sinks.parquet(bench.out))

    bench.finish(build, slots=1)
    assert sorted(id for id, _ in committed(bench.out)) == list(range(100, 300))
