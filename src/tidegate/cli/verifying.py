"""Verifying snapshots: every byte against its checksum, and every key against its key-group.

Theory of operation. A manifest lists files with their length and CRC-32; the index of a row file lists sections with theirs;
sections and pieces declare their key-groups, and the pieces of an operator tile all key-groups. Each of these statements is
checked. All problems are reported, not only the first; what a problem makes unreadable isn't reported again.

Row files are read once, front to back: the same reads decode the sections and compute the checksum of the file. Files that
several snapshots list are read once. Rows of native files are read through snapshots/snapshot.py.

Nothing is repaired or deleted.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from tidegate.cli.finding import SnapshotFolder
from tidegate.errors import NotFound, StoreError, TidegateError
from tidegate.hashing import hash_columns
from tidegate.keygroups import MAX_KEY_GROUP_COUNT, groups_of
from tidegate.snapshots.manifest import ROWS, FileEntry, Manifest, OperatorEntry, PieceEntry, StateEntry
from tidegate.snapshots.snapshot import Snapshot
from tidegate.state.format import MAGIC, READ_BYTES, StateFileReader
from tidegate.store import layout
from tidegate.store.base import Store

ALL_GROUPS = range(MAX_KEY_GROUP_COUNT + 1)


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong. `where` is the name of a file or operator."""

    epoch: int
    where: str
    what: str


@dataclass(slots=True)
class Report:
    """What was read and found. The snapshots are intact if there are no `problems`; `notes` are not problems."""

    epochs: list[int] = field(default_factory=list)
    files: int = 0
    bytes: int = 0
    rows: int = 0
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def verify(
    folder: SnapshotFolder,
    epochs: Iterable[int],
    *,
    on_total: Callable[[int], None] = lambda total: None,
    on_read: Callable[[int], None] = lambda count: None,
) -> Report:
    """Read all of these snapshots. `on_total` gets the number of bytes to read, `on_read` the number of each read."""
    report = Report()
    manifests: list[Manifest] = []
    for epoch in epochs:
        report.epochs.append(epoch)
        try:
            manifests.append(folder.load(epoch))
        except TidegateError as error:
            report.problems.append(Problem(epoch, folder.manifests.get(epoch, "manifest"), str(error)))
    on_total(sum({file.name: file.bytes for manifest in manifests for file in manifest.files()}.values()))
    check = _Check(folder.store, report, on_read)
    for manifest in manifests:
        check.manifest(manifest)
    report.notes += _unlisted(folder, {manifest.epoch: manifest for manifest in manifests})
    return report


