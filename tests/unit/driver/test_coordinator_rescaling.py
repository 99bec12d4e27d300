"""Rescaling in the coordinator: in memory, with a clock of its own."""

from __future__ import annotations

from typing import Any

import pytest

import tidegate as tg
from tests.unit.driver.orders import end_input, ordered, taken, triggers
from tests.unit.driver.test_coordinator import RESTARTS, World, plan_of
from tidegate.control import messages
from tidegate.control.messages import Heartbeat, SubtaskMetrics
from tidegate.driver.deployment import Layout, Rescaling
from tidegate.snapshots.finding import find_snapshot


def rescaled(world: World, slots: int) -> Rescaling:
    rescaling = Rescaling(Layout(plan_of(slots), world.slots, f"at {slots}"))
    world.coordinator.rescale(rescaling)
    return rescaling


def test_a_job_is_rescaled_by_a_final_snapshot_and_an_attempt_with_the_new_plan() -> None:
    world = World().run()
    world.complete(1_000)
    rescaling = rescaled(world, 4)
    assert triggers(world)[-1] == (2, "stop", True)
    world.complete()
    assert world.coordinator.plan.slots == 2
    for slot in range(2):
        assert world.coordinator.status is tg.Status.RUNNING
        world.coordinator.on_message(slot, messages.Done(slot))
    assert world.coordinator.status is tg.Status.RESCALING
    assert world.slots.cancelled == 0, "the slots end by themselves"
    world.turn(700)
    assert world.slots.attempts == [1], "not while the old ones are there"
    world.slots.running = False
    world.turn()
    world.turn()
    assert world.slots.attempts == [1, 2] and world.coordinator.status is tg.Status.RESCALING
    assert not rescaling.done
    world.run()
    assert rescaling.done and rescaling.error is None
    assert world.coordinator.plan.slots == 4 and sorted(world.coordinator.attempts[-1].slots) == [0, 1, 2, 3]
    old, new = world.coordinator.attempts
    assert new.restored_epoch == 2
    assert old.ended_ms is not None and old.gone_ms == old.ended_ms + 700
    world.clock.at_ms += 30
    world.coordinator.on_message(3, Heartbeat(3, {"v0[3]": SubtaskMetrics(records_in=0)}))
    assert world.coordinator.attempts[-1].first_record_ms is None
    world.coordinator.on_message(3, Heartbeat(3, {"v0[3]": SubtaskMetrics(records_in=8)}))
    assert world.coordinator.attempts[-1].first_record_ms == new.running_ms + 30
    order = taken(world)
    savepoint = find_snapshot(order.to).manifest.savepoint
    assert savepoint is not None and savepoint.graph == "at 4"


def test_it_can_be_rescaled_again_and_again() -> None:
    world = World().run()
    for slots in (3, 1, 2):
        rescaling = rescaled(world, slots)
        world.complete()
        world.done()
        world.turn()
        world.run()
        assert rescaling.done and world.coordinator.plan.slots == slots
        world.complete(1_000)
    assert world.coordinator.failures == []


def test_an_attempt_that_fails_while_the_job_is_rescaled_is_followed_by_one_at_the_new_parallelism() -> None:
    world = World(RESTARTS).run()
    rescaling = rescaled(world, 3)
    world.coordinator.on_lost(1, "gone")
    assert world.coordinator.status is tg.Status.RESTARTING
    world.turn(500)
    world.turn()
    world.run()
    assert world.coordinator.plan.slots == 3 and not rescaling.done, "it might fail again at the same record"
    world.turn(1_000)
    assert not rescaling.done
    world.complete()
    assert rescaling.done
    world.coordinator.on_lost(1, "gone")
    world.turn(500)
    world.turn()
    world.run()
    assert world.coordinator.plan.slots == 3, "and it stays so"


