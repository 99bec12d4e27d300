"""Durations as users write them: "1 s", "200 ms", "1 minute 30 s", a timedelta, or a number of milliseconds."""

from __future__ import annotations

import re
from datetime import timedelta

from tidegate.errors import JobError

_UNITS_MS: dict[str, float] = {
    "us": 0.001,
    "microsecond": 0.001,
    "ms": 1,
    "millisecond": 1,
    "s": 1_000,
    "sec": 1_000,
    "second": 1_000,
    "m": 60_000,
    "min": 60_000,
    "minute": 60_000,
    "h": 3_600_000,
    "hour": 3_600_000,
    "d": 86_400_000,
    "day": 86_400_000,
    "week": 604_800_000,
}
_DURATION_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*")


def parse_duration_ms(text: str | int | float | timedelta) -> int:
    """Return the milliseconds of "1 s", "200 ms", "5 seconds", "1 minute 30 s", a timedelta, or a number of milliseconds.

    They are rounded to whole milliseconds; what isn't zero never becomes zero.
    """
    total_ms: float = -1  # not a duration
    if isinstance(text, timedelta):
        total_ms = text / timedelta(milliseconds=1)
    elif isinstance(text, str):
        parts = _DURATION_PART.findall(text.lower())
        units_ms = [_UNITS_MS.get(unit) or _UNITS_MS.get(unit.removesuffix("s")) for _, unit in parts]
        if parts and None not in units_ms and not _DURATION_PART.sub("", text.lower()):
            total_ms = sum(float(number) * (unit_ms or 0) for (number, _), unit_ms in zip(parts, units_ms, strict=True))
    elif type(text) in (int, float):
        total_ms = text
    if not 0 <= total_ms < 2**53 or 0 < total_ms < 0.5:
        raise JobError(
            f"{text!r} is not a duration of a millisecond or more: write it like '5 seconds', '200 ms', "
            "'1 minute', '1 day', or as a number of milliseconds"
        )
    return round(total_ms)
