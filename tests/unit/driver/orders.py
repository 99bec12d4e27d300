"""Orders for savepoints, and what the coordinator makes of them, for tests of a coordinator in memory."""

from __future__ import annotations

import itertools

from tests.unit.driver.test_coordinator import World
from tidegate.control import messages
from tidegate.control.messages import Trigger
from tidegate.driver.savepoints import SavepointOrder
from tidegate.store.memory import MemoryStore
from tidegate.store.opening import open_store

_numbers = itertools.count()


def new_folder() -> str:
    return f"memory://test-coordinator-savepoints-{next(_numbers)}"


def files_at(address: str) -> dict[str, bytes]:
    store = open_store(address)
    assert isinstance(store, MemoryStore)
    return store.files


def ordered(world: World, to: str | None = None) -> SavepointOrder:
    order = SavepointOrder(to or new_folder())
    world.coordinator.savepoints.take(order)
    world.held.deliver()  # the folder is empty
    return order


def taken(world: World) -> SavepointOrder:
    order = ordered(world)
    world.complete()
    world.held.deliver()
    assert order.info is not None
    return order


def triggers(world: World) -> list[tuple[int, str | None, bool]]:
    return [
        (message.epoch, message.ending, message.full)
        for slot, message in world.slots.said
        if slot == 0 and isinstance(message, Trigger)
    ]


def end_input(world: World) -> None:
    for slot in range(world.coordinator.plan.slots):
        world.coordinator.on_message(slot, messages.InputEnded(0, slot))
