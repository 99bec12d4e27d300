"""Savepoints in the coordinator: in memory, with a clock of its own."""

from __future__ import annotations

import pytest

import tidegate as tg
from tests.unit.driver.orders import end_input, files_at, new_folder, ordered, taken, triggers
from tests.unit.driver.test_coordinator import RESTARTS, World
from tidegate.control.messages import Decline
from tidegate.driver.savepoints import REQUESTS_EVERY_MS, SavepointOrder
from tidegate.errors import AlreadyExists, StoreError, TidegateError
from tidegate.snapshots.catalog import SnapshotCatalog
from tidegate.snapshots.finding import find_snapshot
from tidegate.snapshots.requests import request_savepoint, wait_for_savepoint
from tidegate.store import layout
from tidegate.store.memory import Access, Fail, Fault, MemoryStore, Operation
from tidegate.store.opening import open_store


def test_a_savepoint_is_a_full_epoch_and_a_copy_of_it() -> None:
    world = World().run()
    order = taken(world)
    assert triggers(world) == [(1, None, True)]
    assert world.coordinator.epochs[-1].full
    point = find_snapshot(order.to)
    assert (point.manifest.epoch, point.manifest.job, point.is_savepoint) == (1, "m", True)
    assert point.manifest.savepoint is not None
    assert (point.manifest.savepoint.graph, point.manifest.savepoint.versions) == ("the graph", {"python": "3"})
    assert order.info is not None and order.info.bytes == 20
    assert world.epochs_kept() == [1], "it is one of the job's own, too"


def test_a_long_copy_holds_up_no_commit_and_its_epoch_is_kept_meanwhile() -> None:
    """docs/promises.md, row 3, retain 1: what is copied is not released, and nothing else because of it."""
    world = World(retain=1).run()
    order = ordered(world)
    pinned = world.complete()
    for _ in range(3):
        newest = world.complete(1_000)
        assert world.epochs_kept() == [pinned, newest]
        world.check_reachable()
    assert order.info is None
    world.held.deliver()
    world.turn()
    assert order.info is not None and order.info.epoch == pinned
    assert world.epochs_kept() == [newest], "now it goes, like any old one"
    newest = world.complete(1_000)
    assert world.epochs_kept() == [newest]
    assert find_snapshot(order.to).manifest.epoch == pinned


def test_a_savepoint_never_takes_the_place_of_a_retained_snapshot() -> None:
    """Flink 21351: the counting is the same with savepoints as without."""
    world = World(retain=2).run()
    first = world.complete(1_000)
    order = taken(world)
    assert world.epochs_kept() == [first, first + 1]
    files_at(order.to).clear()  # somebody deletes the savepoint
    world.check_reachable()
    assert world.complete(1_000) == first + 2
    assert world.epochs_kept() == [first + 1, first + 2]
    world.check_reachable()


def test_an_aborted_epoch_is_followed_by_another_full_one_for_the_savepoint() -> None:
    world = World(tolerable_failures=5).run()
    order = ordered(world)
    world.coordinator.on_message(0, Decline(0, 0, 1, "disk full"))
    assert not order.done
    world.turn(1_000)
    assert triggers(world) == [(1, None, True), (2, None, True)]
    world.complete()
    world.held.deliver()
    assert order.info is not None and order.info.epoch == 2


def test_a_savepoint_outlives_the_attempt() -> None:
    world = World(RESTARTS).run()
    order = ordered(world)
    world.coordinator.on_lost(0, "gone")
    world.turn(500)
    world.turn()
    world.run()
    world.complete()
    world.held.deliver()
    assert order.info is not None and order.info.epoch == 2


def test_an_epoch_that_was_under_way_is_not_the_savepoints() -> None:
    world = World().run()
    world.turn(1_000)
    order = ordered(world)
    world.complete()
    assert triggers(world) == [(1, None, False), (2, None, True)]
    world.complete()
    world.held.deliver()
    assert order.info is not None and order.info.epoch == 2


