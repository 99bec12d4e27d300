"""The snapshot store in the simulation: one memory for all processes, and a view of it for each.

The memory is `store/memory.py` with its fault hook. A `ProcessStore` pauses before every access and asks the faults what
goes wrong with it. Its process may die before the access, after it, or with half a file written. The witness sees every
change, and knows what must never be done.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from tidegate.errors import StoreError
from tidegate.store.memory import Access, Fail, Fault, Flip, LoseReply, MemoryStore, Operation, Tear
from tidegate.testing.simulation.background import STORE_STEP_US, Coroutines
from tidegate.testing.simulation.world import ProcessCrashed, World

if TYPE_CHECKING:
    from tidegate.testing.simulation.checks import Witness
    from tidegate.testing.simulation.processes import CoordinatorProcess, SlotProcess

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Mishap:
    """What goes wrong with one access. `fault` is one of the memory's; `position` (0 … 1) is the place of a tear or a flip.

    With `crash` the process dies: "before" the access, or "after" it, in which case a torn write stays torn.
    """

    fault: type[Fault] | None = None
    position: float = 0.0
    crash: str | None = None


class SharedMemory:
    """The files, and what goes wrong with the next access."""

    def __init__(self) -> None:
        self.memory = MemoryStore("simulation", faults=self._fault)
        self._mishap: Mishap | None = None

    def _fault(self, access: Access) -> Fault | None:
        mishap, self._mishap = self._mishap, None
        if mishap is None or mishap.fault is None:
            return None
        if mishap.fault is Tear:
            return Tear(int(mishap.position * access.byte_count)) if access.operation is Operation.WRITE else Fail()
        if mishap.fault is Flip:
            if access.operation is not Operation.READ or not access.byte_count:
                return None
            return Flip(int(mishap.position * access.byte_count * 8))
        return Fail() if mishap.fault is Fail else LoseReply()

    def suffer(self, mishap: Mishap | None, act: Callable[[], T]) -> T:
        self._mishap = mishap
        try:
            return act()
        finally:
            self._mishap = None


class ProcessStore:
    """The `store.base.Store` of one process."""

    def __init__(
        self,
        shared: SharedMemory,
        user: SlotProcess | CoordinatorProcess,
        *,
        world: World,
        coroutines: Coroutines,
        witness: Witness,
        mishap: Callable[[str, Operation, str], Mishap | None],
    ) -> None:
        self.address = shared.memory.address
        self._shared = shared
        self._memory = shared.memory
        self._user = user
        self._world = world
        self._coroutines = coroutines
        self._witness = witness
        self._mishap = mishap

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
        content = b"".join(chunks)
        return self._access(Operation.WRITE, name, lambda: self._memory.write(name, [content]))

    def create(self, name: str, content: bytes) -> None:
        self._access(Operation.CREATE, name, lambda: self._memory.create(name, content))

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        return self._access(Operation.READ, name, lambda: self._memory.read(name, offset, length))

    def list(self, folder: str) -> builtins.list[str]:
        return self._access(Operation.LIST, folder, lambda: self._memory.list(folder))

    def delete(self, name: str) -> None:
        self._access(Operation.DELETE, name, lambda: self._memory.delete(name))

    def size(self, name: str) -> int:
        return self._access(Operation.SIZE, name, lambda: self._memory.size(name))

    def sizes(self, names: Sequence[str]) -> builtins.list[int | None]:
        return self._access(Operation.SIZE, names[0] if names else "", lambda: self._memory.sizes(names))

    def _access(self, operation: Operation, name: str, act: Callable[[], T]) -> T:
        if self._coroutines.running is not None:
            self._coroutines.running.pause(self._world.delay_us("store", STORE_STEP_US))
        self._check_alive()
        self._witness.before_access(self._user.name, operation, name)
        mishap = self._mishap(self._user.name, operation, name)
        self._check_alive()
        if mishap is not None:
            self._world.tell(f"{self._user.name}: {operation.value} {name}: {_told(mishap)}")
            if mishap.crash == "before":
                self._die(f"before {operation.value} {name}")
        before = self._memory.files.get(name)
        try:
            result = self._shared.suffer(mishap, act)
        except StoreError:
            if self._memory.files.get(name) != before:
                self._witness.after_access(self._user.name, operation, name, before)
            if mishap is not None and mishap.crash is not None:
                self._die(f"within {operation.value} {name}")
            raise
        if operation in (Operation.WRITE, Operation.CREATE, Operation.DELETE):
            self._world.tell(f"{self._user.name}: {operation.value} {name}")
            self._witness.after_access(self._user.name, operation, name, before)
        if mishap is not None and mishap.crash is not None:
            self._die(f"after {operation.value} {name}")
        return result

    def _check_alive(self) -> None:
        if self._user.crashed:
            raise ProcessCrashed

    def _die(self, reason: str) -> None:
        self._user.crash(reason)
        raise ProcessCrashed


def _told(mishap: Mishap) -> str:
    fault = "" if mishap.fault is None else mishap.fault.__name__.lower()
    crash = "" if mishap.crash is None else f"crash {mishap.crash}"
    return " and ".join(filter(None, (fault, crash)))
