"""Folders of files that grow, as sources.

A split is a file, named by its path relative to the folder. Its owner is `crc32(name) % parallelism`, so every reader
lists the folder by itself and no two read one file. What a file holds, and when it is complete enough to be read, is the
format's affair (parquet_source.py, lines.py).

The offset of a file is one integer: `n` says that n rows (Parquet) or bytes (lines) were read and that more is there;
`~n`, which is negative, that n was all there was. Files that were read to their end stay in the offsets for good: that
is what keeps them from being read twice.

Invariants:
- An offset is right behind the last record that `poll` returned, whatever was read ahead.
- What was read never changes: a file that shrank, or that vanished before its end was reached, is a `SourceError`.

Not here: deletion of files that were read. Listing and reading happen in the slot's loop: object stores work, at the
price of their latency.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from tidegate.connectors.folders import FileFormat, Found, InputFolder, OpenFile, shrunk
from tidegate.dataflow.contracts import Offset, Source, SourceContext, SourceReader
from tidegate.errors import SourceError


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSource(Source):
    address: str
    form: FileFormat
    stop_at_end: bool
    discover_every_ms: int

    @property
    def schema(self) -> pa.Schema:
        return self.form.schema

    @property
    def bounded(self) -> bool:
        return self.stop_at_end

    def open(self, context: SourceContext) -> SourceReader:
        return FolderReader(self, InputFolder(self.address), context)


class FolderReader(SourceReader):
    """Reads one file at a time: those already started first, then by (modification time, name).

    Files with something new wait in a queue. A file is read up to the size it had when its turn came; what was added
    meanwhile waits for another turn, so that a file which is written all the time doesn't keep the others waiting.
    """

    def __init__(self, source: FolderSource, folder: InputFolder, context: SourceContext) -> None:
        if source.stop_at_end and not folder.exists():
            raise SourceError(f"there is no {source.address} to read to its end")
        self._source = source
        self._folder = folder
        self._context = context
        self._offsets: dict[str, int] = {name: int(offset) for name, offset in context.restored.items()
                                         if self._owns(name)}
        self._queue: dict[str, Found] = {}
        self._waiting: dict[str, Found] = {}    # Read as far as possible when they looked like this.
        self._current: OpenFile | None = None
        self._discover()

    def poll(self, max_rows: int) -> pa.RecordBatch | None:
        # A clock that was set back must not stop discovery for as long.
        if not (self._source.stop_at_end
                or 0 <= self._context.now_ms() - self._discovered_ms < self._source.discover_every_ms):
            self._discover()
        while self._current is not None or self._queue:
            file = self._current or self._open(self._queue.pop(next(iter(self._queue))))
            if file is None:
                continue
            self._current = file
            batch = file.read(max_rows)
            if batch is None or file.position == file.size:
                self._close_current()
            elif file.position:
                self._offsets[file.found.name] = file.position
            if batch is not None:
                return batch
        return None

    def _open(self, found: Found) -> OpenFile | None:
        position, _ = self._position(found.name)
        try:
            file = self._source.form.open(self._folder, found, position=position, final=self._source.stop_at_end)
        except FileNotFoundError as error:
            if position == 0:
                return None    # Taken away before anything of it was read.
            raise self._vanished(found.name) from error
        if file is None:
            self._waiting[found.name] = found
        return file

    def _close_current(self) -> None:
        file = self._current
        assert file is not None
        name = file.found.name
        if file.position == file.size:
            self._offsets[name] = file.position if name in self._queue else ~file.position
        else:
            self._waiting[name] = file.found
        file.close()
        self._current = None

    def _discover(self) -> None:
        self._discovered_ms = self._context.now_ms()
        found_files = {found.name: found for found in self._folder.list(self._may_have_more)}
        for name, offset in self._offsets.items():
            if offset >= 0 and name not in found_files:
                raise self._vanished(name)
        fresh = [found for found in found_files.values() if self._has_more(found)]
        for found in sorted(fresh, key=lambda found: (found.name not in self._offsets, found.mtime_ns, found.name)):
            self._queue[found.name] = found

    def _may_have_more(self, name: str) -> bool:
        return self._owns(name) and (self._source.form.grows or self._offsets.get(name, 0) >= 0)

    def _has_more(self, found: Found) -> bool:
        if self._source.form.grows:
            position, was_at_end = self._position(found.name)
            if found.size < position:
                raise shrunk(f"{found.name} in {self._folder.address}", read=position, now=found.size)
            if found.size == position:
                return False
            if was_at_end:
                self._offsets[found.name] = position
        if self._current is not None and self._current.found.name == found.name:
            return self._source.form.grows and found.size > self._current.size
        return self._waiting.get(found.name) != found

    def _owns(self, name: str) -> bool:
        return zlib.crc32(name.encode()) % self._context.parallelism == self._context.subtask

    def _position(self, name: str) -> tuple[int, bool]:
        """How much of the file was read, and whether that was all of it."""
        offset = self._offsets.get(name, 0)
        return (~offset, True) if offset < 0 else (offset, False)

    def _vanished(self, name: str) -> SourceError:
        return SourceError(
            f"{name} in {self._folder.address} is gone, and only {self._offsets[name]} bytes or rows of it were read. "
            "Bring it back, and remove files only when they were read to their end")

    def offsets(self) -> Mapping[str, Offset]:
        return dict(self._offsets)

    @property
    def finished(self) -> bool:
        return self._source.stop_at_end and self._current is None and not self._queue

    def close(self) -> None:
        if self._current is not None:
            self._current.close()
