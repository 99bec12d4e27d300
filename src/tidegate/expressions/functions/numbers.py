"""Functions of numbers, and `xxhash64`."""

from __future__ import annotations

from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.expressions import arithmetic
from tidegate.expressions.casts import implicitly
from tidegate.expressions.coercion import MAX_DIGITS, common_type, is_decimal, is_float, is_integer, is_number
from tidegate.expressions.comparing import compare, greatest_or_least
from tidegate.expressions.conditions import case, coalesce
from tidegate.expressions.exact import EXACT, round_decimals
from tidegate.expressions.functions.calls import Call
from tidegate.expressions.typed import BOOLEAN, DOUBLE, LONG, NULL, Typed, apply, constant, type_name
from tidegate.hashing import hash_columns

_MOST_EXACT = 22  # 10 to this power is a double


def _abs(call: Call) -> Typed:
    call.takes(1, 1)
    part = _number(call, 0)
    fails = f"overflow of the type {type_name(part.type)}" if is_integer(part.type) else None
    return apply(pc.abs_checked if fails else pc.abs, [part], part.type, call.sql, fails=fails)


def _number(call: Call, index: int) -> Typed:
    part = call.parts[index]
    if part.type == NULL:
        return constant(None, DOUBLE, part.sql)
    if not is_number(part.type):
        call.fail(f"argument {index + 1} has to be a number, and {part.sql} is of type {type_name(part.type)}; use CAST")
    return part


def _round(call: Call) -> Typed:
    call.takes(1, 2)
    part = _number(call, 0)
    digits = call.constant_int(1) if len(call.parts) == 2 else 0
    sql = call.sql if len(call.parts) == 2 else f"{call.sql[:-1]}, 0)"
    if digits < 0 or digits > _MOST_EXACT:
        call.fail(f"the number of digits is from 0 to {_MOST_EXACT}")
    if is_integer(part.type):
        return part.named(sql)
    if is_float(part.type):
        return apply(partial(_rounded, digits=digits), [part], part.type, sql, on_arrays=True)
    scale = min(part.type.scale, digits)
    type = pa.decimal128(min(part.type.precision - part.type.scale + 1 + scale, MAX_DIGITS), scale)
    return apply(lambda value: round_decimals(value, scale).cast(type), [part], type, sql, on_arrays=True)


def _wider(part: Typed) -> Typed:
    """Return a decimal with room for a carry."""
    type = pa.decimal128(min(part.type.precision + 1, MAX_DIGITS), part.type.scale)
    return apply(lambda value: pc.cast(value, type), [part], type, part.sql)


def _rounded(array: pa.Array, digits: int) -> pa.Array:
    return arithmetic.by_numpy(lambda values: _round_floats(values, digits), array, type=array.type)


def _round_floats(values: Any, digits: int) -> Any:
    """Return the values rounded half up in the decimal notation that is printed, as Java's BigDecimal does.

    2.675 is a little less than it looks, and rounds to 2.68 all the same. So values that are near to a half, as seen
    after a multiplication that rounds, are rounded one by one.
    """
    factor = 10.0**digits
    scaled = np.abs(values.astype(np.float64)) * factor
    whole = np.floor(scaled)
    past = scaled - whole
    result = np.copysign((whole + (past >= 0.5)) / factor, values)
    is_safe = (np.abs(past - 0.5) > 1e-4) & (scaled < 2.0**36)
    unit = Decimal(1).scaleb(-digits)
    for index in np.flatnonzero(~is_safe & np.isfinite(values)).tolist():
        exact = Decimal(str(values[index])).quantize(unit, ROUND_HALF_UP, context=EXACT)
        result[index] = float(exact)
    result = np.where(np.isfinite(values), result, values)
    return np.where(result == 0.0, 0.0, result).astype(values.dtype)


def _floor_or_ceil(kernel: Callable[..., Any], call: Call) -> Typed:
    call.takes(1, 1)
    part = _number(call, 0)
    sql = f"{call.name if call.name == 'ceiling' else call.name.upper()}({part.sql})"
    if is_integer(part.type):
        return implicitly(part, LONG, call.source, call.at).named(sql)
    if is_decimal(part.type):
        type = pa.decimal128(min(part.type.precision - part.type.scale + 1, MAX_DIGITS), 0)
        fails = f"overflow of the type {type_name(type)}" if part.type.precision == MAX_DIGITS else None
        return apply(lambda value: pc.cast(kernel(value), type), [_wider(part)], type, sql, fails=fails)
    numpy = np.ceil if kernel is pc.ceil else np.floor
    return _by_numpy(lambda values: _longs(numpy(values)), [part], LONG, sql, fails="overflow of the type long")


def _longs(values: Any) -> Any:
    """Return doubles as longs, NaN as 0, as Java does."""
    if (np.abs(values) > 2.0**63).any():
        raise pa.ArrowInvalid("out of range")
    top = values >= 2.0**63
    return np.where(top, np.int64(2**63 - 1), np.where(top | np.isnan(values), 0.0, values).astype(np.int64))


def _of_doubles(function: Callable[..., Any], count: int, call: Call) -> Typed:
    call.takes(count, count)
    parts = [call.double(index) for index in range(count)]
    name = call.name if call.name == "pow" else call.name.upper()
    sql = f"{name}({', '.join(part.sql for part in parts)})"
    return _by_numpy(function, parts, DOUBLE, sql)


