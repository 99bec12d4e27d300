"""The splits of a source that were read to their end: keyed state of the source, by the name of the split.

The offsets of a source are operator state, which is written whole in every snapshot, so they are for the splits that are
being read. A source whose splits end, such as a folder of files, has ever more of them. It puts those that have ended here.
A snapshot then holds what has ended since the one before, and a name that is here is never forgotten by itself.

As with any keyed state, the key-group of its name decides which subtask has a split, at any parallelism. So a reader of such
a source asks `owned` which of the splits are its own.

The state is in memory, whatever the job's backend is: a reader looks up every name that it finds in every listing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from tidegate.hashing import hash_columns
from tidegate.keygroups import groups_of, key_groups_of
from tidegate.state.cells import GONE
from tidegate.state.descriptors import Descriptor
from tidegate.state.heap import HeapBackend
from tidegate.state.sections import FrozenState, StateKind

_POSITION = Descriptor(kind=StateKind.KEYED, shape="value", item=pa.int64(), name="__finished")
FINISHED = _POSITION.info(pa.string())


class FinishedSplits:
    """Those of one subtask, each with the position of its end."""

    def __init__(self, *, subtask: int = 0, parallelism: int = 1, key_group_count: int = 128) -> None:
        self._groups = key_groups_of(subtask, parallelism=parallelism, key_group_count=key_group_count)
        self._key_group_count = key_group_count
        self._backend = HeapBackend(key_type=pa.string(), key_group_count=key_group_count)
        self._cells: Any = self._backend.table(_POSITION).cells

    # What a reader calls.

    def owned(self, splits: Sequence[str]) -> list[bool]:
        """Return for each of these splits whether it belongs to this subtask."""
        if not splits:
            return []
        groups = groups_of(hash_columns([pa.array(splits, pa.string())]), self._key_group_count)
        owned: list[bool] = ((groups >= self._groups.start) & (groups < self._groups.stop)).tolist()
        return owned

    def end_of(self, split: str) -> int | None:
        """Return the position at which the split ended; None if it has not ended."""
        end = self._cells.get(split)
        return None if end is GONE else int(end)

    def add(self, split: str, end: int) -> None:
        """Note that the split was read to its end."""
        self._cells.set(split, end)

    def remove(self, split: str) -> None:
        """Forget the split: there is more of it, or it is gone and won't come back."""
        self._cells.delete(split)

    def all(self) -> dict[str, int]:
        """Return all of them. This takes a time that grows with their number."""
        return dict(self._cells.held())

    # What the engine calls.

    def load(self, batches: Iterable[pa.RecordBatch], *, known: bool) -> None:
        """Load rows of a snapshot. `known` is as in `KeyedBackend.load`."""
        for rows in batches:
            self._backend.load(FINISHED.name, rows, known=known)

    def freeze(self) -> FrozenState:
        return self._backend.freeze()

    def maintain(self, budget: int) -> None:
        self._backend.maintain(budget)
