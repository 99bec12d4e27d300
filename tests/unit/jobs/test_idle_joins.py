"""A whole job with joins by event time of which one side is idle for long. Its slots are killed meanwhile."""

from __future__ import annotations

import os
import signal
from collections import Counter
from typing import Any

import tidegate as tg
from tests.jobs import GatedSource, committed, completed, until
from tests.unit.jobs.conftest import Bench
from tidegate.connectors.generator import GeneratorSource
from tidegate.testing.processes import ProcessJob

LEFT_ROWS, RIGHT_ROWS, KEYS = 4000, 40, 8


def left_row(i: int) -> tuple[int, int, int]:
    return i % KEYS, i, i


def right_row(i: int) -> tuple[int, int, int]:
    return i % KEYS, 3 * i, i


def build(job: ProcessJob, folder: Any) -> None:
    def source(name: str, make_row: Any, schema: str, rows: int) -> Any:
        made = tg.sources.generator(make_row=make_row, schema=schema, rows=rows, rate=500, splits=1)
        assert isinstance(made, GeneratorSource)
        return job.source(name, GatedSource(generator=made, gate=str(folder / "gate")), parallelism=1)

    left = source("left", left_row, "key long, ts long, n long", LEFT_ROWS).with_watermark("ts", 0)
    right = source("right", right_row, "key long, at long, m long", RIGHT_ROWS)
    right = right.with_watermark("at", 0, idle_after="200 ms").key_by("key")
    near = left.key_by("key").join(
        "near", right, how="left", between=(-4, 4), times=("ts", "at"), late=("late left", "late right")
    )
    near.select("n", "m").to("near out", tg.sinks.parquet(folder / "near"))
    near.side_output("late left").select("n").to("late left out", tg.sinks.parquet(folder / "late left"))
    near.side_output("late right").select("m").to("late right out", tg.sinks.parquet(folder / "late right"))
    latest = left.key_by("key").join("latest", right, how="left", as_of=("ts", "at"))
    latest.select("n", "m").to("latest out", tg.sinks.parquet(folder / "latest"))


def test_an_idle_side_holds_nothing_back_and_nothing_is_lost_or_doubled_over_a_kill(bench: Bench) -> None:
    job = bench.job()
    build(job, bench.folder)
    handle = bench.start(job)

    def emitted(name: str) -> Any:
        return [n for n, m in committed(bench.folder / name) if n > 3 * RIGHT_ROWS + 10]

    until(lambda: emitted("near") and emitted("latest"), "records behind the idle side", handle=handle)
    before = completed(handle)[-1]
    for pid in handle.attempts[-1].slots.values():
        os.kill(pid, signal.SIGKILL)
    seen = len(emitted("near")), len(emitted("latest"))
    until(
        lambda: len(emitted("near")) > seen[0] and len(emitted("latest")) > seen[1],
        "more of them, although the side is idle again",
        handle=handle,
    )
    assert len(handle.attempts) == 2 and completed(handle)[-1] > before
    bench.open_gate()
    assert handle.wait("1 minute") is tg.Status.FINISHED

    late_left, late_right = ({row[0] for row in committed(bench.folder / f"late {side}")} for side in ("left", "right"))
    lefts = [left_row(i) for i in range(LEFT_ROWS) if i not in late_left]
    rights = [right_row(i) for i in range(RIGHT_ROWS) if i not in late_right]
    expected: Counter[Any] = Counter()
    for key, ts, n in lefts:
        matches: list[int | None] = [m for other, at, m in rights if other == key and -4 <= at - ts <= 4]
        expected.update((n, m) for m in matches or [None])
    assert Counter(committed(bench.folder / "near")) == expected
    assert not late_left, "the side that was idle brings nothing behind the other"
    assert Counter(n for n, _ in committed(bench.folder / "latest")) == Counter(range(LEFT_ROWS))
