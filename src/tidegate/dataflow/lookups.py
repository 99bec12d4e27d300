"""Build look-ups: in a table that every subtask has, and in one outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import pyarrow as pa

from tidegate.arguments import Duration
from tidegate.dataflow import checks
from tidegate.dataflow.operators.lookup import Lookup, LookupSpec
from tidegate.dataflow.operators.lookup_join import LookUpColumns, LookUpJoinSpec
from tidegate.errors import GraphError, SchemaError
from tidegate.types import ddl_of

On: TypeAlias = "str | Sequence[str] | Mapping[str, str]"


def lookup_join_spec(
    name: str, schema: pa.Schema, table: pa.Schema | pa.Table | pa.RecordBatch, *, on: On, how: object
) -> tuple[LookUpJoinSpec, pa.Schema]:
    """Return the spec, and the schema of the result. `table` is the schema of a broadcast stream, or a table."""
    where = f"operator {name!r}"
    of_table = table if isinstance(table, pa.Schema) else table.schema
    left, right = _columns(where, on, schema, of_table)
    added = tuple(column for column in of_table.names if column not in right)
    if not added:
        raise SchemaError(
            f"{where}: the table has no columns but {', '.join(map(repr, right))}, so that nothing is looked up"
        )
    columns = LookUpColumns(left, right, added, _is_inner(where, how))
    result = _joined_schema(where, schema, [of_table.field(column) for column in added])
    if isinstance(table, pa.Schema):
        return LookUpJoinSpec(columns, None), result
    rows = pa.Table.from_batches([table]) if isinstance(table, pa.RecordBatch) else table
    batches = rows.combine_chunks().to_batches()
    whole = batches[0] if batches else pa.RecordBatch.from_pylist([], schema=of_table)
    distinct = len(pa.Table.from_batches([whole.select(list(right))]).group_by(list(right)).aggregate([]))
    if distinct < whole.num_rows:
        raise GraphError(
            f"{where}: the table has {whole.num_rows:,} rows and {distinct:,} different keys ({', '.join(right)}); give one "
            f"row for each key"
        )
    return LookUpJoinSpec(columns, whole), result


def lookup_spec(
    name: str,
    schema: pa.Schema,
    look_up: Any,
    returns: Any,
    *,
    on: str | Sequence[str],
    how: object,
    cache: object,
    ttl: Duration | None,
    retries: object,
) -> tuple[LookupSpec, pa.Schema]:
    """Return the spec, and the schema of the result."""
    where = f"operator {name!r}"
    if isinstance(look_up, type):
        raise GraphError(f"{where}: {look_up.__name__} is a class; pass an instance: {look_up.__name__}(…)")
    if not isinstance(look_up, Lookup) and not callable(look_up):
        raise GraphError(f"{where}: {look_up!r} can't look up; give a function of a batch of keys, or a tg.Lookup")
    for argument, number, least in (("cache", cache, 1), ("retries", retries, 0)):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise GraphError(f"{where}: {argument}={number!r}; give a whole number from {least} on")
    assert isinstance(cache, int) and isinstance(retries, int)
    key = checks.check_key(where, [on] if isinstance(on, str) else list(on), schema)
    returned = checks.declared_schema(name, returns)
    result = _joined_schema(where, schema, list(returned))
    columns = LookUpColumns(key, key, tuple(returned.names), _is_inner(where, how))
    ttl_ms = None if ttl is None else checks.duration_ms(name, "ttl", ttl)
    return LookupSpec(columns, look_up, returned, cache, ttl_ms, retries), result


def _is_inner(where: str, how: object) -> bool:
    if how not in ("inner", "left"):
        raise GraphError(f"{where}: how={how!r}; give 'inner', which drops records that find nothing, or 'left'")
    return how == "inner"


def _columns(where: str, on: Any, left: pa.Schema, right: pa.Schema) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the columns that are to be equal, of the records and of the table."""
    pairs = dict(on) if isinstance(on, Mapping) else {name: name for name in ([on] if isinstance(on, str) else on)}
    ours = checks.check_key(where, list(pairs), left)
    theirs = checks.check_key(f"{where}, the table", list(pairs.values()), right)
    for one, other in zip(ours, theirs, strict=True):
        types = _plain(left.field(one).type), _plain(right.field(other).type)
        if not types[0].equals(types[1]):
            raise SchemaError(
                f"{where}: column {one!r} is of type {ddl_of(types[0])}, and {other!r} of the table of type "
                f"{ddl_of(types[1])}; bring one to the other's type: with_columns(…) of a stream, cast(…) of an Arrow table"
            )
    return ours, theirs


def _joined_schema(where: str, schema: pa.Schema, added: list[pa.Field]) -> pa.Schema:
    for field in added:
        if field.name in schema.names:
            raise SchemaError(
                f"{where}: both the records and the table have a column {field.name!r}: rename one of them with select(…)"
            )
    return pa.schema([*schema, *(pa.field(field.name, _plain(field.type)) for field in added)])


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


LookUp: TypeAlias = "Lookup | Callable[[pa.RecordBatch], pa.RecordBatch | pa.Table]"
