"""Check the arguments of `with_watermark`: what makes the watermarks, and which sources wait for one another."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from tidegate.arguments import ClockDuration, Duration
from tidegate.dataflow import checks
from tidegate.dataflow.operators.source import WatermarkFunction, WatermarkSpec
from tidegate.errors import GraphError

DEFAULT_GROUP = "all sources"


def watermark_spec(
    name: str,
    schema: pa.Schema,
    *,
    column: str | None,
    delay: Duration | None,
    by: WatermarkFunction | None,
    idle_after: ClockDuration | None,
    max_ahead: Duration | None,
    group: str | None,
    sources: tuple[str, ...],
    by_epoch: bool,
) -> WatermarkSpec:
    """Return the specification of the operator of this name, or raise an error that says which argument to change."""
    where = f"operator {name!r}"
    if by is not None:
        if column is not None or delay is not None:
            raise GraphError(
                f"{where}: with_watermark takes a column and a delay, or by=function, not both: the function returns the "
                f"watermark as it is"
            )
        checks.check_callable(name, "with_watermark(by=…)", by)
    elif delay is None:
        raise GraphError(
            f"{where}: with_watermark takes the column of the event time and the delay by which records may be out of "
            f"order, such as with_watermark('ts', '5 seconds'); with '0 s' the column never goes back"
        )
    else:
        column = checks.check_time_column(where, column, schema)
    if type(idle_after) in (int, float) and idle_after:
        raise GraphError(f"{where}: idle_after={idle_after!r}: give the unit, too: '{idle_after} s' or '{idle_after} ms'")
    idle_after_ms = None if idle_after is None else checks.duration_ms(name, "idle_after", idle_after)
    if idle_after_ms == 0:
        raise GraphError(
            f"{where}: idle_after={idle_after!r} makes every pause between two batches "
            f"idle; give a time longer than the source's usual pauses, such as '30 seconds'"
        )
    return WatermarkSpec(
        column,
        0 if delay is None else checks.duration_ms(name, "delay", delay),
        idle_after_ms,
        sources,
        by_epoch=by_epoch,
        by=by,
        **_group(name, max_ahead, group, by_epoch=by_epoch),
    )


def _group(name: str, max_ahead: Duration | None, group: object, *, by_epoch: bool) -> dict[str, Any]:
    if max_ahead is None:
        if group is not None:
            raise GraphError(
                f"operator {name!r}: group={group!r} has no effect without max_ahead: say how far ahead of the group the "
                f"source may read, such as max_ahead='1 minute'"
            )
        return {}
    if by_epoch:
        raise GraphError(
            f"operator {name!r}: max_ahead={max_ahead!r} can't be used between Spark's DataFrames, where Spark decides what "
            f"is read next, and event time moves when a micro-batch ends. Omit max_ahead, or read with a tg.Job and "
            f"tg.sources"
        )
    if group is not None and (not isinstance(group, str) or not group):
        raise GraphError(f"operator {name!r}: group={group!r}: give the name of a group of sources, such as 'events'")
    return {"group": group or DEFAULT_GROUP, "max_ahead_ms": checks.duration_ms(name, "max_ahead", max_ahead)}
