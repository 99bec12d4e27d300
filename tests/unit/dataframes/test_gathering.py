"""Tasks that come to be gathered, in whatever order and however often: the driver's side, with bare links for tasks."""

from __future__ import annotations

import selectors
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from tidegate.channels.handshake import serve
from tidegate.channels.links import connect_link
from tidegate.control.messages import Assign, Heartbeat, InputRead, Message, Offer, Verdict, from_wire, to_wire
from tidegate.control.settings import Tuning
from tidegate.dataframes.gathering import Gathering, Run, RunEnd

WITHIN_S = 20.0


class Task:
    """What a task would say and hear."""

    def __init__(self, gathering: Gathering, task: int, number: int, *, transform: str = "t", stage: int = 1) -> None:
        self.heard: list[Message] = []
        self.lost = False
        self._selector = selectors.DefaultSelector()
        self._link = connect_link(gathering.address, gathering.identity, {}, timeout_s=WITHIN_S)
        self._link.attach(
            self._selector, on_message=lambda link, wire: self.heard.append(from_wire(wire)), on_lost=self._on_lost
        )
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
    """Ends a run when all tasks have read, or one is lost, or with the test."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.failure: str | None = None
        self.abandoned: list[tuple[int, str]] = []
        self.events: list[tuple[int, int, Message | str]] = []  # with the attempt and the task
        self.ended: list[SimpleQueue[str | None]] = []  # by run
        self.may_attach = threading.Event()
        self.may_attach.set()

    def conduct(self, run: Run) -> RunEnd:
        self.runs.append(run)
        attempt = len(self.runs)
        ended: SimpleQueue[str | None] = SimpleQueue()
        self.ended.append(ended)
        read: set[int] = set()

        def on_event(task: int, event: Message | str) -> None:
            self.events.append((attempt, task, event))
            if isinstance(event, str):
                ended.put(f"task {task} was lost: {event}")
            elif isinstance(event, InputRead):
                read.add(task)
                if len(read) == len(run.offers):
                    ended.put(self.failure)

        self.may_attach.wait(WITHIN_S)
        run.attach(on_event)
        for offer in run.offers:
            run.send(offer.task, Assign(attempt, offer.task, "memory://s"))
        return RunEnd(ended.get(), final=self.failure is not None)

    def abandon(self, stage: int, why: str) -> None:
        self.abandoned.append((stage, why))


def until(condition: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < give_up_s, "it didn't happen"
        time.sleep(0.01)


@pytest.fixture
def gathering() -> Iterator[Gathering]:
    gathering = Gathering(Tuning().coordinator_listening)
    yield gathering
    gathering.close()


@pytest.fixture
def conductor(gathering: Gathering) -> Iterator[Conductor]:
    conductor = Conductor()
    gathering.add("t", 2, conductor.conduct, patience_s=60.0, abandon=conductor.abandon)
    yield conductor
    for ended in conductor.ended:
        ended.put("the test is over")


def test_a_run_begins_when_all_are_there_and_ends_when_all_have_read(gathering: Gathering, conductor: Conductor) -> None:
    first = Task(gathering, 0, 5)
    time.sleep(0.2)
    assert conductor.runs == []
    second = Task(gathering, 1, 6)
    assert first.hears() == Assign(1, 0, "memory://s")
    assert second.hears() == Assign(1, 1, "memory://s")
    first.say(InputRead())
    time.sleep(0.2)
    assert first.heard == second.heard == []
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
    assert [task.hears() for task in again] == [Assign(2, task, "memory://s") for task in range(2)]


def test_a_run_is_over_when_a_task_is_lost(gathering: Gathering, conductor: Conductor) -> None:
    tasks = [Task(gathering, task, task) for task in range(2)]
    for task in tasks:
        task.hears()
    tasks[1].close()
    assert isinstance(said := tasks[0].hears(), Verdict) and "task 1 was lost" in str(said.error)
    assert conductor.abandoned == [], "the next try may do better"


def test_a_task_that_is_lost_before_the_run_is_attached_to_is_known_then(gathering: Gathering, conductor: Conductor) -> None:
    conductor.may_attach.clear()
    tasks = [Task(gathering, task, task) for task in range(2)]
    until(lambda: len(conductor.runs) == 1)
    tasks[1].close()
    until(lambda: len(gathering._members) == 1)
    conductor.may_attach.set()
    said = tasks[0].hears()
    if isinstance(said, Assign):
        said = tasks[0].hears()
    assert isinstance(said, Verdict) and "task 1 was lost" in str(said.error)


def test_what_comes_on_the_link_of_an_older_run_reaches_nobody(gathering: Gathering, conductor: Conductor) -> None:
    old = [Task(gathering, task, task) for task in range(2)]
    for task in old:
        assert isinstance(task.hears(), Assign)
    new = [Task(gathering, task, 10 + task) for task in range(2)]
    for task in old:
        assert isinstance(task.hears(), Verdict)
    for task in new:
        assert task.hears() == Assign(2, task is new[1], "memory://s")
    for task in old:
        task.say(InputRead())
        task.say(Heartbeat(0, {}))
    new[0].say(Heartbeat(0, {}))
    until(lambda: (2, 0, Heartbeat(0, {})) in conductor.events)
    time.sleep(0.2)
    assert [event for _, _, event in conductor.events if not isinstance(event, str)] == [Heartbeat(0, {})]
    assert old[0].heard == old[1].heard == [], "their verdict stands"
    for task in new:
        task.say(InputRead())
    assert [task.hears() for task in new] == [Verdict(None)] * 2


def test_what_a_task_sends_after_its_verdict_reaches_nobody(gathering: Gathering, conductor: Conductor) -> None:
    """A stage that failed is remembered, and with it its run: the run must not keep a coordinator."""
    tasks = [Task(gathering, task, task) for task in range(2)]
    for task in tasks:
        assert isinstance(task.hears(), Assign)
        task.say(InputRead())
    assert [task.hears() for task in tasks] == [Verdict(None)] * 2
    tasks[0].say(Heartbeat(0, {}))
    for task in tasks:
        task.close()
    until(lambda: not gathering._members)
    assert [event for _, _, event in conductor.events] == [InputRead()] * 2


def test_a_task_that_speaks_before_it_is_assigned_is_refused(gathering: Gathering, conductor: Conductor) -> None:
    task = Task(gathering, 0, 1)
    task.say(InputRead())
    assert "a task that waits for others doesn't send InputRead" in str(task.hears())
    until(lambda: not gathering._stages)


def test_a_task_that_sends_what_nobody_understands_is_lost(gathering: Gathering, conductor: Conductor) -> None:
    tasks = [Task(gathering, task, task) for task in range(2)]
    for task in tasks:
        assert isinstance(task.hears(), Assign)
    tasks[1]._link.send({"kind": "Nonsense"})
    assert "unknown kind" in str(tasks[1].hears())
    assert "task 1 was lost: a message of unknown kind" in str(tasks[0].hears())


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


def test_an_error_of_whoever_conducts_a_run_is_the_verdict(gathering: Gathering) -> None:
    def fails(run: Run) -> RunEnd:
        raise ZeroDivisionError("a bug of ours")

    gathering.add("t", 2, fails, patience_s=60.0)
    tasks = [Task(gathering, task, task) for task in range(2)]
    assert [task.hears() for task in tasks] == [Verdict("ZeroDivisionError: a bug of ours")] * 2


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
