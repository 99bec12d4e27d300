"""Time groups: sources that wait for one another. Who waits, who doesn't hold the others up; nobody waits forever."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.protocol.time_groups import (
    REPORT_EVERY_MS,
    URGENT_EVERY_MS,
    Least,
    Reached,
    SendLeast,
    TimeGroups,
    TimeReports,
)
from tidegate.protocol.watermarks import MAX_WATERMARK_MS, MIN_WATERMARK_MS, SplitWatermarks

G = "events"


def at(at_ms: int | None, *, waits: bool = False, who: str = "") -> dict[str, Reached]:
    return {G: Reached(at_ms, waits, who)}


# ------------------------------------------------------------------------------------------------- the coordinator


def test_nothing_is_known_until_every_slot_of_the_group_has_reported() -> None:
    groups = TimeGroups({G: [0, 1, 2]})
    assert groups.on_reached(0, at(50, waits=True)) == []
    assert groups.on_reached(1, at(None)) == []
    assert groups.on_reached(2, at(30, who="b[2]")) == [
        SendLeast(0, {G: Least(30, "b[2]")}),
        SendLeast(2, {G: Least(30, "b[2]")}),
    ]


def test_a_report_is_answered_and_a_change_goes_to_those_who_wait_only() -> None:
    groups = TimeGroups({G: [0, 1, 2]})
    groups.on_reached(0, at(50, waits=True))
    groups.on_reached(1, at(40))
    groups.on_reached(2, at(30))
    assert [each.slot for each in groups.on_reached(2, at(35))] == [0, 2]
    assert [each.slot for each in groups.on_reached(1, at(45))] == [1], "the least is the same"


def test_who_has_ended_or_is_idle_holds_nobody_up() -> None:
    groups = TimeGroups({G: [0, 1]})
    groups.on_reached(0, at(50, waits=True))
    groups.on_reached(1, at(10))
    assert SendLeast(0, {G: Least(50)}) in groups.on_reached(1, at(None))
    assert groups.on_reached(0, at(None)) == [SendLeast(0, {G: Least(None)})]


def test_groups_know_nothing_of_each_other() -> None:
    groups = TimeGroups({G: [0, 1], "others": [0]})
    assert groups.on_reached(0, {G: Reached(5), "others": Reached(7, who="o[0]")}) == [
        SendLeast(0, {"others": Least(7, "o[0]")})
    ]


# ------------------------------------------------------------------------------------------------------- the slots


def test_a_slot_reports_when_it_begins_to_wait_and_when_its_time_has_moved() -> None:
    reports = TimeReports({G: 400}, repeat_ms=1_000)
    assert reports.on_reached(at(100), 0)
    assert not reports.on_reached(at(150), URGENT_EVERY_MS), "less than a quarter of what others may be ahead"
    assert reports.on_reached(at(200), URGENT_EVERY_MS)
    assert not reports.on_reached(at(300), URGENT_EVERY_MS + 1), "too soon"
    assert reports.on_reached(at(300, waits=True), URGENT_EVERY_MS + 1)
    assert not reports.on_reached(at(300), URGENT_EVERY_MS + 2)
    assert reports.on_reached(at(301), URGENT_EVERY_MS + 1 + REPORT_EVERY_MS)
    assert reports.on_reached(at(None), URGENT_EVERY_MS + 2 + REPORT_EVERY_MS)


def test_a_report_is_repeated_in_case_that_it_was_lost() -> None:
    reports = TimeReports({G: 400}, repeat_ms=1_000)
    assert reports.on_reached(at(100, waits=True), 0)
    assert [ms for ms in range(0, 3_500, 10) if reports.on_reached(at(100, waits=True), ms)] == [1_000, 2_000, 3_000]


def test_there_is_nothing_to_report_without_a_group() -> None:
    assert not TimeReports({}, repeat_ms=1).on_reached({}, 5_000)


# ------------------------------------------------------------------------------------------------ what a source counts


def test_a_split_that_was_never_read_counts_only_if_records_wait_in_it() -> None:
    stream = SplitWatermarks(0)
    assert stream.reached_ms() is None
    stream.on_discovered({"quiet": False}, 0)
    assert stream.reached_ms() is None
    stream.on_discovered({"read": False}, 0, latest_ms={"read": 101})
    assert stream.reached_ms() == 100
    stream.on_discovered({"backlog": True}, 0)
    assert stream.reached_ms() == MIN_WATERMARK_MS
    stream.on_batch("backlog", 51, 0)
    assert stream.reached_ms() == 50
    stream.on_finished("backlog", 0)
    stream.on_finished("read", 0)
    assert stream.reached_ms() is None


def test_an_idle_split_does_not_count_and_a_held_one_never_becomes_idle() -> None:
    held = {"a"}
    stream = SplitWatermarks(0, 10, is_held=held.__contains__)
    stream.on_discovered({"a": False, "b": False}, 0)
    stream.on_batch("a", 101, 0)
    stream.on_batch("b", 51, 0)
    assert stream.on_time(10) is not None and stream.reached_ms() == 100, "b is idle"
    assert stream.on_time(500) is None and stream.reached_ms() == 100
    held.clear()
    stream.on_time(500)
    assert stream.deadline_ms() == 510
    stream.on_time(510)
    assert stream.reached_ms() is None


# ---------------------------------------------------------------------------------------------------- all together


@dataclass
class Slot:
    """A source that reads records of rising event time, and messages that arrive late or never."""

    index: int
    times: deque[int]
    max_ahead_ms: int
    reports: TimeReports
    polled: bool = False
    idle: bool = False
    reached_ms: int | None = None
    limit_ms: int = MIN_WATERMARK_MS
    inbox: deque[tuple[int, Least]] = field(default_factory=deque)

    @property
    def counted_ms(self) -> int | None:
        return self.reached_ms if self.times and not self.idle else None

    @property
    def waits(self) -> bool:
        return self.counted_ms is not None and self.counted_ms > self.limit_ms

    def read(self) -> None:
        self.polled = True
        if self.times:
            self.reached_ms = self.times.popleft()


class Model:
    """`restless`: sources are idle now and then, and wake up behind the others."""

    def __init__(self, seed: int, *, slots: int, loss: float, restless: bool = False) -> None:
        self.rng = Random(seed)
        self.restless = restless
        self.now_ms = 0
        self.loss = loss
        self.steps = [self.rng.choice((1, 5, 40)) for _ in range(slots)]
        self.slots = [
            Slot(
                index,
                deque(sorted(self.rng.randrange(0, 400) for _ in range(self.rng.randrange(0, 60)))),
                ahead := self.rng.choice((0, 10, 50)),
                TimeReports({G: ahead}, repeat_ms=20),
            )
            for index in range(slots)
        ]
        self.groups = TimeGroups({G: range(slots)})
        self.up: deque[tuple[int, int, Reached]] = deque()

    def run(self) -> None:
        for _ in range(60_000):
            if not any(slot.times for slot in self.slots):
                return
            self.now_ms += 1
            self._deliver()
            for slot, step in zip(self.slots, self.steps, strict=True):
                if self.now_ms % step == 0:
                    self._turn(slot)
        raise AssertionError(f"seed: nobody reads any more: {self.slots}")

    def _turn(self, slot: Slot) -> None:
        while slot.inbox and slot.inbox[0][0] <= self.now_ms:
            least = slot.inbox.popleft()[1]
            slot.limit_ms = MAX_WATERMARK_MS if least.at_ms is None else least.at_ms + slot.max_ahead_ms
        if self.restless and self.rng.random() < 0.02:
            slot.idle = not slot.idle
        if not slot.idle and not slot.waits and self.rng.random() < 0.9:
            if not self.restless:
                self._check(slot)
            slot.read()
        if slot.polled:
            reached = Reached(slot.counted_ms, slot.waits)
            if slot.reports.on_reached({G: reached}, self.now_ms) and self.rng.random() >= self.loss:
                self.up.append((self.now_ms + self.rng.randrange(0, 30), slot.index, reached))

    def _check(self, slot: Slot) -> None:
        """What is read is at most one record further ahead than allowed: before it, the source wasn't ahead."""
        others = [each.counted_ms for each in self.slots if each.counted_ms is not None]
        if slot.counted_ms is not None:
            assert slot.counted_ms <= min(others) + slot.max_ahead_ms

    def _deliver(self) -> None:
        while self.up and self.up[0][0] <= self.now_ms:
            _, index, reached = self.up.popleft()
            for message in self.groups.on_reached(index, {G: reached}):
                if self.rng.random() >= self.loss:
                    slot = self.slots[message.slot]
                    slot.inbox.append((self.now_ms + self.rng.randrange(0, 30), message.least[G]))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.sampled_from([0.0, 0.3]))
def test_no_source_gets_further_ahead_than_allowed_and_all_come_to_their_end(seed: int, slots: int, loss: float) -> None:
    Model(seed, slots=slots, loss=loss).run()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.sampled_from([0.0, 0.3]))
def test_sources_that_are_idle_now_and_then_do_not_stop_the_others_forever(seed: int, slots: int, loss: float) -> None:
    Model(seed, slots=slots, loss=loss, restless=True).run()


@pytest.mark.parametrize("broken", ["never answered", "never told"])
def test_the_model_notices_a_protocol_that_stops(broken: str, monkeypatch: Any) -> None:
    def nothing(self: TimeGroups, slot: int, reached: Any) -> list[SendLeast]:
        return []

    original = TimeGroups.on_reached

    def only_the_sender(self: TimeGroups, slot: int, reached: Any) -> list[SendLeast]:
        return [each for each in original(self, slot, reached) if each.slot == slot and not each.least[G].at_ms]

    monkeypatch.setattr(TimeGroups, "on_reached", nothing if broken == "never answered" else only_the_sender)
    with pytest.raises(AssertionError, match="nobody reads"):
        run_models(10)


def run_models(seeds: int) -> None:
    for seed in range(seeds):
        Model(seed, slots=3, loss=0.0).run()
