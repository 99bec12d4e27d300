"""A timer of event time where event time never moves is reported once, and only there."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

import pytest

import tidegate as tg
from tests.jobs import until
from tests.unit.dataflow.test_optimiser import Nowhere
from tests.unit.jobs.conftest import Bench
from tests.unit.jobs.test_job_backends import BACKENDS
from tidegate.connectors.handover import HandedSource, Handover
from tidegate.control.no_event_time import check_windows, operators_without_event_time, warnings_of
from tidegate.dataflow.optimiser import make_plan
from tidegate.dataflow.pipeline import Pipeline
from tidegate.testing.processes import ProcessJob
from tidegate.types import parse_schema

RECORD = "key long, at long"


class Sets(tg.KeyedProcess):
    """A timer for each record, and tells what it has."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def process(self, record: Any, ctx: Any) -> Any:
        getattr(ctx.timers, self._kind)(record.at + 3_600_000 + (ctx.now_ms() if self._kind == "processing_time" else 0))
        yield record.key, record.at

    def on_timer(self, at: int, ctx: Any) -> None: ...


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "tidegate.job" and record.levelno >= logging.WARNING
    ]


def started(
    bench: Bench, kind: str, *, backend: str = "heap", rows: int | None = None, with_event_time: bool = False
) -> tg.Handle:
    job = ProcessJob(
        "job",
        slots=2,
        backend=BACKENDS[backend],
        restart=tg.FixedDelay(attempts=20, delay=0),
        snapshots=tg.Snapshots(to=str(bench.snapshots), every="50 ms"),
    )
    source = tg.sources.generator(make_row=lambda i: (i % 7, i), schema=RECORD, rows=rows, rate=2000)
    stream = job.source("in", source)
    stream = stream.with_watermark("at", "1 second") if with_event_time else stream
    stream.key_by("key").process("sets timers", Sets(kind), returns=RECORD).to("out", tg.sinks.collect())
    return bench.start(job)


def run_a_while(handle: tg.Handle) -> None:
    until(lambda: len(handle.results("out")) > 20, "output", handle=handle)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_timer_of_event_time_that_can_not_fire_is_one_warning(
    bench: Bench, caplog: pytest.LogCaptureFixture, backend: str
) -> None:
    handle = started(bench, "event_time", backend=backend)
    run_a_while(handle)
    os.kill(handle.attempts[-1].slots[0], signal.SIGKILL)
    until(lambda: len(handle.attempts) == 2 and handle.attempts[-1].first_record_ms, "another attempt", handle=handle)
    seen = len(handle.results("out"))
    until(lambda: len(handle.results("out")) > seen, "more output", handle=handle)
    handle.cancel()
    told = [text for text in warnings(caplog) if "event time" in text]
    assert len(told) == 1, "not by each slot, and not again after a restart"
    assert told[0].startswith(
        "Job 'job', attempt 1: operator 'sets timers' has set a timer of event time, and event time doesn't move"
    )
    assert ".with_watermark(column, delay)" in told[0]


@pytest.mark.parametrize(
    ("kind", "more"), [("processing_time", {}), ("event_time", {"with_event_time": True}), ("event_time", {"rows": 300})]
)
def test_who_needs_no_watermark_is_told_nothing(
    bench: Bench, caplog: pytest.LogCaptureFixture, kind: str, more: dict[str, Any]
) -> None:
    handle = started(bench, kind, **more)
    run_a_while(handle)
    handle.stop()
    assert warnings(caplog) == []


