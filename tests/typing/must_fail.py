"""What a type checker must refuse: each line with a comment `error: CODE`, and no other. See test_typing.py."""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame

import tidegate as tg


class Wrong(tg.KeyedProcess):
    count = tg.value("long", default=0)
    maybe = tg.value("long")
    recent = tg.list("double")
    by_name = tg.map("string", "long")
    best = tg.reducing("long", max)
    total = tg.aggregating("long", create=lambda: 0)  # error: call-overload
    forever = tg.value("long", ttl_refresh="sometimes")  # error: call-overload
    named = tg.list("long", nmae="n")  # error: call-overload

    def process(self, record: Any, ctx: tg.Context) -> tg.Rows:
        self.count.set("1")  # error: arg-type
        self.count.get().upper()  # error: attr-defined
        self.count.add(1)  # error: attr-defined
        self.maybe.get() + 1  # error: operator
        self.recent.add("x")  # error: arg-type
        self.recent.get().append(1.0)  # error: attr-defined
        self.by_name.put(1, 1)  # error: arg-type
        self.by_name.get("a") + 1  # error: operator
        self.by_name["a"] = 1  # error: index
        self.best.set(1)  # error: attr-defined
        ctx.watermark_ms = 0  # error: misc
        ctx.timers.event_time("soon")  # error: arg-type
        ctx.watermark()  # error: attr-defined
        return None

    def on_timer(self, ctx: tg.Context) -> tg.Rows:  # error: override
        return None


class WrongOnColumns(tg.KeyedBatchProcess):
    totals = tg.columns("n long", defaults=["n"])  # error: arg-type

    def process(self, batch: Any, ctx: tg.BatchContext) -> tg.Batches:
        self.totals.get_many([1, 2])  # error: arg-type
        self.totals.get(ctx.keys)  # error: attr-defined
        ctx.timers.event_time(5)  # error: call-arg, arg-type
        return None


class NotAll(tg.SinkWriter):
    def pre_commit(self, epoch: str) -> Any:  # error: override
        return None


def settings() -> None:
    tg.FixedDelay(attempts=3)  # error: call-arg
    tg.FixedDelay(attempts=3, delay_ms=1_000)  # error: call-arg
    tg.Tuning(heartbeat_ms=100)  # error: call-arg
    tg.Snapshots("snapshots/")  # error: call-arg
    tg.Snapshots(to="snapshots/", experimental_protocol="chandy_lamport")  # error: call-arg
    tg.Snapshots(to="snapshots/", mode="exactly-once")  # error: arg-type
    tg.Heap(memory=1.5)  # error: arg-type
    tg.heap()  # error: attr-defined
    tg.RocksDB(memory=None)  # error: arg-type
    tg.Job("job", slots="2")  # error: arg-type
    tg.Job("job", start_from="savepoints/friday")  # error: call-arg
    tg.Job("job", backend="rocksdb")  # error: arg-type
    tg.Job("job", restart=3)  # error: arg-type


def streams(job: tg.Job, handle: tg.Handle) -> None:
    numbers = job.source("numbers", tg.sources.rows([(1,)], "n long"))
    numbers.process("wrong", Wrong(), returns="n long")  # error: arg-type
    numbers.key_by("n").map(lambda row: row, returns="n long")  # error: attr-defined
    numbers.key_by("n", nulls="drop")  # error: arg-type
    numbers.to("out", "counts/")  # error: arg-type
    numbers.key_by("n").connect(numbers)  # error: arg-type
    numbers.broadcast().process("x", Wrong())  # error: attr-defined
    job.source("none", NotAll())  # error: abstract, arg-type
    handle.wait(timeout_s=60.0)  # error: call-arg
    handle.savepoint()  # error: call-arg
    handle.status.upper()  # error: attr-defined


def dataframes(frame: DataFrame) -> None:
    tg.transform(frame, Wrong)  # error: arg-type
    counts = tg.transform(frame, lambda bids: {"counts": bids.rebalance()})
    counts.writeStream()  # error: attr-defined
    tg.plan_restore("job", "savepoints/friday")  # error: arg-type


def aggregates(stream: tg.Stream) -> None:
    stream.key_by("id").aggregate("counts", n="count")  # error: arg-type
    stream.key_by("id").running("counts", n=tg.sum(1))  # error: arg-type
    stream.aggregate("counts", n=tg.count())  # error: attr-defined
    stream.lookup_join("rates", stream.broadcast(), on="id", how="full")  # error: arg-type
    stream.lookup_join("rates", stream.broadcast())  # error: call-arg
    stream.lookup("names", 5, "name string", on="id")  # error: arg-type
    stream.key_by("id").deduplicate("first", keep="newest")  # error: arg-type
    stream.key_by("id").top("best", 10)  # error: call-arg
