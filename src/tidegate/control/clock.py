"""Time, as something that is given: the slot and the coordinator never read a clock of their own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_ms(self) -> int:
        """The time of day, for users' timers. It may jump."""

    def monotonic_ms(self) -> int:
        """Never goes back: for intervals, time-outs and heartbeats."""


class BatchTime:
    """Time as users' functions see it in a micro-batch: it stands still, at the same moment in every run of the batch. So
    does the watermark of the streaming query."""

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
