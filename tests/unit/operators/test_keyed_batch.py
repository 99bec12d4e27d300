"""Users' functions on columns: state, timers and side outputs, compared with a dictionary; restored and rescaled."""

from __future__ import annotations

import copy
from collections import defaultdict
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import tidegate as tg
from tests.unit.operators.harness import GROUPS, Bench, Restored, on_heap
from tests.unit.operators.windowing import own_part, subtask_of
from tidegate.dataflow.operators.budget import Budget
from tidegate.dataflow.operators.keyed_batch import KeyedBatchSpec
from tidegate.errors import JobError, SchemaError, UserFunctionError
from tidegate.protocol.watermarks import MAX_WATERMARK_MS
from tidegate.state.rocks_db import SlotMemory
from tidegate.state.rocksdb import RocksDB

RECORD = "key long, n long, x double"
OUT = "key long, n long, total double, name string"
SCHEMA = pa.schema([("key", pa.int64()), ("n", pa.int64()), ("total", pa.float64()), ("name", pa.string())])


class LittleMemory(SlotMemory):
    """So little that a backend forgets all that it may."""

    def allowed(self, user: object, used_bytes: float) -> float:
        return 1.0


def on_rocksdb(key_type: pa.DataType) -> Any:
    backend = RocksDB("16 MB").create(key_type=key_type, key_group_count=GROUPS)
    backend._memory = LittleMemory(16 << 20)
    return backend


BACKENDS = {"heap": on_heap, "rocksdb": on_rocksdb}


class Totals(tg.KeyedBatchProcess):
    """Counts and sums; a record with n = -1 deletes its key, and is taken last. Keys at their tenth record begin again in a
    while, by timers."""

    totals = tg.columns("n long NOT NULL, total double", defaults={"n": 0})
    names = tg.columns("name string, last long")

    def process(self, batch: pa.RecordBatch, ctx: tg.BatchContext) -> Any:
        keys = ctx.keys
        before = self.totals.get_many(keys)
        x = batch["x"].fill_null(0.0).to_numpy()
        n = before["n"].to_numpy() + np.bincount(keys.of)
        total = before["total"].fill_null(0.0).to_numpy() + np.bincount(keys.of, weights=x)
        self.totals.set_many(keys, n=n, total=total)
        last = batch["n"].take(pa.array(keys.last))
        self.names.set_many(keys, {"last": last})
        fresh = keys.where(self.names.get_many(keys)["name"].is_null())
        self.names.set_many(fresh, name=pa.array([f"key {key}" for key in fresh.columns["key"].to_pylist()], pa.string()))
        ctx.timers.event_time(keys.where(n == 10), batch["n"].to_numpy()[keys.last][n == 10] + 5)
        yield pa.record_batch(
            [keys.columns["key"], pa.array(n), pa.array(total), self.names.get_many(keys)["name"]], schema=SCHEMA
        )
        gone = np.zeros(len(keys), bool)
        gone[keys.of[batch["n"].to_numpy() == -1]] = True
        self.totals.delete_many(keys.where(gone))
        self.names.delete_many(keys.where(gone))
        assert not self.totals.contains_many(keys.where(gone)).any() and self.totals.contains_many(keys.where(~gone)).all()

    def on_timers(self, at: Any, ctx: tg.BatchContext) -> Any:
        keys = ctx.keys
        self.totals.delete_many(keys)
        ctx.side("begun", pa.record_batch([keys.columns["key"].take(pa.array(keys.of)), pa.array(at)], names=["key", "at"]))


class Oracle:
    def __init__(self) -> None:
        self.n: dict[Any, int] = defaultdict(int)
        self.total: dict[Any, float] = defaultdict(float)
        self.timers: set[tuple[int, Any]] = set()

    def feed(self, records: list[Any]) -> list[Any]:
        last = {}
        for key, n, x in records:
            self.n[key] += 1
            self.total[key] += x or 0.0
            last[key] = n
        out = [(key, self.n[key], self.total[key], f"key {key}") for key in last]
        self.timers |= {(n + 5, key) for key, n in last.items() if self.n[key] == 10}
        for key, n, _ in records:
            if n == -1:
                self.n.pop(key, None)
                self.total.pop(key, None)
        return out

    def advance(self, at_ms: int) -> list[Any]:
        due = sorted(each for each in self.timers if each[0] <= at_ms)
        self.timers -= set(due)
        for _, key in due:
            self.n.pop(key, None)
            self.total.pop(key, None)
        return [(key, at) for at, key in due]


