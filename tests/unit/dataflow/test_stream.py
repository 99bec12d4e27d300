"""Building graphs: what each method of a stream adds, and how it is wired."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest

from tests.unit.dataflow.described import Nowhere, Records
from tidegate.dataflow.functions import BroadcastProcess, CoProcess, KeyedProcess, Process
from tidegate.dataflow.graph import Edge, LogicalGraph, Node, Partitioning
from tidegate.dataflow.operators.broadcast import BroadcastProcessSpec
from tidegate.dataflow.operators.process import CoProcessSpec, KeyedProcessSpec, ProcessSpec
from tidegate.dataflow.operators.source import WatermarkSpec
from tidegate.dataflow.pipeline import Pipeline
from tidegate.dataflow.stream import Stream
from tidegate.state.declaring import broadcast_map, operator_list, value
from tidegate.types import parse_schema

BIDS = "auction long, price double, ts timestamp"
FORWARD, HASH, BROADCAST, REBALANCE = (
    Partitioning.FORWARD,
    Partitioning.HASH,
    Partitioning.BROADCAST,
    Partitioning.REBALANCE,
)


class Count(KeyedProcess):
    count = value("long", default=0)

    def process(self, record: Any, ctx: Any) -> Iterable[Any]:
        self.count.set(self.count.get() + 1)
        yield record.auction, self.count.get()


class Collect(Process):
    waiting = operator_list("long")

    def process(self, record: Any, ctx: Any) -> None:
        self.waiting.add(record.auction)


class Join(CoProcess):
    def process_left(self, record: Any, ctx: Any) -> None: ...

    def process_right(self, record: Any, ctx: Any) -> None: ...


class Rules(BroadcastProcess):
    rules = broadcast_map("string", "double")

    def process(self, record: Any, ctx: Any) -> None: ...

    def process_broadcast(self, record: Any, ctx: Any) -> None: ...


@pytest.fixture
def pipeline() -> Pipeline:
    return Pipeline()


@pytest.fixture
def bids(pipeline: Pipeline) -> Stream:
    return pipeline.source("bids", Records(BIDS))


def build(pipeline: Pipeline) -> LogicalGraph:
    return pipeline.build()


def by_name(graph: LogicalGraph, name: str) -> Node:
    return next(node for node in graph.nodes if node.name == name)


def test_a_chain_becomes_nodes_in_the_order_written(pipeline: Pipeline, bids: Stream) -> None:
    (
        bids.filter(lambda bid: bid.price > 1)
        .map(lambda bid: (bid.auction,), returns="auction long")
        .flat_map(lambda row: [row, row], returns="auction long")
        .map_batches(lambda batch: batch, returns="auction long")
        .to("out", Nowhere())
    )

    graph = pipeline.build()

    assert [node.name for node in graph.nodes] == ["bids", "filter-1", "map-1", "flat_map-1", "map_batches-1", "out"]
    assert [node.spec.kind for node in graph.nodes] == ["source", "filter", "map", "flat_map", "map_batches", "sink"]
    assert [node.id for node in graph.nodes] == list(range(6))
    assert [node.inputs for node in graph.nodes[1:]] == [(Edge(index, None, 0, FORWARD),) for index in range(5)]


def test_nodes_carry_the_schemas_of_their_ports_and_outputs(pipeline: Pipeline, bids: Stream) -> None:
    mapped = bids.map(lambda bid: (bid.auction,), returns="a long")
    mapped.to("out", Nowhere())

    source, mapper, sink = pipeline.build().nodes

    assert source.schema == parse_schema(BIDS) and source.input_schemas == ()
    assert mapper.input_schemas == (parse_schema(BIDS),) and mapper.schema == parse_schema("a long") == mapped.schema
    assert sink.input_schemas == (parse_schema("a long"),)


def test_a_filter_keeps_the_schema(bids: Stream) -> None:
    assert bids.filter(bool).schema == bids.schema


def test_returns_may_be_an_arrow_schema(bids: Stream) -> None:
    schema = pa.schema([("a", pa.int64()), ("b", pa.string())])
    assert bids.map(lambda bid: bid, returns=schema).schema == schema


def test_returns_may_be_a_struct_type(bids: Stream) -> None:
    class StructType:  # what pyspark's class looks like from here; unit tests don't import pyspark
        def jsonValue(self) -> dict[str, Any]:
            return {"type": "struct", "fields": [{"name": "a", "type": "long", "nullable": True, "metadata": {}}]}

    assert bids.map(lambda bid: bid, returns=StructType()).schema == parse_schema("a long")


def test_generated_names_count_by_kind_and_avoid_the_users(pipeline: Pipeline, bids: Stream) -> None:
    bids.map(lambda bid: bid, returns=BIDS, name="map-2")
    for _ in range(2):
        bids.map(lambda bid: bid, returns=BIDS)
    bids.filter(bool)
    names = [node.name for node in pipeline._nodes]
    assert names == ["bids", "map-2", "map-1", "map-3", "filter-1"]
    assert [node.named_by_user for node in pipeline._nodes] == [True, True, False, False, False]


def test_key_by_hashes_by_its_columns(pipeline: Pipeline, bids: Stream) -> None:
    keyed = bids.key_by("auction", "ts")
    keyed.process("count", Count(), returns="auction long, n long").to("out", Nowhere())

    count = by_name(pipeline.build(), "count")

    assert keyed.key == ("auction", "ts") and keyed.schema == bids.schema
    assert count.inputs == (Edge(0, None, 0, HASH, ("auction", "ts")),)
    assert isinstance(count.spec, KeyedProcessSpec) and count.spec.key == ("auction", "ts")


def test_a_float_column_may_be_a_key(bids: Stream) -> None:
    assert bids.key_by("price").key == ("price",)


def test_a_process_without_key_reads_forward(pipeline: Pipeline, bids: Stream) -> None:
    bids.process("collect", Collect(), returns="ids array<long>", parallelism=1).to("out", Nowhere())
    collect = by_name(pipeline.build(), "collect")
    assert collect.inputs == (Edge(0, None, 0, FORWARD),)
    assert isinstance(collect.spec, ProcessSpec) and collect.parallelism == 1


def test_a_keyed_stream_can_go_to_a_sink_by_key(pipeline: Pipeline, bids: Stream) -> None:
    bids.key_by("auction").to("out", Nowhere())
    assert by_name(pipeline.build(), "out").inputs == (Edge(0, None, 0, HASH, ("auction",)),)


def test_a_union_is_several_edges_into_one_port(pipeline: Pipeline, bids: Stream) -> None:
    more = pipeline.source("more bids", Records(BIDS))
    bids.union(more.rebalance()).to("out", Nowhere())
    assert by_name(pipeline.build(), "out").inputs == (Edge(0, None, 0, FORWARD), Edge(1, None, 0, REBALANCE))


def test_a_stream_united_with_itself_arrives_twice(pipeline: Pipeline, bids: Stream) -> None:
    bids.union(bids).to("out", Nowhere())
    assert by_name(pipeline.build(), "out").inputs == (Edge(0, None, 0, FORWARD),) * 2


def test_a_union_of_nothing_is_the_stream(bids: Stream) -> None:
    assert bids.union().schema == bids.schema


def test_a_union_is_keyed_edge_by_edge(pipeline: Pipeline, bids: Stream) -> None:
    more = pipeline.source("more bids", Records(BIDS))
    bids.union(more).key_by("auction").process("count", Count(), returns="a long, n long").to("out", Nowhere())
    assert [edge.partitioning for edge in by_name(pipeline.build(), "count").inputs] == [HASH, HASH]


def test_a_union_is_nullable_where_one_of_its_streams_is(pipeline: Pipeline) -> None:
    strict = pipeline.source("strict", Records("a long not null, b long not null"))
    loose = pipeline.source("loose", Records("a long, b long not null"))
    assert strict.union(loose).schema == parse_schema("a long, b long not null")


def test_connected_keyed_streams_keep_their_own_keys(pipeline: Pipeline, bids: Stream) -> None:
    items = pipeline.source("items", Records("item long, name string"))
    (
        bids.key_by("auction")
        .connect(items.key_by("item"))
        .process("join", Join(), returns="auction long")
        .to("out", Nowhere())
    )

    join = by_name(pipeline.build(), "join")

    assert join.inputs == (Edge(0, None, 0, HASH, ("auction",)), Edge(1, None, 1, HASH, ("item",)))
    assert join.input_schemas == (bids.schema, items.schema)
    assert isinstance(join.spec, CoProcessSpec) and join.spec.keys == (("auction",), ("item",))


def test_streams_without_key_connect_forward(pipeline: Pipeline, bids: Stream) -> None:
    bids.connect(bids).process("join", Join(), returns="auction long").to("out", Nowhere())
    join = by_name(pipeline.build(), "join")
    assert join.inputs == (Edge(0, None, 0, FORWARD), Edge(0, None, 1, FORWARD))
    assert isinstance(join.spec, CoProcessSpec) and join.spec.keys is None


@pytest.mark.parametrize("keyed", [True, False])
def test_a_broadcast_stream_arrives_at_port_one(pipeline: Pipeline, bids: Stream, keyed: bool) -> None:
    rules = pipeline.source("rules", Records("kind string, limit double"))
    main = bids.key_by("auction") if keyed else bids
    main.connect(rules.broadcast()).process("apply", Rules(), returns="auction long").to("out", Nowhere())

    apply = by_name(pipeline.build(), "apply")

    main_edge = Edge(0, None, 0, HASH, ("auction",)) if keyed else Edge(0, None, 0, FORWARD)
    assert apply.inputs == (main_edge, Edge(1, None, 1, BROADCAST))
    assert isinstance(apply.spec, BroadcastProcessSpec) and apply.spec.key == (("auction",) if keyed else ())


def test_a_side_output_is_a_stream_of_its_own_schema(pipeline: Pipeline, bids: Stream) -> None:
    counts = bids.key_by("auction").process(
        "count", Count(), returns="auction long, n long", side_outputs={"late": "auction long"}
    )
    late = counts.side_output("late")
    counts.to("out", Nowhere())
    late.to("late out", Nowhere())

    graph = pipeline.build()

    assert late.schema == parse_schema("auction long")
    assert by_name(graph, "count").side_schemas == {"late": parse_schema("auction long")}
    assert by_name(graph, "late out").inputs == (Edge(1, "late", 0, FORWARD),)


def test_a_watermark_is_a_node_with_its_times_in_milliseconds(pipeline: Pipeline, bids: Stream) -> None:
    bids.with_watermark("ts", "5 seconds", idle_after=timedelta(minutes=1)).to("out", Nowhere())
    watermark = by_name(pipeline.build(), "watermark-1")
    assert watermark.spec == WatermarkSpec("ts", 5_000, 60_000, ("bids",)) and watermark.schema == bids.schema


@pytest.mark.parametrize("kind", ["long", "timestamp", "timestamp_ntz", "date"])
def test_time_can_be_a_long_a_timestamp_or_a_date(pipeline: Pipeline, kind: str) -> None:
    stream = pipeline.source("s", Records(f"at {kind}")).with_watermark("at", 0)
    assert stream.schema == parse_schema(f"at {kind}")


def test_a_watermark_is_as_parallel_as_its_source(pipeline: Pipeline) -> None:
    one = pipeline.source("one", Records(BIDS), parallelism=1)
    two = pipeline.source("two", Records(BIDS), parallelism=2)
    for stream in (one, one.union(one), one.union(two), one.rebalance()):
        stream.with_watermark("ts", "1 s")
    assert [node.parallelism for node in pipeline._nodes[2:]] == [1, 1, None, None]


def test_every_operator_can_be_given_a_parallelism(pipeline: Pipeline) -> None:
    stream = pipeline.source("s", Records(BIDS), parallelism=1)
    stream = stream.map(lambda row: row, returns=BIDS, parallelism=2).filter(bool, parallelism=3)
    stream = stream.flat_map(lambda row: [row], returns=BIDS, parallelism=4)
    stream = stream.map_batches(lambda batch: batch, returns=BIDS, parallelism=5)
    stream.key_by("auction").process("count", Count(), returns=BIDS, parallelism=6).to("out", Nowhere(), parallelism=7)
    assert [node.parallelism for node in pipeline.build().nodes] == [1, 2, 3, 4, 5, 6, 7]


def test_a_process_without_output_may_end_a_job(pipeline: Pipeline, bids: Stream) -> None:
    bids.key_by("auction").process("count", Count())
    assert by_name(pipeline.build(), "count").schema.names == []


def test_a_process_whose_side_output_alone_is_used_is_complete(pipeline: Pipeline, bids: Stream) -> None:
    counts = bids.key_by("auction").process("count", Count(), returns="n long", side_outputs={"late": "n long"})
    counts.side_output("late").to("out", Nowhere())
    assert len(pipeline.build().nodes) == 3


def test_a_stream_can_be_used_many_times(pipeline: Pipeline, bids: Stream) -> None:
    bids.to("a", Nowhere())
    bids.key_by("auction").to("b", Nowhere())
    graph = pipeline.build()
    assert [(node.name, edge.partitioning) for node, edge in graph.consumers(0)] == [("a", FORWARD), ("b", HASH)]


def test_a_graph_does_not_change_when_the_pipeline_grows(pipeline: Pipeline, bids: Stream) -> None:
    bids.to("a", Nowhere())
    before = pipeline.build()
    bids.to("b", Nowhere())
    assert len(before.nodes) == 2 and len(pipeline.build().nodes) == 3


def test_streams_say_what_they_are(bids: Stream, pipeline: Pipeline) -> None:
    rules = pipeline.source("rules", Records("kind string"))
    assert repr(bids) == f"<stream of 'bids': {BIDS}>"
    assert repr(bids.key_by("auction")) == f"<stream of 'bids' keyed by auction: {BIDS}>"
    assert repr(rules.broadcast()) == "<broadcast stream: kind string>"
    assert repr(bids.connect(rules)) == f"<<stream of 'bids': {BIDS}> connected with <stream of 'rules': kind string>>"
