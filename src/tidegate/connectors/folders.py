"""Folders of input files: addresses, listings, and the interfaces of a file format and an open file.

A file is named by its path relative to the folder. Names that start with `_` or `.` or end in `.tmp` are unfinished
files, and aren't listed. A position within a file is a number of rows or of bytes, depending on the format.

Not here: the formats (parquet_source.py, lines.py), and which reader reads which file when (files.py).
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress
from typing import TypeAlias

import pyarrow as pa
import pyarrow.fs as arrow_fs

from tidegate.errors import JobError, SourceError


def address_of(path: object) -> str:
    """Return a URI as it is, and a local path made absolute: slots and driver have different working folders."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not text or not isinstance(text, str):
        raise JobError(f"path={path!r}: give a folder, a file or a URI, such as 'events/' or 's3://bucket/events'")
    return text if "://" in text else os.path.abspath(text)


def locate(address: str) -> tuple[arrow_fs.FileSystem, str]:
    """Return the file system of an address, and the path within it."""
    if "://" not in address:
        return arrow_fs.LocalFileSystem(), address
    try:
        file_system, path = arrow_fs.FileSystem.from_uri(address)
    except pa.ArrowInvalid as error:
        raise JobError(f"no file system for {address!r}: {error}") from error
    return file_system, path.rstrip("/") or "/"


# Returns for each of some names in the folder whether the file is wanted. Called with every name once.
Wanted: TypeAlias = Callable[[Sequence[str]], Sequence[bool]]


@dataclass(frozen=True, slots=True)
class Found:
    """A file as it was when the folder was listed."""

    name: str
    size: int
    mtime_ns: int


class InputFolder:
    """Lists and opens the files under an address, which may also be the address of a single file."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._files, self._root = locate(address)
        self._is_file = False

    @property
    def is_local(self) -> bool:
        return isinstance(self._files, arrow_fs.LocalFileSystem)

    def exists(self) -> bool:
        return bool(self._files.get_file_info(self._root).type != arrow_fs.FileType.NotFound)

    def list(self, wanted: Wanted) -> list[Found]:
        """Return the wanted files. Sizes are read for these only, because that makes listing a large folder slow."""
        root = self._files.get_file_info(self._root)
        self._is_file = root.is_file
        if root.is_file:
            return [Found(root.base_name, root.size, root.mtime_ns or 0)] if wanted([root.base_name])[0] else []
        if self.is_local:
            return list(_list_local(self._root, "", wanted))
        selector = arrow_fs.FileSelector(self._root, recursive=True, allow_not_found=True)
        infos = {
            info.path[len(self._root) :].lstrip("/"): info for info in self._files.get_file_info(selector) if info.is_file
        }
        names = [name for name in infos if not any(map(_is_hidden, name.split("/")))]
        return [Found(name, infos[name].size, infos[name].mtime_ns or 0) for name in compress(names, wanted(names))]

    def open(self, name: str) -> pa.NativeFile:
        return self._files.open_input_file(self._root if self._is_file else f"{self._root.rstrip('/')}/{name}")


def _is_hidden(name: str) -> bool:
    return name.startswith(("_", ".")) or name.endswith(".tmp")


def _list_local(folder: str, prefix: str, wanted: Wanted) -> Iterator[Found]:
    try:
        with os.scandir(folder) as entries:
            there = {prefix + entry.name: entry for entry in entries if not _is_hidden(entry.name)}
    except FileNotFoundError:
        return  # Not created yet, or gone since it was listed. The reader reports missing files that it still needs.
    folders = {name for name, entry in there.items() if entry.is_dir(follow_symlinks=False)}
    names = [name for name in there if name not in folders]
    for name in compress(names, wanted(names)):
        with suppress(FileNotFoundError):
            if there[name].is_file():
                status = there[name].stat()
                yield Found(name, status.st_size, status.st_mtime_ns)
    for name in folders:
        yield from _list_local(there[name].path, name + "/", wanted)


class OpenFile(ABC):
    """A file that is being read. `position` is behind the last record returned; `size` is the position of the end."""

    found: Found
    position: int
    size: int

    @abstractmethod
    def read(self, max_rows: int) -> pa.RecordBatch | None:
        """Return the next records, or None if there is no complete one."""

    @property
    @abstractmethod
    def at_rest(self) -> bool:
        """Whether the file can be closed now and opened again at its position without reading anything twice."""

    @abstractmethod
    def close(self) -> None: ...


class FileFormat(ABC):
    """A format of input files. `grows`: files may get more records. `most_open`: how many files may be open at a time."""

    schema: pa.Schema
    grows: bool
    most_open: int

    @abstractmethod
    def open(self, folder: InputFolder, found: Found, *, position: int, final: bool) -> OpenFile | None:
        """Open a file; None if it isn't complete enough to be read. `final`: nothing will be added to the file."""


def shrunk(where: str, *, read: int, now: int, unit: str = "bytes") -> SourceError:
    return SourceError(
        f"{where} has {now} {unit}, but had {read} of them before: it was truncated or replaced. Restore the old file, and "
        "give new content a new name: files may only grow"
    )