class Subtasks:
    """All subtasks of a function on columns that is keyed by a long."""

    def __init__(self, make_backend: Any, parallelism: int, whole: Restored | None = None) -> None:
        self.make_backend = make_backend
        self.benches = [
            Bench(
                KeyedBatchSpec(Totals(), ("key",)),
                RECORD,
                returns=SCHEMA,
                sides={"begun": "key long, at long"},
                restored=None if whole is None else own_part(whole, subtask, parallelism),
                subtask=subtask,
                parallelism=parallelism,
                make_backend=make_backend,
            )
            for subtask in range(parallelism)
        ]

    def feed(self, records: list[Any]) -> list[Any]:
        rows = []
        for subtask, bench in enumerate(self.benches):
            own = [each for each in records if subtask_of(each[0], len(self.benches)) == subtask]
            if own:
                rows += bench.feed(*own)
            bench.operator.maintain(1000)
        return rows

    def advance(self, at_ms: int) -> list[Any]:
        for bench in self.benches:
            bench.operator.on_watermark(at_ms)
        rows = [row for bench in self.benches for row in bench.sides["begun"].rows]
        for bench in self.benches:
            bench.sides["begun"].events.clear()
        return rows

    def restored(self, parallelism: int) -> Subtasks:
        whole: Restored = {}
        for bench in self.benches:
            for state, batches in bench.freeze().items():
                whole.setdefault(state, []).extend(batches)
            bench.operator.close()
        return Subtasks(self.make_backend, parallelism, whole)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(4))
def test_it_is_what_a_dictionary_gives_through_snapshots_and_other_parallelisms(backend: str, seed: int) -> None:
    rng = Random(seed)
    subtasks, oracle, now = Subtasks(BACKENDS[backend], 2), Oracle(), 0
    for _ in range(25):
        what = rng.random()
        if what < 0.7:
            now += rng.randrange(5)
            some = [
                (rng.randrange(9), rng.choice((now, now, now, -1)), rng.choice((None, 0.5, 2.0)))
                for _ in range(rng.choice((1, 4, 30)))
            ]
            assert sorted(subtasks.feed(some)) == sorted(oracle.feed(some))
        elif what < 0.85:
            assert sorted(subtasks.advance(now)) == sorted(oracle.advance(now))
        else:
            subtasks = subtasks.restored(rng.choice((1, 2, 3)))
    assert sorted(subtasks.advance(MAX_WATERMARK_MS)) == sorted(oracle.advance(MAX_WATERMARK_MS))


class Own(tg.KeyedBatchProcess):
    """Calls a function of a test."""

    state = tg.columns("n long, items array<long>, flag boolean, day date, text string", defaults={"n": 7}, ttl="1 s")

    def __init__(self, call: Any) -> None:
        self.call = call

    def process(self, batch: pa.RecordBatch, ctx: tg.BatchContext) -> Any:
        return self.call(self, batch, ctx)


def bench_of(call: Any, key: tuple[str, ...] = ("key",), record: Any = RECORD, **rest: Any) -> Bench:
    return Bench(KeyedBatchSpec(Own(call), key), record, returns="n long", **rest)


def test_the_keys_of_a_batch_come_once_in_the_order_of_their_first_records() -> None:
    seen: list[Any] = []
    bench = bench_of(lambda _, batch, ctx: seen.append(ctx.keys))
    bench.feed((5, 0, None), (None, 1, None), (5, 2, None), (3, 3, None), (None, 4, None), (5, 5, None))
    (keys,) = seen
    assert keys.columns.to_pydict() == {"key": [5, None, 3]}
    assert keys.of.tolist() == [0, 1, 0, 2, 1, 0]
    assert (keys.first.tolist(), keys.last.tolist(), keys.nth.tolist()) == ([0, 1, 3], [5, 4, 3], [0, 0, 1, 0, 1, 2])
    some = keys.where([True, False, True])
    assert some.columns.to_pydict() == {"key": [5, 3]} and some.of.tolist() == [0, -1, 0, 1, -1, 0]
    assert (some.first.tolist(), some.last.tolist()) == ([0, 3], [5, 3])
    assert some.where([False, True]).of.tolist() == [-1, -1, -1, 0, -1, -1]
    assert len(keys.where([False] * 3)) == 0


