"""Window assigners, against their definition: every window that could be is tried."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tidegate as tg
from tidegate.dataflow.windows import Paned, Window, cumulating, global_window, sessions, sliding, tumbling

TIMES = st.integers(-60, 60)


@st.composite
def assigners(draw: st.DrawFn) -> Paned:
    offset = draw(st.integers(0, 20))
    kind = draw(st.sampled_from(("tumbling", "sliding", "cumulating")))
    size = draw(st.integers(1, 12))
    if kind == "tumbling":
        return tumbling("ts", size, offset=offset)
    if kind == "sliding":
        return sliding("ts", size, draw(st.integers(1, 15)), offset=offset)
    step = draw(st.integers(1, 5))
    return cumulating("ts", step * draw(st.integers(1, 5)), step, offset=offset)


def all_windows(assigner: Paned) -> list[Window]:
    """Those near the times that are tried, by the definition."""
    return [
        Window(start, start + length)
        for start in range(assigner.offset_ms - 40 * assigner.every_ms * 15, 120, assigner.every_ms)
        if start > -200
        for length in range(assigner.step_ms, assigner.size_ms + 1, assigner.step_ms)
    ]


@given(assigners(), TIMES)
def test_a_pane_is_in_exactly_the_windows_that_its_times_are_in(assigner: Paned, time: int) -> None:
    pane = int(assigner.panes_of(np.array([time], np.int64))[0])
    assert pane <= time < pane + assigner.pane_ms
    windows = [each for each in all_windows(assigner) if each.start_ms <= time < each.end_ms]
    assert sorted(map(assigner.window, assigner.ends(pane, after_ms=-(2**62)))) == sorted(windows)
    assert bool(assigner.in_windows(np.array([time], np.int64))[0]) == bool(windows)
    if windows:
        last = max(each.end_ms for each in windows)
        assert assigner.last_end(pane) == last == assigner.last_ends(np.array([pane], np.int64))[0]


@given(assigners(), TIMES, st.integers(-80, 80))
def test_ends_are_those_after_a_time(assigner: Paned, time: int, after: int) -> None:
    pane = int(assigner.panes_of(np.array([time], np.int64))[0])
    ends = [each.end_ms for each in all_windows(assigner) if each.start_ms <= time < each.end_ms and each.end_ms > after]
    assert list(assigner.ends(pane, after_ms=after)) == sorted(ends)


@given(assigners())
def test_no_two_windows_end_at_once(assigner: Paned) -> None:
    windows = all_windows(assigner)
    assert len({each.end_ms for each in windows}) == len(windows)
    assert all(assigner.window(each.end_ms) == each for each in windows)


def test_sizes_are_durations() -> None:
    assert tumbling("ts", "10 s") == Paned("ts", 10_000, 10_000, 10_000)
    assert tumbling("ts", timedelta(hours=1), offset="75 minutes").offset_ms == 900_000
    assert sliding("ts", "1 hour", "25 minutes").pane_ms == 300_000
    assert cumulating("ts", "1 day", "1 hour").pane_ms == 3_600_000
    assert sessions("ts", "30 min").gap_ms == 1_800_000
    assert tumbling("ts", 5).is_one_pane and not sliding("ts", 10, 5).is_one_pane and not sliding("ts", 6, 10).is_one_pane
    assert sliding("ts", 5, 6).has_gaps and not tumbling("ts", 5).has_gaps


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tumbling("ts", 0), "tumbling(size=0): give a duration of at least 1 ms"),
        (lambda: tumbling("ts", "soon"), "tumbling(size='soon'): give a duration, such as '5 seconds'"),
        (
            lambda: tumbling("ts", "5 us"),
            "tumbling(size='5 us'): give a duration, such as '5 seconds', '200 ms' or '1 minute', or "
            "a number of milliseconds; the shortest is 1 ms",
        ),
        (lambda: tumbling(None, "1 s"), "tumbling(ts=None): give the name of the time column"),
        (lambda: tumbling("ts", "1 s", time="processing"), "tumbling(ts='ts'): give None, since time='processing' needs"),
        (lambda: tumbling(None, 5, time="processing"), "tumbling(size=5): give the unit, too: '5 s' or '5 ms'"),
        (lambda: tumbling(None, "5 s", offset=5, time="processing"), "tumbling(offset=5): give the unit, too"),
        (lambda: tumbling("ts", "1 s", time="wall"), "tumbling(time='wall'): give 'event' or 'processing'"),
        (lambda: sliding("ts", "1 s", 0), "sliding(every=0): give a duration of at least 1 ms"),
        (lambda: cumulating("ts", "10 s", "3 s"), "cumulating(step='3 s'): give a duration that divides the size '10 s'"),
        (
            lambda: sliding("ts", "365 days", "1 ms"),
            "sliding(every='1 ms'): give at least a 100,000th of the size",
        ),
        (lambda: cumulating("ts", "365 days", "1 ms"), "cumulating(step='1 ms'): give at least a 100,000th of the size"),
        (lambda: sessions("ts", -1), "sessions(gap=-1): give a duration"),
        (lambda: global_window(count=0), "global_window(count=0): give a whole number from 1 up"),
    ],
)
def test_a_mistake_is_an_error_at_the_call(call: object, message: str) -> None:
    with pytest.raises(tg.JobError) as raised:
        call()  # type: ignore[operator]
    assert str(raised.value).startswith(message)
