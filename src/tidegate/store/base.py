"""The store of snapshots: six methods over names, and what each guarantees.

A name is a relative path with forward slashes, made only by `store.layout`. Guarantees every store gives:

- `write` is durable when it returns. A crash during a write may leave a torn file under that name, so names are unique by
  attempt, and a file counts only if a manifest lists it with its length and checksum.
- `create` is atomic and exclusive: afterwards the name holds exactly these bytes, or no bytes of this call. If several
  processes create the same name, one succeeds and the others get `AlreadyExists`.
- `read` returns exactly the requested bytes or raises `StoreError` (`NotFound` if there is no such name).
- `list` returns the names under a folder, sorted, including every `create` and `write` that has returned.
- `delete` of a missing name is not an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Readable(Protocol):
    """The part of a store that a restore needs."""

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes: ...


class Store(Readable, Protocol):
    @property
    def address(self) -> str:
        """Return the URI that opens this store again."""

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
        """Write the chunks in order, durably, and return the number of bytes."""

    def create(self, name: str, content: bytes) -> None: ...

    def list(self, folder: str) -> list[str]: ...

    def delete(self, name: str) -> None: ...

    def size(self, name: str) -> int: ...


class CountedReads:
    """A store that counts the `bytes` that were read from it."""

    def __init__(self, store: Store) -> None:
        self.bytes = 0
        self.address = store.address
        self._store = store
        self.write, self.create, self.list = store.write, store.create, store.list
        self.delete, self.size = store.delete, store.size

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        content = self._store.read(name, offset, length)
        self.bytes += len(content)
        return content
