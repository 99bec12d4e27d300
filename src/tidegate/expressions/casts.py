"""CAST: Spark's conversions between types, in ANSI mode.

A converter turns an array into one of another type, with null for every value that has no counterpart there. CAST
refuses such values, TRY_CAST keeps the nulls. Pairs of types that are not listed here are refused when the expression is
compiled. Text is converted by the functions of casts_of_text.py.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import ExpressionError
from tidegate.expressions import casts_of_text
from tidegate.expressions.coercion import is_decimal, is_float, is_integer, is_number
from tidegate.expressions.exact import decimals, round_decimals, unscaled
from tidegate.expressions.typed import (
    BINARY,
    BOOLEAN,
    DATE,
    DOUBLE,
    LONG,
    NULL,
    STRING,
    TIMESTAMP,
    TIMESTAMP_NTZ,
    Text,
    Typed,
    apply,
    of_scalar,
    type_name,
)
from tidegate.types import ddl_of

Converter: TypeAlias = Callable[[pa.Array], pa.Array]

_US = 1_000_000
_DAY_US = 86_400 * _US
_EXACT_DIGITS = 15  # of an integer that a double holds exactly


def cast(part: Typed, target: pa.DataType, source: Text, at: int | None = None, *, sql: str, safely: bool = False) -> Typed:
    """Return `CAST(part AS target)`, or `TRY_CAST` if `safely`."""
    if part.type == target or ddl_of(part.type) == ddl_of(target):
        return part.named(sql)
    if part.type == NULL:
        return of_scalar(pa.scalar(None, target), sql)
    if (widened := _widened(part, target)) is not None:
        return widened.named(sql)
    converter = _converter(part.type, target)
    if converter is None:
        source.fail(f"{type_name(part.type)} can't be cast to {type_name(target)}", at)
    not_finite_is_null = is_float(part.type) and is_decimal(target)  # in Spark, in ANSI mode, too

    def convert(array: pa.Array) -> pa.Array:
        if not_finite_is_null:
            array = pc.if_else(pc.is_finite(array), array, pa.scalar(None, array.type))
        converted = converter(array)
        if not safely and converted.null_count > array.null_count:
            lost = pc.and_(pc.is_valid(array), pc.is_null(converted))
            first = array.filter(lost)[0]
            shown = repr(first.as_py()) if array.type == STRING else str(first)
            raise ExpressionError(
                f"{shown} can't be cast to {type_name(target)}, in {sql}; use try_cast to get NULL instead"
            )
        return converted

    made = apply(convert, [part], target, sql, fails=f"a value can't be cast to {type_name(target)}", on_arrays=True)
    return (
        made
        if made.constant is not None
        else Typed(target, made.run, sql, part.nullable or safely or not_finite_is_null, not safely)
    )


def implicitly(part: Typed, target: pa.DataType, source: Text, at: int | None = None) -> Typed:
    """Return the part as the type that it has in common with another one. Spark's names don't show it."""
    return cast(part, target, source, at, sql=part.sql)


def _widened(part: Typed, target: pa.DataType) -> Typed | None:
    """Return the part as a number type that holds all of its values, by one kernel; None if `target` isn't such a type."""
    have = part.type
    if is_integer(have) and is_integer(target) and have.bit_width < target.bit_width:
        return apply(lambda value: pc.cast(value, target), [part], target, part.sql)
    if (is_integer(have) and is_float(target)) or (is_float(have) and is_float(target)):
        return apply(lambda value: pc.cast(value, target, safe=False), [part], target, part.sql)
    if is_decimal(have) and is_decimal(target) and _holds(target, have):
        return apply(lambda value: pc.cast(value, target), [part], target, part.sql)
    return None


def _holds(wide: pa.DataType, narrow: pa.DataType) -> bool:
    """Return whether a decimal type has all values of another one."""
    return bool(wide.scale >= narrow.scale and wide.precision - wide.scale >= narrow.precision - narrow.scale)


def _converter(source: pa.DataType, target: pa.DataType) -> Converter | None:
    if source == STRING:
        return casts_of_text.from_text(target)
    if target == STRING:
        return casts_of_text.to_text(source)
    if is_number(source) and target == BOOLEAN:
        zero = pa.scalar(Decimal(0), source) if is_decimal(source) else pa.scalar(0, source)
        return lambda array: pc.not_equal(array, zero)
    if source == BOOLEAN and (is_integer(target) or is_float(target)):
        return lambda array: pc.cast(pc.cast(array, pa.int8()), target)
    if is_number(source) and is_number(target):
        return _number_converter(source, target)
    if source in (DATE, TIMESTAMP, TIMESTAMP_NTZ) and target in (DATE, TIMESTAMP, TIMESTAMP_NTZ):
        return _moment_converter(source, target)
    if source == TIMESTAMP and target == LONG:
        return lambda array: _numbers(np.floor_divide(_longs(array), _US), array, LONG)
    if is_integer(source) and target == TIMESTAMP:
        return _timestamp_of_seconds
    if source == BINARY and target == BINARY:
        return lambda array: array
    return None


