"""The two ends of a loop: what passes them and what doesn't."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.operators.harness import Bench
from tidegate.dataflow.in_flight import feedback_state
from tidegate.dataflow.operators.iteration import IterationHeadSpec, IterationTailSpec
from tidegate.types import batch_of, parse_schema

RECORD = "k long, v string"


def head() -> Bench:
    return Bench(IterationHeadSpec(), RECORD, returns=RECORD)


def tail() -> Bench:
    return Bench(IterationTailSpec(head=0), RECORD)


def test_a_head_passes_everything_on() -> None:
    bench = head()
    assert bench.feed((1, "a"), (2, None)) == [(1, "a"), (2, None)]
    bench.operator.on_watermark(5)
    bench.operator.on_idle()
    bench.operator.on_end()
    assert bench.out.others == [("watermark", 5), ("idle",), ("end",)]


def test_a_tail_passes_records_back_and_nothing_else() -> None:
    bench = tail()
    assert bench.feed((1, "a"), (2, None)) == [(1, "a"), (2, None)]
    bench.operator.on_watermark(5)
    bench.operator.on_idle()
    bench.operator.on_end()
    assert bench.out.others == []


def test_a_head_declares_what_comes_back_as_its_state_and_leaves_it_to_the_runtime() -> None:
    bench = head()
    assert IterationHeadSpec().states(bench.node) == (feedback_state(parse_schema(RECORD)),)
    assert bench.operator.freeze(1) is None


def test_a_tail_has_no_state() -> None:
    bench = tail()
    assert IterationTailSpec(head=0).states(bench.node) == () and bench.operator.freeze(1) is None


@pytest.mark.parametrize("make", [head, tail])
def test_records_of_united_streams_leave_with_one_schema(make: Callable[[], Bench]) -> None:
    bench = make()
    seen = []
    bench.out.on_batch = lambda batch, port: seen.append(batch.schema)  # type: ignore[method-assign]
    for declared in (RECORD, "k long NOT NULL, v string"):
        bench.operator.on_batch(batch_of([(1, "a")], parse_schema(declared)), 0)
    assert seen == [parse_schema(RECORD)] * 2
