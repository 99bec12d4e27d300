"""Make a regular join of what the user wrote: `left.key_by("a").join("name", right.key_by("b"), how="left")`.

Not here: what it does (operators/regular_join.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from tidegate.arguments import Duration
from tidegate.dataflow import checks
from tidegate.dataflow.changelog import check_no_row_kind, meaning, without_row_kind
from tidegate.dataflow.flow import Flow, Names, called, columns_text, connectable
from tidegate.dataflow.operators.changelog import changes_schema
from tidegate.dataflow.operators.join_sides import JoinSide
from tidegate.dataflow.operators.regular_join import ALONE, LEFT_ONLY, OutputColumn, RegularJoinSpec
from tidegate.errors import GraphError, SchemaError
from tidegate.types import ddl_of

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
    if how not in ALONE:
        raise GraphError(f"{where}: how={how!r} is not a kind of join; give one of {', '.join(map(repr, ALONE))}")
    if not isinstance(right, Flow):
        raise GraphError(f"{where}: join takes a keyed stream, not {called(right)}")
    other = connectable(where, left, right)
    if not isinstance(other, type(left)):
        raise GraphError(
            f"{where}: the left stream is keyed by {columns_text(left.key)}, and the right one is {called(other)}; use "
            f"key_by on both"
        )
    checks.check_same_key_types(
        where,
        left=[left._schema.field(column) for column in left.key],
        right=[other._schema.field(column) for column in other.key],
    )
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
    shared = {mine for mine, theirs in zip(left.key, other.key, strict=True) if mine == theirs}
    output = _output(where, lefts, rights, shared, how)
    schema = pa.schema([each.field for each in output])
    if retracts:
        check_no_row_kind(where, schema.names)
        schema = changes_schema(schema)
    return pipeline._add(
        RegularJoinSpec(how, (left.key, other.key), sides, output, retracts, ttl_ms),
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
        for field in rows:
            if checks.has_map(field.type):
                raise SchemaError(
                    f"{where}: column {field.name!r} of the {name} stream is of type {ddl_of(field.type)}, and the stream "
                    f"has deletions: a deleted row is found by its values, and maps can't be compared. Take the entries "
                    f"that matter into columns with select"
                )
    key = tuple(rows.field(column) for column in stream.key)
    return JoinSide(name, key, tuple(field for field in rows if field.name not in stream.key), retracts, counts)


def _rows_of(stream: KeyedStream) -> pa.Schema:
    """Return the columns of the rows, without the row kind and without encodings as dictionaries."""
    retracts = meaning(stream._pipeline._nodes, *stream._edges).retracts
    schema = without_row_kind(stream._schema) if retracts else stream._schema
    return pa.schema(
        [field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field for field in schema]
    )


def _output(where: str, lefts: pa.Schema, rights: pa.Schema, shared: set[str], how: str) -> tuple[OutputColumn, ...]:
    """Return the columns of the result: those of the left side, then those of the right. Columns of the key that have one
    name on both sides are one column."""
    if how in LEFT_ONLY:
        return tuple(OutputColumn(field, field.name, None) for field in lefts)
    clashing = [name for name in rights.names if name in lefts.names and name not in shared]
    if clashing:
        raise SchemaError(
            f"{where}: both sides have a column {_listed(clashing)}; give it another name on one side before key_by, such "
            f"as right.select('{clashing[0]} AS right_{clashing[0]}', …), or leave it out"
        )
    null_left, null_right = ALONE[how][1], ALONE[how][0]
    found = [
        OutputColumn(field.with_nullable(field.nullable or rights.field(field.name).nullable), field.name, field.name)
        if field.name in shared
        else OutputColumn(field.with_nullable(field.nullable or null_left), field.name, None)
        for field in lefts
    ]
    return (
        *found,
        *(
            OutputColumn(field.with_nullable(field.nullable or null_right), None, field.name)
            for field in rights
            if field.name not in shared
        ),
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
