"""Build the operators that keep some records of each key: deduplicate, top of keys or of windows, aggregates over
the last ones, and rate limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import pyarrow as pa

from tidegate.arguments import ClockDuration, Duration
from tidegate.dataflow import checks
from tidegate.dataflow.aggregates.aggregation import Aggregation
from tidegate.dataflow.aggregates.numpy_columns import is_fixed
from tidegate.dataflow.changing import check_found_by_values
from tidegate.dataflow.operators.deduplicate import DeduplicateSpec
from tidegate.dataflow.operators.join_sides import JoinSide
from tidegate.dataflow.operators.ordering import Ordering
from tidegate.dataflow.operators.over import MAX_ROWS as MAX_OVER_ROWS
from tidegate.dataflow.operators.over import OverSpec
from tidegate.dataflow.operators.rank_changes import STATE, RankChangesSpec
from tidegate.dataflow.operators.rate_limit import RateLimitSpec
from tidegate.dataflow.operators.top import MAX_COUNT, TopSpec
from tidegate.dataflow.operators.window import END, START, time_type
from tidegate.dataflow.operators.window_top import WindowTopSpec
from tidegate.dataflow.windows import Paned
from tidegate.errors import GraphError, SchemaError
from tidegate.state.vectors import VectorField
from tidegate.types import ddl_of

Columns: TypeAlias = "str | Sequence[str]"
Descending: TypeAlias = "bool | Sequence[bool]"


def deduplicate_spec(
    name: str,
    schema: pa.Schema,
    key: tuple[str, ...],
    *,
    keep: object,
    order_by: object,
    ttl: Duration | None,
    retracts: bool = False,
) -> DeduplicateSpec:
    where = f"operator {name!r}"
    if keep not in ("first", "last"):
        raise GraphError(f"{where}: keep={keep!r}; give 'first' or 'last'")
    if order_by is None:
        column = None
    else:
        (column,) = _order_columns(where, "order_by", [order_by], schema)
    if ttl is not None and keep == "last" and column is None and not retracts:
        raise GraphError(f"{where}: the last record by arrival needs no state that a ttl could end: omit ttl=")
    order_type = None if column is None else schema.field(column).type
    return DeduplicateSpec(key, keep == "last", column, order_type, _ttl_ms(name, ttl))


def top_spec(
    name: str,
    schema: pa.Schema,
    key: tuple[str, ...],
    *,
    count: object,
    by: Columns,
    descending: Descending,
    ttl: Duration | None,
) -> TopSpec:
    where = f"operator {name!r}"
    ordering = _ordering(where, by, descending, schema)
    return TopSpec(key, ordering, _count(where, count), _ttl_ms(name, ttl), _fields(schema, key))


def rank_changes_spec(
    name: str,
    rows: pa.Schema,
    key: tuple[str, ...],
    *,
    kind: str,
    count: int,
    ordering: Ordering,
    latest: bool,
    ttl_ms: int | None,
) -> RankChangesSpec:
    """Return `top`, or `deduplicate` as a top of one, for changes of such rows."""
    check_found_by_values(f"operator {name!r}", rows, "stream")
    plain = [_plain(field) for field in rows]
    of_key = tuple(next(field for field in plain if field.name == column) for column in key)
    side = JoinSide(STATE, of_key, tuple(field for field in plain if field.name not in key), retracts=True, counts=False)
    return RankChangesSpec(key, side, ordering, count, ttl_ms, kind, ranked=kind == TopSpec.kind, latest=latest)


def top_of_changes_spec(name: str, rows: pa.Schema, of: TopSpec) -> RankChangesSpec:
    return rank_changes_spec(
        name, rows, of.key, kind=of.kind, count=of.count, ordering=of.ordering, latest=False, ttl_ms=of.ttl_ms
    )


def deduplicate_of_changes_spec(name: str, rows: pa.Schema, of: DeduplicateSpec) -> RankChangesSpec:
    ordering = Ordering((), ()) if of.order_by is None else Ordering((of.order_by,), (of.keep_last,))
    return rank_changes_spec(
        name, rows, of.key, kind=of.kind, count=1, ordering=ordering, latest=of.keep_last, ttl_ms=of.ttl_ms
    )


def window_top_spec(
    name: str,
    schema: pa.Schema,
    key: tuple[str, ...],
    *,
    assigner: object,
    count: object,
    by: Columns,
    descending: Descending,
    late: str | None,
) -> WindowTopSpec:
    where = f"operator {name!r}"
    if not isinstance(assigner, Paned) or assigner.column is None or not assigner.is_one_pane:
        raise GraphError(f"{where}: top takes tumbling windows of event time, such as tg.tumbling('ts', '10 s')")
    ordering = _ordering(where, by, descending, schema)
    return WindowTopSpec(key, assigner, ordering, _count(where, count), late, _fields(schema, key))


def over_spec(
    name: str,
    schema: pa.Schema,
    key: tuple[str, ...],
    *,
    order_by: Columns,
    rows: object,
    late: object,
    aggregates: Mapping[str, object],
) -> OverSpec:
    where = f"operator {name!r}"
    if isinstance(rows, bool) or not isinstance(rows, int) or not 1 <= rows <= MAX_OVER_ROWS:
        raise GraphError(
            f"{where}: over {rows!r} records; give how many of a key, itself included, from 1 to {MAX_OVER_ROWS:,}"
        )
    if late is not None and (not isinstance(late, str) or not late):
        raise GraphError(f"{where}: late={late!r}; give a name for the side output, such as late='late'")
    time, *others = [order_by] if isinstance(order_by, str) else list(order_by) or [""]
    checks.check_time_column(where, time, schema)
    ordering = _ordering(where, others, False, schema) if others else Ordering((), ())
    aggregation = Aggregation(where, aggregates, schema)
    checks.check_new_columns(where, schema.names, aggregates)
    return OverSpec(aggregation, key, time, ordering, rows, tuple(_plain(field) for field in schema), late)


def rate_limit_spec(
    name: str, key: tuple[str, ...], *, count: object, per: ClockDuration, burst: object, excess: object
) -> RateLimitSpec:
    where = f"operator {name!r}"
    burst = count if burst is None else burst
    for argument, number in (("rate_limit ", count), ("burst=", burst)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise GraphError(f"{where}: {argument}{number!r}; give how many records may pass, as a whole number from 1 on")
    assert isinstance(count, int) and isinstance(burst, int)
    if type(per) in (int, float) and per:
        raise GraphError(f"{where}: per={per!r}: give the unit, too: '{per} s' or '{per} ms'")
    per_ms = checks.duration_ms(name, "per", per)
    if per_ms < 1:
        raise GraphError(f"{where}: per={per!r}; give at least a millisecond, such as '1 second'")
    if excess is not None and (not isinstance(excess, str) or not excess):
        raise GraphError(f"{where}: excess={excess!r}; give a name for the side output, such as excess='too many'")
    return RateLimitSpec(key, count, per_ms, burst, excess)


def ranked_schema(where: str, schema: pa.Schema, rank: object, *, time_column: str | None = None) -> pa.Schema:
    """Return the schema of ranked records: their columns, the window's bounds if there is a time column, and the rank."""
    fields = [_plain(field) for field in schema]
    added = []
    if time_column is not None:
        kind = time_type(schema.field(time_column).type)
        added = [pa.field(bound, kind, nullable=False) for bound in (START, END)]
    if not isinstance(rank, str) or not rank:
        raise GraphError(f"{where}: rank={rank!r}; give the name of the column with the rank, such as 'rank'")
    if any(field.name == rank for field in added):
        raise SchemaError(f"{where}: rank={rank!r} is the name of one of the window's bounds; choose another name")
    added.append(pa.field(rank, pa.int64(), nullable=False))
    for field in added:
        if field.name in schema.names:
            raise SchemaError(
                f"{where}: the records have a column {field.name!r} already, and the result has one of its own: rename it "
                f"with select(…) before"
            )
    return pa.schema([*fields, *added])


