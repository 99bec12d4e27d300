"""What every backend of keyed state promises (`KeyedBackend` in dataflow/operators/base.py), compared with dictionaries.

Random programs of writes, freezes, readings, releases and maintenance run on a backend and on an oracle of plain
dictionaries. Whatever is frozen must come out as it was at the freeze: read later, in pieces, in any order, by another
thread, whatever was written meanwhile and whatever the user does to objects that went in or came out.

A backend is added by one line in `BACKENDS`.
"""

from __future__ import annotations

import copy
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contract.sqlite_backend import SqliteBackend
from tidegate.dataflow.operators.base import KeyedBackend
from tidegate.errors import JobError, SchemaError
from tidegate.hashing import hash_columns
from tidegate.keygroups import groups_of
from tidegate.state import descriptors as tg
from tidegate.state.columns import key_list
from tidegate.state.descriptors import Descriptor, descriptors_of
from tidegate.state.format import StateFileEncoder, StateFileReader
from tidegate.state.heap import HeapBackend
from tidegate.state.merging import LayerInMemory, resolved_rows
from tidegate.state.rocksdb import RocksSettings
from tidegate.state.sections import FrozenState, Section, deleted_schema
from tidegate.state.timers import TimeKind, TimerQueue
from tidegate.types import parse_type, to_list

GROUPS = 7
IN_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # thousands of small databases: no disk needs to spin

BACKENDS: dict[str, Callable[[pa.DataType], KeyedBackend]] = {
    "heap": lambda key_type: HeapBackend(key_type=key_type, key_group_count=GROUPS),
    "rocksdb": lambda key_type: RocksSettings("16 MB", IN_MEMORY).create(key_type=key_type, key_group_count=GROUPS),
    "sqlite": lambda key_type: SqliteBackend(key_type=key_type, key_group_count=GROUPS),
}

# For each type of key some keys, each in the spellings that mean the same key. Several columns are a struct.
_OTHER_NAN = float(np.array([0xFFF8_0000_0000_0001], np.uint64).view(np.float64)[0])
KEYS: dict[str, list[list[Any]]] = {
    "long": [[0], [1], [-1], [2**63 - 1], [-(2**63)], [7], [None]],
    "string": [[""], ["a"], ["é"], ["e\u0301"], ["a" * 50], [None]],
    "double": [[0.0, -0.0], [1.0], [float("nan"), _OTHER_NAN, -float("nan")], [float("-inf")], [1e-300], [None]],
    "float": [[0.0, -0.0], [0.5], [float("nan")], [None]],
    "boolean": [[True], [False], [None]],
    "array<double>": [[[]], [[0.0], [-0.0]], [[float("nan"), None]], [None]],
    "struct<a: long, b: string>": [[(1, "x")], [(1, None)], [(None, "x")], [(None, None)], [(2, "x")]],
    "struct<a: double, b: struct<c: double, d: date>>": [
        [(0.0, (float("nan"), None)), (-0.0, (_OTHER_NAN, None))],
        [(0.0, (0.0, None)), (0.0, (-0.0, None))],
        [(1.0, (None, None))],
    ],
}


class Declared:
    """One state of each kind, of values that can be changed in place and of others."""

    number = tg.value("long", default=5)
    order = tg.value("struct<id: long, tags: array<string>>")
    words = tg.list_("string")
    pairs = tg.list_("struct<x: long, ys: array<long>>")
    counts = tg.map_("string", "long")
    lists = tg.map_("long", "array<long>")
    largest = tg.reducing("long", max)
    longest = tg.reducing("array<long>", lambda a, b: b if len(b) > len(a) else a)
    mean = tg.aggregating(
        "struct<sum: double, n: long>",
        create=lambda: {"sum": 0, "n": 0},
        add=lambda mean, x: _add_to_mean(mean, x),
        result=lambda mean: mean["sum"] / mean["n"],
    )
    seen = tg.aggregating("array<array<long>>", create=list, add=lambda seen, x: _append(seen, x))


def _add_to_mean(mean: dict[str, Any], x: float) -> dict[str, Any]:
    mean["sum"] += x
    mean["n"] += 1
    return mean


def _append(seen: list[Any], x: list[int]) -> list[Any]:
    seen.append(x)
    return seen


Entries = dict[str, dict[int, Any]]  # state → number of the key → what it holds
Rows = dict[str, list[pa.RecordBatch]]  # state → all its rows
Reading = tuple[FrozenState, Entries, list[Section], threading.Thread]