def test_which_operators_these_are() -> None:
    pipeline = Pipeline()
    left, right, ends = (
        pipeline.source(name, tg.sources.generator(make_row=lambda i: (i, i), schema=RECORD, rows=rows, rate=1))
        for name, rows in (("l", None), ("r", None), ("e", 5))
    )
    left.with_watermark("at", 0, name="watermark").union(right).key_by("key").process(
        "both", Sets("event_time"), returns=RECORD
    ).to("out", Nowhere())
    right.union(ends).key_by("key").process("none", Sets("event_time"), returns=RECORD).to("rest", Nowhere())
    ends.key_by("key").process("ends", Sets("event_time"), returns=RECORD).to("end", Nowhere())
    plan = make_plan(pipeline.build(), slots=2, key_group_count=8)
    assert operators_without_event_time(plan, micro_batches=False) == {"l", "r", "none", "rest"}
    handed = Pipeline()
    (
        handed.source("in", HandedSource(Handover([parse_schema(RECORD)]), 0, parse_schema(RECORD)))
        .key_by("key")
        .process("sets", Sets("event_time"), returns=RECORD)
        .to("out", Nowhere())
    )
    plan = make_plan(handed.build(), slots=2, key_group_count=8)
    assert operators_without_event_time(plan, micro_batches=False) == set(), "a batch ends, and event time with it"
    assert "sets" in operators_without_event_time(plan, micro_batches=True)


@pytest.mark.parametrize("timed", [0, 1, 2])
@pytest.mark.parametrize("rows", [None, 5])
@pytest.mark.parametrize("kind", ["interval", "temporal", "windows"])
def test_a_join_without_watermarks_on_both_sides_is_warned_of_when_the_job_starts(
    kind: str, rows: int | None, timed: int
) -> None:
    pipeline, sides = Pipeline(), []
    for number, schema in enumerate(("key long, at long", "key long, since long")):
        source = tg.sources.generator(make_row=lambda i: (i, i), schema=schema, rows=rows, rate=1)
        side = pipeline.source(f"in {number}", source)
        sides.append((side.with_watermark(parse_schema(schema).names[1], 0) if number < timed else side).key_by("key"))
    left, right = sides
    if kind == "interval":
        joined = left.join("joined", right, between=(0, "1 s"), times=("at", "since"))
    elif kind == "temporal":
        joined = left.join("joined", right, as_of=("at", "since"))
    else:
        joined = left.window(tg.tumbling("at", 10)).join("joined", right.window(tg.tumbling("since", 10)))
    joined.to("out", Nowhere())
    told = warnings_of(make_plan(pipeline.build(), slots=2, key_group_count=8))
    assert len(told) == (timed < 2 and rows is None)
    for text in told:
        assert text.startswith("operator 'joined' joins by event time, and event time doesn't move in both of its inputs")
        assert text.endswith("Use .with_watermark(column, delay) behind both sources.")


