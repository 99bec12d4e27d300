"""Operators on columns that keep some records of each key, and a user's function on columns, with timers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa

import tidegate as tg
from tests.simulation.expected import expect_order, expect_rows
from tests.simulation.rows import keys_of_splits, rows_source
from tidegate.dataflow.pipeline import Pipeline
from tidegate.testing.simulation.faults import Trip
from tidegate.testing.simulation.site import Row, SimulatedJob, Site, StateOf

COUNT = 3
NTH = "key long, n long, nth long, total long"


class _Nth(tg.KeyedBatchProcess):
    """Numbers the records of each key, and adds them up. At the end of event time it tells how many there were."""

    sums = tg.columns("n long, total long", defaults={"n": 0, "total": 0})

    def __init__(self, trip: Trip) -> None:
        self.trip = trip

    def process(self, batch: pa.RecordBatch, ctx: tg.BatchContext) -> tg.Batches:
        self.trip.at(batch.num_rows)
        keys = ctx.keys
        before = self.sums.get_many(keys)
        count, total, n = before["n"].to_numpy(), before["total"].to_numpy(), batch["n"].to_numpy()
        running = np.empty(len(n), np.int64)
        for number in range(len(keys)):
            here = np.flatnonzero(keys.of == number)
            running[here] = total[number] + np.cumsum(n[here])
        nth = count[keys.of] + keys.nth + 1
        self.sums.set_many(keys, n=nth[keys.last], total=running[keys.last])
        ctx.timers.event_time(keys, 10**9)
        return pa.record_batch([batch["key"], batch["n"], nth, running], names=["key", "n", "nth", "total"])

    def on_timers(self, at: Any, ctx: tg.BatchContext) -> tg.Batches:
        keys = ctx.keys
        ends = pa.record_batch([keys.columns["key"], self.sums.get_many(keys)["n"]], names=["key", "n"])
        ctx.side("ends", ends)
        return None


class Ranks(SimulatedJob):
    """Source → key_by → deduplicate → sink; → top → sink; → over → sink; → sums → changes → top → sink; → a function on
    columns → sink, and its timers → sink."""

    name = "ranks"
    can_drain = False

    def __init__(self, rng: Random) -> None:
        count, splits = rng.randint(30, 100), rng.randint(1, 4)
        keys = keys_of_splits(rng, count, splits=splits, keys=rng.choice((rng.randint(1, 12), 40)))
        self._rows: list[Row] = [(key, number, number * 37 % 101) for number, key in enumerate(keys)]
        self._source = rows_source(self._rows, "key long, n long, x long", splits)

    def build(self, pipeline: Pipeline, site: Site) -> None:
        keyed = (
            pipeline.source("in", site.source(self._source), parallelism=site.parallelism("in"))
            .with_watermark("n", "1 s")
            .key_by("key")
        )
        first = keyed.deduplicate("first", parallelism=site.parallelism("first"))
        first.to("firsts", site.sink(), parallelism=site.parallelism("first"))
        top = keyed.top("top", COUNT, by="x", descending=True, parallelism=site.parallelism("top"))
        top.as_append().to("ranks", site.sink(), parallelism=site.parallelism("top"))
        sums = keyed.aggregate("sums", total=tg.sum("x"), parallelism=site.parallelism("sums"))
        changes = sums.as_changelog("changed sums", parallelism=site.parallelism("sums")).with_columns(part="key % 2")
        best = changes.key_by("part").top(
            "best sums", COUNT, by=["total", "key"], descending=True, parallelism=site.parallelism("best sums")
        )
        best.as_append().to("changes", site.sink(), parallelism=site.parallelism("best sums"))
        over = keyed.over("over", ["n", "x"], COUNT, total=tg.sum("x"), parallelism=site.parallelism("over"))
        over.to("totals", site.sink(), parallelism=site.parallelism("over"))
        sides = {"ends": "key long, n long"}
        nth = keyed.process("nth", _Nth(site.trip), NTH, side_outputs=sides, parallelism=site.parallelism("nth"))
        nth.to("all", site.sink(), parallelism=site.parallelism("nth"))
        nth.side_output("ends").to("ends", site.sink(), parallelism=site.parallelism("nth"))

    def check(self, rows: Callable[[str], list[Row]], state_of: StateOf, *, exact: bool) -> None:
        history: dict[int, list[Row]] = defaultdict(list)
        numbered = []
        for row in self._rows:
            seen = history[row[0]]
            seen.append(row)
            numbered.append((row[0], row[1], len(seen), sum(each[1] for each in seen)))
        expect_rows("first records", rows("firsts"), [seen[0] for seen in history.values()], exact=exact)
        if not exact:
            expect_rows("numbered", [row[:2] for row in rows("all")], [row[:2] for row in numbered], exact=False)
            return
        expect_rows("numbered", rows("all"), numbered)
        expect_order("numbered", rows("all"), numbered, lambda row: row[0])
        sums = {key: sum(row[2] for row in seen) for key, seen in history.items()}
        left: Counter[Row] = Counter()
        for kind, *values in rows("changes"):
            left[tuple(values)] += 1 if kind == "+I" else -1
        wanted = []
        for part in range(2):
            ordered = sorted(((total, key) for key, total in sums.items() if key % 2 == part), reverse=True)
            wanted += [(key, total, part, rank) for rank, (total, key) in enumerate(ordered[:COUNT], start=1)]
        expect_rows("best sums", left.elements(), wanted)
        totals = [
            (*row, sum(each[2] for each in seen[max(0, place - COUNT + 1) : place + 1]))
            for seen in history.values()
            for place, row in enumerate(seen)
        ]
        expect_rows("totals", rows("totals"), totals)
        expect_rows("ends", rows("ends"), [(key, len(seen)) for key, seen in history.items()])
        latest = {(row[0], row[3]): row for row in rows("ranks")}
        best = [
            (*row, rank)
            for seen in history.values()
            for rank, row in enumerate(sorted(seen, key=lambda row: -row[2])[:COUNT], start=1)
        ]
        expect_rows("ranks", latest.values(), best)
        expect_rows(
            "the state",
            [(key, value["n"]) for key, value in state_of("nth", "sums")],
            [(key, len(seen)) for key, seen in history.items()],
        )
