"""Whatever is given to a public class or function, it works or is a `JobError` that names the argument: nothing else."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tidegate as tg
from tidegate.testing import ExperimentalSnapshots, ProcessJob

Build = Callable[..., Any]
SCHEMA = "id long, name string"


def made(split: int, start: int, count: int) -> dict[str, list[int]]:
    return {}


def untyped(wrong: Any) -> Any:
    """What a type checker wouldn't let through."""
    return wrong


def idle_handle() -> tg.Handle:
    """One that nothing is behind: what is asked of it is refused before it is passed on."""
    nothing: Any = None
    return tg.Handle("job", nothing, nothing, nothing, nothing)


def on_handle(method: str) -> Build:
    def build(timeout: Any, **rest: Any) -> None:
        getattr(idle_handle(), method)(timeout=timeout, **rest)

    return build


# With what they can be built, and every argument there is in turn gets something else.
PUBLIC: dict[str, tuple[Build, dict[str, Any]]] = {
    "Snapshots": (tg.Snapshots, {"to": "memory://s"}),
    "ExperimentalSnapshots": (ExperimentalSnapshots, {"to": "memory://s", "protocol": "stop_the_world"}),
    "Tuning": (tg.Tuning, {}),
    "FixedDelay": (tg.FixedDelay, {"attempts": 1, "delay": "1 s"}),
    "Exponential": (tg.Exponential, {"initial": "1 s", "maximum": "1 minute"}),
    "RocksDB": (tg.RocksDB, {}),
    "Evolution": (tg.Evolution, {}),
    "Job": (tg.Job, {"name": "job", "slots": 1, "snapshots": tg.Snapshots(to="memory://s")}),
    "ProcessJob": (ProcessJob, {"name": "job", "slots": 1, "snapshots": tg.Snapshots(to="memory://s")}),
    "value": (tg.value, {"type": "long"}),
    "list": (tg.list, {"type": "long"}),
    "map": (tg.map, {"key": "string", "value": "long"}),
    "reducing": (tg.reducing, {"type": "long", "function": max}),
    "aggregating": (tg.aggregating, {"type": "long", "create": int, "add": max}),
    "operator_list": (tg.operator_list, {"type": "long"}),
    "broadcast_map": (tg.broadcast_map, {"key": "string", "value": "long"}),
    "pickled": (tg.pickled, {}),
    "sources.generator": (tg.sources.generator, {"make": made, "schema": SCHEMA}),
    "sources.generator by row": (
        lambda make_row: tg.sources.generator(make_row=make_row, schema=SCHEMA),
        {"make_row": lambda number: (number, "x")},
    ),
    "sources.rows": (tg.sources.rows, {"values": [(1, "a")], "schema": SCHEMA}),
    "sources.parquet": (tg.sources.parquet, {"path": "events/", "schema": SCHEMA}),
    "sources.json": (tg.sources.json, {"path": "events/", "schema": SCHEMA}),
    "sources.csv": (tg.sources.csv, {"path": "events/", "schema": SCHEMA}),
    "sinks.parquet": (tg.sinks.parquet, {"path": "counts/"}),
    "sinks.print": (tg.sinks.print, {}),
}
CASES = [(name, argument) for name, (build, _) in PUBLIC.items() for argument in inspect.signature(build).parameters]
TIMED = ["snapshot", "savepoint", "stop", "rescale", "cancel", "wait"]

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.just(object()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@pytest.mark.parametrize(("name", "argument"), CASES)
def test_what_cant_be_an_argument_is_refused_by_name(name: str, argument: str) -> None:
    build, good = PUBLIC[name]
    build(**good)
    for wrong in (object(), b"\0", 1j, (object(),)):
        with pytest.raises(tg.JobError) as refused:
            build(**{**good, argument: wrong})
        if argument not in ("type", "key", "value", "values", "schema", "spark"):
            assert argument in str(refused.value)


@pytest.mark.parametrize(("name", "argument"), CASES)
@settings(max_examples=40, deadline=None)
@given(given=ANYTHING)
def test_anything_works_or_is_refused(name: str, argument: str, given: Any) -> None:
    build, good = PUBLIC[name]
    with contextlib.suppress(tg.JobError):
        build(**{**good, argument: given})


@pytest.mark.parametrize("method", TIMED)
@pytest.mark.parametrize("wrong", [object(), "soon", -1, [], True, float("nan")])
def test_a_timeout_that_is_no_duration_is_refused(method: str, wrong: object) -> None:
    more = {"to": "folder"} if method == "savepoint" else {}
    with pytest.raises(tg.JobError, match=rf"Handle\.{method}\(timeout=.*: give a duration"):
        on_handle(method)(wrong, **more)


@pytest.mark.parametrize("method", TIMED)
@pytest.mark.parametrize("number", [60, 0.5])
def test_a_timeout_without_a_unit_is_refused_because_it_could_be_seconds(method: str, number: float) -> None:
    more = {"to": "folder"} if method == "savepoint" else {}
    message = rf"Handle\.{method}\(timeout={number}\): give the unit, too: '{number} s' or '{number} ms'"
    with pytest.raises(tg.JobError, match=message):
        on_handle(method)(number, **more)


@pytest.mark.parametrize(
    "build",
    [
        lambda number: tg.Snapshots(to="s", every=number),
        lambda number: tg.Snapshots(to="s", alignment_timeout=number),
        lambda number: tg.Tuning(heartbeat_timeout=number),
        lambda number: tg.FixedDelay(attempts=1, delay=number),
        lambda number: tg.sources.json("x", schema=SCHEMA, discover_every=number),
    ],
)
def test_a_setting_without_a_unit_is_refused_because_it_could_be_seconds(build: Callable[[Any], Any]) -> None:
    with pytest.raises(tg.JobError, match=r"=5\): give the unit, too: '5 s' or '5 ms'"):
        build(5)


def test_zero_needs_no_unit() -> None:
    assert tg.Snapshots(to="s", min_pause=0).coordinator_settings().min_pause_ms == 0
    assert tg.FixedDelay(attempts=1, delay=0).delay_ms == 0


def test_folders_for_savepoints_are_texts() -> None:
    with pytest.raises(tg.JobError, match=r"Handle\.savepoint\(to=3\): give a folder"):
        idle_handle().savepoint(untyped(3))
    with pytest.raises(tg.JobError, match=r"Handle\.stop\(savepoint=3\): give a folder"):
        idle_handle().stop(savepoint=untyped(3))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: tg.Snapshots(to=""), "Snapshots(to=''): give the folder"),
        (lambda: tg.Snapshots(to="s", retain=True), "Snapshots(retain=True): give a whole number from 0 up"),
        (
            lambda: tg.Snapshots(to="s", local_copies_size="16 parsecs"),
            "local_copies_size='16 parsecs'): give a size, such as",
        ),
        (lambda: tg.Tuning(linger="2 fortnights"), "Tuning(linger='2 fortnights'): give a duration, such as '5 seconds'"),
        (lambda: tg.Tuning(chaining=untyped(1)), "Tuning(chaining=1): give True or False"),
        (lambda: tg.Tuning(heartbeat="0 s"), "Tuning(heartbeat='0 s'): give a duration of at least 1 ms"),
        (
            lambda: tg.Exponential(initial="1 s", maximum="2 s", multiplier=float("inf")),
            "multiplier=inf): give a number from 1 up",
        ),
        (lambda: tg.RocksDB(memory="1 MB"), "RocksDB(memory='1 MB'): give at least"),
        (lambda: tg.Job("j", slots=1, drop_state="count"), "Job(drop_state='count'): give a list of names, as in"),
        (lambda: tg.reducing("long", untyped(3)), "reducing(function=3): give a function"),
        (lambda: tg.value("long", name=""), "value(name=''): give a name"),
        (lambda: tg.value("long", ttl="soon"), "ttl='soon'): give a duration"),
        (lambda: tg.sources.csv("x", schema=SCHEMA, header=untyped("yes")), "sources.csv(header='yes'): give True or False"),
        (lambda: tg.plan_restore(untyped("job"), "folder"), "plan_restore('job', …): give the job"),
    ],
)
def test_the_message_says_what_to_give(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(tg.JobError) as refused:
        build()
    assert message in str(refused.value)


def test_sizes_and_durations_may_be_texts_or_numbers() -> None:
    assert tg.Tuning(loop_memory="1.5 KB").loop_memory_bytes == tg.Tuning(loop_memory=1_536).loop_memory_bytes == 1_536
    assert tg.Tuning(heartbeat="1 minute 30 s", heartbeat_timeout="1 hour").heartbeat_ms == 90_000
    assert tg.Snapshots(to="s").local_copies_bytes == 16 << 30
    assert tg.Exponential(initial="5 ms", maximum="2 s", reset_after="1 day").reset_after_ms == 86_400_000
