"""Literals: numbers, text, TRUE, NULL, dates, timestamps and intervals."""

from __future__ import annotations

import re
from decimal import Decimal

import pyarrow as pa
from sqlglot import exp

from tidegate.expressions.coercion import MAX_DIGITS
from tidegate.expressions.typed import (
    BOOLEAN,
    DAYS,
    DOUBLE,
    DURATION,
    INT,
    LONG,
    MONTHS,
    NULL,
    STRING,
    Text,
    Typed,
    constant,
    of_scalar,
)

_UNITS_US = {
    "WEEK": 7 * 86_400_000_000,
    "DAY": 86_400_000_000,
    "HOUR": 3_600_000_000,
    "MINUTE": 60_000_000,
    "SECOND": 1_000_000,
    "MILLISECOND": 1_000,
    "MICROSECOND": 1,
}
_UNITS_MONTHS = {"YEAR": 12, "MONTH": 1}


def null() -> Typed:
    return constant(None, NULL, "NULL")


def boolean(value: bool) -> Typed:
    return constant(value, BOOLEAN, str(value).lower())


def literal(node: exp.Literal, source: Text, at: int | None, *, sign: str = "") -> Typed:
    """Return a number or text. `sign` is that of a number."""
    text = str(node.this)
    if node.is_string:
        return constant(text, STRING, text)
    if re.fullmatch(r"[0-9]+", text):
        value = int(sign + text)
        for type in (INT, LONG):
            if -(1 << (type.bit_width - 1)) <= value < 1 << (type.bit_width - 1):
                return constant(value, type, sign + text)
    if re.fullmatch(r"[0-9]*\.?[0-9]+[eE][+-]?[0-9]+|[0-9]+\.[eE][+-]?[0-9]+", text):
        return constant(float(sign + text), DOUBLE, sign + text)
    number = Decimal(sign + text)
    _, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    scale = max(-exponent, 0)
    precision = max(len(digits), scale)
    if precision > MAX_DIGITS:
        source.fail(f"{text} has more than {MAX_DIGITS} digits", at)
    return constant(number, pa.decimal128(precision, scale), sign + text)


def interval(node: exp.Interval, source: Text, at: int | None, *, sign: int = 1) -> Typed:
    """Return `INTERVAL n unit`: microseconds, or months for units from a month on."""
    amount, unit = node.args.get("this"), node.args.get("unit")
    if not isinstance(unit, exp.Var):
        source.fail("an interval is a number and one unit, such as INTERVAL 10 MINUTES; add several with +", at)
    if not isinstance(amount, exp.Literal):
        source.fail("an interval's number is a literal; multiply an interval by an expression instead", at)
    name = str(unit.this).upper().removesuffix("S")
    text = str(amount.this).strip()
    sql = f"INTERVAL '{text}' {name}"
    if name in _UNITS_MONTHS and re.fullmatch(r"[+-]?[0-9]+", text):
        return of_scalar(pa.scalar(sign * int(text) * _UNITS_MONTHS[name], INT), sql, type=MONTHS)
    if name in _UNITS_US and re.fullmatch(r"[+-]?[0-9]+(\.[0-9]{1,9})?" if name == "SECOND" else r"[+-]?[0-9]+", text):
        amount_us = sign * int(Decimal(text) * _UNITS_US[name])
        return constant(amount_us // 1_000_000, DAYS, sql) if name == "DAY" else constant(amount_us, DURATION, sql)
    raise source.error(f"{sql} is not supported; the units are {', '.join([*_UNITS_MONTHS, *_UNITS_US]).lower()}", at)
