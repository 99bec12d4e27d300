"""Restart strategies: whether and when a failed job is deployed again.

Theory of operation (Carbone et al. 2017, §3.4 "Usages and Consistent Rollback")
------------------------------------------------------------------------------
A failure of any part rolls the whole job back to the newest complete snapshot: a new attempt. Nothing is lost by
trying, but a job whose code fails on the same record each time would try for ever, and one whose database is away
would not give it time to come back. `decide` looks at the times of all failures so far and says how long to wait, or
to give up.

Delays are counted from the failure, so time spent on cleaning up is not waited for twice. Not here: what a failure is,
waiting, and failures that no restart can cure (a `JobError` or a `SourceError` never gets here).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, assert_never


@dataclass(frozen=True, slots=True)
class NoRestart:
    """The first failure is the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedDelay:
    """At most `attempts` restarts over the life of the job, each `delay_ms` after its failure."""

    attempts: int
    delay_ms: int

    def __post_init__(self) -> None:
        assert self.attempts >= 0 and self.delay_ms >= 0, self


@dataclass(frozen=True, slots=True, kw_only=True)
class Exponential:
    """`initial_ms` after the first failure, `multiplier` times as long after each further one, at most `maximum_ms`.

    Gives up after `attempts` restarts in a row (None: never). A row ends when the job, once restarted, has run for
    `reset_after_ms` without a failure.
    """

    initial_ms: int
    maximum_ms: int
    multiplier: float = 2.0
    attempts: int | None = None
    reset_after_ms: int = 600_000

    def __post_init__(self) -> None:
        assert 0 < self.initial_ms <= self.maximum_ms, self
        assert self.multiplier >= 1.0, self
        assert self.attempts is None or self.attempts >= 0, self
        assert self.reset_after_ms >= 0, self


RestartStrategy: TypeAlias = NoRestart | FixedDelay | Exponential


@dataclass(frozen=True, slots=True)
class RestartAfter:
    delay_ms: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Report the last failure to the user; the job is over."""


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
    elapsed_ms = max(0, now_ms - failures_ms[-1])    # a clock that was set back must not prolong the delay
    return RestartAfter(max(0, delay_ms - elapsed_ms))


def _back_off(strategy: Exponential, failures_ms: Sequence[int]) -> tuple[int, int]:
    """How many failures the present row has, and the delay after the last of them."""
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
