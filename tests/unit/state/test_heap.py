"""The heap backend from inside: how a reader and the loop share one dictionary, and what is left to do afterwards.

What any backend promises is tested in tests/contract/test_backends.py.
"""

from __future__ import annotations

import copy
import tracemalloc
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.state import descriptors as tg
from tidegate.state import heap, heap_tables
from tidegate.state.cutting import Pace
from tidegate.state.descriptors import Descriptor
from tidegate.state.heap import Corrections, FrozenHeap, HeapBackend, held_as_it_is, key_list
from tidegate.state.heap_tables import GONE, HeapTable
from tidegate.state.sections import Section
from tidegate.types import to_list


def backend_with(descriptor: Any, *, groups: int = 4) -> tuple[HeapBackend, Any]:
    backend = HeapBackend(key_type=pa.int64(), key_group_count=groups)
    assert isinstance(descriptor, Descriptor)
    descriptor.name = "state"
    return backend, backend.table(descriptor)


def filled(count: int) -> tuple[HeapBackend, Any]:
    """Keys 0…count, each with its own number as value."""
    backend, state = backend_with(tg.value("long"))
    for backend.cursor.key in range(count):
        state.set(backend.cursor.key)
    return backend, state


def entries(sections: Iterable[Section]) -> dict[int, Any]:
    return {key: value for section in sections for key, value in zip(
        to_list(section.rows.column("key")), to_list(section.rows.column("value")), strict=True)}


def held(backend: HeapBackend, state: Any) -> dict[int, Any]:
    """By the state's own reading, of the keys 0…100."""
    found = {}
    for backend.cursor.key in range(100):
        if state.seen(backend.cursor.key) is not GONE:
            found[backend.cursor.key] = list(state.get()) if isinstance(state.get(), tuple) else state.get()
    return found


# ---------------------------------------------------------------------------- the loop writes while a version is read


class Turns:
    """Takes the place of `Pace`: chunks of two entries, and at every rest the loop has a turn."""

    def __init__(self, turn: Callable[[], None]) -> None:
        self.turn = turn
        self.entries = 2

    def __call__(self, *, rest_factor: float) -> Turns:
        return self

    def rest_if_due(self) -> None:
        self.turn()


_writes = st.tuples(st.sampled_from(["write", "write", "clear"]), st.integers(0, 9))
_others = st.tuples(st.sampled_from(["freeze", "read", "release", "maintain"]), st.integers(0, 2))
_turns = st.lists(st.lists(_writes | _others, max_size=6), max_size=30)


@pytest.mark.parametrize("shape", ["value", "list"])
@pytest.mark.parametrize("shard_entries", [2, 1000])
@given(before=st.lists(_writes, max_size=12), turns=_turns)
def test_a_version_is_read_right_however_reader_and_loop_take_turns(
        shape: str, shard_entries: int, before: list[tuple[str, int]], turns: list[list[tuple[str, int]]]) -> None:
    """At every rest of a reader the loop writes, freezes, and lets other readers read, which rest in turn."""
    backend, state = backend_with(tg.value("long") if shape == "value" else tg.list_("long"))
    oracle: dict[int, Any] = {}
    outstanding: list[tuple[FrozenHeap, dict[int, Any]]] = []
    left = list(turns)
    stamp = 0

    def act(what: str, number: int) -> None:
        nonlocal stamp
        stamp += 1
        backend.cursor.key = number
        if what == "write" and shape == "value":
            state.set(stamp)
            oracle[number] = stamp
        elif what == "write":
            state.add(stamp)
            oracle.setdefault(number, []).append(stamp)
        elif what == "clear":
            state.clear()
            oracle.pop(number, None)
        elif what == "freeze" and len(outstanding) < 3:
            outstanding.append((backend.freeze(), copy.deepcopy(oracle)))
        elif what in ("read", "release") and number < len(outstanding):
            read(*outstanding.pop(number))
        elif what == "maintain":
            backend.maintain(number)

    def turn() -> None:
        for step in left.pop(0) if left else ():
            act(*step)

    def read(frozen: FrozenHeap, expected: dict[int, Any]) -> None:
        assert entries(frozen.sections()) == expected
        frozen.release()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(heap, "Pace", Turns(turn))
        patched.setattr(heap, "SHARD_ENTRIES", shard_entries)
        for step in before:
            act(*step)
        outstanding.append((backend.freeze(), copy.deepcopy(oracle)))
        while outstanding:
            read(*outstanding.pop())
            turn()
    assert held(backend, state) == oracle
    for _ in range(100):
        backend.maintain(5)
    check_tidy(state)
    assert held(backend, state) == oracle == entries(backend.freeze().sections())


