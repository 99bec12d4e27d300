"""Reading a snapshot back at any parallelism, and whether the job as it is now can take it in.

Each operator gets the rows of its own key-groups and its share of the operator state, decided by protocol/recovery.py
from the manifest alone. Who takes rows in never sees how they are kept: a chain of files comes out resolved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import pyarrow as pa

from tidegate.errors import RestoreError
from tidegate.protocol.recovery import Piece, Redistribution, SubtaskRestore, plan_operator_restore
from tidegate.runtime.restore_plan import RestorePlan
from tidegate.runtime.snapshots import row_reader
from tidegate.state.format import StateFileReader
from tidegate.state.merging import resolved_rows
from tidegate.store.base import Store
from tidegate.store.manifest import Manifest, OperatorEntry, StateEntry
from tidegate.types import ddl_of


def restored_rows(manifest: Manifest, operator: str, *, store: Store, subtask: int, parallelism: int,
                  plan: RestorePlan | None = None) -> Mapping[str, Iterable[pa.RecordBatch]]:
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
        return {state.name: rows[state.was] if state.convert is None else map(state.convert, rows[state.was])
                for state in planned.states if state.taken_in and state.was is not None}
    entry = manifest.operators.get(operator)
    if entry is None:
        return {}
    reads = plan_operator_restore(
        [Piece(subtask=piece.subtask, key_groups=range(*piece.key_groups), item_counts=piece.item_counts)
         for piece in entry.pieces],
        {state.name: Redistribution(state.kind) for state in entry.states},
        parallelism=parallelism, key_group_count=manifest.key_group_count)[subtask]
    readers = [[row_reader(store, file) for file in piece.files] for piece in entry.pieces]
    return {state.name: _rows(state, reads, readers) for state in entry.states}


def _rows(state: StateEntry, plan: SubtaskRestore, readers: Sequence[Sequence[StateFileReader]]) -> Iterator[pa.RecordBatch]:
    if state.kind == "keyed":
        for read in plan.keyed:
            yield from resolved_rows(state.name, readers[read.piece], read.groups)
    else:
        for items in plan.items:
            if items.state == state.name:
                # Operator state is written whole every time: the last file of a chain has it all.
                yield from readers[items.piece][-1].read_items(state.name, items.start, items.stop)


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
