"""Upserts become changes: `stream.as_changelog(name)`.

The state has the last row of each key. Of the records of a key in one batch only the last one counts: its former row, if
there is one, is deleted, and it is inserted. A row that is equal to the former one changes nothing. All deletions of a batch
are emitted before its insertions.

Not here: who may take changes (dataflow/changelog.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.dataflow.aggregates.base import BoolArray, IntArray
from tidegate.dataflow.aggregates.numpy_columns import grouped
from tidegate.dataflow.changelog import Changelog
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import Operator
from tidegate.dataflow.operators.keyed_table import KeyedTableOperator, plain, touched_fields
from tidegate.dataflow.operators.process import key_type
from tidegate.dataflow.row_kinds import KIND_FIELD, kinds_of
from tidegate.state.descriptors import Columns
from tidegate.state.sections import StateInfo
from tidegate.state.vectors import VectorField, column_from, put_column

STATE = "rows"
IS_SET = "__is_set"  # False until the first row of the key has come


@dataclass(frozen=True, slots=True)
class ChangelogSpec:
    """Upserts by a key in, changes out. `schema` has the columns of the rows."""

    key: tuple[str, ...]
    schema: pa.Schema
    ttl_ms: int | None
    kind: ClassVar[str] = "changelog"
    stateful: ClassVar[bool] = True
    in_columns: ClassVar[bool] = True
    changelogs: ClassVar[frozenset[Changelog]] = frozenset({Changelog.UPSERT})

    def create(self, node: Node) -> Operator:
        return ChangelogOperator(node, self)

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        return tuple(each.info(key_type(node.input_schemas[0], self.key)) for each in self.descriptors)

    @property
    def values(self) -> tuple[VectorField, ...]:
        """The columns that are not in the key."""
        return tuple(VectorField(field.name, field.type) for field in self.schema if field.name not in self.key)

    @property
    def descriptors(self) -> tuple[Columns, ...]:
        return (Columns(STATE, [*self.values, VectorField(IS_SET, pa.bool_(), False), *touched_fields(self.ttl_ms)]),)

    @property
    def text(self) -> str:
        return f"last row of each {', '.join(self.key)}"


class ChangelogOperator(KeyedTableOperator):
    """Emits the changes of a batch of upserts."""

    def __init__(self, node: Node, spec: ChangelogSpec) -> None:
        super().__init__(node, spec.key, spec.descriptors[0], spec.ttl_ms)
        self._values = spec.values
        self._names = spec.schema.names

    def on_batch(self, batch: pa.RecordBatch, port: int) -> None:
        table = self._table
        keys = self.keys_of(batch)
        all_rows = self.rows_of(keys)
        groups = grouped(all_rows)
        last, rows = pa.array(groups.last()), groups.rows
        new = {name: plain(batch.column(name)).take(last) for name in self._names}
        was_set = table.vectors[IS_SET].values[rows]
        old = new | {
            field.name: column_from(field, vector.values[rows], None if vector.valid is None else vector.valid[rows])
            for field in self._values
            for vector in [table.vectors[field.name]]
        }
        table.change(rows)
        table.vectors[IS_SET].values[rows] = True
        for field in self._values:
            put_column(table.vectors[field.name], rows, new[field.name])
        changed = ~(
            was_set & same_rows([old[each.name] for each in self._values], [new[each.name] for each in self._values])
        )
        deleted, inserted = np.flatnonzero(was_set & changed), np.flatnonzero(changed)
        emit_changes(self, [old[name] for name in self._names], deleted, [new[name] for name in self._names], inserted)


def emit_changes(
    operator: Operator, old: Sequence[pa.Array], deleted: IntArray, new: Sequence[pa.Array], inserted: IntArray
) -> None:
    """Emit the deletion of these rows of `old`, and then the insertion of these rows of `new`."""
    count = len(deleted) + len(inserted)
    if not count:
        return
    gone, made = pa.array(deleted), pa.array(inserted)
    columns = [pa.concat_arrays([before.take(gone), after.take(made)]) for before, after in zip(old, new, strict=True)]
    kinds = kinds_of(np.arange(count) >= len(deleted))
    operator.emit(pa.RecordBatch.from_arrays([kinds, *columns], schema=operator.node.schema))


def same_rows(old: Sequence[pa.Array], new: Sequence[pa.Array]) -> BoolArray | npt.NDArray[np.bool_]:
    """Return which rows are equal. Values that Arrow can't compare count as different, and so does NaN."""
    same = np.array([True])
    for before, after in zip(old, new, strict=True):
        if before.type.num_fields:
            return np.zeros(len(before), bool)
        equal = pc.fill_null(pc.equal(before, after), False).to_numpy(zero_copy_only=False)
        if before.null_count and after.null_count:
            equal |= pc.and_(before.is_null(), after.is_null()).to_numpy(zero_copy_only=False)
        same = same & equal
    return same


def changes_schema(fields: Iterable[pa.Field]) -> pa.Schema:
    """Return the schema of a stream of changes of such rows."""
    return pa.schema([KIND_FIELD, *(_plain_field(field) for field in fields)])


def _plain_field(field: pa.Field) -> pa.Field:
    return field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
