"""Where snapshots are kept: six methods over names, and what each guarantees.

A name is a relative path with forward slashes, made only by `store.layout`. Guarantees every store gives:

- `write` is durable when it returns; a crash within it may leave a torn file under that name, so names are unique by
  attempt and nothing is believed that a manifest does not list with its length and checksum.
- `create` is atomic and exclusive: afterwards the name holds exactly these bytes, or nothing of this call's, and of
  several callers one wins; the others get `AlreadyExists`.
- `read` returns exactly the bytes asked for or raises `StoreError` (`NotFound` where there is no such name).
- `list` returns the names under a folder, sorted, including every `create` and `write` that has returned.
- `delete` of a name that isn't there is no error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Readable(Protocol):
    """All that a restore needs of a store."""

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes: ...


class Store(Readable, Protocol):
    @property
    def address(self) -> str:
        """The URI a user would give to reach this store again."""

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
        """Writes the chunks in order, durably; returns the bytes written."""

    def create(self, name: str, content: bytes) -> None: ...

    def list(self, folder: str) -> list[str]: ...

    def delete(self, name: str) -> None: ...

    def size(self, name: str) -> int: ...


class CountedReads:
    """A store, and how many `bytes` were read from it."""

    def __init__(self, store: Store) -> None:
        self.bytes = 0
        self._store = store
        self.write, self.create, self.list = store.write, store.create, store.list
        self.delete, self.size = store.delete, store.size

    @property
    def address(self) -> str:
        return self._store.address

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        content = self._store.read(name, offset, length)
        self.bytes += len(content)
        return content
