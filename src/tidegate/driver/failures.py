"""What follows from the failures of a job.

`FailureLog` keeps the failures of a job and decides with `protocol/restart.py` what follows each of them. Each is logged
once (job_log.py).
"""

from __future__ import annotations

from dataclasses import replace

from tidegate.driver.job_log import JobLog
from tidegate.driver.reports import KEPT_ATTEMPTS, Failure
from tidegate.protocol.restart import (
    ErrorAtRecord,
    FailureRow,
    GiveUp,
    RestartAfter,
    RestartStrategy,
    decide,
    repeats,
)


class FailureLog:
    """The newest failures of one job. `at_the_end` is the text for what follows the last one."""

    def __init__(self, strategy: RestartStrategy, *, at_the_end: str, log: JobLog) -> None:
        self.failures: list[Failure] = []
        self._strategy = strategy
        self._at_the_end = at_the_end
        self._log = log
        self._row: FailureRow | None = None
        self._errors: list[ErrorAtRecord | None] = []
        self._failed_in: list[int] = []  # the attempts in which these errors occurred

    def take(self, failure: Failure, *, now_ms: int, ran_ms: int, epoch: int | None) -> RestartAfter | GiveUp:
        """Decide what follows. `ran_ms` is for how long the attempt ran, and `epoch` the newest complete snapshot."""
        is_outside = failure.is_outside and epoch is not None
        self._row = FailureRow.after(self._row, self._strategy, now_ms, ran_ms=ran_ms, is_outside=is_outside)
        self._errors.append(_error_of(failure, epoch))
        self._failed_in.append(failure.attempt)
        del self._errors[:-KEPT_ATTEMPTS], self._failed_in[:-KEPT_ATTEMPTS]
        earlier = repeats(self._errors)
        decision = GiveUp() if failure.permanent else decide(self._strategy, self._row, now_ms)
        if isinstance(decision, RestartAfter) and earlier is not None:
            decision = GiveUp()
            self._add(
                replace(failure, permanent=True),
                f"It failed twice {'at the same record' if failure.record else 'in the same way'}, in attempts "
                f"{self._failed_in[earlier]} and {failure.attempt}, so a restart doesn't help: {self._at_the_end}",
                epoch=epoch,
            )
        elif isinstance(decision, RestartAfter):
            where = "from the beginning" if epoch is None else f"from snapshot {epoch}"
            of = "" if decision.limit is None else f" of {decision.limit}"
            self._add(
                failure,
                f"Restarting {where} in {decision.delay_ms / 1000:g} s (restart {decision.number}{of})",
                epoch=epoch,
                delay_ms=decision.delay_ms,
            )
        else:
            self.end(failure, epoch=epoch)
        return decision

    def go_back(self, failure: Failure, *, slots: int, epoch: int | None) -> RestartAfter:
        """Take a failure of an attempt that was to run on another number of slots: the next one begins at once, on these
        slots as before. It doesn't count as a restart."""
        count = "1 slot" if slots == 1 else f"{slots} slots"
        self._add(failure, f"Going back to {count}, from snapshot {epoch}", epoch=epoch, delay_ms=0)
        return RestartAfter(0)

    def end(self, failure: Failure, *, epoch: int | None = None) -> None:
        """Take a failure after which the job ends."""
        self._add(
            failure,
            f"A restart doesn't help: {self._at_the_end}"
            if failure.permanent
            else self._at_the_end[:1].upper() + self._at_the_end[1:],
            epoch=epoch,
        )

    def stopped(self, epoch: int | None) -> None:
        """The user has stopped the job while it was restarting."""
        where = "it has no snapshot and begins again" if epoch is None else f"it resumes from snapshot {epoch}"
        then = f"The job was stopped while it was restarting, so there is no final snapshot: started again, {where}"
        self.failures[-1] = replace(self.failures[-1], stopped=True, then=then)
        self._log.stopped(then)

    def _add(self, failure: Failure, then: str, *, epoch: int | None, delay_ms: int | None = None) -> None:
        self.failures.append(replace(failure, then=then))
        del self.failures[:-KEPT_ATTEMPTS]
        self._log.failed(self.failures[-1], epoch=epoch, delay_ms=delay_ms)


def _error_of(failure: Failure, epoch: int | None) -> ErrorAtRecord | None:
    if failure.signature is None or (failure.operator is None) != (failure.record is None):
        return None
    # A damaged file has neither operator nor record.
    return ErrorAtRecord(
        operator=failure.operator or "", record=failure.record or "", signature=failure.signature, epoch=epoch
    )
