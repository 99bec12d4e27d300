"""Folders of files that grow, as sources.

A split is a file, named by its path relative to the folder. The key-group of its name decides who owns it, so every reader
lists the folder on its own, and no file is read by two readers. The format (parquet_source.py, lines.py) defines what is
in a file, and when a file is complete enough to be read.

The offset of a file is the number of rows (Parquet) or bytes (lines) that were read. A file that was read to its end has no
offset any more: its name is kept with the finished splits (dataflow/finished_splits.py), of which a snapshot writes only
those that are new. So neither the names nor the times of files need to grow: a file that comes late is read whatever its
name is, and none is read twice (docs/adr/037). Snapshots of older versions have all files in the offsets; `~n`, which is
negative, is a file that was read to its end.

Invariants:
- An offset is right behind the last record that `poll` returned, whatever was read ahead.
- Input that was read doesn't change: a file that shrank, or vanished before it was read to its end, is a `SourceError`.
- The name of a finished file is forgotten only after the file has been gone for `forget_removed_ms`.

Not here: deletion of files that were read. Listing and reading happen in the slot's loop, so object stores work, but
their latency delays the slot.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import compress, count

import pyarrow as pa

from tidegate.connectors.folders import FileFormat, Found, InputFolder, OpenFile, shrunk
from tidegate.dataflow.contracts import Offset, Source, SourceContext, SourceReader
from tidegate.dataflow.finished_splits import FinishedSplits
from tidegate.errors import SourceError

# The loop waits while a folder is listed. So a folder is listed less often if that takes long.
PAUSE_PER_LISTING = 10
REPORT_INCOMPLETE_MS = 60_000

_log = logging.getLogger("tidegate.sources")


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSource(Source):
    """`incomplete_for_ms` is how long a file that doesn't grow may be incomplete, and `forget_removed_ms` how long the name
    of a file is remembered that was read and is gone; None: forever."""

    address: str
    form: FileFormat
    stop_at_end: bool
    discover_every_ms: int
    incomplete_for_ms: int | None = None
    forget_removed_ms: int | None = None
    finishes_splits = True

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
        self._finished = context.finished
        self._offsets: dict[str, int] = {}
        self._restore(context.restored)
        self._queue: dict[str, Found] = {}
        self._waiting: dict[str, _Waiting] = {}  # These were read as far as possible.
        self._removed = _Removed(source.forget_removed_ms)
        self._open: dict[str, OpenFile] = {}
        self._current: OpenFile | None = None  # One of the open files.
        self._turns: list[tuple[int, int, str]] = []  # A heap: watermark, number of the turn, name.
        self._turn_numbers = count()
        self._new: list[str] = []  # In the queue and not yet in a turn.
        self._discover()

    def _restore(self, restored: Mapping[str, Offset]) -> None:
        for name in compress(restored, self._finished.owned(list(restored))):
            offset = int(restored[name])
            if offset >= 0:
                self._offsets[name] = offset
            else:
                self._finished.add(name, ~offset)

    def poll(self, max_rows: int) -> pa.RecordBatch | None:
        # If the clock was set back, discover at once, and not only when it has caught up.
        if not (self._source.stop_at_end or 0 <= self._context.now_ms() - self._discovered_ms < self._pause_ms):
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
            self._wait_for(found)
            self._splits.finish(name)
        else:
            self._waiting.pop(name, None)
            self._open[name] = file

    def _wait_for(self, found: Found) -> None:
        self._waiting[found.name] = _Waiting(found, self._context.now_ms())

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
        if file.position < file.size:
            self._wait_for(file.found)
        elif has_grown:
            self._offsets[name] = file.position
        else:
            self._offsets.pop(name, None)
            self._finished.add(name, file.position)
        file.close()
        del self._open[name]
        self._current = None
        if has_grown:
            self._new.append(name)
        else:
            self._splits.finish(name)

    def _discover(self) -> None:
        self._discovered_ms = self._context.now_ms()
        self._removed.begin(self._discovered_ms)
        found_files = {found.name: found for found in self._folder.list(self._wanted)}
        took_ms = max(0, self._context.now_ms() - self._discovered_ms)
        self._pause_ms = max(self._source.discover_every_ms, PAUSE_PER_LISTING * took_ms)
        for name in self._offsets:
            if name not in found_files:
                raise self._vanished(name)
        self._check_waiting(found_files)
        self._removed.forget(self._finished, self._discovered_ms)
        fresh = [found for found in found_files.values() if self._has_more(found)]
        for found in sorted(fresh, key=lambda found: (found.name not in self._offsets, found.mtime_ns, found.name)):
            if found.name not in self._queue and found.name not in self._open:
                self._new.append(found.name)
            self._queue[found.name] = found
            self._splits.discover(found.name, has_records=True)

    def _wanted(self, names: Sequence[str]) -> list[bool]:
        """Return for each name in the folder whether the file is this reader's and may have more."""
        self._removed.see(names)
        ends = list(map(self._finished.end_of, names))
        unknown = [name for name, end in zip(names, ends, strict=True) if end is None]
        owned = iter(self._finished.owned(unknown))
        return [next(owned) if end is None else self._source.form.grows for end in ends]

    def _has_more(self, found: Found) -> bool:
        if self._source.form.grows:
            position, was_at_end = self._position(found.name)
            if found.size < position:
                raise shrunk(f"{found.name} in {self._folder.address}", read=position, now=found.size)
            if found.size == position:
                return False
            if was_at_end:
                self._finished.remove(found.name)
                self._offsets[found.name] = position
        if found.name in self._open:
            return self._source.form.grows and found.size > self._open[found.name].size
        waiting = self._waiting.get(found.name)
        return waiting is None or waiting.found != found

    def _check_waiting(self, found_files: Mapping[str, Found]) -> None:
        """Report the files that stay incomplete although nobody writes to them. Forget those that are gone."""
        self._waiting = {name: waiting for name, waiting in self._waiting.items() if name in found_files}
        if self._source.form.grows:
            return
        for name, waiting in self._waiting.items():
            unchanged_ms = self._discovered_ms - waiting.since_ms if waiting.found == found_files[name] else 0
            limit_ms = self._source.incomplete_for_ms
            if limit_ms is not None and unchanged_ms >= limit_ms:
                raise SourceError(
                    f"{name} in {self._folder.address} is incomplete, and has not changed for {unchanged_ms // 1000} s: its "
                    f"writer was probably interrupted. Remove it or replace it by a complete file, and start the job again. "
                    f"If files may take longer to write in place, give the source a longer incomplete_for"
                )
            if unchanged_ms >= REPORT_INCOMPLETE_MS and not waiting.is_reported:
                waiting.is_reported = True
                _log.warning(
                    "%s in %s is incomplete, and has not changed for %d s: it is not read. %s",
                    name,
                    self._folder.address,
                    unchanged_ms // 1000,
                    "It is ignored until it changes"
                    if limit_ms is None
                    else f"The job fails when that has lasted for {limit_ms // 1000} s",
                    extra={"event": "incomplete-file"},
                )

    def _position(self, name: str) -> tuple[int, bool]:
        """Return how much of the file was read, and whether that was all of it."""
        end = self._finished.end_of(name)
        return (self._offsets.get(name, 0), False) if end is None else (end, True)

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


