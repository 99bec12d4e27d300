"""Restart strategies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import JobError
from tidegate.protocol.restart import (
    ErrorAtRecord,
    Exponential,
    FailureRow,
    FixedDelay,
    GiveUp,
    NoRestart,
    RestartAfter,
    RestartStrategy,
    repeats,
)
from tidegate.protocol.restart import decide as decide_after

FIXED = FixedDelay(attempts=2, delay="1 s")
GROWING = Exponential(initial="100 ms", maximum="500 ms", multiplier=2.0, attempts=4, reset_after="10 s")


def decide(
    strategy: RestartStrategy, failures_ms: Sequence[int], now_ms: int, *, outside: Sequence[bool] = ()
) -> RestartAfter | GiveUp:
    """What follows the last of these failures; those at the beginning are of the world outside as `outside` says."""
    row: FailureRow | None = None
    for failed_ms, is_outside in zip_longest(failures_ms, outside, fillvalue=False):
        ran_ms = 0 if row is None else failed_ms - (row.failed_ms + row.delay_ms)
        row = FailureRow.after(row, strategy, failed_ms, ran_ms=ran_ms, is_outside=bool(is_outside))
    assert row is not None
    return decide_after(strategy, row, now_ms)


def test_no_restart_gives_up_at_once() -> None:
    assert decide(NoRestart(), [5], 5) == GiveUp()


def test_a_fixed_delay_restarts_so_many_times_and_then_gives_up() -> None:
    assert decide(FIXED, [0], 0) == RestartAfter(1_000)
    assert decide(FIXED, [0, 9_000], 9_000) == RestartAfter(1_000)
    assert decide(FIXED, [0, 9_000, 10**9], 10**9) == GiveUp()
    assert decide(FixedDelay(attempts=0, delay=0), [0], 0) == GiveUp()


def test_time_since_the_failure_counts_towards_the_delay() -> None:
    assert decide(FIXED, [0], 400) == RestartAfter(600)
    assert decide(FIXED, [0], 5_000) == RestartAfter(0)


def test_a_clock_that_was_set_back_does_not_prolong_the_delay() -> None:
    assert decide(FIXED, [3_600_000], 0) == RestartAfter(1_000)
    assert decide(GROWING, [3_600_000, 10], 10) == RestartAfter(200)


def test_an_exponential_delay_grows_up_to_its_maximum_and_then_gives_up() -> None:
    failures_ms: list[int] = []
    decisions = []
    for failure_ms in (0, 1_000, 2_000, 3_000, 4_000):
        failures_ms.append(failure_ms)
        decisions.append(decide(GROWING, failures_ms, failure_ms))
    assert decisions == [RestartAfter(100), RestartAfter(200), RestartAfter(400), RestartAfter(500), GiveUp()]


def test_a_long_run_without_failure_starts_a_new_row() -> None:
    assert decide(GROWING, [0, 1_000, 1_000 + 200 + 10_000], 11_200) == RestartAfter(100)
    assert decide(GROWING, [0, 1_000, 1_000 + 200 + 9_999], 11_199) == RestartAfter(400), "it ran 1 ms too short"


def test_an_exponential_delay_without_a_limit_of_attempts_goes_on_for_ever() -> None:
    endless = Exponential(initial="1 ms", maximum="1 minute", multiplier=10.0)
    assert decide(endless, [0] * 5_000, 0) == RestartAfter(60_000)


def test_an_outage_is_outlasted_and_the_programs_own_failures_still_end_the_job() -> None:
    """The store is gone for an hour, and comes back; or it doesn't. A failure every 20 s, a limit of 4."""
    patient = Exponential(initial="100 ms", maximum="500 ms", attempts=4, reset_after="10 minutes", outlasts="1 hour")
    hour_ms = [20_000 * number for number in range(181)]
    for count in range(1, 181):
        decision = decide(patient, hour_ms[:count], hour_ms[count - 1], outside=[True] * count)
        assert isinstance(decision, RestartAfter) and decision.delay_ms <= 500 and decision.limit is None
    assert decide(patient, hour_ms, hour_ms[-1], outside=[True] * 181) == GiveUp(), "an hour has passed"
    assert decide(patient, hour_ms[:100], hour_ms[99], outside=[True] * 99) == RestartAfter(500), "the first of its own"
    assert decide(patient, hour_ms[:104], hour_ms[103], outside=[True] * 99) == GiveUp(), "the fifth"
    assert decide(patient, hour_ms[:5], hour_ms[4]) == GiveUp()


def test_settings_that_make_no_sense_are_refused() -> None:
    for build in (
        lambda: FixedDelay(attempts=-1, delay=0),
        lambda: FixedDelay(attempts=1, delay="-1 ms"),
        lambda: Exponential(initial=0, maximum="1 ms"),
        lambda: Exponential(initial="2 ms", maximum="1 ms"),
        lambda: Exponential(initial="1 ms", maximum="1 ms", multiplier=0.5),
    ):
        with pytest.raises(JobError, match=r"from 0 up|give a duration|at most the longest|from 1 up"):
            build()


@given(st.lists(st.integers(0, 20_000), min_size=1, max_size=30))
def test_an_exponential_delay_stays_within_its_bounds(gaps_ms: list[int]) -> None:
    failures_ms = [sum(gaps_ms[: count + 1]) for count in range(len(gaps_ms))]
    decision = decide(GROWING, failures_ms, failures_ms[-1])
    assert isinstance(decision, GiveUp) or 100 <= decision.delay_ms <= 500


def test_a_decision_says_which_restart_it_is() -> None:
    decision = decide(GROWING, [0, 1_000], 1_000)
    assert isinstance(decision, RestartAfter) and (decision.number, decision.limit) == (2, 4)


def error(
    record: str = "a", *, operator: str = "count", signature: str = "ValueError at x.py:1", epoch: int | None = None
) -> ErrorAtRecord:
    return ErrorAtRecord(operator=operator, record=record, signature=signature, epoch=epoch)


def test_an_error_repeats_where_everything_is_the_same() -> None:
    assert repeats([error(), error()]) == 0
    for other in (
        error("b"),
        error(operator="sum"),
        error(signature="KeyError at x.py:1"),
        error(signature="ValueError at x.py:2"),
    ):
        assert repeats([other, error()]) is None
    assert repeats([error()]) is None


def test_an_error_of_another_kind_in_between_changes_nothing() -> None:
    assert repeats([error(), None, error()]) == 0
    assert repeats([error(), None]) is None
    assert repeats([None, None]) is None


def test_errors_of_several_subtasks_in_turn_are_found() -> None:
    assert repeats([error("a"), error("b"), error("c"), error("b")]) == 1


def test_a_snapshot_completed_in_between_says_that_it_may_be_another_record_with_the_same_text() -> None:
    assert repeats([error(epoch=4), error(epoch=5)]) is None
    assert repeats([error(epoch=None), error(epoch=1)]) is None
    assert repeats([error(epoch=4), error(epoch=5), error(epoch=5)]) == 1
