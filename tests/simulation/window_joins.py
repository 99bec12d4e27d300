"""The job with windows of records: a full join of two streams by key and window or session, and a function of whole windows,
which a trigger may call early."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

from tests.simulation.column_windows import sessions_of
from tests.simulation.expected import expect_rows
from tests.simulation.rows import keys_of_splits, rows_source
from tidegate.dataflow.operators.window_results import KeyedWindow
from tidegate.dataflow.pipeline import Pipeline
from tidegate.dataflow.triggers import after, every_records
from tidegate.dataflow.windows import sessions, sliding
from tidegate.testing.simulation.site import Row, SimulatedJob, Site, StateOf

BEHIND_MS = 60
SIZE_MS = 20
GAP_MS = 7
LEAST = 3
"""The trigger fires for so many records."""


class WindowJoins(SimulatedJob):
    """Joins two streams by key and window, and lists the records of each key and window of one of them."""

    name = "window joins"
    can_drain = False

    def __init__(self, rng: Random) -> None:
        self._splits = rng.choice((1, 2))
        keys = rng.choice((rng.randint(1, 4), 15))
        self._left, self._right = (self._records(rng, rng.randint(10, 50), keys) for _ in range(2))
        # Only the left input has late records. They are known afterwards: those in the side output.
        self._late = {number for number in range(len(self._left)) if rng.random() < 0.1}
        self._left = [
            (key, max(1, ts - BEHIND_MS * (number in self._late)), number) for number, (key, ts, _) in enumerate(self._left)
        ]
        self._every_ms = rng.choice((SIZE_MS, SIZE_MS // 2))
        self._is_early = self._every_ms == SIZE_MS and rng.random() < 0.5
        self._of_sessions = rng.random() < 0.4
        if self._of_sessions:  # a record that is behind may join what is left of a session
            self._left, self._late = [(key, 5 + number * 3, number) for key, _, number in self._left], set()
        self._sources = [rows_source(rows, "key long, ts long, n long", self._splits) for rows in (self._left, self._right)]

    def _records(self, rng: Random, count: int, keys: int) -> list[Row]:
        found = keys_of_splits(rng, count, splits=self._splits, keys=keys)
        return [(key, 5 + number * 3 - rng.randrange(5), number) for number, key in enumerate(found)]

    def build(self, pipeline: Pipeline, site: Site) -> None:
        trip = site.trip

        def list_records(window: KeyedWindow, records: Sequence[Any]) -> Iterator[Row]:
            trip.at(window)
            yield window.key, window.start, window.end, ",".join(str(record.n) for record in records)

        def of(name: str, source: Any, column: str, late: str | None) -> Any:
            stream = pipeline.source(name, site.source(source), parallelism=site.parallelism(name)).with_watermark("ts", 8)
            renamed = stream.select("key", f"ts AS {column}", f"n AS {name}")
            assigner = sessions(column, GAP_MS) if self._of_sessions else sliding(column, SIZE_MS, self._every_ms)
            return renamed.key_by("key").window(assigner, late=late)

        left, right = of("l", self._sources[0], "left_ts", "late"), of("r", self._sources[1], "right_ts", None)
        joined = left.join("joined", right, how="full", parallelism=site.parallelism("joined"))
        joined.to("out", site.sink(), parallelism=site.parallelism("out"))
        joined.side_output("late").to("late", site.sink(), parallelism=site.parallelism("late"))
        listed = pipeline.source("f", site.source(self._sources[1]), parallelism=site.parallelism("f"))
        early: dict[str, Any] = {"trigger": every_records(LEAST) | after("20 ms"), "purge": True} if self._is_early else {}
        windows = listed.with_watermark("ts", 8).key_by("key").window(sliding("ts", SIZE_MS, self._every_ms), **early)
        lists = windows.apply(
            "lists",
            list_records,
            returns="key long, start long, end long, numbers string",
            rows=True,
            parallelism=site.parallelism("lists"),
        )
        lists.to("listed", site.sink(), parallelism=site.parallelism("listed"))

    def check(self, rows: Callable[[str], list[Row]], state_of: StateOf, *, exact: bool) -> None:
        late = {row[2] for row in rows("late")}
        certain = self._joined([row for row in self._left if row[2] not in self._late])
        possible = self._joined([row for row in self._left if row[2] not in late])
        self._check_lists(rows("listed"), exact=exact)
        if not exact:
            return
        found = Counter((*row[:1], *row[2:3], *row[4:]) for row in rows("out"))
        assert late <= self._late, f"{late - self._late} are late, and are not"
        if self._every_ms == SIZE_MS or self._of_sessions:
            expect_rows("joined", found.elements(), possible)
        else:  # a record that is late for some of its windows is in the others
            matched = {row for row in certain if row[1] is not None and row[2] is not None}
            assert matched <= set(found), f"{matched - set(found)} are missing"
            assert max(found.values()) == 1, "no row twice"
        for operator, state in (("joined", "left"), ("joined", "right"), ("lists", "records")):
            assert not state_of(operator, state), "all windows are closed"
        assert not self._is_early or not state_of("lists", "triggers"), "and nothing is left of their triggers"

    def _check_lists(self, rows: list[Row], *, exact: bool) -> None:
        """Each record is in the list of its window. If a trigger purges, it is in one of the lists of its window."""
        inside = self._windows_of(self._right)
        seen: defaultdict[Row, list[int]] = defaultdict(list)
        for *bounds, numbers in rows:
            seen[tuple(bounds)] += map(int, numbers.split(","))
        if not exact:  # a record may be in a list twice
            assert {bounds: set(numbers) for bounds, numbers in seen.items()} == {
                bounds: set(numbers) for bounds, numbers in inside.items()
            }
        else:
            listed, expected = ([(*bounds, *numbers) for bounds, numbers in each.items()] for each in (seen, inside))
            expect_rows("listed", listed, expected)
            assert self._is_early or len(rows) == len(inside), "a window is listed once"

    def _joined(self, left: list[Row]) -> list[Row]:
        """Return key, left number, right number and bounds of what a full join gives."""
        lefts, rights = self._windows(left, self._right)
        joined: list[Row] = []
        for bounds in lefts.keys() | rights.keys():
            ones, others = lefts.get(bounds, [None]), rights.get(bounds, [None])
            joined += [(bounds[0], one, other, *bounds[1:]) for one in ones for other in others]
        return joined

    def _windows(self, left: list[Row], right: list[Row]) -> tuple[dict[Row, list[Any]], dict[Row, list[Any]]]:
        """Return the numbers of both sides by key and bounds."""
        if not self._of_sessions:
            return self._windows_of(left), self._windows_of(right)
        found: tuple[defaultdict[Row, list[Any]], defaultdict[Row, list[Any]]] = defaultdict(list), defaultdict(list)
        both = sorted((key, ts, side, number) for side, rows in enumerate((left, right)) for key, ts, number in rows)
        for key, start, end in sessions_of([row[:2] for row in both], GAP_MS):
            for other, ts, side, number in both:
                if other == key and start <= ts < end:
                    found[side][key, start, end].append(number)
        return found

    def _windows_of(self, rows: list[Row]) -> dict[Row, list[Any]]:
        inside: defaultdict[Row, list[Any]] = defaultdict(list)
        for key, ts, number in rows:
            for start in range(ts - ts % self._every_ms, ts - SIZE_MS, -self._every_ms):
                inside[key, start, start + SIZE_MS].append(number)
        return dict(inside)
