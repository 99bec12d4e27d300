"""Restart strategies: whether and when a failed job is deployed again.

Theory of operation (Carbone et al. 2017, §3.4 "Usages and Consistent Rollback")
------------------------------------------------------------------------------
A failure of any process or function rolls the whole job back to the newest complete snapshot: a new attempt. Nothing is
lost by trying, but a job whose code fails on the same record each time would try forever, and a job whose database is
down would not give it time to come back. `FailureRow` sums up the failures so far, one after the other, and `decide` returns
how long to wait after the last one, or to give up.

Two kinds of failures are counted separately. A failure of the program shows that its code has an error, so a few attempts
are enough. A failure of the world outside (a host, the store, a service) ends when somebody has repaired it, which may take
hours: `Exponential.outlasts`.

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
    `reset_after` without a failure. As soon as the job has a snapshot, failures of the world outside (a slot is lost, the
    store or a service is unavailable) don't count until the row has lasted for `outlasts`.
    """

    initial: ClockDuration
    maximum: ClockDuration
    multiplier: float = 2.0
    attempts: int | None = None
    reset_after: ClockDuration = "10 minutes"
    outlasts: ClockDuration = 0
    initial_ms: int = field(init=False, repr=False, compare=False)
    maximum_ms: int = field(init=False, repr=False, compare=False)
    reset_after_ms: int = field(init=False, repr=False, compare=False)
    outlasts_ms: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("initial", "maximum", "reset_after", "outlasts"):
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
    """`number` counts the restarts of the present row that there may be only `limit` of (None: any number)."""

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


@dataclass(frozen=True, slots=True)
class FailureRow:
    """The failures that count for the next decision: those since the job last ran for long, or all of them. `counted` are
    those of the program, and `delay_ms` is the delay after the last one."""

    began_ms: int
    failed_ms: int
    count: int
    counted: int
    delay_ms: int
    is_outside: bool  # the last one

    @classmethod
    def after(
        cls, row: FailureRow | None, strategy: RestartStrategy, failed_ms: int, *, ran_ms: int, is_outside: bool = False
    ) -> FailureRow:
        """Return the row with one more failure, after the job had run for `ran_ms`, which doesn't include the time in which
        its state was restored. `is_outside`: it is of the world outside, and the job has a snapshot."""
        first_ms = strategy.initial_ms if isinstance(strategy, Exponential) else 0
        counted = 0 if is_outside else 1
        if row is None or (isinstance(strategy, Exponential) and ran_ms >= strategy.reset_after_ms):
            return cls(failed_ms, failed_ms, 1, counted, first_ms, is_outside)
        delay_ms = row.delay_ms
        if isinstance(strategy, Exponential):
            delay_ms = min(strategy.maximum_ms, int(delay_ms * strategy.multiplier))
        return cls(row.began_ms, failed_ms, row.count + 1, row.counted + counted, delay_ms, is_outside)


def decide(strategy: RestartStrategy, row: FailureRow, now_ms: int) -> RestartAfter | GiveUp:
    """Decide what follows the last failure of the row."""
    limit, count = None, row.count
    match strategy:
        case NoRestart():
            return GiveUp()
        case FixedDelay():
            limit, delay_ms = strategy.attempts, strategy.delay_ms
        case Exponential():
            delay_ms = row.delay_ms
            if not row.is_outside:
                limit, count = strategy.attempts, row.counted
            elif row.failed_ms - row.began_ms >= strategy.outlasts_ms:
                limit = strategy.attempts
        case _:
            assert_never(strategy)
    if limit is not None and count > limit:
        return GiveUp()
    elapsed_ms = max(0, now_ms - row.failed_ms)  # a clock that was set back must not prolong the delay
    return RestartAfter(max(0, delay_ms - elapsed_ms), count, limit)
