"""Tasks that come to be gathered, in whatever order and however often: the driver's side, with bare links for tasks."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tidegate.channels.handshake import serve
from tidegate.channels.links import connect_link
from tidegate.runtime.exchange import Traffic
from tidegate.runtime.gathering import Gathering, Run, RunEnd
from tidegate.runtime.messages import Assign, Counted, InputRead, Left, Message, Offer, Probe, Verdict, from_wire, to_wire
from tidegate.runtime.settings import Tuning

WITHIN_S = 20.0


class Task:
    """What a task would say and hear."""

    def __init__(self, gathering: Gathering, task: int, number: int, *, transform: str = "t", stage: int = 1) -> None:
        self.heard: list[Message] = []
        self.lost = False
        self._selector = selectors.DefaultSelector()
        self._link = connect_link(gathering.address, gathering.identity, {}, timeout_s=WITHIN_S)
        self._link.attach(self._selector, on_message=lambda link, wire: self.heard.append(from_wire(wire)),
                          on_lost=self._on_lost)
        self.say(Offer(transform, stage, task, number))

    def say(self, message: Message) -> None:
        self._link.send(to_wire(message))

    def hears(self) -> Message:
        """The next thing."""
        give_up_s = time.monotonic() + WITHIN_S
        while not self.heard:
            assert time.monotonic() < give_up_s, "nothing was said"
            serve(self._selector, 0.1)
        return self.heard.pop(0)

    def close(self) -> None:
        self._link.close()

    def _on_lost(self, link: Any, reason: str) -> None:
        self.lost = True


class Conductor:
    """Ends runs as it is told to, and all of them with the test."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.failure: str | None = None
        self.abandoned: list[tuple[int, str]] = []
        self.over = False

    def conduct(self, run: Run) -> RunEnd:
        self.runs.append(run)
        run.assign(len(self.runs), {offer.task: offer.task for offer in run.offers}, master=("here", 1), store="memory://s")
        give_up_s = time.monotonic() + WITHIN_S
        while run.ended() is None and not run.read and not self.over and time.monotonic() < give_up_s:
            run.moved.wait(0.05)
            run.moved.clear()
        return RunEnd(run.ended() or self.failure, final=self.failure is not None)

    def abandon(self, stage: int, why: str) -> None:
        self.abandoned.append((stage, why))


