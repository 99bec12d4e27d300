"""How many records a source reads at once."""

from __future__ import annotations

import pytest

import tidegate as tg
from tidegate.slot.batch_size import BatchSize


def size_after(*batches: tuple[int, int | None]) -> int:
    size = BatchSize(least=100, most=800)
    for count, took_ms in batches:
        size.on_batch(size.rows if count < 0 else count, took_ms)
    return size.rows


FULL = -1


def test_full_batches_that_take_little_time_grow_up_to_the_most() -> None:
    assert [size_after(*[(FULL, 1)] * count) for count in range(5)] == [100, 200, 400, 800, 800]


def test_a_batch_that_takes_long_halves_the_size() -> None:
    assert size_after((FULL, 0), (FULL, 0), (FULL, 50)) == 200


def test_a_batch_that_is_not_finished_in_one_step_halves_the_size() -> None:
    assert size_after((FULL, 0), (FULL, 0), (FULL, None)) == 200


def test_between_little_and_long_the_size_stays() -> None:
    assert size_after((FULL, 0), (FULL, 10), (FULL, 10)) == 200


@pytest.mark.parametrize("count", [0, 1, 399])
def test_a_source_that_keeps_up_has_small_batches_at_once(count: int) -> None:
    assert size_after((FULL, 0), (FULL, 0), (count, 0)) == 100


def test_the_size_never_falls_below_the_least() -> None:
    assert size_after((FULL, 99), (FULL, 99)) == 100


def test_small_batches_that_a_job_asks_for_do_not_grow() -> None:
    assert tg.Tuning(max_batch_rows=10).max_grown_rows == 10
    assert tg.Tuning().max_grown_rows == 65_536
    assert tg.Tuning(max_batch_rows=10, max_column_rows=20).max_grown_rows == 20
