"""Loops in the plan: where their ends are chained, how parallel they are, which vertices and edges are inside."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.dataflow.test_optimiser import Join, Nowhere, Rules, count, names, passed_on, plan_of, records, wires
from tidegate.dataflow.graph import Partitioning
from tidegate.dataflow.optimiser import make_plan
from tidegate.dataflow.pipeline import Pipeline
from tidegate.dataflow.plan import Loop, Plan
from tidegate.dataflow.stream import Stream
from tidegate.errors import GraphError
from tidegate.protocol.ids import ChannelId


def around(stream: Stream) -> tuple[Stream, Stream]:
    """The smallest body there is."""
    again = passed_on(stream, "again")
    return again, again


def loop(
    pipeline: Pipeline, *, source: int | None = None, parallelism: int | None = None, of_count: int | None = None
) -> Pipeline:
    def body(stream: Stream) -> tuple[Stream, Stream]:
        tried = count(stream, "try", of_count)
        return passed_on(tried, "again"), passed_on(tried, "done")

    records(pipeline, "in", source).iterate("retry", body, parallelism=parallelism).to("out", Nowhere())
    return pipeline


def inside(plan: Plan) -> list[list[int]]:
    return [[edge.id for edge in plan.edges if plan.edge_inside(loop, edge)] for loop in plan.loops]


def parallelism(plan: Plan) -> list[int]:
    return [vertex.parallelism for vertex in plan.vertices]


def test_without_loops_there_are_none() -> None:
    pipeline = Pipeline()
    count(records(pipeline, "in")).to("out", Nowhere())
    plan = plan_of(pipeline)
    assert plan.loops == () and plan.loops_of(0) == [] and not plan.edges[0].feedback


def test_a_head_begins_a_vertex_and_a_tail_ends_the_body_s() -> None:
    plan = plan_of(loop(Pipeline()))
    assert names(plan) == ["in", "retry", "try → again → done → retry-feedback → out"]
    assert wires(plan) == [(0, 1, 0, "forward"), (1, 2, 0, "hash"), (2, 1, 0, "forward")]
    assert [edge.feedback for edge in plan.edges] == [False, False, True]
    assert plan.loops == (Loop(0, "retry", head_vertex=1, tail_vertex=2, vertices=frozenset({1, 2})),)
    assert plan.loops_of(0) == [] and plan.loops_of(1) == plan.loops_of(2) == [plan.loops[0]]
    assert inside(plan) == [[1, 2]]


def test_the_feedback_edge_is_an_input_of_the_head_and_an_output_of_the_tail() -> None:
    plan = plan_of(loop(Pipeline()), slots=2)
    _, head, body = plan.vertices
    assert [edge.id for edge in plan.inputs_of(head)] == [0, 2] and [edge.id for edge in plan.outputs_of(body)] == [2]
    feedback = plan.edges[2]
    assert plan.targets(feedback, 1) == plan.origins(feedback, 1) == [ChannelId(2, 1, 1)]


def test_a_loop_without_an_exchange_is_one_vertex_with_an_edge_to_itself() -> None:
    pipeline = Pipeline()
    records(pipeline, "in").iterate("loop", around).to("out", Nowhere())
    plan = plan_of(pipeline)
    assert names(plan) == ["in", "loop → again → loop-feedback → out"]
    assert wires(plan) == [(0, 1, 0, "forward"), (1, 1, 0, "forward")]
    assert plan.loops == (Loop(0, "loop", 1, 1, frozenset({1})),) and inside(plan) == [[1]]


def test_without_chaining_both_ends_are_vertices_of_their_own() -> None:
    pipeline = Pipeline()
    records(pipeline, "in").iterate("loop", around).to("out", Nowhere())
    plan = plan_of(pipeline, chaining=False)
    assert names(plan) == ["in", "loop", "again", "loop-feedback", "out"]
    assert wires(plan) == [
        (0, 1, 0, "forward"),
        (1, 2, 0, "forward"),
        (2, 3, 0, "forward"),
        (2, 4, 0, "forward"),
        (3, 1, 0, "forward"),
    ]
    assert plan.loops[0].vertices == {1, 2, 3} and inside(plan) == [[1, 2, 4]]


def test_a_head_is_as_parallel_as_what_passes_it_records_on_and_the_tail_as_the_head() -> None:
    plan = plan_of(loop(Pipeline(), source=1), slots=3)
    assert names(plan) == ["in", "retry", "try → again → done → out", "retry-feedback"]
    assert parallelism(plan) == [1, 1, 3, 1]
    assert wires(plan) == [(0, 1, 0, "forward"), (1, 2, 0, "hash"), (2, 3, 0, "rebalance"), (3, 1, 0, "forward")]
    assert plan.loops[0].vertices == {1, 2, 3} and inside(plan) == [[1, 2, 3]]


@pytest.mark.parametrize(("of_loop", "of_count"), [(1, 3), (2, 1), (3, 2)])
def test_a_body_may_be_more_or_less_parallel_than_its_loop(of_loop: int, of_count: int) -> None:
    plan = plan_of(loop(Pipeline(), parallelism=of_loop, of_count=of_count), slots=3)
    assert parallelism(plan) == [3, of_loop, of_count, of_loop]
    assert plan.edges[2].partitioning is Partitioning.REBALANCE and plan.edges[3].feedback
    assert plan.edges[0].partitioning is (Partitioning.FORWARD if of_loop == 3 else Partitioning.REBALANCE)


def test_a_tail_follows_its_head_to_another_parallelism() -> None:
    graph = loop(Pipeline()).build()
    rescaled = replace(
        graph, nodes=tuple(replace(node, parallelism=1) if node.name == "retry" else node for node in graph.nodes)
    )
    plan = make_plan(rescaled, slots=3, key_group_count=8)
    assert {node.name: vertex.parallelism for vertex in plan.vertices for node in vertex.nodes} == {
        "in": 3,
        "retry": 1,
        "try": 3,
        "again": 3,
        "done": 3,
        "out": 3,
        "retry-feedback": 1,
    }


def test_a_tail_has_no_parallelism_of_its_own() -> None:
    graph = loop(Pipeline()).build()
    rescaled = replace(
        graph, nodes=tuple(replace(node, parallelism=1) if node.name == "retry-feedback" else node for node in graph.nodes)
    )
    with pytest.raises(
        GraphError,
        match=r"operator 'retry-feedback': parallelism=1, and its loop begins with .* of 3.*"
        r"give it to the loop, not to its feedback",
    ):
        make_plan(rescaled, slots=3, key_group_count=8)


def test_a_loop_can_t_be_more_parallel_than_there_are_slots() -> None:
    with pytest.raises(GraphError, match=r"operator 'retry': parallelism=4 is more than the job's 3 slots"):
        plan_of(loop(Pipeline(), parallelism=4), slots=3)


def test_a_united_feedback_comes_together_in_a_vertex_of_its_own() -> None:
    pipeline = Pipeline()

    def body(stream: Stream) -> tuple[Stream, Stream]:
        return passed_on(stream, "a").union(count(stream, "b")), stream

    records(pipeline, "one").union(records(pipeline, "two", 1)).iterate("loop", body).to("out", Nowhere())
    plan = plan_of(pipeline)
    assert names(plan) == ["one", "two", "loop → a → out", "b", "loop-feedback"]
    assert wires(plan) == [
        (0, 2, 0, "forward"),
        (1, 2, 0, "rebalance"),
        (2, 3, 0, "hash"),
        (2, 4, 0, "forward"),
        (3, 4, 0, "forward"),
        (4, 2, 0, "forward"),
    ]
    assert plan.loops[0].vertices == {2, 3, 4} and inside(plan) == [[2, 3, 4, 5]]


def test_what_a_body_gets_from_outside_is_not_inside() -> None:
    pipeline = Pipeline()
    prices, rules = records(pipeline, "prices"), records(pipeline, "rules", 1)

    def body(stream: Stream) -> tuple[Stream, Stream]:
        joined = stream.key_by("k").connect(prices.key_by("k")).process("join", Join(), "k long, v long")
        ruled = joined.connect(rules.broadcast()).process("rule", Rules(), "k long, v long")
        return passed_on(ruled, "again"), count(ruled)

    records(pipeline, "in").iterate("loop", body).to("out", Nowhere())
    plan = plan_of(pipeline)
    assert names(plan) == ["prices", "rules", "in", "loop", "join", "rule → again → loop-feedback", "count → out"]
    assert plan.loops[0].vertices == {3, 4, 5}
    assert [wire for wire, edge in zip(wires(plan), plan.edges, strict=True) if plan.edge_inside(plan.loops[0], edge)] == [
        (3, 4, 0, "hash"),
        (4, 5, 0, "forward"),
        (5, 3, 0, "forward"),
    ]


def test_laps_of_an_outer_loop_take_the_feedback_of_an_inner_one_but_not_the_other_way_round() -> None:
    pipeline = Pipeline()

    def inner(stream: Stream) -> tuple[Stream, Stream]:
        counted = count(stream, "deep")
        return passed_on(counted, "deeper"), counted

    def outer(stream: Stream) -> tuple[Stream, Stream]:
        done = count(stream, "wide").iterate("inner", inner)
        return passed_on(done, "again"), done

    records(pipeline, "in").iterate("outer", outer).to("out", Nowhere())
    plan = plan_of(pipeline)
    assert names(plan) == ["in", "outer", "wide", "inner", "deep → deeper → inner-feedback → again → outer-feedback → out"]
    assert wires(plan)[4:] == [(4, 1, 0, "forward"), (4, 3, 0, "forward")]
    assert plan.loops == (Loop(0, "outer", 1, 4, frozenset({1, 2, 3, 4})), Loop(1, "inner", 3, 4, frozenset({3, 4})))
    assert inside(plan) == [[1, 2, 3, 4, 5], [3, 5]]
    assert [[found.name for found in plan.loops_of(vertex.id)] for vertex in plan.vertices] == [
        [],
        ["outer"],
        ["outer"],
        ["outer", "inner"],
        ["outer", "inner"],
    ]


def test_loops_one_after_the_other_share_nothing() -> None:
    pipeline = Pipeline()
    first = records(pipeline, "in").iterate("first", lambda stream: (passed_on(stream, "a"), stream))
    first.iterate("second", lambda stream: (passed_on(stream, "b"), stream)).to("out", Nowhere())
    plan = plan_of(pipeline)
    assert names(plan) == ["in", "first → a → first-feedback", "second → b → second-feedback → out"]
    assert wires(plan) == [(0, 1, 0, "forward"), (1, 2, 0, "forward"), (1, 1, 0, "forward"), (2, 2, 0, "forward")]
    assert inside(plan) == [[2], [3]]


def test_two_loops_may_end_in_one_vertex() -> None:
    """Two bodies, one of them built in the other, that feed the same records back."""
    pipeline = Pipeline()

    def outer(stream: Stream) -> tuple[Stream, Stream]:
        back: list[Stream] = []

        def inner(stream: Stream) -> tuple[Stream, Stream]:
            back.append(count(stream, "deep"))
            return back[0], back[0]

        stream.iterate("inner", inner)
        return back[0], back[0]

    records(pipeline, "in").iterate("outer", outer).to("out", Nowhere())
    plan = plan_of(pipeline)
    assert names(plan) == ["in", "outer", "inner", "deep → inner-feedback → outer-feedback → out"]
    assert [(loop.tail_vertex, sorted(loop.vertices)) for loop in plan.loops] == [(3, [1, 2, 3]), (3, [2, 3])]
    assert inside(plan) == [[1, 2, 3, 4], [2, 4]]
