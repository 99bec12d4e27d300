"""What is seen of the job while it runs: numbers from its handle and from its output folders, four times a second.

Nothing here has a part in the result: a job that nobody watches does the same.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

import tidegate as tg

EVERY_S = 0.25
_RATE_OVER_S = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """`played`: events that the slots took in, also those that a rollback repeats. The others: committed rows."""

    at_s: float
    played: int
    per_s: float
    progress: int
    alerts: int


@dataclass(frozen=True, slots=True)
class Crash:
    """What we did to the job, and how it went on. `restored_epoch` and `seconds` are None until it has."""

    slot: int
    pid: int
    at_s: float
    restored_epoch: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Epoch:
    number: int
    attempt: int
    triggered_s: float
    completed_s: float | None  # None where it wasn't completed
    state_bytes: int

    @property
    def took_ms(self) -> int | None:
        return None if self.completed_s is None else round((self.completed_s - self.triggered_s) * 1000)


@dataclass(frozen=True, slots=True)
class CompleteEpoch(Epoch):
    completed_s: float

    @property
    def took_ms(self) -> int:
        return round((self.completed_s - self.triggered_s) * 1000)


@dataclass(slots=True)
class Watch:
    """Follows one job. Seconds are counted from when it first ran; before that there is nothing to see."""

    handle: tg.Handle
    vertex: int  # the one whose records are counted
    out: Path
    samples: list[Sample] = field(default_factory=list)
    crash: Crash | None = None
    _counted: dict[str, int] = field(default_factory=dict)
    _played: int = 0
    _rows: dict[Path, int] = field(default_factory=dict)

    @property
    def running_since_ms(self) -> int | None:
        attempts = self.handle.attempts
        return attempts[0].running_ms if attempts else None

    def now_s(self) -> float:
        return self._seconds(time.time() * 1000)

    def look(self) -> None:
        """Takes a sample, and notices when the job has recovered."""
        if self.running_since_ms is None:
            return
        self._count_played(self.handle.metrics)
        at_s = self.now_s()
        earlier = next((sample for sample in reversed(self.samples) if at_s - sample.at_s >= _RATE_OVER_S), None)
        per_s = 0.0 if earlier is None else (self._played - earlier.played) / (at_s - earlier.at_s)
        self.samples.append(
            Sample(at_s, self._played, per_s, progress=self._committed("progress"), alerts=self._committed("alerts"))
        )
        self._notice_recovery()

    def killed(self, slot: int, pid: int) -> None:
        self.crash = Crash(slot, pid, at_s=self.now_s())

    @property
    def epochs(self) -> list[Epoch]:
        return [
            Epoch(
                number=each.epoch,
                attempt=each.attempt,
                triggered_s=self._seconds(each.triggered_ms),
                completed_s=None if each.completed_ms is None else self._seconds(each.completed_ms),
                state_bytes=each.bytes,
            )
            for each in self.handle.epochs
        ]

    @property
    def complete(self) -> list[CompleteEpoch]:
        return [
            CompleteEpoch(epoch.number, epoch.attempt, epoch.triggered_s, epoch.completed_s, epoch.state_bytes)
            for epoch in self.epochs
            if epoch.completed_s is not None
        ]

    def _seconds(self, at_ms: float) -> float:
        return (at_ms - (self.running_since_ms or at_ms)) / 1000

    def _count_played(self, metrics: Mapping[str, Mapping[str, Any]]) -> None:
        """The counters of a slot begin at zero again when it is deployed again."""
        for subtask, counters in metrics.items():
            if subtask.startswith(f"v{self.vertex}["):
                now, before = counters["records_in"], self._counted.get(subtask, 0)
                self._played += now - before if now >= before else now
                self._counted[subtask] = now

    def _committed(self, sink: str) -> int:
        """Rows in the files that a reader sees now. A committed file never changes, so each is looked at once."""
        folder = self.out / sink
        for path in folder.glob("*.parquet"):
            if path not in self._rows:
                self._rows[path] = pq.read_metadata(path).num_rows
        return sum(rows for path, rows in self._rows.items() if path.parent == folder)

    def _notice_recovery(self) -> None:
        if self.crash is None or self.crash.seconds is not None:
            return
        latest = self.handle.attempts[-1]
        if latest.running_ms is not None and len(self.handle.attempts) > 1:
            self.crash = replace(
                self.crash, restored_epoch=latest.restored_epoch, seconds=self._seconds(latest.running_ms) - self.crash.at_s
            )