@dataclass
class World:
    """A backend and its oracle, with the same keys under numbers."""

    name: str
    key_type: str
    backend: KeyedBackend = field(init=False)
    states: dict[str, Any] = field(init=False)
    timers: TimerQueue = field(init=False)
    oracle: Entries = field(init=False)
    newest: Outstanding | None = field(init=False, default=None)  # the newest frozen version
    spellings: list[list[Any]] = field(init=False)  # of each key, as the cursor takes them

    def __post_init__(self) -> None:
        arrow = parse_type(self.key_type)
        self.backend = BACKENDS[self.name](arrow)
        self.states = {attribute: self.backend.table(descriptor) for attribute, descriptor in _declared().items()}
        self.timers = TimerQueue(TimeKind.EVENT, self.backend)
        self.oracle = {**{attribute: {} for attribute in self.states}, "__event_timers": {}}
        self.spellings = [key_list(pa.array(spelled, arrow)) for spelled in KEYS[self.key_type]]

    def at(self, key: int, spelling: int = 0) -> None:
        spelled = self.spellings[key]
        self.backend.cursor.key = spelled[spelling % len(spelled)]

    def number_of(self, keys: pa.Array) -> list[int]:
        numbers = {spelled[0]: number for number, spelled in enumerate(self.spellings)}
        return [numbers[key] for key in key_list(keys)]

    def check_live(self) -> None:
        """What the state objects say is what the oracle says, for every key."""
        for key in range(len(self.spellings)):
            self.at(key, spelling=key)
            for state, held in self.oracle.items():
                if state != "__event_timers":
                    _check_one(state, self.states[state], held.get(key))


def _declared() -> dict[str, Descriptor]:
    return dict(descriptors_of(Declared()))


def _check_one(state: str, got: Any, held: Any) -> None:
    match state:
        case "number":
            assert got.get() == (5 if held is None else held[0])
        case "order":
            assert got.get() == (None if held is None else held[0])
        case "words" | "pairs":
            assert got.get() == tuple(held or ())
        case "counts" | "lists":
            assert dict(got.items()) == (held or {}) and len(got) == len(held or {})
            assert list(got.keys()) == list(got) and tuple(got.values()) == tuple((held or {}).values())
            assert all(item in got and got.get(item) == value for item, value in (held or {}).items())
            assert "nothing" not in got and got.get("nothing", "default") == "default"
        case "largest" | "longest" | "seen":
            assert got.get() == held
        case "mean":
            assert got.get() == (None if held is None else held["sum"] / held["n"])
        case _:
            raise AssertionError(state)


# ------------------------------------------------------------------------------------------------- random programs

_key = st.integers(0, 6)
_number = st.integers(-3, 3)
_numbers = st.lists(_number, max_size=3)
_word = st.sampled_from(["a", "b", "ü"])
_on_list = st.sampled_from(["add", "extend", "replace", "clear"])
_operations = st.one_of(
    st.tuples(st.just("number"), st.sampled_from(["set", "set", "clear"]), _key, st.none() | _number),
    st.tuples(st.just("order"), st.sampled_from(["set", "clear"]), _key, st.lists(_word, max_size=2)),
    st.tuples(st.just("words"), _on_list, _key, st.lists(_word, max_size=3)),
    st.tuples(st.just("pairs"), _on_list, _key, st.lists(_numbers, max_size=2)),
    st.tuples(st.just("counts"), st.sampled_from(["put", "put", "remove", "clear"]), _key, st.tuples(_word, _number)),
    st.tuples(st.just("lists"), st.sampled_from(["put", "put", "remove", "clear"]), _key, st.tuples(_number, _numbers)),
    st.tuples(st.just("largest"), st.sampled_from(["add", "add", "clear"]), _key, _number),
    st.tuples(st.just("longest"), st.sampled_from(["add", "add", "clear"]), _key, _numbers),
    st.tuples(st.just("mean"), st.sampled_from(["add", "add", "clear"]), _key, _number),
    st.tuples(st.just("seen"), st.sampled_from(["add", "add", "clear"]), _key, _numbers),
    st.tuples(st.just("__event_timers"), st.sampled_from(["set", "set", "delete"]), _key, _number),
)
_steps = st.one_of(
    *[_operations] * 6,
    st.tuples(st.just("freeze")),
    st.tuples(st.just("read"), st.integers(0, 2), st.integers(1, 40)),
    st.tuples(st.just("release"), st.integers(0, 2)),
    st.tuples(st.just("maintain"), st.sampled_from([0, 1, 3, 1000])),
    st.tuples(st.just("due"), _number),
    st.tuples(st.just("check")),
)


