"""A piece of a snapshot in canonical form: one row file, whatever chain or backend it was kept in.

This is what lets a savepoint be made of a snapshot without the job. The rows are the same, in the same key-groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa

from tidegate.errors import StoreError
from tidegate.hashing import hash_columns
from tidegate.keygroups import groups_of
from tidegate.snapshots.manifest import ROWS, Manifest, PieceEntry
from tidegate.snapshots.plan import state_info
from tidegate.snapshots.reading import restored_rows
from tidegate.snapshots.writing import row_reader, write_rows
from tidegate.state.merging import merged_sections
from tidegate.state.sections import Section, StateInfo, StateKind
from tidegate.store.base import Store
from tidegate.store.layout import state_file_name


def rewritten(source: Store, manifest: Manifest, operator: str, piece: PieceEntry, target: Store) -> PieceEntry:
    """Writes the piece to `target` as one file; for `store.savepoints.export_snapshot`."""
    states = list(map(state_info, manifest.operators[operator].states))
    sections = (section for info in states for section in piece_sections(source, manifest, operator, piece, info))
    name = state_file_name(attempt=manifest.attempt, operator=operator, subtask=piece.subtask, epoch=manifest.epoch)
    return replace(piece, files=write_rows(target, name, states, sections, key_group_count=manifest.key_group_count))


def piece_sections(
    source: Store, manifest: Manifest, operator: str, piece: PieceEntry, info: StateInfo
) -> Iterator[Section]:
    """What the piece holds of a state, resolved, in the order in which a row file has it."""
    row_files = [file for file in piece.files if file.form == ROWS]
    if info.kind is not StateKind.KEYED:
        count = piece.item_counts.get(info.name, 0)
        if count:
            for rows in row_reader(source, row_files[-1]).read_items(info.name, 0, count):
                yield Section(info.name, None, rows)
    elif len(row_files) == len(piece.files):
        yield from merged_sections(
            info,
            [row_reader(source, file) for file in row_files],
            key_group_count=manifest.key_group_count,
            keep_deleted=False,
        )
    else:
        # The pieces of an operator are those of its subtasks, so that its own parallelism gives just this one's rows.
        rows = restored_rows(
            manifest, operator, store=source, subtask=piece.subtask, parallelism=manifest.operators[operator].parallelism
        )[info.name]
        yield from in_order(info.name, rows, manifest.key_group_count)


def in_order(state: str, batches: Iterable[pa.RecordBatch], key_group_count: int) -> Iterator[Section]:
    """Sections of rows that come by growing key-group, as a database gives them: they go on as they come."""
    behind = 0
    for rows in batches:
        if rows.num_rows:
            groups = groups_of(hash_columns([rows.column("key")]), key_group_count)
            if groups[0] < behind or (np.diff(groups) < 0).any():
                raise StoreError(f"the rows of state {state!r} don't come in the order of their key-groups")
            behind = int(groups[-1])
            yield Section(state, range(int(groups[0]), behind + 1), rows)