def test_a_folder_that_isnt_empty_is_refused_before_anything_happens() -> None:
    world = World().run()
    to = new_folder()
    files_at(to)["mine"] = b""
    order = ordered(world, to)
    assert isinstance(order.error, AlreadyExists)
    assert triggers(world) == []


def test_a_copy_that_fails_is_told_and_the_job_goes_on() -> None:
    world = World(retain=1).run()
    order = ordered(world)
    world.complete()

    def refuse(access: Access) -> Fault | None:
        return Fail() if access.operation is Operation.WRITE else None

    store = open_store(order.to)
    assert isinstance(store, MemoryStore)
    store.faults = refuse
    world.held.deliver()
    assert isinstance(order.error, StoreError)
    store.faults = None
    assert store.files == {}
    newest = world.complete(1_000)
    assert world.epochs_kept() == [newest], "the pin is gone"


def test_a_stop_with_a_savepoint_ends_when_the_copy_is_made() -> None:
    world = World().run()
    order = SavepointOrder(new_folder())
    world.coordinator.stop(drain=True, savepoint=order)
    assert triggers(world) == [], "not before the folder is looked at"
    world.held.deliver()
    assert triggers(world) == [], "nor before the sources have ended"
    end_input(world)
    assert triggers(world) == [(1, "drain", True)]
    world.complete()
    world.done()
    assert world.status() is tg.Status.RUNNING, "the copy is under way"
    world.held.deliver()
    world.turn()
    assert world.coordinator.status is tg.Status.STOPPED
    assert order.info is not None and find_snapshot(order.to).manifest.ending == "drain"


def test_a_stop_whose_savepoint_cant_be_written_stops_nothing() -> None:
    world = World().run()
    to = new_folder()
    files_at(to)["mine"] = b""
    order = SavepointOrder(to)
    world.coordinator.stop(drain=False, savepoint=order)
    world.held.deliver()
    assert isinstance(order.error, AlreadyExists)
    world.complete(1_000)
    assert triggers(world) == [(1, None, False)]


def test_a_stop_with_a_savepoint_doesnt_end_a_job_that_fails_meanwhile_and_can_be_restarted() -> None:
    world = World(RESTARTS).run()
    order = SavepointOrder(new_folder())
    world.coordinator.stop(drain=False, savepoint=order)
    world.coordinator.on_lost(0, "gone")
    world.held.deliver()
    assert isinstance(order.error, tg.JobError) and "is restarting" in str(order.error)
    world.turn(500)
    world.turn()
    world.run()
    assert world.coordinator.status is tg.Status.RUNNING


def test_a_savepoint_that_is_asked_for_while_the_job_stops_is_of_the_final_epoch() -> None:
    world = World().run()
    world.coordinator.stop(drain=False)
    order = ordered(world)
    assert triggers(world) == [(1, "stop", True)]
    world.complete()
    world.held.deliver()
    assert not order.done, "its output isn't committed yet"
    world.done()
    world.held.deliver()
    world.turn()
    assert order.info is not None and order.info.epoch == 1
    assert world.coordinator.status is tg.Status.STOPPED


def test_a_stop_with_a_savepoint_may_come_before_the_job_runs() -> None:
    world = World()
    order = SavepointOrder(new_folder())
    world.coordinator.stop(drain=False, savepoint=order)
    world.held.deliver()
    world.run()
    assert triggers(world) == [(1, "stop", True)]
    world.complete()
    world.done()
    world.held.deliver()
    assert order.info is not None


def test_a_savepoint_waits_until_every_slot_has_committed_what_it_covers() -> None:
    """And its epoch is kept as long, though only one is retained."""
    world = World(retain=1).run()
    order = ordered(world)
    pinned = world.complete(commit=False)
    world.commit(pinned, slots=[0])
    newest = world.complete(1_000, commit=False)
    world.held.deliver()
    assert not order.done and world.epochs_kept() == [pinned, newest]
    world.commit(newest, slots=[0])
    world.held.deliver()
    assert not order.done
    world.commit(newest, slots=[1])  # the one before was never reported: this one includes it
    world.held.deliver()
    world.turn()
    assert order.info is not None and order.info.epoch == pinned
    assert world.epochs_kept() == [newest]


