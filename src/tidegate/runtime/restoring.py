"""Reading a snapshot back at any parallelism, and whether the job as it is now can take it in.

Each operator gets the rows of its own key-groups and its share of the operator state, decided by protocol/recovery.py
from the manifest alone. Who takes rows in never sees how they are kept: a chain of files comes out resolved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import pyarrow as pa

from tidegate.errors import RestoreError
from tidegate.protocol.recovery import Piece, Redistribution, SubtaskRestore, plan_operator_restore
from tidegate.state.format import StateFileReader
from tidegate.store.base import Store
from tidegate.store.manifest import FileEntry, Manifest, OperatorEntry, StateEntry
from tidegate.types import ddl_of


def restored_rows(manifest: Manifest, operator: str, *, store: Store, subtask: int,
                  parallelism: int) -> Mapping[str, Iterable[pa.RecordBatch]]:
    """The rows of each state that belong to this subtask now. Read when iterated, once."""
    entry = manifest.operators.get(operator)
    if entry is None:
        return {}
    plan = plan_operator_restore(
        [Piece(subtask=piece.subtask, key_groups=range(*piece.key_groups), item_counts=piece.item_counts)
         for piece in entry.pieces],
        {state.name: Redistribution(state.kind) for state in entry.states},
        parallelism=parallelism, key_group_count=manifest.key_group_count)[subtask]
    readers = [[_reader(store, file) for file in piece.files] for piece in entry.pieces]
    return {state.name: _rows(state, plan, readers) for state in entry.states}


def _rows(state: StateEntry, plan: SubtaskRestore, readers: Sequence[Sequence[StateFileReader]]) -> Iterator[pa.RecordBatch]:
    if state.kind == "keyed":
        for read in plan.keyed:
            for reader in readers[read.piece]:
                yield from reader.read_groups(state.name, read.groups)
    else:
        for items in plan.items:
            if items.state == state.name:
                for reader in readers[items.piece]:
                    yield from reader.read_items(state.name, items.start, items.stop)


def _reader(store: Store, file: FileEntry) -> StateFileReader:
    return StateFileReader(partial(store.read, file.name), name=file.name, bytes=file.bytes, index_bytes=file.index_bytes,
                           index_checksum=file.index_checksum)


def check_restorable(manifest: Manifest, *, operators: Mapping[str, Sequence[tuple[str, str, pa.Schema]]],
                     key_group_count: int) -> None:
    """Raises `RestoreError` where the job as it is now can't take the snapshot in. `operators` maps a name to its
    states as (name, kind, schema)."""
    if manifest.key_group_count != key_group_count:
        raise RestoreError(f"the snapshot of epoch {manifest.epoch} has {manifest.key_group_count} key-groups and the job "
                           f"{key_group_count}: the number is fixed for the life of a job's state, set it back")
    for name, entry in manifest.operators.items():
        if name not in operators:
            if any(piece.files for piece in entry.pieces):
                raise RestoreError(f"the snapshot of epoch {manifest.epoch} holds state of operator {name!r}, which the job "
                                   f"doesn't have (it has {sorted(operators)}): keep its name, or start from an empty "
                                   f"folder")
            continue
        _check_states(name, entry, operators[name])


def _check_states(operator: str, entry: OperatorEntry, declared: Sequence[tuple[str, str, pa.Schema]]) -> None:
    now = {name: (kind, schema) for name, kind, schema in declared}
    for state in entry.states:
        if state.name not in now:
            raise RestoreError(f"operator {operator!r} no longer declares the state {state.name!r} that its snapshot holds: "
                               f"declare it again, or start from an empty folder")
        kind, schema = now[state.name]
        if (kind, schema) != (state.kind, state.arrow_schema()):
            raise RestoreError(f"state {state.name!r} of operator {operator!r} was {state.kind} ({state.type}) and is now "
                               f"{kind} ({ddl_of(schema)}): set the type back")