@pytest.mark.parametrize(
    ("schema", "key", "rows", "count"),
    [
        ("k double, n long", ("k",), [(0.0, 1), (-0.0, 1), (float("nan"), 1), (float("nan"), 1), (None, 1)], 3),
        ("a string, b long, n long", ("a", "b"), [("x", 1, 1), ("x", None, 1), ("y", 1, 1), ("x", 1, 1), (None, 1, 1)], 4),
        ("a struct<b: long>, n long", ("a",), [({"b": 1}, 1), ({"b": 2}, 1), ({"b": 1}, 1)], 2),
        ("a boolean, b date, n long", ("a", "b"), [(True, None, 1), (False, None, 1), (True, None, 1)], 2),
    ],
)
def test_keys_of_all_types_are_found_again(schema: str, key: tuple[str, ...], rows: list[Any], count: int) -> None:
    def call(own: Own, batch: pa.RecordBatch, ctx: tg.BatchContext) -> Any:
        n = own.state.get_many(ctx.keys)["n"].to_numpy() + 1
        own.state.set_many(ctx.keys, n=n)
        return pa.record_batch([pa.array(n)], names=["n"])

    bench = bench_of(call, key, schema)
    assert bench.feed(*rows) == [(8,)] * count
    assert bench.feed(*rows) == [(9,)] * count
    assert bench.feed(*rows[-1:]) == [(10,)]


def test_columns_of_all_types_keep_their_values_and_nulls() -> None:
    taken: list[Any] = []

    def call(own: Own, batch: pa.RecordBatch, ctx: tg.BatchContext) -> None:
        taken.append(own.state.get_many(ctx.keys).to_pylist())
        own.state.set_many(ctx.keys, items=pa.array([[1, 2], None]), flag=np.array([True, False]), text="same", day=None)

    bench = bench_of(call)
    bench.feed((1, 0, None), (2, 0, None))
    bench.feed((1, 0, None), (2, 0, None))
    new = {"n": 7, "items": None, "flag": None, "day": None, "text": None}
    assert taken == [
        [new, new],
        [new | {"items": [1, 2], "flag": True, "text": "same"}, new | {"flag": False, "text": "same"}],
    ]


def test_state_that_was_not_set_for_the_ttl_is_gone_and_then_removed() -> None:
    def call(own: Own, batch: pa.RecordBatch, ctx: tg.BatchContext) -> Any:
        n = own.state.get_many(ctx.keys)["n"].to_numpy() + 1
        own.state.set_many(ctx.keys, n=n, flag=True)
        return pa.record_batch([pa.array(n)], names=["n"])

    bench = bench_of(call)
    bench.clock.now_ms = 5_000
    bench.feed((1, 0, None), (2, 0, None))
    bench.clock.now_ms = 5_999
    assert bench.feed((1, 0, None)) == [(9,)]
    bench.clock.now_ms = 6_100
    assert bench.feed((1, 0, None), (2, 0, None)) == [(10,), (8,)]
    bench.clock.now_ms = 8_000
    for _ in range(3):
        bench.operator.maintain(10)
    assert sum(batch.num_rows for batch in bench.freeze()["state"]) == 0


