"""The heap backend from inside: layers, and how their reader and the loop keep out of each other's way.

What any backend promises is tested in tests/contract/test_backends.py.
"""

from __future__ import annotations

import copy
import tracemalloc
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import SchemaError
from tidegate.state import declaring as tg
from tidegate.state import heap, heap_layers
from tidegate.state.columns import held_as_it_is, key_list
from tidegate.state.descriptors import Descriptor
from tidegate.state.heap import HeapBackend
from tidegate.state.sections import FrozenState, Section, StateKind
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
    return {
        key: value
        for section in sections
        for key, value in zip(to_list(section.rows.column("key")), to_list(section.rows.column("value")), strict=True)
    }


def held(backend: HeapBackend, state: Any) -> dict[int, Any]:
    """By the state's own reading, of the keys 0…100."""
    found = {}
    for backend.cursor.key in range(100):
        if backend.cursor.key in state.cells.held():
            found[backend.cursor.key] = list(state.get()) if isinstance(state.get(), tuple) else state.get()
    return found


# ---------------------------------------------------------------------------------- the loop writes while a layer is read


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
_others = st.tuples(st.sampled_from(["freeze", "maintain"]), st.integers(0, 2))
_turns = st.lists(st.lists(_writes | _others, max_size=6), max_size=30)


@pytest.mark.parametrize("shape", ["value", "list"])
@given(before=st.lists(_writes, max_size=12), turns=_turns)
def test_layers_are_read_right_however_reader_and_loop_take_turns(
    shape: str, before: list[tuple[str, int]], turns: list[list[tuple[str, int]]]
) -> None:
    """At every rest of the reader the loop writes, freezes and maintains. All layers, read one after the other, give what
    was held at each freeze."""
    backend, state = backend_with(tg.value("long") if shape == "value" else tg.list_("long"))
    oracle: dict[int, Any] = {}
    frozen: list[tuple[FrozenState, dict[int, Any]]] = []
    steps = iter(turns)
    numbers = iter(range(1_000_000))

    def act(what: str, key: int) -> None:
        backend.cursor.key = key
        match what:
            case "write" if shape == "value":
                oracle[key] = next(numbers)
                state.set(oracle[key])
            case "write":
                oracle[key] = [*oracle.get(key, []), next(numbers)]
                state.add(oracle[key][-1])
            case "clear":
                oracle.pop(key, None)
                state.clear()
            case "freeze":
                frozen.append((backend.freeze(), copy.deepcopy(oracle)))
            case "maintain":
                backend.maintain(key)

    def turn() -> None:
        for step in next(steps, ()):
            act(*step)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(heap, "Pace", Turns(turn))
        for step in before:
            act(*step)
        frozen.append((backend.freeze(), copy.deepcopy(oracle)))
        found: dict[int, Any] = {}
        while frozen:
            layer, expected = frozen.pop(0)
            sections = list(layer.sections())
            if layer.complete:
                assert laid_over({}, sections) == expected
            found = laid_over(found, sections)
            assert found == expected
            layer.release()
            turn()
    assert held(backend, state) == oracle
    for _ in range(100):
        backend.maintain(1)
    assert all_done(state)
    assert held(backend, state) == oracle
    assert laid_over(found, backend.freeze().sections()) == oracle


def all_done(state: Any) -> bool:
    """Whether nothing is left of the layers."""
    return (
        not state.cells.layers
        if isinstance(state.cells, heap_layers.LayeredTable)
        else not state.cells.shared and not state.cells.unread
    )


def laid_over(found: dict[int, Any], sections: Iterable[Section]) -> dict[int, Any]:
    found = dict(found)
    for section in sections:
        if section.deleted:
            for key in to_list(section.rows.column("key")):
                found.pop(key, None)
        else:
            found |= entries([section])
    return found


def test_a_freeze_copies_nothing() -> None:
    backend, state = filled(1000)
    main, fresh = state.cells.main, state.cells.fresh
    frozen = backend.freeze()
    assert state.cells.main is main and state.cells.fresh == {} and state.cells.layers[0].changes is fresh
    frozen.release()


