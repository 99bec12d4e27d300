"""What records of a stream mean is known when the job is built, and who can't work on them says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

import tidegate as tg
from tests.unit.dataflow.described import Nowhere, Records
from tidegate.connectors.collecting import CollectSink
from tidegate.connectors.printing import PrintSink
from tidegate.dataflow.changelog import ANY, Changelog
from tidegate.dataflow.optimiser import make_plan
from tidegate.dataflow.pipeline import Pipeline
from tidegate.errors import GraphError, SchemaError

BIDS = "auction long, bidder string, price double"


class Table(Nowhere):
    """A sink that replaces rows by their key."""

    @property
    def changelogs(self) -> frozenset[Changelog]:
        return ANY


class Pass(tg.KeyedProcess):
    def process(self, record: Any, ctx: Any) -> Iterable[Any]:
        yield record


def counts() -> tg.Stream:
    bids = Pipeline().source("bids", Records(BIDS))
    return bids.key_by("auction", "bidder").aggregate("counts", n=tg.count(), total=tg.sum("price"))


def test_an_aggregate_emits_the_key_and_the_results() -> None:
    assert counts().schema.names == ["auction", "bidder", "n", "total"]


def test_running_aggregates_are_appended_behind_the_columns_of_the_input() -> None:
    bids = Pipeline().source("bids", Records(BIDS))
    running = bids.key_by("auction").running("running", n=tg.count())
    assert running.schema.names == ["auction", "bidder", "price", "n"]
    running.filter(lambda row: row.n > 1).to("out", Nowhere())


@pytest.mark.parametrize("sink", [Table(), CollectSink(), PrintSink(10)])
@pytest.mark.parametrize("key", [(), ("auction",), ("bidder", "auction")])
def test_upserts_go_to_a_sink_that_takes_them(sink: tg.Sink, key: tuple[str, ...]) -> None:
    stream = counts()
    (stream.key_by(*key) if key else stream).to("out", sink)


REFUSED: dict[str, tuple[Callable[[tg.Stream], object], str]] = {
    "sink": (
        lambda stream: stream.to("out", Nowhere()),
        r"sink 'out' takes records that are appended, and aggregate 'counts' emits upserts by \(auction, bidder\): each "
        r"replaces the one before with that key; use a sink with Changelog.UPSERT in its `changelogs`, .* or .as_append\(\)",
    ),
    "parquet": (lambda stream: stream.to("out", tg.sinks.parquet("out")), "sink 'out' takes records that are appended"),
    "filter": (lambda stream: stream.filter(lambda row: row.n > 1), "filter 'filter-1' takes records that are appended"),
    "map": (lambda stream: stream.map(lambda row: (row.n,), returns="n long"), "map 'map-1' takes"),
    "watermark": (lambda stream: stream.with_watermark("n", "1 s"), "watermark-1' takes"),
    "process": (lambda stream: stream.key_by("auction").process("p", Pass(), returns=BIDS), "keyed process 'p' takes"),
    "second aggregate": (lambda stream: stream.key_by("auction").aggregate("a", n=tg.count()), "aggregate 'a' takes"),
    "rebalance": (lambda stream: stream.rebalance(), "rebalance brings records out of order; use .as_append"),
    "union": (lambda stream: stream.union(stream), "in a union the updates of a key come in no order"),
    "another key": (lambda stream: stream.key_by("n").to("out", Table()), r"key_by\('n'\) would bring the upserts"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_work_on_upserts_refuses_them_when_the_job_is_built(case: str) -> None:
    use, error = REFUSED[case]
    with pytest.raises(GraphError, match=error):
        use(counts())


@pytest.mark.parametrize("case", REFUSED)
def test_every_update_can_be_taken_for_a_record_of_its_own(case: str) -> None:
    REFUSED[case][0](counts().as_append())


@pytest.mark.parametrize(
    ("use", "error"),
    [
        (lambda keyed: keyed.aggregate("a"), "name at least one aggregate, such as n=tg.count()"),
        (lambda keyed: keyed.aggregate("a", n=tg.count), "is not an aggregate; give one such as"),
        (lambda keyed: keyed.aggregate("a", n="count"), "n='count' is not an aggregate"),
        (lambda keyed: keyed.aggregate("a", n=tg.Aggregate), "n=Aggregate is a class; give an instance"),
        (lambda keyed: keyed.aggregate("a", auction=tg.count()), "auction=… has the name of a column"),
        (lambda keyed: keyed.running("a", price=tg.count()), "price=… has the name of a column"),
        (lambda keyed: keyed.aggregate("a", n=tg.sum(" ")), "takes an expression as text"),
        (lambda keyed: keyed.aggregate("a", n=tg.sum("bidder")), "operator 'a', n: sum.bidder.: takes a number"),
        (lambda keyed: keyed.aggregate("a", n=tg.count(), renamed={"m": "n"}), "give former names"),
        (lambda keyed: keyed.aggregate("a", n=tg.count(), ttl="soon"), "operator 'a', ttl"),
    ],
)
def test_a_mistake_in_an_aggregate_is_an_error_when_the_job_is_built(use: Callable[[Any], object], error: str) -> None:
    keyed = Pipeline().source("bids", Records(BIDS)).key_by("auction")
    with pytest.raises((GraphError, SchemaError), match=error):
        use(keyed)


def test_columns_may_be_made_of_upserts_as_long_as_the_key_stays() -> None:
    kept = counts().select("bidder", "auction", "total / n AS mean").with_columns(mean="round(mean, 2)")
    kept.to("table", Table())
    assert kept._pipeline._nodes[-1].inputs and kept._pipeline._nodes[-2].upserts_by == ("auction", "bidder")
    with pytest.raises(GraphError, match=r"select 'select-1' takes appended records or changes, .*as_changelog"):
        counts().select("auction", "n")
    with pytest.raises(GraphError, match="with_columns 'with_columns-1' takes appended records or changes"):
        counts().with_columns(auction="auction + 1")
    with pytest.raises(GraphError, match="filter 'filter-1' takes appended records or changes"):
        counts().filter("n > 1")


def test_upserts_are_not_spread_over_another_number_of_subtasks() -> None:
    """They would come out of order, since records are then dealt out batch by batch."""

    def plan(use: Callable[[tg.Stream], tg.Stream | tg.KeyedStream]) -> None:
        stream = counts()
        use(stream).to("out", Table(), parallelism=1)
        make_plan(stream._pipeline.build(), slots=2, key_group_count=16)

    with pytest.raises(GraphError, match=r"sink 'out' has 1 subtask, .*'counts' has 2.*key_by\('auction', 'bidder'\)"):
        plan(lambda stream: stream)
    plan(lambda stream: stream.key_by("auction", "bidder"))
    plan(lambda stream: stream.as_append())
