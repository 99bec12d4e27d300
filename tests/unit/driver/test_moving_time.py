"""Time moves before the marker of a micro-batch with loops, once, and only when nothing is under way."""

from __future__ import annotations

import random

import pytest

import tidegate as tg
from tests.unit.dataflow.test_optimiser import Nowhere, Records
from tidegate.control.messages import Counted, Message, MoveTime, Probe, Traffic
from tidegate.dataflow.optimiser import make_plan
from tidegate.dataflow.pipeline import Pipeline
from tidegate.dataflow.stream import Stream
from tidegate.driver.moving_time import FIRE_DUE, LOOK_PAUSE_MS, Rest, moves_of_time


class Loop:
    """Slots that send one another records. An order makes some of them; records that come may set timers that are due."""

    def __init__(self, chance: random.Random, *, slots: int) -> None:
        self._chance = chance
        self._slots = [Traffic() for _ in range(slots)]
        self._waiting: list[list[Message]] = [[] for _ in range(slots)]  # probes and orders, as they were sent
        self.answers: list[tuple[int, Counted]] = []  # on their way
        self.under_way: list[int] = []
        self.due = [0] * slots
        self.moved: list[MoveTime] = []
        self.hops_left = 60
        self._send(0)

    @property
    def at_rest(self) -> bool:
        return not self.under_way and not any(self.due)

    def tell_all(self, message: Message) -> None:
        if isinstance(message, MoveTime):
            assert not self.under_way, "time moves when nothing is under way"
            self.moved.append(message)
        for waiting in self._waiting:
            waiting.append(message)

    def step(self) -> None:
        slot = self._chance.randrange(len(self._slots))
        if self._waiting[slot] and self._chance.random() < 0.5:
            told = self._waiting[slot].pop(0)
            if isinstance(told, Probe):
                traffic = self._slots[slot]
                self.answers.append((slot, Counted(told.number, traffic.sent, traffic.taken, traffic.replays)))
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
    rest = Rest(len(loop.due), moves, loop.tell_all)
    for turn in range(200_000):
        now_ms = turn // 10
        if chance.random() < 0.3 and loop.answers and rest.on_counted(*loop.answers.pop(0), now_ms):
            assert loop.at_rest
            assert loop.moved[: len(moves)] == moves and set(loop.moved[len(moves) :]) == {FIRE_DUE}
            return
        rest.tick(now_ms)
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
    moves = [MoveTime("above"), MoveTime("inside", hold=True), MoveTime("inside"), MoveTime("below")]
    assert list(moves_of_time(plan)) == moves


class Ring:
    """Slots that send one another records, and answer when they get to it."""

    def __init__(self, chance: random.Random, slots: int) -> None:
        self._chance = chance
        self._slots = [Traffic() for _ in range(slots)]
        self.under_way: list[int] = []  # where they go
        self._replays = chance.randrange(3)  # of the first slot
        self._asked: dict[int, int] = {}
        self.answers: list[tuple[int, Counted]] = []
        for _ in range(5):
            self._send(0)

    @property
    def still(self) -> bool:
        return not self.under_way and not self._replays

    def tell_all(self, message: Message) -> None:
        if isinstance(message, Probe):
            assert not self._asked, "one question at a time"
            self._asked = dict.fromkeys(range(len(self._slots)), message.number)
        else:
            assert self.still, "time moves when all is still"

    def step(self) -> None:
        """A record arrives, or an answer is given."""
        if self._asked and self._chance.random() < 0.5:
            slot = self._chance.choice(sorted(self._asked))
            replays, traffic = bool(slot == 0 and self._replays), self._slots[slot]
            self.answers.append((slot, Counted(self._asked.pop(slot), traffic.sent, traffic.taken, replays)))
        elif self._replays and self._chance.random() < 0.1:
            self._replays -= 1
            self._send(0)
        elif self.under_way:
            slot = self.under_way.pop(self._chance.randrange(len(self.under_way)))
            self._slots[slot] += Traffic(taken=1)
            if self._chance.random() < 0.9:  # else it leaves the loop
                self._send(slot)

    def _send(self, slot: int) -> None:
        self._slots[slot] += Traffic(sent=1)
        self.under_way.append(self._chance.randrange(len(self._slots)))


@pytest.mark.parametrize("seed", range(50))
def test_all_is_still_when_nothing_is_on_its_way_and_never_before(seed: int) -> None:
    chance = random.Random(seed)
    slots = chance.randint(1, 4)
    ring = Ring(chance, slots)
    rest = Rest(slots, (), ring.tell_all)
    for turn in range(100_000):
        if chance.random() < 0.3 and ring.answers and rest.on_counted(*ring.answers.pop(0), turn):
            assert ring.still
            return
        rest.tick(turn)
        ring.step()
    raise AssertionError("it was never noticed")


def test_slots_that_are_busy_with_a_loop_are_not_asked_again_at_once() -> None:
    asked: list[Message] = []
    rest = Rest(2, (), asked.append)
    busy, still = Counted(1, sent=3, taken=2, replays=False), Counted(2, sent=3, taken=3, replays=False)
    assert not rest.on_counted(0, busy, 100) and not rest.on_counted(1, busy, 100)
    rest.tick(100 + LOOK_PAUSE_MS - 1)
    assert asked == [Probe(1)]
    rest.tick(100 + LOOK_PAUSE_MS)
    assert asked == [Probe(1), Probe(2)]
    assert not rest.on_counted(0, busy, 110), "an answer to an earlier question"
    assert not rest.on_counted(0, still, 110) and not rest.on_counted(1, still, 110)
    assert asked == [Probe(1), Probe(2), Probe(3)], "what may be at rest is looked at again at once"
