"""The RocksDB backend: keyed state that is larger than memory, on the slot's local disk.

Each operator has its own database in each subtask. A key of RocksDB consists of the state (2 bytes), the key-group and the
key (rocks_keys.py), followed in list and map states by the number of a chunk or the map's key. Above RocksDB there is a
write-back cache of Python values (rocks_cells.py, rocks_collections.py). Each batch needs one multi-get, for what isn't in
the cache, and at most one write-batch.

A freeze hands over what is dirty to a thread, which writes it and makes RocksDB link its files into a new folder
(rocks_settling.py). Until it is done nothing else is written. A frozen version can be read in two ways: as RocksDB's own
files, most of which the snapshot before has already; or as rows, by opening the folder as a second database.

Files with the same `local` name are the same file during the life of a backend, including the files from which it was
started (`native`): RocksDB numbers its files, and continues after the largest number.

Invariants:
- a frozen version never changes: linked files are never written to again, and the other files are copies;
- one freeze at a time is being settled, and meanwhile only its thread writes to RocksDB;
- the disk need not survive: a folder is removed when its backend is closed or its process has ended.

Columnar state has tables of its own as its cache (rocks_columns.py), whose rows and keys rocks_rows.py spells.

Not here: what is uploaded, and when (snapshots/writing.py); the calendar of timers, which is in memory (timers.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from tidegate import arguments
from tidegate.arguments import Size
from tidegate.state.backend import CellBackend
from tidegate.state.column_table import ColumnState
from tidegate.state.columns import key_list, keys_to_arrow
from tidegate.state.record_table import RecordState
from tidegate.state.rocks_cells import RocksTable, RocksThings, RocksValue
from tidegate.state.rocks_collections import RocksEntries, RocksItems
from tidegate.state.rocks_columns import RocksColumns
from tidegate.state.rocks_db import (
    MIN_MEMORY_BYTES,
    SlotMemory,
    open_db,
    require_rocksdict,
    rocksdict,
    scan_prefix,
    scan_range,
)
from tidegate.state.rocks_folder import Folder
from tidegate.state.rocks_keys import GROUP_BYTES, KeySpelling, Spelled, as_list
from tidegate.state.rocks_meta import PREFIX_BYTES, Meta
from tidegate.state.rocks_reading import REST, StateReader
from tidegate.state.rocks_records import RocksRecords
from tidegate.state.rocks_settling import Settling
from tidegate.state.sections import NativeFile, Section, StateInfo
from tidegate.state.shapes import Shape, Value
from tidegate.state.ttl import stored_info, taken_apart
from tidegate.state.vectors import VectorField

__all__ = ["FrozenRocks", "NativeFile", "RocksBackend", "RocksDB", "native_sections"]

NATIVE = "rocksdb"
# The share of the memory for cached values that dirty values may take. If they take more, some are written at the end of a
# batch, but not while a freeze is being settled. If they take twice as much, the loop waits for the freeze and writes half.
DIRTY_SHARE = 0.25
WRITTEN_ENTRIES = 8192
# If there are more changes of lists and maps than this, they are written at the end of a batch. A freeze writes them while
# the loop waits, in about 2 µs each.
MAX_CHANGES = 4096
# There may be many misses outside of batches too, when timers fire.
MISSES_BETWEEN_CHECKS = 1024
LOADED_ROWS = 65_536
MAX_SPELLED_KEYS = 65_536

_CELLS: dict[str, type[RocksTable]] = {"list": RocksItems, "map": RocksEntries}  # RocksThings for other shapes


@dataclass(frozen=True, slots=True)
class RocksDB:
    """State on the slot's disk, in RocksDB. `memory` is shared by all operators of a slot: the cache of values, RocksDB's
    block cache and its write buffers. `folder` is on a local disk; None means the system's folder for temporary files."""

    memory: Size = "256 MB"
    folder: str | None = None
    native: ClassVar[str] = NATIVE

    def __post_init__(self) -> None:
        require_rocksdict()
        arguments.byte_count("RocksDB", "memory", self.memory, at_least=MIN_MEMORY_BYTES)
        if self.folder is not None:
            arguments.text("RocksDB", "folder", self.folder, "a folder on the slots' own disks, or None")

    @property
    def memory_bytes(self) -> int:
        """The number of bytes that `memory` means."""
        return arguments.byte_count("RocksDB", "memory", self.memory, at_least=MIN_MEMORY_BYTES)

    def create(
        self,
        *,
        key_type: pa.DataType,
        key_group_count: int,
        now_ms: Callable[[], int] | None = None,
        native: Path | None = None,
    ) -> RocksBackend:
        """Return a backend. `native`: a folder with the files of a frozen version, from which the backend starts; the folder
        isn't changed. State with a ttl needs a clock."""
        return RocksBackend(
            key_type=key_type,
            key_group_count=key_group_count,
            folder=Folder(self.folder),
            memory=SlotMemory.of_process(self.memory_bytes),
            native=native,
            now_ms=now_ms,
        )


