"""CAST from and to text, value by value what Spark reads and writes.

Of the many forms that Spark reads, these are read: numbers in decimal notation, `inf`, `infinity` and `nan`; booleans in
Spark's words; dates as year-month-day; timestamps as date, `T` or a space, and time with up to six digits of a second, with
an offset or in UTC. Text in another form is refused as if it weren't a value of the type.

A float or double isn't written as text: how many digits Java writes depends on its version.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.expressions.coercion import is_decimal, is_float, is_integer
from tidegate.expressions.exact import decimals
from tidegate.expressions.typed import BINARY, BOOLEAN, DATE, DOUBLE, LONG, STRING, TIMESTAMP, TIMESTAMP_NTZ

_BLANKS = "".join(map(chr, range(1, 33))) + "\x7f"
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_SPECIAL = {
    **dict.fromkeys(("inf", "+inf", "infinity", "+infinity"), float("inf")),
    **dict.fromkeys(("-inf", "-infinity"), float("-inf")),
    "nan": float("nan"),
}
_TRUE, _FALSE = pa.array(["t", "true", "y", "yes", "1"]), pa.array(["f", "false", "n", "no", "0"])
_DATE = r"^(?P<y>[0-9]{4})-(?P<m>[0-9]{1,2})-(?P<d>[0-9]{1,2})$"
_TIME = (
    r"^(?P<y>[0-9]{4})-(?P<m>[0-9]{1,2})-(?P<d>[0-9]{1,2})"
    r"(?:[ T](?P<h>[0-9]{1,2}):(?P<i>[0-9]{1,2}):(?P<s>[0-9]{1,2})(?P<f>\.[0-9]{1,6})?)?(?P<z>Z|[+-][0-9]{2}:[0-9]{2})?$"
)


def from_text(target: pa.DataType) -> Callable[[pa.Array], pa.Array] | None:
    """Return the converter of text to a type. Values that aren't in the type's form become null."""
    if is_integer(target):
        return lambda array: _ints(_trimmed(array), target)
    if is_float(target):
        return lambda array: _each(_trimmed(array), _float, DOUBLE).cast(target, safe=False)
    if is_decimal(target):
        return lambda array: decimals(map(_decimal, _trimmed(array).to_pylist()), target)
    others: dict[pa.DataType, Callable[[pa.Array], pa.Array]] = {
        BOOLEAN: lambda array: _booleans(pc.utf8_lower(_trimmed(array))),
        DATE: lambda array: _dates(_trimmed(array)),
        TIMESTAMP: lambda array: _timestamps(_trimmed(array)),
        BINARY: lambda array: array.cast(BINARY),
    }
    return others.get(target)


def to_text(source: pa.DataType) -> Callable[[pa.Array], pa.Array] | None:
    """Return the converter of a type to text as Spark writes it."""
    if is_integer(source) or source in (BOOLEAN, DATE):
        return lambda array: array.cast(STRING)
    if is_decimal(source):
        return lambda array: pa.array([None if x is None else f"{x:f}" for x in array.to_pylist()], STRING)
    if source in (TIMESTAMP, TIMESTAMP_NTZ):
        return lambda array: _without_zeros(pc.strftime(array.view(TIMESTAMP_NTZ), "%Y-%m-%d %H:%M:%S"))
    return None


def _without_zeros(texts: pa.Array) -> pa.Array:
    return pc.utf8_rtrim(pc.utf8_rtrim(texts, "0"), ".")


def _trimmed(array: pa.Array) -> pa.Array:
    return pc.utf8_trim(array, _BLANKS)


def _each(array: pa.Array, function: Callable[[str], Any], type: pa.DataType) -> pa.Array:
    return pa.array([None if text is None else function(text) for text in array.to_pylist()], type)


def _kept(array: pa.Array, fits: pa.Array) -> pa.Array:
    return pc.if_else(fits, array, pa.scalar(None, array.type))


def _ints(array: pa.Array, target: pa.DataType) -> pa.Array:
    digits = pc.replace_substring_regex(_kept(array, pc.match_substring_regex(array, r"^[+-]?[0-9]+$")), r"^\+", "")
    try:
        return digits.cast(target)
    except pa.ArrowInvalid:
        bound = 1 << (target.bit_width - 1)
        return _each(digits, lambda text: number if -bound <= (number := int(text)) < bound else None, LONG).cast(target)


def _float(text: str) -> float | None:
    return float(text) if _NUMBER.fullmatch(text) else _SPECIAL.get(text.lower())


def _decimal(text: str | None) -> Decimal | None:
    return Decimal(text) if text is not None and _NUMBER.fullmatch(text) else None


def _booleans(words: pa.Array) -> pa.Array:
    is_true = pc.is_in(words, _TRUE)
    return _kept(is_true, pc.or_(is_true, pc.is_in(words, _FALSE)))


def _padded(fields: pa.Array, name: str) -> pa.Array:
    return pc.utf8_lpad(pc.struct_field(fields, name), 2, "0")


def _day_texts(fields: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise(pc.struct_field(fields, "y"), _padded(fields, "m"), _padded(fields, "d"), "-")


def _dates(array: pa.Array) -> pa.Array:
    return _read(_day_texts(pc.extract_regex(array, _DATE)), DATE)


def _timestamps(array: pa.Array) -> pa.Array:
    fields = pc.extract_regex(array, _TIME)
    times = pc.binary_join_element_wise(_padded(fields, "h"), _padded(fields, "i"), _padded(fields, "s"), ":")
    fraction, zone = pc.struct_field(fields, "f"), pc.struct_field(fields, "z")
    texts = pc.binary_join_element_wise(
        pc.binary_join_element_wise(_day_texts(fields), times, " "),
        fraction,
        pc.if_else(pc.equal(zone, ""), "Z", zone),
        "",
    )
    return _read(texts, TIMESTAMP)


def _read(texts: pa.Array, type: pa.DataType) -> pa.Array:
    """Return dates or timestamps of texts in their form, null for a 30th of February."""
    try:
        return texts.cast(type)
    except pa.ArrowInvalid:
        found = [_read_one(text, type) for text in texts]
        return pa.array([None if each is None else each.value for each in found], _storage(type)).view(type)


def _storage(type: pa.DataType) -> pa.DataType:
    return pa.int32() if type == DATE else LONG


def _read_one(text: pa.Scalar, type: pa.DataType) -> pa.Scalar | None:
    try:
        return text.cast(type) if text.is_valid else None
    except pa.ArrowInvalid:
        return None
