"""Folders of files that grow, as sources.

A split is a file, named by its path relative to the folder. Its owner is `crc32(name) % parallelism`, so every reader
lists the folder on its own, and no file is read by two readers. The format (parquet_source.py, lines.py) defines what is
in a file, and when a file is complete enough to be read.

The offset of a file is one integer: `n` means that n rows (Parquet) or bytes (lines) were read and that there is more;
`~n`, which is negative, that n is all there is. Files that were read to their end stay in the offsets forever, so that
they are not read again.

Invariants:
- An offset is right behind the last record that `poll` returned, whatever was read ahead.
- Input that was read doesn't change: a file that shrank, or vanished before it was read to its end, is a `SourceError`.

Not here: deletion of files that were read. Listing and reading happen in the slot's loop, so object stores work, but
their latency delays the slot.
"""

from __future__ import annotations

import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

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
    """Reads files in turn: those already started first, then by (modification time, name).

    Files with unread records wait in a queue. A file is read up to the size it had when its turn came. Records that were
    added meanwhile wait for the next turn, so that a file that is written all the time doesn't delay the other files.

    If event time is followed, the file with the lowest watermark is read next, batch by batch, and a file is live as long as
    it is known to have unread records. Up to `FileFormat.most_open` files stay open meanwhile. If there are more, a file is
    read until it can be closed without reading any of it twice. Nothing is read while that file is ahead of other sources;
    but among too many files one that can't be closed is read on, or the files behind it would never be.
    """

    def __init__(self, source: FolderSource, folder: InputFolder, context: SourceContext) -> None:
        if source.stop_at_end and not folder.exists():
            raise SourceError(
                f"there is no {source.address} on host {socket.gethostname()} to read to its end. Give the source the path "
                f"of a folder or file that exists on every host before the job starts, or omit stop_at_end: the source then "
                f"waits for files"
            )
        self._source = source
        self._folder = folder
        self._context = context
        self._splits = context.splits.report(holds_back=True)
        self._offsets: dict[str, int] = {name: int(offset) for name, offset in context.restored.items() if self._owns(name)}
        self._queue: dict[str, Found] = {}
        self._waiting: dict[str, Found] = {}  # These were read as far as possible when they had this size and time.
        self._open: dict[str, OpenFile] = {}
        self._current: OpenFile | None = None  # One of the open files.
        self._turns: list[tuple[int, int, str]] = []  # A heap: watermark, number of the turn, name.
        self._turn_numbers = count()
        self._new: list[str] = []  # In the queue and not yet in a turn.
        self._discover()

    def poll(self, max_rows: int) -> pa.RecordBatch | None:
        # If the clock was set back, discover at once, and not only when it has caught up.
        if not (
            self._source.stop_at_end or 0 <= self._context.now_ms() - self._discovered_ms < self._source.discover_every_ms
        ):
            self._discover()
        while (file := self._next()) is not None:
            batch = file.read(max_rows)
            if batch is not None:
                self._splits.read(file.found.name)
            if batch is None or file.position == file.size:
                self._close_current()
            elif file.position:
                self._offsets[file.found.name] = file.position
            if batch is not None:
                return batch
        return None

    def _next(self) -> OpenFile | None:
        """Return the file to read from, opened."""
        current, most = self._current, self._source.form.most_open
        for name in self._new:
            self._take_turn(name)
        self._new = []
        if current is not None:
            crowded = len(self._open.keys() | self._queue.keys()) > most
            if not self._splits.is_followed or (self._turns and crowded and not current.at_rest):
                return current
            if self._splits.is_ahead(current.found.name) and self._is_turn_ahead():
                return None
            self._take_turn(current.found.name)
        self._current = None
        while self._turns and not self._is_turn_ahead():
            *_, name = heappop(self._turns)
            if name not in self._open:
                if current is not None and len(self._open) >= most:
                    self._leave(current)
                self._open_file(name)
            self._current = self._open.get(name)
            if self._current is not None:
                return self._current
        return None

    def _is_turn_ahead(self) -> bool:
        """Whether no file has a turn that isn't ahead of other sources."""
        return not self._turns or self._splits.is_ahead(self._turns[0][2])

    def _take_turn(self, name: str) -> None:
        heappush(self._turns, (self._splits.watermark_ms(name), next(self._turn_numbers), name))

    def _open_file(self, name: str) -> None:
        found = self._queue.pop(name)
        position, _ = self._position(name)
        try:
            file = self._source.form.open(self._folder, found, position=position, final=self._source.stop_at_end)
        except FileNotFoundError as error:
            if position == 0:
                self._splits.finish(name)  # Removed before any of it was read.
                return
            raise self._vanished(name) from error
        if file is None:
            self._waiting[name] = found
            self._splits.finish(name)
        else:
            self._open[name] = file

    def _leave(self, file: OpenFile) -> None:
        """Close a file that isn't read to its end. It is opened again at its next turn."""
        name = file.found.name
        self._queue.setdefault(name, file.found)
        del self._open[name]
        file.close()

    def _close_current(self) -> None:
        file = self._current
        assert file is not None
        name = file.found.name
        has_grown = name in self._queue
        if file.position == file.size:
            self._offsets[name] = file.position if has_grown else ~file.position
        else:
            self._waiting[name] = file.found
        file.close()
        del self._open[name]
        self._current = None
        if has_grown:
            self._new.append(name)
        else:
            self._splits.finish(name)

    def _discover(self) -> None:
        self._discovered_ms = self._context.now_ms()
        found_files = {found.name: found for found in self._folder.list(self._may_have_more)}
        for name, offset in self._offsets.items():
            if offset >= 0 and name not in found_files:
                raise self._vanished(name)
        fresh = [found for found in found_files.values() if self._has_more(found)]
        for found in sorted(fresh, key=lambda found: (found.name not in self._offsets, found.mtime_ns, found.name)):
            if found.name not in self._queue and found.name not in self._open:
                self._new.append(found.name)
            self._queue[found.name] = found
            self._splits.discover(found.name, has_records=True)

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
        if found.name in self._open:
            return self._source.form.grows and found.size > self._open[found.name].size
        return self._waiting.get(found.name) != found

    def _owns(self, name: str) -> bool:
        return zlib.crc32(name.encode()) % self._context.parallelism == self._context.subtask

    def _position(self, name: str) -> tuple[int, bool]:
        """Return how much of the file was read, and whether that was all of it."""
        offset = self._offsets.get(name, 0)
        return (~offset, True) if offset < 0 else (offset, False)

    def _vanished(self, name: str) -> SourceError:
        return SourceError(
            f"{name} in {self._folder.address} is gone, and only {self._offsets[name]} bytes or rows of it were read. "
            "Restore the file, and remove files only after they were read to their end"
        )

    def offsets(self) -> Mapping[str, Offset]:
        return dict(self._offsets)

    @property
    def finished(self) -> bool:
        return self._source.stop_at_end and not self._open and not self._queue

    def close(self) -> None:
        for file in self._open.values():
            file.close()