class Outstanding:
    """A frozen version, what it must hold with those before it, and what was read of it so far."""

    def __init__(self, world: World) -> None:
        self.frozen: FrozenState = world.backend.freeze()
        self.expected = copy.deepcopy(world.oracle)
        self.sections: list[Section] = []
        self._unread: Iterator[Section] | None = None
        self._before = world.newest
        world.newest = self

    def read(self, count: int) -> bool:
        """Reads on; whether that was all."""
        if self._unread is None:
            self._unread = iter(self.frozen.sections())
        for _ in range(count):
            section = next(self._unread, None)
            if section is None:
                return True
            self.sections.append(section)
        return False

    def finish(self, world: World) -> None:
        while not self.read(100):
            pass
        check_sections(world, self.frozen, self.sections)
        assert entries_of(world, self.rows(world)) == _without_empty(self.expected)

    def layers(self, world: World) -> list[LayerInMemory]:
        """This one over those before it, as far as they are needed."""
        while not self.read(100):
            pass
        layer = LayerInMemory(self.sections, key_group_count=GROUPS)
        older = [] if self.frozen.complete or self._before is None else self._before.layers(world)
        return [*older, layer]

    def rows(self, world: World) -> Rows:
        layers = self.layers(world)
        return {state: list(resolved_rows(state, layers, range(GROUPS))) for state in world.oracle}


