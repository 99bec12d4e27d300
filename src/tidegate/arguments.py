"""Checks of users' arguments, made at the call that has the mistake.

Each function takes the class or function that was called (`"Snapshots"`), and the name and value of the argument. It
returns the value that the engine uses, or raises a `JobError` that names all three and what to give instead:
`Snapshots(retain=0): give a whole number from 1 up`.

Without these checks an argument of a wrong type would fail much later, in a slot, with an error of Python's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from datetime import timedelta
from numbers import Integral, Real
from typing import Any, Literal, NoReturn, TypeAlias

from tidegate.errors import JobError
from tidegate.types import parse_duration_ms

# "1 s", "200 ms", "1 minute 30 s", a timedelta, or a number of milliseconds.
Duration: TypeAlias = str | int | float | timedelta
# The same by the clock, in settings and as a timeout. A number would be taken for seconds, as elsewhere in Python: only 0.
ClockDuration: TypeAlias = str | timedelta | Literal[0]
# "64 MB", "1.5 GB", or a number of bytes.
Size: TypeAlias = str | int

_UNIT_BYTES = {"": 1, "b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30, "tb": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def refuse(where: str, name: str, value: object, give: str) -> NoReturn:
    raise JobError(f"{where}({name}={value!r}): give {give}")


def duration_ms(where: str, name: str, value: Any, *, at_least_ms: int = 0) -> int:
    try:
        ms = parse_duration_ms(value)
    except JobError:
        shown = "'5 seconds', '200 ms' or '1 minute', or a number of milliseconds"
        refuse(where, name, value, f"a duration, such as {shown}; the shortest is 1 ms")
    if ms < at_least_ms:
        refuse(where, name, value, f"a duration of at least {at_least_ms} ms")
    return ms


def clock_ms(where: str, name: str, value: Any, *, at_least_ms: int = 0) -> int:
    if type(value) in (int, float) and value > 0:
        refuse(where, name, value, f"the unit, too: '{value} s' or '{value} ms'")
    try:
        ms = parse_duration_ms(value)
    except JobError:
        refuse(where, name, value, "a duration, such as '5 seconds', '200 ms' or '1 minute'; the shortest is 1 ms")
    if ms < at_least_ms:
        refuse(where, name, value, f"a duration of at least {at_least_ms} ms")
    return ms


def byte_count(where: str, name: str, value: Any, *, at_least: int = 0) -> int:
    found = _SIZE.fullmatch(value) if isinstance(value, str) else None
    count = value if _is_whole(value) else -1
    if found is not None and found[2].lower() in _UNIT_BYTES:
        count = int(float(found[1]) * _UNIT_BYTES[found[2].lower()])
    if count < 0:
        refuse(where, name, value, "a size, such as '256 MB' or '2 GB', or a number of bytes")
    if count < at_least:
        refuse(where, name, value, f"at least {at_least} bytes")
    return int(count)


def whole_number(where: str, name: str, value: Any, *, at_least: int = 0, at_most: int | None = None) -> int:
    if not _is_whole(value) or value < at_least or (at_most is not None and value > at_most):
        span = f"from {at_least} up" if at_most is None else f"from {at_least} to {at_most}"
        refuse(where, name, value, f"a whole number {span}")
    return int(value)


def number(where: str, name: str, value: Any, *, at_least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or value < at_least:
        refuse(where, name, value, f"a number from {at_least:g} up")
    return float(value)


def text(where: str, name: str, value: Any, give: str = "a text that isn't empty") -> str:
    if not isinstance(value, str) or not value:
        refuse(where, name, value, give)
    return value


def flag(where: str, name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        refuse(where, name, value, "True or False")
    return value


def one_of(where: str, name: str, value: Any, choices: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in choices:
        *others, last = map(repr, choices)
        refuse(where, name, value, f"{', '.join(others)} or {last}")
    return value


def names(where: str, name: str, value: Any) -> tuple[str, ...]:
    """Return a sequence of names. A single text is refused, because as a sequence it would be its letters."""
    if isinstance(value, str):
        refuse(where, name, value, f"a list of names, as in {name}=[{value!r}]")
    if not isinstance(value, Collection) or not all(isinstance(each, str) and each for each in value):
        refuse(where, name, value, "a list of names")
    return tuple(value)


def function(where: str, name: str, value: Any, give: str = "a function") -> None:
    if not callable(value):
        refuse(where, name, value, give)


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
