"""Every way in which records can go: one graph with all of them, on one to three slots, against plain Python."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import tidegate as tg
from tests.unit.runtime.conftest import Bench
from tidegate.testing.processes import ProcessJob
from tidegate.testing.scripted import AwaitSnapshot, Crash, ScriptedSource

COUNT = 2_000
RULES = [("low", 100), ("high", 900), ("low", 200)]
PAYMENTS = [(order % 40, order) for order in range(300)]


def number(i: int) -> tuple[int, int]:
    return i % 40, i


def plus_one(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.set_column(1, "n", pc.add(batch.column("n"), 1))


class SortOut(tg.Process):
    """Small numbers on the main output, the others on two side outputs."""

    def process(self, record: Any, ctx: Any) -> Iterator[tuple[Any, ...]]:
        assert ctx.key is None
        if record.n < 500:
            yield tuple(record)
        else:
            ctx.side("odd" if record.n % 2 else "even", (record.n,))


class Settle(tg.CoProcess):
    """All orders and payments of a key, at the end of time."""

    orders = tg.list("long")
    payments = tg.list("long")

    def process_left(self, order: Any, ctx: Any) -> None:
        self.orders.add(order.n)
        ctx.timers.event_time(0)

    def process_right(self, payment: Any, ctx: Any) -> None:
        self.payments.add(payment.amount)
        ctx.timers.event_time(0)

    def on_timer(self, at: int, ctx: Any) -> Iterator[tuple[Any, ...]]:
        yield ctx.key, sum(self.orders.get()), sum(self.payments.get())


class Count(tg.CoProcess):
    """Two streams without key: which side a record came from."""

    def process_left(self, record: Any, ctx: Any) -> Iterator[tuple[Any, ...]]:
        yield "left", record.n

    def process_right(self, record: Any, ctx: Any) -> Iterator[tuple[Any, ...]]:
        yield "right", record.amount


class Judge(tg.BroadcastProcess):
    """Judges a key's largest number by the rules there are when all input is at its end."""

    rules = tg.broadcast_map("string", "long")
    largest = tg.reducing("long", max)

    def process(self, record: Any, ctx: Any) -> None:
        self.largest.add(record.n)
        ctx.timers.event_time(0)

    def process_broadcast(self, rule: Any, ctx: Any) -> None:
        self.rules.put(rule.name, rule.bound)

    def on_timer(self, at: int, ctx: Any) -> Iterator[tuple[Any, ...]]:
        above = [name for name, bound in sorted(self.rules.items()) if self.largest.get() > bound]
        yield ctx.key, len(self.rules), ",".join(above)


def build(job: ProcessJob, *, few: int, numbers: tg.Source) -> None:
    """`few` is the parallelism of some of the operators; the others have the job's."""
    source = job.source("numbers", numbers)
    even = source.filter(lambda record: record.n % 2 == 0, parallelism=few)
    doubled = source.flat_map(lambda r: [(r.key, r.n)] * 2 if r.n % 5 == 0 else None, returns="key long, n long")
    united = even.union(doubled, source.map(lambda r: (r.key, -r.n), returns="key long, n long", parallelism=1))
    united.rebalance().map_batches(plus_one, returns="key long, n long", parallelism=few).to(
        "united", tg.sinks.collect(), parallelism=1
    )

    sorted_out = source.rebalance().process(
        "sort out", SortOut(), returns="key long, n long", parallelism=few, side_outputs={"odd": "n long", "even": "n long"}
    )
    sorted_out.to("small", tg.sinks.collect())
    sorted_out.side_output("odd").union(sorted_out.side_output("even")).to("large", tg.sinks.collect(), parallelism=few)

    payments = job.source("payments", tg.sources.rows(PAYMENTS, "order long, amount long"), parallelism=1)
    source.key_by("key").connect(payments.key_by("order")).process(
        "settle", Settle(), returns="key long, ordered long, paid long"
    ).to("settled", tg.sinks.collect(), parallelism=few)
    source.rebalance().connect(payments.rebalance()).process(
        "count", Count(), returns="side string, n long", parallelism=few
    ).to("sides", tg.sinks.collect())

    rules = job.source("rules", tg.sources.rows(RULES, "name string, bound long"), parallelism=1)
    source.key_by("key").connect(rules.broadcast()).process(
        "judge", Judge(), returns="key long, rules int, above string"
    ).to("judged", tg.sinks.collect())


def check(handle: tg.Handle) -> None:
    numbers = [number(i) for i in range(COUNT)]
    united = [(k, n + 1) for k, n in numbers if n % 2 == 0] + [(k, n + 1) for k, n in numbers if n % 5 == 0] * 2
    assert sorted(handle.results("united")) == sorted(united + [(k, 1 - n) for k, n in numbers])
    assert sorted(handle.results("small")) == sorted((k, n) for k, n in numbers if n < 500)
    assert sorted(handle.results("large")) == [(n,) for _, n in numbers if n >= 500]
    ordered: defaultdict[int, int] = defaultdict(int)
    paid: defaultdict[int, int] = defaultdict(int)
    for k, n in numbers:
        ordered[k] += n
    for k, amount in PAYMENTS:
        paid[k] += amount
    assert sorted(handle.results("settled")) == [(k, ordered[k], paid[k]) for k in range(40)]
    assert sorted(handle.results("sides")) == sorted(
        [("left", n) for _, n in numbers] + [("right", amount) for _, amount in PAYMENTS]
    )
    largest = {k: max(n for key, n in numbers if key == k) for k in range(40)}
    assert sorted(handle.results("judged")) == [
        (k, 2, ",".join(name for name, bound in (("high", 900), ("low", 200)) if largest[k] > bound)) for k in range(40)
    ]


@pytest.mark.parametrize(("slots", "few"), [(1, 1), (2, 1), (3, 2)])
def test_records_go_where_the_graph_says(bench: Bench, slots: int, few: int) -> None:
    source = tg.sources.generator(make_row=number, schema="key long, n long", rows=COUNT, splits=4)
    handle = bench.finish(lambda job: build(job, few=few, numbers=source), slots=slots, tuning=tg.Tuning(max_batch_rows=100))
    assert handle.failures == []
    check(handle)


def test_a_crash_in_the_middle_changes_no_result_of_any_branch(bench: Bench) -> None:
    numbers = [number(i) for i in range(COUNT)]
    scripts = [
        [
            *numbers[part:1_000:2],
            AwaitSnapshot(times=2),
            *numbers[1_000 + part : 1_500 : 2],
            *([Crash()] if part else []),
            *numbers[1_500 + part :: 2],
        ]
        for part in range(2)
    ]
    source = ScriptedSource(*scripts, schema="key long, n long", memory=bench.folder / "marks")
    handle = bench.finish(lambda job: build(job, few=1, numbers=source), slots=2, tuning=tg.Tuning(max_batch_rows=100))
    assert len(handle.failures) == 1 and handle.attempts[-1].restored_epoch is not None
    check(handle)
