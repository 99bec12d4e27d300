"""What each aggregate must return, computed from a list of Python values as anyone would."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

Values = Sequence[Any]


def present(values: Values) -> list[Any]:
    return [value for value in values if value is not None]


def rank(value: Any) -> Any:
    """NaN is larger than any other number."""
    return (value != value, 0 if value != value else value) if isinstance(value, float) else value


def total(values: Values) -> Any:
    found = present(values)
    return sum(found) if found else None


def mean(values: Values) -> Any:
    found = present(values)
    return math.fsum(found) / len(found) if found else None


def decimal_mean(values: Values, *, scale: int) -> Any:
    found = present(values)
    unit = Decimal(1).scaleb(-scale)
    return (sum(found) / len(found)).quantize(unit, ROUND_HALF_UP) if found else None


def variance(values: Values) -> Any:
    found = present(values)
    return statistics.variance(found) if len(found) > 1 else None


def smallest(values: Values) -> Any:
    return min(present(values), key=rank, default=None)


def largest(values: Values) -> Any:
    return max(present(values), key=rank, default=None)


def chosen(pairs: Sequence[tuple[Any, Any]], best: Callable[..., Any], *, latest: bool = False) -> Any:
    """Python's min and max return the earliest of equal ones."""
    found = [pair for pair in pairs if pair[1] is not None]
    return best(reversed(found) if latest else found, key=lambda pair: rank(pair[1]), default=(None,))[0]


def distinct(values: Values) -> list[Any]:
    return list(dict.fromkeys(present(values)))
