"""A job that has nothing to do costs next to nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import tidegate as tg
from tests.jobs import until
from tests.unit.jobs.conftest import Bench

WATCHED_S = 1.5


class Someday(tg.KeyedProcess):
    """Has timers of both kinds that are far away."""

    def process(self, record: Any, ctx: Any) -> None:
        ctx.timers.processing_time(ctx.now_ms() + 3_600_000)
        ctx.timers.event_time(record.at + 3_600_000)

    def on_timer(self, at: int, ctx: Any) -> None:
        raise AssertionError("too early")


def busy_s(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def test_slots_sleep_while_no_record_comes(bench: Bench) -> None:
    job = bench.job(every="1 s")
    source = tg.sources.generator(make_row=lambda i: (i, i), schema="key long, at long", rate=0.001, splits=2)
    stream = job.source("in", source).with_watermark("at", "0 s", idle_after="100 ms").key_by("key")
    stream.process("someday", Someday(), returns="key long").to("out", tg.sinks.collect())
    handle = bench.start(job)
    until(lambda: handle.status is tg.Status.RUNNING, "the job to run", handle=handle)
    time.sleep(0.5)  # the sources are idle by now
    slots = handle.attempts[-1].slots.values()
    before = {pid: busy_s(pid) for pid in slots}
    time.sleep(WATCHED_S)
    spent = {pid: (busy_s(pid) - before[pid]) / WATCHED_S for pid in slots}
    assert max(spent.values()) < 0.3, f"slots that have nothing to do take {spent} of a core"
    assert handle.failures == []