@dataclass(slots=True, eq=False)
class _Waiting:
    """A file as it was when there was no more to be read of it, and when that was."""

    found: Found
    since_ms: int
    is_reported: bool = False


class _Removed:
    """Finds the finished files that are gone. Once in every `after_ms` all names of a listing are compared with those of the
    finished files. A file that is missing twice in a row has been gone for that long and is forgotten. If the whole listing
    is empty, nothing is compared: the folder itself may be missing for a while, because it isn't mounted."""

    def __init__(self, after_ms: int | None) -> None:
        self._after_ms = after_ms
        self._compared_ms: int | None = None
        self._missing: set[str] = set()
        self._seen: set[str] | None = None  # in the listing under way, if it is to be compared

    def begin(self, now_ms: int) -> None:
        """Begin a listing."""
        before_ms = self._compared_ms
        if before_ms is not None and now_ms < before_ms:  # the clock was set back, so nobody knows for how long
            before_ms, self._missing = None, set()
        is_due = self._after_ms is not None and (before_ms is None or now_ms - before_ms >= self._after_ms)
        self._seen = set() if is_due else None

    def see(self, names: Sequence[str]) -> None:
        """Note names of the listing."""
        if self._seen is not None:
            self._seen.update(names)

    def forget(self, finished: FinishedSplits, now_ms: int) -> None:
        """The listing is complete: forget the files that were missing in the last comparison, too."""
        if self._seen:
            missing = finished.all().keys() - self._seen
            for name in missing & self._missing:
                finished.remove(name)
            self._compared_ms, self._missing = now_ms, missing - self._missing
        self._seen = None
