"""Timers fire once, in order, with their key; the state decides, the calendar beside it only knows where to look."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import JobError
from tidegate.state import calendar, timers
from tidegate.state.columns import key_list
from tidegate.state.heap import HeapBackend
from tidegate.state.timers import MAX_MS, TimeKind, TimerQueue, instant_ms, to_ms


def queue() -> tuple[HeapBackend, TimerQueue]:
    backend = HeapBackend(key_type=pa.string(), key_group_count=4)
    return backend, TimerQueue(TimeKind.EVENT, backend)


def set_at(backend: HeapBackend, timer_queue: TimerQueue, *timers: tuple[str, int]) -> None:
    for backend.cursor.key, at_ms in timers:
        timer_queue.set(at_ms)


def fired(backend: HeapBackend, timer_queue: TimerQueue, now_ms: int) -> list[tuple[Any, int]]:
    return [(backend.cursor.key, at_ms) for at_ms in timer_queue.due(now_ms)]


def test_timers_fire_in_order_of_time_and_then_as_they_were_set() -> None:
    backend, due = queue()
    set_at(backend, due, ("a", 30), ("b", 10), ("a", 20), ("b", 20), ("c", 40))
    assert fired(backend, due, 30) == [("b", 10), ("a", 20), ("b", 20), ("a", 30)]
    assert due.next_ms() == 40


def test_a_timer_fires_once_however_often_it_is_set() -> None:
    backend, due = queue()
    set_at(backend, due, ("a", 10), ("a", 10), ("a", 10))
    assert fired(backend, due, 10) == [("a", 10)]
    assert fired(backend, due, 10) == []
    set_at(backend, due, ("a", 10))
    assert fired(backend, due, 10) == [("a", 10)], "set again after it fired"


def test_a_timer_is_due_at_its_time_not_before() -> None:
    backend, due = queue()
    set_at(backend, due, ("a", 10))
    assert fired(backend, due, 9) == []
    assert fired(backend, due, 10) == [("a", 10)]


def test_a_deleted_timer_does_not_fire() -> None:
    backend, due = queue()
    set_at(backend, due, ("a", 10), ("a", 20), ("b", 10))
    backend.cursor.key = "a"
    due.delete(10)
    due.delete(15)
    assert fired(backend, due, 100) == [("b", 10), ("a", 20)]


def test_a_timer_that_is_deleted_and_set_again_fires_once() -> None:
    backend, due = queue()
    set_at(backend, due, ("a", 10))
    due.delete(10)
    due.set(10)
    assert fired(backend, due, 10) == [("a", 10)]


def test_what_is_set_while_timers_fire_is_among_them_if_it_is_due() -> None:
    backend, due = queue()
    set_at(backend, due, ("a", 10), ("b", 30))
    seen = []
    for at_ms in due.due(30):
        seen.append((backend.cursor.key, at_ms))
        if at_ms < 20:
            due.set(at_ms + 10)
            due.set(99)
    assert seen == [("a", 10), ("a", 20), ("b", 30)]
    assert fired(backend, due, 99) == [("a", 99)]


def test_what_is_deleted_while_timers_fire_does_not() -> None:
    backend, due = queue()
    set_at(backend, due, ("a", 10), ("a", 20))
    for _ in due.due(30):
        due.delete(20)
        break
    assert fired(backend, due, 30) == []


def test_in_sparks_way_what_is_set_or_deleted_while_timers_fire_is_no_matter() -> None:
    backend, due = queue()
    set_at(backend, due, ("a", 10), ("b", 20), ("a", 20), ("a", 30))
    backend.cursor.key = "a"
    due.delete(20)
    due.set(20)
    fired, seen = [], []
    for at_ms in due.expired(25):
        fired.append((backend.cursor.key, at_ms))
        seen.append(due.times())
        if at_ms == 10:
            due.delete(20)  # it fires all the same
            due.set(5)  # due at once, and waits
            due.set(10)  # in vain
            backend.cursor.key = "elsewhere"
    assert fired == [("a", 10), ("b", 20), ("a", 20)]
    assert seen == [[10, 20, 30], [20], [5, 30]]
    assert [(backend.cursor.key, at_ms) for at_ms in due.expired(25)] == [("a", 5)]
    backend.cursor.key = "a"
    assert due.times() == [30]
    backend.cursor.key = "b"
    assert due.times() == []


def test_a_null_key_has_timers_too() -> None:
    backend, due = queue()
    backend.cursor.key = None
    due.set(5)
    assert fired(backend, due, 5) == [(None, 5)]


def test_a_key_without_timers_leaves_nothing_in_the_state() -> None:
    backend, due = queue()
    set_at(backend, due, ("a", 10), ("b", 10), ("b", 20))
    backend.cursor.key = "b"
    due.delete(10)
    due.delete(20)
    assert fired(backend, due, 100) == [("a", 10)]
    assert not [section for section in backend.freeze().sections() if not section.deleted]


def test_restored_timers_fire_like_the_originals() -> None:
    backend, due = queue()
    rng = random.Random(7)
    set_at(backend, due, *((f"k{rng.randrange(50)}", rng.randrange(1000)) for _ in range(300)))
    sections = list(backend.freeze().sections())
    second, restored = queue()
    restored.load(((key_list(section.rows.column("key")), section.rows) for section in sections), known=False)
    assert restored.next_ms() == due.next_ms()
    for now_ms in (250, 1000):
        assert sorted(fired(second, restored, now_ms)) == sorted(fired(backend, due, now_ms))
    assert not [section for section in second.freeze().sections() if not section.deleted]


def test_deleted_timers_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that ends after a pause: every record moves the timer."""
    monkeypatch.setattr(calendar, "MIN_TIMES", 10)
    backend, due = queue()
    set_at(backend, due, *((f"k{number}", 1_000_000 + number) for number in range(20)))
    backend.cursor.key = "moving"
    for at_ms in range(1000):
        due.delete(at_ms - 1)
        due.set(at_ms)
        assert backend.cursor.key == "moving"
    assert len(due._calendar._times) < 50
    assert fired(backend, due, MAX_MS) == [("moving", 999), *((f"k{number}", 1_000_000 + number) for number in range(20))]