def check_tidy(table: HeapTable) -> None:
    """Nothing is left of versions: every entry is a value in main."""
    assert table.steady and not (table.added or table.dead or table.own or table.versions or table.waste)
    assert GONE not in table.main.values()


def test_a_freeze_copies_nothing() -> None:
    backend, state = filled(1000)
    main = state.main
    frozen = backend.freeze()
    assert state.main is main and state.added == ({},)
    assert [version.parts for version in state.versions] == [(main,)] and not state.versions[0].changed_keys
    frozen.release()


def test_the_loop_is_done_with_a_version_when_its_entries_were_taken_not_when_they_were_written() -> None:
    backend, state = filled(1000)
    sections = iter(backend.freeze().sections())
    first = next(sections)
    backend.maintain(0)
    assert state.steady, "a write is a plain one again, though most sections are still to be made"
    for backend.cursor.key in range(1000):
        state.set(-1)
    assert entries([first, *sections]) == {key: key for key in range(1000)}


def test_a_log_that_begins_again_later_says_nothing_about_the_version_before() -> None:
    """The first version is taken but not written yet; the second logs what keys held then, which is something else."""
    backend, _ = filled(10)
    other = backend.table(tg.value("long", name="other"))
    for backend.cursor.key in range(10):
        other.set(1)
    sections = iter(backend.freeze().sections())
    assert next(sections).state == "state"
    backend.maintain(0)
    for backend.cursor.key in range(10):
        other.set(2)        # not logged: there is no reader
    newer = backend.freeze()
    for backend.cursor.key in range(10):
        other.set(3)
    assert entries(section for section in sections if section.state == "other") == dict.fromkeys(range(10), 1)
    assert entries(section for section in newer.sections() if section.state == "other") == dict.fromkeys(range(10), 2)


def test_lists_that_change_in_place_while_sections_are_made_are_written_as_they_were() -> None:
    backend, numbers = filled(100)
    descriptor = tg.list_("long", name="list")
    state = backend.table(descriptor)
    for backend.cursor.key in range(100):
        state.add(1)
    sections = iter(backend.freeze().sections())
    assert next(sections).state == numbers.info.name
    backend.maintain(0)
    for backend.cursor.key in range(100):
        state.add(2)
    assert entries(section for section in sections if section.state == "list") == {key: [1] for key in range(100)}


def test_values_that_change_in_place_are_copied_only_while_someone_reads_them() -> None:
    backend, state = backend_with(tg.list_("long"))
    backend.cursor.key = 1
    state.add(1)
    (own,) = state.main.values()
    state.add(2)
    assert state.main == {1: [1, 2]} and state.main[1] is own
    frozen = backend.freeze()
    state.add(3)
    assert own == [1, 2], "the reader's"
    copied = state.seen(1)
    state.add(4)
    assert state.seen(1) is copied == [1, 2, 3, 4], "copied once"
    assert entries(frozen.sections()) == {1: [1, 2]}


def test_a_version_that_is_never_read_is_given_up_by_its_release() -> None:
    backend, state = filled(10)
    frozen = backend.freeze()
    backend.cursor.key = 3
    state.set(33)
    frozen.release()
    backend.maintain(10)
    check_tidy(state)
    assert held(backend, state)[3] == 33


# --------------------------------------------------------------------------------------------- what is left to do