# The messages are apart, since the traceback in an error shows the line of the call.
MISTAKES: dict[str, Any] = {
    "type": lambda own, batch, ctx: own.state.set_many(ctx.keys, n=["x"]),
    "null": lambda own, batch, ctx: own.state.set_many(ctx.keys, n=None),
    "name": lambda own, batch, ctx: own.state.set_many(ctx.keys, m=1),
    "length": lambda own, batch, ctx: own.state.set_many(ctx.keys, n=np.arange(3)),
    "keys": lambda own, batch, ctx: own.state.get_many(batch["key"]),
    "mask": lambda own, batch, ctx: ctx.keys.where(np.ones(2, bool)),
    "instants": lambda own, batch, ctx: ctx.timers.event_time(ctx.keys, np.arange(2)),
}
MESSAGES = {
    "type": "column 'n' is declared with 'long', and what set_many was given doesn't fit",
    "null": "column 'n' has a default and is never null",
    "name": "has no column 'm'; it has 'n', 'items'",
    "length": "was given 3 values of 'n' for 1 keys",
    "keys": r"state is found by ctx\.keys",
    "mask": "a mask with a value for each of the 1 keys, and got 2 values",
    "instants": "timers of 1 keys were given 2 instants",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_explained(mistake: str) -> None:
    bench = bench_of(MISTAKES[mistake])
    with pytest.raises(UserFunctionError, match=MESSAGES[mistake]):
        bench.feed((1, 1, None), (1, 2, None))


def test_batches_of_another_schema_are_refused() -> None:
    bench = bench_of(lambda own, batch, ctx: batch)
    with pytest.raises(SchemaError, match=r"declared with returns='n long', and its function gave 'key"):
        bench.feed((1, 1, None))
    bench = bench_of(lambda own, batch, ctx: ctx.side("s", batch), sides={"s": "n long"})
    with pytest.raises(SchemaError, match=r"side_outputs\['s'\]='n long'"):
        bench.feed((1, 1, None))
    with pytest.raises(UserFunctionError, match="no side output 'late'"):
        bench_of(lambda own, batch, ctx: ctx.side("late", batch)).feed((1, 1, None))


def test_a_generator_that_returns_a_batch_as_well_is_refused() -> None:
    def call(own: Own, batch: pa.RecordBatch, ctx: tg.BatchContext) -> Any:
        yield batch.select(["n"])
        return batch

    with pytest.raises(UserFunctionError, match="call returned a RecordBatch and has a `yield` elsewhere"):
        bench_of(call).feed((1, 1, None))


def test_a_generator_pauses_between_its_batches_and_a_snapshot_waits_for_it() -> None:
    def call(own: Own, batch: pa.RecordBatch, ctx: tg.BatchContext) -> Any:
        for number in range(3):
            yield pa.record_batch([pa.array([number])], names=["n"])

    budget = Budget()
    bench = bench_of(call, budget=budget)
    budget.end()
    bench.feed((1, 1, None))
    bench.operator.work()
    assert bench.out.rows == [(0,)] and bench.operator.holds_records()
    budget.begin()
    bench.operator.work()
    assert bench.out.rows == [(0,), (1,), (2,)] and not bench.operator.has_work()


def test_after_a_rescale_a_call_has_keys_of_one_watermark_only() -> None:
    class Seen(tg.KeyedBatchProcess):
        def process(self, batch: pa.RecordBatch, ctx: tg.BatchContext) -> Any:
            yield pa.record_batch([batch["key"], pa.array([ctx.watermark_ms] * batch.num_rows)], names=["key", "at"])

    spec = KeyedBatchSpec(Seen(), ("key",))
    whole: Restored = {}
    for subtask, at_ms in enumerate((10, 20)):
        bench = Bench(copy.copy(spec), "key long", returns="key long, at long", subtask=subtask, parallelism=2)
        bench.operator.on_watermark(at_ms)
        for state, batches in bench.freeze().items():
            whole.setdefault(state, []).extend(batches)
    one = Bench(spec, "key long", returns="key long, at long", restored=whole)
    assert sorted(one.feed(*((key,) for key in range(20)))) == [(key, (10, 20)[subtask_of(key, 2)]) for key in range(20)]


def test_timers_need_a_method_that_handles_them() -> None:
    bench = bench_of(lambda own, batch, ctx: ctx.timers.event_time(ctx.keys, 5))
    bench.feed((1, 1, None))
    with pytest.raises(UserFunctionError, match="has set timers but has no on_timers"):
        bench.operator.on_watermark(10)


def test_declarations_are_checked() -> None:
    with pytest.raises(JobError, match="'n' is NOT NULL: give what a new key has"):
        tg.columns("n long NOT NULL")
    with pytest.raises(JobError, match="defaults has 'm', which is not declared"):
        tg.columns("n long", defaults={"m": 0})
    with pytest.raises(SchemaError, match="'n' is declared with 'long', and its default doesn't fit"):
        tg.columns("n long", defaults={"n": "zero"})
    with pytest.raises(JobError, match="names beginning with '__' are the engine's"):
        tg.columns("__n long")
    with pytest.raises(JobError, match="ttl"):
        tg.columns("n long", ttl="0 s")