class _Check:
    def __init__(self, store: Store, report: Report, on_read: Callable[[int], None]) -> None:
        self._store = store
        self._report = report
        self._on_read = on_read
        self._epoch = 0
        # By file and what the manifest says of it, so that a file that two snapshots list is read once.
        self._checked: dict[tuple[FileEntry, _Claims], list[str]] = {}
        self._seen: set[FileEntry] = set()
        self._item_counts: dict[tuple[FileEntry, str], int] = {}

    def manifest(self, manifest: Manifest) -> None:
        self._epoch = manifest.epoch
        for name, entry in manifest.operators.items():
            for what in _tiling(entry, manifest.key_group_count):
                self._complain(f"operator {name!r}", what)
            for piece in entry.pieces:
                claims = _Claims(entry.states, range(*piece.key_groups), manifest.key_group_count)
                before = len(self._report.problems)
                for file in piece.files:
                    self._file(file, claims)
                if len(self._report.problems) == before and any(file.form != ROWS for file in piece.files):
                    for what in _with_errors(self._native_rows(manifest, name, piece)):
                        self._complain(f"operator {name!r}", f"subtask {piece.subtask}: {what}")
                for what in self._counted(piece, entry.states):
                    self._complain(f"operator {name!r}", f"subtask {piece.subtask}: {what}")

    def _file(self, file: FileEntry, claims: _Claims) -> None:
        if (file, claims) not in self._checked:
            if file not in self._seen:
                self._seen.add(file)
                self._report.files += 1
                self._report.bytes += file.bytes
            self._checked[file, claims] = list(self._problems_of(file, claims))
        for what in self._checked[file, claims]:
            self._complain(file.name, what)

    def _native_rows(self, manifest: Manifest, operator: str, piece: PieceEntry) -> Iterator[str]:
        reader, groups = Snapshot(self._store, manifest).piece(operator, piece), range(*piece.key_groups)
        for state in (state.name for state in manifest.operators[operator].states if state.kind == "keyed"):
            for rows in reader.keyed(state, groups):
                self._report.rows += rows.num_rows
                yield from _strays(state, rows, groups, "piece", manifest.key_group_count)

    def _counted(self, piece: PieceEntry, states: Iterable[StateEntry]) -> Iterator[str]:
        """Check the counts of operator state. It is written whole each time, so only that of a chain's last file counts;
        if there was nothing to write, the last file is of an earlier epoch and its operator state is obsolete."""
        last = next((file for file in reversed(piece.files) if file.form == ROWS), None)
        written = None if last is None else layout.parse_state_file_name(last.name)
        for state in (state.name for state in states if state.kind != "keyed"):
            count = piece.item_counts.get(state, 0)
            found = 0 if last is None else self._item_counts.get((last, state), count)
            if found != count and (count or (written is not None and written.epoch == self._epoch)):
                yield (
                    f"state {state!r} has {found} rows in {'no file' if last is None else last.name}, and the manifest "
                    f"counts {count}"
                )

    def _problems_of(self, file: FileEntry, claims: _Claims) -> Iterator[str]:
        try:
            size_bytes = self._store.size(file.name)
        except NotFound:
            yield "the file is missing"
            return
        except StoreError as error:
            yield str(error)
            return
        if size_bytes != file.bytes:
            yield f"the file has {size_bytes} bytes, and the manifest lists {file.bytes}"
            return
        content = _Sequential(self._store, file, self._on_read)
        if file.form == ROWS:
            yield from _with_errors(self._rows_of(file, content, claims))
        yield from _with_errors(content.rest())

    def _rows_of(self, file: FileEntry, content: _Sequential, claims: _Claims) -> Iterator[str]:
        if content.read(0, len(MAGIC)) != MAGIC:
            yield "it doesn't begin like a state file of this version"
        reader = StateFileReader(
            content.read, bytes=file.bytes, index_bytes=file.index_bytes, index_checksum=file.index_checksum, name=file.name
        )
        listed = {state.name: state for state in claims.states}
        for info in reader.states:
            state = listed.get(info.name)
            if state is None:
                yield f"it holds a state {info.name!r} that the manifest doesn't list"
            elif info.kind.value != state.kind or (reader.row_count(info.name) and info.schema != state.arrow_schema()):
                yield (
                    f"state {info.name!r} is {info.kind.value} ({_types(info.schema)}) in the file and {state.kind} "
                    f"({state.type}) in the manifest"
                )
            if info.kind.value == "keyed":
                yield from _with_errors(self._keyed(reader, info.name, claims))
            else:
                yield from _with_errors(self._items(reader, file, info.name))

    def _keyed(self, reader: StateFileReader, state: str, claims: _Claims) -> Iterator[str]:
        for section in reader.read_sections(state, ALL_GROUPS):
            assert section.groups is not None
            self._report.rows += section.rows.num_rows
            yield from _strays(state, section.rows, section.groups, "section", claims.key_group_count)
            yield from _strays(state, section.rows, claims.key_groups, "piece", claims.key_group_count)

    def _items(self, reader: StateFileReader, file: FileEntry, state: str) -> Iterator[str]:
        count = reader.row_count(state)
        for rows in reader.read_items(state, 0, count):
            self._report.rows += rows.num_rows
        self._item_counts[file, state] = count
        yield from ()

    def _complain(self, where: str, what: str) -> None:
        self._report.problems.append(Problem(self._epoch, where, what))


@dataclass(frozen=True, slots=True)
class _Claims:
    """What the manifest states about the content of a file."""

    states: tuple[StateEntry, ...]
    key_groups: range
    key_group_count: int


