"""Joins by event time, joins of windows and windows whose inputs are idle for a time, late and disordered.

An idle input holds nothing back. What comes after it is late or in time, by the watermark that the others have reached.
Nothing is lost or doubled, and what is late is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from tests.unit.operators.harness import GROUPS, on_heap
from tests.unit.operators.idle_inputs import Inputs, Record, Subject, check_idle_run
from tests.unit.operators.joining import Joins
from tests.unit.operators.test_function_windows import spec_of as session_function
from tests.unit.operators.test_interval_join import KINDS, IntervalOracle
from tests.unit.operators.test_interval_join import spec_of as interval_spec
from tests.unit.operators.test_record_windows import HALF_JOINED, JOINED, OTHERS, JoinOracle, function_spec, join_spec
from tests.unit.operators.test_session_joins import SessionJoinOracle
from tests.unit.operators.test_temporal_join import TemporalOracle
from tests.unit.operators.test_temporal_join import spec_of as temporal_spec
from tests.unit.operators.test_windows_on_rocksdb import on_rocksdb
from tests.unit.operators.window_oracle import oracle_of
from tests.unit.operators.windowing import RECORDS, Windows, group, spec_of
from tidegate.dataflow.operators import timed_records
from tidegate.dataflow.windows import sessions, sliding, tumbling

BACKENDS = pytest.mark.parametrize("make_backend", [on_heap, on_rocksdb])
HOW = ["inner", "left", "right", "full", "semi", "anti"]


@pytest.fixture(autouse=True)
def small_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_records, "MIN_STRETCH_MS", 4)


def seeds_of(make_backend: Any) -> range:
    return range(6 if make_backend is on_heap else 2)


def joins_by_time(spec: Any, oracle: Any, make_backend: Any) -> Subject:
    joins = Joins(replace(spec, late=(None, None)), make_backend=make_backend)
    return Subject(joins, oracle.on_records, lambda at_ms: oracle.on_watermark(at_ms, range(GROUPS)), oracle.results)


def joins_of_windows(spec: Any, how: str, oracle: JoinOracle, make_backend: Any) -> Subject:
    returns = HALF_JOINED if how in ("semi", "anti") else JOINED
    windows = Windows(spec, inputs=(RECORDS, OTHERS), returns=returns, sides=(), make_backend=make_backend)
    fired: list[Any] = []
    return Subject(
        windows, oracle.on_records, lambda at_ms: fired.extend(oracle.on_watermark(at_ms, range(GROUPS))), lambda: fired
    )


def windows_of(spec: Any, assigner: Any, lateness_ms: int, make_backend: Any) -> Subject:
    oracle = oracle_of(assigner, group, lateness_ms=lateness_ms)
    fired: list[Any] = []

    def on_records(records: Sequence[Record], port: int) -> list[Record]:
        again, late = oracle.on_records(records)
        fired.extend(again)
        return late

    windows = Windows(spec, sides=(), make_backend=make_backend)
    return Subject(windows, on_records, lambda at_ms: fired.extend(oracle.on_watermark(at_ms, range(GROUPS))), lambda: fired)


@BACKENDS
@pytest.mark.parametrize("how", KINDS)
def test_interval_joins(how: str, make_backend: Any) -> None:
    for seed in seeds_of(make_backend):
        rng = Random(seed)
        spec = interval_spec(how, *rng.choice(((0, 10), (-7, 3), (5, 25), (-20, -4))))
        check_idle_run(joins_by_time(spec, IntervalOracle(spec), make_backend), ports=2, rng=rng)


@BACKENDS
@pytest.mark.parametrize("how", ["inner", "left"])
def test_temporal_joins(how: str, make_backend: Any) -> None:
    for seed in seeds_of(make_backend):
        spec = temporal_spec(how)
        check_idle_run(joins_by_time(spec, TemporalOracle(spec), make_backend), ports=2, rng=Random(seed))


@BACKENDS
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    "assigner", [tumbling("ts", 10), sliding("ts", 20, 5), sessions("ts", 10)], ids=lambda each: each.text
)
def test_joins_of_windows(assigner: Any, how: str, make_backend: Any) -> None:
    for seed in seeds_of(make_backend)[:3]:
        oracle = SessionJoinOracle(assigner, how) if assigner == sessions("ts", 10) else JoinOracle(assigner, how)
        check_idle_run(joins_of_windows(join_spec(assigner, how), how, oracle, make_backend), ports=2, rng=Random(seed))


@BACKENDS
@pytest.mark.parametrize("lateness_ms", [0, 17])
@pytest.mark.parametrize(
    "assigner", [tumbling("ts", 10), sliding("ts", 20, 5), sessions("ts", 10)], ids=lambda each: each.text
)
@pytest.mark.parametrize("make", [spec_of, "function"], ids=["aggregates", "function"])
def test_windows(make: Any, assigner: Any, lateness_ms: int, make_backend: Any) -> None:
    if make == "function":
        make = session_function if assigner == sessions("ts", 10) else function_spec
    for seed in seeds_of(make_backend)[:3]:
        spec = make(assigner, lateness_ms=lateness_ms)
        check_idle_run(windows_of(spec, assigner, lateness_ms, make_backend), ports=1, rng=Random(seed))


@pytest.mark.parametrize("idle_side", [0, 1])
@pytest.mark.parametrize("was_there", [False, True])
@pytest.mark.parametrize("kind", ["interval", "temporal", "tumbling", "sessions"])
def test_an_idle_side_does_not_hold_back_the_other_and_state_goes(kind: str, was_there: bool, idle_side: int) -> None:
    """The property above doesn't say that this happens at all."""
    if kind == "interval":
        subtask: Any = Joins(interval_spec("full", -10, 10))
    elif kind == "temporal":
        subtask = Joins(temporal_spec("left"))
    else:
        assigner = tumbling("ts", 10) if kind == "tumbling" else sessions("ts", 10)
        subtask = Windows(join_spec(assigner, "full"), inputs=(RECORDS, OTHERS), returns=JOINED)
    operator, inputs = subtask.benches[0].operator, Inputs(2, 0)
    quiet = [each for each in inputs.channels if each.port == idle_side]
    busy = [each for each in inputs.channels if each.port != idle_side]
    progress = [inputs.promise(each, 0) for each in quiet] if was_there else []
    progress += [inputs.promise(each, at_ms) for at_ms in (5, 200) for each in busy]
    subtask.feed([(1, 20, 1), (1, 50, 2), (2, 300, 3)], 1 - idle_side)
    progress += [inputs.be_idle(each) for each in quiet]
    for each in progress:
        if each is not None and hasattr(each, "at_ms"):
            operator.on_watermark(each.at_ms)
    subtask.finish_work()
    rows, _ = subtask.taken()
    state = subtask.benches[0].freeze()
    left = sum(batch.num_rows for batches in state.values() for batch in batches if "position" in batch.schema.names)
    if kind == "temporal" and idle_side == 0:
        assert not rows and left == 3, "versions stay"
    else:
        assert len(rows) == 2 and left == 1, f"{rows}"
