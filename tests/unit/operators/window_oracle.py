"""What windows must emit, in plain Python: all records are kept, and every window that could be is tried.

Time is kept by key-group, as operators do. A record is given as (key, ts, n); a result is (key, start, end, …), where what
follows is made by `summary` of the numbers n of the window's records, in the order of their arrival: their count and sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.dataflow.windows import Assigner, Paned, Sessions, Window
from tidegate.hashing import hash_columns
from tidegate.keygroups import groups_of
from tidegate.protocol.watermarks import MIN_WATERMARK_MS

Record = tuple[Any, int | None, int]
Result = tuple[Any, ...]
Summary = Callable[[list[int]], tuple[Any, ...]]


def count_and_sum(numbers: list[int]) -> tuple[int, int]:
    return len(numbers), sum(numbers)


def group_of(key: Any, kind: pa.DataType, group_count: int) -> int:
    return int(groups_of(hash_columns([pa.array([key], kind)]), group_count)[0])


def windows_of(assigner: Paned, at_ms: int) -> list[Window]:
    """By the definition of the assigner."""
    first = at_ms - (at_ms - assigner.offset_ms) % assigner.every_ms
    return [
        Window(start, start + length)
        for start in range(first, at_ms - assigner.size_ms, -assigner.every_ms)
        for length in range(assigner.step_ms, assigner.size_ms + 1, assigner.step_ms)
        if start <= at_ms < start + length
    ]


class Oracle:
    """Windows of fixed places. `group` gives a key's key-group."""

    def __init__(
        self,
        assigner: Paned,
        group: Callable[[Any], int],
        *,
        lateness_ms: int = 0,
        groups: int = 16,
        summary: Summary = count_and_sum,
    ) -> None:
        self._summary = summary
        self._assigner = assigner
        self._group = group
        self._lateness_ms = lateness_ms
        self._times = np.full(groups, MIN_WATERMARK_MS, object)
        self._windows: dict[tuple[Any, Window], list[int]] = {}

    def on_records(self, records: Iterable[Record]) -> tuple[list[Result], list[Record]]:
        """What fires again, and what is late."""
        again: dict[tuple[Any, Window], None] = {}
        late: list[Record] = []
        for key, ts, n in records:
            if ts is None:
                continue
            time = self._times[self._group(key)]
            windows = windows_of(self._assigner, ts)
            in_time = [each for each in windows if each.end_ms - 1 + self._lateness_ms > time]
            if windows and not in_time:
                late.append((key, ts, n))
            for window in in_time:
                self._windows.setdefault((key, window), []).append(n)
                if window.end_ms - 1 <= time:
                    again[key, window] = None
        return [self._result(*each) for each in again], late

    def on_watermark(self, at_ms: int, groups: range) -> list[Result]:
        """What fires when the watermark of these key-groups comes."""
        fired = []
        for key, window in self._windows:
            time = self._times[self._group(key)]
            if self._group(key) in groups and time < window.end_ms - 1 <= at_ms:
                fired.append(self._result(key, window))
        for group in groups:
            self._times[group] = max(self._times[group], at_ms)
        return fired

    def _result(self, key: Any, window: Window) -> Result:
        return key, window.start_ms, window.end_ms, *self._summary(self._windows[key, window])


@dataclass
class Session:
    start_ms: int
    end_ms: int
    numbers: list[int]


class SessionOracle:
    """Session windows, record by record."""

    def __init__(
        self,
        assigner: Sessions,
        group: Callable[[Any], int],
        *,
        lateness_ms: int = 0,
        groups: int = 16,
        summary: Summary = count_and_sum,
    ) -> None:
        self._summary = summary
        self._gap_ms = assigner.gap_ms
        self._group = group
        self._lateness_ms = lateness_ms
        self._times = np.full(groups, MIN_WATERMARK_MS, object)
        self._sessions: dict[Any, list[Session]] = {}

    def on_records(self, records: Iterable[Record]) -> tuple[list[Result], list[Record]]:
        late: list[Record] = []
        for key, ts, n in records:
            if ts is None:
                continue
            if ts + self._gap_ms + self._lateness_ms <= self._times[self._group(key)]:
                late.append((key, ts, n))
                continue
            session = Session(ts, ts + self._gap_ms, [n])
            others = []
            for other in self._sessions.get(key, []):
                if other.start_ms <= session.end_ms and session.start_ms <= other.end_ms:
                    session = Session(
                        min(session.start_ms, other.start_ms),
                        max(session.end_ms, other.end_ms),
                        sorted(session.numbers + other.numbers),
                    )
                else:
                    others.append(other)
            self._sessions[key] = [*others, session]
        again = {
            self._result(key, session)
            for key, ts, n in records
            if ts is not None and (key, ts, n) not in late
            for session in self._sessions[key]
            if session.start_ms <= ts < session.end_ms <= self._times[self._group(key)]
        }
        return list(again), late

    def on_watermark(self, at_ms: int, groups: range) -> list[Result]:
        fired = []
        for key, sessions in self._sessions.items():
            if self._group(key) not in groups:
                continue
            time = self._times[self._group(key)]
            fired += [self._result(key, session) for session in sessions if time < session.end_ms <= at_ms]
            reached = max(time, at_ms)
            self._sessions[key] = [each for each in sessions if each.end_ms + self._lateness_ms > reached]
        for group in groups:
            self._times[group] = max(self._times[group], at_ms)
        return fired

    def _result(self, key: Any, session: Session) -> Result:
        return key, session.start_ms, session.end_ms, *self._summary(session.numbers)


def oracle_of(
    assigner: Assigner, group: Callable[[Any], int], *, lateness_ms: int, summary: Summary = count_and_sum
) -> Oracle | SessionOracle:
    if isinstance(assigner, Sessions):
        return SessionOracle(assigner, group, lateness_ms=lateness_ms, summary=summary)
    assert isinstance(assigner, Paned)
    return Oracle(assigner, group, lateness_ms=lateness_ms, summary=summary)