def _by_numpy(
    function: Callable[..., Any], parts: list[Typed], type: pa.DataType, sql: str, *, fails: str | None = None
) -> Typed:
    def run(*arrays: pa.Array) -> pa.Array:
        return arithmetic.by_numpy(function, *arrays, type=type)

    return apply(run, parts, type, sql, fails=fails, on_arrays=True)


def _logarithm(function: Callable[..., Any], call: Call) -> Typed:
    """Null for what has no logarithm, as in Spark."""
    call.takes(1, 1)
    part = call.double(0)

    def logarithm(value: pa.Array) -> pa.Array:
        positive = pc.invert(pc.less_equal(value, 0.0))
        return arithmetic.by_numpy(function, pc.if_else(positive, value, pa.scalar(None, DOUBLE)), type=DOUBLE)

    sql = f"{call.name.upper() if call.name != 'ln' else 'ln'}({part.sql})"
    return apply(logarithm, [part], DOUBLE, sql, nullable=True, on_arrays=True)


def _sign(call: Call) -> Typed:
    call.takes(1, 1)
    sql = call.sql if call.name == "sign" else f"SIGNUM({call.parts[0].sql})"
    return _by_numpy(lambda values: np.where(values == 0, values, np.sign(values)), [call.double(0)], DOUBLE, sql)


def _pmod(call: Call) -> Typed:
    """The remainder that isn't negative, if the divisor is positive."""
    call.takes(2, 2)
    for index in range(2):
        if not is_integer(call.parts[index].type):
            call.fail(f"it takes integers, and {call.parts[index].sql} is of type {type_name(call.parts[index].type)}")
    type = common_type(call.parts[0].type, call.parts[1].type)
    assert type is not None
    parts = [implicitly(part, type, call.source, call.at) for part in call.parts]
    return apply(
        lambda a, b: arithmetic.by_numpy(_positive_remainder, a, b, check=arithmetic.no_zero),
        parts,
        type,
        call.sql,
        fails="division by zero",
        on_arrays=True,
    )


def _positive_remainder(left: Any, right: Any) -> Any:
    remainder = np.fmod(left, right)
    return np.where(remainder < 0, np.fmod(remainder + right, right), remainder)


def _mod(call: Call) -> Typed:
    call.takes(2, 2)
    return arithmetic.compute("%", call.parts[0], call.parts[1], call.source, call.at).named(call.sql)


def _extreme(call: Call) -> Typed:
    call.takes(2)
    return greatest_or_least(call.name, call.parts, call.source, call.at)


# What is null.


def _coalesce(call: Call) -> Typed:
    call.takes(1)
    type = call.parts[0].type
    for part in call.parts[1:]:
        found = common_type(type, part.type)
        if found is None:
            call.fail(f"{type_name(type)} and {type_name(part.type)} have no type in common; use CAST")
        type = found
    return coalesce([implicitly(part, type, call.source, call.at) for part in call.parts], type, call.sql)


def _ifnull(call: Call) -> Typed:
    call.takes(2, 2)
    return _coalesce(call)


def _nullif(call: Call) -> Typed:
    call.takes(2, 2)
    part = call.parts[0]
    same = compare("=", part, call.parts[1], call.source, call.at)
    return case([(same, constant(None, part.type, "NULL"))], part, part.type, call.sql)


def _isnull(call: Call) -> Typed:
    call.takes(1, 1)
    return apply(pc.is_null, [call.parts[0]], BOOLEAN, f"({call.parts[0].sql} IS NULL)", nullable=False)


def _isnotnull(call: Call) -> Typed:
    call.takes(1, 1)
    return apply(pc.is_valid, [call.parts[0]], BOOLEAN, f"({call.parts[0].sql} IS NOT NULL)", nullable=False)


def _isnan(call: Call) -> Typed:
    call.takes(1, 1)
    return apply(lambda a: pc.fill_null(pc.is_nan(a), False), [call.double(0)], BOOLEAN, call.sql, nullable=False)


def _xxhash64(call: Call) -> Typed:
    call.takes(1)
    for part in call.parts:
        if pa.types.is_map(part.type):
            call.fail("a map has no hash")
    return apply(
        lambda *columns: pa.array(hash_columns(columns)), call.parts, LONG, call.sql, nullable=False, on_arrays=True
    )


FUNCTIONS: dict[str, Callable[[Call], Typed]] = {
    "abs": _abs,
    "round": _round,
    "floor": partial(_floor_or_ceil, pc.floor),
    "ceil": partial(_floor_or_ceil, pc.ceil),
    "ceiling": partial(_floor_or_ceil, pc.ceil),
    "sqrt": partial(_of_doubles, np.sqrt, 1),
    "exp": partial(_of_doubles, np.exp, 1),
    "power": partial(_of_doubles, np.power, 2),
    "pow": partial(_of_doubles, np.power, 2),
    "ln": partial(_logarithm, np.log),
    "log10": partial(_logarithm, np.log10),
    "log2": partial(_logarithm, np.log2),
    "sign": _sign,
    "signum": _sign,
    "mod": _mod,
    "pmod": _pmod,
    "greatest": _extreme,
    "least": _extreme,
    "coalesce": _coalesce,
    "ifnull": _ifnull,
    "nvl": _ifnull,
    "nullif": _nullif,
    "isnull": _isnull,
    "isnotnull": _isnotnull,
    "isnan": _isnan,
    "xxhash64": _xxhash64,
}