def run(world: World, steps: Sequence[tuple[Any, ...]]) -> list[Outstanding]:
    """Runs a program; all frozen versions, checked and released in the end."""
    outstanding: list[Outstanding] = []
    finished: list[Outstanding] = []

    def release(index: int) -> None:
        one = outstanding.pop(index)
        one.finish(world)
        one.frozen.release()
        finished.append(one)

    for step in steps:
        match step:
            case ("freeze",):
                if len(outstanding) == 3:
                    release(0)
                outstanding.append(Outstanding(world))
            case ("read", index, count):
                if index < len(outstanding):
                    outstanding[index].read(count)
            case ("release", index):
                if index < len(outstanding):
                    release(index)
            case ("maintain", budget):
                world.backend.maintain(budget)
            case ("due", now):
                _fire(world, now)
            case ("check",):
                world.check_live()
            case (state, operation, key, argument):
                apply(world, state, operation, key % len(world.spellings), copy.deepcopy(argument))
    world.check_live()
    while outstanding:
        release(len(outstanding) // 2)
    world.backend.maintain(1_000_000)
    world.check_live()
    return finished


def apply(world: World, state: str, operation: str, key: int, argument: Any) -> None:
    """One write, on both sides. Then the user changes everything that went in or comes out."""
    world.at(key, spelling=len(repr(argument)))
    held = world.oracle[state]
    if state == "__event_timers":
        getattr(world.timers, operation)(argument)
        times = held.setdefault(key, [])
        if operation == "set" and argument not in times:
            times.append(argument)
        elif operation == "delete" and argument in times:
            times.remove(argument)
        return
    target = world.states[state]
    given = _given(state, operation, argument)
    plain = copy.deepcopy(given)
    if operation == "clear":
        target.clear()
        held.pop(key, None)
    else:
        getattr(target, operation)(*given)
        _on_oracle(held, state, operation, key, plain)
    for thing in (*given, *_handed_out(target)):
        _spoil(thing)


def _given(state: str, operation: str, argument: Any) -> tuple[Any, ...]:
    """The arguments of a call."""
    match state, operation:
        case _, "clear":
            return ()
        case "order", _:
            return ({"id": len(argument), "tags": argument},)
        case "words", "add":
            return ("".join(argument),)
        case "pairs", "add":
            return ({"x": len(argument), "ys": [0, *map(len, argument)]},)
        case "pairs", _:
            return ([{"x": 1, "ys": ys} for ys in argument],)
        case (("counts" | "lists"), "put"):
            return tuple(argument)
        case (("counts" | "lists"), "remove"):
            return (argument[0],)
        case _:
            return (argument,)


def _on_oracle(held: dict[int, Any], state: str, operation: str, key: int, given: tuple[Any, ...]) -> None:
    match state, operation:
        case (("number" | "order"), _):
            held[key] = [given[0]]
        case _, "add" if state in ("words", "pairs"):
            held.setdefault(key, []).append(given[0])
        case _, "extend":
            held.setdefault(key, []).extend(given[0])
        case _, "replace":
            held[key] = list(given[0])
        case _, "put":
            held.setdefault(key, {})[given[0]] = given[1]
        case _, "remove":
            held.setdefault(key, {}).pop(given[0], None)
        case "largest", _:
            held[key] = max(held.get(key, given[0]), given[0])
        case "longest", _:
            held[key] = given[0] if len(given[0]) > len(held.get(key, ())) or key not in held else held[key]
        case "mean", _:
            mean = held.setdefault(key, {"sum": 0.0, "n": 0})
            held[key] = {"sum": mean["sum"] + given[0], "n": mean["n"] + 1}
        case "seen", _:
            held.setdefault(key, []).append(given[0])
        case _:
            raise AssertionError((state, operation))


def _handed_out(target: Any) -> list[Any]:
    if hasattr(target, "items"):
        return [*target.values(), *(target.get(item) for item in target.keys())]  # noqa: SIM118
    return [target.get()]


def _spoil(thing: Any) -> None:
    """Changes in place whatever can be."""
    if isinstance(thing, list):
        for inner in thing:
            _spoil(inner)
        thing.append("spoilt")
    elif isinstance(thing, dict):
        for inner in thing.values():
            _spoil(inner)
        thing["spoilt"] = "spoilt"
    elif isinstance(thing, tuple):
        for inner in thing:
            _spoil(inner)


def _fire(world: World, now: int) -> None:
    fired: list[tuple[int, int]] = []
    for at_ms in world.timers.due(now):
        number = next(
            number
            for number, spelled in enumerate(world.spellings)
            if any(world.backend.cursor.key is each or world.backend.cursor.key == each for each in spelled)
        )
        fired.append((at_ms, number))
    held = world.oracle["__event_timers"]
    expected = [(at_ms, key) for key, times in held.items() for at_ms in times if at_ms <= now]
    assert [at_ms for at_ms, _ in fired] == sorted(at_ms for at_ms, _ in expected), "in order of time"
    assert sorted(fired) == sorted(expected)
    for key, times in held.items():
        held[key] = [at_ms for at_ms in times if at_ms > now]


# -------------------------------------------------------------------------------------------------------- sections


def check_sections(world: World, frozen: FrozenState, sections: Sequence[Section]) -> None:
    """States in their order, key-groups growing within each, every key in the group of its hash, the right schema."""
    names = [info.name for info in frozen.states]
    assert sorted(names) == sorted(world.oracle)
    places = [(names.index(section.state), section.deleted, section.groups.start) for section in sections if section.groups]
    assert places == sorted(places) and len(places) == len(sections), "by state, then by growing key-group"
    schemas = {info.name: info.schema for info in frozen.states}
    for section in sections:
        assert section.rows.num_rows, "empty sections are left out"
        schema = schemas[section.state]
        assert section.rows.schema.equals(deleted_schema(schema) if section.deleted else schema)
        groups = groups_of(hash_columns([section.rows.column("key")]), GROUPS)
        assert set(groups.tolist()) <= set(section.groups or ())


def entries_of(world: World, rows: Rows) -> Entries:
    entries: Entries = {state: {} for state in world.oracle}
    for state, batches in rows.items():
        for batch in batches:
            for key, value in zip(world.number_of(batch.column("key")), to_list(batch.column("value")), strict=True):
                assert key not in entries[state], "a key is there once"
                entries[state][key] = [value] if state in ("number", "order") else value
    return _without_empty(entries)


def _without_empty(entries: Entries) -> Entries:
    """A key without list items, map entries or timers isn't kept. The order of timers within a key means nothing."""
    kept = {
        state: {key: value for key, value in held.items() if state not in _EMPTY_IS_NOTHING or value}
        for state, held in entries.items()
    }
    return {**kept, "__event_timers": {key: sorted(times) for key, times in kept["__event_timers"].items()}}


_EMPTY_IS_NOTHING = ("words", "pairs", "counts", "lists", "__event_timers")


def restored(world: World, rows: Rows) -> World:
    """Another backend, with these rows."""
    fresh = World(world.name, world.key_type)
    for state, batches in rows.items():
        if state == "__event_timers":
            fresh.timers.load([(key_list(batch.column("key")), batch) for batch in batches], known=False)
        else:
            for batch in batches:
                fresh.backend.load(state, batch, known=False)
    return fresh


# ----------------------------------------------------------------------------------------------------------- tests

backends = pytest.mark.parametrize("name", BACKENDS)
key_types = pytest.mark.parametrize("key_type", KEYS)


@backends
@key_types
@given(steps=st.lists(_steps, max_size=60))
def test_what_is_frozen_stays_as_it_was_whatever_follows(name: str, key_type: str, steps: list[tuple[Any, ...]]) -> None:
    run(World(name, key_type), steps)


@backends
@pytest.mark.parametrize("key_type", ["long", "double", "struct<a: long, b: string>"])
@given(before=st.lists(_operations, max_size=40), after=st.lists(_steps, max_size=40))
def test_a_restored_backend_goes_on_like_the_one_that_was_frozen(
    name: str, key_type: str, before: list[tuple[Any, ...]], after: list[tuple[Any, ...]]
) -> None:
    first = World(name, key_type)
    (frozen,) = run(first, [*before, ("freeze",)])
    second = restored(first, frozen.rows(first))
    second.oracle = copy.deepcopy(frozen.expected)
    second.check_live()
    run(second, after)
    if not after:
        _fire(second, 10)


@backends
@given(steps=st.lists(_operations, max_size=40))
def test_what_goes_through_a_state_file_is_restored(name: str, steps: list[tuple[Any, ...]]) -> None:
    first = World(name, "struct<a: long, b: string>")
    *_, frozen = run(first, [*steps, ("freeze",)])
    encoder = StateFileEncoder(key_group_count=GROUPS)
    content = b"".join(encoder.chunks(frozen.frozen.states, frozen.sections))
    summary = encoder.summary
    reader = StateFileReader(
        lambda offset, length: content[offset : offset + length],
        bytes=summary.bytes,
        index_bytes=summary.index_bytes,
        index_checksum=summary.index_checksum,
    )
    rows = {info.name: list(resolved_rows(info.name, [reader], range(GROUPS))) for info in reader.states}
    second = restored(first, rows)
    second.oracle = frozen.expected
    second.check_live()


@backends
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
@pytest.mark.usefixtures("no_leaked_threads")
def test_versions_are_read_by_another_thread_while_the_state_is_written(name: str, seed: int) -> None:
    """Many keys, so that a reading takes many turns; three versions at a time, released as they are done."""
    rng = random.Random(seed)
    backend = BACKENDS[name](pa.int64())
    total, words = backend.table(_named(tg.value("long"), "total")), backend.table(_named(tg.list_("long"), "words"))
    held: dict[str, dict[int, Any]] = {"total": {}, "words": {}}

    def write(count: int) -> None:
        for _ in range(count):
            key = backend.cursor.key = rng.randrange(20_000)
            if rng.random() < 0.1:
                total.clear()
                words.clear()
                held["total"].pop(key, None)
                held["words"].pop(key, None)
            else:
                value = rng.randrange(1_000_000)
                total.set(value)
                words.add(value)
                held["total"][key] = value
                held["words"].setdefault(key, []).append(value)

    write(30_000)
    readings: list[Reading] = []
    versions: list[Reading] = []
    for _ in range(6):
        frozen = backend.freeze()
        expected = {"total": dict(held["total"]), "words": {key: list(items) for key, items in held["words"].items()}}
        sections: list[Section] = []
        thread = threading.Thread(target=lambda frozen=frozen, sections=sections: sections.extend(frozen.sections()))
        thread.start()
        readings.append((frozen, expected, sections, thread))
        versions.append(readings[-1])
        for _ in range(10):
            write(1_000)
            backend.maintain(1_000)
        if len(readings) >= 3:
            _check_reading(readings.pop(rng.randrange(3)), versions)
    for reading in readings:
        _check_reading(reading, versions)
    for _ in range(100):
        backend.maintain(10_000)
    frozen = backend.freeze()
    versions.append((frozen, held, list(frozen.sections()), threading.Thread()))
    assert _plain(versions) == held


def _check_reading(reading: Reading, versions: Sequence[Reading]) -> None:
    frozen, expected, _, thread = reading
    thread.join()
    frozen.release()
    before = versions[: versions.index(reading) + 1]
    for _, _, _, earlier in before:
        earlier.join()
    assert _plain(before) == expected


def _plain(versions: Sequence[Reading]) -> Entries:
    """What the last of them holds."""
    found: Entries = {"total": {}, "words": {}}
    for frozen, _, sections, _ in versions:
        if frozen.complete:
            found = {"total": {}, "words": {}}
        for section in sections:
            keys, values = (to_list(section.rows.column(0)), to_list(section.rows.column(section.rows.num_columns - 1)))
            for key, value in zip(keys, values, strict=True):
                if section.deleted:
                    found[section.state].pop(key, None)
                else:
                    found[section.state][key] = value
    return found


def _named(descriptor: Descriptor, name: str) -> Descriptor:
    descriptor.name = name
    return descriptor


@backends
def test_functions_may_change_what_they_are_given_and_keep_what_they_made(name: str) -> None:
    """Merging functions that work in place, on objects that they or others hold as well."""
    backend = BACKENDS[name](pa.int64())
    shared: list[int] = []

    def extend(merged: list[int], item: Any) -> list[int]:
        merged.extend(item if isinstance(item, list) else [item])
        return merged

    merged = backend.table(_named(tg.reducing("array<long>", extend), "merged"))
    gathered = backend.table(_named(tg.aggregating("array<long>", create=lambda: shared, add=extend), "gathered"))
    backend.cursor.key = 1
    merged.add([1])
    gathered.add(1)
    frozen = backend.freeze()
    for number in (2, 3):
        merged.add([number])
        gathered.add(number)
    assert merged.get() == gathered.get() == [1, 2, 3]
    assert {section.state: to_list(section.rows.column("value")) for section in frozen.sections()} == {
        "merged": [[1]],
        "gathered": [[1]],
    }
    assert shared == []


@backends
def test_an_empty_backend_has_states_and_no_sections(name: str) -> None:
    world = World(name, "long")
    frozen = world.backend.freeze()
    assert {info.name for info in frozen.states} == set(world.oracle)
    assert list(frozen.sections()) == []
    frozen.release()


@backends
def test_state_can_t_be_touched_where_there_is_no_key(name: str) -> None:
    world = World(name, "long")
    for use in (
        world.states["number"].get,
        world.states["number"].clear,
        world.states["words"].get,
        lambda: world.states["number"].set(1),
        lambda: world.states["words"].add("a"),
        lambda: world.states["counts"].put("a", 1),
        lambda: world.timers.set(1),
    ):
        with pytest.raises(JobError, match="no key here"):
            use()


@backends
@pytest.mark.parametrize(
    ("state", "call", "given"),
    [
        ("number", "set", "text"),
        ("number", "set", 1.5),
        ("number", "set", True),
        ("order", "set", {"id": 1}),
        ("order", "set", {"id": "1", "tags": []}),
        ("words", "add", 1),
        ("words", "extend", ["a", b"b"]),
        ("words", "replace", [1]),
        ("counts", "put", (1, 1)),
        ("counts", "put", ("a", "b")),
        ("counts", "put", (None, 1)),
        ("largest", "add", "text"),
        ("mean", "add", "text"),
        ("longest", "add", [1.5]),
    ],
)
def test_a_value_that_doesn_t_fit_its_declaration_is_refused_at_once(name: str, state: str, call: str, given: Any) -> None:
    world = World(name, "long")
    world.at(1)
    with pytest.raises((SchemaError, TypeError)) as refused:
        getattr(world.states[state], call)(*(given if call == "put" else (given,)))
    assert state in str(refused.value) or isinstance(refused.value, TypeError), "the message names the state"
    world.check_live()


@backends
def test_what_doesn_t_fit_its_column_fails_the_snapshot_by_the_state_s_name(name: str) -> None:
    world = World(name, "long")
    world.at(1)
    world.states["number"].set(2**70)
    with pytest.raises(SchemaError, match="'number'"):
        list(world.backend.freeze().sections())


@backends
@pytest.mark.parametrize(
    ("type", "given", "kept"),
    [
        ("double", 3, 3.0),
        ("float", 0.1, float(np.float32(0.1))),
        ("long", np.int64(3), 3),
        ("binary", bytearray(b"x"), b"x"),
        ("struct<a: long, b: double>", (1, 2), {"a": 1, "b": 2.0}),
        ("array<double>", (1, 2.5), [1.0, 2.5]),
        ("array<long>", np.array([1, 2]), [1, 2]),
        ("map<string, double>", {"a": 1}, {"a": 1.0}),
    ],
)
def test_a_value_has_the_same_form_before_and_after_a_restore(name: str, type: str, given: Any, kept: Any) -> None:
    backend, second = BACKENDS[name](pa.int64()), BACKENDS[name](pa.int64())
    before, after = (each.table(_named(tg.value(type), "state")) for each in (backend, second))
    backend.cursor.key = second.cursor.key = 1
    before.set(given)
    for section in backend.freeze().sections():
        second.load(section.state, section.rows, known=False)
    for got in (before.get(), after.get()):
        assert got == kept and repr(got) == repr(kept)
