"""What `apply`, `join` and `cogroup` add to a job, and mistakes that are found when the job is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import tidegate as tg
from tests.unit.dataflow.described import Nowhere, Records
from tidegate.dataflow.explain import explain_logical
from tidegate.dataflow.pipeline import Pipeline
from tidegate.types import ddl_of

BIDS = "auction long, price double NOT NULL, ts timestamp NOT NULL"
ASKS = "auction long, least double, at timestamp"
OTHERS = "id long, least double, at timestamp"
SIZE = "10 s"


class Streams:
    """Streams of one job."""

    def __init__(self) -> None:
        self.pipeline = Pipeline()
        self.bids, self.asks, self.others = (
            self.pipeline.source(name, Records(schema))
            for name, schema in (("bids", BIDS), ("asks", ASKS), ("others", OTHERS))
        )

    def of_bids(self, window: Any = None, **rest: Any) -> Any:
        return self.bids.key_by("auction").window(tg.tumbling("ts", SIZE) if window is None else window, **rest)

    def of_asks(self, window: Any = None, **rest: Any) -> Any:
        return self.asks.key_by("auction").window(tg.tumbling("at", SIZE) if window is None else window, **rest)

    def of_others(self) -> Any:
        return self.others.key_by("id").window(tg.tumbling("at", SIZE))


@pytest.fixture
def streams() -> Streams:
    return Streams()


def function(window: tg.KeyedWindow, records: Any) -> None: ...


def both(window: tg.KeyedWindow, left: Any, right: Any) -> None: ...


BOUNDS = ", window_start timestamp NOT NULL, window_end timestamp NOT NULL"


@pytest.mark.parametrize(
    ("how", "columns"),
    [
        ("inner", "auction long, price double NOT NULL, ts timestamp NOT NULL, least double, at timestamp"),
        ("left", "auction long, price double NOT NULL, ts timestamp NOT NULL, least double, at timestamp"),
        ("right", "auction long, price double, ts timestamp, least double, at timestamp"),
        ("full", "auction long, price double, ts timestamp, least double, at timestamp"),
        ("semi", BIDS),
        ("anti", BIDS),
    ],
)
def test_a_join_has_the_columns_of_both_sides_and_a_key_of_one_name_once(streams: Streams, how: str, columns: str) -> None:
    assert ddl_of(streams.of_bids().join("joined", streams.of_asks(), how=how).schema) == columns + BOUNDS


def test_columns_of_the_key_that_have_two_names_both_stay(streams: Streams) -> None:
    joined = streams.of_bids().join("joined", streams.of_others())
    assert joined.schema.names == ["auction", "price", "ts", "id", "least", "at", "window_start", "window_end"]


def test_late_records_of_each_side_go_to_its_side_output(streams: Streams) -> None:
    joined = streams.of_bids(late="late bids").join("joined", streams.of_asks(late="late asks"))
    assert joined.side_output("late bids").schema == streams.bids.schema
    assert joined.side_output("late asks").schema == streams.asks.schema


def test_explain_shows_what_is_made_of_the_records(streams: Streams) -> None:
    streams.of_bids().join("joined", streams.of_asks(), how="full").to("out", Nowhere())
    streams.of_bids().apply("applied", function, returns="n long").to("out 2", Nowhere())
    streams.of_bids().cogroup("grouped", streams.of_asks(), both, returns="n long").to("out 3", Nowhere())
    early = streams.of_bids(trigger=tg.every_records(9) | tg.after("1 s"), purge=True)
    early.apply("shown", function, returns="n long").to("out 4", Nowhere())
    forever = streams.of_bids(tg.global_window(), early="2 s")
    forever.apply("forever", function, returns="n long").to("out 5", Nowhere())
    streams.others.to("rest", Nowhere())
    text = explain_logical(streams.pipeline.build())
    for shown in (
        "tumbling(ts, 10000 ms): full join",
        "tumbling(ts, 10000 ms): function",
        "tumbling(ts, 10000 ms): both",
        "tumbling(ts, 10000 ms), shown every 9 records or after 1000 ms, purging: function",
        "global, shown after 2000 ms: function",
    ):
        assert shown in text


MISTAKES: dict[str, tuple[Callable[[Streams], Any], str]] = {
    "a kind of join that there is not": (
        lambda streams: streams.of_bids().join("joined", streams.of_asks(), how="outer"),
        "operator 'joined': how='outer' is not a kind of join (do you mean 'full'?); give one of 'inner', 'left'",
    ),
    "a stream without windows": (
        lambda streams: streams.of_bids().join("joined", streams.asks.key_by("auction")),
        "operator 'joined': join takes a stream in windows, not a keyed stream; give other.key_by(…).window(…)",
    ),
    "other windows": (
        lambda streams: streams.of_bids().join("joined", streams.of_asks(tg.tumbling("at", "5 s"))),
        "operator 'joined': the left input is in windows tumbling(ts, 10000 ms), and the right one in tumbling(at, 5000 ms)",
    ),
    "a key of another type": (
        lambda streams: streams.of_bids().join("joined", streams.asks.key_by("least").window(tg.tumbling("at", SIZE))),
        "operator 'joined': the left key is (auction long), the right one (least double)",
    ),
    "no key on one side": (
        lambda streams: streams.of_bids().join("joined", streams.asks.window(tg.tumbling("at", SIZE))),
        "operator 'joined': one input has a key, and the other has none",
    ),
    "a column that both sides have": (
        lambda streams: streams.of_bids().join("joined", streams.of_bids()),
        "operator 'joined': both inputs have a column 'price': rename one before window(…), such as with "
        "select('price AS right_price', …)",
    ),
    "a column with the name of a bound": (
        lambda streams: (
            streams.asks.with_columns(window_end="least")
            .key_by("auction")
            .window(tg.tumbling("at", SIZE))
            .join("joined", streams.of_bids())
        ),
        "operator 'joined': the result has a column 'window_end' for the window's bounds: rename it",
    ),
    "another job": (
        lambda streams: streams.of_bids().join("joined", Streams().of_asks()),
        "operator 'joined': the two streams are of different jobs",
    ),
    "late records again": (
        lambda streams: streams.of_bids(allowed_lateness="1 s").join("joined", streams.of_asks()),
        "operator 'joined': a join takes no late records: omit allowed_lateness",
    ),
    "one side output for both": (
        lambda streams: streams.of_bids(late="late").cogroup("joined", streams.of_asks(late="late"), both, returns="n long"),
        "operator 'joined': both inputs have late='late'",
    ),
    "sessions on one side": (
        lambda streams: streams.of_bids(tg.sessions("ts", SIZE)).join("j", streams.of_asks()),
        "operator 'j': the left input is in windows sessions(ts, 10000 ms), and the right one in tumbling(at, 10000 ms)",
    ),
    "sessions with other gaps": (
        lambda streams: streams.of_bids(tg.sessions("ts", SIZE)).join("j", streams.of_asks(tg.sessions("at", "1 s"))),
        "operator 'j': the left input is in windows sessions(ts, 10000 ms), and the right one in sessions(at, 1000 ms)",
    ),
    "windows of a number of records": (
        lambda streams: streams.of_bids(tg.global_window(count=3)).join("j", streams.of_asks(tg.global_window(count=3))),
        "operator 'j': it needs windows of event time, and not global(3 records); without windows, left.key_by(…).join(",
    ),
    "windows of processing time": (
        lambda streams: streams.of_bids(tg.tumbling(None, SIZE, time="processing")).apply("f", function, returns="n long"),
        "operator 'f': it needs windows of event time, and not tumbling(processing time",
    ),
    "a trigger": (
        lambda streams: streams.of_bids(early="1 s").join("joined", streams.of_asks()),
        "operator 'joined': a join emits each window once, when it is complete: omit early= and trigger=",
    ),
    "a function of one argument": (
        lambda streams: streams.of_bids().apply("applied", lambda records: None, returns="n long"),
        "operator 'applied': <lambda>",
    ),
    "no function": (
        lambda streams: streams.of_bids().cogroup("grouped", streams.of_asks(), 5, returns="n long"),
        "operator 'grouped': cogroup takes a function, not 5",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_found_when_the_job_is_built(streams: Streams, mistake: tuple[Callable[[Streams], Any], str]) -> None:
    call, message = mistake
    with pytest.raises(tg.JobError) as raised:
        call(streams)
    assert str(raised.value).startswith(message)
