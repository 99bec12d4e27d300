"""Tasks that are lost, at whatever moment, and coordinators that fail: who waits gets a verdict.

Gathering, coordinator and micro-batches are real; the tasks are bare links, which answer as slots do.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.dataframes.test_gathering import Task, until
from tests.unit.dataframes.test_micro_batches import batches_in
from tidegate.control.messages import (
    Acknowledge,
    Assign,
    Committed,
    Complete,
    Deploy,
    Failed,
    InputRead,
    Left,
    Message,
    Offer,
    Ready,
    Register,
    Start,
    Trigger,
    Verdict,
)
from tidegate.control.settings import Tuning
from tidegate.dataframes.gathering import Gathering
from tidegate.dataframes.micro_batches import MicroBatches
from tidegate.driver.coordinator import Coordinator
from tidegate.snapshots.stats import SubtaskStats

SLOTS = 2


class SlotTask(Task):
    """A task that does what a slot does, as far as it is asked to."""

    def __init__(self, gathering: Gathering, task: int, batch: int, number: int, *, stage: int, **held: int) -> None:
        self._offered = Offer("t", stage, task, number, "q", batch, **held)
        self.assigned: Assign | None = None
        super().__init__(gathering, task, number)

    def say(self, message: Message) -> None:
        super().say(self._offered if isinstance(message, Offer) else message)

    def hears_of(self, kind: type[Any]) -> Any:
        while not isinstance(message := self.hears(), kind):
            assert not isinstance(message, Verdict), message
        return message

    def assign(self) -> None:
        self.assigned = self.hears_of(Assign)

    def register(self) -> None:
        assert self.assigned is not None
        self.say(Register(self.assigned.slot, "127.0.0.1", 1, 100 + self.assigned.slot))

    def get_ready(self) -> None:
        assert self.assigned is not None
        self.hears_of(Deploy)
        self.say(Ready(self.assigned.slot))

    def read(self) -> None:
        if self.assigned is not None and not self.assigned.goes_on:
            self.hears_of(Start)
        self.say(InputRead())

    def acknowledge(self) -> None:
        assert self.assigned is not None
        epoch = self.hears_of(Trigger).epoch
        self.say(Acknowledge(0, self.assigned.slot, epoch, {}, SubtaskStats()))

    def complete(self) -> None:
        assert self.assigned is not None
        self.say(Committed(self.assigned.slot, self.hears_of(Complete).epoch))

    def verdict(self) -> Verdict:
        while not isinstance(message := self.hears(), Verdict):
            pass
        return message


class Driver:
    """A driver with one streaming transform."""

    def __init__(self, folder: Path) -> None:
        self.gathering = Gathering(Tuning().coordinator_listening)
        self.batches: MicroBatches = batches_in(folder, slots=SLOTS)
        self.gathering.add("t", SLOTS, self.batches.conduct, patience_s=60.0)
        self._number = 0

    def tasks(self, batch: int, *, stage: int | None = None, held: int | None = None) -> list[SlotTask]:
        tasks = []
        for task in range(SLOTS):
            self._number += 1
            holds = {} if held is None else {"attempt": held, "slot": task}
            tasks.append(
                SlotTask(self.gathering, task, batch, self._number, stage=batch if stage is None else stage, **holds)
            )
        return tasks

    def run(self, tasks: list[SlotTask], *until_step: str) -> None:
        """All tasks take these steps, one after the other."""
        for step in until_step:
            for task in tasks:
                getattr(task, step)()

    @property
    def attempt(self) -> int:
        slots = self.batches._slots
        assert slots is not None and slots.handle is not None
        return slots.handle.attempts[-1].attempt

    @property
    def coordinator(self) -> Coordinator:
        slots = self.batches._slots
        assert slots is not None
        return slots._host.coordinator


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(tmp_path)
    yield driver
    driver.batches.move_out()
    driver.gathering.close()


WHOLE = ("assign", "register", "get_ready", "read", "acknowledge", "complete")


def ends_well(driver: Driver, tasks: list[SlotTask], *steps: str) -> None:
    driver.run(tasks, *steps)
    assert [task.verdict() for task in tasks] == [Verdict(None)] * SLOTS


def test_slots_that_come_back_go_on_and_those_that_were_lost_between_are_replaced(driver: Driver) -> None:
    ends_well(driver, tasks := driver.tasks(0), *WHOLE)
    attempt = driver.attempt
    for task in tasks:
        task.close()
    until(lambda: not driver.gathering._members)
    assert driver.coordinator.failures == [], "to be without tasks between two batches is no failure"
    going_on = ("assign", "read", "acknowledge", "complete")
    ends_well(driver, tasks := driver.tasks(1, held=attempt), *going_on)
    assert driver.attempt == attempt and all(task.assigned and task.assigned.goes_on for task in tasks)

    ends_well(driver, tasks := driver.tasks(2), *WHOLE)
    assert driver.attempt == attempt + 1 and not any(task.assigned and task.assigned.goes_on for task in tasks)
    ends_well(driver, tasks := driver.tasks(3, held=attempt), *WHOLE)
    assert driver.attempt == attempt + 2, "slots of an older attempt are of no use"


@pytest.mark.parametrize("after", range(1, len(WHOLE)))
def test_a_task_that_is_lost_ends_its_run_and_the_batch_runs_again(driver: Driver, after: int) -> None:
    """After it was assigned, had registered, was ready, had read, and had acknowledged."""
    lost, other = tasks = driver.tasks(0)
    driver.run(tasks, *WHOLE[:after])
    if WHOLE[after - 1] == "acknowledge":  # its snapshot may be complete all the same; then so is the batch
        other.hears_of(Complete)
        until(lambda: driver.batches.done is not None)
        assert other.verdict() == Verdict(None)
        lost.close()
    else:
        lost.close()
        assert "slot 0" in str(error := other.verdict().error) and "was lost" in str(error)
    other.close()
    ends_well(driver, driver.tasks(0, stage=7), *WHOLE)


def test_a_task_that_is_lost_after_its_acknowledgement_and_before_that_of_others_ends_the_run(driver: Driver) -> None:
    lost, other = tasks = driver.tasks(0)
    driver.run(tasks, *WHOLE[:4])
    lost.acknowledge()
    other.hears_of(Trigger)
    until(lambda: driver.coordinator.epochs[-1].subtasks != {})
    lost.close()
    assert "was lost" in str(other.verdict().error)
    ends_well(driver, driver.tasks(0, stage=7), *WHOLE)


def test_a_task_that_is_lost_before_it_is_assigned_ends_the_run(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    may_begin = threading.Event()
    begin = MicroBatches._begin
    monkeypatch.setattr(MicroBatches, "_begin", lambda *given: (may_begin.wait(60), begin(*given))[1])
    lost, other = driver.tasks(0)
    until(lambda: driver.gathering._stages[("t", 0)].run is not None)
    lost.close()
    until(lambda: len(driver.gathering._members) == 1)
    may_begin.set()
    assert "slot 0 was lost" in str(other.verdict().error)
    ends_well(driver, driver.tasks(0, stage=7), *WHOLE)


def test_a_stage_that_spark_tries_again_within_a_batch_is_another_attempt(driver: Driver) -> None:
    old = driver.tasks(0)
    driver.run(old, *WHOLE[:3])
    attempt = driver.attempt
    new = driver.tasks(0)
    assert all("started its tasks again" in str(task.verdict().error) for task in old)
    driver.run(new, "assign")
    for task in old:
        task.say(Failed(0, "a message of the older attempt"))
    ends_well(driver, new, *WHOLE[1:])
    assert driver.attempt == attempt + 1


def test_a_second_stage_of_the_same_batch_waits_for_the_first_and_runs_it_again(driver: Driver) -> None:
    first = driver.tasks(0)
    driver.run(first, *WHOLE[:3])
    second = driver.tasks(0, stage=1)
    ends_well(driver, first, *WHOLE[3:])
    ends_well(driver, second, *WHOLE)
    assert driver.batches.done is not None and driver.batches.done.number == 0


def test_tasks_hear_of_a_coordinator_that_fails_while_they_wait(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = driver.tasks(0)
    driver.run(tasks, *WHOLE[:3])

    def fails(self: Coordinator, *_: Any) -> None:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr(Coordinator, "tick", fails)
    assert all("a bug of ours" in str(task.verdict().error) for task in tasks)
    monkeypatch.undo()
    ends_well(driver, driver.tasks(0, stage=7), *WHOLE)


def test_what_a_slot_fails_with_is_what_all_tasks_hear_and_hear_at_once_when_they_come_again(driver: Driver) -> None:
    tasks = driver.tasks(0)
    driver.run(tasks, *WHOLE[:3])
    tasks[1].say(Failed(1, "it raised", "divide", "ZeroDivisionError: division by zero"))
    tasks[1].say(Left())
    assert all("ZeroDivisionError: division by zero" in str(task.verdict().error) for task in tasks)
    assert all("ZeroDivisionError" in str(task.verdict().error) for task in driver.tasks(0))


def test_a_query_that_ends_between_two_batches_leaves_nothing_that_waits(driver: Driver) -> None:
    ends_well(driver, driver.tasks(0), *WHOLE)
    coordinator = driver.coordinator
    assert driver.batches.move_out() and coordinator.status.terminal