def test_windows_without_a_watermark_are_warned_of_when_the_job_starts(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    job = bench.job()
    source = tg.sources.generator(make_row=lambda i: (i % 7, i), schema=RECORD, rate=2000)
    windows = job.source("in", source).key_by("key").window(tg.tumbling("at", 10))
    windows.aggregate("windows", n=tg.count()).to("out", tg.sinks.collect())
    handle = bench.start(job)
    handle.cancel()
    told = [text for text in warnings(caplog) if "event time" in text]
    assert len(told) == 1 and told[0].startswith("Job 'job': operator 'windows' has windows of event time"), told


@pytest.mark.parametrize("is_query", [True, False])
def test_over_without_a_watermark_is_said_to_order_records(is_query: bool) -> None:
    pipeline, schema = Pipeline(), parse_schema(RECORD)
    source = tg.sources.generator(make_row=lambda i: (i, i), schema=RECORD, rate=1)
    handed = HandedSource(Handover([schema]), 0, schema)
    stream = pipeline.source("in", handed if is_query else source).key_by("key").over("last", "at", 2, n=tg.count())
    stream.to("out", Nowhere())
    plan = make_plan(pipeline.build(), slots=2, key_group_count=8)
    told = "operator 'last' takes records in the order of event time, and event time doesn't move"
    if is_query:
        with pytest.raises(tg.GraphError, match=told):
            check_windows(plan)
    else:
        assert [text.startswith(told) for text in warnings_of(plan)] == [True]


@pytest.mark.parametrize(
    ("window", "derived", "is_told"),
    [
        (tg.tumbling("created", 10), "key, at, created", True),
        (tg.sessions("created", 10), "key, at, created", True),
        (tg.tumbling("at", 10), "key, at, created", False),
        (tg.tumbling("hour", 10), "key, at, at - at % 3600 AS hour", False),
        (tg.tumbling("created", 10), "key, at AS created", False),
        (tg.global_window(count=10), "key, at, created", False),
    ],
)
def test_windows_over_another_column_than_the_watermarks_are_warned_of(window: Any, derived: str, is_told: bool) -> None:
    pipeline = Pipeline()
    source = tg.sources.generator(make_row=lambda i: (i, i, i), schema="key long, at long, created long", rows=5, rate=1)
    read = pipeline.source("in", source).with_watermark("at", 0).select(*derived.split(", ")).key_by("key")
    read.window(window).aggregate("windows", n=tg.count()).to("out", Nowhere())
    told = warnings_of(make_plan(pipeline.build(), slots=2, key_group_count=8))
    assert len(told) == is_told
    for text in told:
        assert text.startswith("operator 'windows' has windows over the column 'created', and the watermark")


def test_both_sides_of_a_join_of_windows_are_looked_at() -> None:
    pipeline, sides = Pipeline(), []
    for number, names in enumerate((("at", "created"), ("since", "made"))):
        schema = f"key long, {names[0]} long, {names[1]} long"
        source = tg.sources.generator(make_row=lambda i: (i, i, i), schema=schema, rows=5, rate=1)
        side = pipeline.source(f"in {number}", source).with_watermark(names[0], 0).key_by("key")
        sides.append(side.window(tg.tumbling(names[number], 10)))
    sides[0].join("joined", sides[1]).to("out", Nowhere())
    (text,) = warnings_of(make_plan(pipeline.build(), slots=2, key_group_count=8))
    assert text.startswith("operator 'joined' has windows over the column 'made', and the watermark")


@pytest.mark.parametrize("timed", [0, 1, 2])
def test_a_query_with_a_join_needs_watermarks_on_both_sides(timed: int) -> None:
    pipeline = Pipeline()
    sides = []
    for number, schema in enumerate((parse_schema("key long, at long"), parse_schema("key long, since long"))):
        side = pipeline.source(f"in {number}", HandedSource(Handover([schema]), 0, schema))
        sides.append((side.with_watermark(schema.names[1], 0) if number < timed else side).key_by("key"))
    sides[0].join("latest", sides[1], as_of=("at", "since")).to("out", Nowhere())
    plan = make_plan(pipeline.build(), slots=2, key_group_count=8)
    if timed == 2:
        check_windows(plan)
        return
    with pytest.raises(tg.GraphError, match=r"'latest' joins by event time.*on both"):
        check_windows(plan)


@pytest.mark.parametrize(
    ("window", "with_watermark", "settings", "is_refused"),
    [
        (tg.tumbling("at", 10), False, {}, True),
        (tg.sessions("at", 10), False, {}, True),
        (tg.tumbling("at", 10), True, {}, False),
        (tg.tumbling("at", 10), False, {"early": "10 s"}, False),
        (tg.tumbling(None, "10 ms", time="processing"), False, {}, False),
        (tg.global_window(count=10), False, {}, False),
    ],
)
def test_a_query_whose_windows_would_never_be_complete_is_refused(
    window: Any, with_watermark: bool, settings: dict[str, Any], is_refused: bool
) -> None:
    pipeline, schema = Pipeline(), parse_schema(RECORD)
    stream = pipeline.source("in", HandedSource(Handover([schema]), 0, schema))
    stream = stream.with_watermark("at", 0) if with_watermark else stream
    counts = stream.key_by("key").window(window, **settings).aggregate("windows", n=tg.count())
    counts.as_append().to("out", Nowhere())
    plan = make_plan(pipeline.build(), slots=2, key_group_count=8)
    if not is_refused:
        check_windows(plan)
        return
    with pytest.raises(tg.GraphError, match=r"'windows' has windows of event time.*call \.with_watermark"):
        check_windows(plan)
