"""The job with event time: windows by timers, late records, and every kind of keyed state."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

from tests.simulation.expected import expect_order, expect_rows
from tests.simulation.rows import keys_of_splits, rows_source
from tidegate.dataflow.functions import KeyedProcess
from tidegate.dataflow.pipeline import Pipeline
from tidegate.protocol.watermarks import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.state import declaring as state
from tidegate.testing.simulation.faults import Trip
from tidegate.testing.simulation.site import Row, SimulatedJob, Site, StateOf

WINDOW_MS = 20
BEHIND_MS = 60
_KEPT = 4


def _moved(pair: list[int], n: int) -> list[int]:
    pair[0] += n
    pair[1] += 1
    return pair


class _Windows(KeyedProcess):
    """Sums per window by event-time timers; per record a maximum, a running pair and the last few numbers. What is late is
    told, under the window's end with a minus, and counts for no window. A key whose event time goes back, or is ahead of a
    record that isn't one of the `late`, is told with a number that no record has."""

    sums = state.map_("long", "long")
    recent = state.list_("long")
    best = state.reducing("long", max)
    spread = state.aggregating("array<long>", create=lambda: [0, 0], add=_moved, result=tuple)
    trail = state.value("array<long>")
    looks = state.value("long", default=0)
    reached = state.value("long", default=MIN_WATERMARK_MS)

    def __init__(self, trip: Trip, late: frozenset[int]) -> None:
        self._trip = trip
        self._late = late

    def process(self, record: Any, ctx: Any) -> Iterable[Row]:
        self._trip.at(record)
        reached, at_ms = self.reached.get(), ctx.watermark_ms
        if at_ms < reached or (record.ts <= at_ms and record.n not in self._late):
            yield record.key, 0, -1 - record.n, reached, at_ms, record.ts
        if reached < at_ms < MAX_WATERMARK_MS:
            self.reached.set(at_ms)
        end = record.ts - record.ts % WINDOW_MS + WINDOW_MS
        if end <= ctx.watermark_ms:
            yield record.key, -end, record.n, 0, 0, 0
        else:
            self.sums.put(end, self.sums.get(end, 0) + record.n)
            ctx.timers.event_time(end)
        self.recent.add(record.n)
        if len(self.recent.get()) > _KEPT:
            self.recent.replace(self.recent.get()[-2:])
        self.best.add(record.n)
        self.spread.add(record.n)
        trail = self.trail.get() or []
        trail.append(record.n)
        self.trail.set(trail[-3:])
        ctx.timers.processing_time(ctx.now_ms() + 5)
        last = sum(self.recent.get()) + sum(trail[-3:])
        yield record.key, 0, record.n, self.best.get(), sum(self.spread.get() or ()), last

    def on_timer(self, at: int, ctx: Any) -> Iterable[Row]:
        if at >= 1_000_000_000:
            self.looks.set(self.looks.get() + 1)  # of the clock: nothing that is told
            return
        total = self.sums.get(at)
        if total is not None:
            self.sums.remove(at)
            yield ctx.key, at, total, 0, 0, 0


class Windows(SimulatedJob):
    """Event time: watermarks, timers, and every kind of keyed state."""

    name = "windows"
    can_drain = False

    def __init__(self, rng: Random) -> None:
        count = rng.randint(30, 90)
        self._splits = rng.choice((1, 1, 2, 3))
        keys = keys_of_splits(rng, count, splits=self._splits, keys=rng.choice((rng.randint(1, 6), 30)))
        # Each split has a watermark of its own, so nothing is late but what is far behind.
        self._late = {number for number in range(count) if rng.random() < 0.15}
        self._rows = [
            (key, max(1, 5 + number * 2 - rng.randrange(5) - BEHIND_MS * (number in self._late)), number)
            for number, key in enumerate(keys)
        ]
        self._source = rows_source(self._rows, "key long, ts long, n long", self._splits)
        self._idle_after = rng.choice((None, "10 ms"))

    def build(self, pipeline: Pipeline, site: Site) -> None:
        (
            pipeline.source("in", site.source(self._source), parallelism=site.parallelism("in"))
            .with_watermark("ts", 8, idle_after=self._idle_after)
            .key_by("key")
            .process(
                "windows",
                _Windows(site.trip, frozenset(self._late)),
                parallelism=site.parallelism("windows"),
                returns="key long, at long, n long, best long, spread long, recent long",
            )
            .key_by("key")
            .to("out", site.sink(), parallelism=site.parallelism("out"))
        )

    def check(self, rows: Callable[[str], list[Row]], state_of: StateOf, *, exact: bool) -> None:
        out = rows("out")
        records, windows = self._expected()
        found: Counter[tuple[int, int]] = Counter()
        fired = [row for row in out if row[1] > 0]
        for key, at, total, *_ in out:
            if at:
                found[key, abs(at)] += total
        if exact:
            expect_rows("records", [row for row in out if row[1] == 0], records)
            expect_order("records", [row for row in out if row[1] == 0], records, lambda row: row[0])
            expect_rows("window sums", found.items(), windows.items())
        else:
            expect_rows("records", [row[:3] for row in out if row[1] == 0], [row[:3] for row in records], exact=False)
            expect_rows("windows", found.elements(), windows.elements(), exact=False)
        if exact:
            late = {row[2] for row in out if row[1] < 0}
            assert late <= self._late, f"{sorted(late - self._late)} are late, which they are not in their split"
            assert len(fired) == len({row[:2] for row in fired}), f"a window that was closed has opened again: {fired}"
            expect_order("windows", fired, sorted(fired, key=lambda row: row[1]), lambda row: row[0])
        assert not state_of("windows", "sums") and not state_of("windows", "__event_timers"), "all windows are closed"

    def _expected(self) -> tuple[list[Row], Counter[tuple[int, int]]]:
        seen: defaultdict[int, list[int]] = defaultdict(list)
        recent: defaultdict[int, list[int]] = defaultdict(list)
        windows: Counter[tuple[int, int]] = Counter()
        records: list[Row] = []
        for key, ts, n in self._rows:
            seen[key].append(n)
            recent[key].append(n)
            if len(recent[key]) > _KEPT:
                recent[key] = recent[key][-2:]
            windows[key, ts - ts % WINDOW_MS + WINDOW_MS] += n
            records.append(
                (key, 0, n, max(seen[key]), sum(seen[key]) + len(seen[key]), sum(recent[key]) + sum(seen[key][-3:]))
            )
        return records, windows