@pytest.mark.parametrize("restart", [RESTARTS, tg.NoRestart()])
def test_a_job_that_cant_come_up_at_the_new_parallelism_goes_back(restart: Any) -> None:
    world = World(restart).run()
    rescaling = rescaled(world, 4)
    final = world.complete()
    world.done()
    world.turn()
    assert world.coordinator.plan.slots == 4
    world.turn(120_000)  # no slot comes
    world.turn()
    assert world.coordinator.plan.slots == 2 and world.slots.attempts == [1, 2, 3]
    assert world.coordinator.status is tg.Status.RESTARTING and not rescaling.done
    world.run()
    assert rescaling.done and rescaling.went_back
    assert rescaling.error is not None and "slots [0, 1, 2, 3] were not ready within 120000 ms" in rescaling.error
    assert world.coordinator.attempts[-1].restored_epoch == final
    assert world.coordinator.failures[-1].then == f"Going back to 2 slots, from snapshot {final}"
    again = rescaled(world, 3)
    world.complete()
    world.done()
    world.turn()
    world.run()
    assert again.done and again.error is None and world.coordinator.plan.slots == 3


def test_a_job_whose_new_slots_fail_while_they_restore_goes_back() -> None:
    world = World(RESTARTS).run()
    rescaling = rescaled(world, 3)
    world.complete()
    world.done()
    world.turn()
    world.coordinator.on_message(2, messages.Failed(2, "out of memory"))
    world.turn()
    world.turn()
    world.coordinator.on_lost(0, "gone")  # the old slots may fail meanwhile as well
    world.turn(500)
    world.turn()
    assert not rescaling.done
    world.run()
    assert rescaling.error == "out of memory" and world.coordinator.plan.slots == 2


def test_a_job_that_has_gone_back_and_gives_up_says_so() -> None:
    world = World().run()
    rescaling = rescaled(world, 3)
    world.complete()
    world.done()
    world.turn()
    world.coordinator.on_message(2, messages.Failed(2, "out of memory"))
    world.turn()
    world.turn()
    world.coordinator.on_lost(0, "gone")
    world.turn()
    assert world.coordinator.status is tg.Status.FAILED
    assert rescaling.done and rescaling.job_ends and rescaling.error == "it has failed"


def test_a_job_that_is_rescaled_before_it_runs_is_stopped_when_it_does() -> None:
    world = World()
    rescaling = rescaled(world, 1)
    world.run()
    assert triggers(world) == [(1, "stop", True)] and not rescaling.done
    world.complete()
    world.done()
    world.turn()
    world.run()
    assert rescaling.done and world.coordinator.plan.slots == 1


def test_only_one_at_a_time_and_none_at_the_end() -> None:
    world = World().run()
    first = rescaled(world, 3)
    assert rescaled(world, 4).error == "it is being rescaled already"
    world.coordinator.cancel()
    assert first.error == "it has been cancelled"
    assert rescaled(world, 4).error == "it is at its end"


def test_input_that_ends_first_finishes_the_job() -> None:
    world = World().run()
    world.turn(1_000)
    end_input(world)
    rescaling = rescaled(world, 3)
    world.complete()
    world.complete()
    assert triggers(world)[-1] == (2, "input-ended", True)
    world.done()
    assert world.coordinator.status is tg.Status.FINISHED and rescaling.error == "it has finished"


@pytest.mark.parametrize("drain", [False, True])
def test_a_stop_meanwhile_is_obeyed(drain: bool) -> None:
    world = World().run()
    rescaling = rescaled(world, 3)
    world.coordinator.stop(drain=drain)
    world.complete()
    world.done()
    if drain:  # the final epoch was no draining one: the job is drained when it runs again
        world.turn()
        world.run()
        assert rescaling.done and rescaling.error is None
        end_input(world)
        assert triggers(world)[-1] == (2, "drain", True)
        world.complete()
        world.done()
    assert world.coordinator.status is tg.Status.STOPPED


def test_a_savepoint_and_a_change_of_the_parallelism_share_an_epoch() -> None:
    world = World().run()
    world.turn(1_000)
    order = ordered(world)
    rescaled(world, 1)
    world.complete()
    assert triggers(world) == [(1, None, False), (2, "stop", True)]
    world.complete()
    world.done()
    world.turn()
    world.run()
    world.held.deliver()
    assert order.info is not None and order.info.epoch == 2
