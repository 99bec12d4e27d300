"""A complete snapshot: a manifest, with the store that holds its files; and the reader of its pieces.

A snapshot gives its restore plan for a job as it is now, the rows of an operator's state at any parallelism, a reader of one
piece, and a copy of a piece in the form that any backend restores. Nothing here runs a job.

Readers get the same rows whatever the form of a piece: a chain of row files is merged, and native files are read as rows.
Keyed state is read by key-group. Operator state is written whole every time, so the last row file has all of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from tidegate.errors import StoreError
from tidegate.hashing import hash_columns
from tidegate.keygroups import groups_of
from tidegate.protocol.recovery import Piece, SubtaskShares, shares_of
from tidegate.snapshots.committed import still_to_commit
from tidegate.snapshots.manifest import ROWS, Manifest, OperatorEntry, PieceEntry, StateEntry
from tidegate.snapshots.native import NativeReader
from tidegate.snapshots.plan import DeclaredOperator, RestorePlan, plan_restore
from tidegate.snapshots.row_files import row_reader, write_rows
from tidegate.state.merging import merged_sections, resolved_rows
from tidegate.state.sections import Section, SectionReader, StateInfo, StateKind
from tidegate.store import layout
from tidegate.store.base import Readable, Store


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One of a job's own snapshots, or a savepoint. `scratch` is the folder on this host for files that have to be
    downloaded as a whole; None: the system's folder for temporary files."""

    store: Store
    manifest: Manifest
    scratch: str | None = None

    @property
    def is_savepoint(self) -> bool:
        return self.manifest.savepoint is not None

    @property
    def address(self) -> str:
        """Return the address at which `find_snapshot` finds this snapshot."""
        if self.is_savepoint:
            return self.store.address
        name = layout.manifest_name(epoch=self.manifest.epoch, attempt=self.manifest.attempt)
        return layout.inside(self.store.address, name)

    def still_to_commit(self) -> Snapshot:
        """Return the snapshot without the committables that are known to be committed (committed.py)."""
        return replace(self, manifest=still_to_commit(self.store, self.manifest))

    def plan(
        self, operators: Sequence[DeclaredOperator], *, key_group_count: int, drop: Collection[str] = ()
    ) -> RestorePlan:
        """Return what a restore into a job with these operators would do (plan.py)."""
        return plan_restore(self.manifest, operators=operators, key_group_count=key_group_count, drop=drop)

    def rows(
        self, operator: str, *, subtask: int = 0, parallelism: int = 1, plan: RestorePlan | None = None
    ) -> Mapping[str, Iterable[pa.RecordBatch]]:
        """Return the rows of each state that belong to this subtask (protocol/recovery.py). They are read when they are
        iterated, once.

        With a plan, the rows have the names and types that the job declares, without what is dropped; `RestoreError` if
        something is refused. Without a plan, they are the rows of the snapshot.
        """
        if plan is not None:
            plan.check()
            planned = plan.of(operator)
            if planned is None or planned.was is None:
                return {}
            rows = self.rows(planned.was, subtask=subtask, parallelism=parallelism)
            return {
                state.name: rows[state.was] if state.convert is None else map(state.convert, rows[state.was])
                for state in planned.states
                if state.taken_in and state.was is not None
            }
        entry = self.manifest.operators.get(operator)
        if entry is None:
            return {}
        shares = shares_of(
            [
                Piece(subtask=piece.subtask, key_groups=range(*piece.key_groups), item_counts=piece.item_counts)
                for piece in entry.pieces
            ],
            {state.name: StateKind(state.kind) for state in entry.states},
            parallelism=parallelism,
            key_group_count=self.manifest.key_group_count,
        )[subtask]
        pieces = [self.piece(operator, piece) for piece in entry.pieces]
        return {state.name: _rows(state, shares, pieces) for state in entry.states}

    def piece(self, operator: str, piece: PieceEntry) -> PieceReader:
        """Return the reader of one of the operator's pieces."""
        entry = self.manifest.operators[operator]
        return PieceReader(self.store, entry, piece, key_group_count=self.manifest.key_group_count, scratch=self.scratch)

    def rewrite(self, operator: str, piece: PieceEntry, target: Store) -> PieceEntry:
        """Write the piece to `target` in canonical form, as one row file with the same rows."""
        states = [state.info for state in self.manifest.operators[operator].states]
        reader = self.piece(operator, piece)
        sections = (section for info in states for section in reader.sections(info))
        name = layout.state_file_name(
            attempt=self.manifest.attempt, operator=operator, subtask=piece.subtask, epoch=self.manifest.epoch
        )
        files = write_rows(target, name, states, sections, key_group_count=self.manifest.key_group_count)
        return replace(piece, files=files)


def _rows(state: StateEntry, shares: SubtaskShares, pieces: Sequence[PieceReader]) -> Iterator[pa.RecordBatch]:
    if state.kind == "keyed":
        for share in shares.keyed:
            yield from pieces[share.piece].keyed(state.name, share.groups)
    else:
        for items in shares.items:
            if items.state == state.name:
                yield from pieces[items.piece].items(state.name, items.start, items.stop)


class PieceReader:
    """The reader of one piece. It reads nothing before rows are requested."""

    def __init__(
        self,
        store: Readable,
        entry: OperatorEntry,
        piece: PieceEntry,
        *,
        key_group_count: int,
        scratch: str | None = None,
    ) -> None:
        rows = [row_reader(store, file) for file in piece.files if file.form == ROWS]
        native = [file for file in piece.files if file.form != ROWS]
        self._piece = piece
        self._key_group_count = key_group_count
        self._items = rows[-1] if rows else None
        self._is_native = bool(native)
        self._layers: Sequence[SectionReader] = rows
        if native:
            states = [state.info for state in entry.states]
            self._layers = [NativeReader(store, native, states, key_group_count=key_group_count, scratch=scratch)]

    def keyed(self, state: str, groups: range) -> Iterator[pa.RecordBatch]:
        """Read the rows of a keyed state in these key-groups, in the order of key-groups."""
        return resolved_rows(state, self._layers, groups)

    def items(self, state: str, start: int = 0, stop: int | None = None) -> Iterator[pa.RecordBatch]:
        """Read the rows of a state that is not keyed, all of them or from `start` to `stop`."""
        stop = self._piece.item_counts.get(state, 0) if stop is None else stop
        if self._items is not None and stop > start:
            yield from self._items.read_items(state, start, stop)

    def sections(self, info: StateInfo) -> Iterator[Section]:
        """Read all of a state, as the sections of a row file."""
        if info.kind is not StateKind.KEYED:
            yield from (Section(info.name, None, rows) for rows in self.items(info.name))
        elif self._is_native:
            yield from in_order(info.name, self.keyed(info.name, range(*self._piece.key_groups)), self._key_group_count)
        else:
            yield from merged_sections(info, self._layers, key_group_count=self._key_group_count, with_deleted=False)


def in_order(state: str, batches: Iterable[pa.RecordBatch], key_group_count: int) -> Iterator[Section]:
    """Turn rows in the order of key-groups into sections."""
    last_group = 0
    for rows in batches:
        if rows.num_rows:
            groups = groups_of(hash_columns([rows.column("key")]), key_group_count)
            if groups[0] < last_group or (np.diff(groups) < 0).any():
                raise StoreError(f"the rows of state {state!r} don't come in the order of their key-groups")
            last_group = int(groups[-1])
            yield Section(state, range(int(groups[0]), last_group + 1), rows)
