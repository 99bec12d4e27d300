"""What a job begins with, in the coordinator: a savepoint, its own snapshots, and a savepoint that was given away."""

from __future__ import annotations

import pytest

import tidegate as tg
from tests.unit.driver.orders import files_at, new_folder, taken
from tests.unit.driver.test_coordinator import RESTARTS, World
from tidegate.control.messages import Deploy
from tidegate.driver.attempts import Restore
from tidegate.snapshots.catalog import SnapshotCatalog
from tidegate.snapshots.finding import find_snapshot, restored_from
from tidegate.store import layout
from tidegate.store.memory import MemoryStore
from tidegate.store.opening import open_store


def test_a_job_begins_with_a_savepoint_and_goes_on_from_its_own_snapshots() -> None:
    to = taken(World().run()).to
    store = MemoryStore()
    world = World(store=store, restore=Restore(path=to))
    report = world.coordinator.attempts[-1]
    assert (report.restored_epoch, report.restored_from) == (1, to)
    assert world.coordinator.attempt == 2, "attempts go on above the savepoint's, so that names stay unique"
    world.run()
    deploys = [message for _, message in world.slots.said if isinstance(message, Deploy)]
    assert [(message.epoch, message.restore_from) for message in deploys] == [(1, to)] * 2
    assert world.complete(1_000) == 2, "epochs go on above the savepoint's"
    manifest = SnapshotCatalog(store).load(2)
    origin = restored_from(to, find_snapshot(to))
    assert manifest.restored_from == origin

    again = World(store=store, restore=Restore(path=to)).run()
    assert again.coordinator.attempts[-1].restored_epoch == 2 and again.coordinator.attempts[-1].restored_from is None
    assert [message.restore_from for _, message in again.slots.said if isinstance(message, Deploy)] == [None] * 2
    again.complete(1_000)
    assert SnapshotCatalog(store).load(3).restored_from == origin, "it is handed down"
    without = World(store=store)
    assert without.coordinator.attempts[-1].restored_epoch == 3


def test_an_attempt_that_fails_before_the_first_own_snapshot_begins_with_the_savepoint_again() -> None:
    to = taken(World().run()).to
    world = World(RESTARTS, restore=Restore(path=to)).run()
    world.turn(1_000)
    world.coordinator.on_lost(0, "gone")
    world.turn(500)
    world.turn()
    world.run()
    assert [report.restored_epoch for report in world.coordinator.attempts] == [1, 1]
    world.turn(1_000)
    assert [report.epoch for report in world.coordinator.epochs] == [2, 3]


def test_once_the_job_has_snapshots_of_its_own_a_restart_doesnt_look_at_the_savepoint() -> None:
    to = taken(World().run()).to
    world = World(RESTARTS, restore=Restore(path=to)).run()
    world.complete(1_000)
    files_at(to)[layout.SAVEPOINT] = b"torn"
    world.coordinator.on_lost(0, "gone")
    world.turn(500)
    world.turn()
    world.run()
    assert world.coordinator.attempts[-1].restored_epoch == 2
    world.complete(1_000)
    assert SnapshotCatalog(world.store).load(3).restored_from is not None


@pytest.mark.parametrize("begun_with", ["nothing", "another savepoint"])
def test_snapshots_that_come_from_elsewhere_are_a_contradiction_and_nobody_is_fenced_off(begun_with: str) -> None:
    to, other = taken(World().run()).to, taken(World().run()).to
    first = World(restore=None if begun_with == "nothing" else Restore(path=other)).run()
    first.complete(1_000)
    attempts = SnapshotCatalog(first.store).attempts()
    second = World(store=first.store, restore=Restore(path=to))
    assert second.coordinator.status is tg.Status.FAILED
    message = second.coordinator.failures[-1].message
    assert "RestoreError" in message and "Snapshots(to=…)" in message and "omit restore_from" in message
    assert SnapshotCatalog(first.store).attempts() == attempts
    first.complete(1_000)


@pytest.mark.parametrize("path", ["memory://nothing-at-all", "memory://nothing-at-all/savepoint.json"])
def test_a_path_with_nothing_there_fails_before_anything_is_claimed_or_deployed(path: str) -> None:
    world = World(RESTARTS, restore=Restore(path=path))
    assert world.coordinator.status is tg.Status.FAILED
    assert "NotFound" in world.coordinator.failures[-1].message
    assert world.slots.attempts == [] and world.store.files == {}


def test_a_savepoint_that_cant_be_read_fails_before_anything_is_claimed_or_deployed() -> None:
    to = taken(World().run()).to
    files_at(to)[layout.SAVEPOINT] = files_at(to)[layout.SAVEPOINT][:-10]
    world = World(RESTARTS, restore=Restore(path=to))
    assert world.coordinator.status is tg.Status.FAILED
    assert "CorruptFile" in world.coordinator.failures[-1].message
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
    assert again.coordinator.attempts[-1].restored_epoch == 2, "it is not missed"


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
    world.complete(1_000)  # and the driver dies before its background gets to it
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
    assert "claim=True" in claimed.coordinator.failures[-1].message
    world = World(restore=Restore(path=address)).run()
    restore_from = f"{address}/manifests/0000000001-a0000000001.json"
    assert [message.restore_from for _, message in world.slots.said if isinstance(message, Deploy)] == [restore_from] * 2
    world.complete(1_000)
    other.complete(1_000)
    other.complete(1_000)
    again = World(store=world.store, restore=Restore(path=address))
    assert again.coordinator.attempts[-1].restored_epoch == 2, "its own wins, though the other job has gone on"
