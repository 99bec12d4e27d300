"""Window assigners: which windows a time belongs to. Pure arithmetic, in milliseconds since 1970.

A window is half-open: it has the times from `start` to before `end`. It is complete when the watermark is at `end - 1`.

Windows of fixed places (tumbling, sliding, cumulating) are made of *panes*: pieces of equal length, none of which is cut by
the beginning or the end of a window. A time is in exactly one pane, so an operator keeps one accumulator for each key and
pane, whatever the number of windows that a record is in. Merging the panes of a window gives the window's result.

Invariants (tests/unit/dataflow/test_windows.py):
- the panes tile the time line, and `pane_of` gives the one that a time is in;
- the windows that contain a pane are those that contain each of its times;
- `ends` has the ends of these windows, and `last_end` is the last of them.

Sessions have no fixed places: they are where the records are. A global window has no time at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

from tidegate import arguments
from tidegate.arguments import Duration

Times: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

MAX_OVERLAPPING = 100_000
"""In how many windows a record may be. Each of them has a result for it."""


class Window(NamedTuple):
    """A window: the times from `start_ms` to before `end_ms`."""

    start_ms: int
    end_ms: int


@dataclass(frozen=True, slots=True)
class Paned:
    """Windows of fixed places. Sliding ones (`step_ms` is `size_ms`) begin at every multiple of `every_ms` from `offset_ms`.
    Cumulating ones (`every_ms` is `size_ms`) begin there as well, and end after one step, two steps, … up to `size_ms`.
    Tumbling ones are both. So at most one window ends at any time.

    `column` is the time column; None: the processing time at which a record arrives.
    """

    column: str | None
    size_ms: int
    every_ms: int
    step_ms: int
    offset_ms: int = 0

    def __post_init__(self) -> None:
        assert self.size_ms in (self.step_ms, self.every_ms) and self.size_ms % self.step_ms == 0

    @property
    def text(self) -> str:
        """What `explain` shows: tumbling(ts, 10000 ms)."""
        where = "processing time" if self.column is None else self.column
        offset = f", offset {self.offset_ms} ms" if self.offset_ms else ""
        if self.size_ms == self.every_ms == self.step_ms:
            return f"tumbling({where}, {self.size_ms} ms{offset})"
        if self.size_ms == self.step_ms:
            return f"sliding({where}, {self.size_ms} ms every {self.every_ms} ms{offset})"
        return f"cumulating({where}, {self.size_ms} ms by {self.step_ms} ms{offset})"

    @property
    def pane_ms(self) -> int:
        """The length of a pane."""
        return gcd(self.every_ms, self.step_ms)

    @property
    def is_one_pane(self) -> bool:
        """Whether each window is one pane, in no other window."""
        return self.pane_ms == self.size_ms

    @property
    def merges(self) -> bool:
        """Whether a window's result is merged of parts that are not in the order of arrival."""
        return not self.is_one_pane

    @property
    def has_gaps(self) -> bool:
        """Whether there are times that are in no window."""
        return self.every_ms > self.size_ms

    def panes_of(self, times_ms: Times) -> Times:
        """Return the beginning of the pane of each time."""
        return floored(times_ms, self.pane_ms, self.offset_ms)

    def in_windows(self, times_ms: Times) -> Any:
        """Return for each time whether it is in a window."""
        return times_ms < self.last_ends(times_ms)

    def last_ends(self, times_ms: Times) -> Times:
        """Return for each time the end of the last window that it is in; if it is in none, that of the last one before."""
        return floored(times_ms, self.every_ms, self.offset_ms) + self.size_ms

    def last_end(self, pane: int) -> int:
        """Return the end of the last window that contains the pane."""
        return pane - (pane - self.offset_ms) % self.every_ms + self.size_ms

    def ends(self, pane: int, *, after_ms: int) -> range:
        """Return the ends after `after_ms` of the windows that contain the pane, in order."""
        apart_ms = self.every_ms if self.step_ms == self.size_ms else self.step_ms
        behind = max(pane, after_ms) + 1
        return range(behind + (self.offset_ms + self.size_ms - behind) % apart_ms, self.last_end(pane) + 1, apart_ms)

    def window(self, end_ms: int) -> Window:
        """Return the window that ends there."""
        start_ms = end_ms - self.size_ms
        if self.step_ms != self.size_ms:
            start_ms = end_ms - 1 - (end_ms - 1 - self.offset_ms) % self.every_ms
        return Window(start_ms, end_ms)


