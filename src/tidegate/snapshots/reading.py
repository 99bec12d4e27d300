"""Reading a snapshot back at any parallelism, into the job as it is now (restore_plan.py says what becomes of each state).

Each operator gets the rows of its own key-groups and its share of the operator state, decided by protocol/recovery.py
from the manifest alone. Who takes rows in never sees how they are kept: a chain of files comes out resolved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from tidegate.protocol.recovery import Piece, Redistribution, SubtaskRestore, plan_operator_restore
from tidegate.snapshots.manifest import ROWS, Manifest, OperatorEntry, PieceEntry, StateEntry
from tidegate.snapshots.native import NativeReader
from tidegate.snapshots.plan import RestorePlan, state_info
from tidegate.snapshots.writing import row_reader
from tidegate.state.format import StateFileReader
from tidegate.state.merging import resolved_rows
from tidegate.state.sections import SectionReader
from tidegate.store.base import Readable


def restored_rows(
    manifest: Manifest, operator: str, *, store: Readable, subtask: int, parallelism: int, plan: RestorePlan | None = None
) -> Mapping[str, Iterable[pa.RecordBatch]]:
    """The rows of each state that belong to this subtask now. Read when iterated, once.

    With a plan they are what the job declares: under its names, in its types, without what is dropped; nothing at all is
    read where something is refused. Without one they are what the snapshot has.
    """
    if plan is not None:
        plan.check()
        planned = plan.of(operator)
        if planned is None or planned.was is None:
            return {}
        rows = restored_rows(manifest, planned.was, store=store, subtask=subtask, parallelism=parallelism)
        return {
            state.name: rows[state.was] if state.convert is None else map(state.convert, rows[state.was])
            for state in planned.states
            if state.taken_in and state.was is not None
        }
    entry = manifest.operators.get(operator)
    if entry is None:
        return {}
    reads = plan_operator_restore(
        [
            Piece(subtask=piece.subtask, key_groups=range(*piece.key_groups), item_counts=piece.item_counts)
            for piece in entry.pieces
        ],
        {state.name: Redistribution(state.kind) for state in entry.states},
        parallelism=parallelism,
        key_group_count=manifest.key_group_count,
    )[subtask]
    pieces = [_Piece.of(piece, entry, store=store, key_group_count=manifest.key_group_count) for piece in entry.pieces]
    return {state.name: _rows(state, reads, pieces) for state in entry.states}


@dataclass(frozen=True, slots=True)
class _Piece:
    """Where the rows of one piece are. Operator state is written whole every time: the last file of rows has it all."""

    keyed: Sequence[SectionReader]
    items: StateFileReader | None

    @classmethod
    def of(cls, piece: PieceEntry, entry: OperatorEntry, *, store: Readable, key_group_count: int) -> _Piece:
        rows = [row_reader(store, file) for file in piece.files if file.form == ROWS]
        native = [file for file in piece.files if file.form != ROWS]
        keyed: Sequence[SectionReader] = rows
        if native:
            keyed = [NativeReader(store, native, list(map(state_info, entry.states)), key_group_count=key_group_count)]
        return cls(keyed, rows[-1] if rows else None)


def _rows(state: StateEntry, plan: SubtaskRestore, pieces: Sequence[_Piece]) -> Iterator[pa.RecordBatch]:
    if state.kind == "keyed":
        for read in plan.keyed:
            yield from resolved_rows(state.name, pieces[read.piece].keyed, read.groups)
    else:
        for share in plan.items:
            items = pieces[share.piece].items
            if share.state == state.name and items is not None:
                yield from items.read_items(state.name, share.start, share.stop)
