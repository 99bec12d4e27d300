"""Aggregates of windows: what the kinds of windows have in common that keep accumulators.

State is one columnar state, with the accumulators of each key and window. How windows are told apart in it is up to the
kind of windows.

Not here: when windows fire (window.py and the kinds of windows), and what an aggregate computes (dataflow/aggregates).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.dataflow.aggregates.aggregation import Aggregation
from tidegate.dataflow.aggregates.base import SumTooLarge
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.aggregate import blame_sum
from tidegate.dataflow.operators.base import KeyedBackend, OperatorContext
from tidegate.dataflow.operators.stepwise import Steps
from tidegate.dataflow.operators.user_code import RAISED, blame
from tidegate.dataflow.operators.window import COUNT, END, START, WindowOperator
from tidegate.dataflow.windows import Assigner, Global, Sessions
from tidegate.errors import TidegateError
from tidegate.state.column_table import ColumnState, ColumnTable
from tidegate.state.descriptors import Columns
from tidegate.state.vectors import VectorField


@dataclass(frozen=True, slots=True)
class WindowSettings:
    """What all kinds of windows have. Without `key` there is one window for all records of a time. `late` is the tag of the
    side output for late records, or None."""

    key: tuple[str, ...]
    aggregation: Aggregation
    lateness_ms: int = 0
    late: str | None = None
    early_ms: int | None = None  # after which time a change is shown before its window is complete
    purges: bool = False  # whether what was shown is dropped, so that the next result begins from nothing
    renamed: Mapping[str, str] = field(default_factory=dict)  # results, by their names now


class AggregatingWindowOperator(WindowOperator):
    """Aggregates by key and window."""

    def __init__(self, node: Node, assigner: Assigner, settings: WindowSettings) -> None:
        super().__init__(node, keys=(settings.key,), lateness_ms=settings.lateness_ms, late=(settings.late,))
        self._descriptor = window_state(assigner, settings)
        self._settings = settings
        self._aggregation = settings.aggregation
        self._next_number = 0  # of the next record, in the order of arrival

    def _open_state(self, backend: KeyedBackend) -> None:
        self._state: ColumnState = backend.column_state(self._descriptor)

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        if self._aggregation.needs_numbers:
            # All records of a key were numbered by one subtask at a time, so numbers have to grow in each of them only.
            for table in map(self._state.window, self._state.windows()):
                rows = table.rows()
                for name in self._aggregation.numbers:
                    self._next_number = max(self._next_number, int(table.vectors[name].values[rows].max(initial=-1)) + 1)

    # What the kinds of windows use.

    def _numbered(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return records with their numbers as the last column, if an aggregate goes by the order of arrival."""
        if not self._aggregation.needs_numbers:
            return batch
        first = self._next_number
        self._next_number += batch.num_rows
        return batch.append_column("__number", pa.array(np.arange(first, self._next_number)))

    def _new_table(self) -> ColumnTable:
        """Return a table for accumulators that are no state."""
        return ColumnTable(self._key_type, fields_of(self._aggregation))

    def _accumulate(self, table: ColumnTable, rows: Any, records: pa.RecordBatch) -> None:
        table.change(rows)
        with self._blaming(table):
            self._aggregation.add(table.vectors, rows, self._aggregation.inputs(records))

    def _merge_rows(self, table: ColumnTable, rows: Any, other: ColumnTable, other_rows: Any) -> None:
        """Merge rows of another table, which have accumulated later."""
        table.change(rows)
        with self._blaming(table):
            self._aggregation.merge(table.vectors, rows, other.vectors, other_rows)

    def _results(self, table: ColumnTable, rows: Any, bounds: Sequence[pa.Array]) -> pa.RecordBatch:
        """Return the results at these rows."""
        with self._blaming(table):
            results = self._aggregation.results(table.vectors, rows)
        keys = table.keys(rows) if self._settings.key else []
        return pa.RecordBatch.from_arrays([*keys, *bounds, *results], schema=self.node.schema)

    @contextmanager
    def _blaming(self, table: ColumnTable) -> Iterator[None]:
        """Say in errors of aggregates where they happened."""
        try:
            yield
        except TidegateError:
            raise
        except SumTooLarge as error:
            blame_sum(self.name, error, table)
        except RAISED as error:
            blame(self.name, error, at="aggregates of a window")


class AtOnceWindowOperator(AggregatingWindowOperator):
    """Aggregates to which a batch is added in one step: no function of a user's is called."""

    @abstractmethod
    def _add_all(self, batch: pa.RecordBatch) -> None:
        """Do what `_add` does."""

    def _add(self, batch: pa.RecordBatch, port: int) -> Steps:
        self._add_all(batch)
        yield from ()


def window_state(assigner: Assigner, settings: WindowSettings) -> Columns:
    """Return the state of aggregates by key and window."""
    counts = isinstance(assigner, Global) and assigner.count is not None
    own = (START, END) if isinstance(assigner, Sessions) else (COUNT,) if counts else ()
    fields = [*(VectorField(name, pa.int64(), 0) for name in own), *fields_of(settings.aggregation)]
    renamed = settings.aggregation.renamed(settings.renamed)
    return Columns("windows", fields, windowed=not isinstance(assigner, Global), renamed=renamed)


def fields_of(aggregation: Aggregation) -> list[VectorField]:
    return [VectorField(each.name, each.type, each.default) for each in aggregation.accumulators]