# Numbers.


def _number_converter(source: pa.DataType, target: pa.DataType) -> Converter:
    if is_float(source):
        return (lambda array: _int_of_float(array, target)) if is_integer(target) else lambda a: _decimal_of_float(a, target)
    if is_integer(target):
        return lambda array: _int_of_exact(_without_fraction(array) if is_decimal(source) else array, target)
    if is_float(target):
        return lambda array: _float_of_decimal(array, target)
    return lambda array: _decimal_of_exact(array, target)


def _without_fraction(array: pa.Array) -> pa.Array:
    """Return whole numbers of decimals. Arrow refuses types without a digit before the point."""
    if array.type.precision > array.type.scale:
        return pc.trunc(array)
    return pa.array(np.zeros(len(array), np.int64), mask=_nulls(array))


def limits(type: pa.DataType) -> tuple[int, int]:
    bound = 1 << (type.bit_width - 1)
    return -bound, bound - 1


def _int_of_exact(array: pa.Array, target: pa.DataType) -> pa.Array:
    try:
        return array.cast(target)
    except pa.ArrowInvalid:
        low, high = (pa.scalar(Decimal(limit) if is_decimal(array.type) else limit) for limit in limits(target))
        fits = pc.and_(pc.greater_equal(array, low), pc.less_equal(array, high))
        return pc.if_else(fits, array, pa.scalar(None, array.type)).cast(target)


def _int_of_float(array: pa.Array, target: pa.DataType) -> pa.Array:
    values = array.cast(DOUBLE).fill_null(0.0).to_numpy(zero_copy_only=False)
    low, high = limits(target)
    fits = (np.floor(values) <= float(high)) & (np.ceil(values) >= float(low))
    whole = np.where(fits, np.trunc(values), 0.0)
    top = whole >= 2.0**63  # which Java takes for the largest long
    numbers = np.where(top, np.int64(2**63 - 1), np.where(top, 0.0, whole).astype(np.int64))
    return pa.array(numbers, mask=~fits | _nulls(array)).cast(target)


def _decimal_of_float(array: pa.Array, target: pa.DataType) -> pa.Array:
    return decimals((None if x is None else Decimal(repr(x)) for x in array.cast(DOUBLE).to_pylist()), target)


def _float_of_decimal(array: pa.Array, target: pa.DataType) -> pa.Array:
    """Return the nearest double, which Arrow's own cast misses now and then."""
    if array.type.precision <= _EXACT_DIGITS:
        exact = unscaled(array) / 10.0**array.type.scale
        return pa.array(exact, mask=_nulls(array)).cast(target, safe=False)
    return pa.array([None if x is None else float(x) for x in array.to_pylist()], DOUBLE).cast(target, safe=False)


def _decimal_of_exact(array: pa.Array, target: pa.DataType) -> pa.Array:
    if is_integer(array.type):
        array = array.cast(pa.decimal128(19, 0))
    try:
        return round_decimals(array, target.scale).cast(target)
    except pa.ArrowInvalid:
        return decimals(array.to_pylist(), target)


# Dates and timestamps. The time zone is UTC.


def _moment_converter(source: pa.DataType, target: pa.DataType) -> Converter:
    if target == DATE:
        return lambda array: _days(np.floor_divide(_longs(array), _DAY_US), array)
    if source == DATE:
        return lambda array: _midnight(array, target)
    return lambda array: array.view(target)


def _midnight(array: pa.Array, target: pa.DataType) -> pa.Array:
    days = array.view(pa.int32()).cast(LONG)
    return pc.multiply_checked(days, _DAY_US).view(target)


def _days(days: np.ndarray[Any, Any], array: pa.Array) -> pa.Array:
    return pa.array(days, LONG, mask=_nulls(array)).cast(pa.int32()).view(DATE)


def _timestamp_of_seconds(array: pa.Array) -> pa.Array:
    seconds = array.cast(LONG)
    limit = (2**63 - 1) // _US
    fits = pc.and_(pc.less_equal(seconds, limit), pc.greater_equal(seconds, -limit))
    return pc.multiply_checked(pc.if_else(fits, seconds, pa.scalar(None, LONG)), _US).view(TIMESTAMP)


def _longs(array: pa.Array) -> np.ndarray[Any, Any]:
    longs: np.ndarray[Any, Any] = array.view(LONG).fill_null(0).to_numpy()
    return longs


def _numbers(values: np.ndarray[Any, Any], array: pa.Array, type: pa.DataType) -> pa.Array:
    return pa.array(values, type, mask=_nulls(array))


def _nulls(array: pa.Array) -> np.ndarray[Any, Any]:
    nulls: np.ndarray[Any, Any] = array.is_null().to_numpy(zero_copy_only=False)
    return nulls
