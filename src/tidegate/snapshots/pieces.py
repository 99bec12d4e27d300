"""The pieces of a snapshot, one for each operator and subtask: reading them, and writing the file that a piece may be.

Whoever reads never sees how a piece is kept: a chain of row files comes out resolved, a backend's own files as rows. Keyed
state is read by key-group. Operator state is written whole every time: the last file of rows has all of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from tidegate.errors import StoreError
from tidegate.hashing import hash_columns
from tidegate.keygroups import groups_of
from tidegate.snapshots.manifest import ROWS, FileEntry, OperatorEntry, PieceEntry
from tidegate.snapshots.native import NativeReader
from tidegate.state.format import StateFileEncoder, StateFileReader
from tidegate.state.merging import merged_sections, resolved_rows
from tidegate.state.sections import Section, SectionReader, StateInfo, StateKind
from tidegate.store.base import Readable, Store

Chain: TypeAlias = tuple[FileEntry, ...]


class PieceReader:
    """Reads one piece. Nothing is read before rows are asked for."""

    def __init__(self, store: Readable, entry: OperatorEntry, piece: PieceEntry, *, key_group_count: int) -> None:
        rows = [row_reader(store, file) for file in piece.files if file.form == ROWS]
        native = [file for file in piece.files if file.form != ROWS]
        self._piece = piece
        self._key_group_count = key_group_count
        self._items = rows[-1] if rows else None
        self._is_native = bool(native)
        self._layers: Sequence[SectionReader] = rows
        if native:
            states = [state.info for state in entry.states]
            self._layers = [NativeReader(store, native, states, key_group_count=key_group_count)]

    def keyed(self, state: str, groups: range) -> Iterator[pa.RecordBatch]:
        """Read the rows of a keyed state in these key-groups, by growing key-group."""
        return resolved_rows(state, self._layers, groups)

    def items(self, state: str, start: int = 0, stop: int | None = None) -> Iterator[pa.RecordBatch]:
        """Read the rows of a state without keys, all of them or from `start` to `stop`."""
        stop = self._piece.item_counts.get(state, 0) if stop is None else stop
        if self._items is not None and stop > start:
            yield from self._items.read_items(state, start, stop)

    def sections(self, info: StateInfo) -> Iterator[Section]:
        """Read all of a state as a row file holds it."""
        if info.kind is not StateKind.KEYED:
            yield from (Section(info.name, None, rows) for rows in self.items(info.name))
        elif self._is_native:
            yield from in_order(info.name, self.keyed(info.name, range(*self._piece.key_groups)), self._key_group_count)
        else:
            yield from merged_sections(info, self._layers, key_group_count=self._key_group_count, keep_deleted=False)


def in_order(state: str, batches: Iterable[pa.RecordBatch], key_group_count: int) -> Iterator[Section]:
    """Turn rows that come by growing key-group, as a database gives them, into sections."""
    behind = 0
    for rows in batches:
        if rows.num_rows:
            groups = groups_of(hash_columns([rows.column("key")]), key_group_count)
            if groups[0] < behind or (np.diff(groups) < 0).any():
                raise StoreError(f"the rows of state {state!r} don't come in the order of their key-groups")
            behind = int(groups[-1])
            yield Section(state, range(int(groups[0]), behind + 1), rows)


def row_reader(store: Readable, file: FileEntry) -> StateFileReader:
    """Open a row file that a manifest lists."""
    assert file.form == ROWS, file
    return StateFileReader(
        partial(store.read, file.name),
        name=file.name,
        bytes=file.bytes,
        index_bytes=file.index_bytes,
        index_checksum=file.index_checksum,
    )


def write_rows(
    store: Store, name: str, states: Sequence[StateInfo], sections: Iterator[Section], *, key_group_count: int
) -> Chain:
    """Write one row file with these sections; none if there are no sections."""
    first = next(sections, None)
    if first is None:
        return ()
    encoder = StateFileEncoder(key_group_count=key_group_count)
    store.write(name, encoder.chunks(states, itertools.chain((first,), sections)))
    summary = encoder.summary
    return (
        FileEntry(
            name=name,
            bytes=summary.bytes,
            checksum=summary.checksum,
            index_bytes=summary.index_bytes,
            index_checksum=summary.index_checksum,
        ),
    )
