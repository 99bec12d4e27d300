"""Chaining, parallelism and the numbering of the plan."""

from __future__ import annotations

from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.dataflow.contracts import Sink, SinkContext, SinkWriter, Source, SourceContext, SourceReader
from tidegate.dataflow.functions import BroadcastProcess, CoProcess, KeyedProcess
from tidegate.dataflow.graph import Partitioning
from tidegate.dataflow.operators.iteration import IterationHeadSpec, IterationTailSpec
from tidegate.dataflow.optimiser import make_plan
from tidegate.dataflow.pipeline import Pipeline
from tidegate.dataflow.plan import Loop, Plan, PlanEdge
from tidegate.dataflow.stream import Stream
from tidegate.errors import GraphError
from tidegate.types import parse_schema


class Records(Source):
    @property
    def schema(self) -> pa.Schema:
        return parse_schema("k long, v long")

    @property
    def bounded(self) -> bool:
        return True

    def open(self, context: SourceContext) -> SourceReader:
        raise AssertionError("planning opens nothing")


class Nowhere(Sink):
    def open(self, context: SinkContext) -> SinkWriter:
        raise AssertionError("planning opens nothing")


class Count(KeyedProcess):
    def process(self, record: Any, ctx: Any) -> None: ...


class Join(CoProcess):
    def process_left(self, record: Any, ctx: Any) -> None: ...

    def process_right(self, record: Any, ctx: Any) -> None: ...


class Rules(BroadcastProcess):
    def process(self, record: Any, ctx: Any) -> None: ...

    def process_broadcast(self, record: Any, ctx: Any) -> None: ...


def plan_of(pipeline: Pipeline, *, slots: int = 2, key_groups: int = 128, chaining: bool = True) -> Plan:
    plan = make_plan(pipeline.build(), slots=slots, key_group_count=key_groups, chaining=chaining)
    check_invariants(plan, pipeline)
    return plan


def check_invariants(plan: Plan, pipeline: Pipeline) -> None:
    """What plan.py promises to its readers, for every plan of these tests."""
    graph = pipeline.build()
    assert [vertex.id for vertex in plan.vertices] == list(range(len(plan.vertices)))
    assert [edge.id for edge in plan.edges] == list(range(len(plan.edges)))
    assert sorted(node.id for vertex in plan.vertices for node in vertex.nodes) == list(range(len(graph.nodes)))
    chained_edge_count = 0
    for vertex in plan.vertices:
        seen = {vertex.first.id}
        for node in vertex.nodes[1:]:
            assert [edge.source in seen and edge.partitioning is Partitioning.FORWARD for edge in node.inputs] == [True]
            seen.add(node.id)
            chained_edge_count += 1
        assert sum(not edge.feedback for edge in plan.inputs_of(vertex)) == len(vertex.first.inputs)
    regular = [edge for edge in plan.edges if not edge.feedback]
    assert chained_edge_count + len(regular) == sum(len(node.inputs) for node in graph.nodes)
    assert plan.edges[: len(regular)] == tuple(regular)
    for edge in plan.edges:
        source, target = plan.vertices[edge.source_vertex], plan.vertices[edge.target_vertex]
        assert edge.feedback or source.id < target.id
        assert edge.source_node in {node.id for node in source.nodes}
        assert edge.partitioning is not Partitioning.FORWARD or source.parallelism == target.parallelism
    check_loops(plan)


def check_loops(plan: Plan) -> None:
    """The same for its loops."""
    assert [loop.id for loop in plan.loops] == list(range(len(plan.loops)))
    back = [edge for edge in plan.edges if edge.feedback]
    assert [(edge.source_vertex, edge.target_vertex) for edge in back] == [
        (loop.tail_vertex, loop.head_vertex) for loop in plan.loops
    ]
    heads = [vertex.id for vertex in plan.vertices if isinstance(vertex.first.spec, IterationHeadSpec)]
    assert heads == [loop.head_vertex for loop in plan.loops]
    for loop, edge in zip(plan.loops, back, strict=True):
        head = plan.vertices[loop.head_vertex]
        (tail,) = [node for node in plan.vertices[loop.tail_vertex].nodes if node.id == edge.source_node]
        assert isinstance(tail.spec, IterationTailSpec)
        assert tail.spec.head == head.first.id and head.first.name == loop.name
        assert (edge.partitioning, edge.port, edge.tag, edge.key) == (Partitioning.FORWARD, 0, None, ())
        assert loop.vertices == on_the_way(plan, loop)
        inside = [edge for edge in plan.edges if plan.edge_inside(loop, edge)]
        assert [each for each in inside if each.target_vertex == head.id] == [edge], "a loop's input is from outside it"
        for vertex in loop.vertices:
            assert loop in plan.loops_of(vertex)
            assert any(each.target_vertex == vertex for each in inside)
            assert any(each.source_vertex == vertex for each in inside)


