"""Functions of dates and timestamps. The time zone is UTC."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import ExpressionError
from tidegate.expressions import times
from tidegate.expressions.arithmetic import by_numpy
from tidegate.expressions.casts import cast, implicitly
from tidegate.expressions.coercion import is_integer, is_moment
from tidegate.expressions.functions.calls import Call
from tidegate.expressions.times import DAY_US
from tidegate.expressions.typed import DATE, INT, LONG, NULL, STRING, TIMESTAMP, TIMESTAMP_NTZ, Typed, apply, type_name

_US = 1_000_000


def _date(call: Call, index: int) -> Typed:
    return _moment(call, index, DATE)


def _timestamp(call: Call, index: int) -> Typed:
    part = call.parts[index]
    return part if part.type == TIMESTAMP_NTZ else _moment(call, index, TIMESTAMP)


def _moment(call: Call, index: int, type: pa.DataType) -> Typed:
    """Return an argument as a date or a timestamp: one of these types, or text that is a constant."""
    part = call.parts[index]
    if is_moment(part.type) or part.type == NULL:
        return implicitly(part, type, call.source, call.at)
    if part.type == STRING and part.constant is not None:
        return cast(part, type, call.source, call.at, sql=part.sql)
    raise call.error(
        f"argument {index + 1} has to be a date or a timestamp, and {part.sql} is of type {type_name(part.type)}; use CAST"
    )


def _field(name: str, call: Call) -> Typed:
    call.takes(1, 1)
    return times.field(name, call.parts[0], call.sql, call.source, call.at)


# Calendar arithmetic.


def _date_add(sign: str, call: Call) -> Typed:
    call.takes(2, 2)
    days = call.parts[1]
    if not is_integer(days.type) or days.type == LONG:
        call.fail(f"the number of days has to be an int, and {days.sql} is of type {type_name(days.type)}")
    return times.add_days(_date(call, 0), days, call.sql, sign)


def _add_months(call: Call) -> Typed:
    call.takes(2, 2)
    months = call.parts[1]
    if not is_integer(months.type) or months.type == LONG:
        call.fail(f"the number of months has to be an int, and {months.sql} is of type {type_name(months.type)}")
    return times.add_months(_date(call, 0), implicitly(months, INT, call.source, call.at), call.sql)


def _datediff(call: Call) -> Typed:
    call.takes(2, 2)
    return apply(
        lambda end, start: pc.subtract_checked(pc.cast(end, INT), pc.cast(start, INT)),
        [_date(call, 0), _date(call, 1)],
        INT,
        call.sql,
        fails="overflow of the type int",
    )


def _last_day(call: Call) -> Typed:
    call.takes(1, 1)
    return _of_day_numbers(lambda days: _month_start(days, 1) - 1, call, _date(call, 0))


def _make_date(call: Call) -> Typed:
    call.takes(3, 3)

    def make(years: Any, months: Any, days: Any) -> Any:
        month = (years - 1970) * 12 + months - 1
        first = month.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
        following = (month + 1).astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
        wrong = (months < 1) | (months > 12) | (days < 1) | (days > following - first) | (np.abs(years) > 999_999)
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise ExpressionError(f"there is no date {years[row]}-{months[row]}-{days[row]}, in {call.sql}")
        return first + days - 1

    parts = [call.whole(index) for index in range(3)]
    return apply(
        lambda *arrays: by_numpy(make, *arrays, type=LONG).cast(INT).view(DATE),
        parts,
        DATE,
        call.sql,
        fails="overflow",
        on_arrays=True,
    )


# Truncation.


def _month_start(days: Any, months: int = 0, of: int = 1) -> Any:
    """Return the first day of the month `months` later, of the quarter (`of` 3) or of the year (`of` 12)."""
    month = days.astype("datetime64[D]").astype("datetime64[M]").astype(np.int64)
    month = np.floor_divide(month, of) * of + months
    return month.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)


_OF_DAYS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("year", "yyyy", "yy"), partial(_month_start, of=12)),
    "quarter": partial(_month_start, of=3),
    **dict.fromkeys(("month", "mon", "mm"), _month_start),
    "week": lambda days: np.floor_divide(days + 3, 7) * 7 - 3,  # 1970-01-01 was a Thursday
}
_OF_MICROS = {
    **dict.fromkeys(("day", "dd"), DAY_US),
    "hour": 3_600 * _US,
    "minute": 60 * _US,
    "second": _US,
    "millisecond": 1_000,
    "microsecond": 1,
}


def _of_day_numbers(function: Callable[[Any], Any], call: Call, date: Typed) -> Typed:
    return apply(
        lambda a: by_numpy(lambda days: function(days.astype(np.int64)), a.view(INT), type=LONG).cast(INT).view(DATE),
        [date],
        DATE,
        call.sql,
        on_arrays=True,
    )


def _trunc(call: Call) -> Typed:
    call.takes(2, 2)
    unit = call.constant_text(1).lower()
    if unit not in _OF_DAYS:
        call.fail(f"the unit {unit!r} isn't known; the units are year, quarter, month, week")
    return _of_day_numbers(_OF_DAYS[unit], call, _date(call, 0))


def _date_trunc(call: Call) -> Typed:
    call.takes(2, 2)
    unit, part = call.constant_text(0).lower(), _timestamp(call, 1)
    if unit in _OF_DAYS:
        of_days = _OF_DAYS[unit]

        def truncate(micros: Any) -> Any:
            return of_days(np.floor_divide(micros, DAY_US)) * DAY_US
    elif unit in _OF_MICROS:
        size = _OF_MICROS[unit]

        def truncate(micros: Any) -> Any:
            return np.floor_divide(micros, size) * size
    else:
        names = ("year", "quarter", "month", "week", *_OF_MICROS)
        call.fail(f"the unit {unit!r} isn't known; the units are {', '.join(names)}")
    type = part.type
    return apply(lambda a: by_numpy(truncate, a.view(LONG)).view(type), [part], type, call.sql, on_arrays=True)


# Numbers since 1970.


def _unix(divisor: int, call: Call) -> Typed:
    call.takes(1, 1)
    part = _moment(call, 0, TIMESTAMP)
    return apply(
        lambda a: by_numpy(lambda us: np.floor_divide(us, divisor), a.view(LONG)), [part], LONG, call.sql, on_arrays=True
    )


def _unix_timestamp(call: Call) -> Typed:
    """Unlike `unix_seconds`, Spark cuts fractions of a second off before 1970, too."""
    call.takes(1, 1)
    sql = f"{call.sql[:-1]}, yyyy-MM-dd HH:mm:ss)"
    return apply(lambda a: pc.divide(a.view(LONG), _US), [_moment(call, 0, TIMESTAMP)], LONG, sql, on_arrays=True)


def _timestamp_of(factor: int, call: Call) -> Typed:
    call.takes(1, 1)
    return apply(
        lambda value: pc.cast(pc.multiply_checked(value, factor), TIMESTAMP),
        [call.whole(0)],
        TIMESTAMP,
        call.sql,
        fails="overflow of the type timestamp",
    )


def _unix_date(call: Call) -> Typed:
    call.takes(1, 1)
    return apply(lambda value: pc.cast(value, INT), [_date(call, 0)], INT, call.sql)


def _date_from_unix_date(call: Call) -> Typed:
    call.takes(1, 1)
    part = call.parts[0]
    if not is_integer(part.type) or part.type == LONG:
        call.fail(f"it takes an int, and {part.sql} is of type {type_name(part.type)}")
    return apply(lambda value: pc.cast(pc.cast(value, INT), DATE), [part], DATE, call.sql)


# Text.


def _cast_to(type: pa.DataType, call: Call) -> Typed:
    """`to_date(text)` and `to_timestamp(text)`, in the forms that CAST reads."""
    if len(call.parts) > 1:
        call.fail("a pattern isn't supported; without one the forms are those of CAST, yyyy-MM-dd HH:mm:ss")
    call.takes(1, 1)
    return cast(call.parts[0], type, call.source, call.at, sql=call.sql)


_PATTERN = re.compile(r"yyyy|MM|dd|HH|mm|ss|SSSSSS|SSS|'(?:[^']|'')*'|[^A-Za-z'\[\]{}#]")
_UNITS = {"HH": 3_600 * _US, "mm": 60 * _US, "ss": _US}  # what a token tells apart; other ones tell days apart, at least
_STRFTIME = {"yyyy": "%Y", "MM": "%m", "dd": "%d", "HH": "%H", "mm": "%M", "ss": "%S"}


def _date_format(call: Call) -> Typed:
    call.takes(2, 2)
    pattern = call.constant_text(1)
    tokens = _PATTERN.findall(pattern)
    if "".join(tokens) != pattern:
        call.fail(f"in the pattern {pattern!r} only yyyy, MM, dd, HH, mm, ss, SSS, SSSSSS and quoted text are supported")
    if not tokens:
        call.fail("the pattern is empty")
    part = _timestamp(call, 0)
    unit = min((_UNITS.get(token, DAY_US) for token in tokens), default=DAY_US)
    in_units = any(token in _STRFTIME for token in tokens) and not any(token.startswith("SSS") for token in tokens)

    def write(array: pa.Array) -> pa.Array:
        micros = array.view(LONG)
        years = pc.year(array.view(TIMESTAMP_NTZ))
        if pc.any(pc.or_(pc.less(years, 1), pc.greater(years, 9999))).as_py():
            raise ExpressionError(f"a year is outside of 1 to 9999, in {call.sql}")
        if not in_units:
            return _written(tokens, micros)
        # Most records of a batch are of few days, minutes or seconds: each of these is written once.
        units = pc.dictionary_encode(by_numpy(lambda us: us - np.mod(us, unit), micros))
        return _written(tokens, units.dictionary).take(units.indices)

    return apply(write, [part], STRING, call.sql, fails="a time can't be written", on_arrays=True)


def _written(tokens: Sequence[str], micros: pa.Array) -> pa.Array:
    seconds = by_numpy(lambda us: np.floor_divide(us, _US), micros).cast(pa.timestamp("s"))
    return pc.binary_join_element_wise(*(_piece(token, seconds, micros) for token in tokens), "")


def _piece(token: str, seconds: pa.Array, micros: pa.Array) -> Any:
    if token in _STRFTIME:
        return pc.strftime(seconds, _STRFTIME[token])
    if token.startswith("SSS"):
        size = 10 ** (6 - len(token))
        parts = by_numpy(lambda us: np.floor_divide(np.mod(us, _US), size), micros)
        return pc.utf8_lpad(parts.cast(STRING), len(token), "0")
    if token == "''":
        return "'"
    return token[1:-1].replace("''", "'") if token.startswith("'") else token


FUNCTIONS: dict[str, Callable[[Call], Typed]] = {
    **{
        name: partial(_field, field)
        for name, field in {
            "year": "year",
            "quarter": "quarter",
            "month": "month",
            "day": "day",
            "dayofmonth": "day",
            "dayofweek": "dayofweek",
            "dayofyear": "doy",
            "weekday": "weekday",
            "weekofyear": "week",
            "hour": "hour",
            "minute": "minute",
            "second": "second",
        }.items()
    },
    "date_add": partial(_date_add, "+"),
    "date_sub": partial(_date_add, "-"),
    "add_months": _add_months,
    "datediff": _datediff,
    "date_diff": _datediff,
    "last_day": _last_day,
    "make_date": _make_date,
    "trunc": _trunc,
    "date_trunc": _date_trunc,
    "unix_seconds": partial(_unix, _US),
    "unix_millis": partial(_unix, 1_000),
    "unix_micros": partial(_unix, 1),
    "unix_timestamp": _unix_timestamp,
    "timestamp_seconds": partial(_timestamp_of, _US),
    "timestamp_millis": partial(_timestamp_of, 1_000),
    "timestamp_micros": partial(_timestamp_of, 1),
    "unix_date": _unix_date,
    "date_from_unix_date": _date_from_unix_date,
    "to_date": partial(_cast_to, DATE),
    "to_timestamp": partial(_cast_to, TIMESTAMP),
    "date_format": _date_format,
}
