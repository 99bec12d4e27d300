"""Measure what a snapshot costs the hot loop."""

from __future__ import annotations

import time
from array import array

QUIET_STEPS = 8192


class StepTimes:
    """The longest step while a snapshot is being written, and the longest step in an equally long time before, which shows
    how long steps take on this machine anyway."""

    def __init__(self) -> None:
        self._writing = 0
        self._began_s = 0.0
        self._longest_ms = 0.0
        # When the newest steps ended, and what each took: rings, so that they take the same memory from the beginning.
        self._ended_s, self._took_ms = array("d", bytes(8 * QUIET_STEPS)), array("d", bytes(8 * QUIET_STEPS))
        self._next = 0

    def took(self, now_s: float, step_ms: float) -> None:
        if self._writing:
            self._longest_ms = max(self._longest_ms, step_ms)
        else:
            self._ended_s[self._next], self._took_ms[self._next] = now_s, step_ms
            self._next = (self._next + 1) % QUIET_STEPS

    def begin(self) -> None:
        if not self._writing:
            self._longest_ms, self._began_s = 0.0, time.perf_counter()
        self._writing += 1

    def end(self) -> tuple[float, float]:
        """Return the longest step while snapshots were written, and the longest in the time before."""
        self._writing -= 1
        since_s = 2 * self._began_s - time.perf_counter()
        steps = zip(self._ended_s, self._took_ms, strict=True)
        quiet_ms = max((step_ms for ended_s, step_ms in steps if ended_s >= since_s), default=0.0)
        return round(self._longest_ms, 3), round(quiet_ms, 3)
