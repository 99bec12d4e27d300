"""Clocks, which slots and coordinators are given: they never read the system's clock themselves."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_ms(self) -> int:
        """Return the time of day, for users' timers. It may jump."""

    def monotonic_ms(self) -> int:
        """Return a time that never goes back, for intervals, time-outs and heartbeats."""


class BatchTime:
    """The time that users' functions see in a micro-batch, and the watermark of the streaming query. Both stand still, and
    are the same in every run of the batch."""

    def __init__(self, at_ms: int, watermark_ms: int) -> None:
        self.set(at_ms, watermark_ms)

    def set(self, at_ms: int, watermark_ms: int) -> None:
        self._at_ms, self._watermark_ms = at_ms, watermark_ms

    def now_ms(self) -> int:
        return self._at_ms

    def watermark_ms(self) -> int:
        return self._watermark_ms


class SystemClock:
    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000