@dataclass(frozen=True, slots=True)
class Sessions:
    """Windows of one key that a pause ends: records whose times are at most `gap_ms` apart are in one session. It begins
    with its first record and ends `gap_ms` after its last one."""

    column: str
    gap_ms: int
    merges: ClassVar[bool] = True  # of parts that are not in the order of arrival

    @property
    def text(self) -> str:
        return f"sessions({self.column}, {self.gap_ms} ms)"


@dataclass(frozen=True, slots=True)
class Global:
    """A window for each `count` records of a key, in the order in which they arrive. Without `count`, one window of all
    records of a key, which has no end: triggers show its results."""

    count: int | None = None
    merges: ClassVar[bool] = False

    @property
    def text(self) -> str:
        return "global" if self.count is None else f"global({self.count} records)"


Assigner: TypeAlias = Paned | Sessions | Global


def floored(times_ms: Times, size_ms: int, offset_ms: int) -> Times:
    """Return for each time the last multiple of `size_ms` from `offset_ms` that is not after it."""
    return times_ms - (times_ms - offset_ms) % size_ms


# ------------------------------------------------------------------------------------------------- the public functions


def tumbling(ts: str | None, size: Duration, *, offset: Duration = 0, time: str = "event") -> Paned:
    """Windows of one size, one after the other: `tg.tumbling("ts", "10 s")`.

    They begin at multiples of `size` since 1970 (UTC), plus `offset`. `tg.tumbling(None, "10 s", time="processing")` takes
    the time at which a record arrives, and then durations need a unit.
    """
    arguments.one_of("tumbling", "time", time, ("event", "processing"))
    if time == "processing" and ts is not None:
        arguments.refuse("tumbling", "ts", ts, "None, since time='processing' needs no column")
    column = None if time == "processing" else _column("tumbling", ts)
    if time == "processing":
        size_ms = arguments.clock_ms("tumbling", "size", size, at_least_ms=1)
        return Paned(column, size_ms, size_ms, size_ms, arguments.clock_ms("tumbling", "offset", offset) % size_ms)
    size_ms = _size("tumbling", "size", size)
    return Paned(column, size_ms, size_ms, size_ms, _offset("tumbling", offset, size_ms))


def sliding(ts: str, size: Duration, every: Duration, *, offset: Duration = 0) -> Paned:
    """Windows of one size, one of which begins at every multiple of `every`: `tg.sliding("ts", "1 hour", "5 minutes")`. A
    record is in all windows that overlap at its time."""
    size_ms, every_ms = _size("sliding", "size", size), _size("sliding", "every", every)
    if size_ms > MAX_OVERLAPPING * every_ms:
        arguments.refuse("sliding", "every", every, f"at least a {MAX_OVERLAPPING:,}th of the size {size!r}")
    return Paned(_column("sliding", ts), size_ms, every_ms, size_ms, _offset("sliding", offset, every_ms))


def cumulating(ts: str, size: Duration, step: Duration, *, offset: Duration = 0) -> Paned:
    """Windows that begin together and grow by `step` up to `size`: `tg.cumulating("ts", "1 day", "1 hour")` gives the
    results of the day so far, every hour."""
    size_ms, step_ms = _size("cumulating", "size", size), _size("cumulating", "step", step)
    if size_ms % step_ms:
        arguments.refuse("cumulating", "step", step, f"a duration that divides the size {size!r}")
    if size_ms > MAX_OVERLAPPING * step_ms:
        arguments.refuse("cumulating", "step", step, f"at least a {MAX_OVERLAPPING:,}th of the size {size!r}")
    return Paned(_column("cumulating", ts), size_ms, size_ms, step_ms, _offset("cumulating", offset, size_ms))


def sessions(ts: str, gap: Duration) -> Sessions:
    """A window for each time of activity of a key, which ends when there was no record for `gap`:
    `tg.sessions("ts", "30 min")`."""
    return Sessions(_column("sessions", ts), _size("sessions", "gap", gap))


def global_window(*, count: int | None = None) -> Global:
    """A window for each `count` records of a key, in the order in which they arrive: `tg.global_window(count=100)`. Without
    `count`, one window of all records of a key, whose results a trigger shows:
    `.window(tg.global_window(), trigger=tg.after("10 s"))`."""
    return Global(None if count is None else arguments.whole_number("global_window", "count", count, at_least=1))


def _column(where: str, ts: Any) -> str:
    return arguments.text(where, "ts", ts, "the name of the time column")


def _size(where: str, name: str, given: Duration) -> int:
    return arguments.duration_ms(where, name, given, at_least_ms=1)


def _offset(where: str, given: Duration, every_ms: int) -> int:
    return arguments.duration_ms(where, "offset", given) % every_ms
