"""The limit of a slot's memory, with memory that a test makes up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tidegate.errors import JobError
from tidegate.slot.memory import MemoryWatch, resident_bytes


def series(*sizes: int) -> Callable[[], int]:
    left = list(sizes)
    return lambda: left.pop(0)


def test_a_slot_without_a_limit_is_measured_all_the_same() -> None:
    watch = MemoryWatch(None, resident_bytes=series(10**12))
    assert watch.look() == 10**12 and not watch.is_nearly_full


def test_four_fifths_of_the_limit_are_nearly_full() -> None:
    watch = MemoryWatch(1_000, resident_bytes=series(800, 801))
    watch.look()
    assert not watch.is_nearly_full
    watch.look()
    assert watch.is_nearly_full


def test_memory_that_was_freed_is_given_back_before_it_counts() -> None:
    trimmed: list[bool] = []
    watch = MemoryWatch(1_000, resident_bytes=series(1_001, 900), trim=lambda: trimmed.append(True))
    assert watch.look() == 900 and trimmed == [True]


def test_above_the_limit_the_error_says_what_to_do() -> None:
    watch = MemoryWatch(1_000, resident_bytes=series(1_001, 1_001))
    with pytest.raises(JobError, match=r"uses 1,001 bytes .* allows 1,000.*more slots.*RocksDB"):
        watch.look()


def test_this_process_has_memory() -> None:
    assert 10 << 20 < resident_bytes() < 100 << 30