def test_a_layer_holds_what_changed_and_only_that() -> None:
    backend, state = filled(100)
    first = backend.freeze()
    assert entries(first.sections()) == {key: key for key in range(100)} and first.complete
    for backend.cursor.key in (3, 4):
        state.set(-1)
    backend.cursor.key = 5
    state.get()
    state.clear()
    second = backend.freeze()
    sections = list(second.sections())
    assert laid_over({}, sections) == {3: -1, 4: -1} and not second.complete
    assert [to_list(section.rows.column("key")) for section in sections if section.deleted] == [[5]]
    third = backend.freeze()
    assert list(third.sections()) == [] and not third.complete


def test_loaded_rows_that_are_known_are_no_changes() -> None:
    first, _ = filled(10)
    (rows,) = [section.rows for section in first.freeze().sections()]
    for known in (True, False):
        backend, state = backend_with(tg.value("long"))
        backend.load("state", rows, known=known)
        assert held(backend, state) == {key: key for key in range(10)}
        frozen = backend.freeze()
        assert laid_over({}, frozen.sections()) == ({} if known else {key: key for key in range(10)})
        assert frozen.complete is not known


def test_the_last_key_s_deletion_makes_a_complete_layer_without_rows() -> None:
    backend, state = filled(1)
    list(backend.freeze().sections())
    backend.maintain(1)
    backend.cursor.key = 0
    state.clear()
    frozen = backend.freeze()
    assert [section.deleted for section in frozen.sections()] == [True] and frozen.complete


def test_values_that_change_in_place_are_copied_only_while_someone_reads_them() -> None:
    backend, state = backend_with(tg.list_("long"))
    backend.cursor.key = 1
    state.add(1)
    (own,) = state.cells.main.values()
    state.add(2)
    assert state.cells.main == {1: [1, 2]} and state.cells.main[1] is own
    frozen = backend.freeze()
    state.add(3)
    assert own == [1, 2], "the reader's"
    copied = state.cells.main[1]
    state.add(4)
    assert state.cells.main[1] is copied == [1, 2, 3, 4], "copied once"
    assert entries(frozen.sections()) == {1: [1, 2]}
    newer = backend.freeze()
    assert entries(newer.sections()) == {1: [1, 2, 3, 4]}
    backend.maintain(1)
    state.add(5)
    assert state.cells.main[1] is copied, "the layer was read"


@pytest.mark.parametrize("descriptor", [tg.value("long"), tg.list_("long")])
def test_a_layer_that_is_never_read_is_given_up_by_its_release(descriptor: Any) -> None:
    backend, state = backend_with(descriptor)
    for backend.cursor.key in range(10):
        state.set(1) if hasattr(state, "set") else state.add(1)
    frozen = backend.freeze()
    frozen.release()
    backend.maintain(10)
    assert all_done(state)
    assert len(state.cells.main) == 10


def test_a_layer_of_what_changes_in_place_is_emptied_bit_by_bit_when_it_was_read() -> None:
    backend, state = backend_with(tg.list_("long"))
    for backend.cursor.key in range(5000):
        state.add(1)
    frozen = backend.freeze()
    changes = state.cells.unread[0].changes
    assert len(entries(frozen.sections())) == 5000 and changes == {}


def test_a_layer_of_values_is_moved_into_main_bit_by_bit_when_it_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap_layers, "BACKLOG_STEPS", 10_000)
    backend, state = filled(50)
    list(backend.freeze().sections())
    backend.maintain(1)
    assert len(state.cells.main) == 50 and not state.cells.layers, "into an empty main without moving anything"
    for backend.cursor.key in range(25):
        state.clear()
    for backend.cursor.key in range(25, 100):
        state.set(-1)
    frozen = backend.freeze()
    backend.maintain(1000)
    assert len(state.cells.layers[0].changes) == 100, "not before it was read"
    list(frozen.sections())
    left = 100
    while state.cells.layers:
        assert len(state.cells.layers[0].changes) == left
        assert held(backend, state) == dict.fromkeys(range(25, 100), -1), "whatever is where"
        backend.maintain(7)
        left = max(0, left - 7)
    assert state.cells.main == dict.fromkeys(range(25, 100), -1) and not left


