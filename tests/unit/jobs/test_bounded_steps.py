"""A slot is heard while its functions have much to do: with slow functions, and with very many timers that are due at once.

The heartbeat time-outs are short, and the work of one batch or of one watermark takes several times as long.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

import tidegate as tg
from tests.jobs import committed
from tests.unit.jobs.conftest import Bench
from tidegate.testing.processes import ProcessJob

QUICK = tg.Tuning(heartbeat="50 ms", heartbeat_timeout="1 s")
ROWS, SLOW_S = 500, 0.005


def numbers() -> tg.Source:
    return tg.sources.rows([(key,) for key in range(ROWS)], schema="key long")


def slowly(record: Any) -> Any:
    time.sleep(SLOW_S)
    return tuple(record)


class SlowRecords(tg.KeyedProcess):
    def process(self, record: Any, ctx: Any) -> Iterator[Any]:
        yield slowly(record)


class SlowTimers(tg.KeyedProcess):
    """All timers are due at the end of the input."""

    seen = tg.value("long", default=0)

    def process(self, record: Any, ctx: Any) -> None:
        self.seen.set(self.seen.get() + 1)
        ctx.timers.event_time(10_000 + record.key)

    def on_timer(self, at: int, ctx: Any) -> Iterator[Any]:
        time.sleep(SLOW_S)
        yield (ctx.key,) * self.seen.get()


def build_records(job: ProcessJob, bench: Bench, kind: str) -> None:
    stream = job.source("in", numbers())
    if kind == "keyed process":
        out = stream.key_by("key").process("slow", SlowRecords(), returns="key long")
    elif kind == "chained to the source":
        out = stream.map(slowly, returns="key long", name="slow")
    elif kind == "flat map":
        out = stream.rebalance().flat_map(lambda record: [slowly(record)], returns="key long", name="slow")
    else:
        out = stream.rebalance().filter(lambda record: slowly(record) is not None, name="slow")
    out.to("out", tg.sinks.parquet(bench.out))


@pytest.mark.parametrize("kind", ["keyed process", "chained to the source", "flat map", "filter"])
def test_a_slow_function_does_not_make_its_slot_silent(bench: Bench, kind: str) -> None:
    handle = bench.finish(lambda job: build_records(job, bench, kind), tuning=QUICK, slots=1, restart=tg.NoRestart())
    assert handle.failures == []
    assert sorted(committed(bench.out)) == [(key,) for key in range(ROWS)]


@pytest.mark.parametrize("watermark", [True, False], ids=["with a watermark", "at the end of the input"])
def test_many_timers_that_are_due_at_once_do_not_make_their_slot_silent(bench: Bench, watermark: bool) -> None:
    def build(job: ProcessJob) -> None:
        stream = job.source("in", numbers())
        if watermark:
            stream = stream.with_watermark("key", "0 s")
        stream.key_by("key").process("timers", SlowTimers(), returns="key long").to("out", tg.sinks.parquet(bench.out))

    handle = bench.finish(build, tuning=QUICK, slots=1, restart=tg.NoRestart())
    assert handle.failures == []
    assert committed(bench.out) == [(key,) for key in range(ROWS)], "in the order of their times"
