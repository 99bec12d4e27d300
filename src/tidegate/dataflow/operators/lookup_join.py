"""A join with a small table that every subtask has whole: records look up the row of their key.

The table is a broadcast stream, of which a later row replaces the one before with the same key, or an Arrow table that is
part of the program. The first is broadcast state: it is the same in all subtasks at a marker, and subtask 0 writes it for
all. What a record finds is the row at the moment at which the record is processed; nothing is emitted again when the table
changes. The second is no state at all.

A key with a null in it finds nothing, as in SQL.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from tidegate.dataflow.aggregates.base import IntArray
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import Operator, OperatorContext
from tidegate.dataflow.operators.process import key_type
from tidegate.dataflow.operators.rows_by_key import RowsByKey
from tidegate.state.batch_keys import keys_of
from tidegate.state.sections import FrozenState, Section, StateInfo, StateKind

STATE = "table"
SECTION_ROWS = 65_536


@dataclass(frozen=True, slots=True)
class LookUpColumns:
    """The columns of a look-up: `left` of the records and `right` of the table are equal, `added` are the table's other
    columns. Records without a row are dropped if it `is_inner`."""

    left: tuple[str, ...]
    right: tuple[str, ...]
    added: tuple[str, ...]
    is_inner: bool

    def joined(self, batch: pa.RecordBatch, rows: RowsByKey, numbers: IntArray, schema: pa.Schema) -> pa.RecordBatch:
        """Return the records with the columns of the rows that they have found."""
        if self.is_inner and (numbers < 0).any():
            keep = numbers >= 0
            batch, numbers = batch.filter(pa.array(keep)), numbers[keep]
        found = rows.rows(numbers).select(list(self.added))
        return pa.RecordBatch.from_arrays([*batch.columns, *found.columns], schema=schema)

    @property
    def text(self) -> str:
        """What `explain` shows."""
        pairs = (one if one == other else f"{one} = {other}" for one, other in zip(self.left, self.right, strict=True))
        return f"{'inner' if self.is_inner else 'left'}, by {', '.join(pairs)}"


@dataclass(frozen=True, slots=True, eq=False)
class LookUpJoinSpec:
    """`table` is an Arrow table, or None if the table is the broadcast stream of port 1."""

    columns: LookUpColumns
    table: pa.RecordBatch | None
    kind: ClassVar[str] = "lookup join"
    in_columns: ClassVar[bool] = True

    @property
    def stateful(self) -> bool:
        return self.table is None

    @property
    def text(self) -> str:
        """What `explain` shows."""
        return self.columns.text if self.table is None else f"{self.columns.text}, table of {self.table.num_rows:,} rows"

    def create(self, node: Node) -> Operator:
        return LookUpJoinOperator(node, self)

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        return () if self.table is not None else (table_info(node.input_schemas[1], self.columns.right),)


class LookUpJoinOperator(Operator):
    """Port 0 has the records, port 1 the rows of the table."""

    def __init__(self, node: Node, spec: LookUpJoinSpec) -> None:
        super().__init__(node)
        self._columns = spec.columns
        self._is_state = spec.table is None
        self._rows = RowsByKey(node.input_schemas[1] if spec.table is None else spec.table.schema, spec.columns.right)
        if spec.table is not None:
            self._rows.put(spec.table)

    def open(self, context: OperatorContext) -> None:
        self._is_writer = context.subtask == 0
        for batches in context.restored.values():
            for rows in batches:
                self._put(rows_of_values(rows, self._columns.right, self._rows.schema))

    def on_batch(self, batch: pa.RecordBatch, port: int) -> None:
        if port == 1:
            self._put(batch)
            return
        numbers = self._rows.find([batch.column(name) for name in self._columns.left])
        joined = self._columns.joined(batch, self._rows, numbers, self.node.schema)
        if joined.num_rows:
            self.emit(joined)

    def freeze(self, epoch: int) -> FrozenState | None:
        if not self._is_state:
            return None
        key = self._columns.right
        return FrozenTable(table_info(self._rows.schema, key), key, self._rows.frozen() if self._is_writer else None)

    # Inside.

    def _put(self, rows: pa.RecordBatch) -> None:
        """Take the last row of each key."""
        keys = keys_of(self._columns.right, [rows.column(name) for name in self._columns.right])
        self._rows.put(rows if len(keys) == rows.num_rows else rows.take(pa.array(np.sort(keys.last))))


class FrozenTable:
    """The rows of the table at a freeze, or none if another subtask writes them."""

    complete = True

    def __init__(self, info: StateInfo, key: tuple[str, ...], rows: tuple[pa.RecordBatch, IntArray] | None) -> None:
        self._info = info
        self._key = key
        self._rows = rows

    @property
    def states(self) -> tuple[StateInfo, ...]:
        return (self._info,)

    def sections(self) -> Iterator[Section]:
        if self._rows is None:
            return
        whole, places = self._rows
        for start in range(0, len(places), SECTION_ROWS):
            rows = whole.take(pa.array(places[start : start + SECTION_ROWS]))
            yield Section(self._info.name, None, values_of(rows, self._key, self._info))

    def release(self) -> None:
        """Nothing is shared with the live table that could change."""


def table_info(schema: pa.Schema, key: tuple[str, ...]) -> StateInfo:
    """Return what a manifest holds about the table: for each row its key and its other columns, as of a broadcast map."""
    others = pa.struct([_plain(field) for field in schema if field.name not in key])
    value = pa.struct([pa.field("key", key_type(schema, key)), pa.field("value", others)])
    return StateInfo(STATE, StateKind.BROADCAST, "table", pa.schema([pa.field("value", value)]))


def values_of(rows: pa.RecordBatch, key: tuple[str, ...], info: StateInfo) -> pa.RecordBatch:
    """Return rows of the table as rows of the state."""
    kind = info.schema.field("value").type
    of_key, others = kind.field("key").type, kind.field("value").type
    keys = _struct(rows, of_key) if len(key) > 1 else _as(rows.column(key[0]), of_key)
    value = pa.StructArray.from_arrays([keys, _struct(rows, others)], fields=list(kind))
    return pa.RecordBatch.from_arrays([value], schema=info.schema)


def rows_of_values(rows: pa.RecordBatch, key: tuple[str, ...], schema: pa.Schema) -> pa.RecordBatch:
    """Return rows of the state as rows of the table."""
    keys, others = rows.column("value").flatten()
    columns = {others.type.field(index).name: column for index, column in enumerate(others.flatten())}
    columns |= dict(zip(key, keys.flatten() if len(key) > 1 else [keys], strict=True))
    return pa.RecordBatch.from_arrays([_as(columns[field.name], field.type) for field in schema], schema=schema)


def _struct(rows: pa.RecordBatch, kind: pa.DataType) -> pa.Array:
    return pa.StructArray.from_arrays([_as(rows.column(field.name), field.type) for field in kind], fields=list(kind))


def _plain(field: pa.Field) -> pa.Field:
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    return pa.field(field.name, kind)


def _as(column: Any, kind: pa.DataType) -> pa.Array:
    return column if column.type.equals(kind) else column.cast(kind)
