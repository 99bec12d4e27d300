"""What the coordinator may delete, and what it must not (docs/promises.md, rows 1, 2 and 4)."""

from __future__ import annotations

from typing import Any

import pytest

import tidegate as tg
from tests.unit.driver.test_coordinator import RESTARTS, World
from tidegate.control import messages
from tidegate.control.messages import Decline
from tidegate.driver import reports
from tidegate.snapshots.catalog import SnapshotCatalog
from tidegate.snapshots.manifest import FileEntry, OperatorEntry, PieceEntry
from tidegate.store import layout
from tidegate.store.memory import Access, Fail, Fault, Operation


class Died(BaseException):
    pass


@pytest.mark.parametrize("survives", range(6))
def test_a_driver_that_dies_between_superseding_and_deleting_leaves_every_snapshot_whole(survives: int) -> None:
    """docs/promises.md, row 1: it dies at any of its deletions; a late one, after the successor began, does no harm."""
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
        assert survives < 5  # a manifest and four files
    world.store.faults = None
    world.check_reachable()
    next_driver = World(store=world.store, retain=1).run()
    assert next_driver.coordinator.attempts[-1].restored_epoch == 2
    world.background.deliver()  # what the old one still had to do
    next_driver.check_reachable()
    newest = next_driver.complete(1_000)
    next_driver.turn()
    assert next_driver.epochs_kept() == [newest]
    next_driver.check_reachable()
    listed = {file.name for file in SnapshotCatalog(world.store).load(newest).files()}
    assert set(world.store.list(layout.STATE)) == listed, "and nothing else is left"


def acknowledged_with(world: World, slot: int, epoch: int, names: list[str]) -> Any:
    files = tuple(FileEntry(name=name, bytes=5, checksum=0x8C8D5D4B) for name in names)
    piece = PieceEntry(subtask=slot, key_groups=(0, 0), files=files, item_counts={})
    part = OperatorEntry(parallelism=2, states=(), pieces=(piece,))
    world.coordinator.on_message(slot, messages.Acknowledge(0, slot, epoch, {"in": part}))


def name_of(epoch: int, slot: int) -> str:
    return layout.state_file_name(attempt=1, operator="in", subtask=slot, epoch=epoch)


def test_an_aborted_epoch_takes_no_file_with_it_that_another_one_needs() -> None:
    """docs/promises.md, row 2: epoch 2 is aborted while epoch 3, which builds on the same base, is under way."""
    world = World(tolerable_failures=5).run()
    bases = {slot: name_of(world.complete(1_000) if not slot else 1, slot) for slot in range(2)}
    world.turn(1_000)
    for slot in range(2):
        world.store.write(name_of(2, slot), [b"delta"])
    acknowledged_with(world, 0, 2, [bases[0], name_of(2, 0)])
    world.coordinator.on_message(1, Decline(0, 1, 2, "disk full"))
    world.turn(1_000)  # epoch 3 is triggered
    acknowledged_with(world, 1, 2, [bases[1], name_of(2, 1)])  # late
    world.turn()
    assert name_of(2, 0) not in world.store.files and name_of(2, 1) in world.store.files, "who declined wrote nothing"
    assert all(base in world.store.files for base in bases.values())
    for slot in range(2):
        world.store.write(name_of(3, slot), [b"delta"])
        acknowledged_with(world, slot, 3, [bases[slot], name_of(3, slot)])
    world.turn()
    assert world.coordinator.epochs[-1].completed_ms is not None
    for file in SnapshotCatalog(world.store).load(3).files():
        assert file.name in world.store.files


def test_a_slot_that_builds_on_an_aborted_epoch_completes_nothing() -> None:
    """A manifest that lists what is deleted must not exist, whoever is to blame."""
    world = World(tolerable_failures=5).run()
    world.turn(1_000)
    for slot in range(2):
        world.store.write(name_of(1, slot), [b"state"])
    acknowledged_with(world, 0, 1, [name_of(1, 0)])
    world.coordinator.on_message(1, Decline(0, 1, 1, "disk full"))
    world.turn(1_000)
    acknowledged_with(world, 0, 2, [name_of(1, 0)])
    acknowledged_with(world, 1, 2, [])
    world.turn()
    assert f"NotFound: {name_of(1, 0)}" in str(world.coordinator.epochs[-1].aborted)
    assert world.epochs_kept() == []


def test_an_error_at_the_newest_manifest_fails_loudly() -> None:
    """docs/promises.md, row 4: there is an older snapshot, and it is not taken."""
    world = World(retain=2).run()
    world.complete(1_000)
    world.complete(1_000)
    newest = "manifests/0000000002-a0000000001.json"
    world.store.faults = lambda access: Fail() if access == Access(Operation.READ, newest, access.byte_count) else None
    again = World(RESTARTS, store=world.store)
    assert again.coordinator.status is tg.Status.FAILED and again.slots.attempts == []
    assert "StoreError" in again.coordinator.failures[-1].message and newest in again.coordinator.failures[-1].message


def test_reports_of_epochs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "KEPT_REPORTS", 3)
    world = World().run()
    for _ in range(5):
        world.complete(1_000)
    assert [report.epoch for report in world.coordinator.epochs] == [3, 4, 5]
