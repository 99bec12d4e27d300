"""Functions of whole windows that have no place in time: windows of a number of records, and the global window.

`CountFunctionOperator` has the records by key and nothing else. Whenever a key has enough, its earliest ones are handed over
and deleted. What is left has no window yet, and stays in the state at the end of input.

Functions of the global window are in global_windows.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import KeyedBackend, Operator, OperatorContext
from tidegate.dataflow.operators.budget import Pace
from tidegate.dataflow.operators.record_windows import all_matches, plain_columns, taken
from tidegate.dataflow.operators.showing import Showing
from tidegate.dataflow.operators.stepwise import Steps
from tidegate.dataflow.operators.window import WindowOperator, window_key_type
from tidegate.dataflow.operators.window_results import Bounds, Group, WindowResults
from tidegate.dataflow.windows import Global
from tidegate.state.column_table import ColumnTable
from tidegate.state.descriptors import Descriptor, Records
from tidegate.state.event_time import WATERMARK
from tidegate.state.key_store import IntArray
from tidegate.state.sections import StateInfo


@dataclass(frozen=True, slots=True)
class FunctionWindowSpec:
    """A function of windows of a number of records, or of all records of a key. `schema` is that of the records, without
    dictionaries. Without `count`, `showing` says when it is called."""

    assigner: Global
    key: tuple[str, ...]
    results: WindowResults
    schema: pa.Schema
    showing: Showing | None = None
    kind: ClassVar[str] = "window function"
    stateful: ClassVar[bool] = True
    in_columns: ClassVar[bool] = True

    def create(self, node: Node) -> Operator:
        if self.assigner.count is not None:
            return CountFunctionOperator(node, self.assigner, self)
        from tidegate.dataflow.operators.global_windows import GlobalFunctionOperator  # which imports this module

        return GlobalFunctionOperator(node, self)

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        of_key = window_key_type(node.input_schemas[0], self.key)
        return (*(each.info(of_key) for each in self.descriptors), WATERMARK)

    @property
    def records(self) -> Records:
        return Records("records", list(self.schema))

    @property
    def descriptors(self) -> tuple[Descriptor, ...]:
        return (self.records, *(() if self.showing is None else self.showing.descriptors(windowed=False)))

    @property
    def text(self) -> str:
        return f"{self.assigner.text}{'' if self.showing is None else self.showing.text}: {self.results.text}"


class CountFunctionOperator(WindowOperator):
    def __init__(self, node: Node, assigner: Global, spec: FunctionWindowSpec) -> None:
        super().__init__(node, keys=(spec.key,))
        assert assigner.count is not None
        self._size = assigner.count
        self._spec = spec

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._pace = Pace(context.budget)

    def _open_state(self, backend: KeyedBackend) -> None:
        self._records = backend.record_state(self._spec.records).table()

    def _add(self, batch: pa.RecordBatch, port: int) -> Steps:
        keys = self._keys(batch)
        self._records.append(keys, plain_columns(batch))
        known = ColumnTable(self._key_type, [])
        known.rows_of(keys)
        distinct = known.keys(known.rows())
        full = self._records.counts(distinct) // self._size  # windows, by key
        due = np.flatnonzero(full)
        while len(due):
            # Some keys with all of their windows, or one key with some of them.
            count = int(np.searchsorted(np.cumsum(full[due]), self._pace.portion, side="right"))
            some = due[: max(1, count)]
            windows = full[some] if count else np.array([self._pace.portion])
            self._call([column.take(pa.array(some)) for column in distinct], windows)
            full[some] -= windows
            due = due[full[due] > 0]
            is_over = self._pace.is_over()
            if (self._is_spent(0) or is_over) and len(due):
                yield

    def _call(self, keys: list[pa.Array], windows: IntArray) -> None:
        """Call the function for the earliest windows of each key."""
        probes, found = all_matches(self._records, keys)
        counts = np.bincount(probes, minlength=len(windows))
        places = np.arange(len(probes)) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = found[places < (windows * self._size)[probes]]
        total = int(windows.sum())
        group = Group(taken(self._records, rows, self._spec.schema), np.full(total, self._size))
        of_windows = pa.array(np.repeat(np.arange(len(windows)), windows))
        of_keys = [column.take(of_windows) for column in keys] if self._key_columns[0] else []
        bounds = Bounds(pa.nulls(total), pa.nulls(total))
        for batch in self._spec.results.of(self.name, self.node.schema, of_keys, bounds, [group]):
            self._give(batch)
        self._records.delete(rows)

    def _fire(self, at_ms: int) -> Steps:
        yield from ()

    def _expire(self) -> None:
        """Nothing is late."""