def on_the_way(plan: Plan, loop: Loop) -> set[int]:
    """The vertices between a loop's head and its tail, by the transitive closure of all that records can do in it."""
    inner = {(other.tail_vertex, other.head_vertex) for other in plan.loops if other.id > loop.id}
    ways = {(edge.source_vertex, edge.target_vertex) for edge in plan.edges if not edge.feedback} | inner
    ways |= {(vertex.id, vertex.id) for vertex in plan.vertices}
    for middle in range(len(plan.vertices)):
        ways |= {
            (one, other)
            for one in range(len(plan.vertices))
            for other in range(len(plan.vertices))
            if (one, middle) in ways and (middle, other) in ways
        }
    return {
        vertex.id
        for vertex in plan.vertices
        if (loop.head_vertex, vertex.id) in ways and (vertex.id, loop.tail_vertex) in ways
    }


def names(plan: Plan) -> list[str]:
    return [vertex.name for vertex in plan.vertices]


def wires(plan: Plan) -> list[tuple[int, int, int, str]]:
    def wire(edge: PlanEdge) -> tuple[int, int, int, str]:
        return edge.source_vertex, edge.target_vertex, edge.port, edge.partitioning.value

    return [wire(edge) for edge in plan.edges]


def records(pipeline: Pipeline, name: str, parallelism: int | None = None) -> Stream:
    return pipeline.source(name, Records(), parallelism=parallelism)


def passed_on(stream: Stream, name: str, parallelism: int | None = None) -> Stream:
    return stream.filter(bool, name=name, parallelism=parallelism)


def count(stream: Stream, name: str = "count", parallelism: int | None = None, **options: Any) -> Stream:
    return stream.key_by("k").process(name, Count(), returns="k long, v long", parallelism=parallelism, **options)


def test_operators_that_pass_records_straight_on_are_one_vertex() -> None:
    pipeline = Pipeline()
    passed_on(passed_on(records(pipeline, "in"), "a"), "b").to("out", Nowhere())
    plan = plan_of(pipeline)
    assert names(plan) == ["in → a → b → out"]
    assert plan.edges == () and plan.vertices[0].parallelism == 2


def test_a_key_starts_a_new_vertex() -> None:
    pipeline = Pipeline()
    count(passed_on(records(pipeline, "in"), "a")).to("out", Nowhere())
    plan = plan_of(pipeline)
    assert names(plan) == ["in → a", "count → out"]
    assert plan.edges == (
        PlanEdge(
            id=0,
            source_vertex=0,
            source_node=1,
            tag=None,
            target_vertex=1,
            port=0,
            partitioning=Partitioning.HASH,
            key=("k",),
        ),
    )


def test_rebalance_starts_a_new_vertex() -> None:
    pipeline = Pipeline()
    passed_on(records(pipeline, "in").rebalance(), "a").to("out", Nowhere())
    plan = plan_of(pipeline)
    assert names(plan) == ["in", "a → out"] and wires(plan) == [(0, 1, 0, "rebalance")]


def test_without_chaining_every_operator_is_a_vertex() -> None:
    pipeline = Pipeline()
    count(passed_on(records(pipeline, "in"), "a")).to("out", Nowhere())
    plan = plan_of(pipeline, chaining=False)
    assert names(plan) == ["in", "a", "count", "out"]
    assert wires(plan) == [(0, 1, 0, "forward"), (1, 2, 0, "hash"), (2, 3, 0, "forward")]


def test_different_parallelism_breaks_the_chain_and_rebalances() -> None:
    pipeline = Pipeline()
    passed_on(passed_on(records(pipeline, "in", 1), "a", 2), "b").to("out", Nowhere(), parallelism=1)
    plan = plan_of(pipeline, slots=2)
    assert names(plan) == ["in", "a → b", "out"]
    assert [vertex.parallelism for vertex in plan.vertices] == [1, 2, 1]
    assert wires(plan) == [(0, 1, 0, "rebalance"), (1, 2, 0, "rebalance")]


def test_a_fork_is_a_tree_shaped_chain() -> None:
    pipeline = Pipeline()
    source = records(pipeline, "in")
    passed_on(source, "a").to("out a", Nowhere())
    passed_on(source, "b").to("out b", Nowhere())
    plan = plan_of(pipeline)
    assert names(plan) == ["in → a → out a → b → out b"] and plan.edges == ()