def test_the_more_there_is_to_move_the_more_is_moved_in_a_step() -> None:
    backend, state = filled(1)
    list(backend.freeze().sections())
    backend.maintain(1)
    for backend.cursor.key in range(1, 64_001):
        state.set(1)
    list(backend.freeze().sections())
    steps = 0
    while state.cells.layers:
        backend.maintain(512)
        steps += 1
    assert 60 < steps < 250
    assert len(state.cells.main) == 64_001


# --------------------------------------------------------------------------------------------------- what is kept


def changed(backend: HeapBackend, state: Any, keys: Iterable[int], value: int) -> FrozenState:
    """A frozen version, after these keys were set."""
    for backend.cursor.key in keys:
        state.set(value)
    return backend.freeze()


def read(backend: HeapBackend, frozen: FrozenState) -> dict[int, Any]:
    found = laid_over({}, frozen.sections())
    frozen.release()
    backend.maintain(1000)
    return found


def test_what_changes_nearly_whole_is_reused_and_copied() -> None:
    backend, state = filled(64)
    read(backend, backend.freeze())
    mine = state.cells.fresh
    assert state.cells.reuse_count == 0, "all was new, which tells nothing"
    frozen = changed(backend, state, range(60), 1)
    assert state.cells.fresh is mine and state.cells.reuse_count == 1
    for backend.cursor.key in range(30):
        state.set(2)
    everything = dict.fromkeys(range(60), 1) | {key: key for key in range(60, 64)}
    assert read(backend, frozen) == everything and frozen.complete, "with the little that it lacks"
    assert state.cells.main == {} and len(state.cells.fresh) == 64, "nothing is held twice"
    frozen = changed(backend, state, [70], 3)
    assert read(backend, frozen) == everything | dict.fromkeys(range(30), 2) | {70: 3} and frozen.complete
    assert held(backend, state) == everything | dict.fromkeys(range(30), 2) | {70: 3}


def test_now_and_then_it_is_seen_how_much_changes() -> None:
    backend, state = filled(64)
    read(backend, backend.freeze())
    for number in range(heap_layers.MAX_REUSES):
        assert len(read(backend, changed(backend, state, range(64), number))) == 64
        assert state.cells.reuse_count == number + 1
    assert len(read(backend, changed(backend, state, range(64), -1))) == 64
    assert state.cells.reuse_count == 0 and state.cells.fresh == {} and len(state.cells.main) == 64
    assert read(backend, changed(backend, state, [5], -2)) == {5: -2}, "little: it isn't reused"
    assert state.cells.reuse_count == 0 and held(backend, state) == dict.fromkeys(range(64), -1) | {5: -2}


def test_a_key_that_was_reused_and_is_deleted_is_news() -> None:
    backend, state = filled(8)
    read(backend, backend.freeze())
    read(backend, changed(backend, state, range(9), 1))
    assert state.cells.main == {} and state.cells.reuse_count == 1
    backend.cursor.key = 8
    state.clear()
    assert state.get() is None
    frozen = backend.freeze()
    gone = [to_list(section.rows.column("key")) for section in frozen.sections() if section.deleted]
    assert gone == [[8]] and state.cells.reuse_count == 0, "where something is deleted nothing is reused"
    frozen.release()
    backend.maintain(100)
    assert held(backend, state) == dict.fromkeys(range(8), 1) and 8 not in state.cells.main


def test_what_is_large_is_never_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap_layers, "MAX_REUSED_ENTRIES", 63)
    backend, state = filled(64)
    read(backend, backend.freeze())
    changes = state.cells.fresh
    frozen = changed(backend, state, range(64), 1)
    assert state.cells.layers[0].changes is changes and state.cells.fresh == {}
    assert read(backend, frozen) == dict.fromkeys(range(64), 1) and frozen.complete


def rows_of(fields: str) -> tuple[HeapBackend, Any]:
    """A struct that is held as tuples."""
    return backend_with(Descriptor(kind=StateKind.KEYED, shape="value", item=f"struct<{fields}>", as_tuples=True))


