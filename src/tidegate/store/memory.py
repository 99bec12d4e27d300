"""The in-memory twin of the stores, for tests and the simulation.

It keeps the same contract, and breaks it when a fault hook says so. The hook is called before each operation and returns a
fault or None. All randomness is in the hook, so a seeded hook gives the same trace every time. If the hook raises, nothing
is done and the caller gets the exception: so a simulation ends a process in the middle of a call.

Operations are atomic between threads. It does not survive its process.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from tidegate.errors import AlreadyExists, CorruptFile, NotFound, StoreError
from tidegate.store.layout import check_name


class Operation(Enum):
    WRITE = "write"
    CREATE = "create"
    READ = "read"
    LIST = "list"
    DELETE = "delete"
    SIZE = "size"


@dataclass(frozen=True, slots=True)
class Access:
    """The next operation. `byte_count` is what a write or create would store, or a read would return; 0 otherwise."""

    operation: Operation
    name: str
    byte_count: int


@dataclass(frozen=True, slots=True)
class Fail:
    """Nothing is done; the caller gets StoreError."""


@dataclass(frozen=True, slots=True)
class LoseReply:
    """The operation is done, but the caller gets StoreError, so that it doesn't know the outcome."""


@dataclass(frozen=True, slots=True)
class Tear:
    """Only the first `kept_bytes` of a write reach the store. The caller gets StoreError; after a `silent` tear
    it gets no error, as if the process died later or the disk lost the rest."""

    kept_bytes: int
    silent: bool = False


@dataclass(frozen=True, slots=True)
class Flip:
    """One bit of the content that a read returns is wrong."""

    bit_index: int


Fault: TypeAlias = Fail | LoseReply | Tear | Flip
FaultHook: TypeAlias = Callable[[Access], Fault | None]


class MemoryStore:
    """`files` is the content; a test may read and damage it."""

    def __init__(self, name: str = "memory", *, faults: FaultHook | None = None) -> None:
        self.files: dict[str, bytes] = {}
        self.faults = faults
        self.address = f"memory://{name}"
        self._name = name
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"MemoryStore({self._name!r})"

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
        check_name(name)
        content = b"".join(chunks)
        with self._operation(Operation.WRITE, name, len(content)) as fault:
            if isinstance(fault, Tear):
                self._put(name, content[: fault.kept_bytes])
                if not fault.silent:
                    raise StoreError(f"write {name} in {self.address}: torn after {fault.kept_bytes} bytes")
            else:
                self._put(name, content)
        return len(content)

    def create(self, name: str, content: bytes) -> None:
        check_name(name)
        with self._operation(Operation.CREATE, name, len(content)) as fault, self._lock:
            assert not isinstance(fault, Tear), "a create is atomic: it can fail or lose its reply, not tear"
            if name in self.files:
                raise AlreadyExists(f"{name} is already in {self.address}")
            self.files[name] = bytes(content)

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        assert offset >= 0 and (length is None or length >= 0)
        content = self._content(name)
        stop = max(len(content), offset) if length is None else offset + length
        with self._operation(Operation.READ, name, stop - offset) as fault:
            if stop > len(content):
                raise CorruptFile(f"{name} in {self.address} has {len(content)} bytes, not {stop}")
            if not isinstance(fault, Flip):
                return content[offset:stop]
            damaged = bytearray(content[offset:stop])
            damaged[fault.bit_index // 8] ^= 1 << fault.bit_index % 8
            return bytes(damaged)

    def list(self, folder: str) -> builtins.list[str]:
        prefix = check_name(folder) + "/" if folder else ""
        with self._operation(Operation.LIST, folder), self._lock:
            return sorted(name for name in self.files if name.startswith(prefix))

    def delete(self, name: str) -> None:
        check_name(name)
        with self._operation(Operation.DELETE, name), self._lock:
            self.files.pop(name, None)

    def size(self, name: str) -> int:
        content = self._content(name)
        with self._operation(Operation.SIZE, name):
            return len(content)

    def sizes(self, names: Sequence[str]) -> builtins.list[int | None]:
        with self._operation(Operation.SIZE, names[0] if names else ""), self._lock:
            contents = [self.files.get(check_name(name)) for name in names]
        return [None if content is None else len(content) for content in contents]

    def _put(self, name: str, content: bytes) -> None:
        with self._lock:
            self.files[name] = content

    def _content(self, name: str) -> bytes:
        try:
            return self.files[check_name(name)]
        except KeyError:
            raise NotFound(f"{name} is not in {self.address}") from None

    @contextmanager
    def _operation(self, operation: Operation, name: str, byte_count: int = 0) -> Iterator[Fault | None]:
        """Ask the hook for a fault. Raise a `Fail` before the operation, and a `LoseReply` after it."""
        fault = None if self.faults is None else self.faults(Access(operation, name, byte_count))
        assert not isinstance(fault, Flip) or operation is Operation.READ, "only what is read can be flipped"
        assert not isinstance(fault, Tear) or operation in (Operation.WRITE, Operation.CREATE), "only writes tear"
        if isinstance(fault, Fail):
            raise StoreError(f"{operation.value} {name} in {self.address}: failed, as the test asked")
        yield fault
        if isinstance(fault, LoseReply):
            raise StoreError(f"{operation.value} {name} in {self.address}: no reply, as the test asked")
