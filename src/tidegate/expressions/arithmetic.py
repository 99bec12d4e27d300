"""Arithmetic as in Spark's ANSI mode: what overflows or is divided by zero is an error.

`/` of integers is a double, `div` a long; `%` has the sign of the dividend.

Sums, differences and products of decimals have all of their digits, if these are at most 38. Otherwise, and for quotients,
Spark computes 39 digits and rounds them half up to a type of 38. Arrow doesn't, so that Python's decimals do it, one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import ROUND_DOWN, Context, Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.expressions.casts import implicitly
from tidegate.expressions.coercion import MAX_DIGITS, as_decimal, common_type, is_decimal, is_float, is_integer, is_number
from tidegate.expressions.exact import EXACT, decimals
from tidegate.expressions.typed import DOUBLE, LONG, NULL, Text, Typed, Value, apply, constant, type_name

_OVERFLOW = "overflow"
_BY_ZERO = "overflow or division by zero"
_CHECKED = {"+": pc.add_checked, "-": pc.subtract_checked, "*": pc.multiply_checked}
_PLAIN = {"+": pc.add, "-": pc.subtract, "*": pc.multiply}


def compute(sign: str, left: Typed, right: Typed, source: Text, at: int | None) -> Typed:
    """Return `left sign right` for one of +, -, *, /, %, div, both of which are numbers or NULL."""
    for part in (left, right):
        if not is_number(part.type) and part.type != NULL:
            source.fail(f"{sign} takes numbers, and {part.sql} is of type {type_name(part.type)}; use CAST", at)
    sql = f"({left.sql} {sign} {right.sql})"
    if sign == "div":
        return _divide_whole(left, right, sql, source, at)
    if (is_decimal(left.type) and not is_float(right.type)) or (is_decimal(right.type) and not is_float(left.type)):
        return _decimals(sign, left, right, sql)
    if sign == "/":
        return _divide(left, right, sql, source, at)
    type = common_type(left.type, right.type)
    assert type is not None
    if type == NULL:
        type = DOUBLE
    left, right = implicitly(left, type, source, at), implicitly(right, type, source, at)
    if sign == "%":
        return apply(_remainder, [left, right], type, sql, fails="division by zero", on_arrays=True)
    if is_float(type):
        return apply(_PLAIN[sign], [left, right], type, sql)
    return apply(_CHECKED[sign], [left, right], type, sql, fails=f"{_OVERFLOW} of the type {type_name(type)}")


def negative(part: Typed, source: Text, at: int | None) -> Typed:
    if part.type == NULL:
        return constant(None, DOUBLE, f"(- {part.sql})")
    if not is_number(part.type):
        source.fail(f"- takes a number, and {part.sql} is of type {type_name(part.type)}", at)
    fails = f"{_OVERFLOW} of the type {type_name(part.type)}" if is_integer(part.type) else None
    kernel = pc.negate_checked if is_integer(part.type) else pc.negate
    return apply(kernel, [part], part.type, f"(- {part.sql})", fails=fails)


def _divide(left: Typed, right: Typed, sql: str, source: Text, at: int | None) -> Typed:
    left, right = implicitly(left, DOUBLE, source, at), implicitly(right, DOUBLE, source, at)
    if right.constant is not None and right.constant.is_valid and right.constant.as_py() != 0:
        return apply(pc.divide, [left, right], DOUBLE, sql)
    return apply(pc.divide_checked, [left, right], DOUBLE, sql, fails="division by zero")


def _divide_whole(left: Typed, right: Typed, sql: str, source: Text, at: int | None) -> Typed:
    for part in (left, right):
        if not is_integer(part.type) and part.type != NULL:
            source.fail(f"div takes integers, and {part.sql} is of type {type_name(part.type)}", at)
    left, right = implicitly(left, LONG, source, at), implicitly(right, LONG, source, at)
    return apply(pc.divide_checked, [left, right], LONG, sql, fails=_BY_ZERO)


def _decimals(sign: str, left: Typed, right: Typed, sql: str) -> Typed:
    left, right = _exact(left, right.type), _exact(right, left.type)
    precision, scale = _digits(sign, left.type, right.type)
    if sign in _PLAIN and precision <= MAX_DIGITS:
        type, kernel = pa.decimal128(precision, scale), _PLAIN[sign]
        return apply(lambda a, b: pc.cast(kernel(a, b), type), [left, right], type, sql)
    if precision > MAX_DIGITS:
        # Whole digits are kept, and at least six behind the point.
        scale = max(MAX_DIGITS - (precision - scale), min(scale, 6))
        precision = MAX_DIGITS
    type = pa.decimal128(precision, scale)
    function = _ONE_BY_ONE[sign]

    def compute_each(lefts: pa.Array, rights: pa.Array) -> pa.Array:
        pairs = zip(lefts.to_pylist(), rights.to_pylist(), strict=True)
        results = [None if one is None or other is None else function(one, other) for one, other in pairs]
        made = decimals(results, type)
        if made.null_count > results.count(None):
            raise pa.ArrowInvalid("too large")
        return made

    fails = "division by zero" if sign in "/%" else f"{_OVERFLOW} of the type {type_name(type)}"
    return apply(compute_each, [left, right], type, sql, fails=fails, on_arrays=True)


def _digits(sign: str, left: pa.DataType, right: pa.DataType) -> tuple[int, int]:
    """Return the precision and the scale of a result, before Spark limits them."""
    whole_left, whole_right = left.precision - left.scale, right.precision - right.scale
    scale = max(left.scale, right.scale)
    if sign == "*":
        return left.precision + right.precision + 1, left.scale + right.scale
    if sign == "/":
        scale = max(6, left.scale + right.precision + 1)
        return whole_left + right.scale + scale, scale
    if sign == "%":
        return min(whole_left, whole_right) + scale, scale
    return max(whole_left, whole_right) + scale + 1, scale


def _divided(function: Callable[[Decimal, Decimal], Decimal]) -> Callable[[Decimal, Decimal], Decimal]:
    def divide(one: Decimal, other: Decimal) -> Decimal:
        if not other:
            raise pa.ArrowInvalid("division by zero")
        return function(one, other)

    return divide


_AS_JAVA = Context(prec=MAX_DIGITS + 1, rounding=ROUND_DOWN)
_ONE_BY_ONE: dict[str, Callable[[Decimal, Decimal], Decimal]] = {
    "+": EXACT.add,
    "-": EXACT.subtract,
    "*": _AS_JAVA.multiply,
    "/": _divided(_AS_JAVA.divide),
    "%": _divided(EXACT.remainder),
}


def _exact(part: Typed, other: pa.DataType) -> Typed:
    """Return an integer as a decimal: a constant as one of its own digits, others as one of all digits of the type."""
    if part.type == NULL:
        return constant(None, as_decimal(other), part.sql)
    if not is_integer(part.type):
        return part
    if part.constant is not None and part.constant.is_valid:
        value = part.constant.as_py()
        return constant(value, pa.decimal128(len(str(abs(value))), 0), part.sql)
    type = as_decimal(part.type)
    return apply(lambda value: pc.cast(pc.cast(value, LONG), pa.decimal128(20, 0)).cast(type), [part], type, part.sql)


def _remainder(left: pa.Array, right: pa.Array) -> Value:
    return by_numpy(np.fmod, left, right, check=no_zero)


def no_zero(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> None:
    if (right == 0).any():
        raise pa.ArrowInvalid("division by zero")


def by_numpy(
    function: Callable[..., Any],
    *arrays: pa.Array,
    check: Callable[..., None] | None = None,
    type: pa.DataType | None = None,
) -> pa.Array:
    """Return numpy's function of number arrays, null where one of them is null. It gets the rows without null only."""
    valid = np.ones(len(arrays[0]), dtype=bool)
    for array in arrays:
        if array.null_count:
            valid &= array.is_valid().to_numpy(zero_copy_only=False)
    type = type or arrays[0].type
    if valid.all():
        vectors = [array.to_numpy(zero_copy_only=False) for array in arrays]
    else:
        vectors = [array.filter(pa.array(valid)).to_numpy(zero_copy_only=False) for array in arrays]
    if check is not None:
        check(*vectors)
    with np.errstate(all="ignore"):
        results = pa.array(function(*vectors), type)
    if valid.all():
        return results
    return results.take(pa.array(np.cumsum(valid) - 1, mask=~valid))
