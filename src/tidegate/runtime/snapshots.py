"""Writing a subtask's part of a snapshot. Runs on the background thread, over frozen state."""

from __future__ import annotations

from itertools import chain
from typing import Any

from tidegate.keygroups import key_groups_of
from tidegate.protocol.recovery import Redistribution
from tidegate.runtime.subtask import Part
from tidegate.state.format import StateFileEncoder
from tidegate.store.base import Store
from tidegate.store.layout import state_file_name
from tidegate.store.manifest import FileEntry, PieceEntry, StateEntry


def write_part(part: Part, *, store: Store, attempt: int, epoch: int, subtask: int, parallelism: int,
               key_group_count: int) -> dict[str, Any]:
    """Writes one operator's frozen state; what the acknowledgement says about it."""
    states = part.frozen.states
    encoder = StateFileEncoder()
    name = state_file_name(attempt=attempt, operator=part.operator, subtask=subtask, epoch=epoch)
    keyed = {info.name for info in states if info.kind is Redistribution.KEYED}
    # Without keyed state the key-groups mean nothing, and there may be more subtasks than groups.
    groups = key_groups_of(subtask, parallelism=parallelism, key_group_count=key_group_count) if keyed else range(0)
    sections = iter(part.frozen.sections())
    first = next(sections, None)
    files: tuple[FileEntry, ...] = ()
    if first is not None:
        store.write(name, encoder.chunks(states, chain((first,), sections)))
        summary = encoder.summary
        files = (FileEntry(name=name, bytes=summary.bytes, checksum=summary.checksum, index_bytes=summary.index_bytes,
                           index_checksum=summary.index_checksum),)
    counts = {state: rows for state, rows in encoder.summary.rows.items() if state not in keyed} if files else {}
    entry = PieceEntry(subtask=subtask, key_groups=(groups.start, groups.stop), files=files, item_counts=counts)
    return {"parallelism": parallelism, "piece": entry.to_json(),
            "states": [StateEntry.of(name=info.name, kind=info.kind.value, shape=info.shape, schema=info.schema).to_json()
                       for info in states]}