def _ordering(where: str, by: Any, descending: Any, schema: pa.Schema) -> Ordering:
    columns = _order_columns(where, "by", [by] if isinstance(by, str) else list(by), schema)
    down = [descending] * len(columns) if isinstance(descending, bool) else list(descending)
    if len(down) != len(columns) or not all(isinstance(each, bool) for each in down):
        raise GraphError(
            f"{where}: descending={descending!r} for {len(columns)} columns; give True or False, or a list with one of them "
            f"for each column"
        )
    return Ordering(tuple(columns), tuple(down))


def _order_columns(where: str, argument: str, columns: list[Any], schema: pa.Schema) -> list[str]:
    if not columns or not all(isinstance(each, str) for each in columns):
        raise GraphError(
            f"{where}: {argument}={columns!r}; give the name of a column, such as {argument}={schema.names[0]!r}"
        )
    for column in columns:
        if column not in schema.names:
            raise checks.no_such_column(where, column, schema)
        kind = schema.field(column).type
        if not is_fixed(kind):
            raise SchemaError(
                f"{where}: column {column!r} is of type {ddl_of(kind)}, and records are ordered by numbers, times, dates "
                f"and booleans; convert it with with_columns(…)"
            )
    return columns


def _count(where: str, count: Any) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_COUNT:
        raise GraphError(f"{where}: top {count!r}; give how many records to keep of each key, from 1 to {MAX_COUNT:,}")
    return count


def _ttl_ms(name: str, ttl: Duration | None) -> int | None:
    if ttl is None:
        return None
    ttl_ms = checks.duration_ms(name, "ttl", ttl)
    if ttl_ms <= 0:
        raise GraphError(f"operator {name!r}: ttl={ttl!r}; give a millisecond or more, or omit it to keep the state forever")
    return ttl_ms


def _fields(schema: pa.Schema, key: tuple[str, ...]) -> tuple[VectorField, ...]:
    """Return the fields of state that hold records: all columns but the key's."""
    return tuple(VectorField(field.name, _plain(field).type) for field in schema if field.name not in key)


def _plain(field: pa.Field) -> pa.Field:
    return field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
