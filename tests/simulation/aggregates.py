"""Keyed aggregates on columnar state: the results after each batch as upserts, and those after each record."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import tidegate as tg
from tests.simulation.expected import expect_order, expect_rows
from tests.simulation.rows import keys_of_splits, rows_source
from tidegate.dataflow.pipeline import Pipeline
from tidegate.testing.simulation.site import Row, SimulatedJob, Site, StateOf


class Aggregates(SimulatedJob):
    """Source → key_by → aggregate → sink, by key; and the same records → running → sink."""

    name = "aggregates"

    def __init__(self, rng: Random) -> None:
        count, splits = rng.randint(30, 100), rng.randint(1, 4)
        keys = keys_of_splits(rng, count, splits=splits, keys=rng.choice((rng.randint(1, 12), 40)))
        self._rows: list[Row] = [(key, f"k{key}", number, number * 37 % 101) for number, key in enumerate(keys)]
        self._source = rows_source(self._rows, "key long, also string, n long, x long", splits)
        self._key = ("key", "also") if rng.random() < 0.5 else ("key",)
        self._by_key_to_sink = rng.random() < 0.5

    def build(self, pipeline: Pipeline, site: Site) -> None:
        def trip(row: Any) -> bool:
            site.trip.at(row)
            return True

        keyed = (
            pipeline.source("in", site.source(self._source), parallelism=site.parallelism("in"))
            .filter(trip)
            .key_by(*self._key)
        )
        upserts = keyed.aggregate(
            "latest",
            rows=tg.count(),
            total=tg.sum("n + 0"),
            average=tg.mean("x"),
            best=tg.max_by("n", by="x"),
            numbers=tg.collect_list("n"),
            parallelism=site.parallelism("latest"),
        ).as_append()
        if self._by_key_to_sink:
            upserts.key_by("key").to("upserts", site.sink(), parallelism=site.parallelism("upserts"))
        else:
            upserts.to("upserts", site.sink(), parallelism=site.parallelism("latest"))
        keyed.running(
            "running", total=tg.sum("n"), low=tg.min("x"), last=tg.last("n"), parallelism=site.parallelism("running")
        ).to("all", site.sink(), parallelism=site.parallelism("running"))

    def check(self, rows: Callable[[str], list[Row]], state_of: StateOf, *, exact: bool) -> None:
        history: dict[Row, list[Row]] = {}
        running = []
        for row in self._rows:
            seen = history.setdefault(row[:2], [])
            seen.append(row)
            running.append((*row, sum(each[2] for each in seen), min(each[3] for each in seen), row[2]))
        if not exact:
            expect_rows("running", [row[:4] for row in rows("all")], [row[:4] for row in running], exact=False)
            return
        expect_rows("running aggregates", rows("all"), running)
        expect_order("running aggregates", rows("all"), running, lambda row: row[0])
        width = len(self._key)
        updates: dict[Row, list[Row]] = {}
        for row in rows("upserts"):
            updates.setdefault(row[:width], []).append(row)
        expect_rows("keys", list(updates), [key[:width] for key in history])
        for key, seen in history.items():
            found = updates[key[:width]]
            assert found == [self._result(seen[: row[width]]) for row in found], f"updates of {key}: {found}"
            assert [row[width] for row in found] == sorted({row[width] for row in found}), f"updates of {key}: {found}"
            assert found[-1][width] == len(seen), f"the last update of {key} is {found[-1]}"
        expect_rows(
            "the state",
            [(key, value["rows_count"], value["numbers_collect_list"]) for key, value in self._held(state_of)],
            [(key if width == 2 else key[0], len(seen), tuple(row[2] for row in seen)) for key, seen in history.items()],
        )

    def _result(self, seen: list[Row]) -> Row:
        numbers, xs = [row[2] for row in seen], [row[3] for row in seen]
        best = numbers[xs.index(max(xs))]
        return (*seen[0][: len(self._key)], len(seen), sum(numbers), sum(xs) / len(xs), best, numbers)

    @staticmethod
    def _held(state_of: StateOf) -> list[tuple[Any, dict[str, Any]]]:
        return [
            (key, value | {"numbers_collect_list": tuple(value["numbers_collect_list"])})
            for key, value in state_of("latest", "aggregates")
        ]
