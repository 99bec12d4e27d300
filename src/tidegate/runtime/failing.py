"""What a slot reports when it fails, and what follows from the failures of a job.

`failed` turns an error into the message for the master and says whether any other attempt could get further. `FailureLog`
keeps the failures of a job, decides with `protocol/restart.py` what follows each of them, and says so, once for each: on the
logger `tidegate.job`, which Python shows on stderr (from WARNING) unless the program sets its logging up in another
way. The log is given a way to speak, so that nothing here does I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from tidegate.dataflow.operators.user_code import final_advice
from tidegate.errors import CommitError, FencedOff, JobError, RestoreError, SourceError, UserFunctionError
from tidegate.protocol.restart import ErrorAtRecord, GiveUp, RestartAfter, RestartStrategy, decide, repeats
from tidegate.runtime.messages import Failed
from tidegate.runtime.reports import Failure
from tidegate.system_errors import lasts

Speak: TypeAlias = Callable[[int, str], None]       # a level of `logging`, and a text

_logger = logging.getLogger("tidegate.job")


def failed(slot: int, error: Exception) -> Failed:
    """The message about an error that ended this slot."""
    if isinstance(error, UserFunctionError):
        return Failed(slot, str(error), error.operator, error.user_traceback, error.record, error.final, error.signature)
    return Failed(slot, described(error), permanent=is_final(error))


def described(error: BaseException) -> str:
    """With what to do about it, if no restart cures it and it doesn't say so itself."""
    text, what_to_do = f"{type(error).__name__}: {error}", final_advice(error)
    return text if what_to_do is None else f"{text}. {what_to_do.rstrip()}"


def is_final(error: BaseException) -> bool:
    """Whether no other attempt should be made: it would end in the same way, since the program, its input or its
    surroundings are wrong, or it would fence off a driver that has taken over."""
    return isinstance(error, JobError | SourceError | RestoreError | FencedOff | ImportError) or lasts(error) or (
        isinstance(error, CommitError | UserFunctionError) and error.final)


def log(level: int, text: str) -> None:
    """Where a `FailureLog` speaks in a real job."""
    _logger.log(level, "%s", text)


def keep_silent(level: int, text: str) -> None:
    """Where a `FailureLog` speaks in the simulation and in tests."""


class FailureLog:
    """The failures of one job. `at_the_end` says what the end of its last attempt is to whoever runs it."""

    def __init__(self, job: str, strategy: RestartStrategy, *, at_the_end: str, speak: Speak) -> None:
        self.failures: list[Failure] = []
        self._job = job
        self._strategy = strategy
        self._at_the_end = at_the_end
        self._speak = speak
        self._failed_at_ms: list[int] = []
        self._errors: list[ErrorAtRecord | None] = []

    def take(self, failure: Failure, *, now_ms: int, epoch: int | None, expected: bool = False) -> RestartAfter | GiveUp:
        """Decides what follows. `epoch` is the newest complete snapshot. What was `expected` is nothing to warn of."""
        self._failed_at_ms.append(now_ms)
        self._errors.append(_error_of(failure, epoch))
        earlier = repeats(self._errors)
        decision = GiveUp() if failure.permanent else decide(self._strategy, self._failed_at_ms, now_ms)
        if isinstance(decision, RestartAfter) and earlier is not None:
            decision = GiveUp()
            at = self.failures[earlier].attempt
            failure = replace(failure, permanent=True)
            self._add(failure, f"It failed twice at the same record, in attempts {at} and {failure.attempt}, so a restart "
                               f"doesn't help: {self._at_the_end}")
        elif isinstance(decision, RestartAfter):
            where = "from the beginning" if epoch is None else f"from snapshot {epoch}"
            of = "" if decision.limit is None else f" of {decision.limit}"
            self._add(failure, f"Restarting {where} in {decision.delay_ms / 1000:g} s (restart {decision.number}{of})",
                      level=logging.WARNING)
        else:
            self.end(failure, level=logging.INFO if expected else logging.ERROR)
        return decision

    def end(self, failure: Failure, *, level: int = logging.ERROR) -> None:
        """One that nothing follows."""
        self._add(failure, f"A restart doesn't help: {self._at_the_end}" if failure.permanent else
                  self._at_the_end[:1].upper() + self._at_the_end[1:], level=level)

    def stopped(self, epoch: int | None) -> None:
        """The user has stopped the job where it had failed and was to be restarted."""
        where = "it has no snapshot and begins again" if epoch is None else f"it resumes from snapshot {epoch}"
        last = self.failures[-1]
        self.failures[-1] = replace(last, stopped=True, then=(
            f"The job was stopped while it was restarting, so there is no final snapshot: started again, {where}"))

    def _add(self, failure: Failure, then: str, *, level: int = logging.ERROR) -> None:
        failure = replace(failure, then=then)
        self.failures.append(failure)
        attempt = f", attempt {failure.attempt}" if failure.attempt else ""
        slot = "" if failure.where is None or failure.where in failure.message else f", {failure.where}"
        self._speak(level, f"Job {self._job!r}{attempt}{slot}: {failure.message.rstrip()}\n{then}.")


def _error_of(failure: Failure, epoch: int | None) -> ErrorAtRecord | None:
    if failure.operator is None or failure.record is None or failure.signature is None:
        return None
    return ErrorAtRecord(operator=failure.operator, record=failure.record, signature=failure.signature, epoch=epoch)