class RocksBackend(CellBackend):
    """All keyed state of one operator in one subtask."""

    fast_shapes: ClassVar[Mapping[type[Shape], type[Shape]]] = {Value: RocksValue}

    def __init__(
        self,
        *,
        key_type: pa.DataType,
        key_group_count: int,
        folder: Folder,
        memory: SlotMemory,
        native: Path | None = None,
        now_ms: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(key_type=key_type, key_group_count=key_group_count, now_ms=now_ms)
        self._folder = folder
        self._memory = memory
        if native is not None:
            _put_files(native, folder.live)
        self.db = open_db(folder.live, memory)
        self._close_db = weakref.finalize(self, _close, self.db, folder)
        self.key_spelling = KeySpelling(key_type, key_group_count)
        self._meta = Meta.read(self.db, key_type=key_type, key_group_count=key_group_count, native=native)
        self._next_number = self._meta.number
        self._columns: dict[str, RocksColumns | RocksRecords] = {}
        self._prefetched: list[RocksTable] = []
        self._batch: Sequence[Any] = ()  # keys that are not spelled yet
        self._spelled: dict[Any, bytes] = {}
        self._misses = 0
        self._frozen_count = 0
        self._settling: Settling | None = None

    def make_cells(self, info: StateInfo, *, as_tuples: bool, in_place: bool) -> RocksTable:
        kind = _CELLS.get(info.shape, RocksThings)
        prefix = self._meta.prefix(info)
        is_empty = next(iter(scan_prefix(self.db, prefix)), None) is None
        table = kind(info, self, prefix, complete=is_empty, as_tuples=as_tuples)
        if kind.prefetched:
            self._prefetched.append(table)
        return table

    def make_columns(self, info: StateInfo, fields: Sequence[VectorField]) -> ColumnState:
        state = self._columns[info.name] = RocksColumns(info, fields, self, self._meta.prefix(info))
        return state

    def make_records(self, info: StateInfo, columns: Sequence[pa.Field], fields: Sequence[VectorField]) -> RecordState:
        state = self._columns[info.name] = RocksRecords(info, columns, fields, self, self._meta.prefix(info))
        return state

    def load_rows(self, state: str, rows: pa.RecordBatch, *, known: bool) -> None:
        """Load rows. `known` makes no difference, since all frozen versions are complete."""
        if state in self._columns:
            self._columns[state].load(rows, known=known)
            return
        table = self.cells[state]
        for start in range(0, rows.num_rows, LOADED_ROWS):
            some = rows.slice(start, LOADED_ROWS)
            batch = rocksdict.WriteBatch(raw_mode=True)
            table.load(self.key_spelling.spelled(some.column("key"), prefix=table.prefix), some.column("value"), batch)
            self.db.write(batch)

    def all_rows(self, state: str) -> Iterator[pa.RecordBatch]:
        if state in self._columns:
            held = self._columns[state]
            return StateReader(self.db, held.info, held.prefix, self.key_spelling).rows(range(self.key_group_count))
        table = self.cells[state]
        assert not table.dirty
        return StateReader(self.db, table.info, table.prefix, self.key_spelling).rows(range(self.key_group_count))

    def begin_batch(self, keys: Sequence[Any]) -> None:
        """Fetch the keys that aren't in the cache."""
        self._batch, self._spelled = keys, {}
        wanting = [table for table in self._prefetched if not table.complete]
        if not wanting:
            return
        distinct = set(keys)
        missing = [(table, list(table.to_prefetch(distinct))) for table in wanting]
        if not any(those for _, those in missing):
            return
        self._spell({key for _, those in missing for key in those})
        found = iter(self.db.get([table.prefix + self._spelled[key] for table, those in missing for key in those]))
        for table, those in missing:
            if those:
                table.take_in(those, [next(found) for _ in those])

    def end_batch(self) -> None:
        """Write and forget values if they take too much memory."""
        self._batch, self._spelled = (), {}
        for table in self._prefetched:
            table.end_batch()
        self._make_room()

    def tidy(self, budget: int) -> None:
        for table in self.cells.values():
            if table.waste:
                table.throw_away(budget)
        for state in self._columns.values():
            state.tidy()
        self._make_room_in_columns()
        self._make_room()

    def freeze_rows(self) -> FrozenRocks:
        self.settle()
        tables = list(self.cells.values())
        self._flush([table for table in tables if not table.prefetched])
        self._frozen_count += 1
        place = self._folder.path / f"frozen-{self._frozen_count}"
        last = rocksdict.WriteBatch(raw_mode=True)
        # After the flush, which takes numbers.
        self._meta.write(last, [*self.cells, *self._columns], number=self.next_number())
        for table in tables:
            table.hand_over()
        columns = [state.freeze_rows() for state in self._columns.values()]
        self._settling = Settling(self.db, tables, columns, last, place, self._folder)
        states = {**self.cells, **self._columns}
        return FrozenRocks(
            self._settling,
            tuple(state.info for state in states.values()),
            {name: state.prefix for name, state in states.items()},
            self.key_spelling,
            memory=self._memory,
        )

    def settle(self) -> None:
        """Wait until what the last freeze handed over is written."""
        if self._settling is not None:
            self._settling.wait()
            self._settling = None
            for state in self._columns.values():
                state.settled()

    def close(self) -> None:
        """Remove the state from the disk. Frozen versions that were not released stay readable."""
        self._memory.leave(self)
        with contextlib.suppress(Exception):  # a reader of the frozen version gets the error
            self.settle()
        for table in self.cells.values():
            table.cache, table.older, table.dirty, table.frozen = {}, {}, {}, {}
        self._close_db()
        self._folder.remove_discarded()
        shutil.rmtree(self._folder.live, ignore_errors=True)

    # What the tables call.

    def spelled(self, keys: Sequence[Any], prefix: bytes) -> Spelled:
        """Return keys as bytes, each after `prefix`."""
        return self.key_spelling.spelled(keys_to_arrow(keys, self.key_type), prefix=prefix)

    def spelled_one(self, key: Any) -> bytes:
        """Return one key as bytes, without a prefix. The keys of a batch are spelled together."""
        found = self._spelled.get(key)
        if found is None:
            batch, self._batch = self._batch, ()
            self._spell({key, *batch})
            found = self._spelled[key]
        return found

    def scan(self, start: bytes) -> Iterable[tuple[bytes, bytes]]:
        """Return the entries of RocksDB whose keys begin with `start`, in order."""
        return scan_prefix(self.db, start)

    def keys_from(self, prefix: bytes, place: bytes, count: int) -> tuple[list[Any], bytes]:
        """Return keys that RocksDB has after a prefix, as `AnyCells.keys_from` does."""
        stop = (int.from_bytes(prefix) + 1).to_bytes(PREFIX_BYTES)
        spelled = [key for key, _ in islice(scan_range(self.db, place or prefix, stop), count)]
        if not spelled:
            return [], b""
        keys, _ = self.key_spelling.read(spelled, skip=PREFIX_BYTES + GROUP_BYTES)
        return list(dict.fromkeys(key_list(keys))), spelled[-1] + b"\0" if len(spelled) == count else b""

    def missed(self) -> None:
        """Count a read of what isn't in a cache, before it is read. Now and then this makes room in the caches."""
        self._misses += 1
        if self._misses % MISSES_BETWEEN_CHECKS == 0:
            self._make_room()

    def next_number(self) -> int:
        """Return a number that is larger than all before, including those of earlier runs that wrote this state."""
        return self.take_numbers(1)

    def take_numbers(self, count: int) -> int:
        """Return the first of so many such numbers."""
        first = self._next_number
        self._next_number += count
        return first

    def reached_number(self, number: int) -> None:
        """Note that state that is loaded has this number."""
        self._next_number = max(self._next_number, number + 1)

    # Inside.

    def _spell(self, keys: set[Any]) -> None:
        if len(self._spelled) > MAX_SPELLED_KEYS:
            self._spelled = {}
        some = list(keys)
        self._spelled.update(zip(some, as_list(self.spelled(some, b"")), strict=True))

    def _make_room(self) -> None:
        tables = self.cells.values()
        allowed_bytes = self._allowed_bytes()
        if not tables:
            return
        if sum(table.young_bytes() for table in tables) > allowed_bytes / 2:
            for table in tables:
                table.forget_older()
        fullness = max(
            sum(table.dirty_bytes() for table in tables) / (allowed_bytes * DIRTY_SHARE),
            sum(table.changes for table in tables) / MAX_CHANGES,
        )
        if fullness <= 1 or (fullness <= 2 and self._settling is not None and not self._settling.done.is_set()):
            return
        self.settle()
        self._flush(tables, WRITTEN_ENTRIES / sum(len(table.dirty) for table in tables) if fullness <= 2 else 0.5)

    def _make_room_in_columns(self) -> None:
        """Forget rows of columnar state if they take too much memory. Between batches only: rows may get other numbers."""
        columns = self._columns.values()
        if not columns or sum(state.held_bytes() for state in columns) <= self._allowed_bytes():
            return
        # What changed is written at once, since only then can its rows be forgotten.
        self.settle()
        for state in columns:
            state.freeze_rows().write(lambda: None)
            state.settled()
            state.forget()

    def _allowed_bytes(self) -> float:
        used_bytes = sum(table.held_bytes() for table in self.cells.values())
        used_bytes += sum(state.held_bytes() for state in self._columns.values())
        return self._memory.allowed(self, used_bytes)

    def _flush(self, tables: Iterable[RocksTable], share: float = 1.0) -> None:
        """Write what is dirty; of single values only this share."""
        batch = rocksdict.WriteBatch(raw_mode=True)
        for table in tables:
            table.flush(batch, share)
        if not batch.is_empty():
            self.db.write(batch)


class FrozenRocks:
    """The state as it was at the freeze, in its own folder."""

    native = NATIVE
    complete = True

    def __init__(
        self,
        settling: Settling,
        states: tuple[StateInfo, ...],
        prefixes: dict[str, bytes],
        spelling: KeySpelling,
        *,
        memory: SlotMemory,
    ) -> None:
        self.states = states
        self._settling = settling
        self._prefixes = prefixes
        self._spelling = spelling
        self._memory = memory

    def files(self) -> Iterator[NativeFile]:
        """Return RocksDB's own files, for `RocksDB.create(native=…)` and `native_sections`."""
        for path in sorted(self._settling.wait().iterdir()):
            if _NATIVE_NAME.fullmatch(path.name):
                yield NativeFile(path.name, path, immutable=path.suffix == ".sst")

    def sections(self) -> Iterator[Section]:
        """Return all rows, in the form that any backend loads."""
        yield from _sections(
            self._settling.wait(),
            self._memory,
            self.states,
            self._prefixes,
            self._spelling,
            range(self._spelling.key_group_count),
        )

    def release(self) -> None:
        self._settling.discard()


def native_sections(
    native: Path, states: Sequence[StateInfo], *, key_type: pa.DataType, key_group_count: int, groups: range
) -> Iterator[Section]:
    """Return the rows of these key-groups from the files of a frozen version, for another parallelism or another backend.

    `states` are read, by name; their types have to be those with which they were written. `native` isn't changed.
    """
    memory = SlotMemory.of_process(MIN_MEMORY_BYTES)
    spelling = KeySpelling(key_type, key_group_count)
    folder = Folder(str(native.parent))  # on the same disk
    _put_files(native, folder.live)
    db = open_db(folder.live, memory, read_only=True)
    meta = Meta.read(db, key_type=key_type, key_group_count=key_group_count, native=native)
    db.close()
    known = {info.name: info for info in states if info.name in meta.states}
    stored = tuple(map(stored_info, known.values()))
    sections = _sections(
        folder.live,
        memory,
        stored,
        {info.name: meta.prefix(info) for info in stored},
        spelling,
        groups,
        folder=folder,
        rest_factor=0,
    )
    return (Section(section.state, section.groups, taken_apart(section.rows, known[section.state])) for section in sections)


def _sections(
    place: Path,
    memory: SlotMemory,
    states: Sequence[StateInfo],
    prefixes: dict[str, bytes],
    spelling: KeySpelling,
    groups: range,
    *,
    folder: Folder | None = None,
    rest_factor: float = REST,
) -> Iterator[Section]:
    """Return the rows of the states in the database at `place`. `folder` is removed when all were read."""
    db = open_db(place, memory, read_only=True)
    try:
        for info in states:
            yield from StateReader(db, info, prefixes[info.name], spelling, rest_factor=rest_factor).sections(groups)
    finally:
        db.close()
        if folder is not None:
            folder.remove()


_NATIVE_NAME = re.compile(r"\d+\.sst|CURRENT|(MANIFEST|OPTIONS)-\d+")


def _put_files(native: Path, live: Path) -> None:
    """Link or copy the files of a frozen version into a new folder. RocksDB writes to all but the immutable ones, which are
    linked if they are on the same disk."""
    live.mkdir(parents=True, exist_ok=True)
    for path in native.iterdir():
        if _NATIVE_NAME.fullmatch(path.name):
            try:
                (os.link if path.suffix == ".sst" else shutil.copyfile)(path, live / path.name)
            except OSError:
                shutil.copyfile(path, live / path.name)


def _close(db: Any, folder: Folder) -> None:
    """Close the database while its folder still exists, which the argument keeps alive: RocksDB writes its buffers, and if
    it can't, it waits and tries again. Errors don't matter any more."""
    with contextlib.suppress(Exception):
        db.close()
