"""select, filter, with_columns and explode: whole columns at a time, by expressions in Spark's SQL dialect.

Each operator is one step from a batch to a batch. Consecutive steps of a chain run as one operator (fusing.py), which
knows the columns that later steps read: a filter doesn't copy the others. A column that nobody reads any more is replaced
by nulls without memory, so that the other columns stay where the expressions look for them.

Invariants:
- a step doesn't change the order of records;
- a filter that keeps all records passes its batch on, and a column that is selected as it is isn't copied;
- no operator emits an empty batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from tidegate.dataflow.changelog import APPEND_ONLY, Changelog
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import Operator
from tidegate.dataflow.operators.user_code import blame
from tidegate.errors import ExpressionError
from tidegate.expressions import Compiled
from tidegate.state.sections import StateInfo
from tidegate.types import rows_of

Names: TypeAlias = "frozenset[str]"


class Step(Protocol):
    """What one operator does with a batch."""

    @property
    def text(self) -> str:
        """What the user wrote, for `explain`."""

    def reads(self, needed: Names) -> Names:
        """Return the columns that it reads, given those of its output that are needed later."""

    def run(self, batch: pa.RecordBatch, needed: Names) -> pa.RecordBatch:
        """Return the output. Columns that aren't needed hold nulls."""


@dataclass(frozen=True, slots=True)
class Select:
    """The columns of the output are expressions."""

    expressions: tuple[Compiled, ...]
    schema: pa.Schema

    @property
    def text(self) -> str:
        return ", ".join(each.text for each in self.expressions)

    def reads(self, needed: Names) -> Names:
        return _read_by(each for each, name in zip(self.expressions, self.schema.names, strict=True) if name in needed)

    def run(self, batch: pa.RecordBatch, needed: Names) -> pa.RecordBatch:
        columns = [
            each(batch) if name in needed else None for each, name in zip(self.expressions, self.schema.names, strict=True)
        ]
        return _batch(columns, self.schema, batch.num_rows)


@dataclass(frozen=True, slots=True)
class WithColumns:
    """The input's columns, with some replaced or added. All expressions read the input's columns."""

    names: tuple[str, ...]
    expressions: tuple[Compiled, ...]
    schema: pa.Schema

    @property
    def text(self) -> str:
        return ", ".join(f"{each.text} AS {name}" for name, each in zip(self.names, self.expressions, strict=True))

    def reads(self, needed: Names) -> Names:
        made = dict(zip(self.names, self.expressions, strict=True))
        return _read_by(made[name] for name in needed & made.keys()) | (needed - made.keys())

    def run(self, batch: pa.RecordBatch, needed: Names) -> pa.RecordBatch:
        columns: dict[str, pa.Array | None] = dict(zip(batch.schema.names, batch.columns, strict=True))
        for name, each in zip(self.names, self.expressions, strict=True):
            columns[name] = each(batch) if name in needed else None
        return _batch([columns[name] if name in needed else None for name in self.schema.names], self.schema, batch.num_rows)


@dataclass(frozen=True, slots=True)
class Filter:
    """The records for which a condition is true: not false, and not null."""

    condition: Compiled

    @property
    def text(self) -> str:
        return self.condition.text

    def reads(self, needed: Names) -> Names:
        return needed | frozenset(self.condition.columns)

    def run(self, batch: pa.RecordBatch, needed: Names) -> pa.RecordBatch:
        keep = self.condition(batch)
        count = keep.true_count
        if count == batch.num_rows:
            return batch
        kept = batch.select([name for name in batch.schema.names if name in needed])
        kept = kept.filter(keep) if count else kept.slice(0, 0)
        if kept.num_columns == batch.num_columns:
            return kept
        columns = [kept.column(name) if name in needed else None for name in batch.schema.names]
        return _batch(columns, batch.schema, count)


@dataclass(frozen=True, slots=True)
class Explode:
    """A record for each element of an array, in the column `name`. A record without elements is left out, or kept with null
    if `keep_empty`."""

    expression: Compiled
    name: str
    schema: pa.Schema
    keep_empty: bool

    @property
    def text(self) -> str:
        return self.expression.text

    def reads(self, needed: Names) -> Names:
        return (needed - {self.name}) | frozenset(self.expression.columns)

    def run(self, batch: pa.RecordBatch, needed: Names) -> pa.RecordBatch:
        lists = self.expression(batch)
        offsets = lists.offsets.to_numpy()
        counts = np.where(lists.is_valid().to_numpy(zero_copy_only=False), np.diff(offsets), 0)
        is_empty = counts == 0
        if self.keep_empty:
            counts = np.maximum(counts, 1)
        rows = np.repeat(np.arange(len(lists)), counts)
        first = np.cumsum(counts) - counts
        at = np.arange(len(rows)) - first[rows] + offsets[:-1][rows]
        elements = lists.values.take(pa.array(at, mask=is_empty[rows] if self.keep_empty else None))
        taken = pa.array(rows)
        columns = [
            None if name not in needed else elements if name == self.name else batch.column(name).take(taken)
            for name in self.schema.names
        ]
        return _batch(columns, self.schema, len(rows))


def _read_by(expressions: Iterable[Compiled]) -> Names:
    return frozenset(name for each in expressions for name in each.columns)


def _batch(columns: Sequence[pa.Array | None], schema: pa.Schema, row_count: int) -> pa.RecordBatch:
    """Return a batch. A column that is None isn't needed, and holds nulls of no type, which take no memory."""
    if all(column is not None for column in columns):
        return pa.RecordBatch.from_arrays(list(columns), schema=schema)
    none = pa.nulls(row_count)
    return pa.RecordBatch.from_arrays([none if each is None else each for each in columns], names=schema.names)


class ColumnsOperator(Operator):
    """One step, or several of consecutive nodes: `node` is the last one."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        super().__init__(nodes[-1])
        needed = frozenset(nodes[-1].schema.names)
        steps: list[tuple[str, Step, Names]] = []
        for node in reversed(nodes):
            assert isinstance(node.spec, ColumnsSpec)
            steps.append((node.name, node.spec.step, needed))
            needed = node.spec.step.reads(needed)
        self._steps = steps[::-1]

    def on_batch(self, batch: pa.RecordBatch, port: int) -> None:
        for name, step, needed in self._steps:
            try:
                made = step.run(batch, needed)
            except ExpressionError as error:
                blame(name, error, _first_failing(step, needed, batch))
            if not made.num_rows:
                return
            batch = made
        self.emit(batch)


def _first_failing(step: Step, needed: Names, batch: pa.RecordBatch) -> Any:
    """Return the first record at which a step fails."""
    low, high = 0, batch.num_rows
    while high - low > 1:
        middle = (low + high) // 2
        try:
            step.run(batch.slice(low, middle - low), needed)
            low = middle
        except ExpressionError:
            high = middle
    known = [field.name for field in batch.schema if not pa.types.is_null(field.type)]
    (record,) = rows_of(batch.slice(low, 1).select(known))
    return record


@dataclass(frozen=True, slots=True)
class ColumnsSpec:
    """An operator with one step. `changelogs` lists what records may mean (changelog.py)."""

    kind: str
    step: Step
    changelogs: frozenset[Changelog] = APPEND_ONLY
    stateful: bool = False
    in_columns: ClassVar[bool] = True

    @property
    def text(self) -> str:
        return " ".join(self.step.text.split())

    def create(self, node: Node) -> Operator:
        return ColumnsOperator([node])

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        return ()
