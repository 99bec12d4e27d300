"""What random graphs are like, and their interpreter: without running any of them."""

from __future__ import annotations

from collections import Counter
from random import Random

from tests.simulation import steps
from tests.simulation.random_graphs import Graph, Origin, RandomGraph, RandomLoops, Sink, interpreted
from tests.simulation.steps import DDL, Record, Step
from tidegate.connectors.rows import RowsSource
from tidegate.types import parse_schema

DRAWN = 200


def _graph_of(rows: tuple[Record, ...], made: list[Step], last: int) -> Graph:
    origin = Origin("source", 0, rows, RowsSource.of(rows, parse_schema(DDL), split_count=1))
    return Graph([origin], made, [Sink("sink", (last,), by_key=True, ordered=False)])


def test_every_kind_of_step_is_drawn_also_within_loops() -> None:
    graphs = [RandomLoops(Random(seed)).graph for seed in range(DRAWN)]
    outside = Counter(type(step) for graph in graphs for step in graph.steps)
    inside = Counter(type(step) for graph in graphs for step in set(graph.all_steps()) - set(graph.steps))
    assert set(outside) == {
        steps.Move,
        steps.Keep,
        steps.Copy,
        steps.Deal,
        steps.Unite,
        steps.Part,
        steps.Tally,
        steps.Number,
        steps.Running,
        steps.Join,
        steps.Meet,
        steps.Rules,
        steps.Note,
        steps.Loop,
    }
    assert set(inside) >= {steps.Tally, steps.Meet, steps.Rules, steps.Note, steps.Part, steps.Deal, steps.Loop}


def test_graphs_differ_in_sources_and_sinks_and_some_have_an_order_to_keep() -> None:
    graphs = [RandomGraph(Random(seed)).graph for seed in range(DRAWN)]
    assert {len(graph.origins) for graph in graphs} == {1, 2, 3}
    assert len({len(graph.sinks) for graph in graphs}) >= 3
    assert sum(sink.ordered for graph in graphs for sink in graph.sinks) > DRAWN / 10
    assert not any(isinstance(step, steps.Loop) for graph in graphs for step in graph.all_steps())


def test_most_graphs_have_something_to_tell() -> None:
    """A graph that drops everything would hide whatever is lost."""
    silent = [seed for seed in range(DRAWN) if not any(interpreted(RandomLoops(Random(seed)).graph)[0].values())]
    assert len(silent) < DRAWN / 20, silent


def test_the_interpreter_lets_records_make_their_laps() -> None:
    rows = (Record(0, 0, 1), Record(1, 1, 2), Record(2, 2, 3))
    told = steps.Move("laps", (0,), (1,), laps=2)
    body = (steps.Tally("tally", (2,), (3,)), steps.Part("turn", (3,), (4, 5), turns="outer"))
    loop = steps.Loop("loop", (1,), (2, 5), body=body, feedback=4)
    written, memory = interpreted(_graph_of(rows, [told, loop], 5))
    assert [(record.id, record.outer) for record in written["sink"]] == [(0, 0), (1, 0), (2, 0)]
    assert memory.sums["tally count"].total() == 1 + 2 + 3


def test_the_interpreter_joins_whichever_side_comes_first() -> None:
    rows = (Record(0, 0, 1), Record(1, 1, 2))
    written, _ = interpreted(_graph_of(rows, [steps.Join("join", (0, 0), (1,))], 1))
    assert [record.id for record in written["sink"]] == [0, 1]
