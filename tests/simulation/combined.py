"""Aggregates that are computed in part before the exchange. Each layout has limits of its own, or does without."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from random import Random
from typing import Any

import tidegate as tg
from tests.simulation.expected import expect_rows
from tests.simulation.rows import keys_of_splits, rows_source
from tidegate.dataflow.operators.combine import CombineLimits
from tidegate.dataflow.pipeline import Pipeline
from tidegate.testing.simulation.site import Row, SimulatedJob, Site, StateOf


class Combined(SimulatedJob):
    """Source → key_by → aggregate → sink. Sometimes two streams are united, and the records come from a shuffle."""

    name = "combined aggregates"

    def __init__(self, rng: Random) -> None:
        count, splits = rng.randint(30, 120), rng.randint(1, 4)
        keys = keys_of_splits(rng, count, splits=splits, keys=rng.choice((rng.randint(1, 4), rng.randint(4, 12), 60)))
        self._rows: list[Row] = [(key, f"k{key}", number, number * 37 % 101) for number, key in enumerate(keys)]
        self._source = rows_source(self._rows, "key long, also string, n long, x long", splits)
        self._key = ("key", "also") if rng.random() < 0.5 else ("key",)
        self._is_shuffled = rng.random() < 0.3

    def combine(self, site: Site) -> CombineLimits | None:
        if site.rng.random() < 0.2:
            return None
        return CombineLimits(
            hold_ms=site.rng.choice((1, 5, 40, 1000)),
            records=site.rng.choice((6, 20, 1000)),
            keys=site.rng.choice((2, 5, 100)),
            enough_records=site.rng.choice((1, 8, 1000)),
            enough_per_key=site.rng.choice((1, 3)),
            least_passed=site.rng.randint(1, 20),
            most_passed=40,
        )

    def build(self, pipeline: Pipeline, site: Site) -> None:
        def trip(row: Any) -> bool:
            site.trip.at(row)
            return True

        stream = pipeline.source("in", site.source(self._source), parallelism=site.parallelism("in"))
        if self._is_shuffled:  # records of one key stay together
            stream = stream.key_by("key").running("before", nth=tg.count(), parallelism=site.parallelism("before"))
        latest = (
            stream.filter(trip)
            .with_watermark("n", "1 s")
            .key_by(*self._key)
            .aggregate(
                "latest",
                rows=tg.count(),
                total=tg.sum("n + 0"),
                average=tg.mean("x"),
                low=tg.min("x"),
                first=tg.first("n"),
                last=tg.last("n"),
                best=tg.max_by("n", by="x % 7"),
                text=tg.max("also"),
                parallelism=site.parallelism("latest"),
            )
        )
        latest.as_append().to("upserts", site.sink(), parallelism=site.parallelism("latest"))

    def check(self, rows: Callable[[str], list[Row]], state_of: StateOf, *, exact: bool) -> None:
        width = len(self._key)
        history: defaultdict[Row, list[Row]] = defaultdict(list)
        for row in self._rows:
            history[row[:width]].append(row)
        updates: defaultdict[Row, list[Row]] = defaultdict(list)
        for row in rows("upserts"):
            updates[row[:width]].append(row)
        assert updates.keys() == history.keys(), f"{updates.keys() ^ history.keys()}"
        if not exact:
            return
        for key, seen in history.items():
            found = updates[key]
            assert found == [_result(key, seen[: row[width]]) for row in found], f"updates of {key}: {found}"
            assert [row[width] for row in found] == sorted({row[width] for row in found}), f"updates of {key}: {found}"
            assert found[-1][width] == len(seen), f"the last update of {key} is {found[-1]}"
        expect_rows(
            "the state",
            [(key, value["rows_count"], value["last_last_value"]) for key, value in state_of("latest", "aggregates")],
            [(key if width == 2 else key[0], len(seen), seen[-1][2]) for key, seen in history.items()],
        )


def _result(key: Row, seen: list[Row]) -> Row:
    numbers, xs = [row[2] for row in seen], [row[3] for row in seen]
    by = [x % 7 for x in xs]
    best = numbers[by.index(max(by))]
    return (*key, len(seen), sum(numbers), sum(xs) / len(xs), min(xs), numbers[0], numbers[-1], best, seen[0][1])
