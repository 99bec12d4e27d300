"""Where records are aggregated before the exchange, and where not."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.dataflow.declared import declared_operators
from tidegate.dataflow.graph import Partitioning
from tidegate.dataflow.in_flight import in_flight_name
from tidegate.dataflow.operators.combine import CombineLimits
from tidegate.dataflow.optimiser import make_plan
from tidegate.dataflow.pipeline import Pipeline
from tidegate.dataflow.plan import Plan
from tidegate.state.evolution import evolve

RECORD = "key long, n long"


def rows(**rest: Any) -> Any:
    return tg.sources.rows([(1, 2)], RECORD, **rest)


def plan_of(pipeline: Pipeline, *, slots: int = 2, chaining: bool = True) -> Plan:
    limits = CombineLimits(hold_ms=50)
    return make_plan(pipeline.build(), slots=slots, key_group_count=16, chaining=chaining, combine=limits)


def combining(plan: Plan) -> list[str]:
    return [node.name for node in plan.nodes if node.spec.kind == "combine"]


def test_a_chain_that_ends_at_the_exchange_of_an_aggregate_ends_with_combining() -> None:
    pipeline = Pipeline()
    stream = pipeline.source("in", rows()).filter("n > 0")
    stream.key_by("key").aggregate("sums", n=tg.count()).to("out", tg.sinks.collect())
    stream.to("all", tg.sinks.collect())
    plan = plan_of(pipeline)
    first, second = plan.vertices
    assert [node.name for node in first.nodes] == ["in", "filter-1", "all", "(sums)"]
    (edge,) = plan.edges
    assert (edge.source_node, edge.port, edge.partitioning) == (first.nodes[-1].id, 1, Partitioning.HASH)
    assert second.first.name == "sums"


def test_each_of_united_streams_and_a_side_output_is_combined() -> None:
    class Split(tg.Process):
        def process(self, record: Any, ctx: Any) -> Any:
            yield record
            ctx.emit("side", record)

    pipeline = Pipeline()
    split = pipeline.source("in", rows()).process("split", Split(), RECORD, side_outputs={"side": RECORD})
    both = split.side_output("side").union(pipeline.source("more", rows()))
    both.key_by("key").aggregate("sums", n=tg.count()).to("out", tg.sinks.collect())
    plan = plan_of(pipeline)
    assert combining(plan) == ["(sums)", "(sums 2)"]
    assert [node.inputs[0].tag for node in plan.nodes if node.spec.kind == "combine"] == ["side", None]


@pytest.mark.parametrize("slots", [1, 2])
def test_there_is_nothing_to_save_on_a_single_channel(slots: int) -> None:
    pipeline = Pipeline()
    keyed = pipeline.source("in", rows(), parallelism=1).key_by("key")
    keyed.aggregate("sums", n=tg.count(), parallelism=1).to("out", tg.sinks.collect())
    assert not combining(plan_of(pipeline, slots=slots))


def test_without_chains_nothing_is_combined() -> None:
    pipeline = Pipeline()
    pipeline.source("in", rows()).key_by("key").aggregate("sums", n=tg.count()).to("out", tg.sinks.collect())
    assert not combining(plan_of(pipeline, chaining=False))


@pytest.mark.parametrize("name", ["running", "collected", "accumulator", "changes", "window"])
def test_what_needs_its_records_gets_them(name: str) -> None:
    pipeline = Pipeline()
    stream = pipeline.source("in", rows())
    keyed = stream.key_by("key")
    if name == "running":
        made = keyed.running("sums", many=tg.count())
    elif name == "collected":
        made = keyed.aggregate("sums", many=tg.count(), all=tg.collect_list("n"))
    elif name == "accumulator":
        made = stream.with_columns(many_count="key").key_by("many_count").aggregate("sums", many=tg.count())
    elif name == "changes":
        made = keyed.aggregate("latest", n=tg.last("n")).as_changelog("rows").key_by("n").aggregate("sums", many=tg.count())
    else:
        made = stream.with_watermark("n", 0).key_by("key").window(tg.tumbling("n", 10)).aggregate("sums", many=tg.count())
    made.to("out", tg.sinks.collect())
    assert "(sums)" not in combining(plan_of(pipeline))


def test_partials_in_flight_evolve_like_the_state() -> None:
    def in_flight(**aggregate: Any) -> Any:
        pipeline = Pipeline()
        keyed = pipeline.source("in", rows()).key_by("key")
        keyed.aggregate("sums", **aggregate).to("out", tg.sinks.collect())
        (sums,) = [each for each in declared_operators(plan_of(pipeline)) if each.name == "sums"]
        (found,) = [each for each in sums.in_flight if each.info.name == in_flight_name(1)]
        return found

    before = in_flight(total=tg.sum("n"), gone=tg.min("n"))
    evolved = evolve(before.info, in_flight(grand=tg.sum("n"), rows=tg.count(), renamed={"grand": "total"}))
    assert evolved.convert is not None
    value = [{"key": 1, "total_sum": 5, "gone_min": 2}]
    converted = evolved.convert(pa.RecordBatch.from_pydict({"value": value}, schema=before.info.schema))
    assert converted.column("value").to_pylist() == [{"key": 1, "grand_sum": 5, "rows_count": 0}]


def test_in_a_plan_with_loops_nothing_is_combined() -> None:
    pipeline = Pipeline()
    stream = pipeline.source("in", rows())
    stream.iterate("loop", lambda each: (each.filter("n > 0"), each.filter("n <= 0"))).to("end", tg.sinks.collect())
    stream.key_by("key").aggregate("sums", n=tg.count()).to("out", tg.sinks.collect())
    assert not combining(plan_of(pipeline))
