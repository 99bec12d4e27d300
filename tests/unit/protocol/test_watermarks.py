"""Watermarks: merging channels, idleness, ends, and splits."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.channels import elements
from tidegate.protocol.ids import ChannelId
from tidegate.protocol.watermarks import (
    MAX_WATERMARK_MS,
    MIN_WATERMARK_MS,
    Advanced,
    BecameHeld,
    BecameIdle,
    SplitWatermarks,
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
    assert merge.on_watermark(B, MIN_WATERMARK_MS) is None
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
    assert merge.on_watermark(A, 50) == Advanced(50)
    assert merge.on_watermark(A, 50) is None
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


def test_with_an_epoch_idleness_ends_and_promises_do_not() -> None:
    """By epochs, a channel that had no record in the last one may have some in this one, and be slower than others."""
    merge = WatermarkMerge([A, B])
    merge.on_idle(B)
    assert merge.on_watermark(A, 100) == Advanced(100)
    merge.on_epoch()
    assert merge.on_watermark(A, 200) is None, "nobody knows yet what B has"
    assert merge.on_watermark(B, 120) == Advanced(120)
    merge.on_epoch()
    assert merge.on_idle(A) is None
    assert merge.on_idle(B) == BecameIdle()
    merge.on_epoch()
    assert merge.on_idle(B) == Advanced(200)


def test_a_held_channel_is_left_out_while_another_is_live_and_stops_the_merge_when_none_is() -> None:
    merge = WatermarkMerge([A, B])
    merge.on_watermark(A, 10)
    assert merge.on_watermark(B, 20) == Advanced(10)
    assert merge.on_held(A) == Advanced(20)
    assert merge.on_watermark(B, 30) == Advanced(30)
    assert merge.on_held(B) == BecameHeld()
    assert merge.on_held(B) is None and merge.current_ms == 30
    assert merge.on_end(A) is None, "records may still come of B's part"
    assert merge.on_end(B) == Advanced(MAX_WATERMARK_MS)


def test_behind_a_loop_a_held_channel_waits_unless_another_part_of_the_loop_is_live() -> None:
    other = ChannelId(edge=1, upstream=0, downstream=0)
    merge = WatermarkMerge([A, B, other])
    for channel, at_ms in ((A, 10), (B, 20), (other, 500)):
        merge.on_watermark(channel, at_ms)
    assert merge.on_held(A, inside=False) == Advanced(20), "B is of the same loop"
    assert merge.on_watermark(B, 30) == Advanced(30)
    assert merge.on_held(B, inside=False) is None, "now records of both may still come"
    assert merge.on_watermark(other, 600) is None and merge.current_ms == 30
    assert merge.on_end(A) is None
    assert merge.on_end(B) == Advanced(600)


def test_held_goes_before_idle() -> None:
    merge = WatermarkMerge([A, B])
    merge.on_watermark(A, 10)
    merge.on_watermark(B, 20)
    assert merge.on_idle(A) == Advanced(20)
    assert merge.on_held(B) == BecameHeld(), "the one that is idle may be told of by others; B's records are on their way"
    assert merge.on_watermark(A, 40) == Advanced(40), "whoever waited for neither waits again"
    assert merge.on_idle(A) == BecameHeld()


def test_only_the_end_of_a_channel_without_event_time_counts() -> None:
    merge = WatermarkMerge([A], without_event_time=[B])
    assert merge.on_watermark(A, 10) == Advanced(10)
    assert merge.on_watermark(B, 5) is None
    assert merge.on_end(A) == BecameIdle(), "time must not end while B goes on"
    assert merge.on_end(B) == Advanced(MAX_WATERMARK_MS)


def test_foreign_channels_and_none_at_all_are_refused() -> None:
    with pytest.raises(AssertionError):
        WatermarkMerge([])
    merge = WatermarkMerge([A])
    with pytest.raises(AssertionError, match="no input"):
        merge.on_watermark(B, 1)
    with pytest.raises(AssertionError, match="no input"):
        merge.on_idle(B)


SPEECH = st.lists(
    st.tuples(st.sampled_from((A, B, C)), st.sampled_from(("watermark", "idle", "epoch", "end")), st.integers(-50, 50)),
    max_size=40,
)


@given(SPEECH)
def test_the_merge_never_goes_back_and_never_promises_more_than_its_live_channels(
    speech: list[tuple[ChannelId, str, int]],
) -> None:
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
            if kind == "epoch":
                merge.on_epoch()
                idle.clear()
                progress, announced_idle = None, False
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
        if kind != "epoch":  # which moves no time: in the next epoch each channel reports again
            assert merge.current_ms >= min(live_ms, default=MIN_WATERMARK_MS)


# ------------------------------------------------------------------------------------------------------ splits


def one_split(delay_ms: int = 0, idle_after_ms: int | None = None, now_ms: int = 0) -> SplitWatermarks:
    watermarks = SplitWatermarks(delay_ms, idle_after_ms, now_ms=now_ms)
    watermarks.on_discovered({"": False}, now_ms)
    return watermarks


def test_the_watermark_of_one_split_stays_the_delay_and_one_behind_the_latest_record() -> None:
    split = one_split(5_000)
    assert split.on_batch("", 100_000, now_ms=0) == Advanced(94_999)
    assert split.on_batch("", 100_000, now_ms=1) is None
    assert split.on_batch("", 90_000, now_ms=2) is None
    assert split.on_batch("", 100_001, now_ms=3) == Advanced(95_000)
    assert split.current_ms == 95_000


def test_one_split_becomes_idle_once_and_wakes_up_with_a_watermark() -> None:
    split = one_split(idle_after_ms=30_000)
    split.on_batch("", 1_000, now_ms=0)
    assert split.on_time(29_999) is None
    assert split.deadline_ms() == 30_000
    assert split.on_time(30_000) == BecameIdle()
    assert split.deadline_ms() is None, "a deadline that has passed would keep the loop awake"
    assert split.on_time(90_000) is None
    assert split.on_batch("", 500, now_ms=90_001) == Advanced(999), "it does not advance, but it is there again"
    assert split.on_time(120_000) is None
    assert split.on_time(120_001) == BecameIdle()


def test_a_split_without_any_record_becomes_idle_too() -> None:
    split = one_split(idle_after_ms=10, now_ms=1_000)
    assert split.on_time(1_009) is None
    assert split.on_time(1_010) == BecameIdle()


def test_a_split_without_an_idle_time_is_never_idle() -> None:
    split = one_split()
    assert split.deadline_ms() is None
    assert split.on_time(10**12) is None


def test_event_times_at_the_ends_of_the_range_make_no_impossible_watermark() -> None:
    split = one_split(5_000)
    assert split.on_batch("", MIN_WATERMARK_MS, now_ms=0) is None
    assert split.current_ms == MIN_WATERMARK_MS and split.latest_ms() == {}
    assert one_split().on_batch("", MAX_WATERMARK_MS, now_ms=0) == Advanced(MAX_WATERMARK_MS - 1)


@given(st.lists(st.integers(-1_000, 1_000), min_size=1), st.integers(0, 500))
def test_no_record_within_the_delay_is_ever_late(times_ms: list[int], delay_ms: int) -> None:
    split = one_split(delay_ms)
    for time_ms in times_ms:
        split.on_batch("", time_ms, now_ms=0)
    assert split.current_ms < max(times_ms) - delay_ms


def splits(*names: str, **more: Any) -> SplitWatermarks:
    watermarks = SplitWatermarks(0, **more)
    watermarks.on_discovered(dict.fromkeys(names, False), 0)
    return watermarks


def test_the_slowest_split_holds_the_stream_and_an_unread_one_before_all() -> None:
    both = splits("a", "b")
    assert both.on_batch("a", 100, 0) is None, "nobody knows what is in b"
    assert both.on_batch("b", 50, 0) == Advanced(49)
    assert both.on_batch("a", 200, 0) is None
    assert both.on_batch("b", 150, 0) == Advanced(149)
    assert (both.watermark_ms("a"), both.watermark_ms("b"), both.watermark_ms("c")) == (199, 149, MIN_WATERMARK_MS)


def test_a_finished_split_holds_nothing_back() -> None:
    both = splits("a", "b")
    both.on_batch("a", 100, 0)
    assert both.on_finished("b", 0) == Advanced(99), "it was empty"
    assert both.on_finished("a", 0) is None
    assert both.on_finished("never heard of", 0) is None
    assert both.current_ms == 99


def test_a_split_that_appears_later_lowers_nothing_and_holds_the_stream_until_it_has_caught_up() -> None:
    stream = splits("a")
    stream.on_batch("a", 100, 0)
    assert stream.on_discovered({"b": False}, 0) is None
    assert stream.on_batch("a", 200, 0) is None
    assert stream.on_batch("b", 50, 0) is None
    assert stream.on_batch("b", 150, 0) == Advanced(149)


def test_splits_become_idle_one_by_one_and_the_stream_with_the_last() -> None:
    stream = splits("a", "b", idle_after_ms=10)
    assert stream.on_batch("a", 100, now_ms=5) is None
    assert stream.deadline_ms() == 10
    assert stream.on_time(10) == Advanced(99), "b isn't waited for any longer"
    assert stream.deadline_ms() == 15
    assert stream.on_time(15) == BecameIdle()
    assert stream.deadline_ms() is None
    assert stream.on_batch("b", 60, now_ms=20) == Advanced(99)
    assert stream.on_batch("b", 120, now_ms=21) == Advanced(119)


def test_a_split_with_records_waiting_is_not_idle_however_long_it_is_not_read() -> None:
    stream = SplitWatermarks(0, 10)
    stream.on_discovered({"a": True, "b": False}, 0)
    stream.on_batch("b", 70, now_ms=0)
    assert stream.on_time(10_000) is None and stream.deadline_ms() is None
    assert stream.on_batch("a", 50, now_ms=10_001) == Advanced(49)


def test_a_stream_without_live_splits_becomes_idle_and_is_woken_by_a_new_one() -> None:
    stream = SplitWatermarks(0, 10, now_ms=3)
    assert stream.deadline_ms() == 13
    assert stream.on_time(13) == BecameIdle()
    assert stream.on_discovered({"a": False}, 20) == Advanced(MIN_WATERMARK_MS), "the others are to wait for it"
    assert stream.on_batch("a", 5, 21) == Advanced(4)
    assert stream.on_finished("a", 22) is None
    assert stream.on_time(31) is None and stream.on_time(32) == BecameIdle()


def test_a_restored_split_goes_on_from_what_was_read_of_it() -> None:
    before = splits("a", "b")
    before.on_batch("a", 100, 0)
    before.on_batch("b", 50, 0)
    assert before.latest_ms() == {"a": 100, "b": 50}
    after = SplitWatermarks(10)
    assert after.on_discovered({"a": False}, 0, latest_ms={"a": 100, "b": 50}) == Advanced(89), "by the present delay"
    again = SplitWatermarks(0)
    assert again.on_discovered({"a": True, "b": False}, 0, latest_ms={"a": 100, "b": 50}) == Advanced(49)
    again = SplitWatermarks(0)
    assert again.on_discovered({"a": True, "b": False}, 0, latest_ms={"a": 100}) is None, "b may hold anything"


@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.one_of(st.integers(0, 50), st.sampled_from(["finish", "discover"]))),
        max_size=80,
    )
)
def test_the_stream_promises_the_least_of_its_live_splits_and_never_less_than_before(
    steps: list[tuple[str, int | str]],
) -> None:
    stream = SplitWatermarks(0)
    live: dict[str, int] = {}
    promised = MIN_WATERMARK_MS
    for split, step in steps:
        if step == "finish":
            outcome = stream.on_finished(split, 0)
            live.pop(split, None)
        elif step == "discover":
            outcome = stream.on_discovered({split: False}, 0)
            live.setdefault(split, MIN_WATERMARK_MS)
        else:
            assert isinstance(step, int)
            outcome = stream.on_batch(split, step, 0)
            live[split] = max(step - 1, live.get(split, MIN_WATERMARK_MS))
        expected = max(promised, min(live.values(), default=promised))
        assert stream.current_ms == expected
        assert outcome == (Advanced(expected) if expected > promised else None)
        promised = expected