def until(condition: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < give_up_s, "it didn't happen"
        time.sleep(0.01)


@pytest.fixture
def gathering() -> Iterator[Gathering]:
    gathering = Gathering(Tuning().master_listening)
    yield gathering
    gathering.close()


@pytest.fixture
def conductor(gathering: Gathering) -> Iterator[Conductor]:
    conductor = Conductor()
    gathering.add("t", 2, conductor.conduct, patience_s=60.0, abandon=conductor.abandon)
    yield conductor
    conductor.over = True


def test_a_run_begins_when_all_are_there_and_ends_when_all_have_read(gathering: Gathering, conductor: Conductor) -> None:
    first = Task(gathering, 0, 5)
    time.sleep(0.2)
    assert conductor.runs == []
    second = Task(gathering, 1, 6)
    assert first.hears() == Assign(1, 0, "here", 1, "memory://s")
    assert second.hears() == Assign(1, 1, "here", 1, "memory://s")
    first.say(InputRead())
    time.sleep(0.2)
    assert not conductor.runs[0].read
    second.say(InputRead())
    assert first.hears() == second.hears() == Verdict(None)


def test_a_task_that_comes_again_takes_the_place_of_the_old_one(gathering: Gathering, conductor: Conductor) -> None:
    old = Task(gathering, 0, 5)
    new = Task(gathering, 0, 7)
    assert isinstance(said := old.hears(), Verdict) and "started this task again" in str(said.error)
    late = Task(gathering, 0, 6)
    assert isinstance(said := late.hears(), Verdict) and "started this task again" in str(said.error)
    other = Task(gathering, 1, 8)
    assert isinstance(new.hears(), Assign) and isinstance(other.hears(), Assign)

    again = [Task(gathering, task, 10 + task) for task in range(2)]
    assert "started its tasks again" in str(new.hears()) and "started its tasks again" in str(other.hears())
    assert [task.hears() for task in again] == [Assign(2, task, "here", 1, "memory://s") for task in range(2)]


def test_a_run_is_over_when_a_task_is_lost(gathering: Gathering, conductor: Conductor) -> None:
    tasks = [Task(gathering, task, task) for task in range(2)]
    for task in tasks:
        task.hears()
    tasks[1].close()
    assert isinstance(said := tasks[0].hears(), Verdict) and "task 1 was lost" in str(said.error)
    assert conductor.abandoned == [], "the next try may do better"


def test_what_the_slots_have_counted_is_added_up_when_all_have_answered(gathering: Gathering, conductor: Conductor) -> None:
    tasks = [Task(gathering, task, task) for task in range(2)]
    for task in tasks:
        task.hears()
    run = conductor.runs[0]
    run.probe(1)
    assert [task.hears() for task in tasks] == [Probe(1), Probe(1)]
    tasks[0].say(Counted(1, sent=5, taken=2, replays=False))
    time.sleep(0.2)
    assert run.traffic(1) is None
    tasks[1].say(Counted(1, sent=1, taken=4, replays=True))
    until(lambda: run.traffic(1) == Traffic(6, 6, True))
    assert run.traffic(2) is None


def test_a_run_whose_tasks_have_all_left_has_ended(gathering: Gathering, conductor: Conductor) -> None:
    tasks = [Task(gathering, task, task) for task in range(2)]
    until(lambda: len(conductor.runs) == 1)
    tasks[0].say(Left())
    time.sleep(0.2)
    assert conductor.runs[0].ended() is None
    tasks[1].say(Left())
    until(lambda: conductor.runs[0].ended() == "all tasks have left")


def test_who_waits_for_others_that_dont_come_is_sent_away(gathering: Gathering) -> None:
    gathering.add("t", 2, Conductor().conduct, patience_s=0.1)
    said = Task(gathering, 0, 1).hears()
    assert isinstance(said, Verdict) and "1 of 2 tasks were there after 0 s" in str(said.error)


def test_what_is_the_programs_fault_fails_at_once_the_next_time(gathering: Gathering, conductor: Conductor) -> None:
    conductor.failure = "division by zero"
    tasks = [Task(gathering, task, task) for task in range(2)]
    for task in tasks:
        task.hears()
        task.say(InputRead())
    assert [task.hears() for task in tasks] == [Verdict("division by zero")] * 2
    assert conductor.abandoned == [(1, "division by zero")], "Spark is asked not to try again before the tasks fail"
    assert Task(gathering, 0, 7).hears() == Verdict("division by zero")
    assert len(conductor.runs) == 1
    conductor.failure = None
    others = [Task(gathering, task, 10 + task, stage=2) for task in range(2)]
    assert all(isinstance(task.hears(), Assign) for task in others), "another stage is another matter"


def test_strangers_are_told_so(gathering: Gathering, conductor: Conductor) -> None:
    assert "doesn't know the transform" in str(Task(gathering, 0, 1, transform="other").hears())
    assert "doesn't know the transform" in str(Task(gathering, 5, 1).hears())


def test_stages_whose_tasks_never_all_came_are_forgotten(gathering: Gathering, conductor: Conductor) -> None:
    """They were lost, or sent away."""
    lost = Task(gathering, 0, 1, stage=1)
    until(lambda: len(gathering._stages) == 1)
    lost.close()
    until(lambda: not gathering._stages)
    gathering.add("t", 2, conductor.conduct, patience_s=0.1)
    assert isinstance(Task(gathering, 0, 2, stage=2).hears(), Verdict)
    until(lambda: not gathering._stages)


def test_a_stage_is_forgotten_when_its_last_task_has_gone(gathering: Gathering, conductor: Conductor) -> None:
    tasks = [Task(gathering, task, task) for task in range(2)]
    for task in tasks:
        assert isinstance(task.hears(), Assign)
        task.say(InputRead())
    for task in tasks:
        assert task.hears() == Verdict(None)
        task.close()
    until(lambda: not gathering._stages)


def test_the_failures_of_a_transform_go_with_it(gathering: Gathering, conductor: Conductor) -> None:
    conductor.failure = "division by zero"
    tasks = [Task(gathering, task, task) for task in range(2)]
    for task in tasks:
        task.hears()
        task.say(InputRead())
    for task in tasks:
        assert task.hears() == Verdict("division by zero")
        task.close()
    until(lambda: not gathering._members)
    time.sleep(0.2)
    assert len(gathering._stages) == 1, "Spark may try it again"
    gathering.remove("t")
    until(lambda: not gathering._stages)