@pytest.mark.parametrize("reported", [[], [0]])
def test_an_attempt_that_ends_before_all_is_committed_leaves_the_savepoint_to_the_next(reported: list[int]) -> None:
    world = World(RESTARTS, retain=1).run()
    order = ordered(world)
    first = world.complete(commit=False)
    world.commit(first, slots=reported)
    world.coordinator.on_lost(1, "gone")
    world.turn(500)
    world.turn()
    world.run()
    world.commit(first)  # what the next attempt has to say of it is of no use: it made no savepoint of it
    world.held.deliver()
    assert not order.done
    second = world.complete()
    world.held.deliver()
    assert order.info is not None and order.info.epoch == second > first
    assert triggers(world)[-1] == (second, None, True)
    assert world.complete(1_000) and len(world.epochs_kept()) == 1, "nothing stays pinned"


def test_a_savepoint_of_a_job_that_fails_before_its_sinks_have_committed_says_so() -> None:
    world = World().run()
    order = ordered(world)
    world.complete(commit=False)
    world.coordinator.on_lost(1, "gone")
    assert str(order.error) == "the job 'm' has failed before its sinks had committed what the savepoint covers"
    assert files_at(order.to) == {}


def test_who_no_longer_waits_for_the_commit_is_forgotten() -> None:
    world = World(retain=1).run()
    order = ordered(world)
    first = world.complete(commit=False)
    newest = world.complete(1_000, commit=False)
    assert world.epochs_kept() == [first, newest]
    world.coordinator.savepoints.withdraw(order, TimeoutError("enough"))
    world.turn()
    assert world.epochs_kept() == [newest]
    world.commit(newest)
    world.held.deliver()
    assert order.info is None and str(order.error) == "enough"


def test_a_job_that_ends_tells_those_who_wait_for_a_savepoint() -> None:
    world = World().run()
    order = ordered(world)
    world.coordinator.cancel()
    assert isinstance(order.error, TidegateError) and "'m' has been cancelled before" in str(order.error)
    late = ordered(world)
    assert late.error is not None
    world.turn()
    assert world.coordinator.status is tg.Status.CANCELLED


def test_a_cancelled_job_leaves_its_copies() -> None:
    world = World().run()
    order = ordered(world)
    world.complete()
    world.coordinator.cancel()
    world.turn()
    assert world.coordinator.status is tg.Status.CANCELLED
    world.held.deliver()
    assert "cancelled" in str(order.error) and files_at(order.to) == {}


def test_other_processes_ask_by_a_file_and_get_an_answer() -> None:
    world = World().run()
    to = new_folder()
    request = request_savepoint(world.store, to, timeout_s=10**9)  # the clock here is not the world's
    world.turn(REQUESTS_EVERY_MS)
    world.held.deliver()
    assert triggers(world)[-1][2] is False, "an epoch was due at the same time"
    world.complete()
    assert triggers(world)[-1][2] is True
    world.complete()
    world.held.deliver()
    world.held.deliver()
    info = wait_for_savepoint(world.store, request, timeout_s=0)
    assert (info.path, info.epoch) == (to, 2)


def test_a_request_that_cant_be_met_is_answered_with_the_reason() -> None:
    world = World().run()
    to = new_folder()
    request = request_savepoint(world.store, to, timeout_s=10**9)
    files_at(to)["mine"] = b""
    world.turn(REQUESTS_EVERY_MS)
    world.held.deliver()
    with pytest.raises(StoreError, match=r"AlreadyExists: .*not empty"):
        wait_for_savepoint(world.store, request, timeout_s=0)


def test_a_driver_that_was_fenced_off_leaves_requests_to_the_other() -> None:
    world = World(RESTARTS).run()
    request_savepoint(world.store, new_folder(), timeout_s=10**9)
    SnapshotCatalog(world.store).claim_attempt()
    world.turn(REQUESTS_EVERY_MS)
    world.held.deliver()
    assert not any(full for _, _, full in triggers(world))
    assert [name for name in world.store.list(layout.REQUESTS) if "answer" in name] == []
