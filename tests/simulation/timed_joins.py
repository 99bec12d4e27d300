"""The job with joins by event time: records of two sources that belong together, and those that have no partner."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from tests.simulation.expected import expect_rows
from tests.simulation.rows import keys_of_splits, rows_source
from tidegate.dataflow.pipeline import Pipeline
from tidegate.testing.simulation.site import Row, SimulatedJob, Site, StateOf

BEHIND_MS = 60
KINDS = ("inner", "left", "right", "full", "semi", "anti", "latest")


class TimedJoins(SimulatedJob):
    """Interval joins of all kinds, and joins as of a version. Often no record is late, so that the result is determined. If
    sources may be idle, or some records are far behind, late ones are in the side outputs, and the result is that of the
    others."""

    name = "timed joins"
    can_drain = False

    def __init__(self, rng: Random) -> None:
        self._how = rng.choice(KINDS)
        self._bounds = rng.choice(((0, 10), (-6, 6), (4, 30), (-20, -2)))
        key_count = rng.choice((rng.randint(1, 4), 20))
        self._rows: list[list[Row]] = []
        self._sources: list[tuple[str, int]] = []
        for names in ("key long, ts long, n long", "key long, at long, m long"):
            count, splits = rng.randint(10, 60), rng.choice((1, 2))
            keys = keys_of_splits(rng, count, splits=splits, keys=key_count)
            rows = [(key, max(1, 5 + number * 2 - rng.randrange(5)), number) for number, key in enumerate(keys)]
            self._rows.append(rows)
            self._sources.append((names, splits))
        self._idle_after = rng.choice((None, None, "5 ms", "10 ms"))
        is_behind = rng.choice((0.0, 0.15))
        self._rows = [
            [(key, max(1, at - BEHIND_MS * (rng.random() < is_behind)), number) for key, at, number in rows]
            for rows in self._rows
        ]
        self._may_be_late = self._idle_after is not None or is_behind > 0

    def build(self, pipeline: Pipeline, site: Site) -> None:
        trip = site.trip

        def passes(record: Any) -> bool:
            trip.at(record)
            return True

        left, right = (
            pipeline.source(name, site.source(rows_source(rows, *settings)), parallelism=site.parallelism(name))
            .with_watermark(time, 8, idle_after=self._idle_after)
            .filter(passes, name=f"trip {name}")
            .key_by("key")
            for name, time, rows, settings in zip(("left", "right"), ("ts", "at"), self._rows, self._sources, strict=True)
        )
        is_temporal = self._how == "latest"
        sides = ("late left",) if is_temporal else ("late left", "late right")
        kind: dict[str, Any] = (
            {"how": "left", "as_of": ("ts", "at"), "late": ("late left", None)}
            if is_temporal
            else {"how": self._how, "between": self._bounds, "times": ("ts", "at"), "late": sides}
        )
        joined = left.join("join", right, **kind, parallelism=site.parallelism("join"))
        joined.to("out", site.sink(), parallelism=site.parallelism("out"))
        for side in sides:
            joined.side_output(side).to(f"{side} out", site.sink(), parallelism=site.parallelism("late"))

    def check(self, rows: Callable[[str], list[Row]], state_of: StateOf, *, exact: bool) -> None:
        is_temporal = self._how == "latest"
        late = rows("late left out"), [] if is_temporal else rows("late right out")
        if not exact:
            if self._how not in ("semi", "anti", "latest") and not self._may_be_late:
                missing = set(self._results(self._rows)[0]) - set(rows("out"))
                assert not missing, f"{missing} are missing"
            return
        assert self._may_be_late or late == ([], []), "nothing is late"
        for given, of_side in zip(late, self._rows, strict=True):
            assert len(given) == len(set(given)) and set(given) <= set(of_side), "a record is late once"
        in_time = [[each for each in of_side if each not in given] for given, of_side in zip(late, self._rows, strict=True)]
        if is_temporal and self._may_be_late:
            self._check_versions(rows("out"), in_time[0])
        else:
            expect_rows("joined", rows("out"), self._results(in_time)[1])

    def _check_versions(self, rows: list[Row], lefts: list[Row]) -> None:
        """A late version counts for the records that are still to come, and nobody knows which these are."""
        expect_rows("left records", [row[:3] for row in rows], lefts)
        versions = set(self._rows[1])
        for key, ts, _, at, m in rows:
            assert at is None or ((key, at, m) in versions and at <= ts), f"{at} is no version at {ts}"

    def _results(self, of_sides: list[list[Row]]) -> tuple[list[Row], list[Row]]:
        """Return the pairs, and all rows of the result of these records."""
        lefts, rights = of_sides
        lower, upper = self._bounds
        found = [
            (one, other) for one in lefts for other in rights if one[0] == other[0] and lower <= other[1] - one[1] <= upper
        ]
        with_match = {one for one, _ in found}, {other for _, other in found}
        if self._how == "latest":
            return [], [self._with_latest(left) for left in lefts]
        pairs = [(*one, *other[1:]) for one, other in found]
        alone = [[each for each in side if each not in those] for side, those in zip(of_sides, with_match, strict=True)]
        if self._how == "semi":
            return pairs, list(with_match[0])
        if self._how == "anti":
            return pairs, alone[0]
        results = list(pairs)
        if self._how in ("left", "full"):
            results += [(*each, None, None) for each in alone[0]]
        if self._how in ("right", "full"):
            results += [(key, None, None, *rest) for key, *rest in alone[1]]
        return pairs, results

    def _with_latest(self, left: Row) -> Row:
        """Of versions with one time the last one counts: all records of a key are in one split, in their order."""
        versions = [(at, m) for key, at, m in self._rows[1] if key == left[0] and at <= left[1]]
        return (*left, *max(versions, default=(None, None)))
