"""What `window(…).aggregate(…)` adds to a job, and mistakes that are found when the job is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import tidegate as tg
from tests.unit.dataflow.described import Nowhere, Records
from tidegate.dataflow.explain import explain_logical
from tidegate.dataflow.pipeline import Pipeline
from tidegate.dataflow.stream import Stream
from tidegate.types import ddl_of

BIDS = "auction long, price double, ts timestamp, day date, at long"


@pytest.fixture
def bids() -> Stream:
    return Pipeline().source("bids", Records(BIDS))


def windows(bids: Stream, **rest: Any) -> Any:
    return bids.key_by("auction").window(tg.tumbling("ts", "10 s"), **rest)


def test_the_result_has_the_key_the_bounds_and_the_aggregates(bids: Stream) -> None:
    result = windows(bids).aggregate("counts", n=tg.count(), total=tg.sum("price"))
    expected = "auction long, window_start timestamp NOT NULL, window_end timestamp NOT NULL, n long, total double"
    assert ddl_of(result.schema) == expected


@pytest.mark.parametrize(
    ("column", "kind"), [("ts", "timestamp"), ("day", "timestamp"), ("at", "long")], ids=["timestamp", "date", "long"]
)
def test_the_bounds_have_the_type_of_the_time_column(bids: Stream, column: str, kind: str) -> None:
    result = bids.window(tg.sessions(column, "1 day")).aggregate("counts", n=tg.count())
    assert ddl_of(result.schema) == f"window_start {kind} NOT NULL, window_end {kind} NOT NULL, n long"


def test_late_records_have_the_schema_of_the_input(bids: Stream) -> None:
    result = windows(bids, late="too late").aggregate("counts", n=tg.count())
    assert result.side_output("too late").schema == bids.schema


def test_with_an_allowed_lateness_or_early_results_the_result_is_upserts_by_key_and_window(bids: Stream) -> None:
    def upserts_by(name: str, **rest: Any) -> tuple[str, ...]:
        windows(bids, **rest).aggregate(name, n=tg.count())
        return bids._pipeline._nodes[-1].upserts_by

    assert upserts_by("exact") == ()
    assert upserts_by("no lateness", allowed_lateness=0) == ()
    assert upserts_by("lateness", allowed_lateness="1 min") == ("auction", "window_start", "window_end")
    assert upserts_by("early", early="1 min") == ("auction", "window_start", "window_end")
    assert upserts_by("trigger", trigger=tg.every_records(5)) == ("auction", "window_start", "window_end")
    assert upserts_by("purging", trigger=tg.every_records(5), purge=True) == ()


def test_results_of_a_global_window_are_upserts_by_key_unless_it_purges(bids: Stream) -> None:
    for purge in (False, True):
        window = bids.key_by("auction").window(tg.global_window(), trigger=tg.after("1 s"), purge=purge)
        result = window.aggregate(f"purge {purge}", n=tg.count())
        assert ddl_of(result.schema) == "auction long, n long"
        assert bids._pipeline._nodes[-1].upserts_by == (() if purge else ("auction",))


MISTAKES: dict[str, tuple[Callable[[Stream], Any], str]] = {
    "a window that is none": (
        lambda bids: bids.key_by("auction").window("10 s"),  # type: ignore[arg-type]
        "window after 'bids': '10 s' is not a window; give one such as tg.tumbling('ts', '10 s')",
    ),
    "no such column": (
        lambda bids: bids.window(tg.tumbling("tz", "10 s")),
        "window after 'bids': there is no column 'tz'",
    ),
    "a time that is no time": (
        lambda bids: bids.window(tg.tumbling("price", "10 s")),
        "window after 'bids': column 'price' is of type double; event time is a timestamp, a date or a long",
    ),
    "a name for late records that is none": (
        lambda bids: windows(bids, late=True),
        "window after 'bids': late=True; give a name for the side output of late records",
    ),
    "an aggregate with the name of a bound": (
        lambda bids: windows(bids).aggregate("counts", window_end=tg.count()),
        "operator 'counts': window_end=… has the name of a column that the result has already",
    ),
    "no aggregates": (
        lambda bids: windows(bids).aggregate("counts"),
        "operator 'counts': name at least one aggregate",
    ),
    "early results of sessions": (
        lambda bids: bids.window(tg.sessions("ts", "10 s"), early="1 s"),
        "window after 'bids': early results need windows whose bounds are known before they end",
    ),
    "no time between early results": (
        lambda bids: windows(bids, early=0),
        "window(early=0): give a duration of at least 1 ms",
    ),
    "a time between early results without its unit": (
        lambda bids: windows(bids, early=10),
        "window(early=10): give the unit, too: '10 s' or '10 ms'",
    ),
    "a trigger that is none": (
        lambda bids: windows(bids, trigger=100),
        "100 is not a trigger; give one such as tg.every_records(100) or tg.after('10 s')",
    ),
    "a trigger by records of no records": (
        lambda bids: tg.every_records(0),
        "every_records(count=0): give a whole number from 1 up",
    ),
    "a trigger by records where a record is in several windows": (
        lambda bids: bids.window(tg.sliding("ts", "10 s", "5 s"), trigger=tg.after("1 s") | tg.every_records(5)),
        "window after 'bids': trigger 'every 5 records' goes by the records, and a record is in several of these windows",
    ),
    "a trigger of windows of processing time": (
        lambda bids: bids.window(tg.tumbling(None, "10 s", time="processing"), trigger=tg.every_records(5)),
        "window after 'bids': early results need windows whose bounds are known",
    ),
    "a global window that never shows anything": (
        lambda bids: bids.window(tg.global_window()),
        "window after 'bids': a global window has no end: give it count=, or a trigger",
    ),
    "a global window with a number of records and a trigger": (
        lambda bids: bids.window(tg.global_window(count=3), early="1 s"),
        "window after 'bids': a window of 3 records is emitted when it is full",
    ),
    "nothing to purge": (
        lambda bids: windows(bids, purge=True),
        "window after 'bids': purge=True drops what a trigger has shown: give a trigger",
    ),
    "purging what late records need": (
        lambda bids: windows(bids, early="1 s", purge=True, allowed_lateness="1 s"),
        "window after 'bids': purge=True is for tumbling windows without allowed_lateness",
    ),
    "a lateness that is no duration": (
        lambda bids: windows(bids, allowed_lateness="late").aggregate("counts", n=tg.count()),
        "operator 'counts', allowed_lateness: 'late' is not a duration",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_found_when_the_job_is_built(bids: Stream, mistake: tuple[Callable[[Stream], Any], str]) -> None:
    call, message = mistake
    with pytest.raises(tg.JobError) as raised:
        call(bids)
    assert str(raised.value).startswith(message)


def test_explain_shows_the_windows_and_their_aggregates(bids: Stream) -> None:
    windows(bids).aggregate("counts", n=tg.count(), total=tg.sum("price")).as_append().to("out", Nowhere())
    purging = windows(bids, trigger=tg.every_records(5) | tg.after("1 s"), purge=True)
    purging.aggregate("purging", n=tg.count()).to("out 2", Nowhere())
    text = explain_logical(bids._pipeline.build())
    assert "tumbling(ts, 10000 ms): n=count(), total=sum(price)" in text
    assert "tumbling(ts, 10000 ms), shown every 5 records or after 1000 ms, purging: n=count()" in text


def test_a_windowed_stream_says_what_to_call_on_it(bids: Stream) -> None:
    with pytest.raises(AttributeError, match=r"a windowed stream has no 'map': call \.aggregate"):
        windows(bids).map(bool)