def test_a_step_of_maintenance_does_no_more_than_its_budget() -> None:
    backend, state = filled(50)
    frozen = backend.freeze()
    for backend.cursor.key in range(25):
        state.clear()
    for backend.cursor.key in range(25, 100):
        state.set(-1)
    frozen.release()
    dead, added = 25, 50
    while not state.steady or state.waste:
        assert sum(value is GONE for value in state.main.values()) == len(state.dead) == dead
        assert sum(map(len, state.added)) == added
        assert held(backend, state) == dict.fromkeys(range(25, 100), -1), "whatever is where"
        backend.maintain(7)
        dead, added = max(0, dead - 7), added if dead > 7 else max(0, added - 7)
    assert dead == added == 0
    check_tidy(state)


def test_the_more_there_is_to_do_the_more_is_done_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap_tables, "BACKLOG_STEPS", 5)
    backend, state = filled(1)
    frozen = backend.freeze()
    for backend.cursor.key in range(1, 101):
        state.set(1)
    frozen.release()
    left = []
    while state.added:
        left.append(sum(map(len, state.added)))
        backend.maintain(1)
    assert left[:3] == [100, 79, 63] and len(left) < 20


def test_writes_and_deletions_between_two_steps_are_kept() -> None:
    backend, state = filled(4)
    frozen = backend.freeze()
    for backend.cursor.key in range(2, 8):
        state.set(-1)
    frozen.release()
    backend.maintain(1)
    for backend.cursor.key in (2, 6):
        state.set(-2)
    for backend.cursor.key in (3, 7):
        state.clear()
    while not state.steady or state.waste:
        backend.maintain(1)
    check_tidy(state)
    assert held(backend, state) == {0: 0, 1: 1, 2: -2, 4: -1, 5: -1, 6: -2}


def test_deleted_keys_leave_nothing_behind() -> None:
    backend, state = filled(100)
    frozen = backend.freeze()
    for backend.cursor.key in range(100):
        state.clear()
    assert len(state.main) == 100 and entries(frozen.sections()).keys() == set(range(100))
    frozen.release()
    backend.maintain(1000)
    assert state.main == {}
    check_tidy(state)


def test_keys_that_come_and_go_while_a_version_is_read_are_not_even_remembered() -> None:
    backend, state = filled(1)
    frozen = backend.freeze()
    backend.cursor.key = 50
    state.set(1)
    state.clear()
    assert state.added == ({},) and not state.dead and not state.versions[0].changed_keys
    assert entries(frozen.sections()) == {0: 0}


def test_the_first_entries_of_an_empty_table_are_taken_in_without_moving_them() -> None:
    backend, state = backend_with(tg.value("long"))
    backend.freeze().release()
    state.tidy(0)
    frozen = backend.freeze()
    for backend.cursor.key in range(100):
        state.set(1)
    added = state.added[-1]
    frozen.release()
    backend.maintain(1)
    assert state.main is added and state.steady


def test_many_versions_without_a_pause_are_let_go() -> None:
    """There is always a reader, as with a slow store."""
    backend, state = filled(3)
    frozen = backend.freeze()
    for number in range(100):
        newer = backend.freeze()
        for backend.cursor.key in range(3):
            state.set(number)
        frozen.release()
        backend.maintain(10)
        frozen = newer
    assert len(state.versions) == 1 and not state.waste
    assert entries(frozen.sections()) == dict.fromkeys(range(3), 98)


@pytest.mark.parametrize("shard_entries", [10, 1000])
def test_what_was_is_looked_up_in_small_dictionaries(monkeypatch: pytest.MonkeyPatch, shard_entries: int) -> None:
    """So that none of them takes long to grow."""
    monkeypatch.setattr(heap, "SHARD_ENTRIES", shard_entries)
    twice: list[Any] = list(range(50)) * 2
    later: list[Any] = [7, 99, 0]
    was = Corrections([(twice, list(range(100)), 100), (later, ["x", "y", "z"], 2)], Pace(rest_factor=0.0))
    assert max(map(len, was._was)) == (51 if shard_entries == 1000 else 4)
    keys = [*range(100), None]
    assert was.corrected(keys, ["now"] * 101) == [*range(50), *["now"] * 49, "y", "now"], "the first one counts"


