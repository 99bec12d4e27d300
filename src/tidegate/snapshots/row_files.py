"""Row files: the form of a piece of a snapshot, unless the backend has native files."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TypeAlias

from tidegate.snapshots.manifest import ROWS, FileEntry
from tidegate.state.format import StateFileEncoder, StateFileReader
from tidegate.state.sections import Section, StateInfo
from tidegate.store.base import Readable, Store

Chain: TypeAlias = tuple[FileEntry, ...]


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
    """Write one row file with these sections, or none if there are no sections."""
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
