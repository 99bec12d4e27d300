"""The store of snapshots: seven methods over names, and what each guarantees.

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

import builtins
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, runtime_checkable


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

    def sizes(self, names: Sequence[str]) -> builtins.list[int | None]:
        """Return the size of each file in bytes, in the order of the names; None for what is not there."""


@runtime_checkable
class ObjectStore(Store, Protocol):
    """A store on a server that may not be able to keep the contract, and where uploads may be broken off."""

    def check(self) -> None:
        """JobError if the server doesn't do what `create` needs, StoreError if nothing can be written."""

    def remove_uploads(self, unwanted: Callable[[str], bool]) -> builtins.list[str]:
        """Remove the parts of unfinished writes to unwanted names, and return these names."""


class CountedStore:
    """A store that counts the bytes that were read and written. `moved` is called after each read and each chunk."""

    def __init__(self, store: Store, moved: Callable[[], None] = lambda: None) -> None:
        self.read_bytes = 0
        self.written_bytes = 0
        self.address = store.address
        self._store = store
        self._moved = moved
        self.create, self.list, self.delete = store.create, store.list, store.delete
        self.size, self.sizes = store.size, store.sizes

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        content = self._store.read(name, offset, length)
        self.read_bytes += len(content)
        self._moved()
        return content

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
        return self._store.write(name, self._counted(chunks))

    def _counted(self, chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for chunk in chunks:
            yield chunk
            self.written_bytes += len(chunk)  # the store asks for the next chunk when it has taken this one
            self._moved()
