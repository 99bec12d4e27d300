"""The broadcast operator: one side writes what the other may only read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import tidegate as tg
from tests.unit.operators.harness import Bench
from tidegate.dataflow.operators.broadcast import BroadcastProcessSpec
from tidegate.errors import UserFunctionError

MAIN, RULES = "player string, kind string, value double", "kind string, limits array<double>"


class Apply(tg.BroadcastProcess):
    rules = tg.broadcast_map("string", "array<double>")
    alarms = tg.value("long", default=0)

    def process(self, event: Any, ctx: Any) -> Iterator[Any]:
        limits = self.rules.get(event.kind)
        if limits and event.value > limits[0]:
            self.alarms.set(self.alarms.get() + 1)
            yield event.player, self.alarms.get()

    def process_broadcast(self, rule: Any, ctx: Any) -> Iterator[Any]:
        assert ctx.key is None
        if rule.limits is None:
            self.rules.remove(rule.kind)
        else:
            self.rules.put(rule.kind, rule.limits)
        yield f"rule {rule.kind}", len(self.rules)


class Plain(tg.BroadcastProcess):
    """On a stream without key."""

    rules = tg.broadcast_map("string", "array<double>")

    def process(self, event: Any, ctx: Any) -> Iterator[Any]:
        yield event.player, len(self.rules)

    def process_broadcast(self, rule: Any, ctx: Any) -> None:
        self.rules.put(rule.kind, rule.limits)


def applying(function: tg.BroadcastProcess | None = None, key: tuple[str, ...] = ("player",), **more: Any) -> Bench:
    return Bench(
        BroadcastProcessSpec(function or Apply(), key),
        MAIN,
        RULES,
        returns="player string, n long",
        name="apply rules",
        **more,
    )


def test_the_main_side_sees_what_the_broadcast_side_wrote() -> None:
    bench = applying()
    assert bench.feed(("ann", "jump", 5.0)) == []
    assert bench.feed(("jump", [3.0]), ("run", [9.0]), port=1) == [("rule jump", 1), ("rule run", 2)]
    assert bench.feed(("ann", "jump", 5.0), ("bob", "jump", 4.0), ("ann", "jump", 3.5), ("ann", "run", 3.5)) == [
        ("ann", 1),
        ("bob", 1),
        ("ann", 2),
    ]
    bench.feed(("jump", None), port=1)
    assert bench.feed(("ann", "jump", 5.0)) == []


def test_both_kinds_of_state_are_restored() -> None:
    first = applying()
    first.feed(("jump", [3.0]), port=1)
    first.feed(("ann", "jump", 5.0))
    assert applying(restored=first.freeze()).feed(("ann", "jump", 5.0)) == [("ann", 2)]


def test_subtask_0_writes_broadcast_state_for_all() -> None:
    written = []
    for subtask in range(3):
        bench = applying(subtask=subtask, parallelism=3)
        bench.feed(("jump", [3.0]), port=1)
        written.append(sum(rows.num_rows for rows in bench.freeze()["rules"]))
    assert written == [1, 0, 0]


@pytest.mark.parametrize("write", ["put", "remove", "clear"])
def test_the_main_side_can_t_write(write: str) -> None:
    class Writes(Apply):
        def process(self, event: Any, ctx: Any) -> Iterator[Any]:
            getattr(self.rules, write)(*{"put": ("jump", [1.0]), "remove": ("jump",), "clear": ()}[write])
            yield from ()

    bench = applying(Writes())
    bench.feed(("jump", [3.0]), port=1)
    with pytest.raises(UserFunctionError, match="'rules' can be written in process_broadcast only") as failed:
        bench.feed(("ann", "jump", 5.0))
    assert failed.value.operator == "apply rules"
    assert sum(rows.num_rows for rows in bench.freeze()["rules"]) == 1


def test_the_main_side_can_t_write_even_after_the_broadcast_side_failed() -> None:
    class Writes(Apply):
        def process(self, event: Any, ctx: Any) -> Iterator[Any]:
            self.rules.clear()
            yield from ()

    bench = applying(Writes())
    with pytest.raises(UserFunctionError, match="is declared with keys"):
        bench.feed((None, [3.0]), port=1)
    with pytest.raises(UserFunctionError, match="process_broadcast only"):
        bench.feed(("ann", "jump", 5.0))


def test_what_the_main_side_does_to_what_it_read_changes_nothing() -> None:
    class Spoils(Apply):
        def process(self, event: Any, ctx: Any) -> Iterator[Any]:
            rule: Any = self.rules.get(event.kind)
            rule.append(0.0)
            yield event.player, len(self.rules.get(event.kind, ()))

    bench = applying(Spoils())
    bench.feed(("jump", [3.0]), port=1)
    assert bench.feed(("ann", "jump", 5.0), ("ann", "jump", 5.0)) == [("ann", 1), ("ann", 1)]


@pytest.mark.parametrize("use", ["state", "timers"])
def test_there_is_no_key_on_the_broadcast_side(use: str) -> None:
    class Careless(Apply):
        def process_broadcast(self, rule: Any, ctx: Any) -> Iterator[Any]:
            self.alarms.set(1) if use == "state" else ctx.timers.event_time(1)
            yield from ()

    bench = applying(Careless())
    bench.feed(("ann", "jump", 5.0))
    with pytest.raises(UserFunctionError, match="no key here") as failed:
        bench.feed(("jump", [3.0]), port=1)
    assert failed.value.record == "Row(kind='jump', limits=[3.0])"


def test_timers_fire_with_the_broadcast_state_to_read() -> None:
    class Later(Apply):
        def process(self, event: Any, ctx: Any) -> None:  # type: ignore[override]
            ctx.timers.event_time(10)

        def on_timer(self, at: int, ctx: Any) -> Iterator[Any]:
            yield ctx.key, len(self.rules)

    bench = applying(Later())
    bench.feed(("ann", "jump", 5.0))
    bench.feed(("jump", [3.0]), port=1)
    bench.operator.on_watermark(10)
    assert bench.out.rows[-1] == ("ann", 1)


def test_the_main_stream_need_not_be_keyed() -> None:
    first = applying(Plain(), key=())
    first.feed(("jump", [3.0]), port=1)
    assert first.feed(("ann", "jump", 5.0)) == [("ann", 1)]
    assert applying(Plain(), key=(), restored=first.freeze()).feed(("ann", "jump", 5.0)) == [("ann", 1)]