def test_a_diamond_comes_together_in_a_vertex_of_its_own() -> None:
    pipeline = Pipeline()
    source = records(pipeline, "in")
    passed_on(source, "a").union(passed_on(source, "b")).to("out", Nowhere())
    plan = plan_of(pipeline)
    assert names(plan) == ["in → a → b", "out"]
    assert [(edge.source_node, edge.target_vertex) for edge in plan.edges] == [(1, 1), (2, 1)]
    assert wires(plan) == [(0, 1, 0, "forward"), (0, 1, 0, "forward")]


def test_a_stream_united_with_itself_has_two_edges() -> None:
    pipeline = Pipeline()
    source = records(pipeline, "in")
    source.union(source).to("out", Nowhere())
    plan = plan_of(pipeline)
    assert names(plan) == ["in", "out"] and wires(plan) == [(0, 1, 0, "forward")] * 2


def test_an_operator_with_two_inputs_heads_its_vertex() -> None:
    pipeline = Pipeline()
    left, right = records(pipeline, "left"), records(pipeline, "right", 1)
    left.connect(right).process("join", Join(), returns="k long").to("out", Nowhere())
    plan = plan_of(pipeline)
    assert names(plan) == ["left", "right", "join → out"]
    assert wires(plan) == [(0, 2, 0, "forward"), (1, 2, 1, "rebalance")]


def test_a_stream_connected_with_itself_uses_both_ports() -> None:
    pipeline = Pipeline()
    keyed = records(pipeline, "in").key_by("k")
    keyed.connect(keyed).process("join", Join(), returns="k long").to("out", Nowhere())
    assert wires(plan_of(pipeline)) == [(0, 1, 0, "hash"), (0, 1, 1, "hash")]


def test_a_broadcast_edge_stays_one_whatever_the_parallelism() -> None:
    pipeline = Pipeline()
    rules = records(pipeline, "rules", 1)
    records(pipeline, "in").connect(rules.broadcast()).process("apply", Rules(), returns="k long").to("out", Nowhere())
    plan = plan_of(pipeline)
    assert names(plan) == ["rules", "in", "apply → out"]
    assert wires(plan) == [(1, 2, 0, "forward"), (0, 2, 1, "broadcast")]
    assert len(plan.targets(plan.edges[1], 0)) == 2


def test_side_outputs_are_chained_too() -> None:
    pipeline = Pipeline()
    counts = count(records(pipeline, "in"), side_outputs={"late": "k long"})
    counts.to("out", Nowhere())
    counts.side_output("late").to("late out", Nowhere())
    assert names(plan_of(pipeline)) == ["in", "count → out → late out"]


def test_an_unchained_side_output_keeps_its_tag() -> None:
    pipeline = Pipeline()
    counts = count(records(pipeline, "in"), side_outputs={"late": "k long"})
    counts.side_output("late").to("late out", Nowhere(), parallelism=1)
    plan = plan_of(pipeline)
    assert [(edge.tag, edge.partitioning) for edge in plan.edges] == [
        (None, Partitioning.HASH),
        ("late", Partitioning.REBALANCE),
    ]


def test_vertices_are_ordered_by_their_heads_where_chains_interleave() -> None:
    pipeline = Pipeline()
    first, second = records(pipeline, "first"), records(pipeline, "second")
    counted = count(second)
    passed_on(first, "a").to("out a", Nowhere())
    counted.to("out", Nowhere())
    assert names(plan_of(pipeline)) == ["first → a → out a", "second", "count → out"]


def test_the_default_parallelism_is_the_number_of_slots() -> None:
    pipeline = Pipeline()
    count(passed_on(records(pipeline, "in", 1), "a")).to("out", Nowhere())
    assert [vertex.parallelism for vertex in plan_of(pipeline, slots=5).vertices] == [1, 5]


def test_an_operator_that_only_gets_records_passed_on_takes_its_upstreams_parallelism_to_keep_their_order() -> None:
    pipeline = Pipeline()
    count(passed_on(records(pipeline, "in", 1), "a"), parallelism=3).to("out", Nowhere())
    plan = plan_of(pipeline, slots=5)
    assert names(plan) == ["in → a", "count → out"]
    assert [vertex.parallelism for vertex in plan.vertices] == [1, 3]
    assert wires(plan) == [(0, 1, 0, "hash")]


def test_more_parallelism_than_slots_is_refused() -> None:
    pipeline = Pipeline()
    count(records(pipeline, "in"), parallelism=5).to("out", Nowhere())
    with pytest.raises(GraphError, match=r"operator 'count': parallelism=5 .* 4 slots.*give the job slots=5"):
        plan_of(pipeline, slots=4)


