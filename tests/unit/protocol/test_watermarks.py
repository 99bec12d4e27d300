"""Watermarks: merging channels, idleness, ends, and the bounded-out-of-orderness generator."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.channels import elements
from tidegate.protocol.ids import ChannelId
from tidegate.protocol.watermarks import (
    MAX_WATERMARK_MS,
    MIN_WATERMARK_MS,
    Advanced,
    BecameIdle,
    BoundedOutOfOrderness,
    WatermarkMerge,
)

A, B, C = (ChannelId(edge=0, upstream=upstream, downstream=0) for upstream in range(3))


def test_the_bounds_are_those_of_the_channel_elements() -> None:
    assert (MIN_WATERMARK_MS, MAX_WATERMARK_MS) == (elements.MIN_WATERMARK_MS, elements.MAX_WATERMARK_MS)


def test_the_merge_is_the_minimum_and_waits_for_every_channel() -> None:
    merge = WatermarkMerge([A, B])
    assert merge.on_watermark(A, 100) is None
    assert merge.on_watermark(B, 40) == Advanced(40)
    assert merge.on_watermark(B, 140) == Advanced(100)
    assert merge.on_watermark(B, 150) is None
    assert merge.current_ms == 100


def test_a_channel_that_goes_back_is_ignored() -> None:
    merge = WatermarkMerge([A])
    merge.on_watermark(A, 100)
    assert merge.on_watermark(A, 50) is None
    assert merge.current_ms == 100


def test_an_idle_channel_does_not_hold_back_the_others() -> None:
    merge = WatermarkMerge([A, B])
    merge.on_watermark(A, 100)
    assert merge.on_idle(B) == Advanced(100)
    assert merge.on_watermark(A, 200) == Advanced(200)


def test_a_channel_that_wakes_up_behind_holds_the_merge_until_it_has_caught_up() -> None:
    merge = WatermarkMerge([A, B])
    merge.on_idle(B)
    merge.on_watermark(A, 100)
    assert merge.on_batch(B) is None
    assert merge.on_watermark(A, 200) is None
    assert merge.on_watermark(B, 90) is None
    assert merge.on_watermark(B, 120) == Advanced(120)


def test_all_idle_is_said_once() -> None:
    merge = WatermarkMerge([A, B])
    assert merge.on_idle(A) is None
    assert merge.on_idle(B) == BecameIdle()
    assert merge.on_idle(B) is None


def test_waking_up_from_idleness_repeats_the_watermark_so_that_downstream_waits_again() -> None:
    merge = WatermarkMerge([A, B])
    merge.on_watermark(A, 50)
    merge.on_watermark(B, 50)
    merge.on_idle(A)
    merge.on_idle(B)
    assert merge.on_batch(A) == Advanced(50)
    assert merge.on_batch(A) is None
    merge.on_idle(A)
    assert merge.on_watermark(A, 60) == Advanced(60)


def test_an_ended_channel_leaves_the_minimum_to_the_others() -> None:
    merge = WatermarkMerge([A, B])
    merge.on_watermark(B, 10)
    assert merge.on_end(A) == Advanced(10)
    assert merge.on_watermark(B, 20) == Advanced(20)
    assert merge.on_end(B) == Advanced(MAX_WATERMARK_MS)


def test_an_ended_channel_does_not_end_time_while_another_is_merely_idle() -> None:
    merge = WatermarkMerge([A, B])
    merge.on_watermark(B, 10)
    merge.on_end(A)
    assert merge.on_idle(B) == BecameIdle()
    assert merge.on_watermark(B, 20) == Advanced(20)
    merge.on_idle(B)
    assert merge.on_end(B) == Advanced(MAX_WATERMARK_MS)


def test_an_ended_channel_can_not_become_idle() -> None:
    merge = WatermarkMerge([A])
    assert merge.on_end(A) == Advanced(MAX_WATERMARK_MS)
    assert merge.on_idle(A) is None
    assert merge.on_batch(A) is None


def test_foreign_channels_and_none_at_all_are_refused() -> None:
    with pytest.raises(AssertionError):
        WatermarkMerge([])
    merge = WatermarkMerge([A])
    with pytest.raises(AssertionError, match="no input"):
        merge.on_watermark(B, 1)
    with pytest.raises(AssertionError, match="no input"):
        merge.on_idle(B)


SPEECH = st.lists(st.tuples(st.sampled_from((A, B, C)), st.sampled_from(("watermark", "idle", "batch", "end")),
                            st.integers(-50, 50)), max_size=40)


@given(SPEECH)
def test_the_merge_never_goes_back_and_never_promises_more_than_its_live_channels(
        speech: list[tuple[ChannelId, str, int]]) -> None:
    merge = WatermarkMerge([A, B, C])
    said: dict[ChannelId, int] = dict.fromkeys((A, B, C), MIN_WATERMARK_MS)
    idle: set[ChannelId] = set()
    announced_idle = False
    for channel, kind, at_ms in speech:
        before_ms = merge.current_ms
        if kind == "idle":
            progress = merge.on_idle(channel)
            idle.add(channel)
        else:
            idle.discard(channel)
            if kind == "batch":
                progress = merge.on_batch(channel)
            elif kind == "end":
                progress = merge.on_end(channel)
                said[channel] = MAX_WATERMARK_MS
            else:
                progress = merge.on_watermark(channel, at_ms)
                said[channel] = max(said[channel], at_ms)
        live_ms = [at for one, at in said.items() if one not in idle and at != MAX_WATERMARK_MS]
        ended = all(at == MAX_WATERMARK_MS for at in said.values())
        assert merge.current_ms >= before_ms
        if isinstance(progress, Advanced):
            announced_idle = False
            assert progress.at_ms == merge.current_ms
            assert progress.at_ms in (min(live_ms, default=MAX_WATERMARK_MS), before_ms)
        elif isinstance(progress, BecameIdle):
            announced_idle = True
        assert announced_idle == (not live_ms and not ended), "downstream must know whether to wait"
        assert ended == (merge.current_ms == MAX_WATERMARK_MS)
        assert merge.current_ms >= min(live_ms, default=MIN_WATERMARK_MS)


def test_the_generator_stays_the_delay_and_one_behind_the_latest_record() -> None:
    generator = BoundedOutOfOrderness(5_000)
    assert generator.on_batch(100_000, now_ms=0) == Advanced(94_999)
    assert generator.on_batch(100_000, now_ms=1) is None
    assert generator.on_batch(90_000, now_ms=2) is None
    assert generator.on_batch(100_001, now_ms=3) == Advanced(95_000)
    assert generator.current_ms == 95_000


def test_the_generator_becomes_idle_once_and_wakes_up_with_a_watermark() -> None:
    generator = BoundedOutOfOrderness(0, idle_after_ms=30_000)
    generator.on_batch(1_000, now_ms=0)
    assert generator.on_time(29_999) is None
    assert generator.deadline_ms() == 30_000
    assert generator.on_time(30_000) == BecameIdle()
    assert generator.deadline_ms() is None, "a deadline that has passed would keep the loop awake"
    assert generator.on_time(90_000) is None
    assert generator.on_batch(500, now_ms=90_001) == Advanced(999), "it does not advance, but it is there again"
    assert generator.on_time(120_000) is None
    assert generator.on_time(120_001) == BecameIdle()


def test_a_generator_without_any_record_becomes_idle_too() -> None:
    generator = BoundedOutOfOrderness(0, idle_after_ms=10)
    assert generator.on_time(1_000) is None
    assert generator.on_time(1_009) is None
    assert generator.on_time(1_010) == BecameIdle()


def test_a_generator_without_an_idle_time_is_never_idle() -> None:
    generator = BoundedOutOfOrderness(0)
    generator.on_time(0)
    assert generator.deadline_ms() is None
    assert generator.on_time(10**12) is None


def test_event_times_at_the_ends_of_the_range_make_no_impossible_watermark() -> None:
    generator = BoundedOutOfOrderness(5_000)
    assert generator.on_batch(MIN_WATERMARK_MS, now_ms=0) is None
    assert generator.current_ms == MIN_WATERMARK_MS
    assert BoundedOutOfOrderness(0).on_batch(MAX_WATERMARK_MS, now_ms=0) == Advanced(MAX_WATERMARK_MS - 1)


@given(st.lists(st.integers(-1_000, 1_000), min_size=1), st.integers(0, 500))
def test_no_record_within_the_delay_is_ever_late(times_ms: list[int], delay_ms: int) -> None:
    generator = BoundedOutOfOrderness(delay_ms)
    for time_ms in times_ms:
        generator.on_batch(time_ms, now_ms=0)
    assert generator.current_ms < max(times_ms) - delay_ms
