"""The job with windows on columns: aggregates by key and window, late records, and windows that fire again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from random import Random
from typing import Any

from tests.simulation.expected import expect_rows
from tests.simulation.rows import keys_of_splits, rows_source
from tidegate.dataflow.aggregates.declaring import count, sum_
from tidegate.dataflow.pipeline import Pipeline
from tidegate.dataflow.windows import Paned, Sessions, cumulating, sessions, sliding, tumbling
from tidegate.testing.simulation.site import Row, SimulatedJob, Site, StateOf

BEHIND_MS = 60
Bounds = tuple[int, int, int]  # key, start, end


class ColumnWindows(SimulatedJob):
    """Windows on columns, of all kinds that event time has."""

    name = "column windows"
    can_drain = False

    def __init__(self, rng: Random) -> None:
        rows = rng.randint(30, 90)
        self._splits = rng.choice((1, 2, 3))
        keys = keys_of_splits(rng, rows, splits=self._splits, keys=rng.choice((rng.randint(1, 6), 30)))
        self._assigner = rng.choice((tumbling("ts", 20), sliding("ts", 20, 10), cumulating("ts", 30, 10), sessions("ts", 7)))
        self._lateness_ms = rng.choice((0, 0, 15)) if isinstance(self._assigner, Paned) else 0
        # A record that is behind may join what is left of a session, or come too late for it: so sessions have none.
        is_late = 0.15 if isinstance(self._assigner, Paned) else 0
        self._late = {number for number in range(rows) if rng.random() < is_late}
        self._rows = [
            (key, max(1, 5 + number * 2 - rng.randrange(5) - BEHIND_MS * (number in self._late)), number)
            for number, key in enumerate(keys)
        ]
        self._source = rows_source(self._rows, "key long, ts long, n long", self._splits)
        self._idle_after = rng.choice((None, "10 ms"))

    def build(self, pipeline: Pipeline, site: Site) -> None:
        trip = site.trip

        def passes(record: Any) -> bool:
            trip.at(record)
            return True

        windows = (
            pipeline.source("in", site.source(self._source), parallelism=site.parallelism("in"))
            .with_watermark("ts", 8, idle_after=self._idle_after)
            .filter(passes, name="trip")
            .key_by("key")
            .window(self._assigner, allowed_lateness=self._lateness_ms, late="late")
            .aggregate("windows", parallelism=site.parallelism("windows"), count=count(), total=sum_("n"))
        )
        windows.as_append().to("out", site.sink(), parallelism=site.parallelism("out"))
        windows.side_output("late").to("late", site.sink(), parallelism=site.parallelism("late"))

    def check(self, rows: Callable[[str], list[Row]], state_of: StateOf, *, exact: bool) -> None:
        late = [row[2] for row in rows("late")]
        least = self._results({row[2] for row in self._rows} - self._late)
        if not exact:
            found = {(key, start, end) for key, start, end, *_ in rows("out")}
            assert isinstance(self._assigner, Sessions) or set(least) <= found, f"{set(least) - found} are missing"
            return
        assert len(late) == len(set(late)) and set(late) <= self._late, f"{set(late) - self._late} are late, and are not"
        most = self._results({row[2] for row in self._rows} - set(late))
        results: dict[Bounds, tuple[int, int]] = {}
        for key, start, end, n, total in rows("out"):
            bounds = key, start, end
            assert self._lateness_ms or bounds not in results, f"{bounds} was emitted twice"
            results[bounds] = max(results.get(bounds, (0, 0)), (n, total))
        if isinstance(self._assigner, Sessions) or self._assigner.is_one_pane:
            expect_rows("windows", results.items(), most.items())
        else:  # a record that is late for some of its windows is in the others
            assert set(least) <= set(results) <= set(most), f"{set(least) ^ set(results)}"
            for bounds, result in results.items():
                assert least.get(bounds, (0, 0)) <= result <= most[bounds], f"{bounds}: {result}"
        assert self._lateness_ms or not state_of("windows", "windows"), "all windows are closed"

    def _results(self, numbers: set[int]) -> dict[Bounds, tuple[int, int]]:
        """What windows of these records give."""
        inside: defaultdict[Bounds, list[int]] = defaultdict(list)
        rows = sorted((key, ts, n) for key, ts, n in self._rows if n in numbers)
        if isinstance(self._assigner, Sessions):
            for key, start, end in sessions_of([row[:2] for row in rows], self._assigner.gap_ms):
                inside[key, start, end] = [n for other, ts, n in rows if other == key and start <= ts < end]
        else:
            for key, ts, n in rows:
                pane = ts - ts % self._assigner.pane_ms
                for end in self._assigner.ends(pane, after_ms=-1000):
                    inside[key, *self._assigner.window(end)].append(n)
        return {bounds: (len(each), sum(each)) for bounds, each in inside.items()}


def sessions_of(rows: list[Row], gap_ms: int) -> list[Bounds]:
    """Return the sessions of keys and times, which are in order."""
    found: list[Bounds] = []
    for key, ts in rows:
        if found and found[-1][0] == key and ts <= found[-1][2]:
            found[-1] = key, found[-1][1], ts + gap_ms
        else:
            found.append((key, ts, ts + gap_ms))
    return found
