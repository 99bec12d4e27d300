"""Time moves before the marker of a micro-batch with loops, once, and only when nothing is under way."""

from __future__ import annotations

import random

import pytest

import tidegate as tg
from tests.unit.dataflow.test_optimiser import Nowhere, Records
from tidegate.dataflow.optimiser import make_plan
from tidegate.dataflow.pipeline import Pipeline
from tidegate.dataflow.stream import Stream
from tidegate.runtime.exchange import Traffic
from tidegate.runtime.messages import MoveTime
from tidegate.runtime.micro_batches import Stillness
from tidegate.runtime.moving_time import FIRE_DUE, Rest, moves_of_time


class Loop:
    """Slots that send one another records. An order makes some of them; records that come may set timers that are due."""

    def __init__(self, chance: random.Random, *, slots: int) -> None:
        self._chance = chance
        self._slots = [Traffic() for _ in range(slots)]
        self._waiting: list[list[int | MoveTime]] = [[] for _ in range(slots)]  # probes and orders, as they were sent
        self._answers: dict[int, tuple[int, Traffic]] = {}
        self.under_way: list[int] = []
        self.due = [0] * slots
        self.moved: list[MoveTime] = []
        self.hops_left = 60
        self._send(0)

    @property
    def at_rest(self) -> bool:
        return not self.under_way and not any(self.due)

    def probe(self, number: int) -> None:
        for waiting in self._waiting:
            waiting.append(number)

    def move_time(self, order: MoveTime) -> None:
        assert not self.under_way, "time moves when nothing is under way"
        self.moved.append(order)
        for waiting in self._waiting:
            waiting.append(order)

    def traffic(self, number: int) -> Traffic | None:
        answers = [traffic for asked, traffic in self._answers.values() if asked == number]
        return sum(answers, Traffic()) if len(answers) == len(self._slots) else None

    def step(self) -> None:
        slot = self._chance.randrange(len(self._slots))
        if self._waiting[slot] and self._chance.random() < 0.5:
            told = self._waiting[slot].pop(0)
            if isinstance(told, int):
                self._answers[slot] = told, self._slots[slot]
            elif told is FIRE_DUE:
                due, self.due[slot] = self.due[slot], 0
                for _ in range(due):
                    self._send(slot)
            elif self._chance.random() < 0.7:
                self._send(slot)
        elif self.under_way:
            slot = self.under_way.pop(self._chance.randrange(len(self.under_way)))
            self._slots[slot] += Traffic(taken=1)
            if self.hops_left and self._chance.random() < 0.4:
                self.due[slot] += 1
            elif self.hops_left and self._chance.random() < 0.8:
                self._send(slot)

    def _send(self, slot: int) -> None:
        self.hops_left = max(0, self.hops_left - 1)
        self._slots[slot] += Traffic(sent=1)
        self.under_way.append(self._chance.randrange(len(self._slots)))


@pytest.mark.parametrize("seed", range(50))
def test_a_batch_is_at_rest_when_time_has_moved_and_no_timer_puts_anything_into_a_loop(seed: int) -> None:
    chance = random.Random(seed)
    loop = Loop(chance, slots=chance.randint(1, 4))
    moves = [MoveTime("above"), MoveTime("below")][: chance.randint(0, 2)]
    rest = Rest(loop, Stillness(loop), moves)  # type: ignore[arg-type]
    for _ in range(200_000):
        if chance.random() < 0.3 and rest.look():
            assert loop.at_rest
            assert loop.moved[: len(moves)] == moves and set(loop.moved[len(moves) :]) == {FIRE_DUE}
            return
        loop.step()
    raise AssertionError("it never came to rest")


class OnTimer(tg.KeyedProcess):
    def process(self, record: object, ctx: object) -> None: ...


def test_watermark_operators_move_time_in_the_order_of_the_plan_and_those_in_a_loop_hold_it_first() -> None:
    pipeline = Pipeline()

    def body(stream: Stream) -> tuple[Stream, Stream]:
        again = (
            stream.rebalance()
            .with_watermark("v", 0, name="inside")
            .key_by("k")
            .process("again", OnTimer(), returns="k long, v long")
        )
        return again, again

    (
        pipeline.source("in", Records())
        .with_watermark("v", 0, name="above")
        .iterate("loop", body)
        .rebalance()
        .with_watermark("v", 0, name="below")
        .to("out", Nowhere())
    )
    plan = make_plan(pipeline.build(), slots=2, key_group_count=8)
    assert moves_of_time(plan) == (MoveTime("above"), MoveTime("inside", hold=True), MoveTime("inside"), MoveTime("below"))
