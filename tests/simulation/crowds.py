"""The job with crowds of timers: windows of many keys end together, and operators of one chain have work left at once."""

from __future__ import annotations

from collections import Counter
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

_WRONG = -1


class _Crowd(KeyedProcess):
    """Sums per window. What must not be is told under the time -1: a late record, a watermark that goes back, a timer that
    isn't due."""

    sums = state.map_("long", "long")
    reached = state.value("long", default=MIN_WATERMARK_MS)

    def __init__(self, trip: Trip, window_ms: int) -> None:
        self._trip = trip
        self._window_ms = window_ms

    def process(self, record: Any, ctx: Any) -> Iterable[Row]:
        self._trip.at(record)
        at_ms = ctx.watermark_ms
        if at_ms < self.reached.get() or record.ts <= at_ms:
            yield record.key, _WRONG, record.n
        if at_ms != MAX_WATERMARK_MS:
            self.reached.set(at_ms)
        end = record.ts - record.ts % self._window_ms + self._window_ms
        self.sums.put(end, self.sums.get(end, 0) + record.n)
        ctx.timers.event_time(end)
        ctx.timers.processing_time(ctx.now_ms() + 3)

    def on_timer(self, at: int, ctx: Any) -> Iterable[Row]:
        if at >= 1_000_000_000:
            return  # of processing time
        total = self.sums.get(at)
        if total is None or at > ctx.watermark_ms:
            yield ctx.key, _WRONG, at
        else:
            self.sums.remove(at)
            yield ctx.key, at, total


class Crowds(SimulatedJob):
    """source → watermark and map → key_by → windows → flat_map → filter → sink."""

    name = "crowds"
    can_drain = False

    def __init__(self, rng: Random) -> None:
        count = rng.randint(30, 90)
        self._splits = rng.choice((1, 1, 2, 3))
        keys = keys_of_splits(rng, count, splits=self._splits, keys=rng.choice((12, 40)))
        self._rows = [(key, max(1, 5 + number * 2 - rng.randrange(5)), number) for number, key in enumerate(keys)]
        self._window_ms = rng.choice((30, 100, 1000))
        self._source = rows_source(self._rows, "key long, ts long, n long", self._splits)
        # Without chaining, the splits would be one for a watermark behind the map.
        self._map_comes_first = self._splits == 1 and rng.random() < 0.7

    def build(self, pipeline: Pipeline, site: Site) -> None:
        stream = pipeline.source("in", site.source(self._source), parallelism=site.parallelism("in"))
        if not self._map_comes_first:
            stream = stream.with_watermark("ts", 8)
        stream = stream.map(tuple, returns="key long, ts long, n long", name="map")
        if self._map_comes_first:
            stream = stream.with_watermark("ts", 8)
        (
            stream.key_by("key")
            .process(
                "crowd",
                _Crowd(site.trip, self._window_ms),
                parallelism=site.parallelism("crowd"),
                returns="key long, at long, total long",
            )
            .flat_map(lambda row: [row, (row.key, row.at, -row.total)], returns="key long, at long, total long", name="both")
            .filter(lambda row: row.total > 0, name="one")
            .key_by("key")
            .to("out", site.sink(), parallelism=site.parallelism("out"))
        )

    def check(self, rows: Callable[[str], list[Row]], state_of: StateOf, *, exact: bool) -> None:
        expected: Counter[tuple[int, int]] = Counter()
        for key, ts, n in self._rows:
            expected[key, ts - ts % self._window_ms + self._window_ms] += n
        totals = [(key, at, total) for (key, at), total in expected.items() if total]
        if not exact:
            expect_rows("windows", [row[:2] for row in rows("out")], [row[:2] for row in totals], exact=False)
            return
        expect_rows("windows", rows("out"), totals)
        expect_order("windows", rows("out"), sorted(totals, key=lambda row: row[1]), lambda row: row[0])
        assert not state_of("crowd", "sums") and not state_of("crowd", "__event_timers"), "all windows are closed"
