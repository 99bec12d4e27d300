"""Streams of changes: who makes them, who takes them, and what is refused when the job is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from numpy import array

import tidegate as tg
from tests.unit.dataflow.described import Nowhere, Records
from tests.unit.dataflow.test_changelog import Pass, Table
from tidegate.dataflow.changelog import Changelog
from tidegate.dataflow.explain import explain_logical
from tidegate.dataflow.optimiser import make_plan
from tidegate.dataflow.pipeline import Pipeline
from tidegate.dataflow.row_kinds import kinds_of, signs_of
from tidegate.errors import GraphError, SchemaError

BIDS = "auction long, bidder string, price double"


class UpsertTable(Nowhere):
    @property
    def changelogs(self) -> frozenset[Changelog]:
        return frozenset({Changelog.APPEND, Changelog.UPSERT})


def counts() -> tg.Stream:
    bids = Pipeline().source("bids", Records(BIDS))
    return bids.key_by("auction", "bidder").aggregate("counts", n=tg.count(), total=tg.sum("price"))


def changes() -> tg.Stream:
    return counts().as_changelog("changes")


def test_row_kinds_are_read_from_any_part_of_a_column() -> None:
    kinds = kinds_of(array([True, False, False, True, True]))
    assert kinds.to_pylist() == ["+I", "-D", "-D", "+I", "+I"]
    kinds.validate(full=True)
    assert signs_of(kinds).tolist() == [1, -1, -1, 1, 1]
    assert signs_of(kinds.slice(1, 3)).tolist() == [-1, -1, 1]
    assert signs_of(kinds.take(pa.array([4, 1]))).tolist() == [1, -1]
    assert signs_of(kinds.slice(2, 2).filter(pa.array([False, True]))).tolist() == [1]
    assert signs_of(kinds_of(array([], bool))).tolist() == []
    with pytest.raises(AssertionError, match="other kinds"):
        signs_of(pa.array(["+I", "+U"]))


def test_changes_have_their_row_kind_in_front() -> None:
    assert changes().schema.names == ["row_kind", "auction", "bidder", "n", "total"]
    assert changes().select("n * 2 AS twice").schema.names == ["row_kind", "twice"]
    assert changes().with_columns(mean="total / n").schema.names[-1] == "mean"


def test_filters_and_columns_and_aggregates_work_on_changes() -> None:
    stream = changes().filter("n > 1").with_columns(words="split(bidder, ' ')").explode("words AS word")
    by_word = stream.key_by("word").aggregate("by word", n=tg.count(), total=tg.sum("total"))
    assert by_word.schema.names == ["row_kind", "word", "n", "total"]
    by_word.key_by("n").aggregate("sizes", words=tg.count()).to("table", Table())
    by_word.as_append().filter("row_kind = '+I'").to("log", tg.sinks.parquet("log"))
    text = explain_logical(stream._pipeline.build())
    assert "insertions and deletions, one row for each auction, bidder" in text
    assert "insertions and deletions, one row for each word" in text
    assert "insertions and deletions\n" in text, "after explode there may be several for each key"
    assert "by word, forward, as appended records" in text


def test_the_key_of_changes_is_known_as_long_as_its_rows_stay_together() -> None:
    def key_at_the_sink(use: Callable[[tg.Stream], Any]) -> tuple[str, ...]:
        stream = changes()
        use(stream).to("table", Table())
        spec: Any = stream._pipeline._nodes[-1].spec
        found: tuple[str, ...] = spec.key
        return found

    assert key_at_the_sink(lambda stream: stream) == ("auction", "bidder")
    assert key_at_the_sink(lambda stream: stream.filter("n > 1").key_by("bidder")) == ("auction", "bidder")
    assert key_at_the_sink(lambda stream: stream.select("bidder", "auction")) == ("auction", "bidder")
    assert key_at_the_sink(lambda stream: stream.select("n", "auction")) == ()
    assert key_at_the_sink(lambda stream: stream.key_by("n")) == ()
    assert key_at_the_sink(lambda stream: stream.with_columns(bidder="upper(bidder)")) == ()
    assert key_at_the_sink(lambda stream: stream.union(stream)) == ()
    assert key_at_the_sink(lambda stream: stream.as_append()) == ()


REFUSED: dict[str, tuple[Callable[[tg.Stream], object], str]] = {
    "sink of upserts": (
        lambda stream: stream.to("out", UpsertTable()),
        "sink 'out' takes appended records or upserts, and changelog 'changes' emits insertions and deletions: a deletion "
        r"takes a row back that was inserted before; use a sink with Changelog.RETRACT in its `changelogs`.*as_append\(\)",
    ),
    "parquet": (lambda stream: stream.to("out", tg.sinks.parquet("out")), "sink 'out' takes records that are appended"),
    "function": (lambda stream: stream.filter(lambda row: row.n > 1), "filter 'filter-1' takes records that are appended"),
    "map": (lambda stream: stream.map(lambda row: (row.n,), returns="n long"), "map 'map-1' takes"),
    "process": (lambda stream: stream.key_by("auction").process("p", Pass(), returns=BIDS), "keyed process 'p' takes"),
    "running": (lambda stream: stream.key_by("auction").running("r", nth=tg.count()), "running aggregate 'r' takes"),
    "window": (
        lambda stream: stream.key_by("auction").window(tg.global_window(count=2)).aggregate("w", n=tg.count()),
        "window 'w' takes",
    ),
    "distinct": (
        lambda stream: stream.key_by("auction").aggregate("a", n=tg.count_distinct("n")),
        "can't take a record back",
    ),
    "rebalance": (lambda stream: stream.rebalance(), "'changes' emits insertions and deletions, and rebalance brings"),
    "broadcast": (lambda stream: stream.connect(stream.broadcast()).process("b", Nobody()), "takes records that are"),
    "key": (
        lambda stream: stream.key_by("row_kind").to("out", Table()),
        "would send a record and the one that takes it back",
    ),
}


class Sides(tg.Process):
    def process(self, record: Any, ctx: Any) -> None: ...


class Nobody(tg.BroadcastProcess):
    def process(self, record: Any, ctx: Any) -> None: ...

    def process_broadcast(self, record: Any, ctx: Any) -> None: ...


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_work_on_changes_refuses_them_when_the_job_is_built(case: str) -> None:
    use, error = REFUSED[case]
    with pytest.raises(GraphError, match=error):
        use(changes())


@pytest.mark.parametrize("case", REFUSED)
def test_every_change_can_be_taken_for_a_record_of_its_own(case: str) -> None:
    REFUSED[case][0](changes().as_append())


@pytest.mark.parametrize(
    ("use", "error"),
    [
        (lambda stream: stream.filter("row_kind = '+I'"), "reads 'row_kind', which says what a change means"),
        (lambda stream: stream.select("row_kind", "n"), "reads 'row_kind'"),
        (lambda stream: stream.select("n AS row_kind"), "'row_kind' is the name of the column that says"),
        (lambda stream: stream.with_columns(row_kind="n"), "'row_kind' is the name of the column that says"),
        (lambda stream: stream.key_by("n").aggregate("a", kinds=tg.count("row_kind")), "reads 'row_kind'"),
        (lambda stream: stream.key_by("n").aggregate("a", row_kind=tg.count()), "'row_kind' is the name of the column"),
        (lambda stream: stream.as_append().as_upserts("n").as_changelog("again"), "'row_kind' is the name of the column"),
        (lambda stream: stream.as_changelog("again"), "'changes' are changes already: omit it"),
        (lambda stream: stream.as_upserts("n"), "the records are changes already"),
    ],
)
def test_the_row_kind_is_not_a_value_of_the_record(use: Callable[[tg.Stream], object], error: str) -> None:
    with pytest.raises((GraphError, SchemaError), match=error):
        use(changes())


def test_appended_records_can_be_taken_for_upserts() -> None:
    bids = Pipeline().source("bids", Records(BIDS))
    latest = bids.as_upserts("auction")
    latest.to("table", Table())
    latest.as_changelog("changes").key_by("bidder").aggregate("leading", n=tg.count()).to("out", Table())
    with pytest.raises(GraphError, match=r"as_changelog takes upserts, .*'bids' are appended.*use .as_upserts"):
        bids.as_changelog("no key")
    with pytest.raises(GraphError, match=r"upserts by \(auction\) already"):
        latest.as_upserts("bidder")
    with pytest.raises(SchemaError, match="as_upserts after 'bids': there is no column 'id'"):
        bids.as_upserts("id")
    with pytest.raises(GraphError, match="takes records that are appended"):
        latest.to("files", Nowhere())
    latest.as_append().to("log", Nowhere())
    process = latest.as_append().process("p", Sides(), returns=BIDS, side_outputs={"late": "why string"})
    process.as_upserts("auction").side_output("late").to("late", Nowhere())
    assert "[0] bids, hash by auction, as upserts by auction" in explain_logical(bids._pipeline.build())


def test_changes_are_not_spread_over_another_number_of_subtasks() -> None:
    def plan(use: Callable[[tg.Stream], tg.Stream | tg.KeyedStream]) -> None:
        stream = changes()
        use(stream).to("out", Table(), parallelism=1)
        make_plan(stream._pipeline.build(), slots=2, key_group_count=16)

    with pytest.raises(GraphError, match=r"the changes would come out of order; .*key_by\('auction', 'bidder'\)"):
        plan(lambda stream: stream)
    with pytest.raises(GraphError, match=r"the changes would come out of order; .*key_by\(…\)"):
        plan(lambda stream: stream.select("n"))
    plan(lambda stream: stream.select("n").key_by("n"))
    plan(lambda stream: stream.as_append())
