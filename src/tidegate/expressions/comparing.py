"""Comparisons as Spark makes them: NaN equals NaN and is greater than every other number, -0.0 equals 0.0.

Text and binary values are compared byte by byte. Arrays, maps and structs are not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import isnan
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.expressions.casts import cast, implicitly
from tidegate.expressions.coercion import common_type, is_float, is_moment
from tidegate.expressions.conditions import conjunction, disjunction, negation
from tidegate.expressions.typed import (
    BOOLEAN,
    DATE,
    DAYS,
    DURATION,
    MONTHS,
    NULL,
    STRING,
    TIMESTAMP,
    Text,
    Typed,
    Value,
    apply,
    type_name,
)

_SIGNS = {"=": pc.equal, "<": pc.less, "<=": pc.less_equal, ">": pc.greater, ">=": pc.greater_equal}


def compare(sign: str, left: Typed, right: Typed, source: Text, at: int | None) -> Typed:
    """Return `left sign right` for one of =, <, <=, >, >=, !=, <=>."""
    left, right = comparable(left, right, source, at)
    sql = f"({left.sql} {sign} {right.sql})"
    if sign == "!=":
        return negation(compare("=", left, right, source, at))
    if sign == "<=>":
        return apply(_null_safe(left.type), [left, right], BOOLEAN, sql, nullable=False)
    if not is_float(left.type):
        return apply(_SIGNS[sign], [left, right], BOOLEAN, sql)
    if _is_number(right) and sign in (">", ">="):
        # NaN is greater, and not less: one kernel and a cheap negation.
        opposite = pc.less_equal if sign == ">" else pc.less
        return apply(lambda a, b: pc.invert(opposite(a, b)), [left, right], BOOLEAN, sql)
    if _is_number(right):
        return apply(_SIGNS[sign], [left, right], BOOLEAN, sql)
    return apply(_FLOATS[sign], [left, right], BOOLEAN, sql)


def comparable(left: Typed, right: Typed, source: Text, at: int | None) -> tuple[Typed, Typed]:
    """Return both sides as the type in which they are compared."""
    left, right = _moment_of_text(left, right.type, source, at), _moment_of_text(right, left.type, source, at)
    left, right = _lasting(left), _lasting(right)
    type = common_type(left.type, right.type)
    if type == NULL:
        type = BOOLEAN
    if type is None or type == MONTHS:
        source.fail(f"{type_name(left.type)} can't be compared with {type_name(right.type)}; use CAST", at)
    if pa.types.is_nested(type):
        source.fail(f"values of type {type_name(type)} can't be compared; compare their parts", at)
    return implicitly(left, type, source, at), implicitly(right, type, source, at)


def _moment_of_text(part: Typed, other: pa.DataType, source: Text, at: int | None) -> Typed:
    """Return text that is compared with a date or a timestamp as such a value, if it is a constant."""
    if part.type != STRING or part.constant is None or not is_moment(other):
        return part
    return cast(part, DATE if other == DATE else TIMESTAMP, source, at, sql=part.sql)


def _lasting(part: Typed) -> Typed:
    """Return an interval of days as one of microseconds."""
    return apply(lambda value: pc.cast(value, DURATION), [part], DURATION, part.sql) if part.type == DAYS else part


def _is_number(part: Typed) -> bool:
    return part.constant is not None and part.constant.is_valid and not isnan(part.constant.as_py())


def _equal(left: Value, right: Value) -> Value:
    return pc.or_(pc.equal(left, right), pc.and_(pc.is_nan(left), pc.is_nan(right)))


def _greater(left: Value, right: Value) -> Value:
    return pc.or_(pc.greater(left, right), pc.and_(pc.is_nan(left), pc.invert(pc.is_nan(right))))


_FLOATS: dict[str, Any] = {
    "=": _equal,
    ">": _greater,
    "<": lambda left, right: _greater(right, left),
    ">=": lambda left, right: pc.invert(_greater(right, left)),
    "<=": lambda left, right: pc.invert(_greater(left, right)),
}


def _null_safe(type: pa.DataType) -> Any:
    equal = _equal if is_float(type) else pc.equal

    def same(left: Value, right: Value) -> Value:
        both_null = pc.and_(pc.is_null(left), pc.is_null(right))
        return pc.or_(both_null, pc.fill_null(equal(left, right), False))

    return same


def is_in(part: Typed, options: Sequence[Typed], source: Text, at: int | None) -> Typed:
    """Return `part IN (options)`: null if no option is equal and one of them is null."""
    sql = f"({part.sql} IN ({', '.join(option.sql for option in options)}))"
    type = part.type
    for option in options:
        left, _ = comparable(Typed(type, part.run, part.sql), option, source, at)
        type = left.type
    part = implicitly(part, type, source, at)
    options = [comparable(part, option, source, at)[1] for option in options]
    if is_float(type) or type == DURATION or any(option.constant is None for option in options):
        return reduce(disjunction, [compare("=", part, option, source, at) for option in options]).named(sql)
    known = pa.array(
        [option.constant.as_py() for option in options if option.constant is not None and option.constant.is_valid], type
    )
    has_null = any(option.is_null_literal for option in options)

    def look_up(value: Value) -> Value:
        found = pc.is_in(value, known)
        if has_null:
            found = pc.if_else(found, True, pa.scalar(None, BOOLEAN))
        return pc.if_else(pc.is_null(value), pa.scalar(None, BOOLEAN), found)

    return apply(look_up, [part], BOOLEAN, sql, nullable=True if has_null else None)


def between(part: Typed, low: Typed, high: Typed, source: Text, at: int | None) -> Typed:
    least, most = compare(">=", part, low, source, at), compare("<=", part, high, source, at)
    return conjunction(least, most).named(f"between({part.sql}, {low.sql}, {high.sql})")


def greatest_or_least(name: str, parts: Sequence[Typed], source: Text, at: int | None) -> Typed:
    """Return the greatest or least part that isn't null."""
    type = parts[0].type
    for part in parts[1:]:
        type = comparable(Typed(type, part.run, part.sql), part, source, at)[0].type
    parts = [implicitly(part, type, source, at) for part in parts]
    greater = _greater if is_float(type) else pc.greater
    wins = greater if name == "greatest" else lambda new, old: greater(old, new)

    def better(old: Value, new: Value) -> Value:
        takes_new = pc.or_(pc.is_null(old), pc.fill_null(wins(new, old), False))
        return pc.if_else(takes_new, new, old)

    sql = f"{name}({', '.join(part.sql for part in parts)})"
    return apply(lambda *values: reduce(better, values), parts, type, sql, nullable=all(part.nullable for part in parts))
