"""Reading a whole file of a snapshot, piece by piece, against what is listed of it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from tidegate.errors import CorruptFile
from tidegate.store.base import Readable
from tidegate.store.manifest import FileEntry

CHUNK_BYTES = 4 * 1024 * 1024


def checked_chunks(store: Readable, file: FileEntry, *, listed_by: str = "its manifest") -> Iterator[bytes]:
    """The file's bytes in order. CorruptFile behind the last of them, where they are not those that are listed: who uses
    them before that has to take it back."""
    checksum = 0
    for offset in range(0, file.bytes, CHUNK_BYTES):
        chunk = store.read(file.name, offset, min(CHUNK_BYTES, file.bytes - offset))
        checksum = zlib.crc32(chunk, checksum)
        yield chunk
    if checksum != file.checksum:
        raise CorruptFile(f"{file.name}: its checksum is not the one that {listed_by} lists")
