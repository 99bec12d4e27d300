"""State with a ttl: against an oracle that knows when everything ends, and from inside.

The clock is the test's. What is frozen is laid over what was frozen before, as a chain of snapshots is.
"""

from __future__ import annotations

import copy
import random
import shutil
import tracemalloc
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract.sqlite_backend import SqliteBackend
from tests.unit.operators.harness import Bench
from tidegate.dataflow.functions import KeyedProcess
from tidegate.dataflow.operators.process import KeyedProcessSpec
from tidegate.errors import JobError, SchemaError
from tidegate.state import declaring as tg
from tidegate.state.cells import GONE
from tidegate.state.descriptors import Descriptor
from tidegate.state.expiring import ExpiringCollection
from tidegate.state.heap import FrozenHeap, HeapBackend
from tidegate.state.merging import LayerInMemory, resolved_rows
from tidegate.state.rocksdb import RocksDB, native_sections
from tidegate.state.timers import TimeKind, TimerQueue
from tidegate.state.ttl import EXPIRES, Ttl, declared_ttl, split_by_end, with_ends
from tidegate.types import to_list

GROUPS = 4
TTL_MS = 100


class Clock:
    def __init__(self, now_ms: int = 1_000) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms


def declared(shape: str, **ttl: Any) -> Descriptor:
    made: dict[str, Any] = {
        "value": lambda: tg.value("long", default=-1, **ttl),
        "container": lambda: tg.value("array<long>", **ttl),
        "list": lambda: tg.list_("long", **ttl),
        "lists": lambda: tg.list_("array<long>", **ttl),
        "map": lambda: tg.map_("long", "long", **ttl),
        "maps": lambda: tg.map_("long", "array<long>", **ttl),
        "reducing": lambda: tg.reducing("long", lambda a, b: a + b, **ttl),
        "aggregating": lambda: tg.aggregating("array<long>", create=list, add=_appended, **ttl),
        "counting": lambda: tg.aggregating("long", create=lambda: 0, add=lambda a, b: a + b, result=lambda a: 2 * a, **ttl),
    }
    descriptor = made[shape]()
    assert isinstance(descriptor, Descriptor)
    descriptor.name = "state"
    return descriptor


def _appended(items: list[int], item: int) -> list[int]:
    items.append(item)
    return items


def alive(value: Any, end: Any, *, shape: str, now_ms: int) -> tuple[Any, Any] | None:
    """What is left of a row, value and end; None where that is nothing."""
    if shape not in ("list", "map"):
        return (value, end) if end > now_ms else None
    ends = [at for at in end if at > now_ms]
    if shape == "map":
        left: Any = {item: of_it for (item, of_it), at in zip(value.items(), end, strict=True) if at > now_ms}
    else:
        left = [item for item, at in zip(value, end, strict=True) if at > now_ms]
    return (left, ends) if left else None


SHAPES = ("value", "container", "list", "lists", "map", "maps", "reducing", "aggregating", "counting")
shapes = pytest.mark.parametrize("shape", SHAPES)
refreshes = pytest.mark.parametrize("refresh", ["write", "read"])
backends = pytest.mark.parametrize("name", ["heap", "rocksdb", "sqlite"])


def backend_with(descriptor: Descriptor, clock: Clock, name: str = "heap") -> tuple[Any, Any]:
    if name == "heap":
        backend: Any = HeapBackend(key_type=pa.int64(), key_group_count=GROUPS, now_ms=clock)
    elif name == "sqlite":
        backend = SqliteBackend(key_type=pa.int64(), key_group_count=GROUPS, now_ms=clock)
    else:
        backend = RocksDB(memory="16 MB").create(key_type=pa.int64(), key_group_count=GROUPS, now_ms=clock)
    return backend, backend.table(descriptor)


def write(shape: str, state: Any, number: int) -> None:
    match shape:
        case "value":
            state.set(number)
        case "container":
            state.set([number])
        case "list" | "reducing" | "aggregating" | "counting":
            state.add(number)
        case "lists":
            state.add([number])
        case "map":
            state.put(number % 3, number)
        case "maps":
            state.put(number % 3, [number])


def read(shape: str, state: Any) -> Any:
    return tuple(state.items()) if shape in ("map", "maps") else state.get()


def nothing(shape: str) -> Any:
    return {"value": -1, "list": (), "lists": (), "map": (), "maps": ()}.get(shape)


def rows_of(layers: Iterable[FrozenHeap]) -> list[pa.RecordBatch]:
    """What a chain of these holds."""
    chain: list[LayerInMemory] = []
    for frozen in layers:
        layer = LayerInMemory(frozen.sections(), key_group_count=GROUPS)
        chain = [layer] if frozen.complete else [*chain, layer]
        frozen.release()
    return list(resolved_rows("state", chain, range(GROUPS)))


