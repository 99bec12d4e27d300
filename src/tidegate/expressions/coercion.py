"""Which type two operands have in common, by the rules of Spark's ANSI mode.

Numbers widen: byte, short, int, long, float, double; an integer and a float meet in double, and a decimal widens to hold
both sides. Text is never taken for a number without a CAST, which Spark does in some places: what such text means depends
on the place.
"""

from __future__ import annotations

import pyarrow as pa

from tidegate.expressions.typed import DATE, DOUBLE, FLOAT, NULL, TIMESTAMP, TIMESTAMP_NTZ
from tidegate.types import ddl_of

MAX_DIGITS = 38
INTEGERS = (pa.int8(), pa.int16(), pa.int32(), pa.int64())
DIGITS = dict(zip(INTEGERS, (3, 5, 10, 20), strict=True))
"""How many digits Spark gives the decimal that an integer becomes."""


def is_integer(type: pa.DataType) -> bool:
    return type in INTEGERS


def is_float(type: pa.DataType) -> bool:
    return type in (FLOAT, DOUBLE)


def is_decimal(type: pa.DataType) -> bool:
    return bool(pa.types.is_decimal128(type))


def is_number(type: pa.DataType) -> bool:
    return is_integer(type) or is_float(type) or is_decimal(type)


def is_moment(type: pa.DataType) -> bool:
    return type in (DATE, TIMESTAMP, TIMESTAMP_NTZ)


def common_type(left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
    """Return the type that both can be converted to without a CAST, None if there is none."""
    if left == right or right == NULL:
        return left
    if left == NULL:
        return right
    if is_number(left) and is_number(right):
        return _common_number(left, right)
    if is_moment(left) and is_moment(right):
        return TIMESTAMP if TIMESTAMP in (left, right) else TIMESTAMP_NTZ
    return left if ddl_of(left) == ddl_of(right) else None


def _common_number(left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
    if is_float(left) or is_float(right):
        return DOUBLE  # of two floats the type is the same, which was asked before
    if is_integer(left) and is_integer(right):
        return INTEGERS[max(INTEGERS.index(left), INTEGERS.index(right))]
    left, right = as_decimal(left), as_decimal(right)
    scale = max(left.scale, right.scale)
    precision = max(left.precision - left.scale, right.precision - right.scale) + scale
    return pa.decimal128(precision, scale) if precision <= MAX_DIGITS else None


def as_decimal(type: pa.DataType) -> pa.DataType:
    """Return the decimal type that holds every value of an integer type; a decimal type is returned as it is."""
    return pa.decimal128(DIGITS[type], 0) if is_integer(type) else type
