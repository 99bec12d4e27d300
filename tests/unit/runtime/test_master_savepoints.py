"""Savepoints, restores and rescaling in the master: in memory, with a clock of its own."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import tidegate as tg
from tests.unit.runtime.test_master import RESTARTS, World, plan_of
from tidegate.errors import AlreadyExists, StoreError, TidegateError
from tidegate.runtime import messages, reports
from tidegate.runtime.attempts import Restore
from tidegate.runtime.deployment import Layout, Rescaling
from tidegate.runtime.messages import Decline, Deploy, Heartbeat, Trigger
from tidegate.runtime.savepoints import REQUESTS_EVERY_MS, SavepointOrder
from tidegate.store import layout
from tidegate.store.catalog import SnapshotCatalog
from tidegate.store.memory import Access, Fail, Fault, MemoryStore, Operation
from tidegate.store.opening import open_store
from tidegate.store.savepoints import find_restore_point, request_savepoint, wait_for_savepoint

_numbers = itertools.count()


def new_folder() -> str:
    return f"memory://test-master-savepoints-{next(_numbers)}"


def files_at(address: str) -> dict[str, bytes]:
    store = open_store(address)
    assert isinstance(store, MemoryStore)
    return store.files


def ordered(world: World, to: str | None = None) -> SavepointOrder:
    order = SavepointOrder(to or new_folder())
    world.master.savepoint(order)
    world.held.deliver()        # the folder is empty
    return order


def taken(world: World) -> SavepointOrder:
    order = ordered(world)
    world.complete()
    world.held.deliver()
    assert order.info is not None
    return order


def triggers(world: World) -> list[tuple[int, str | None, bool]]:
    return [(message.epoch, message.ending, message.full) for slot, message in world.slots.said
            if slot == 0 and isinstance(message, Trigger)]


# -------------------------------------------------------------------------------------------------------- savepoints


def end_input(world: World) -> None:
    for slot in range(world.master.plan.slots):
        world.master.on_message(slot, messages.InputEnded(0, slot))


def test_a_savepoint_is_a_full_epoch_and_a_copy_of_it() -> None:
    world = World().run()
    order = taken(world)
    assert triggers(world) == [(1, None, True)]
    assert world.master.epochs[-1].full
    point = find_restore_point(order.to)
    assert (point.manifest.epoch, point.manifest.job, point.is_savepoint) == (1, "m", True)
    assert point.manifest.savepoint is not None
    assert (point.manifest.savepoint.graph, point.manifest.savepoint.versions) == ("the graph", {"python": "3"})
    assert order.info is not None and order.info.bytes == 20
    assert world.epochs_kept() == [1], "it is one of the job's own, too"


def test_a_long_copy_holds_up_no_commit_and_its_epoch_is_kept_meanwhile() -> None:
    """FAULTS row 3, retain 1: what is copied is not released, and nothing else because of it."""
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
    assert find_restore_point(order.to).manifest.epoch == pinned


def test_a_savepoint_never_takes_the_place_of_a_retained_snapshot() -> None:
    """Flink 21351: the counting is the same with savepoints as without."""
    world = World(retain=2).run()
    first = world.complete(1_000)
    order = taken(world)
    assert world.epochs_kept() == [first, first + 1]
    files_at(order.to).clear()          # somebody deletes the savepoint
    world.check_reachable()
    assert world.complete(1_000) == first + 2
    assert world.epochs_kept() == [first + 1, first + 2]
    world.check_reachable()


def test_an_aborted_epoch_is_followed_by_another_full_one_for_the_savepoint() -> None:
    world = World(tolerable_failures=5).run()
    order = ordered(world)
    world.master.on_message(0, Decline(0, 0, 1, "disk full"))
    assert not order.done
    world.turn(1_000)
    assert triggers(world) == [(1, None, True), (2, None, True)]
    world.complete()
    world.held.deliver()
    assert order.info is not None and order.info.epoch == 2


def test_a_savepoint_outlives_the_attempt() -> None:
    world = World(RESTARTS).run()
    order = ordered(world)
    world.master.on_lost(0, "gone")
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
    world.master.stop(drain=True, savepoint=order)
    assert triggers(world) == [], "not before the folder is looked at"
    world.held.deliver()
    assert triggers(world) == [], "nor before the sources have ended"
    end_input(world)
    assert triggers(world) == [(1, "drain", True)]
    world.complete()
    world.done()
    assert world.master.status is tg.Status.RUNNING, "the copy is under way"
    world.held.deliver()
    world.turn()
    assert world.master.status is tg.Status.STOPPED
    assert order.info is not None and find_restore_point(order.to).manifest.ending == "drain"


def test_a_stop_whose_savepoint_cant_be_written_stops_nothing() -> None:
    world = World().run()
    to = new_folder()
    files_at(to)["mine"] = b""
    order = SavepointOrder(to)
    world.master.stop(drain=False, savepoint=order)
    world.held.deliver()
    assert isinstance(order.error, AlreadyExists)
    world.complete(1_000)
    assert triggers(world) == [(1, None, False)]


def test_a_stop_with_a_savepoint_doesnt_end_a_job_that_fails_meanwhile_and_can_be_restarted() -> None:
    world = World(RESTARTS).run()
    order = SavepointOrder(new_folder())
    world.master.stop(drain=False, savepoint=order)
    world.master.on_lost(0, "gone")
    world.held.deliver()
    assert isinstance(order.error, tg.JobError) and "is restarting" in str(order.error)
    world.turn(500)
    world.turn()
    world.run()
    assert world.master.status is tg.Status.RUNNING


def test_a_savepoint_that_is_asked_for_while_the_job_stops_is_of_the_final_epoch() -> None:
    world = World().run()
    world.master.stop(drain=False)
    order = ordered(world)
    assert triggers(world) == [(1, "stop", True)]
    world.complete()
    world.held.deliver()
    assert not order.done, "its output isn't committed yet"
    world.done()
    world.held.deliver()
    world.turn()
    assert order.info is not None and order.info.epoch == 1
    assert world.master.status is tg.Status.STOPPED


def test_a_stop_with_a_savepoint_may_come_before_the_job_runs() -> None:
    world = World()
    order = SavepointOrder(new_folder())
    world.master.stop(drain=False, savepoint=order)
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
    world.commit(newest, slots=[1])         # the one before was never reported: this one includes it
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
    world.master.on_lost(1, "gone")
    world.turn(500)
    world.turn()
    world.run()
    world.commit(first)                     # what the next attempt has to say of it is of no use: it made no savepoint of it
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
    world.master.on_lost(1, "gone")
    assert str(order.error) == "the job 'm' has failed before its sinks had committed what the savepoint covers"
    assert files_at(order.to) == {}


def test_who_no_longer_waits_for_the_commit_is_forgotten() -> None:
    world = World(retain=1).run()
    order = ordered(world)
    first = world.complete(commit=False)
    newest = world.complete(1_000, commit=False)
    assert world.epochs_kept() == [first, newest]
    world.master.withdraw(order, TimeoutError("enough"))
    world.turn()
    assert world.epochs_kept() == [newest]
    world.commit(newest)
    world.held.deliver()
    assert order.info is None and str(order.error) == "enough"


def test_a_job_that_ends_tells_those_who_wait_for_a_savepoint() -> None:
    world = World().run()
    order = ordered(world)
    world.master.cancel()
    assert isinstance(order.error, TidegateError) and "'m' has been cancelled before" in str(order.error)
    late = ordered(world)
    assert late.error is not None
    world.turn()
    assert world.master.status is tg.Status.CANCELLED


def test_a_cancelled_job_leaves_its_copies() -> None:
    world = World().run()
    order = ordered(world)
    world.complete()
    world.master.cancel()
    world.turn()
    assert world.master.status is tg.Status.CANCELLED
    world.held.deliver()
    assert "cancelled" in str(order.error) and files_at(order.to) == {}


def test_other_processes_ask_by_a_file_and_get_an_answer() -> None:
    world = World().run()
    to = new_folder()
    request = request_savepoint(world.store, to, timeout_s=10**9)      # the clock here is not the world's
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


# ---------------------------------------------------------------------------------------------------------- restoring


def test_a_job_begins_with_a_savepoint_and_goes_on_from_its_own_snapshots() -> None:
    to = taken(World().run()).to
    store = MemoryStore()
    world = World(store=store, restore=Restore(path=to))
    report = world.master.attempts[-1]
    assert (report.restored_epoch, report.restored_from) == (1, to)
    assert world.master.attempt == 2, "attempts go on above the savepoint's, so that names stay unique"
    world.run()
    deploys = [message for _, message in world.slots.said if isinstance(message, Deploy)]
    assert [(message.epoch, message.restore_from) for message in deploys] == [(1, to)] * 2
    assert world.complete(1_000) == 2, "epochs go on above the savepoint's"
    manifest = SnapshotCatalog(store).load(2)
    origin = find_restore_point(to).origin
    assert manifest.restored_from == origin

    again = World(store=store, restore=Restore(path=to)).run()
    assert again.master.attempts[-1].restored_epoch == 2 and again.master.attempts[-1].restored_from is None
    assert [message.restore_from for _, message in again.slots.said if isinstance(message, Deploy)] == [None] * 2
    again.complete(1_000)
    assert SnapshotCatalog(store).load(3).restored_from == origin, "it is handed down"
    without = World(store=store)
    assert without.master.attempts[-1].restored_epoch == 3


def test_an_attempt_that_fails_before_the_first_own_snapshot_begins_with_the_savepoint_again() -> None:
    to = taken(World().run()).to
    world = World(RESTARTS, restore=Restore(path=to)).run()
    world.turn(1_000)
    world.master.on_lost(0, "gone")
    world.turn(500)
    world.turn()
    world.run()
    assert [report.restored_epoch for report in world.master.attempts] == [1, 1]
    world.turn(1_000)
    assert [report.epoch for report in world.master.epochs] == [2, 3]


def test_once_the_job_has_snapshots_of_its_own_a_restart_doesnt_look_at_the_savepoint() -> None:
    to = taken(World().run()).to
    world = World(RESTARTS, restore=Restore(path=to)).run()
    world.complete(1_000)
    files_at(to)[layout.SAVEPOINT] = b"torn"
    world.master.on_lost(0, "gone")
    world.turn(500)
    world.turn()
    world.run()
    assert world.master.attempts[-1].restored_epoch == 2
    world.complete(1_000)
    assert SnapshotCatalog(world.store).load(3).restored_from is not None


@pytest.mark.parametrize("begun_with", ["nothing", "another savepoint"])
def test_snapshots_that_come_from_elsewhere_are_a_contradiction_and_nobody_is_fenced_off(begun_with: str) -> None:
    to, other = taken(World().run()).to, taken(World().run()).to
    first = World(restore=None if begun_with == "nothing" else Restore(path=other)).run()
    first.complete(1_000)
    attempts = SnapshotCatalog(first.store).attempts()
    second = World(store=first.store, restore=Restore(path=to))
    assert second.master.status is tg.Status.FAILED
    message = second.master.failures[-1].message
    assert "RestoreError" in message and "Snapshots(to=…)" in message and "leave restore_from out" in message
    assert SnapshotCatalog(first.store).attempts() == attempts
    first.complete(1_000)


@pytest.mark.parametrize("path", ["memory://nothing-at-all", "memory://nothing-at-all/savepoint.json"])
def test_a_path_with_nothing_there_fails_before_anything_is_claimed_or_deployed(path: str) -> None:
    world = World(RESTARTS, restore=Restore(path=path))
    assert world.master.status is tg.Status.FAILED
    assert "NotFound" in world.master.failures[-1].message
    assert world.slots.attempts == [] and world.store.files == {}


def test_a_savepoint_that_cant_be_read_fails_before_anything_is_claimed_or_deployed() -> None:
    to = taken(World().run()).to
    files_at(to)[layout.SAVEPOINT] = files_at(to)[layout.SAVEPOINT][:-10]
    world = World(RESTARTS, restore=Restore(path=to))
    assert world.master.status is tg.Status.FAILED
    assert "CorruptFile" in world.master.failures[-1].message
    assert world.store.files == {}


def test_a_claimed_savepoint_is_deleted_after_the_first_own_snapshot_and_not_before() -> None:
    to = taken(World().run()).to
    world = World(restore=Restore(path=to, claim=True)).run()
    world.turn(1_000)
    world.held.deliver()
    assert layout.SAVEPOINT in files_at(to)
    world.complete()
    world.held.deliver()
    assert files_at(to) == {}
    again = World(store=world.store, restore=Restore(path=to, claim=True)).run()
    assert again.master.attempts[-1].restored_epoch == 2, "it is not missed"


def test_a_savepoint_that_is_not_claimed_stays() -> None:
    to = taken(World().run()).to
    before = dict(files_at(to))
    world = World(restore=Restore(path=to)).run()
    world.complete(1_000)
    world.complete(1_000)
    world.held.deliver()
    assert files_at(to) == before


def test_a_claim_that_was_not_carried_out_is_by_the_next_start() -> None:
    to = taken(World().run()).to
    world = World(restore=Restore(path=to, claim=True)).run()
    world.complete(1_000)       # and the driver dies before its background gets to it
    assert layout.SAVEPOINT in files_at(to)
    again = World(store=world.store, restore=Restore(path=to, claim=True))
    again.held.deliver()
    assert files_at(to) == {}


def test_a_driver_that_was_fenced_off_deletes_no_savepoint() -> None:
    to = taken(World().run()).to
    world = World(restore=Restore(path=to, claim=True)).run()
    world.complete(1_000)
    SnapshotCatalog(world.store).claim_attempt()
    world.held.deliver()
    assert layout.SAVEPOINT in files_at(to)


def test_what_is_put_at_the_path_later_is_not_deleted() -> None:
    to = taken(World().run()).to
    world = World(restore=Restore(path=to, claim=True)).run()
    world.complete(1_000)
    files_at(to).clear()
    files_at(to).update(files_at(taken(World().run()).to))
    world.held.deliver()
    assert layout.SAVEPOINT in files_at(to)


def test_another_jobs_snapshots_can_be_begun_with_but_not_claimed() -> None:
    address = new_folder()
    store = open_store(address)
    assert isinstance(store, MemoryStore)
    other = World(store=store).run()
    other.complete(1_000)
    claimed = World(restore=Restore(path=address, claim=True))
    assert "claim=True" in claimed.master.failures[-1].message
    world = World(restore=Restore(path=address)).run()
    restore_from = f"{address}/manifests/0000000001-a0000000001.json"
    assert [message.restore_from for _, message in world.slots.said if isinstance(message, Deploy)] == [restore_from] * 2
    world.complete(1_000)
    other.complete(1_000)
    other.complete(1_000)
    again = World(store=world.store, restore=Restore(path=address))
    assert again.master.attempts[-1].restored_epoch == 2, "its own wins, though the other job has gone on"


# ---------------------------------------------------------------------------------------------------------- rescaling


def rescaled(world: World, slots: int) -> Rescaling:
    rescaling = Rescaling(Layout(plan_of(slots), world.slots, f"at {slots}"))
    world.master.rescale(rescaling)
    return rescaling


def test_a_job_is_rescaled_by_a_final_snapshot_and_an_attempt_with_the_new_plan() -> None:
    world = World().run()
    world.complete(1_000)
    rescaling = rescaled(world, 4)
    assert triggers(world)[-1] == (2, "stop", True)
    world.complete()
    assert world.master.plan.slots == 2
    for slot in range(2):
        assert world.master.status is tg.Status.RUNNING
        world.master.on_message(slot, messages.Done(slot))
    assert world.master.status is tg.Status.RESCALING
    assert world.slots.cancelled == 0, "the slots end by themselves"
    world.turn(700)
    assert world.slots.attempts == [1], "not while the old ones are there"
    world.slots.running = False
    world.turn()
    world.turn()
    assert world.slots.attempts == [1, 2] and world.master.status is tg.Status.RESCALING
    assert not rescaling.done
    world.run()
    assert rescaling.done and rescaling.error is None
    assert world.master.plan.slots == 4 and sorted(world.master.attempts[-1].slots) == [0, 1, 2, 3]
    old, new = world.master.attempts
    assert new.restored_epoch == 2
    assert old.ended_ms is not None and old.gone_ms == old.ended_ms + 700
    world.clock.at_ms += 30
    world.master.on_message(3, Heartbeat(3, {"v0[3]": {"records_in": 0}}))
    assert world.master.attempts[-1].first_record_ms is None
    world.master.on_message(3, Heartbeat(3, {"v0[3]": {"records_in": 8}}))
    assert world.master.attempts[-1].first_record_ms == new.running_ms + 30  # type: ignore[operator]
    order = taken(world)
    savepoint = find_restore_point(order.to).manifest.savepoint
    assert savepoint is not None and savepoint.graph == "at 4"


def test_it_can_be_rescaled_again_and_again() -> None:
    world = World().run()
    for slots in (3, 1, 2):
        rescaling = rescaled(world, slots)
        world.complete()
        world.done()
        world.turn()
        world.run()
        assert rescaling.done and world.master.plan.slots == slots
        world.complete(1_000)
    assert world.master.failures == []


def test_an_attempt_that_fails_while_the_job_is_rescaled_is_followed_by_one_at_the_new_parallelism() -> None:
    world = World(RESTARTS).run()
    rescaling = rescaled(world, 3)
    world.master.on_lost(1, "gone")
    assert world.master.status is tg.Status.RESTARTING
    world.turn(500)
    world.turn()
    world.run()
    assert rescaling.done and world.master.plan.slots == 3
    world.master.on_lost(1, "gone")
    world.turn(500)
    world.turn()
    world.run()
    assert world.master.plan.slots == 3, "and it stays so"


def test_a_job_that_is_rescaled_before_it_runs_is_stopped_when_it_does() -> None:
    world = World()
    rescaling = rescaled(world, 1)
    world.run()
    assert triggers(world) == [(1, "stop", True)] and not rescaling.done
    world.complete()
    world.done()
    world.turn()
    world.run()
    assert rescaling.done and world.master.plan.slots == 1


def test_only_one_at_a_time_and_none_at_the_end() -> None:
    world = World().run()
    rescaled(world, 3)
    assert rescaled(world, 4).error == "it is being rescaled already"
    first = world.master._rescaling
    world.master.cancel()
    assert first is not None and first.error == "it has been cancelled before"
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
    assert world.master.status is tg.Status.FINISHED and rescaling.error == "it has finished before"


@pytest.mark.parametrize("drain", [False, True])
def test_a_stop_meanwhile_is_obeyed(drain: bool) -> None:
    world = World().run()
    rescaling = rescaled(world, 3)
    world.master.stop(drain=drain)
    world.complete()
    world.done()
    if drain:       # the final epoch was no draining one: the job is drained when it runs again
        world.turn()
        world.run()
        assert rescaling.done and rescaling.error is None
        end_input(world)
        assert triggers(world)[-1] == (2, "drain", True)
        world.complete()
        world.done()
    assert world.master.status is tg.Status.STOPPED


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


# ------------------------------------------------------------------------------------- what may be deleted (rows 1, 2)


class Died(BaseException):
    pass


@pytest.mark.parametrize("survives", range(6))
def test_a_driver_that_dies_between_superseding_and_deleting_leaves_every_snapshot_whole(survives: int) -> None:
    """FAULTS row 1: it dies at any of its deletions; a late one of its own, after the successor began, does no harm."""
    world = World(retain=1).run()
    world.complete(1_000)
    count = 0

    def die(access: Access) -> Fault | None:
        nonlocal count
        if access.operation is Operation.DELETE:
            count += 1
            if count > survives:
                raise Died
        return None

    world.store.faults = die
    try:
        world.complete(1_000)
    except Died:
        assert survives < 5     # a manifest and four files
    world.store.faults = None
    world.check_reachable()
    next_driver = World(store=world.store, retain=1).run()
    assert next_driver.master.attempts[-1].restored_epoch == 2
    world.background.deliver()      # what the old one still had to do
    next_driver.check_reachable()
    newest = next_driver.complete(1_000)
    next_driver.turn()
    assert next_driver.epochs_kept() == [newest]
    next_driver.check_reachable()
    listed = {file.name for file in SnapshotCatalog(world.store).load(newest).files()}
    assert set(world.store.list(layout.STATE)) == listed, "and nothing else is left"


def acknowledged_with(world: World, slot: int, epoch: int, names: list[str]) -> Any:
    files = [{"name": name, "bytes": 5, "checksum": 0x8C8D5D4B, "index_bytes": 0, "index_checksum": 0, "form": "rows",
              "local": ""} for name in names]
    part = {"parallelism": 2, "states": [], "piece": {"subtask": slot, "key_groups": [0, 0], "files": files,
                                                      "item_counts": {}}}
    world.master.on_message(slot, messages.Acknowledge(0, slot, epoch, {"in": part}, {}))


def name_of(epoch: int, slot: int) -> str:
    return layout.state_file_name(attempt=1, operator="in", subtask=slot, epoch=epoch)


def test_an_aborted_epoch_takes_no_file_with_it_that_another_one_needs() -> None:
    """FAULTS row 2: epoch 2 is aborted while epoch 3, which builds on the same base, is under way."""
    world = World(tolerable_failures=5).run()
    bases = {slot: name_of(world.complete(1_000) if not slot else 1, slot) for slot in range(2)}
    world.turn(1_000)
    for slot in range(2):
        world.store.write(name_of(2, slot), [b"delta"])
    acknowledged_with(world, 0, 2, [bases[0], name_of(2, 0)])
    world.master.on_message(1, Decline(0, 1, 2, "disk full"))
    world.turn(1_000)           # epoch 3 is triggered
    acknowledged_with(world, 1, 2, [bases[1], name_of(2, 1)])      # late
    world.turn()
    assert name_of(2, 0) not in world.store.files and name_of(2, 1) in world.store.files, "who declined wrote nothing"
    assert all(base in world.store.files for base in bases.values())
    for slot in range(2):
        world.store.write(name_of(3, slot), [b"delta"])
        acknowledged_with(world, slot, 3, [bases[slot], name_of(3, slot)])
    world.turn()
    assert world.master.epochs[-1].completed_ms is not None
    for file in SnapshotCatalog(world.store).load(3).files():
        assert file.name in world.store.files


def test_a_slot_that_builds_on_an_aborted_epoch_completes_nothing() -> None:
    """A manifest that lists what is deleted must not exist, whoever is to blame."""
    world = World(tolerable_failures=5).run()
    world.turn(1_000)
    for slot in range(2):
        world.store.write(name_of(1, slot), [b"state"])
    acknowledged_with(world, 0, 1, [name_of(1, 0)])
    world.master.on_message(1, Decline(0, 1, 1, "disk full"))
    world.turn(1_000)
    acknowledged_with(world, 0, 2, [name_of(1, 0)])
    acknowledged_with(world, 1, 2, [])
    world.turn()
    assert "aborted epoch" in str(world.master.epochs[-1].aborted)
    assert world.epochs_kept() == []


def test_an_error_at_the_newest_manifest_fails_loudly() -> None:
    """FAULTS row 4: there is an older snapshot, and it is not taken."""
    world = World(retain=2).run()
    world.complete(1_000)
    world.complete(1_000)
    newest = "manifests/0000000002-a0000000001.json"
    world.store.faults = lambda access: Fail() if access == Access(Operation.READ, newest, access.byte_count) else None
    again = World(RESTARTS, store=world.store)
    assert again.master.status is tg.Status.FAILED and again.slots.attempts == []
    assert "StoreError" in again.master.failures[-1].message and newest in again.master.failures[-1].message


def test_reports_of_epochs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "KEPT_REPORTS", 3)
    world = World().run()
    for _ in range(5):
        world.complete(1_000)
    assert [report.epoch for report in world.master.epochs] == [3, 4, 5]
