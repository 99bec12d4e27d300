"""Loops as the user writes them: what `iterate` adds to the graph, and what it says where something is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

from tests.unit.dataflow.test_optimiser import Count, Join, Nowhere, Records, Rules, count, passed_on, records
from tidegate.dataflow.graph import Edge, Node, Partitioning
from tidegate.dataflow.loops import loops_in
from tidegate.dataflow.operators.iteration import IterationHeadSpec, IterationTailSpec
from tidegate.dataflow.pipeline import Pipeline
from tidegate.dataflow.stream import Stream
from tidegate.errors import GraphError, SchemaError
from tidegate.types import parse_schema


def again(stream: Stream) -> tuple[Stream, Stream]:
    tried = count(stream, "try")
    return passed_on(tried, "again"), passed_on(tried, "done")


def by_name(pipeline: Pipeline) -> dict[str, Node]:
    return {node.name: node for node in pipeline.build().nodes}


def members(pipeline: Pipeline) -> dict[str, list[str]]:
    """What is in each loop, in order, without its head and its tail."""
    nodes = pipeline.build().nodes
    return {
        loop.head.name: [nodes[index].name for index in sorted(loop.nodes - {loop.head.id, loop.tail.id})]
        for loop in loops_in(nodes)
    }


# ------------------------------------------------------------------------------------------------- what is built


def test_a_loop_is_a_head_a_body_and_a_tail_that_names_the_head() -> None:
    pipeline = Pipeline()
    records(pipeline, "in").iterate("retry", again, parallelism=2, alias="loop").to("out", Nowhere())
    nodes = by_name(pipeline)
    assert list(nodes) == ["in", "retry", "try", "again", "done", "retry-feedback", "out"]
    head, tail = nodes["retry"], nodes["retry-feedback"]
    assert head.spec == IterationHeadSpec() and head.spec.stateful and head.spec.kind == "iterate"
    assert head.inputs == (Edge(0, None, 0, Partitioning.FORWARD),) and head.named_by_user
    assert head.schema == head.input_schemas[0] == parse_schema("k long, v long")
    assert (head.parallelism, head.aliases) == (2, ("loop",))
    assert tail.spec == IterationTailSpec(head.id) and not tail.spec.stateful and tail.spec.kind == "feedback"
    assert tail.inputs == (Edge(nodes["again"].id, None, 0, Partitioning.FORWARD),) and not tail.named_by_user
    assert not tail.schema.names and tail.input_schemas == head.input_schemas
    assert nodes["try"].inputs[0].source == head.id and nodes["out"].inputs[0].source == nodes["done"].id
    assert members(pipeline) == {"retry": ["try", "again"]}


def test_a_renamed_loop_finds_the_state_of_both_its_ends() -> None:
    pipeline = Pipeline()
    records(pipeline, "in").iterate("retry", again, alias=["loop", "redo"]).to("out", Nowhere())
    assert by_name(pipeline)["retry-feedback"].aliases == ("loop-feedback", "redo-feedback")


def test_the_body_is_called_once_with_a_stream_of_the_input_s_schema() -> None:
    given: list[Stream] = []

    def body(stream: Stream) -> tuple[Stream, Stream]:
        given.append(stream)
        return again(stream)

    stream = records(Pipeline(), "in")
    stream.iterate("retry", body)
    assert [each.schema for each in given] == [stream.schema]
    assert repr(given[0]) == "<stream of 'retry': k long, v long>"


def test_the_output_may_be_of_another_schema_or_the_feedback_itself_or_the_loop_s_stream() -> None:
    pipeline = Pipeline()
    stream = records(pipeline, "in")

    def narrowed(stream: Stream) -> tuple[Stream, Stream]:
        return passed_on(stream, "a"), stream.map(lambda row: row[:1], returns="k long", name="narrow")

    def same(stream: Stream) -> tuple[Stream, Stream]:
        back = passed_on(stream, "b")
        return back, back

    assert stream.iterate("one", narrowed).schema.names == ["k"]
    assert repr(stream.iterate("two", same)) == "<stream of 'b': k long, v long>"
    assert repr(stream.iterate("three", lambda stream: (passed_on(stream, "c"), stream))).startswith("<stream of 'three'")


def test_a_feedback_may_be_less_nullable_than_the_input() -> None:
    stream = records(Pipeline(), "in")
    stream.iterate("loop", lambda stream: (stream.map(lambda row: row, returns="k long NOT NULL, v long"), stream))


def test_a_union_goes_into_a_loop_and_another_back() -> None:
    pipeline = Pipeline()
    both = records(pipeline, "one").union(records(pipeline, "two").rebalance())

    def body(stream: Stream) -> tuple[Stream, Stream]:
        return passed_on(stream, "a").union(count(stream, "b")), stream

    both.iterate("loop", body).to("out", Nowhere())
    nodes = by_name(pipeline)
    assert [edge.partitioning.value for edge in nodes["loop"].inputs] == ["forward", "rebalance"]
    assert [edge.source for edge in nodes["loop-feedback"].inputs] == [nodes["a"].id, nodes["b"].id]
    assert members(pipeline) == {"loop": ["a", "b"]}


def test_a_side_output_may_be_the_feedback() -> None:
    pipeline = Pipeline()

    def body(stream: Stream) -> tuple[Stream, Stream]:
        tried = count(stream, "try", side_outputs={"failed": "k long, v long"})
        return tried.side_output("failed"), tried

    records(pipeline, "in").iterate("retry", body).to("out", Nowhere())
    assert by_name(pipeline)["retry-feedback"].inputs[0].tag == "failed"


def test_a_body_connects_with_streams_from_outside() -> None:
    pipeline = Pipeline()
    prices, rules = records(pipeline, "prices"), records(pipeline, "rules", 1)

    def body(stream: Stream) -> tuple[Stream, Stream]:
        joined = stream.key_by("k").connect(passed_on(prices, "cut").key_by("k")).process("join", Join(), "k long, v long")
        ruled = joined.connect(rules.broadcast()).process("rule", Rules(), "k long, v long")
        ruled.to("log", Nowhere())
        return passed_on(ruled, "again"), ruled

    records(pipeline, "in").iterate("loop", body).to("out", Nowhere())
    assert members(pipeline) == {"loop": ["join", "rule", "again"]}


def test_loops_one_after_the_other_have_nothing_of_each_other() -> None:
    pipeline = Pipeline()
    one = records(pipeline, "in").iterate("one", lambda stream: (passed_on(stream, "a"), stream))
    one.iterate("two", lambda stream: (passed_on(stream, "b"), stream)).to("out", Nowhere())
    assert members(pipeline) == {"one": ["a"], "two": ["b"]}


def test_a_loop_in_the_body_of_another_is_wholly_in_it() -> None:
    pipeline = Pipeline()

    def outer(stream: Stream) -> tuple[Stream, Stream]:
        done = passed_on(stream, "begin").iterate("inner", lambda stream: (passed_on(stream, "a"), passed_on(stream, "b")))
        return passed_on(done, "end"), done

    records(pipeline, "in").iterate("outer", outer).to("out", Nowhere())
    assert members(pipeline) == {"outer": ["begin", "inner", "a", "b", "inner-feedback", "end"], "inner": ["a"]}


def test_a_loop_in_the_body_of_another_that_leads_out_is_not_in_it() -> None:
    pipeline = Pipeline()

    def outer(stream: Stream) -> tuple[Stream, Stream]:
        out = passed_on(stream, "leave").iterate("inner", lambda stream: (passed_on(stream, "a"), stream))
        return passed_on(stream, "again"), out

    records(pipeline, "in").iterate("outer", outer).to("out", Nowhere())
    assert members(pipeline) == {"outer": ["again"], "inner": ["a"]}


def test_a_loop_of_an_outside_stream_begins_with_the_loop_that_it_gets_records_from() -> None:
    """The way of an outer record back to its head goes through the feedback of the inner loop alone."""

    def build(*, begin_with_both: bool) -> Pipeline:
        pipeline = Pipeline()
        other = records(pipeline, "other")

        def outer(stream: Stream) -> tuple[Stream, Stream]:
            def inner(others: Stream) -> tuple[Stream, Stream]:
                return passed_on(others.union(stream), "mix"), others

            mixed = (other.union(stream) if begin_with_both else other).iterate("inner", inner)
            return passed_on(mixed, "again"), mixed

        records(pipeline, "in").iterate("outer", outer).to("out", Nowhere())
        return pipeline

    assert members(build(begin_with_both=True)) == {"outer": ["inner", "mix", "inner-feedback", "again"], "inner": ["mix"]}
    with pytest.raises(GraphError, match="'inner' gets records of the loop 'outer' inside its body"):
        build(begin_with_both=False).build()


# ----------------------------------------------------------------------------------------------- what is refused


def generating(stream: Stream) -> Iterator[Any]:
    yield again(stream)


async def waiting(stream: Stream) -> Any:
    return again(stream)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (5, r"loop 'retry': iterate takes a function of the loop's stream that returns two streams.* not 5"),
        (lambda: None, r"loop 'retry': .*<lambda> has the arguments \(\).*iterate calls it with one argument"),
        (generating, r"loop 'retry': generating is a generator; return the two streams"),
        (waiting, r"loop 'retry': waiting is asynchronous"),
        (lambda stream: None, r"loop 'retry': the body returned None; return two streams, the feedback and the output"),
        (lambda stream: passed_on(stream, "a"), r"the body returned <stream of 'a': .*they may be the same"),
        (lambda stream: (stream, stream, stream), r"the body returned \(<stream.*; return two streams"),
        (lambda stream: (passed_on(stream, "a"), 5), r"the output that the body returned is 5; return a stream"),
        (
            lambda stream: (stream.key_by("k"), stream),
            r"the feedback that the body returned is a keyed stream; return the stream before key_by",
        ),
        (lambda stream: (passed_on(stream, "a"), stream.broadcast()), r"the output .* is a broadcast stream; return the"),
        (
            lambda stream: (passed_on(stream, "a"), stream.key_by("k").process("no", Count())),
            r"operator 'no' has no output that could be used",
        ),
        (lambda stream: (passed_on(stream, "a"), records(Pipeline(), "b")), r"loop 'retry', output: .* different jobs"),
        (lambda stream: (records(Pipeline(), "b"), stream), r"loop 'retry', feedback: .* different jobs"),
        (
            lambda stream: (stream, passed_on(stream, "a")),
            r"loop 'retry': the feedback is the loop's own stream .* forever",
        ),
        (lambda stream: (passed_on(stream, "a").union(stream.rebalance()), stream), r"loop's own stream .* forever"),
    ],
)
def test_a_body_gives_two_streams(body: Any, told: str) -> None:
    with pytest.raises(GraphError, match=told):
        records(Pipeline(), "in").iterate("retry", body)


@pytest.mark.parametrize(
    ("returns", "told"),
    [
        ("k long", r"the feedback is of \(k long\), and the loop's stream of \(k long NOT NULL, v long\).* with map"),
        ("v long, k long NOT NULL", r"the feedback is of \(v long, k long NOT NULL\), and the loop's stream of"),
        ("k int NOT NULL, v long", r"the feedback is of \(k int NOT NULL, v long\)"),
        ("k long, v long", r"\(k long, v long\), and .*: 'k' may be null in the feedback alone; declare it NOT NULL there"),
    ],
)
def test_a_feedback_has_the_columns_of_the_input(returns: str, told: str) -> None:
    stream = records(Pipeline(), "in").map(lambda row: row, returns="k long NOT NULL, v long")
    with pytest.raises(SchemaError, match=rf"loop 'retry': .*{told}"):
        stream.iterate("retry", lambda stream: (stream.map(lambda row: row, returns=returns), stream))


def test_types_that_spark_tells_not_apart_are_told_apart_by_their_arrow_names() -> None:
    stream = records(Pipeline(), "in").map(lambda row: row, returns="k string")
    large = pa.schema([pa.field("k", pa.large_string())])
    with pytest.raises(SchemaError, match=r"of \(k large_string\), and the loop's stream of \(k string\)"):
        stream.iterate("retry", lambda stream: (stream.map(lambda row: row, returns=large), stream))


def test_a_feedback_that_has_nothing_to_do_with_the_loop_is_refused() -> None:
    pipeline = Pipeline()
    stream, other = records(pipeline, "in"), records(pipeline, "other")
    with pytest.raises(GraphError, match=r"loop 'one': the body doesn't use the stream that it is called with"):
        stream.iterate("one", lambda _: (other, stream))
    with pytest.raises(GraphError, match=r"loop 'two': the feedback \('other', 'a'\) doesn't depend on the loop's stream"):
        stream.iterate("two", lambda loop: (other.union(passed_on(stream, "a")), loop))


def test_a_name_is_given_once_and_the_feedback_s_too() -> None:
    pipeline = Pipeline()
    stream = records(pipeline, "in")
    stream.iterate("retry", again)
    with pytest.raises(GraphError, match=r"loop 'retry': the name is already taken by an iterate"):
        stream.iterate("retry", again)
    with pytest.raises(GraphError, match=r"sink 'retry-feedback': .*taken by a feedback, by a generated name"):
        stream.to("retry-feedback", Nowhere())
    passed_on(stream, "redo-feedback")
    with pytest.raises(GraphError, match=r"loop 'redo', whose feedback is called 'redo-feedback': .*taken by a filter"):
        stream.iterate("redo", again)
    with pytest.raises(GraphError, match=r"loop 'x', whose feedback is called 'x-feedback': .*taken by a filter"):
        stream.iterate("x", lambda stream: (passed_on(stream, "x-feedback"), stream))
    with pytest.raises(GraphError, match=r"loop 'y', alias='in': that is a name or alias of the source 'in'"):
        stream.iterate("y", again, alias="in")
    with pytest.raises(GraphError, match=r"at most 64 characters"):
        stream.iterate("z" * 60, again)


def test_a_loop_whose_body_failed_is_no_part_of_a_job() -> None:
    pipeline = Pipeline()
    stream = records(pipeline, "in")

    def failing(stream: Stream) -> tuple[Stream, Stream]:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        stream.iterate("retry", failing)
    with pytest.raises(GraphError, match=r"loop 'retry' is not complete: its body failed.*build the job again"):
        pipeline.build()


def test_an_output_that_goes_nowhere_is_refused() -> None:
    pipeline = Pipeline()
    records(pipeline, "in").iterate("retry", again)
    with pytest.raises(GraphError, match=r"the output of filter 'done' goes nowhere"):
        pipeline.build()


def test_what_has_no_records_or_goes_by_key_can_t_begin_a_loop() -> None:
    stream = records(Pipeline(), "in")
    with pytest.raises(AttributeError, match=r"a keyed stream has no 'iterate': call .iterate\(…\) before key_by"):
        stream.key_by("k").iterate("retry", again)  # type: ignore[attr-defined]
    with pytest.raises(GraphError, match=r"operator 'no' has no output"):
        stream.key_by("k").process("no", Count()).iterate("retry", again)


def test_any_callable_is_a_body() -> None:
    pipeline = Pipeline()

    def named(prefix: str, stream: Stream) -> tuple[Stream, Stream]:
        return passed_on(stream, prefix), stream

    pipeline.source("in", Records()).iterate("loop", partial(named, "a")).to("out", Nowhere())
    assert members(pipeline) == {"loop": ["a"]}
