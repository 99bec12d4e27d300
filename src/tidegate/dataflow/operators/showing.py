"""What shows the results of windows before they are complete (dataflow/triggers.py): the clock, and triggers by records.

By the clock, the results of the keys that have changed are shown some time after the first change (`Unshown`). Which keys
these are is not in the state. After a restore all of them count as changed: what was shown before the failure may not have
been committed. So a result may be shown twice.

Triggers by records have accumulators. Windows of aggregates keep these beside their own. Windows of records keep them in a
state of their own, with the same keys as the records (`RecordTriggers`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from tidegate.dataflow.aggregates.aggregation import Aggregation
from tidegate.dataflow.operators.base import AT_ONCE_MS, OperatorContext
from tidegate.dataflow.operators.user_code import RAISED, blame
from tidegate.errors import TidegateError
from tidegate.state.column_table import ColumnTable
from tidegate.state.descriptors import Columns
from tidegate.state.key_store import Array
from tidegate.state.vectors import VectorField

Keys: TypeAlias = Sequence[pa.Array]


@dataclass(frozen=True, slots=True)
class Showing:
    """When windows of records show their results before they are complete. `triggers` are those by records: an aggregation
    of which only the triggers count."""

    triggers: Aggregation | None = None
    after_ms: int | None = None
    purges: bool = False

    @property
    def text(self) -> str:
        """What `explain` shows."""
        by_clock = [] if self.after_ms is None else [f"after {self.after_ms} ms"]
        by_records = [] if self.triggers is None else self.triggers.trigger_labels
        return f", shown {' or '.join([*by_records, *by_clock])}{', purging' if self.purges else ''}"

    def descriptors(self, *, windowed: bool) -> tuple[Columns, ...]:
        """Return the state of the triggers by records, if there are any."""
        if self.triggers is None:
            return ()
        fields = [VectorField(each.name, each.type, each.default) for each in self.triggers.accumulators]
        return (Columns("triggers", fields, windowed=windowed),)


class Unshown:
    """The keys that have changed since they were shown, by window (or pane), and when the clock shows them."""

    def __init__(self, after_ms: int | None, key_type: pa.DataType, context: OperatorContext) -> None:
        """Without `after_ms`, the clock shows nothing."""
        self._after_ms = after_ms
        self._key_type = key_type
        self._now_ms = context.user_now_ms
        self._by_epoch = context.batch_now_ms is not None
        self._keys: dict[int, ColumnTable] = {}
        self._due_ms: int | None = None

    @property
    def goes_by_clock(self) -> bool:
        return self._after_ms is not None

    def note(self, keys: Keys, at: int = 0) -> None:
        """Note that keys have changed, which may repeat."""
        if self._after_ms is None or not len(keys[0]):
            return
        if self._due_ms is None:
            self._due_ms = self._now_ms() + self._after_ms
        if at not in self._keys:
            self._keys[at] = ColumnTable(self._key_type, [])
        self._keys[at].rows_of(keys)

    def taken(self) -> dict[int, ColumnTable]:
        """Return the keys that are to be shown, and begin again."""
        keys, self._keys, self._due_ms = self._keys, {}, None
        return keys

    def deadline_ms(self) -> int | None:
        """In a micro-batch the clock stands still: the results are due from the beginning or not in this batch."""
        if self._due_ms is None or not self._by_epoch:
            return self._due_ms
        return AT_ONCE_MS if self._due_ms <= self._now_ms() else None


class RecordTriggers:
    """The triggers by records of windows that keep records."""

    def __init__(self, operator: str, triggers: Aggregation) -> None:
        self._operator = operator
        self._triggers = triggers

    def add(self, table: ColumnTable, keys: Keys, records: pa.RecordBatch) -> tuple[list[pa.Array], Array]:
        """Add records. Return their keys, each once, and for which of them a trigger fires."""
        rows = table.rows_of(keys)
        table.change(rows)
        with self._blaming():
            self._triggers.add(table.vectors, rows, self._triggers.inputs(records))
            rows = np.unique(rows)
            fires = self._triggers.fires(table.vectors, rows)
        return table.keys(rows), fires

    def begin_again(self, table: ColumnTable, keys: Keys) -> None:
        """Let the triggers begin again for these keys, as their results were shown."""
        rows = table.find(keys)
        rows = rows[rows >= 0]  # records that are older than the trigger have no row
        table.change(rows)
        self._triggers.begin_triggers(table.vectors, rows)

    def delete(self, table: ColumnTable, keys: Keys) -> None:
        """Forget these keys, as their records were deleted."""
        rows = table.find(keys)
        table.delete(rows[rows >= 0])

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        try:
            yield
        except TidegateError:
            raise
        except RAISED as error:
            blame(self._operator, error, at="a trigger of a window")
