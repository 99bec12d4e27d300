"""A backend's own files in a snapshot: uploading, downloading, and reading them as rows.

RocksDB keeps state in files that never change once they are written. A snapshot lists the files of the frozen version, and
uploads only those that its base doesn't list. A subtask that continues with its own piece gets the files back as they are;
all other readers (another parallelism, another backend, the CLI) read rows from them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tidegate.errors import CorruptFile
from tidegate.scratch import ScratchFolder
from tidegate.snapshots.manifest import FileEntry
from tidegate.state.rocksdb import NATIVE, native_sections
from tidegate.state.sections import NativeFile, Section, StateInfo, StateKind
from tidegate.store.base import Readable, Store
from tidegate.store.checked import CHUNK_BYTES, checked_chunks


def upload(store: Store, file: NativeFile, *, name: str) -> FileEntry:
    checksum = 0

    def chunks() -> Iterator[bytes]:
        nonlocal checksum
        with file.path.open("rb") as content:
            while chunk := content.read(CHUNK_BYTES):
                checksum = zlib.crc32(chunk, checksum)
                yield chunk

    size_bytes = store.write(name, chunks())
    return FileEntry(name=name, bytes=size_bytes, checksum=checksum, form=NATIVE, local=file.local)


def download(store: Readable, files: Iterable[FileEntry], folder: Path) -> None:
    """Write the files into the folder under the backend's names for them. A file whose checksum is wrong is removed."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for file in files:
        path = folder / file.local
        try:
            with path.open("wb") as target:
                target.writelines(checked_chunks(store, file))
        except CorruptFile:
            path.unlink()
            raise


def download_folder(under: str | None) -> ScratchFolder:
    """Return a new folder for files to be downloaded, under this one or the system's folder for temporary files."""
    return ScratchFolder("tidegate-native-", under=under)


class NativeReader:
    """The keyed states of a native piece, as sections. The files are downloaded when they are first needed, to a new folder
    under `scratch`."""

    def __init__(
        self,
        store: Readable,
        files: Sequence[FileEntry],
        states: Sequence[StateInfo],
        *,
        key_group_count: int,
        scratch: str | None = None,
    ) -> None:
        self._store = store
        self._files = files
        self._states = {info.name: info for info in states if info.kind is StateKind.KEYED}
        self._key_group_count = key_group_count
        self._scratch = scratch
        self._folder: ScratchFolder | None = None

    def read_sections(self, state: str, groups: range) -> Iterator[Section]:
        info = self._states.get(state)
        if info is None:
            return
        if self._folder is None:
            self._folder = download_folder(self._scratch)
            download(self._store, self._files, self._folder.path / "files")
        yield from native_sections(
            self._folder.path / "files",
            [info],
            key_type=info.schema.field("key").type,
            key_group_count=self._key_group_count,
            groups=groups,
        )

    def row_count(self, state: str) -> int:
        """Return 0: the number is unknown, and not needed, since there is only one layer."""
        return 0
