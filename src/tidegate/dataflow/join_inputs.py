"""What all joins of two keyed streams check of their arguments, and the columns of their results.

Not here: what is particular to a kind of join (regular_joins.py, timed_joins.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import pyarrow as pa

from tidegate.dataflow import checks
from tidegate.dataflow.flow import Flow, called, columns_text, connectable
from tidegate.dataflow.operators.joined_columns import JoinedColumn
from tidegate.errors import GraphError, SchemaError

if TYPE_CHECKING:
    from tidegate.dataflow.keyed_stream import KeyedStream

# Spark's other names of the kinds of joins.
_IN_SPARK: Mapping[str, str] = {
    "outer": "full",
    "fullouter": "full",
    "leftouter": "left",
    "rightouter": "right",
    "leftsemi": "semi",
    "leftanti": "anti",
}


def check_how(where: str, how: object, kinds: Collection[str]) -> None:
    """Check that a join knows this kind."""
    if not isinstance(how, str) or how not in kinds:
        found = _IN_SPARK.get(str(how).lower().replace("_", ""), str(how).lower())
        advice = f" (do you mean {found!r}?)" if found in kinds else ""
        raise GraphError(f"{where}: how={how!r} is not a kind of join{advice}; give one of {', '.join(map(repr, kinds))}")


def joined_with(where: str, left: KeyedStream, right: object) -> KeyedStream:
    """Return the right side, if it is keyed like the left one."""
    if not isinstance(right, Flow):
        raise GraphError(f"{where}: join takes a keyed stream, not {called(right)}")
    other = connectable(where, left, right)
    if not isinstance(other, type(left)):
        raise GraphError(
            f"{where}: the left stream is keyed by {columns_text(left.key)}, and the right one, {called(other)}, isn't "
            f"keyed; use key_by on both"
        )
    checks.check_same_key_types(
        where,
        left=[left._schema.field(column) for column in left.key],
        right=[other._schema.field(column) for column in other.key],
    )
    return other


def joined_columns(
    where: str,
    left: pa.Schema,
    right: pa.Schema,
    keys: tuple[tuple[str, ...], tuple[str, ...]],
    *,
    null_left: bool,
    null_right: bool,
    left_only: bool,
) -> tuple[JoinedColumn, ...]:
    """Return the columns of the result: those of the left side, then those of the right. Columns of the key that have one
    name on both sides are one column. `null_left`: whether there are rows without a left side."""
    if left_only:
        return tuple(JoinedColumn(field, field.name, None) for field in left)
    shared = {mine for mine, theirs in zip(*keys, strict=True) if mine == theirs}
    clashing = [name for name in right.names if name in left.names and name not in shared]
    if clashing:
        raise SchemaError(
            f"{where}: both sides have a column {', '.join(map(repr, clashing))}; give it another name on one side before "
            f"key_by, such as right.select('{clashing[0]} AS right_{clashing[0]}', …), or leave it out"
        )
    of_left = [
        JoinedColumn(field.with_nullable(field.nullable or right.field(field.name).nullable), field.name, field.name)
        if field.name in shared
        else JoinedColumn(field.with_nullable(field.nullable or null_left), field.name, None)
        for field in left
    ]
    of_right = [
        JoinedColumn(field.with_nullable(field.nullable or null_right), None, field.name)
        for field in right
        if field.name not in shared
    ]
    return (*of_left, *of_right)