def test_logs_are_dropped_bit_by_bit_when_nobody_needs_them() -> None:
    backend, state = filled(100)
    older, newer = backend.freeze(), backend.freeze()
    for backend.cursor.key in range(100):
        state.set(-1)
    newer.release()
    backend.maintain(10)
    assert state.waste == [], "the older one needs it, too"
    assert entries(older.sections()) == {key: key for key in range(100)}
    older.release()
    left = []
    while state.waste or not left:
        backend.maintain(30)
        left.append(sum(map(len, state.waste)))
    assert left[:2] == [200 - 30 - 3, 200 - 30 - 3 - 30 - 2]
    check_tidy(state)


def test_state_takes_at_most_twice_the_memory_of_a_dictionary_even_while_it_is_read() -> None:
    """DESIGN section 10. Half of the keys change before the reader has taken one; it is quicker than that."""
    count = 20_000

    def plain() -> Any:
        return {key: key * 0.5 for key in range(1_000, 1_000 + count)}

    def changing() -> Any:
        backend, state = backend_with(tg.value("double"))
        for backend.cursor.key in range(1_000, 1_000 + count):
            state.set(backend.cursor.key * 0.5)
        frozen = backend.freeze()
        for backend.cursor.key in range(1_000, 1_000 + count, 2):
            state.set(backend.cursor.key * 0.25)
        return backend, frozen, iter(frozen.sections())

    assert memory_of(changing) <= 2 * memory_of(plain)


def memory_of(make: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        made = make()
        size, _ = tracemalloc.get_traced_memory()
        del made
        return size
    finally:
        tracemalloc.stop()


# ------------------------------------------------------------------------------------------------------------ keys


@pytest.mark.parametrize(("column", "keys"), [
    (pa.array([1, None]), [1, None]),
    (pa.array(["a", None]).dictionary_encode(), ["a", None]),
    (pa.array([0.5, None]).dictionary_encode(), [0.5, None]),
    (pa.array([[1.0], [], None, [None]]), [(1.0,), (), None, (None,)]),
    (pa.array([[1], [2], [3, 4]])[1:], [(2,), (3, 4)]),
    (pa.array([{"a": 1, "b": "x"}, {"a": None, "b": None}]), [(1, "x"), (None, None)]),
    (pa.array([{"a": {"c": [1]}}]), [(((1,),),)]),
])
def test_keys_are_hashable(column: pa.Array, keys: list[Any]) -> None:
    assert key_list(column) == keys
    assert len(set(key_list(column))) == len(keys)


@pytest.mark.parametrize("width", [32, 64])
def test_nan_is_one_key_and_so_is_zero(width: int) -> None:
    bits: dict[int, Any] = {32: np.array([0x7FC0_0000, 0xFFC0_0001], np.uint32).view(np.float32),
                            64: np.array([0x7FF8 << 48, (0xFFF8 << 48) + 1], np.uint64).view(np.float64)}
    nans, zeros = pa.array(bits[width]), pa.array(np.array([0.0, -0.0], bits[width].dtype))
    assert len({*key_list(nans), *key_list(nans)}) == 1
    assert list(map(str, key_list(zeros))) == ["0.0", "0.0"]


@pytest.mark.parametrize("column", [pa.array([1]), pa.array(["a"]), pa.array([True]), pa.array([b"a"]),
                                    pa.array([0], pa.date32()), pa.array([0], pa.timestamp("us", "UTC"))])
def test_columns_whose_values_are_the_keys_need_no_second_conversion(column: pa.Array) -> None:
    assert held_as_it_is(column.type)
    assert key_list(column) == to_list(column)


@pytest.mark.parametrize("column", [
    pa.array([0.5]), pa.array([[1]]), pa.array([{"a": 1}]), pa.array([1]).dictionary_encode()])
def test_columns_whose_values_are_not_the_keys_are_known(column: pa.Array) -> None:
    assert not held_as_it_is(column.type)
