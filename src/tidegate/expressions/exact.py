"""Decimals: from Python's to a column, and their digits."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

EXACT = Context(prec=400)
"""Enough digits for any double."""
_MOST = 38


def unscaled(array: pa.Array) -> np.ndarray[Any, Any]:
    """Return the digits of decimals of at most 18 digits, as longs."""
    words = np.frombuffer(array.buffers()[1], np.int64)
    return words[2 * array.offset : 2 * (array.offset + len(array)) : 2]


def round_decimals(array: pa.Array, scale: int) -> pa.Array:
    """Return decimals rounded half up to at most `scale` digits after the point, of a type with room for a carry."""
    type = array.type
    if scale >= type.scale:
        return array
    if type.precision == _MOST:
        # Arrow rounds 38 nines to something else, without a word.
        return decimals(array.to_pylist(), pa.decimal128(_MOST, scale))
    array = array.cast(pa.decimal128(type.precision + 1, type.scale))
    return pc.round(array, ndigits=scale, round_mode="half_towards_infinity")


def decimals(values: Iterable[Decimal | None], target: pa.DataType) -> pa.Array:
    """Return a column of decimals, rounded half up; null for what is too large, for NaN and for infinity."""
    unit, limit = Decimal(1).scaleb(-target.scale), Decimal(10) ** (target.precision - target.scale)
    rounded = (None if x is None or not x.is_finite() else x.quantize(unit, ROUND_HALF_UP, context=EXACT) for x in values)
    return pa.array([None if x is None or abs(x) >= limit else x for x in rounded], target)
