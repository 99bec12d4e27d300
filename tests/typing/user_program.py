"""A program as users write it, checked by `mypy --strict` (test_typing.py). It is never run.

`reveal_type` and `assert_type` are for type checkers: what mypy makes of a declaration is part of what is promised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, datetime
from typing import Any, assert_type

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

import tidegate as tg
from tidegate.testing import ProcessJob, ScriptedSource

# ------------------------------------------------------------------------------------------------------- functions


def total(sums: list[float], price: float) -> list[float]:
    return [sums[0] + price, sums[1] + 1]


def mean(sums: list[float]) -> float:
    return sums[0] / sums[1]


class CountBids(tg.KeyedProcess):
    count = tg.value("long", default=0)
    last = tg.value("timestamp")
    day = tg.value("date", ttl="1 day", ttl_refresh="read")
    names = tg.value("string", default="", alias="name")
    raw = tg.value("binary", name="raw_bytes")
    seen = tg.value("boolean", default=False)
    anything = tg.value("struct<id:long,price:double>", added={"price": 0.0})
    model = tg.value(tg.pickled(version=2, migrate=lambda old, version: old))
    arrow = tg.value(pa.int64())
    recent = tg.list("double")
    by_bidder = tg.map("long", "long", ttl="1 day")
    labels = tg.map("string", "array<string>")
    best = tg.reducing("double", max)
    price = tg.aggregating("array<double>", create=lambda: [0.0, 0.0], add=total, result=mean)
    sums = tg.aggregating("array<double>", create=lambda: [0.0, 0.0], add=total)
    spread = tg.aggregating(
        "struct<low:double,high:double>",
        create=lambda: {"low": 0.0, "high": 0.0},
        add=lambda pair, price: {"low": min(pair["low"], price), "high": max(pair["high"], price)},
        result=lambda pair: pair["high"] - pair["low"],
    )

    def open(self, ctx: tg.Context) -> None:
        self.first = ctx.subtask == 0

    def process(self, bid: Any, ctx: tg.Context) -> Iterator[tuple[int, int]]:
        assert_type(self.count, tg.ValueState[int])
        assert_type(self.last.get(), datetime | None)
        assert_type(self.day.get(), date | None)
        assert_type(self.names.get(), str)
        assert_type(self.raw.get(), bytes | None)
        assert_type(self.seen.get(), bool)
        assert_type(self.anything.get(), Any)
        assert_type(self.model.get(), Any)
        assert_type(self.recent, tg.ListState[float])
        assert_type(self.by_bidder.get(bid.bidder), int | None)
        assert_type(self.by_bidder.get(bid.bidder, 0), int)
        assert_type(self.labels, tg.MapState[str, Any])
        assert_type(self.best.get(), float | None)
        assert_type(self.price, tg.AggregatingState[float, float])
        assert_type(self.sums.get(), list[float] | None)
        assert_type(self.spread, tg.AggregatingState[Any, Any])
        assert_type(len(self.by_bidder.items()), int)
        self.count.set(self.count.get() + 1)
        self.recent.extend([bid.price, 1.0])
        self.by_bidder.put(bid.bidder, self.by_bidder.get(bid.bidder, 0) + 1)
        self.best.add(bid.price)
        self.price.add(bid.price)
        self.anything.set({"id": 1, "price": 2.0})
        self.last.set(None)
        for bidder, bids in self.by_bidder.items():
            assert_type((bidder, bids), tuple[int, int])
        ctx.timers.event_time(bid.ts + 60_000)
        ctx.timers.delete_processing_time(datetime(2026, 1, 31))
        ctx.side("late", (bid.auction, ctx.watermark_ms))
        yield bid.auction, self.count.get()

    def on_timer(self, at: int, ctx: tg.Context) -> tg.Rows:
        self.count.clear()
        return None

    def on_snapshot_complete(self, epoch: int) -> None:
        print(epoch)


class Totals(tg.KeyedBatchProcess):
    totals = tg.columns("n long, total double", defaults={"n": 0}, ttl="1 day", alias="sums", renamed={"n": "count"})

    def open(self, ctx: tg.BatchContext) -> None:
        self.first = ctx.subtask == 0

    def process(self, batch: pa.RecordBatch, ctx: tg.BatchContext) -> Iterator[pa.RecordBatch]:
        assert_type(self.totals, tg.ColumnsState)
        keys = ctx.keys
        assert_type(keys, tg.Keys)
        n = self.totals.get_many(keys)["n"].to_numpy() + np.bincount(keys.of)
        self.totals.set_many(keys, n=n, total=pa.nulls(len(keys), pa.float64()))
        self.totals.set_many(keys, {"n": n}, total=1.0)
        self.totals.delete_many(keys.where(~self.totals.contains_many(keys)))
        ctx.timers.event_time(keys.where(n > 1), ctx.watermark_ms + 1_000)
        ctx.timers.delete_processing_time(keys, np.full(len(keys), ctx.now_ms()))
        ctx.side("late", batch)
        yield batch.take(pa.array(keys.last))

    def on_timers(self, at: Any, ctx: tg.BatchContext) -> tg.Batches:
        self.totals.delete_many(ctx.keys)
        return None


class InHundreds(tg.Process):
    waiting = tg.operator_list("long", redistribute="union")

    def process(self, event: Any, ctx: tg.Context) -> Iterator[tuple[list[int]]]:
        assert_type(self.waiting, tg.OperatorListState[int])
        self.waiting.add(event.id)
        if len(self.waiting) == 100:
            yield (list(self.waiting),)
            self.waiting.clear()


class ApplyRules(tg.BroadcastProcess):
    rules = tg.broadcast_map("string", "double")

    def process(self, event: Any, ctx: tg.Context) -> tg.Rows:
        assert_type(self.rules, tg.BroadcastState[str, float])
        limit = self.rules.get(event.kind)
        return [(event.player, event.kind)] if limit is not None and event.value > limit else []

    def process_broadcast(self, rule: Any, ctx: tg.Context) -> tg.Rows:
        self.rules.put(rule.kind, rule.limit)
        return ()


class PayOrder(tg.CoProcess):
    order = tg.value("struct<id:long,total:double>")

    def process_left(self, order: Any, ctx: tg.Context) -> tg.Rows:
        self.order.set(order)
        return None

    def process_right(self, payment: Any, ctx: tg.Context) -> tg.Rows:
        return None if self.order.get() is None else [(ctx.key, payment.amount)]


class Spread(tg.Aggregate):
    @property
    def accumulators(self) -> Sequence[tg.Accumulator]:
        return tg.Accumulator("low", pa.float64(), 1e300), tg.Accumulator("high", pa.float64())

    @property
    def result_type(self) -> pa.DataType:
        return pa.float64()

    def add(self, vectors: tg.Vectors, rows: tg.IntArray, inputs: Sequence[pa.Array]) -> None:
        np.minimum.at(vectors["low"].values, rows, inputs[0].to_numpy())

    def merge(self, vectors: tg.Vectors, rows: tg.IntArray, other: tg.Vectors, other_rows: tg.IntArray) -> None:
        low = vectors["low"].values
        low[rows] = np.minimum(low[rows], other["low"].values[other_rows])

    def result(self, vectors: tg.Vectors, rows: tg.IntArray) -> pa.Array:
        return pa.array(vectors["low"].values[rows])


# ----------------------------------------------------------------------------------------------- sources and sinks


class Counting(tg.Source):
    @property
    def schema(self) -> pa.Schema:
        return pa.schema([("n", pa.int64())])

    @property
    def bounded(self) -> bool:
        return False

    def open(self, context: tg.SourceContext) -> tg.SourceReader:
        return CountingReader(context)


class CountingReader(tg.SourceReader):
    def __init__(self, context: tg.SourceContext) -> None:
        self._next = int(context.restored.get("all", 0))
        self._splits: tg.Splits = context.splits.report()

    def poll(self, max_rows: int) -> pa.RecordBatch | None:
        if self._next > 1_000:
            raise tg.SourceError("there is no more")
        self._next += 1
        return pa.record_batch([pa.array([self._next])], names=["n"])

    def offsets(self) -> Mapping[str, tg.Offset]:
        return {"all": self._next}

    @property
    def finished(self) -> bool:
        return False


class Outbox(tg.Sink):
    @property
    def changelogs(self) -> frozenset[tg.Changelog]:
        return frozenset({tg.Changelog.APPEND, tg.Changelog.UPSERT})

    def check(self, schema: pa.Schema) -> None:
        if "n" not in schema.names:
            raise tg.SchemaError("give a column n")

    def open(self, context: tg.SinkContext) -> tg.SinkWriter:
        return OutboxWriter(context)


class OutboxWriter(tg.SinkWriter):
    def __init__(self, context: tg.SinkContext) -> None:
        self._context = context
        self._rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        self._rows += batch.num_rows

    def pre_commit(self, epoch: int) -> Callable[[], Sequence[tg.Committable]]:
        return lambda: [f"{epoch}: {self._rows}"]

    def commit(self, committables: Sequence[tg.Committable]) -> None:
        raise tg.CommitError("the outbox is away", final=True)


class Customers(tg.Lookup):
    def open(self) -> None:
        self.names = {1: "Ada"}

    def look_up(self, keys: pa.RecordBatch) -> pa.Table:
        return pa.table({"bidder": list(self.names), "name": list(self.names.values())})


# ------------------------------------------------------------------------------------------------------------ jobs

SETTINGS = tg.Tuning(
    linger="5 ms", heartbeat="500 ms", heartbeat_timeout="1 minute", loop_memory="128 MB", slot_ports="40100-40199"
)
RESTARTS: list[tg.RestartStrategy] = [
    tg.NoRestart(),
    tg.FixedDelay(attempts=3, delay="1 s"),
    tg.Exponential(initial="500 ms", maximum="30 s", attempts=None, reset_after="5 minutes"),
]
BACKENDS: list[tg.Backend] = [tg.Heap(), tg.RocksDB(memory="256 MB", folder="/tmp/state")]


def bid_counts(spark: SparkSession | None) -> tg.Job:
    snapshots = tg.Snapshots(to="snapshots/", every="1 s", local_copies="/tmp/copies", local_copies_size="8 GB")
    job = tg.Job(
        "bid counts", spark, slots=4, backend=BACKENDS[0], snapshots=snapshots, restart=RESTARTS[2], tuning=SETTINGS
    )
    bids = job.source("bids", tg.sources.parquet("bids/", schema="auction long, bidder long, price double, ts long"))
    assert_type(bids, tg.Stream)
    keyed = bids.with_watermark("ts", "5 seconds", idle_after="1 minute").key_by("auction")
    assert_type(keyed, tg.KeyedStream)
    counts = keyed.process(
        "count", CountBids(), returns="auction long, n long", side_outputs={"late": "auction long, ts long"}
    )
    counts.to("out", tg.sinks.parquet("counts/"))
    keyed.rate_limit("limit", 10, per="1 minute", burst=20, excess="too many").to("limited", tg.sinks.print())
    rated = bids.lookup_join("rates", pa.table({"code": [1]}), on={"bidder": "code"}, how="left")
    assert_type(rated, tg.Stream)
    named = rated.lookup("customers", Customers(), "name string", on=["bidder"], ttl="10 minutes", cache=1_000, retries=1)
    named.lookup("again", lambda keys: keys, "other string", on="bidder", how="inner").to("named", tg.sinks.print())
    keyed.deduplicate("last", keep="last", order_by="ts", ttl="1 day").as_append().to("last bids", tg.sinks.print())
    best = keyed.top("best", 10, by=["price", "ts"], descending=[True, False], rank="place")
    assert_type(best, tg.Stream)
    best.as_append().to("best bids", tg.sinks.print())
    keyed.window(tg.tumbling("ts", "1 minute")).top("best of each", 3, by="price").to("each minute", tg.sinks.print())
    keyed.process("totals", Totals(), returns="auction long, n long").to("totals", tg.sinks.print())
    counts.side_output("late").to("late", tg.sinks.print(limit=10))
    rules = job.source("rules", tg.sources.rows([("bid", 100.0)], "kind string, limit double")).broadcast()
    assert_type(rules, tg.BroadcastStream)
    events = job.source("events", tg.sources.json("events/", schema="player long, kind string, value double"))
    events.lookup_join("limits", rules, on="kind").to("limits out", tg.sinks.print())
    connected = events.key_by("player").connect(rules)
    assert_type(connected, tg.ConnectedStreams)
    connected.process("apply rules", ApplyRules(), returns="player long, kind string").to("alarms", Outbox())
    numbers = job.source("numbers", Counting()).map(lambda row: (row.n,), returns="id long").filter(lambda row: row.id > 0)
    cheap = bids.filter("price < 100").select("auction", "price * 0.9 AS euros").with_columns({"name": "auction"}, n="1")
    assert_type(cheap, tg.Stream)
    cheap.explode("array(n, n + 1) AS each", keep_empty=True, name="each").key_by("each").to("cheap", tg.sinks.print())
    sums = numbers.key_by("id").aggregate("sums", rows=tg.count(), total=tg.sum("n * 2"), spread=Spread("n"), ttl="1 day")
    assert_type(sums, tg.Stream)
    sums.as_append().to("sums", tg.sinks.parquet("sums/"))
    changes = sums.as_changelog("changed sums", ttl="1 day").filter("total > 100")
    joined = keyed.join("with sums", changes.key_by("auction"), how="left", ttl="1 hour")
    assert_type(joined, tg.Stream)
    joined.select("bidder").to("changes", tg.sinks.print())
    near = keyed.join("near", bids.select("auction AS id").key_by("id"), between=("-1 s", 0), times=("ts", "at"), how="full")
    assert_type(near, tg.Stream)
    latest = keyed.join("latest", bids.key_by("auction"), as_of="ts", how="left", late=("late", None))
    assert_type(latest.side_output("late"), tg.Stream)
    bids.as_upserts("auction").to("last bids", tg.sinks.collect())
    numbers.key_by("id").running("nth", nth=tg.count(), last=tg.last("n", by="id"), any=tg.any("n > 1")).to("nth", Outbox())
    numbers.iterate("twice", lambda stream: (stream, stream)).process("hundreds", InHundreds(), returns="ids array<long>")
    numbers.key_by("id").connect(numbers.key_by("id")).process("pay", PayOrder(), returns="id long, amount double")
    return job


def run(job: tg.Job) -> int:
    plan = tg.plan_restore(job, "savepoints/tuesday")
    assert_type(plan, tg.RestorePlan)
    refused = [f"{each.name}: {each.why}" for each in plan.operators if each.fate is tg.Fate.REFUSED]
    handle = job.start()
    assert_type(handle, tg.Handle)
    try:
        report = handle.snapshot("30 s")
        assert_type(report, tg.EpochReport)
        saved = handle.savepoint("savepoints/friday", timeout="5 minutes")
        assert_type(saved, tg.SavepointInfo)
        handle.rescale(slots=8)
        status = handle.wait("1 minute")
        assert_type(status, tg.Status)
        if status is tg.Status.FINISHED:
            print(handle.results("out"), handle.attempts[-1].slots, refused, saved.epoch, report.epoch)
    except tg.JobFailed as failed:
        print(failed.operator, failed.record, failed.user_traceback)
    except (tg.SchemaError, tg.GraphError, tg.RestoreError, tg.NotFound, tg.CorruptFile, tg.StoreError) as error:
        assert_type(error.args, tuple[Any, ...])
    except TimeoutError:
        handle.stop(drain=True, savepoint="savepoints/last", timeout=None)
    return len(handle.failures)


def restored(spark: SparkSession) -> tg.Job:
    return tg.Job("bid counts", spark, restore_from="savepoints/friday", claim=True, drop_state=["count.recent"])


# ------------------------------------------------------------------------------------------------------ DataFrames


def pipeline(bids: tg.Stream) -> tg.Stream:
    return bids.key_by("auction").process("count", CountBids(), returns="auction long, n long")


def several(bids: tg.Stream, rules: tg.Stream) -> dict[str, tg.Stream]:
    return {"counts": pipeline(bids), "rules": rules}


def dataframes(spark: SparkSession) -> None:
    bids = spark.readStream.format("rate").load()
    counts = tg.transform(
        bids, pipeline, name="counts", snapshots=tg.Snapshots(to="state/"), restore_from="savepoints/friday"
    )
    assert_type(counts, DataFrame)
    outputs = tg.transform({"bids": bids, "rules": bids}, several, savepoint_to="savepoints/all")
    assert_type(outputs, tg.Outputs)
    assert_type(outputs.persist()["counts"], DataFrame)
    state = tg.read_state(spark, "savepoints/all", "count", keys=[1, 2])
    written = tg.write_state(state, "savepoints/edited", operator="count", state="count", base="savepoints/all")
    assert_type(written, tg.SavepointInfo)
    tg.write_state(state, "savepoints/edited again", operator="count", state=CountBids.count)
    tg.register(spark)


# ----------------------------------------------------------------------------------------------------------- tests


def in_a_test() -> None:
    job = ProcessJob("test", slots=2, snapshots=tg.Snapshots(to="memory://test", every=None))
    job.source("numbers", ScriptedSource([(1,), (2,)], schema="id long")).to("out", tg.sinks.collect())
    assert job.run() is tg.Status.FINISHED
