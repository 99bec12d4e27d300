"""Arithmetic with dates, timestamps and intervals, and the fields of a time. The time zone is UTC.

A day has 24 hours there, so that an interval of days, hours and seconds is a number of microseconds (`DURATION`). One of
days alone (`DAYS`) is kept apart, since a date plus days is a date, and a date plus hours a timestamp. An interval of
months (`MONTHS`) is always a constant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.expressions.arithmetic import by_numpy
from tidegate.expressions.casts import implicitly
from tidegate.expressions.coercion import is_integer, is_moment
from tidegate.expressions.typed import (
    DATE,
    DAYS,
    DURATION,
    INT,
    LONG,
    MONTHS,
    NULL,
    TIMESTAMP,
    TIMESTAMP_NTZ,
    Text,
    Typed,
    Value,
    apply,
    type_name,
)

DAY_US = 86_400_000_000
INTERVALS = (DURATION, DAYS, MONTHS)


def is_temporal(part: Typed) -> bool:
    return is_moment(part.type) or part.type in INTERVALS


def compute(sign: str, left: Typed, right: Typed, source: Text, at: int | None) -> Typed:
    """Return `left sign right`, one of which is a time or an interval."""
    sql = f"({left.sql} {sign} {right.sql})"
    if sign == "+" and (left.type in INTERVALS or is_integer(left.type)) and is_moment(right.type):
        left, right = right, left
    if sign in ("+", "-") and is_moment(left.type):
        if right.type in INTERVALS:
            return _moved(sign, left, right, sql[1:-1], source, at)
        if left.type == DATE and is_integer(right.type) and right.type != LONG:
            return add_days(left, right, f"date_{'add' if sign == '+' else 'sub'}({left.sql}, {right.sql})", sign)
        if sign == "-" and is_moment(right.type):
            return _difference(left, right, sql, source, at)
    both_lasting = left.type in (DURATION, DAYS) and right.type in (DURATION, DAYS)
    if sign in ("+", "-") and both_lasting:
        kernel = pc.add_checked if sign == "+" else pc.subtract_checked
        return apply(_on_longs(kernel, DURATION), [lasting(left), lasting(right)], DURATION, sql, fails="overflow")
    if sign == "*" and right.type in (DURATION, DAYS):
        left, right = right, left
    if sign == "*" and left.type in (DURATION, DAYS) and is_integer(right.type):
        factor = implicitly(right, LONG, source, at)
        return apply(_on_longs(pc.multiply_checked, DURATION), [lasting(left), factor], DURATION, sql, fails="overflow")
    raise source.error(f"{type_name(left.type)} {sign} {type_name(right.type)} is not supported", at)


def lasting(part: Typed) -> Typed:
    """Return an interval of days as one of microseconds."""
    if part.type != DAYS:
        return part
    return apply(lambda value: pc.cast(value, DURATION), [part], DURATION, part.sql)


def _on_longs(kernel: Callable[..., Value], type: pa.DataType) -> Callable[..., Value]:
    """Return a kernel of longs as one of the microseconds in times and intervals."""

    def run(*values: Value) -> Value:
        return pc.cast(kernel(*(pc.cast(value, LONG) for value in values)), type)

    return run


def _moved(sign: str, moment: Typed, interval: Typed, sql: str, source: Text, at: int | None) -> Typed:
    """Return a time plus or minus an interval."""
    if interval.type == MONTHS:
        assert interval.constant is not None
        months = interval.constant.as_py() * (1 if sign == "+" else -1)
        return add_months(moment, months, sql)
    if moment.type == DATE and interval.type == DAYS:
        days = apply(lambda value: pc.cast(pc.divide(pc.cast(value, LONG), 86_400), INT), [interval], INT, interval.sql)
        return add_days(moment, days, sql, sign)
    if moment.type == DATE:
        moment = implicitly(moment, TIMESTAMP, source, at)
    kernel = pc.add_checked if sign == "+" else pc.subtract_checked
    return apply(
        _on_longs(kernel, moment.type),
        [moment, lasting(interval)],
        moment.type,
        sql,
        fails=f"overflow of the type {type_name(moment.type)}",
    )


def _difference(left: Typed, right: Typed, sql: str, source: Text, at: int | None) -> Typed:
    if left.type == right.type == DATE:
        return apply(
            lambda a, b: pc.cast(pc.multiply_checked(pc.subtract(_days(a), _days(b)), DAY_US), DURATION),
            [left, right],
            DURATION,
            sql,
            fails="overflow",
        )
    type = TIMESTAMP if TIMESTAMP in (left.type, right.type) else TIMESTAMP_NTZ
    left, right = implicitly(left, type, source, at), implicitly(right, type, source, at)
    return apply(_on_longs(pc.subtract_checked, DURATION), [left, right], DURATION, sql, fails="overflow")


def _days(value: Value) -> Value:
    return pc.cast(pc.cast(value, INT), LONG)


def add_days(date: Typed, days: Typed, sql: str, sign: str = "+") -> Typed:
    kernel = pc.add_checked if sign == "+" else pc.subtract_checked
    return apply(
        lambda a, b: pc.cast(kernel(pc.cast(a, INT), pc.cast(b, INT)), DATE), [date, days], DATE, sql, fails="overflow"
    )


def add_months(moment: Typed, months: int | Typed, sql: str) -> Typed:
    """Return the same day so many months later, or the last day of that month if it has no such day."""
    if isinstance(months, Typed):
        return apply(
            lambda a, b: _of_days(by_numpy(_month_moved, a.view(INT), b, type=LONG)), [moment, months], DATE, sql,
            on_arrays=True,
        )  # fmt: skip
    if moment.type == DATE:
        return apply(
            lambda a: _of_days(by_numpy(lambda days: _month_moved(days, months), a.view(INT), type=LONG)), [moment], DATE,
            sql, on_arrays=True,
        )  # fmt: skip

    def move(micros: Any) -> Any:
        days = np.floor_divide(micros, DAY_US)
        return _month_moved(days, months) * DAY_US + (micros - days * DAY_US)

    return apply(lambda a: by_numpy(move, a.view(LONG)).view(moment.type), [moment], moment.type, sql, on_arrays=True)


def _of_days(days: pa.Array) -> pa.Array:
    return days.cast(INT).view(DATE)


def _month_moved(days: Any, months: Any) -> Any:
    dates = days.astype("datetime64[D]")
    month = dates.astype("datetime64[M]")
    day = (dates - month.astype("datetime64[D]")).astype(np.int64)
    moved = (month.astype(np.int64) + months).astype("datetime64[M]")
    first, following = moved.astype("datetime64[D]"), (moved + 1).astype("datetime64[D]")
    last = (following - first).astype(np.int64) - 1
    return first.astype(np.int64) + np.minimum(day, last)


# Fields.


_FIELDS: dict[str, Callable[[Any], Any]] = {
    "year": pc.year,
    "quarter": pc.quarter,
    "month": pc.month,
    "week": pc.iso_week,
    "day": pc.day,
    "doy": pc.day_of_year,
    "dayofweek": lambda value: pc.day_of_week(value, count_from_zero=False, week_start=7),
    "weekday": pc.day_of_week,
    "hour": pc.hour,
    "minute": pc.minute,
    "second": pc.second,
}
_OTHER_NAMES = {
    "years": "year", "yr": "year", "months": "month", "mon": "month", "days": "day", "dayofmonth": "day", "d": "day",
    "dow": "dayofweek", "dayofyear": "doy", "weeks": "week", "weekofyear": "week", "w": "week", "hours": "hour",
    "minutes": "minute", "min": "minute", "seconds": "second", "qtr": "quarter",
}  # fmt: skip
_OF_DAY = ("hour", "minute", "second")


def extract(name: str, part: Typed, source: Text, at: int | None) -> Typed:
    """Return `EXTRACT(name FROM part)`."""
    sql = f"extract({name} FROM {part.sql})"
    known = _OTHER_NAMES.get(name.lower(), name.lower())
    if known not in _FIELDS:
        source.fail(f"{name!r} can't be extracted; the fields are {', '.join(_FIELDS)}", at)
    if known == "second":
        moment = _timestamp(part, name, source, at)
        type = pa.decimal128(8, 6)

        def seconds(value: pa.Array) -> pa.Array:
            micros = by_numpy(lambda us: np.mod(us, 60_000_000), value.view(LONG), type=LONG)
            return pc.multiply(micros.cast(pa.decimal128(19, 0)), _MILLIONTH).cast(type)

        return apply(seconds, [moment], type, sql, on_arrays=True)
    return field(known, part, sql, source, at)


_MILLIONTH = pa.scalar("0.000001").cast(pa.decimal128(7, 6))


def field(name: str, part: Typed, sql: str, source: Text, at: int | None) -> Typed:
    """Return a field of a time as an int."""
    kernel = _FIELDS[name]
    if name in _OF_DAY:
        part = _timestamp(part, name, source, at)
    elif not is_moment(part.type) and part.type != NULL:
        source.fail(f"{name} takes a date or a timestamp, and {part.sql} is of type {type_name(part.type)}; use CAST", at)
    if part.type == NULL:
        part = implicitly(part, DATE, source, at)
    # Arrow would look up the time zone of a timestamp; as UTC it is the same without.
    naive = TIMESTAMP_NTZ if part.type == TIMESTAMP else part.type
    return apply(lambda value: pc.cast(kernel(value.view(naive)), INT), [part], INT, sql, on_arrays=True)


def _timestamp(part: Typed, name: str, source: Text, at: int | None) -> Typed:
    if not is_moment(part.type) and part.type != NULL:
        source.fail(f"{name} takes a timestamp, and {part.sql} is of type {type_name(part.type)}; use CAST", at)
    return part if part.type == TIMESTAMP_NTZ else implicitly(part, TIMESTAMP, source, at)
