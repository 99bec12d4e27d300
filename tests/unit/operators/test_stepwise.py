"""An operator in steps: what arrives while work is left waits behind it, in order; records that are held are known."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from tests.unit.operators.harness import Clock, Collected
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import Operator, OperatorContext
from tidegate.dataflow.operators.budget import MOST_BETWEEN_LOOKS, STEP_MS, Budget, Pace
from tidegate.dataflow.operators.simple import MapSpec
from tidegate.dataflow.operators.stepwise import Steps, StepwiseOperator
from tidegate.types import batch_of, parse_schema

SCHEMA = parse_schema("n long")


class Slow(StepwiseOperator):
    """Takes a whole step for each record, and one before each watermark."""

    def take_batch(self, batch: pa.RecordBatch, port: int) -> Steps:
        for number in range(batch.num_rows):
            self.emit(batch.slice(number, 1))
            self._budget.end()
            if number + 1 < batch.num_rows:
                yield

    def take_watermark(self, at_ms: int) -> Steps:
        self._budget.end()
        yield
        self.forward_watermark(at_ms)


def node() -> Node:
    return Node(0, "slow", MapSpec(lambda row: row), (), SCHEMA, (SCHEMA,), {})


def opened(operator: Operator, budget: Budget) -> Collected:
    context = OperatorContext(
        job="job",
        subtask=0,
        parallelism=1,
        attempt=1,
        key_group_count=4,
        now_ms=Clock(),
        deliver=lambda sink, committable: None,
        make_backend=lambda key_type: (_ for _ in ()).throw(AssertionError("no keyed state here")),
    )
    operator.open(replace(context, budget=budget))
    out = Collected()
    operator.consumers.append(out)
    return out


def numbers(*values: int) -> pa.RecordBatch:
    return batch_of([(value,) for value in values], SCHEMA)


def test_what_arrives_while_work_is_left_waits_behind_it_in_order() -> None:
    budget = Budget()
    slow = Slow(node())
    out = opened(slow, budget)
    slow.on_batch(numbers(1, 2), 0)
    slow.on_watermark(10)
    slow.on_idle()
    slow.on_batch(numbers(3), 0)
    slow.on_end()
    assert out.events == [("batch", (1,))], "one step's worth"
    steps = 0
    while slow.has_work():
        budget.begin()
        slow.work()
        steps += 1
    assert out.events == [("batch", (1,)), ("batch", (2,)), ("watermark", 10), ("idle",), ("batch", (3,)), ("end",)]
    assert steps == 4, "the second record; the pause of the watermark; up to the next record; the end"


def test_records_are_held_until_the_last_is_done_and_a_watermark_holds_none() -> None:
    budget = Budget()
    slow = Slow(node())
    opened(slow, budget)
    slow.on_batch(numbers(1, 2), 0)
    assert slow.has_work() and slow.holds_records()
    budget.begin()
    slow.work()
    assert not slow.has_work() and not slow.holds_records()
    budget.begin()
    slow.on_watermark(5)
    assert slow.has_work() and not slow.holds_records()
    slow.on_batch(numbers(3), 0)
    assert slow.holds_records(), "a batch waits behind the watermark"


def test_without_pressure_everything_passes_in_the_call() -> None:
    slow = StepwiseOperator(node())
    out = opened(slow, Budget())
    slow.on_watermark(3)
    slow.on_idle()
    slow.on_end()
    assert out.events == [("watermark", 3), ("idle",), ("end",)] and not slow.has_work()


def test_a_budget_runs_from_the_beginning_of_a_step() -> None:
    clock = Clock(1_000)
    budget = Budget(clock)
    clock.now_ms += STEP_MS - 1
    assert not budget.is_spent
    clock.now_ms += 1
    assert budget.is_spent
    budget.begin()
    assert not budget.is_spent
    budget.end()
    assert budget.is_spent


def test_a_fast_function_is_looked_at_rarely_and_one_that_became_slow_often() -> None:
    clock = Clock()
    budget = Budget(clock)
    pace = Pace(budget)
    portions = []
    for _ in range(10):
        portions.append(pace.portion)
        assert not pace.is_over()
    assert portions == [1, 2, 4, 8, 16, 32, 64, 128, 256, 256] and pace.portion == MOST_BETWEEN_LOOKS
    for portion in (32, 4, 1, 1):
        clock.now_ms += STEP_MS
        assert pace.is_over() and pace.portion == portion
        budget.begin()