def keys_in(rows: Iterable[pa.RecordBatch]) -> set[int]:
    return {key for batch in rows for key in to_list(batch.column("key"))}


def check_lists(state: Any) -> None:
    """Each key is listed once, where it ends."""
    expiring = state.cells
    index, held = expiring.index, expiring.cells.main
    listed = [(key, number) for number, keys in index.keys.items() for key in keys]
    ends = expiring.soonest if isinstance(expiring, ExpiringCollection) else {key: end for key, (_, end) in held.items()}
    assert sorted(listed) == sorted((key, end // index.slice_ms) for key, end in ends.items()) and ends.keys() == held.keys()
    assert sorted(index.order) == sorted(index.keys)
    if isinstance(expiring, ExpiringCollection):
        assert all(ends[key] <= end for key, entry in held.items() for _, end in expiring.pairs_in(entry))


# ----------------------------------------------------------------------------------------------------- declaration


@pytest.mark.parametrize(("ttl", "ttl_ms"), [("1 day", 86_400_000), ("1 ms", 1), (250, 250)])
def test_a_ttl_is_a_duration(ttl: Any, ttl_ms: int) -> None:
    assert declared("value", ttl=ttl).ttl == Ttl(ttl_ms)
    assert declared("map", ttl=ttl, ttl_refresh="read").ttl == Ttl(ttl_ms, by_reads=True)
    assert declared("value").ttl is None


@pytest.mark.parametrize(
    ("ttl", "refresh", "told"),
    [
        (0, "write", "ttl=0: such state would expire at once"),
        ("0 s", "write", "expire at once"),
        (-1, "write", "give a duration"),
        ("soon", "write", "give a duration"),
        ("1 s", "often", "ttl_refresh='often'"),
        (None, "read", "without ttl="),
    ],
)
def test_a_ttl_that_makes_no_sense_is_refused(ttl: Any, refresh: str, told: str) -> None:
    with pytest.raises(JobError, match=told):
        declared_ttl(ttl, refresh)


@shapes
def test_only_state_with_a_ttl_has_a_column_of_ends(shape: str) -> None:
    plain, expiring = declared(shape).info(pa.int64()), declared(shape, ttl="1 s").info(pa.int64())
    assert plain.schema.names == ["key", "value"] and expiring.schema.names == ["key", "value", "expires"]
    assert expiring.schema.field("expires").type == (pa.list_(pa.int64()) if plain.shape in ("list", "map") else pa.int64())


def test_a_backend_without_a_clock_takes_no_state_with_a_ttl() -> None:
    backend = HeapBackend(key_type=pa.int64(), key_group_count=GROUPS)
    with pytest.raises(AssertionError, match="no clock"):
        backend.table(declared("value", ttl="1 s"))


# ------------------------------------------------------------------------------------------------ against an oracle

_key = st.integers(0, 3)
_number = st.integers(0, 5)
_steps = st.one_of(
    *[st.tuples(st.just("write"), _key, _number)] * 4,
    *[st.tuples(st.just("read"), _key, _number)] * 2,
    st.tuples(st.just("clear"), _key),
    st.tuples(st.just("special"), _key, _number),
    *[st.tuples(st.just("pass"), st.sampled_from([1, 5, 6, 40, 99, 100, 101, 1000]))] * 3,
    st.tuples(st.just("freeze")),
    st.tuples(st.just("read a layer")),
    st.tuples(st.just("maintain"), st.sampled_from([0, 1, 2, 1000])),
    st.tuples(st.just("restore"), st.booleans()),
)


class World:
    """A backend and its oracle. The oracle holds for each key a list of [item, value, end], whatever the shape."""

    def __init__(self, shape: str, refresh: str, name: str = "heap") -> None:
        self.name = name
        self.shape = shape
        self.clock = Clock()
        self.descriptor = declared(shape, ttl=TTL_MS, ttl_refresh=refresh)
        self.by_reads = refresh == "read"
        self.backend, self.state = backend_with(self.descriptor, self.clock, self.name)
        self.oracle: dict[int, list[list[Any]]] = {}
        self.frozen: list[tuple[FrozenHeap, dict[int, list[list[Any]]], int]] = []
        self.chain: list[LayerInMemory] = []

    def alive(self, key: int) -> list[list[Any]]:
        """What the oracle has; what expired is gone for good."""
        left = [each for each in self.oracle.get(key, []) if each[2] > self.clock.now_ms]
        if left:
            self.oracle[key] = left
        else:
            self.oracle.pop(key, None)
        return left

    def expected(self, held: list[list[Any]]) -> Any:
        match self.shape:
            case "list" | "lists":
                return tuple(value for _, value, _ in held)
            case "map" | "maps":
                return tuple((item, value) for item, value, _ in held)
        if not held:
            return nothing(self.shape)
        return 2 * held[0][1] if self.shape == "counting" else held[0][1]

    def write(self, key: int, number: int) -> None:
        held, end = self.alive(key), self.clock.now_ms + TTL_MS
        write(self.shape, self.state, number)
        match self.shape:
            case "list" | "lists":
                self.oracle[key] = [*held, [None, [number] if self.shape == "lists" else number, end]]
            case "map" | "maps":
                entry = [number % 3, [number] if self.shape == "maps" else number, end]
                if entry[0] in [item for item, _, _ in held]:
                    self.oracle[key] = [entry if each[0] == entry[0] else each for each in held]
                else:
                    self.oracle[key] = [*held, entry]
            case "value":
                self.oracle[key] = [[None, number, end]]
            case "container":
                self.oracle[key] = [[None, [number], end]]
            case "aggregating":
                self.oracle[key] = [[None, [*(held[0][1] if held else []), number], end]]
            case _:
                self.oracle[key] = [[None, number + (held[0][1] if held else 0), end]]

    def read(self, key: int) -> None:
        got = read(self.shape, self.state)
        held = self.alive(key)
        assert got == self.expected(held), (self.shape, key, self.clock.now_ms)
        self.refreshed(held)
        for value in got if isinstance(got, tuple) else [got]:
            if isinstance(value, list):
                value.append("spoilt")

    def refreshed(self, held: Iterable[list[Any]]) -> None:
        if self.by_reads:
            for each in held:
                each[2] = self.clock.now_ms + TTL_MS

    def special(self, key: int, number: int) -> None:
        """The methods that a shape has beside."""
        held = self.alive(key)
        end = self.clock.now_ms + TTL_MS
        match self.shape, number % 3:
            case "list", 0:
                self.state.replace([number] * (number // 2))
                self.oracle[key] = [[None, number, end] for _ in range(number // 2)]
            case "list", _:
                self.state.extend([number, 7])
                self.oracle[key] = [*held, [None, number, end], [None, 7, end]]
            case (("map" | "maps"), 0):
                self.state.remove(number % 2)
                self.oracle[key] = [each for each in held if each[0] != number % 2]
            case (("map" | "maps"), 1):
                found = [each for each in held if each[0] == number % 2]
                assert (number % 2 in self.state) == bool(found) and len(self.state) == len(held)
                self.refreshed(found)
            case (("map" | "maps"), 2):
                found = [each for each in held if each[0] == 1]
                assert self.state.get(1, "default") == (found[0][1] if found else "default")
                self.refreshed(found)
        self.alive(key)

    def freeze(self) -> None:
        for key in list(self.oracle):
            self.alive(key)
        self.frozen.append((self.backend.freeze(), copy.deepcopy(self.oracle), self.clock.now_ms))

    def take(self) -> None:
        """The oldest layer that wasn't taken. With those before it, it is the state at its freeze."""
        frozen, oracle, now_ms = self.frozen.pop(0)
        layer = LayerInMemory(frozen.sections(), key_group_count=GROUPS)
        self.chain = [layer] if frozen.complete else [*self.chain, layer]
        frozen.release()
        found = {}
        for batch in resolved_rows("state", self.chain, range(GROUPS)):
            assert batch.schema == self.descriptor.info(pa.int64()).schema
            for key, value, end in zip(*map(to_list, batch.columns), strict=True):
                row = alive(value, end, shape=self.descriptor.shape, now_ms=now_ms)
                if row is not None:
                    found[key] = row
        assert found == {key: self.row(held) for key, held in oracle.items()}

    def row(self, held: list[list[Any]]) -> tuple[Any, Any]:
        match self.descriptor.shape:
            case "list":
                return [value for _, value, _ in held], [end for _, _, end in held]
            case "map":
                return {item: value for item, value, _ in held}, [end for _, _, end in held]
        return held[0][1], held[0][2]

    def restore(self, known: bool) -> None:
        self.freeze()
        while self.frozen:
            self.take()
        self.backend.close()
        self.backend, self.state = backend_with(self.descriptor, self.clock, self.name)
        for rows in resolved_rows("state", self.chain, range(GROUPS)):
            self.backend.load("state", rows, known=known)
        if not known:
            self.chain = []

    def run(self, steps: Iterable[tuple[Any, ...]]) -> None:
        for step in steps:
            if len(step) > 1:
                self.backend.cursor.key = step[1]
            match step:
                case ("write", key, number):
                    self.write(key, number)
                case ("read", key, _):
                    self.read(key)
                case ("clear", key):
                    self.state.clear()
                    self.oracle.pop(key, None)
                case ("special", key, number):
                    self.special(key, number)
                case ("pass", passed_ms):
                    self.clock.now_ms += passed_ms
                case ("freeze",):
                    self.freeze()
                case ("read a layer",) if self.frozen:
                    self.take()
                case ("maintain", budget):
                    self.backend.maintain(budget)
                case ("restore", known):
                    self.restore(known)
            if self.name == "heap":
                check_lists(self.state)


@shapes
@refreshes
@given(steps=st.lists(_steps, max_size=50))
def test_state_is_what_an_oracle_with_ends_says(shape: str, refresh: str, steps: list[tuple[Any, ...]]) -> None:
    world = World(shape, refresh)
    world.run([*steps, ("freeze",)])
    while world.frozen:
        world.take()
    for world.backend.cursor.key in range(4):
        world.read(world.backend.cursor.key)


@shapes
@refreshes
@pytest.mark.parametrize("name", ["rocksdb", "sqlite"])
@settings(max_examples=20)
@given(steps=st.lists(_steps, max_size=50))
def test_state_elsewhere_is_what_the_oracle_says_too(
    shape: str, refresh: str, name: str, steps: list[tuple[Any, ...]]
) -> None:
    world = World(shape, refresh, name)
    world.run([*steps, ("freeze",)])
    while world.frozen:
        world.take()
    for world.backend.cursor.key in range(4):
        world.read(world.backend.cursor.key)
    world.backend.close()


@shapes
@refreshes
@given(
    steps=st.lists(_steps, max_size=40),
    jumps=st.lists(st.sampled_from([-(10**9), -150, -100, -1, 10**9]), max_size=6),
    seed=st.integers(0, 99),
)
def test_a_clock_that_jumps_breaks_nothing_and_brings_nothing_back(
    shape: str, refresh: str, steps: list[tuple[Any, ...]], jumps: list[int], seed: int
) -> None:
    """Against the same oracle, which forgets what it finds expired. The two don't look at the same time, so at each jump
    everything is looked at on both sides."""
    rng = random.Random(seed)
    program: list[list[tuple[Any, ...]]] = [[] for _ in range(len(jumps) + 1)]
    for step in steps:
        program[rng.randrange(len(program))].append(step)
    world = World(shape, refresh)
    for part, jump in zip(program, [*jumps, 0], strict=True):
        world.run(part)
        for world.backend.cursor.key in range(4):
            world.read(world.backend.cursor.key)
        while world.frozen:
            world.take()
        world.clock.now_ms += jump
    world.run([("read", key, 0) for key in range(4)])


# ----------------------------------------------------------------------------------------------------------- time


@shapes
@backends
def test_a_value_ends_exactly_when_its_time_is_over(shape: str, name: str) -> None:
    clock = Clock()
    backend, state = backend_with(declared(shape, ttl=TTL_MS), clock, name)
    backend.cursor.key = 1
    write(shape, state, 1)
    clock.now_ms += TTL_MS - 1
    assert read(shape, state) != nothing(shape)
    clock.now_ms += 1
    assert read(shape, state) == nothing(shape)


@shapes
@refreshes
@backends
def test_reading_keeps_state_only_where_it_was_asked_for(shape: str, refresh: str, name: str) -> None:
    clock = Clock()
    backend, state = backend_with(declared(shape, ttl=TTL_MS, ttl_refresh=refresh), clock, name)
    backend.cursor.key = 1
    write(shape, state, 1)
    for _ in range(3):
        clock.now_ms += TTL_MS - 1
        found = read(shape, state)
    assert (found != nothing(shape)) is (refresh == "read")


@shapes
def test_what_was_found_expired_stays_away_when_the_clock_goes_back(shape: str) -> None:
    clock = Clock()
    backend, state = backend_with(declared(shape, ttl=TTL_MS), clock)
    for backend.cursor.key in (1, 2):
        write(shape, state, 1)
    frozen = backend.freeze()
    clock.now_ms += TTL_MS
    backend.cursor.key = 1
    assert read(shape, state) == nothing(shape)
    clock.now_ms += TTL_MS
    backend.maintain(10)
    clock.now_ms -= 2 * TTL_MS
    for backend.cursor.key in (1, 2):
        assert read(shape, state) == nothing(shape)
    assert rows_of([frozen, backend.freeze()]) == []


def test_items_and_entries_end_one_by_one() -> None:
    clock = Clock()
    backend, words = backend_with(declared("list", ttl=TTL_MS), clock)
    other, counts = backend_with(declared("map", ttl=TTL_MS), clock)
    backend.cursor.key = other.cursor.key = 1
    for number in (1, 2, 3):
        words.add(number)
        counts.put(number, number)
        clock.now_ms += 40
    assert words.get() == (2, 3) and tuple(counts.items()) == ((2, 2), (3, 3)) and len(counts) == 2
    assert 1 not in counts and counts.get(1, "none") == "none"
    counts.put(2, 20)
    counts.put(1, 10)
    clock.now_ms += 20
    assert words.get() == (3,) and list(counts) == [2, 3, 1], "put again before its end it keeps its place, after it not"


def test_an_expired_value_is_not_merged_with() -> None:
    clock = Clock()
    backend, total = backend_with(declared("reducing", ttl=TTL_MS), clock)
    backend.cursor.key = 1
    total.add(5)
    clock.now_ms += TTL_MS
    total.add(1)
    assert total.get() == 1


def test_timers_have_no_end() -> None:
    clock = Clock()
    backend, state = backend_with(declared("value", ttl=TTL_MS), clock)
    timers = TimerQueue(TimeKind.EVENT, backend)
    backend.cursor.key = 1
    state.set(1)
    timers.set(5_000)
    clock.now_ms += 10 * TTL_MS
    backend.maintain(1000)
    assert state.cells.cells.main == {} and list(timers.due(5_000)) == [5_000]


# -------------------------------------------------------------------------------------------------------- cleaning up


@shapes
def test_what_nobody_looks_at_is_cleaned_up_in_bounded_steps(shape: str) -> None:
    clock = Clock()
    backend, state = backend_with(declared(shape, ttl=TTL_MS), clock)
    for backend.cursor.key in range(1000):
        write(shape, state, 1)
    rows_of([backend.freeze()])
    backend.maintain(0)  # from here on nothing was listed
    clock.now_ms += TTL_MS + TTL_MS // 8
    steps = 0
    while state.cells.cells.main:
        before = len(state.cells.cells.main)
        backend.maintain(64)
        assert 0 < before - len(state.cells.cells.main) <= 64
        steps += 1
    assert steps == -(-1000 // 64)
    assert not state.cells.index.keys and not state.cells.index.order and set(state.cells.cells.fresh.values()) == {GONE}
    sections = list(backend.freeze().sections())
    assert sum(section.rows.num_rows for section in sections) == 1000 and all(section.deleted for section in sections)


def test_cleaning_up_keeps_pace_with_what_is_written_whatever_its_budget() -> None:
    clock = Clock()
    backend, state = backend_with(declared("value", ttl=TTL_MS), clock)
    for batch in range(100):
        for backend.cursor.key in range(batch * 100, batch * 100 + 100):
            state.set(1)
        clock.now_ms += 10
        backend.maintain(0)
        assert len(state.cells.cells.main) <= 100 * (TTL_MS // 10 + 3)


def test_a_key_that_is_written_all_the_time_is_listed_once() -> None:
    clock = Clock()
    backend, state = backend_with(declared("value", ttl=1600), clock)
    backend.cursor.key = 1
    for _ in range(1000):
        state.set(1)
        clock.now_ms += 1
    assert sum(map(len, state.cells.index.keys.values())) == 1
    for _ in range(100):
        state.clear()
        state.set(1)
    check_lists(state)
    backend.maintain(10)
    assert len(state.cells.index.keys) <= 17


def test_the_memory_of_what_expired_is_free_again() -> None:
    def held(frozen: bool) -> int:
        clock = Clock()
        backend, state = backend_with(declared("value", ttl=TTL_MS), clock)
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        for backend.cursor.key in range(1_000, 21_000):
            state.set(backend.cursor.key * 1000)
        if frozen:
            backend.freeze().release()
            backend.maintain(1)
        full, _ = tracemalloc.get_traced_memory()
        clock.now_ms += 2 * TTL_MS
        for _ in range(25):
            backend.maintain(1000)
        if frozen:
            backend.freeze().release()
            backend.maintain(1)
        else:
            assert state.cells.cells.fresh == {}, "nobody knows of these keys, so that they went isn't news"
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert state.cells.cells.main == {} and state.cells.index.keys == {}
        return (after - before) * 100 // (full - before)

    assert held(frozen=True) < 10 and held(frozen=False) < 10, "in percent"


# ------------------------------------------------------------------------------------------------------- snapshots


@shapes
def test_what_expired_before_a_freeze_is_not_written(shape: str) -> None:
    clock = Clock()
    backend, state = backend_with(declared(shape, ttl=TTL_MS), clock)
    for backend.cursor.key in (1, 2, 3):
        write(shape, state, 1)
    first = backend.freeze()
    backend.cursor.key = 1
    write(shape, state, 2)  # changed, then expired: the older file has it
    clock.now_ms += TTL_MS - 1
    backend.cursor.key = 2
    write(shape, state, 2)
    clock.now_ms += 1
    second = backend.freeze()
    clock.now_ms += 10 * TTL_MS  # the reader is late
    sections = list(second.sections())
    assert [(section.deleted, to_list(section.rows.column("key"))) for section in sections] == [(False, [2]), (True, [1])]
    assert not second.complete, "key 3 is in the older file only"
    assert keys_in(rows_of([first])) == {1, 2, 3}


def test_a_layer_of_all_keys_is_complete_even_if_some_expired() -> None:
    clock = Clock()
    backend, state = backend_with(declared("value", ttl=TTL_MS), clock)
    backend.cursor.key = 1
    state.set(1)
    clock.now_ms += TTL_MS
    backend.cursor.key = 2
    state.set(2)
    frozen = backend.freeze()
    assert keys_in(rows_of([frozen])) == {2} and frozen.complete


@shapes
@pytest.mark.parametrize("known", [True, False])
def test_what_expired_meanwhile_is_not_taken_in_and_leaves_the_chain(shape: str, known: bool) -> None:
    clock = Clock()
    backend, state = backend_with(declared(shape, ttl=TTL_MS), clock)
    for backend.cursor.key in (1, 2):
        write(shape, state, 1)
        clock.now_ms += 40
    frozen = backend.freeze()
    (rows,) = [pa.concat_batches(rows_of([frozen]))]
    clock.now_ms += 30
    second, again = backend_with(declared(shape, ttl=TTL_MS), clock)
    second.load("state", rows, known=known)
    check_lists(again)
    for second.cursor.key, there in ((1, False), (2, True)):
        assert (read(shape, again) != nothing(shape)) is there
    written = {section.deleted: to_list(section.rows.column("key")) for section in second.freeze().sections()}
    assert written == ({True: [1]} if known else {False: [2]})
    clock.now_ms += 30
    second.cursor.key = 2
    assert read(shape, again) == nothing(shape), "it goes on with the end that it had"


@shapes
@backends
def test_state_that_gets_a_ttl_begins_anew_when_it_is_loaded(shape: str, name: str) -> None:
    clock = Clock()
    backend, state = backend_with(declared(shape), clock, name)
    backend.cursor.key = 1
    write(shape, state, 1)
    before = read(shape, state)
    (rows,) = rows_of([backend.freeze()])
    clock.now_ms += 100 * TTL_MS
    expiring = declared(shape, ttl=TTL_MS)
    field = expiring.info(pa.int64()).schema.field(EXPIRES)
    for given_rows in (rows, rows.append_column(field, pa.nulls(rows.num_rows, field.type))):
        second, again = backend_with(expiring, clock, name)
        second.load("state", given_rows, known=False)
        second.cursor.key = 1
        clock.now_ms += TTL_MS - 1
        assert read(shape, again) == before
        clock.now_ms += 1
        assert read(shape, again) == nothing(shape)


@shapes
@backends
def test_state_that_loses_its_ttl_keeps_what_was_left_of_it(shape: str, name: str) -> None:
    clock = Clock()
    backend, state = backend_with(declared(shape, ttl=TTL_MS), clock, name)
    for backend.cursor.key in (1, 2):
        write(shape, state, 1)
        clock.now_ms += 40
    before = read(shape, state)
    rows = rows_of([backend.freeze()])
    clock.now_ms += 30
    second, again = backend_with(declared(shape), clock, name)
    for batch in rows:
        second.load("state", batch, known=False)
    clock.now_ms += 100 * TTL_MS
    found = {}
    for second.cursor.key in (1, 2):
        found[second.cursor.key] = read(shape, again)
    assert found == {1: nothing(shape), 2: before}
    assert {name for section in second.freeze().sections() for name in section.rows.schema.names} == {"key", "value"}


def test_another_ttl_holds_for_what_is_written_from_then_on() -> None:
    clock = Clock()
    backend, state = backend_with(declared("value", ttl=10 * TTL_MS), clock)
    for backend.cursor.key in (1, 2):
        state.set(1)
    (rows,) = [pa.concat_batches(rows_of([backend.freeze()]))]
    second, again = backend_with(declared("value", ttl=TTL_MS), clock)
    second.load("state", rows, known=True)
    second.cursor.key = 2
    again.set(2)
    check_lists(again)
    clock.now_ms += 2 * TTL_MS
    second.maintain(100)
    assert set(again.cells.cells.main) == {1}
    clock.now_ms += 10 * TTL_MS
    second.maintain(100)
    assert again.cells.cells.main == {}


def test_rows_are_split_by_their_ends_for_any_backend() -> None:
    def split(shape: str, values: list[Any], ends: list[Any] | None, now_ms: int) -> tuple[list[Any], list[Any]]:
        info = declared(shape, ttl=TTL_MS).info(pa.int64())
        columns = {"key": list(range(1, len(values) + 1)), "value": values} | ({} if ends is None else {EXPIRES: ends})
        fields = [field for field in info.schema if field.name in columns]
        rows = pa.RecordBatch.from_arrays(
            [pa.array(columns[field.name], field.type) for field in fields], schema=pa.schema(fields)
        )
        left, ended = split_by_end(with_ends(rows, info, otherwise=110), info, now_ms)
        return [tuple(row) for row in zip(*map(to_list, left.columns), strict=True)], to_list(ended.column("key"))

    assert split("list", [[1, 2], [3], [4]], [[5, 15], [5], None], 10) == ([(1, [2], [15]), (3, [4], [110])], [2])
    assert split("list", [[1, 2]], None, 10) == ([(1, [1, 2], [110, 110])], [])
    assert split("map", [{1: 1, 2: 2}], [[5, 15]], 5) == ([(1, {2: 2}, [15])], [])
    assert split("value", [1], [5], 4) == ([(1, 1, 5)], []) and split("value", [1], [5], 5) == ([], [1])
    assert split("value", [1, 2], [5, None], 5) == ([(2, 2, 110)], [1])


def test_a_layer_keeps_its_lists_while_reading_renews_them() -> None:
    """Reading writes another end, and must not make what a reader sees the loop's own."""
    for shape in ("list", "map", "maps", "aggregating"):
        clock = Clock()
        backend, state = backend_with(declared(shape, ttl=TTL_MS, ttl_refresh="read"), clock)
        backend.cursor.key = 1
        write(shape, state, 1)
        frozen = backend.freeze()
        clock.now_ms += 1
        before = read(shape, state)
        write(shape, state, 2)
        assert read(shape, state) != before
        (rows,) = rows_of([frozen])
        (value,) = to_list(rows.column("value"))
        assert value == {"list": [1], "map": {1: 1}, "maps": {1: [1]}, "aggregating": [1]}[shape]


# ---------------------------------------------------------------------------------------------------------- on disk


@shapes
def test_on_disk_what_nobody_looks_at_is_cleaned_up_in_bounded_steps(shape: str) -> None:
    clock = Clock()
    backend, state = backend_with(declared(shape, ttl=TTL_MS), clock, "rocksdb")
    for backend.cursor.key in range(300):
        write(shape, state, 1)
    list(backend.freeze().sections())  # when they can be read, they are written
    clock.now_ms += TTL_MS - 1
    for backend.cursor.key in (7, 8):
        write(shape, state, 2)
    clock.now_ms += 1
    at = backend.cursor.key = 5
    for _ in range(10):
        before = len(state.cells.cells.dirty)
        backend.maintain(64)
        assert len(state.cells.cells.dirty) - before <= 64
    assert backend.cursor.key == at
    clock.now_ms -= TTL_MS  # so that it is seen what was swept, and not only hidden
    found = set()
    for backend.cursor.key in range(300):
        if read(shape, state) != nothing(shape):
            found.add(backend.cursor.key)
    assert found == {7, 8}
    backend.close()


@shapes
def test_on_disk_native_files_hold_the_ends_as_well(shape: str, tmp_path: Path) -> None:
    clock = Clock()
    descriptor = declared(shape, ttl=TTL_MS)
    backend, state = backend_with(descriptor, clock, "rocksdb")
    for backend.cursor.key in range(10):
        write(shape, state, 1)
        clock.now_ms += 5
    frozen = backend.freeze()
    assert frozen.complete and frozen.native == "rocksdb"
    assert frozen.states == (descriptor.info(pa.int64()),)
    for file in frozen.files():
        shutil.copyfile(file.path, tmp_path / file.local)
    rows = [section.rows for section in frozen.sections()]
    again = native_sections(tmp_path, frozen.states, key_type=pa.int64(), key_group_count=GROUPS, groups=range(GROUPS))
    assert pa.concat_batches(rows).equals(pa.concat_batches([section.rows for section in again]))
    second = RocksDB(memory="16 MB").create(key_type=pa.int64(), key_group_count=GROUPS, now_ms=clock, native=tmp_path)
    goes_on = second.table(declared(shape, ttl=TTL_MS))
    clock.now_ms = 1_000 + TTL_MS + 24
    found = []
    for second.cursor.key in range(10):
        if read(shape, goes_on) != nothing(shape):
            found.append(second.cursor.key)
    assert found == [5, 6, 7, 8, 9]
    frozen.release()
    backend.close()
    second.close()


@shapes
@pytest.mark.parametrize(
    ("one", "other"), [("heap", "rocksdb"), ("rocksdb", "heap"), ("sqlite", "rocksdb"), ("heap", "sqlite")]
)
@pytest.mark.parametrize(("before", "after"), [(TTL_MS, TTL_MS), (TTL_MS, None), (None, TTL_MS)])
def test_the_rows_of_a_backend_are_taken_in_by_the_other(
    shape: str, one: str, other: str, before: int | None, after: int | None
) -> None:
    clock = Clock()
    backend, state = backend_with(declared(shape, ttl=before), clock, one)
    for backend.cursor.key in (1, 2):
        write(shape, state, 1)
        clock.now_ms += 40
    held = read(shape, state)
    rows = [section.rows for section in backend.freeze().sections()]
    clock.now_ms += 30
    second, again = backend_with(declared(shape, ttl=after), clock, other)
    for batch in rows:
        second.load("state", batch, known=False)
    found = {}
    for second.cursor.key in (1, 2):
        found[second.cursor.key] = read(shape, again)
    assert found == {1: held if before is None else nothing(shape), 2: held}
    backend.close()
    second.close()


# --------------------------------------------------------------------------------------------------------- in a job


class Sessions(KeyedProcess):
    """Numbers the records of a key, and forgets keys that were quiet for a second."""

    number = tg.value("long", default=0, ttl="1 s")
    seen = tg.map_("long", "long", ttl="1 s")

    def process(self, record: Any, ctx: Any) -> Iterable[tuple[Any, ...]]:
        self.number.set(self.number.get() + 1)
        self.seen.put(record.n, 1)
        yield record.key, self.number.get(), len(self.seen)


def test_an_operator_forgets_what_was_quiet_and_its_snapshots_too() -> None:
    bench = Bench(
        KeyedProcessSpec(Sessions(), ("key",)),
        "key string, n long",
        returns="key string, number long, seen long",
        open=False,
    )
    bench.operator.open(
        replace(
            bench.context,
            make_backend=lambda key_type: HeapBackend(
                key_type=key_type, key_group_count=bench.context.key_group_count, now_ms=bench.clock
            ),
        )
    )
    bench.clock.now_ms = 0
    assert bench.feed(("a", 1), ("a", 2), ("b", 1)) == [("a", 1, 1), ("a", 2, 2), ("b", 1, 1)]
    bench.clock.now_ms = 600
    assert bench.feed(("a", 3)) == [("a", 3, 3)]
    bench.freeze()
    bench.clock.now_ms = 1_200
    bench.operator.maintain(512)
    restored = bench.freeze()
    assert [key for rows in restored["number"] for key in to_list(rows.column("key"))] == ["a"]
    assert bench.feed(("a", 4), ("b", 2)) == [("a", 4, 2), ("b", 1, 1)]


@pytest.mark.parametrize("ttl", [None, "1 s"])
@pytest.mark.parametrize("name", ["rocksdb", "sqlite"])
def test_what_a_function_puts_into_an_accumulator_is_checked_before_it_becomes_bytes(name: str, ttl: str | None) -> None:
    """On the heap it is when it becomes rows."""

    def add(numbers: list[Any], item: int) -> list[Any]:
        numbers.append("one" if item == 1 else item)
        return numbers

    numbers: Any = tg.aggregating("array<bigint>", create=list, add=add, name="state", ttl=ttl)
    backend, state = backend_with(numbers, Clock(), name)
    backend.cursor.key = 1
    state.add(2)
    with pytest.raises(SchemaError, match="'one'"):
        state.add(1)
    backend.close()


@pytest.mark.parametrize("name", ["heap", "rocksdb"])
def test_a_key_that_is_no_number_is_read_and_removed_like_any_other(name: str) -> None:
    map_state: Any = tg.map_("double", "long", name="state", ttl="1 s", ttl_refresh="read")
    backend, state = backend_with(map_state, Clock(), name)
    backend.cursor.key = 1
    state.put(float("nan"), 7)
    (key,) = state.keys()
    assert state.get(key) == 7
    state.remove(key)
    assert not state.keys()
    backend.close()


def test_to_look_for_a_list_that_is_not_there_changes_nothing() -> None:
    list_state: Any = tg.list_("long", name="state", ttl="1 s")
    backend, state = backend_with(list_state, Clock(), "rocksdb")
    for backend.cursor.key in range(10):
        assert state.get() == ()
    cells = backend.cells["state"]
    assert not cells.dirty and not cells.changes
    backend.close()