def test_more_parallelism_than_key_groups_is_refused_for_keyed_operators_alone() -> None:
    pipeline = Pipeline()
    count(records(pipeline, "in")).to("out", Nowhere())
    with pytest.raises(GraphError, match=r"'count': its parallelism of 4 .* 3 key-groups.*parallelism=3 or less"):
        plan_of(pipeline, slots=4, key_groups=3)

    keyless = Pipeline()
    records(keyless, "in").to("out", Nowhere())
    assert plan_of(keyless, slots=4, key_groups=3).vertices[0].parallelism == 4


@pytest.mark.parametrize(("slots", "key_groups"), [(0, 128), (2, 0)])
def test_a_job_needs_slots_and_key_groups(slots: int, key_groups: int) -> None:
    pipeline = Pipeline()
    records(pipeline, "in").to("out", Nowhere())
    with pytest.raises(GraphError, match="at least one"):
        plan_of(pipeline, slots=slots, key_groups=key_groups)


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    """Any shape that the API can make: forks, diamonds, unions, two inputs, broadcasts, side outputs, loops in loops."""
    pipeline = Pipeline()
    streams = [records(pipeline, "in", draw(st.sampled_from([None, 1, 2])))]
    grow(draw, streams, "n", steps=draw(st.integers(1, 8)), depth=2)
    for index, stream in enumerate(streams):
        stream.to(f"out{index}", Nowhere(), parallelism=draw(st.sampled_from([None, 1])))
    return pipeline


def grow(
    draw: st.DrawFn, streams: list[Stream], prefix: str, *, steps: int, depth: int, around: Stream | None = None
) -> None:
    """Adds operators. What is made in a loop's body may be used outside of it, too."""
    kinds = ["filter", "count", "union", "connect", "broadcast", "rebalance", "side", *["loop"] * (2 * depth)]
    for index in range(steps):
        one, other = draw(st.sampled_from(streams)), draw(st.sampled_from(streams))
        name, parallelism = f"{prefix}{index}", draw(st.sampled_from([None, 1, 2]))
        returns, sides = "k long, v long", {"side": "k long, v long"}
        match draw(st.sampled_from(kinds)):
            case "filter":
                streams.append(passed_on(one, name, parallelism))
            case "count":
                streams.append(count(one, name, parallelism))
            case "union":
                streams.append(one.union(other))
            case "connect":
                both = one.key_by("k").connect(other.key_by("v"))
                streams.append(both.process(name, Join(), returns=returns, parallelism=parallelism))
            case "broadcast":
                both = one.connect(other.broadcast())
                streams.append(both.process(name, Rules(), returns=returns, parallelism=parallelism))
            case "rebalance":
                streams.append(one.rebalance())
            case "side":
                counted = count(one, name, parallelism, side_outputs=sides)
                streams += [counted, counted.side_output("side")]
            case "loop":
                body = partial(grow_body, draw, streams, name, depth=depth - 1)
                begin = one if around is None else one.union(around)
                streams.append(begin.iterate(name, body, parallelism=parallelism))


def grow_body(draw: st.DrawFn, streams: list[Stream], loop: str, stream: Stream, *, depth: int) -> tuple[Stream, Stream]:
    streams.append(stream)
    grow(draw, streams, f"{loop}.", steps=draw(st.integers(0, 3)), depth=depth, around=stream)
    made = streams[streams.index(stream) :]
    returning = passed_on(stream.union(draw(st.sampled_from(made))), f"{loop} back", draw(st.sampled_from([None, 1, 2])))
    return returning, draw(st.sampled_from([returning, *made]))


@given(pipeline=pipelines(), chaining=st.booleans())
def test_every_graph_gives_a_sound_plan(pipeline: Pipeline, chaining: bool) -> None:
    plan = plan_of(pipeline, slots=3, chaining=chaining)
    for edge in plan.edges:
        written = [
            channel
            for upstream in range(plan.vertices[edge.source_vertex].parallelism)
            for channel in plan.targets(edge, upstream)
        ]
        read = [
            channel
            for downstream in range(plan.vertices[edge.target_vertex].parallelism)
            for channel in plan.origins(edge, downstream)
        ]
        assert sorted(written) == sorted(read) and len(set(written)) == len(written)


@given(pipeline=pipelines())
def test_nothing_that_could_be_chained_is_left_apart(pipeline: Pipeline) -> None:
    plan = plan_of(pipeline, slots=3)
    for vertex in plan.vertices:
        inputs = plan.inputs_of(vertex)
        assert len(inputs) != 1 or inputs[0].partitioning is not Partitioning.FORWARD