def test_a_timer_set_again_and_again_after_the_end_is_an_error_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "MAX_SET_AT_THE_END", 100)
    backend, due = queue()
    set_at(backend, due, *((f"k{number}", number) for number in range(200)))
    assert sum(1 for _ in due.due(MAX_MS)) == 200, "however many there are"
    set_at(backend, due, ("a", 0))
    with pytest.raises(JobError, match="after the end of all input"):
        for_ever(due, until_ms=MAX_MS)


def test_before_the_end_a_timer_may_be_set_again_as_often_as_one_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "MAX_SET_AT_THE_END", 100)
    backend, due = queue()
    set_at(backend, due, ("a", 0))
    assert for_ever(due, until_ms=1000) == 1001


def for_ever(due: TimerQueue, until_ms: int) -> int:
    """Each timer sets another. The number of those that were due."""
    count = 0
    for at_ms in due.due(until_ms):
        due.set(at_ms + 1)
        count += 1
    return count


@pytest.mark.parametrize(
    ("at", "at_ms"),
    [
        (5, 5),
        (np.int64(5), 5),
        (datetime(1970, 1, 1, 0, 0, 1), 1000),
        (datetime(1970, 1, 1, 0, 0, 1, 999, tzinfo=UTC), 1000),
        (datetime(1970, 1, 1, 2, tzinfo=timezone(timedelta(hours=2))), 0),
        (datetime(1969, 12, 31, 23, 59, 59, 999_500), -1),
        (2**63 - 1, 2**63 - 1),
    ],
)
def test_a_time_is_milliseconds_or_a_datetime(at: Any, at_ms: int) -> None:
    assert to_ms(at) == at_ms and type(to_ms(at)) is int


@pytest.mark.parametrize("at", [1.5, "12:00", None])
def test_anything_else_is_no_time(at: Any) -> None:
    with pytest.raises(TypeError):
        to_ms(at)


@pytest.mark.parametrize("at", [2**63, -(2**63) - 1])
def test_time_has_an_end(at: int) -> None:
    with pytest.raises(ValueError, match="end of time"):
        to_ms(at)


@pytest.mark.parametrize("at", [1.5, "soon", None, 2**63])
def test_a_time_that_is_none_is_explained_to_the_user(at: Any) -> None:
    with pytest.raises(JobError, match=r"is not a time: give milliseconds since 1970 .* or a datetime"):
        instant_ms(at)
    assert instant_ms(datetime(1970, 1, 1, 0, 0, 1)) == 1000


_change = st.tuples(st.sampled_from(["set", "set", "delete"]), st.sampled_from("abc"), st.integers(0, 9))
_changes = st.lists(_change, max_size=8)


@given(
    rounds=st.lists(st.tuples(_changes, st.integers(0, 9), st.lists(_changes, max_size=4)), max_size=12),
    in_sparks_way=st.booleans(),
)
def test_what_fires_is_what_an_oracle_says(rounds: list[Any], in_sparks_way: bool) -> None:
    """Timers are set and deleted before a round, and by those who hear of the timers that fire in it. What the layers
    of all rounds say, one on the other, is what there is."""
    backend, timer_queue = queue()
    oracle: set[tuple[str, int]] = set()
    written: dict[str, list[int]] = {}

    def change(changes: list[tuple[str, str, int]]) -> None:
        for what, key, at_ms in changes:
            backend.cursor.key = key
            if what == "set":
                timer_queue.set(at_ms)
                oracle.add((key, at_ms))
            else:
                timer_queue.delete(at_ms)
                oracle.discard((key, at_ms))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(calendar, "MIN_TIMES", 2)
        for before, now_ms, heard in rounds:
            change(before)
            found = []
            if in_sparks_way:
                waiting = {timer for timer in oracle if timer[1] <= now_ms}
                for at_ms in timer_queue.expired(now_ms):
                    timer = backend.cursor.key, at_ms
                    found.append(timer)
                    assert timer in waiting, "it is one of those that were due at first"
                    waiting.remove(timer)
                    change(heard[len(found) % len(heard)] if heard else [])
                    oracle.discard(timer)
                assert not waiting
            else:
                for at_ms in timer_queue.due(now_ms):
                    timer = backend.cursor.key, at_ms
                    found.append(timer)
                    assert timer in oracle and at_ms == min(at for _, at in oracle)
                    oracle.discard(timer)
                    change(heard[len(found)] if len(found) < len(heard) else [])
                assert not any(at_ms <= now_ms for _, at_ms in oracle)
            assert len(found) == len(set(found)) or not in_sparks_way
            assert timer_queue.next_ms() == min((at_ms for _, at_ms in oracle), default=None)
            for section in backend.freeze().sections():
                for row in section.rows.to_pylist():
                    written.pop(row["key"], None)
                    if not section.deleted:
                        written[row["key"]] = sorted(row["value"])
            backend.maintain(100)
            for backend.cursor.key in "abc":
                expected = sorted(at_ms for key, at_ms in oracle if key == backend.cursor.key)
                assert timer_queue.times() == expected == written.get(backend.cursor.key, [])