class _Sequential:
    """A reader of a file that computes the checksum from the same reads, as long as they are in order."""

    def __init__(self, store: Store, file: FileEntry, on_read: Callable[[int], None]) -> None:
        self._store = store
        self._file = file
        self._on_read = on_read
        self._position = 0
        self._checksum = 0

    def read(self, offset: int, length: int) -> bytes:
        content = self._store.read(self._file.name, offset, length)
        if offset == self._position:
            self._checksum = zlib.crc32(content, self._checksum)
            self._position += len(content)
            self._on_read(len(content))
        return content

    def rest(self) -> Iterator[str]:
        """Read what hasn't been read in order, and compare the checksum of the whole file."""
        while self._position < self._file.bytes:
            before = self._position
            self.read(before, min(READ_BYTES, self._file.bytes - before))
            if self._position == before:
                yield f"nothing could be read at {before}"
                return
        if self._checksum != self._file.checksum:
            yield "the checksum of the file doesn't match"


def _strays(state: str, rows: pa.RecordBatch, groups: range, holder: str, key_group_count: int) -> Iterator[str]:
    found = groups_of(hash_columns([rows.column("key")]), key_group_count)
    strays = (found < groups.start) | (found >= groups.stop)
    if strays.any():
        first = int(strays.argmax())
        yield (
            f"state {state!r}: {int(strays.sum())} of {len(found)} keys in a {holder} of key-groups {_shown(groups)} "
            f"belong elsewhere; the first is {_text(rows.column('key')[first])}, of key-group {int(found[first])}"
        )


def _with_errors(problems: Iterator[str]) -> Iterator[str]:
    """Yield the problems, and an error that occurs meanwhile as another problem."""
    try:
        yield from problems
    except TidegateError as error:
        yield str(error)
    except (AssertionError, ArithmeticError, LookupError, OSError, TypeError, ValueError, pa.ArrowException) as error:
        # The checksums are right but the content is invalid: the writer has a bug.
        yield f"it can't be read: {type(error).__name__}: {error}"


def _tiling(entry: OperatorEntry, key_group_count: int) -> Iterator[str]:
    """Check that the key-groups of pieces are complete and in order. The manifest checks the order of the pieces."""
    if len(entry.pieces) != entry.parallelism:
        yield f"{len(entry.pieces)} pieces at parallelism {entry.parallelism}"
    keyed = any(state.kind == "keyed" for state in entry.states)
    if not keyed and not any(range(*piece.key_groups) for piece in entry.pieces):
        return
    stop = 0
    for piece in entry.pieces:
        start = piece.key_groups[0]
        if start > stop:
            yield f"key-groups {_shown(range(stop, start))}, before those of subtask {piece.subtask}, are in no piece"
        if start < stop:
            yield (
                f"key-groups {_shown(range(start, stop))} of subtask {piece.subtask} are those of a subtask before it as "
                f"well, or not in order"
            )
        stop = piece.key_groups[1]
    if stop < key_group_count:
        yield f"key-groups {_shown(range(stop, key_group_count))} are in no piece"
    if stop > key_group_count:
        yield f"the pieces end at key-group {stop}, and there are {key_group_count}"


def _unlisted(folder: SnapshotFolder, known: dict[int, Manifest]) -> Iterator[str]:
    if not folder.whole:
        return
    try:
        listed = {file.name for epoch in folder.manifests for file in (known.get(epoch) or folder.load(epoch)).files()}
        others = [name for name in folder.store.list(layout.STATE) if name not in listed]
    except TidegateError:
        return  # reported if that epoch is verified
    if others:
        yield (
            f"{len(others)} files are in no snapshot (usually of an epoch that is being written or was aborted): "
            f"{', '.join(others[:5])}{', …' if len(others) > 5 else ''}"
        )


def _shown(groups: range) -> str:
    return f"{groups.start}…{groups.stop} (half-open)" if len(groups) != 1 else str(groups.start)


def _types(schema: pa.Schema) -> str:
    return ", ".join(f"{column.name} {column.type}" for column in schema)


def _text(value: pa.Scalar) -> str:
    text = repr(value.as_py())
    return text if len(text) <= 80 else f"{text[:79]}…"
