"""How far event time has come in an operator: what `ctx.watermark_ms` is, kept in snapshots.

After a restore, and before any record is processed, it is what it was when the snapshot was taken. So a window that was
emitted stays closed. The watermarks that arrive may be lower at first, since upstream operators and channels begin again;
they count once they are higher.

Two subtasks of an operator need not agree at a marker. An idle channel may have become active before or after the others
advanced, and a marker may overtake watermarks. So the watermark of a keyed operator is kept by key-group. A subtask whose
key-groups come from several subtasks uses the watermark of each key until event time has passed them all. With the least of
their watermarks, a window that was emitted would open again; with the greatest, a record would be late that was not. A
subtask without keys takes its own watermark if the parallelism is the same, and otherwise the least.

The end of time (`MAX_WATERMARK_MS`) is not kept, or all records that are added to a bounded input afterwards would be late.
What is kept is the least time that agrees with what the function has seen: the event time before the end, or the instant of
the last timer that fired at the end, whichever is later (docs/adr/018). So a window that was emitted because the input ended
stays closed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.channels.elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.dataflow.operators.base import OperatorContext
from tidegate.hashing import hash_columns
from tidegate.keygroups import groups_of, key_groups_of
from tidegate.state.event_time import WATERMARK
from tidegate.state.operator_state import FrozenItems


class OperatorTime:
    """The event time of one operator in one subtask. `at_ms` is its watermark, except for key-groups ahead of it."""

    def __init__(self, context: OperatorContext, *, keyed: bool) -> None:
        self._subtask = context.subtask
        self._parallelism = context.parallelism
        self._key_group_count = context.key_group_count
        self._groups = (
            key_groups_of(context.subtask, parallelism=context.parallelism, key_group_count=context.key_group_count)
            if keyed
            else None
        )
        self._ahead: np.ndarray[Any, np.dtype[np.int64]] | None = None  # by key-group, for all key-groups of the job
        self._last_ms = MIN_WATERMARK_MS  # what a snapshot keeps of `at_ms`: never the end of time
        self.at_ms = MIN_WATERMARK_MS

    def load(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Load the restored rows."""
        rows = [row for batch in batches for row in batch.column("value").to_pylist()]
        count = rows[0]["of"] if rows else 1
        reached = np.full(count, MIN_WATERMARK_MS, np.int64)
        for row in rows:
            reached[row["first"] : row["stop"]] = row["at_ms"]
        if self._groups is not None and count == self._key_group_count:
            own = reached[self._groups.start : self._groups.stop]
            self._ahead = reached if own.max() > own.min() else None
        else:
            own = reached[self._subtask : self._subtask + 1] if count == self._parallelism else reached
        self._last_ms = self.at_ms = int(own.min())

    def advance(self, at_ms: int) -> int:
        """Take a watermark, and return the operator's watermark after it."""
        if at_ms > self.at_ms:
            self.at_ms = at_ms
            if at_ms != MAX_WATERMARK_MS:
                self._last_ms = at_ms
                if (
                    self._ahead is not None
                    and self._groups is not None
                    and (self._ahead[self._groups.start : self._groups.stop].max() <= at_ms)
                ):
                    self._ahead = None
        return self.at_ms

    def on_fired(self, at_ms: int) -> None:
        """Note that timers up to this instant have fired."""
        if self.at_ms == MAX_WATERMARK_MS:
            self._last_ms = max(self._last_ms, min(at_ms, MAX_WATERMARK_MS - 1))

    @property
    def is_one(self) -> bool:
        """Whether the watermark is the same for all keys."""
        return self._ahead is None or self.at_ms == MAX_WATERMARK_MS

    def of_keys(self, columns: Sequence[pa.Array]) -> Any:
        """Return the watermark of each record, by its key."""
        assert self._ahead is not None
        return np.maximum(self._ahead[groups_of(hash_columns(columns), self._key_group_count)], self.at_ms)

    def freeze(self) -> FrozenItems:
        frozen = FrozenItems()
        count = self._parallelism if self._groups is None else self._key_group_count
        frozen.put(
            WATERMARK,
            [
                {"first": first, "stop": stop, "of": count, "at_ms": at_ms}
                for first, stop, at_ms in self._saved()
                if at_ms != MIN_WATERMARK_MS
            ],
        )
        return frozen

    def _saved(self) -> Iterable[tuple[int, int, int]]:
        if self._groups is None:
            return [(self._subtask, self._subtask + 1, self._last_ms)]
        if self._ahead is None:
            return [(self._groups.start, self._groups.stop, self._last_ms)]
        start = self._groups.start
        at_ms = np.maximum(self._ahead[start : self._groups.stop], self._last_ms)
        return [(start + first, start + stop, int(at_ms[first])) for first, stop in _stretches(at_ms)]


def _stretches(values: np.ndarray[Any, Any]) -> Iterator[tuple[int, int]]:
    """Yield the start and stop of each run of equal values."""
    return pairwise([0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)])
