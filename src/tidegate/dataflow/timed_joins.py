"""Joins by event time, as a user declares them: checks of the arguments.

Mistakes are errors at the call of `join`. What the operators do is in operators/interval_join.py and
operators/temporal_join.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tidegate.dataflow import checks
from tidegate.dataflow.flow import Names
from tidegate.dataflow.join_inputs import check_how, joined_columns, joined_with
from tidegate.dataflow.operators.interval_join import ALONE, LEFT_ONLY, IntervalJoinSpec
from tidegate.dataflow.operators.joining import TimedSide
from tidegate.dataflow.operators.temporal_join import TemporalJoinSpec
from tidegate.errors import GraphError

if TYPE_CHECKING:
    from tidegate.dataflow.keyed_stream import KeyedStream
    from tidegate.dataflow.stream import Stream


def check_kind_of_join(name: str, *, ttl: Any, between: Any, times: Any, as_of: Any, late: Any) -> None:
    """Check that the arguments of a join are those of one kind."""
    if between is not None and as_of is not None:
        raise GraphError(
            f"operator {name!r}: between= joins within an interval, and as_of= as of a version: give one of them"
        )
    if between is None and as_of is None and (times is not None or late is not None):
        argument = "times" if times is not None else "late"
        raise GraphError(
            f"operator {name!r}: {argument}= is for joins by event time: give between= or as_of= too, or omit it"
        )
    if ttl is not None and between is not None:
        raise GraphError(
            f"operator {name!r}: ttl={ttl!r}, and a join within an interval keeps records as long as they can match: omit it"
        )
    if as_of is not None and times is not None:
        raise GraphError(f"operator {name!r}: as_of= has the columns of event time: omit times=")


def interval_join(
    left: KeyedStream,
    name: str,
    right: object,
    *,
    how: str,
    between: Any,
    times: Any,
    late: Any,
    parallelism: int | None,
    alias: Names,
) -> Stream:
    pipeline = left._pipeline
    name = pipeline._new_name("operator", name)
    aliases = pipeline._new_aliases("operator", name, alias)
    where = f"operator {name!r}"
    check_how(where, how, ALONE)
    lower_ms, upper_ms = _bounds(name, between)
    other = joined_with(where, left, right)
    sides = timed_sides(where, left, other, times, "times", right_needs_columns=how not in LEFT_ONLY)
    null_right, null_left = ALONE[how]
    output = joined_columns(
        where,
        left._schema,
        other._schema,
        (left.key, other.key),
        null_left=null_left,
        null_right=null_right,
        left_only=how in LEFT_ONLY,
    )
    tags, side_schemas = _late(where, late, left, other)
    return pipeline._add(
        IntervalJoinSpec(how, sides, lower_ms, upper_ms, output, tags),
        name=name,
        schema=pa.schema([each.field for each in output]),
        inputs=(left, other),
        side_schemas=side_schemas,
        parallelism=parallelism,
        named_by_user=True,
        aliases=aliases,
    )


def temporal_join(
    left: KeyedStream,
    name: str,
    right: object,
    *,
    how: str,
    as_of: Any,
    ttl: Any,
    late: Any,
    parallelism: int | None,
    alias: Names,
) -> Stream:
    pipeline = left._pipeline
    name = pipeline._new_name("operator", name)
    aliases = pipeline._new_aliases("operator", name, alias)
    where = f"operator {name!r}"
    if how not in ("inner", "left"):
        raise GraphError(f"{where}: how={how!r}; a join as of a version is 'inner' or 'left'")
    other = joined_with(where, left, right)
    sides = timed_sides(where, left, other, as_of, "as_of", right_needs_columns=True)
    output = joined_columns(
        where,
        left._schema,
        other._schema,
        (left.key, other.key),
        null_left=False,
        null_right=how == "left",
        left_only=False,
    )
    ttl_ms = None if ttl is None else checks.duration_ms(name, "ttl", ttl)
    if ttl_ms == 0:
        raise GraphError(f"{where}: ttl={ttl!r} would keep no version; give a longer time, or omit it to keep the last ones")
    tags, side_schemas = _late(where, late, left, other)
    if tags[1] is not None:
        raise GraphError(
            f"{where}: late={late!r} names a side output for late versions, and there is none: a late version counts for "
            f"the records that are still to come. Give late=({tags[0]!r}, None)"
        )
    return pipeline._add(
        TemporalJoinSpec(how, sides, output, tags, ttl_ms),
        name=name,
        schema=pa.schema([each.field for each in output]),
        inputs=(left, other),
        side_schemas=side_schemas,
        parallelism=parallelism,
        named_by_user=True,
        aliases=aliases,
    )


def timed_sides(
    where: str, left: KeyedStream, right: KeyedStream, times: Any, argument: str, *, right_needs_columns: bool
) -> tuple[TimedSide, TimedSide]:
    """Return both sides. `times` are their columns of event time, or one name for both."""
    if times is None:
        raise GraphError(
            f"{where}: {argument}= is missing; give the column of event time of the left and of the right stream, such as "
            f"{argument}=('ts', 'ts')"
        )
    columns = (times, times) if isinstance(times, str) else tuple(times) if isinstance(times, Sequence) else ()
    if len(columns) != 2:
        raise GraphError(
            f"{where}: {argument}={times!r}; give the column of event time of the left and of the right stream, such as "
            f"{argument}=('ts', 'ts')"
        )
    one, other = (
        checks.check_time_column(f"{where}, {side} stream", column, stream._schema)
        for side, column, stream in zip(("left", "right"), columns, (left, right), strict=True)
    )
    return _side(left, one, all_columns=True), _side(right, other, all_columns=right_needs_columns)


def _side(stream: KeyedStream, time: str, *, all_columns: bool) -> TimedSide:
    kept = tuple(
        field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
        for field in stream._schema
        if field.name == time or (all_columns and field.name not in stream.key)
    )
    return TimedSide(stream.key, time, kept)


def _bounds(name: str, between: Any) -> tuple[int, int]:
    if isinstance(between, str) or not isinstance(between, Sequence) or len(between) != 2:
        raise GraphError(
            f"operator {name!r}: between={between!r}; give how long after the left record the right one may be, from and "
            f"to, such as ('0 s', '1 hour') or ('-5 minutes', '5 minutes')"
        )
    lower_ms, upper_ms = (_signed_ms(name, each) for each in between)
    if lower_ms > upper_ms:
        raise GraphError(f"operator {name!r}: between={between!r} is an empty interval; give the lower bound first")
    return lower_ms, upper_ms


def _signed_ms(name: str, duration: Any) -> int:
    """Return a duration, which may be negative, in milliseconds."""
    if isinstance(duration, str) and duration.strip().startswith("-"):
        return -checks.duration_ms(name, "between", duration.strip()[1:])
    zero: Any = timedelta() if isinstance(duration, timedelta) else 0
    is_negative = isinstance(duration, timedelta | int | float) and duration < zero
    return -checks.duration_ms(name, "between", -duration) if is_negative else checks.duration_ms(name, "between", duration)


def _late(
    where: str, late: Any, left: KeyedStream, right: KeyedStream
) -> tuple[tuple[str | None, str | None], dict[str, pa.Schema]]:
    if late is None:
        return (None, None), {}
    tags = tuple(late) if isinstance(late, Sequence) and not isinstance(late, str) else ()
    if len(tags) != 2 or not all(tag is None or (isinstance(tag, str) and tag) for tag in tags) or tags[0] == tags[1]:
        raise GraphError(
            f"{where}: late={late!r}; give two names of side outputs, for late records of the left and of the right stream, "
            f"such as late=('late orders', 'late payments'), or None for either"
        )
    one, other = tags
    schemas = {tag: stream._schema for tag, stream in zip(tags, (left, right), strict=True) if tag is not None}
    return (one, other), schemas
