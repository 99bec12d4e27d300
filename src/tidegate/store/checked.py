"""Reading a whole file of a snapshot in chunks, and checking it against the manifest."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Protocol

from tidegate.errors import CorruptFile
from tidegate.store.base import Readable

CHUNK_BYTES = 4 * 1024 * 1024


class Listed(Protocol):
    """What a manifest lists about a file. `checksum` is the CRC-32 of all of it."""

    @property
    def name(self) -> str: ...

    @property
    def bytes(self) -> int: ...

    @property
    def checksum(self) -> int: ...


def checked_chunks(store: Readable, file: Listed, *, listed_by: str = "its manifest") -> Iterator[bytes]:
    """Yield the file's bytes in order. After the last chunk, raise CorruptFile if the checksum is wrong: a caller that used
    chunks before then must undo that."""
    checksum = 0
    for offset in range(0, file.bytes, CHUNK_BYTES):
        chunk = store.read(file.name, offset, min(CHUNK_BYTES, file.bytes - offset))
        checksum = zlib.crc32(chunk, checksum)
        yield chunk
    if checksum != file.checksum:
        raise CorruptFile(f"{file.name}: its checksum is not the one that {listed_by} lists")
