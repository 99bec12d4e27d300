"""A running job in the user's hand.

The master lives in a thread of its own; a handle only posts requests to it and reads its reports, so it may be used
from any thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tidegate.connectors.collecting import delivered_rows
from tidegate.errors import JobFailed
from tidegate.runtime.master import Master
from tidegate.runtime.reports import AttemptReport, EpochReport, Failure, Status

_POLL_S = 0.02


class Handle:
    def __init__(self, name: str, master: Master, post: Callable[[Callable[[], None]], None],
                 close: Callable[[], None]) -> None:
        self.name = name
        self._master = master
        self._post = post
        self._close = close

    @property
    def status(self) -> Status:
        return self._master.status

    @property
    def epochs(self) -> list[EpochReport]:
        """Every epoch since the start, oldest first: when it was triggered and completed, its size and times."""
        return list(self._master.epochs)

    @property
    def attempts(self) -> list[AttemptReport]:
        return list(self._master.attempts)

    @property
    def failures(self) -> list[Failure]:
        """Why attempts ended, oldest first."""
        return list(self._master.failures)

    @property
    def metrics(self) -> dict[str, dict[str, Any]]:
        """The latest counters of every subtask."""
        return dict(self._master.metrics)

    def results(self, sink: str) -> list[tuple[Any, ...]]:
        """The committed rows of a `collect` sink, in the order of epochs."""
        return delivered_rows(list(self._master.delivered.get(sink, ())))

    def snapshot(self, timeout_s: float = 60.0) -> EpochReport:
        """Takes a snapshot now and waits until it is complete."""
        before = len(self._master.epochs)
        self._post(self._master.snapshot)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not self.status.terminal:
            for report in self.epochs[before:]:
                if report.completed_ms is not None:
                    return report
            time.sleep(_POLL_S)
        raise TimeoutError(f"job {self.name!r} ({self.status.value}) completed no snapshot within {timeout_s} s")

    def stop(self, *, drain: bool = False, timeout_s: float | None = 120.0) -> Status:
        """Ends the job with a final snapshot, from which it goes on when it is started again, and waits for that.

        `drain=True` also ends event time: all event-time timers fire first.
        """
        self._post(lambda: self._master.stop(drain=drain))
        return self.wait(timeout_s)

    def cancel(self, timeout_s: float | None = 60.0) -> Status:
        """Ends the job at once. It can be started again from its last complete snapshot."""
        self._post(self._master.cancel)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float | None = None) -> Status:
        """Blocks until the job has ended; raises `JobFailed` with the user's own traceback where it failed."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.status.terminal:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"job {self.name!r} is still {self.status.value} after {timeout_s} s")
            time.sleep(_POLL_S)
        self._close()
        if self.status is Status.FAILED:
            raise _failed(self.name, self._master.failures)
        return self.status


def _failed(name: str, failures: list[Failure]) -> JobFailed:
    last = failures[-1]
    theirs = last if last.permanent else next(
        (failure for failure in reversed(failures) if failure.user_traceback is not None), last)
    attempts = f" after {len(failures)} failures" if len(failures) > 1 else ""
    where = f" in operator {theirs.operator!r}" if theirs.operator else ""
    record = f", at record {theirs.record}" if theirs.record else ""
    return JobFailed(f"job {name!r} failed{attempts}{where}{record}:\n{theirs.user_traceback or theirs.message}",
                     operator=theirs.operator, record=theirs.record, user_traceback=theirs.user_traceback)
