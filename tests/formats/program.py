"""A job with state of every shape, whose snapshots are kept as fixtures.

A later version must restore what this program wrote, so don't change what is here: add operators, and write fixtures with
another name. No pytest in here: slots import this module.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import tidegate as tg
from tidegate.dataflow.contracts import SourceContext, SourceReader
from tidegate.testing.processes import ProcessJob
from tidegate.types import batch_of, parse_schema

Row = tuple[Any, ...]

SCHEMA = "key long, word string, x long, ts long"
ROWS: list[Row] = [(i * i % 23, f"w{i % 5}" if i % 11 else None, i * 37 % 101, 1_000 * i) for i in range(240)]
HALF = 120
RULES: list[Row] = [("a", 1), ("b", 2), ("a", 3)]
FAR_MS = 4_102_444_800_000  # 2100-01-01
# Columns that depend on how records came together in batches, and state that does or that depends on the clock.
UNSTEADY = {"position", "window", "id", "trigger_records", "about_approx_count_distinct"}
VOLATILE = {
    ("hoard", "seen"),
    ("temporal", "versions"),
    ("shapes", "fading"),
    ("shapes", "fading_items"),
    ("shapes", "fading_map"),
    ("running", "aggregates"),
    ("limited", "buckets"),
}


class Feed(tg.Source):
    """Reads rows, and then waits for more."""

    bounded = False

    def __init__(self, rows: list[Row], schema: str) -> None:
        self._schema = parse_schema(schema)
        self._rows = rows

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    def open(self, context: SourceContext) -> SourceReader:
        return _Reader(self._rows, self._schema, context)


class _Reader(SourceReader):
    def __init__(self, rows: list[Row], schema: pa.Schema, context: SourceContext) -> None:
        self._rows = rows
        self._schema = schema
        self._done = int(context.restored.get("rows", 0))

    def poll(self, max_rows: int) -> pa.RecordBatch | None:
        rows = self._rows[self._done : self._done + min(max_rows, 16)]
        self._done += len(rows)
        return batch_of(rows, self._schema) if rows else None

    def offsets(self) -> dict[str, int]:
        return {"rows": self._done}

    @property
    def finished(self) -> bool:
        return False


class Shapes(tg.KeyedProcess):
    """Every shape of keyed state, and timers of both kinds."""

    latest = tg.value("string")
    count = tg.value("long", default=0)
    pair = tg.value("struct<first:long,last:long>", name="first and last")
    numbers = tg.list("long")
    words = tg.list("string")
    by_word = tg.map("string", "long")
    highest = tg.reducing("long", max)
    mean = tg.aggregating(
        "struct<total:double,count:long>",
        create=lambda: {"total": 0.0, "count": 0},
        add=lambda acc, n: {"total": acc["total"] + n, "count": acc["count"] + 1},
        result=lambda acc: acc["total"] / acc["count"],
    )
    anything = tg.value(tg.pickled())
    fading = tg.value("long", ttl="10000 days")
    fading_items = tg.list("long", ttl="10000 days")
    fading_map = tg.map("long", "string", ttl="10000 days")

    def process(self, record: Any, ctx: Any) -> Iterator[Row]:
        self.latest.set(record.word)
        self.count.set(self.count.get() + 1)
        pair = self.pair.get() or {"first": record.x}
        self.pair.set({"first": pair["first"], "last": record.x})
        self.numbers.add(record.x)
        self.words.add(record.word)
        if record.word is not None:
            self.by_word.put(record.word, self.by_word.get(record.word, 0) + 1)
        self.highest.add(record.x)
        self.mean.add(record.x)
        self.anything.set((self.anything.get() or ()) + ({"x": record.x},))
        self.fading.set(record.x)
        self.fading_items.add(record.x)
        self.fading_map.put(record.x, record.word)
        ctx.timers.event_time(record.ts + 30_000)
        ctx.timers.processing_time(FAR_MS + record.key)
        yield record.key, self.count.get(), self.mean.get()

    def on_timer(self, at: int, ctx: Any) -> Iterator[Row]:
        yield ctx.key, -1, float(at)


class Hoard(tg.Process):
    """Operator state of both kinds."""

    kept = tg.operator_list("long", redistribute="split")
    seen = tg.operator_list("string", redistribute="union")

    def process(self, record: Any, ctx: Any) -> Iterator[Row]:
        self.kept.add(record.x)
        if record.x % 50 == 0:
            self.seen.add(f"{record.x} at {record.ts}")
        yield (record.x,)


class Rules(tg.BroadcastProcess):
    factors = tg.broadcast_map("string", "long")
    applied = tg.value("long", default=0)

    def process(self, record: Any, ctx: Any) -> None:
        self.applied.set(self.applied.get() + 1)

    def process_broadcast(self, rule: Any, ctx: Any) -> None:
        self.factors.put(rule.name, rule.factor)


class Totals(tg.KeyedBatchProcess):
    """State on columns, and timers of many keys."""

    totals = tg.columns("n long, total double, word string", defaults={"n": 0, "total": 0.0})

    def process(self, batch: pa.RecordBatch, ctx: tg.BatchContext) -> None:
        keys = ctx.keys
        before = self.totals.get_many(keys)
        n = before["n"].to_numpy() + np.bincount(keys.of, minlength=len(keys))
        total = before["total"].to_numpy() + np.bincount(keys.of, weights=batch["x"].to_numpy(), minlength=len(keys))
        self.totals.set_many(keys, n=n, total=total, word=batch["word"].take(pa.array(keys.last)))
        ctx.timers.event_time(keys, FAR_MS)

    def on_timers(self, at: Any, ctx: tg.BatchContext) -> None:
        """Do nothing: the timers are for 2100."""


def spread(window: tg.KeyedWindow, records: pa.RecordBatch) -> Iterator[Row]:
    yield window.key, records.num_rows


def every_shape(
    snapshots: str, *, backend: tg.Backend, rows: int, slots: int = 2, restore_from: str | None = None
) -> ProcessJob:
    """The first so many rows. All of them have been read when the sink `seen` has them all."""
    job = ProcessJob(
        "formats",
        slots=slots,
        backend=backend,
        restart=tg.NoRestart(),
        snapshots=tg.Snapshots(to=snapshots, every="100 ms"),
        restore_from=restore_from,
    )
    read = job.source("in", Feed(ROWS[:rows], SCHEMA), parallelism=1).with_watermark("ts", "5 s", name="time")
    keyed = read.key_by("key")
    keyed.process("shapes", Shapes(), returns="key long, n long, mean double").to("shapes out", tg.sinks.collect())
    read.rebalance().process("hoard", Hoard(), returns="x long").to("hoard out", tg.sinks.collect())
    rules = job.source("rules", Feed(RULES, "name string, factor long"), parallelism=1)
    keyed.connect(rules.broadcast()).process("rules applied", Rules(), returns="x long").to("rules out", tg.sinks.collect())
    _aggregates(keyed)
    _windows(keyed)
    _joins(read)
    keyed.process("totals", Totals(), returns="x long").to("totals out", tg.sinks.collect())
    read.to("seen", tg.sinks.collect())
    return job


def _aggregates(keyed: tg.KeyedStream) -> None:
    sums = keyed.aggregate(
        "sums",
        n=tg.count(),
        total=tg.sum("x"),
        mean=tg.mean("x"),
        least=tg.min("x"),
        most=tg.max("word"),
        first=tg.first("word"),
        last=tg.last("x"),
        spread=tg.stddev("x"),
        distinct=tg.count_distinct("word"),
        about=tg.approx_count_distinct("x"),
        all=tg.collect_list("word"),
        every=tg.collect_set("x"),
        best=tg.max_by("word", "x"),
    )
    sums.to("sums out", tg.sinks.collect())
    keyed.running("running", nth=tg.count(), ttl="10000 days").to("running out", tg.sinks.collect())
    keyed.deduplicate("newest", keep="last", order_by="ts").to("newest out", tg.sinks.collect())
    keyed.top("best", 3, by="x", descending=True).to("best out", tg.sinks.collect())
    keyed.rate_limit("limited", 1_000, per="1 day").to("limited out", tg.sinks.collect())


def _windows(keyed: tg.KeyedStream) -> None:
    assigners: dict[str, Any] = {
        "tumbling": tg.tumbling("ts", "40 s"),
        "sliding": tg.sliding("ts", "40 s", "10 s"),
        "sessions": tg.sessions("ts", "15 s"),
    }
    for name, assigner in assigners.items():
        windows = keyed.window(assigner).aggregate(name, n=tg.count(), words=tg.collect_list("word"))
        windows.to(f"{name} out", tg.sinks.collect())
    whole = keyed.window(tg.tumbling("ts", "40 s"))
    whole.apply("function", spread, "key long, n long").to("function out", tg.sinks.collect())
    whole.top("window top", 2, by="x").to("window top out", tg.sinks.collect())
    keyed.window(tg.global_window(), trigger=tg.every_records(7)).aggregate("global", n=tg.count()).to(
        "global out", tg.sinks.collect()
    )


def _joins(read: tg.Stream) -> None:
    left = read.filter("x % 2 = 0", name="even").select("key", "ts", "x", name="left").key_by("key")
    right = (
        read.filter("x % 3 = 0", name="third")
        .select("key AS other", "ts AS at", "x AS y", "word", name="right")
        .key_by("other")
    )
    between: Any = {"how": "full", "between": ("-20 s", "20 s"), "times": ("ts", "at")}
    left.join("interval", right, **between).to("interval out", tg.sinks.collect())
    left.join("temporal", right, how="left", as_of=("ts", "at")).to("temporal out", tg.sinks.collect())
    left.join("regular", right, how="left").to("regular out", tg.sinks.collect())


# --- records in flight -----------------------------------------------------------------------------------------------


class Slow(tg.KeyedProcess):
    """Adds up, and takes its time until a file is there."""

    total = tg.value("long", default=0)

    def __init__(self, gate: str) -> None:
        self._gate = gate

    def process(self, record: Any, ctx: Any) -> Iterator[Row]:
        if not os.path.exists(self._gate):
            time.sleep(0.03)
        self.total.set(self.total.get() + record.x)
        yield record.key, self.total.get()


def in_flight(snapshots: str, *, backend: tg.Backend, gate: Path) -> ProcessJob:
    """A job whose records queue up before a slow function until the gate is there."""
    job = ProcessJob(
        "in flight",
        slots=2,
        backend=backend,
        restart=tg.NoRestart(),
        snapshots=tg.Snapshots(to=snapshots, every=None, mode="unaligned"),
        tuning=tg.Tuning(max_batch_rows=8),
    )
    keyed = job.source("in", Feed(ROWS, SCHEMA), parallelism=1).key_by("key")
    keyed.process("slow", Slow(str(gate)), returns="key long, total long").to("out", tg.sinks.collect())
    return job
