"""A whole job with windows of every other kind: joined, of functions, of a number of records, of processing time. Its slots
are killed, and it is rescaled."""

from __future__ import annotations

import os
import signal
from collections import Counter, defaultdict
from typing import Any

import pytest

import tidegate as tg
from tests.jobs import GatedSource, committed, completed, until
from tests.unit.jobs.conftest import Bench
from tests.unit.jobs.test_job_backends import BACKENDS
from tidegate.connectors.generator import GeneratorSource
from tidegate.testing.processes import ProcessJob

ROWS, RATE = 20_000, 1000
KEYS, SIZE_MS, COUNT = 20, 100, 5


def number(i: int) -> tuple[int, int, int]:
    return i % KEYS, i, i


def build(job: ProcessJob, folder: Any) -> None:
    def listed(window: tg.KeyedWindow, records: Any) -> Any:
        return [(window.key, window.start, [record.n for record in records])]

    def source(name: str) -> tg.Stream:
        made = tg.sources.generator(
            make_row=number, schema=f"key long, {name}_ts long, n long", rows=ROWS, rate=RATE, splits=1
        )
        assert isinstance(made, GeneratorSource)
        gated = GatedSource(generator=made, gate=str(folder / "gate"))
        return job.source(name, gated, parallelism=1).with_watermark(f"{name}_ts", "0 s")

    left, right = source("left"), source("right")
    third = right.filter("n % 3 = 0").select("key", "right_ts", "n AS other")
    windows = left.key_by("key").window(tg.tumbling("left_ts", SIZE_MS))
    windows.join("joined", third.key_by("key").window(tg.tumbling("right_ts", SIZE_MS)), how="left").select(
        "key", "n", "other", "window_start"
    ).to("joined out", tg.sinks.parquet(folder / "joined"))
    windows.apply("lists", listed, returns="key long, start long, numbers array<long>", rows=True).to(
        "lists out", tg.sinks.parquet(folder / "lists")
    )
    fives = left.key_by("key").window(tg.global_window(count=COUNT)).aggregate("fives", n=tg.count(), total=tg.sum("n"))
    fives.to("fives out", tg.sinks.parquet(folder / "fives"))
    sevens = left.key_by("key").window(tg.global_window(), trigger=tg.every_records(7) | tg.after("50 ms"), purge=True)
    sevens.apply("sevens", listed, returns="key long, start long, numbers array<long>", rows=True).to(
        "sevens out", tg.sinks.parquet(folder / "sevens")
    )

    def counted(window: tg.KeyedWindow, ones: Any, others: Any) -> Any:
        return [(window.key, len(ones), len(others), window.end - window.start)]

    together = (
        left.key_by("key")
        .window(tg.sessions("left_ts", KEYS - 1))
        .cogroup(
            "sessions",
            third.key_by("key").window(tg.sessions("right_ts", KEYS - 1)),
            counted,
            returns="key long, ones long, others long, long_ms long",
            rows=True,
        )
    )
    together.to("sessions out", tg.sinks.parquet(folder / "sessions"))
    by_clock = left.key_by("key").window(tg.tumbling(None, "100 ms", time="processing"))
    by_clock.aggregate("by clock", n=tg.count(), total=tg.sum("n")).to("clock out", tg.sinks.parquet(folder / "clock"))


@pytest.mark.parametrize("backend", ["heap", pytest.param("rocksdb", marks=pytest.mark.long)])
def test_every_record_is_in_its_windows_once_over_kills_and_a_rescale(bench: Bench, backend: str) -> None:
    job = ProcessJob(
        "windows",
        slots=2,
        backend=BACKENDS[backend],
        restart=tg.FixedDelay(attempts=20, delay=0),
        snapshots=tg.Snapshots(to=str(bench.snapshots), every="100 ms"),
    )
    build(job, bench.folder)
    handle = bench.start(job)
    until(lambda: len(completed(handle)) > 2, "snapshots", handle=handle)
    for pid in handle.attempts[-1].slots.values():
        os.kill(pid, signal.SIGKILL)
    until(lambda: len(handle.attempts) == 2, "another attempt", handle=handle)
    handle.rescale(3)
    bench.open_gate()
    assert handle.wait("1 minute") is tg.Status.FINISHED

    inside: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for key, ts, n in map(number, range(ROWS)):
        inside[key, ts // SIZE_MS * SIZE_MS].append(n)
    assert sorted((key, start, list(numbers)) for key, start, numbers in committed(bench.folder / "lists")) == sorted(
        (key, start, numbers) for (key, start), numbers in inside.items()
    )
    nothing: list[int | None] = [None]
    joined = [
        (key, n, other, start)
        for (key, start), numbers in inside.items()
        for n in numbers
        for other in [each for each in numbers if each % 3 == 0] or nothing
    ]
    assert Counter(committed(bench.folder / "joined")) == Counter(joined)
    of_keys = {key: [n for number_key, _, n in map(number, range(ROWS)) if number_key == key] for key in range(KEYS)}
    fives = [
        (key, COUNT, sum(numbers[start : start + COUNT]))
        for key, numbers in of_keys.items()
        for start in range(0, len(numbers) - COUNT + 1, COUNT)
    ]
    assert sorted(committed(bench.folder / "fives")) == sorted(fives)
    by_clock = committed(bench.folder / "clock")
    totals: Counter[int] = Counter()
    for key, _, _, _, total in by_clock:
        totals[key] += total
    assert totals == {key: sum(numbers) for key, numbers in of_keys.items()}, "the windows go by the clock, the sums don't"
    assert sum(row[3] for row in by_clock) == ROWS and len(by_clock) > 2 * KEYS
    sevens: defaultdict[int, list[int]] = defaultdict(list)
    for key, _, numbers in committed(bench.folder / "sevens"):
        sevens[key] += numbers
    assert sevens == of_keys, "each record is given to one call, in order"
    # The records of a key are KEYS apart, and the gap is shorter: each is a session, with that of the other side.
    sessions = [(key, 1, int(n % 3 == 0), KEYS - 1) for key, _, n in map(number, range(ROWS))]
    assert Counter(committed(bench.folder / "sessions")) == Counter(sessions)
