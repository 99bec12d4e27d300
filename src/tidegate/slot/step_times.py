"""Measure what a snapshot costs the hot loop."""

from __future__ import annotations

import time
from collections import deque

QUIET_STEPS = 8192


class StepTimes:
    """The longest step while a snapshot is being written, and the longest step in an equally long time before, which shows
    how long steps take on this machine anyway."""

    def __init__(self) -> None:
        self._writing = 0
        self._began_s = 0.0
        self._longest_ms = 0.0
        self._quiet: deque[tuple[float, float]] = deque(maxlen=QUIET_STEPS)  # when a step ended, and what it took

    def took(self, now_s: float, step_ms: float) -> None:
        if self._writing:
            self._longest_ms = max(self._longest_ms, step_ms)
        else:
            self._quiet.append((now_s, step_ms))

    def begin(self) -> None:
        if not self._writing:
            self._longest_ms, self._began_s = 0.0, time.perf_counter()
        self._writing += 1

    def end(self) -> tuple[float, float]:
        """Return the longest step while snapshots were written, and the longest in the time before."""
        self._writing -= 1
        since_s = 2 * self._began_s - time.perf_counter()
        quiet_ms = max((step_ms for ended_s, step_ms in self._quiet if ended_s >= since_s), default=0.0)
        return round(self._longest_ms, 3), round(quiet_ms, 3)
