"""A calendar holds each time and key once, gives out what is due in order, and takes no more room than it needs."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tidegate.state.calendar import MIN_TIMES, Calendar

NAN = float("nan")


def filled(*pairs: tuple[int, Any]) -> Calendar:
    calendar = Calendar()
    for at_ms, key in pairs:
        calendar.add(at_ms, key)
    return calendar


def test_keys_of_one_time_come_as_they_were_added() -> None:
    pairs = [(5, "b"), (3, "x"), (5, "a"), (5, "c")]
    calendar = filled(*pairs)
    assert len(calendar) == 4 and calendar.first_ms() == 3
    assert list(calendar.due(4)) == [(3, "x")]
    assert list(calendar.due(5)) == [(5, "b"), (5, "a"), (5, "c")]
    assert len(calendar) == 0 and calendar.first_ms() is None


def test_any_key_will_do() -> None:
    """None, tuples, and NaN, which isn't equal to itself."""
    keys: list[Any] = [None, (1, None), (), NAN, {}.keys, False]
    for key in keys:
        calendar = filled((1, key))
        calendar.discard(1, "another")
        assert len(calendar) == 1
        calendar.discard(1, key)
        assert len(calendar) == 0
    assert [key for _, key in filled(*((1, key) for key in keys)).due(1)] == keys


def test_what_is_added_for_an_earlier_time_comes_next() -> None:
    calendar = filled((5, "a"), (5, "b"), (5, "c"))
    found = []
    for at_ms, key in calendar.due(5):
        found.append((at_ms, key))
        if key in ("a", "c") and at_ms == 5:
            calendar.add(2, f"after {key}")
            calendar.add(9, "not due")
            calendar.discard(9, "not due")
    assert found == [(5, "a"), (2, "after a"), (5, "b"), (5, "c"), (2, "after c")]


def test_times_of_nobody_do_not_pile_up() -> None:
    calendar = filled(*((10**6 + number, number) for number in range(100)))
    for at_ms in range(5 * MIN_TIMES):
        calendar.add(at_ms, "moving")
        calendar.discard(at_ms, "moving")
        assert len(calendar._times) <= MIN_TIMES + 1
    assert calendar.first_ms() == 10**6 and len(list(calendar.due(10**7))) == 100


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.booleans())), st.integers(-1, 5))
def test_what_is_due_is_what_was_added_and_not_discarded(changes: list[tuple[int, int, bool]], now_ms: int) -> None:
    calendar, oracle = Calendar(), dict[tuple[int, int], None]()
    for at_ms, key, adds in changes:
        if adds and (at_ms, key) not in oracle:
            calendar.add(at_ms, key)
            oracle[at_ms, key] = None
        elif not adds:
            calendar.discard(at_ms, key)
            oracle.pop((at_ms, key), None)
        assert len(calendar) == len(oracle)
        assert calendar.first_ms() == min((at for at, _ in oracle), default=None)
    in_order = sorted(oracle, key=lambda pair: pair[0])
    assert list(calendar.due(now_ms)) == [pair for pair in in_order if pair[0] <= now_ms]
    assert len(calendar) == sum(at_ms > now_ms for at_ms, _ in oracle)