def test_a_row_is_a_tuple_in_memory_and_a_struct_in_a_snapshot() -> None:
    backend, state = rows_of("total long, name string")
    for backend.cursor.key, row in {1: (7, "a"), 2: [8, None], 3: (None, "c")}.items():
        state.set(row)
    assert [state.cells.held()[key] for key in (1, 2, 3)] == [(7, "a"), (8, None), (None, "c")]
    assert all(type(row) is tuple for row in state.cells.held().values())
    frozen = backend.freeze()
    expected = {1: {"total": 7, "name": "a"}, 2: {"total": 8, "name": None}, 3: {"total": None, "name": "c"}}
    sections = list(frozen.sections())
    assert entries(sections) == expected
    other, restored = rows_of("total long, name string")
    for section in sections:
        other.load("state", section.rows)
    assert restored.cells.held() == state.cells.held()
    assert entries(other.freeze().sections()) == expected


def test_a_row_takes_the_form_of_its_types() -> None:
    backend, state = rows_of("share double, at timestamp")
    backend.cursor.key = 1
    at = datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=2)))
    state.set((1, at))
    share, moment = state.get()
    assert (type(share), share) == (float, 1.0)
    assert moment == at and moment.tzinfo is UTC
    for wrong in [(1.0,), (1.0, at, 2), ("much", at)]:
        with pytest.raises(SchemaError, match="state 'state' is declared with"):
            state.set(wrong)
    assert state.get() == (share, moment)


def test_a_row_that_was_never_set_is_none_and_can_be_cleared() -> None:
    backend, state = rows_of("n long")
    backend.cursor.key = 1
    assert state.get() is None
    state.set((1,))
    list(backend.freeze().sections())
    state.clear()
    assert state.get() is None
    assert [section.deleted for section in backend.freeze().sections() if section.rows.num_rows] == [True]


def test_keys_that_come_and_go_between_two_freezes_leave_nothing() -> None:
    backend, state = filled(1)
    list(backend.freeze().sections())
    backend.cursor.key = 50
    state.set(1)
    state.clear()
    assert state.cells.fresh == {} and list(backend.freeze().sections()) == []


def test_state_takes_at_most_twice_the_memory_of_a_dictionary_even_while_it_is_read() -> None:
    """Half of the keys change before the reader has begun; it is quicker than that."""
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
        return backend, frozen

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


@pytest.mark.parametrize(
    ("column", "keys"),
    [
        (pa.array([1, None]), [1, None]),
        (pa.array(["a", None]).dictionary_encode(), ["a", None]),
        (pa.array([0.5, None]).dictionary_encode(), [0.5, None]),
        (pa.array([[1.0], [], None, [None]]), [(1.0,), (), None, (None,)]),
        (pa.array([[1], [2], [3, 4]])[1:], [(2,), (3, 4)]),
        (pa.array([{"a": 1, "b": "x"}, {"a": None, "b": None}]), [(1, "x"), (None, None)]),
        (pa.array([{"a": {"c": [1]}}]), [(((1,),),)]),
    ],
)
def test_keys_are_hashable(column: pa.Array, keys: list[Any]) -> None:
    assert key_list(column) == keys
    assert len(set(key_list(column))) == len(keys)


@pytest.mark.parametrize("width", [32, 64])
def test_nan_is_one_key_and_so_is_zero(width: int) -> None:
    bits: dict[int, Any] = {
        32: np.array([0x7FC0_0000, 0xFFC0_0001], np.uint32).view(np.float32),
        64: np.array([0x7FF8 << 48, (0xFFF8 << 48) + 1], np.uint64).view(np.float64),
    }
    nans, zeros = pa.array(bits[width]), pa.array(np.array([0.0, -0.0], bits[width].dtype))
    assert len({*key_list(nans), *key_list(nans)}) == 1
    assert list(map(str, key_list(zeros))) == ["0.0", "0.0"]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1]),
        pa.array(["a"]),
        pa.array([True]),
        pa.array([b"a"]),
        pa.array([0], pa.date32()),
        pa.array([0], pa.timestamp("us", "UTC")),
    ],
)
def test_columns_whose_values_are_the_keys_need_no_second_conversion(column: pa.Array) -> None:
    assert held_as_it_is(column.type)
    assert key_list(column) == to_list(column)


@pytest.mark.parametrize(
    "column", [pa.array([0.5]), pa.array([[1]]), pa.array([{"a": 1}]), pa.array([1]).dictionary_encode()]
)
def test_columns_whose_values_are_not_the_keys_are_known(column: pa.Array) -> None:
    assert not held_as_it_is(column.type)
