"""Restart strategies: whether and when a failed job is deployed again.

Theory of operation (Carbone et al. 2017, §3.4 "Usages and Consistent Rollback")
------------------------------------------------------------------------------
A failure of any process or function rolls the whole job back to the newest complete snapshot: a new attempt. Nothing is
lost by trying, but a job whose code fails on the same record each time would try forever, and a job whose database is
down would not give it time to come back. From the times of all failures so far, `decide` returns how long to wait, or to
give up.

Delays are counted from the failure, so time spent on cleaning up is not waited for twice.

`repeats` finds an error that another attempt would only repeat: a user's function that fails at the same record, with
the same exception raised at the same line, while no snapshot was completed in between. The job has then come to that record
twice from the same state. Errors of subtasks that fail at different records in turn are found as well, since any earlier
failure counts, not only the last one. A completed snapshot in between shows that the job has got further, so an equal
error may come from another record with the same text: it doesn't count.

Not here: what a failure is, which errors may be of the world outside (if a service is down, the job also fails at the same
record twice: `UserFunctionError.signature` is None for them), waiting, and failures that are final at once (a `JobError`
or a `SourceError` never gets here).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, assert_never

from tidegate import arguments
from tidegate.arguments import ClockDuration
from tidegate.errors import JobError


@dataclass(frozen=True, slots=True)
class NoRestart:
    """The first failure is the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedDelay:
    """At most `attempts` restarts over the life of the job, each `delay` ("1 s") after its failure."""

    attempts: int
    delay: ClockDuration
    delay_ms: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        arguments.whole_number("FixedDelay", "attempts", self.attempts)
        object.__setattr__(self, "delay_ms", arguments.clock_ms("FixedDelay", "delay", self.delay))


@dataclass(frozen=True, slots=True, kw_only=True)
class Exponential:
    """`initial` after the first failure, `multiplier` times as long after each further one, at most `maximum`.

    Gives up after `attempts` restarts in a row (None: never). A row ends when the job, once restarted, has run for
    `reset_after` without a failure.
    """

    initial: ClockDuration
    maximum: ClockDuration
    multiplier: float = 2.0
    attempts: int | None = None
    reset_after: ClockDuration = "10 minutes"
    initial_ms: int = field(init=False, repr=False, compare=False)
    maximum_ms: int = field(init=False, repr=False, compare=False)
    reset_after_ms: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("initial", "maximum", "reset_after"):
            object.__setattr__(self, f"{name}_ms", arguments.clock_ms("Exponential", name, getattr(self, name)))
        if not 0 < self.initial_ms <= self.maximum_ms:
            raise JobError(
                f"Exponential(initial={self.initial!r}, maximum={self.maximum!r}): the first delay is at least 1 ms and at "
                f"most the longest"
            )
        arguments.number("Exponential", "multiplier", self.multiplier, at_least=1.0)
        if self.attempts is not None:
            arguments.whole_number("Exponential", "attempts", self.attempts)


RestartStrategy: TypeAlias = NoRestart | FixedDelay | Exponential


@dataclass(frozen=True, slots=True)
class RestartAfter:
    """`number` counts the restarts of the present row, of which there may be `limit` (None: any number)."""

    delay_ms: int
    number: int = field(default=1, compare=False)
    limit: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Report the last failure to the user; the job is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorAtRecord:
    """A user's function failed. `signature` names the exception and the line that raised it, `epoch` is the newest
    complete snapshot at that moment (None: there was none). Two that are equal are the same error."""

    operator: str
    record: str
    signature: str
    epoch: int | None


def repeats(errors: Sequence[ErrorAtRecord | None]) -> int | None:
    """Return the index of the failure that the last one repeats, or None. None in `errors` is a failure of another kind."""
    *earlier, last = errors
    return None if last is None or last not in earlier else earlier.index(last)


def decide(strategy: RestartStrategy, failures_ms: Sequence[int], now_ms: int) -> RestartAfter | GiveUp:
    """`failures_ms`: when the job failed, in growing order; the failure that is to be decided on is the last."""
    assert failures_ms, "there is nothing to decide before the first failure"
    match strategy:
        case NoRestart():
            return GiveUp()
        case FixedDelay():
            in_a_row, delay_ms = len(failures_ms), strategy.delay_ms
        case Exponential():
            in_a_row, delay_ms = _back_off(strategy, failures_ms)
        case _:
            assert_never(strategy)
    if strategy.attempts is not None and in_a_row > strategy.attempts:
        return GiveUp()
    elapsed_ms = max(0, now_ms - failures_ms[-1])  # a clock that was set back must not prolong the delay
    return RestartAfter(max(0, delay_ms - elapsed_ms), in_a_row, strategy.attempts)


def _back_off(strategy: Exponential, failures_ms: Sequence[int]) -> tuple[int, int]:
    """Return how many failures the present row has, and the delay after the last of them."""
    in_a_row, delay_ms, previous_ms = 0, strategy.initial_ms, failures_ms[0]
    for failed_ms in failures_ms:
        ran_ms = failed_ms - (previous_ms + delay_ms)
        if in_a_row == 0 or ran_ms >= strategy.reset_after_ms:
            in_a_row, delay_ms = 1, strategy.initial_ms
        else:
            in_a_row += 1
            delay_ms = min(strategy.maximum_ms, int(delay_ms * strategy.multiplier))
        previous_ms = failed_ms
    return in_a_row, delay_ms
