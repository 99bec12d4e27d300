"""Make a regular join of what the user wrote: `left.key_by("a").join("name", right.key_by("b"), how="left")`.

Not here: what it does (operators/regular_join.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from tidegate.arguments import Duration
from tidegate.dataflow import checks
from tidegate.dataflow.changelog import check_no_row_kind, meaning, without_row_kind
from tidegate.dataflow.changing import check_found_by_values
from tidegate.dataflow.flow import Names
from tidegate.dataflow.join_inputs import check_how, joined_columns, joined_with
from tidegate.dataflow.operators.changelog import changes_schema
from tidegate.dataflow.operators.join_sides import JoinSide
from tidegate.dataflow.operators.regular_join import ALONE, LEFT_ONLY, RegularJoinSpec
from tidegate.errors import GraphError

if TYPE_CHECKING:
    from tidegate.dataflow.keyed_stream import KeyedStream
    from tidegate.dataflow.stream import Stream


def regular_join(
    left: KeyedStream,
    name: str,
    right: object,
    *,
    how: str,
    ttl: Duration | None,
    parallelism: int | None,
    alias: Names,
) -> Stream:
    pipeline = left._pipeline
    name = pipeline._new_name("operator", name)
    aliases = pipeline._new_aliases("operator", name, alias)
    where = f"operator {name!r}"
    check_how(where, how, ALONE)
    other = joined_with(where, left, right)
    ttl_ms = None if ttl is None else checks.duration_ms(name, "ttl", ttl)
    if ttl_ms == 0:
        raise GraphError(f"{where}: ttl={ttl!r} would keep no record; give a longer time, or omit it to keep all records")
    alone = ALONE[how]
    lefts, rights = _rows_of(left), _rows_of(other)
    # Texts of both kinds may meet: they are kept as those of the left side.
    types = {theirs: lefts.field(mine).type for mine, theirs in zip(left.key, other.key, strict=True)}
    rights = pa.schema([field.with_type(types.get(field.name, field.type)) for field in rights])
    sides = (
        _side(where, "left", left, lefts, counts=alone[0] or how == "semi"),
        _side(where, "right", other, rights, counts=alone[1]),
    )
    retracts = any(side.retracts for side in sides) or any(alone)
    null_right, null_left = alone
    keys = (left.key, other.key)
    output = joined_columns(
        where, lefts, rights, keys, null_left=null_left, null_right=null_right, left_only=how in LEFT_ONLY
    )
    schema = pa.schema([each.field for each in output])
    if retracts:
        check_no_row_kind(where, schema.names)
        schema = changes_schema(schema)
    return pipeline._add(
        RegularJoinSpec(how, keys, sides, output, retracts, ttl_ms),
        name=name,
        schema=schema,
        inputs=(left, other),
        parallelism=parallelism,
        named_by_user=True,
        aliases=aliases,
        retracts=retracts,
    )


def _side(where: str, name: str, stream: KeyedStream, rows: pa.Schema, *, counts: bool) -> JoinSide:
    retracts = meaning(stream._pipeline._nodes, *stream._edges).retracts
    if retracts:
        check_found_by_values(where, rows, f"{name} stream")
    key = tuple(rows.field(column) for column in stream.key)
    return JoinSide(name, key, tuple(field for field in rows if field.name not in stream.key), retracts, counts)


def _rows_of(stream: KeyedStream) -> pa.Schema:
    """Return the columns of the rows, without the row kind and without encodings as dictionaries."""
    retracts = meaning(stream._pipeline._nodes, *stream._edges).retracts
    schema = without_row_kind(stream._schema) if retracts else stream._schema
    return pa.schema(
        [field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field for field in schema]
    )
