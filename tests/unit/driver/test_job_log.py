"""What the coordinator logs: causes and fields when something happens, and a line a minute at most when all is well."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import tidegate as tg
from tests.unit.driver.orders import ordered, taken
from tests.unit.driver.test_coordinator import RESTARTS, World
from tests.unit.driver.test_coordinator_rescaling import rescaled
from tidegate.control.messages import Decline, Failed
from tidegate.logs import FIELDS
from tidegate.snapshots.manifest import MicroBatch
from tidegate.store.memory import Operation


class Lines:
    """A `logs.Speak` that keeps what was logged: the level, the fields and the text."""

    def __init__(self) -> None:
        self.all: list[tuple[int, dict[str, Any], str]] = []

    def __call__(self, level: int, text: str, *args: object, extra: dict[str, Any]) -> None:
        assert extra.keys() <= set(FIELDS), "a field that the JSON lines would omit"
        self.all.append((level, extra, text % args))

    def of(self, event: str) -> list[tuple[int, dict[str, Any], str]]:
        return [line for line in self.all if line[1]["event"] == event]

    @property
    def events(self) -> list[str]:
        return [fields["event"] for _, fields, _ in self.all]


def test_a_healthy_job_logs_a_line_a_minute() -> None:
    lines, minutes = Lines(), 5
    world = World(speak=lines).run()
    before = len(lines.all)
    for _ in range(minutes * 60):
        world.complete(1_000)
    assert set(lines.events[before:]) == {"snapshot"} and minutes <= len(lines.all) - before <= minutes + 1
    level, fields, text = lines.of("snapshot")[1]
    assert level == logging.INFO and fields["epoch"] == 61 and fields["bytes"] == 20
    assert text == "Job 'm', attempt 1: snapshot 61 is complete after 0 ms, 20 bytes; 59 others since the last line."


def test_the_log_of_a_job_that_failed_twice_tells_its_story() -> None:
    lines = Lines()
    world = World(RESTARTS, speak=lines).run()
    epoch = world.complete(1_000)
    for attempt in (1, 2):
        world.coordinator.on_message(1, Failed(1, f"boom {attempt}", "count"))
        world.slots.running = False
        world.turn(500)
        world.turn()
        world.run()
    world.coordinator.stop(drain=False)
    world.turn()
    last = world.complete()
    world.done()
    assert world.status() is tg.Status.STOPPED
    attempts = [["begun", "running", "snapshot", "restarting"], ["begun", "running", "restarting"], ["begun", "running"]]
    assert lines.events == [*attempts[0], *attempts[1], *attempts[2], "stopped"]
    assert [fields["attempt"] for _, fields, _ in lines.of("begun")] == [1, 2, 3]
    assert [fields["epoch"] for _, fields, _ in lines.of("begun")] == [None, epoch, epoch]
    assert lines.of("begun")[1][2] == f"Job 'm', attempt 2 begins, from snapshot {epoch}."
    level, fields, text = lines.of("restarting")[1]
    assert level == logging.WARNING and "boom 2" in text and text.endswith("in 0.5 s (restart 2 of 3).")
    assert fields == {
        "event": "restarting",
        "job": "m",
        "attempt": 2,
        "epoch": epoch,
        "slot": 1,
        "operator": "count",
        "delay_ms": 500,
    }
    assert lines.of("stopped")[0][2] == f"Job 'm', attempt 3 has ended: stopped, with snapshot {last}."


def test_an_epoch_that_is_aborted_is_logged_with_the_reason() -> None:
    lines = Lines()
    world = World(tolerable_failures=1, speak=lines).run()
    world.turn(1_000)
    epoch = world.coordinator.epochs[-1].epoch
    world.clock.at_ms += 200
    world.coordinator.on_message(0, Decline(0, 0, epoch, "StoreError: the disk is full"))
    ((level, fields, text),) = lines.of("aborted")
    assert level == logging.WARNING and (fields["epoch"], fields["duration_ms"]) == (epoch, 200)
    assert text == (
        f"Job 'm', attempt 1: epoch {epoch} was aborted after 0.2 s: declined: epoch {epoch}: v0[0]: "
        f"StoreError: the disk is full"
    )


def test_a_change_of_parallelism_is_logged() -> None:
    lines = Lines()
    world = World(speak=lines).run()
    rescaled(world, 3)
    assert lines.of("rescaling")[0][2] == "Job 'm', attempt 1 is rescaled from 2 slots to 3."


def test_savepoints_are_logged_with_their_folder() -> None:
    lines = Lines()
    world = World(speak=lines).run()
    order = taken(world)
    assert order.info is not None
    assert order.to in lines.of("savepoint-asked")[0][2]
    text = f"the savepoint of epoch {order.info.epoch}, {order.info.bytes} bytes, is complete in {order.to}."
    assert lines.of("savepoint")[0][2] == f"Job 'm', attempt 1: {text}"
    ordered(world, order.to)
    ((level, _, text),) = lines.of("savepoint-failed")
    assert level == logging.WARNING and f"the savepoint to {order.to} was not taken" in text


def test_passwords_in_the_address_of_a_savepoint_are_not_logged() -> None:
    lines = Lines()
    world = World(speak=lines).run()
    order = ordered(world, "memory://user:password@test-job-log")
    world.complete()
    world.held.deliver()
    assert order.info is not None
    ordered(world, order.to)
    assert len(lines.of("savepoint-asked") + lines.of("savepoint") + lines.of("savepoint-failed")) == 3
    assert all("memory://test-job-log" in text for _, _, text in lines.all if "savepoint" in text)
    assert "password" not in str(lines.all)


def test_what_cant_be_deleted_is_logged_once_a_minute() -> None:
    lines = Lines()
    world = World(speak=lines).run()
    world.store.faults = world.only(Operation.DELETE)
    for _ in range(10):
        world.complete(1_000)
    ((level, _, text),) = lines.of("not-deleted")
    assert level == logging.WARNING and "can't be deleted now: StoreError" in text


def test_a_job_that_is_stopped_while_it_restarts_logs_that_it_was() -> None:
    lines = Lines()
    world = World(RESTARTS, speak=lines).run()
    world.coordinator.on_lost(0, "gone")
    world.coordinator.stop(drain=False)
    assert lines.events[-1] == "stopped" and "The job was stopped while it was restarting" in lines.all[-1][2]


def test_an_attempt_for_a_micro_batch_names_it_and_is_quiet_then() -> None:
    lines = Lines()
    World(micro_batch=MicroBatch("q", 0), speak=lines).run()
    assert [(level, fields["event"]) for level, fields, _ in lines.all] == [
        (logging.INFO, "begun"),
        (logging.DEBUG, "running"),
    ]
    assert lines.of("begun")[0][2] == "Job 'm', attempt 1 begins with micro-batch 0 of the query q, from no snapshot."


@pytest.mark.parametrize("is_bounded", [False, True])
def test_a_transform_over_bounded_input_is_quieter(is_bounded: bool) -> None:
    lines = Lines()
    world = World(speak=lines, writes_state=not is_bounded).run()
    assert {level for level, _, _ in lines.all} == {logging.DEBUG if is_bounded else logging.INFO}
    world.coordinator.on_lost(0, "gone")
    assert lines.all[-1][0] == logging.ERROR
