"""State of any Python value: how it is held, what is refused, and how older versions are migrated."""

from __future__ import annotations

import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest

from tests import declaring as tg
from tidegate.errors import JobError, RestoreError, SchemaError
from tidegate.state.descriptors import Descriptor
from tidegate.state.evolution import DeclaredState, described, evolve
from tidegate.state.heap import HeapBackend
from tidegate.state.operator_state import OperatorStates
from tidegate.state.pickled import Pickled, pickled, pickled_version
from tidegate.state.rocksdb import RocksDB
from tidegate.state.sections import StateInfo, StateKind
from tidegate.types import to_list

LONG = pa.int64()


@pytest.fixture(params=["heap", "rocksdb"])
def keyed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[Descriptor], Any]]:
    """The state object of a descriptor, at a key."""
    backends: list[Any] = []

    def made(declared: Descriptor) -> Any:
        declared.name = declared.name or "s"
        backends.append(
            HeapBackend(key_type=LONG, key_group_count=8)
            if request.param == "heap"
            else RocksDB("16 MB", str(tmp_path)).create(key_type=LONG, key_group_count=8)
        )
        state = backends[-1].table(declared)
        backends[-1].cursor.key = 1
        return state

    yield made
    for backend in backends if request.param == "rocksdb" else ():
        backend.close()


# ------------------------------------------------------------------------------------------------- how it is held


def test_a_value_of_any_kind_is_given_back_equal_and_never_the_same(keyed: Any) -> None:
    state = keyed(tg.value(pickled()))
    assert state.get() is None
    given: dict[str, Any] = {"half": Fraction(1, 2), "seen": {1, 2}}
    state.set(given)
    given["seen"].add(3)
    got = state.get()
    assert got == {"half": Fraction(1, 2), "seen": {1, 2}}
    got["seen"].clear()
    assert state.get()["seen"] == {1, 2}
    state.set(None)
    assert state.get() is None
    state.clear()
    assert state.get() is None


def test_a_default_is_a_new_object_every_time(keyed: Any) -> None:
    state = keyed(tg.value(pickled(), default=set()))
    state.get().add(1)
    assert state.get() == set()


def test_lists_maps_reducing_and_aggregating_state_hold_pickled_values(keyed: Any) -> None:
    items = keyed(tg.list_(pickled()))
    items.add({1})
    items.extend([{2}, None])
    assert items.get() == ({1}, {2}, None)
    items.replace([{3}])
    assert items.get() == ({3},)

    by_name = keyed(tg.map_("string", pickled()))
    by_name.put("a", Fraction(1, 3))
    by_name.put("b", None)
    assert (by_name.get("a"), by_name.get("c", 5), dict(by_name.items())) == (
        Fraction(1, 3),
        5,
        {"a": Fraction(1, 3), "b": None},
    )

    largest = keyed(tg.reducing(pickled(), max))
    assert largest.get() is None
    for part in (Fraction(1, 3), Fraction(1, 2), Fraction(1, 4)):
        largest.add(part)
    assert largest.get() == Fraction(1, 2)


def test_an_accumulator_may_be_changed_in_place_or_replaced(keyed: Any) -> None:
    def changed(seen: set[int], item: int) -> set[int]:
        seen.add(item)
        return seen

    for add, result, expected in ((changed, None, {1, 2}), (lambda seen, item: seen | {item}, sum, 3)):
        state = keyed(tg.aggregating(pickled(), create=set, add=add, result=result))
        assert state.get() is None
        for item in (1, 2, 1):
            state.add(item)
        assert state.get() == expected


def test_operator_and_broadcast_state_hold_pickled_values() -> None:
    states = OperatorStates(attempt=1, subtask=0)
    split = states.state(tg.operator_list(pickled(), name="split"))
    union = states.state(tg.operator_list(pickled(), redistribute="union", name="union"))
    rules = states.state(tg.broadcast_map("string", pickled(), name="rules"))
    states.set_writable(True)
    for state in (split, union):
        state.add({1})
        assert state.get() == ({1},)
    rules.put("a", {2})
    assert rules.get("a") == {2}
    again = OperatorStates(attempt=2, subtask=0)
    _, restored, _ = (
        again.state(declared)
        for declared in (
            tg.operator_list(pickled(), name="split"),
            tg.broadcast_map("string", pickled(), name="rules"),
            tg.operator_list(pickled(), redistribute="union", name="union"),
        )
    )
    for section in states.freeze().sections():
        again.load(section.state, section.rows)
    assert restored.get("a") == {2}
    before, after = ({section.state: section.rows for section in each.freeze().sections()} for each in (states, again))
    assert before == after and len(after) == 3


# ---------------------------------------------------------------------------------------------- what is refused


def test_what_can_t_be_pickled_is_refused_by_the_state_s_name(keyed: Any) -> None:
    for state, give in (
        (keyed(tg.value(pickled(), name="lock")), "set"),
        (keyed(tg.list_(pickled(), name="lock")), "add"),
        (keyed(tg.aggregating(pickled(), name="lock", create=list, add=lambda acc, x: x)), "add"),
    ):
        with pytest.raises(SchemaError, match=r"state 'lock' is declared with 'pickled\(version=1\)'.*can't be pickled"):
            getattr(state, give)(threading.Lock())
    with pytest.raises(SchemaError, match=r"default=.*can't be pickled"):
        tg.value(pickled(), default=lambda: 1)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (dict(version=0), "numbers from 1"),
        (dict(version=True), "numbers from 1"),
        (dict(version="2"), "numbers from 1"),
        (dict(version=2**32), "numbers from 1"),
        (dict(version=2, migrate=5), "give a function"),
        (dict(migrate=lambda value, version: value), "nothing is older than version 1"),
    ],
)
def test_a_declaration_that_makes_no_sense_is_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(JobError, match=told):
        pickled(**arguments)


def test_keys_are_not_pickled() -> None:
    for declare in (tg.map_, tg.broadcast_map):
        with pytest.raises(JobError, match="key can't be pickled"):
            declare(pickled(), "long")


def test_pickled_values_have_no_fields_to_speak_of() -> None:
    with pytest.raises(JobError, match="no fields"):
        tg.value(pickled(), added={"a": 1})


# -------------------------------------------------------------------------------------------------- in a snapshot


def test_a_snapshot_has_binary_columns_that_say_what_they_are() -> None:
    declared = tg.map_("string", pickled(version=3), name="s")
    info = declared.info(LONG)
    assert info.schema.field("value").type == pa.map_(pa.string(), pa.binary())
    assert pickled_version(info.schema) == 3
    assert pickled_version(pa.ipc.read_schema(pa.py_buffer(info.schema.serialize()))) == 3
    assert pickled_version(tg.value("binary", name="s").info(LONG).schema) is None
    assert repr(declared) == "map s: map<string,binary> of pickled(version=3)"
    assert described("keyed", "map", info.schema) == "keyed map map<string,binary> of pickled(version=3) by long"
    assert described("keyed", "value", tg.value(pickled(), name="s").info(LONG).schema) == (
        "keyed value pickled(version=1) by long"
    )


def test_it_is_a_pickle_of_a_fixed_protocol_behind_its_version() -> None:
    held = pickled(version=258).held({1})
    assert held is not None and held[:4] == b"\x00\x00\x01\x02" and held[4:6] == b"\x80\x05"
    assert pickle.loads(held[4:]) == {1}


def test_functions_with_pickled_state_travel_to_the_slots() -> None:
    class Local:
        total = tg.aggregating(pickled(version=2, migrate=lambda value, version: value), create=set, add=lambda acc, x: acc)

    there = pickle.loads(cloudpickle.dumps(Local()))
    assert type(there).total.pickled.version == 2


# ------------------------------------------------------------------------------------------------------- versions


def info_of(declared: Descriptor) -> StateInfo:
    declared.name = "s"
    return declared.info(LONG if declared.kind is StateKind.KEYED else None)


def taken_in(old: Descriptor, new: Descriptor, *values: Any) -> list[Any]:
    """What the present declaration makes of what an earlier one had written."""
    info = info_of(old)
    columns = [pa.array(range(len(values)), LONG)] if old.kind is StateKind.KEYED else []
    rows = pa.RecordBatch.from_arrays([*columns, pa.array(values, old.type)], schema=info.schema)
    evolved = evolve(info, DeclaredState(info_of(new), (), new.changes, new.pickled))
    assert evolved.convert is not None
    after = evolved.convert(rows)
    after.validate(full=True)
    return to_list(after.column("value"))


def upgraded(value: Any, version: int) -> Any:
    return (f"from {version}", value)


FIRST, SECOND = Pickled(), Pickled(2, upgraded)


def first(value: Any) -> bytes:
    held = FIRST.held(value)
    assert held is not None
    return held


def second(value: Any) -> bytes:
    held = SECOND.held(value)
    assert held is not None
    return held


@pytest.mark.parametrize(
    ("declare", "before", "after"),
    [
        (tg.value, first(1), second(("from 1", 1))),
        (tg.value, None, None),
        (tg.value, second(5), second(5)),  # a value that was written by the present version already
        (tg.list_, [first(1), None, second(2)], [second(("from 1", 1)), None, second(2)]),
        (lambda item: tg.map_("string", item), [("a", first(1)), ("b", None)], {"a": second(("from 1", 1)), "b": None}),
        (lambda item: tg.reducing(item, max), first(1), second(("from 1", 1))),
        (lambda item: tg.aggregating(item, create=set, add=max), first(1), second(("from 1", 1))),
        (tg.operator_list, first(1), second(("from 1", 1))),
        (
            lambda item: tg.operator_list(item, redistribute="union"),
            {"id": "1", "item": first(1)},
            {"id": "1", "item": second(("from 1", 1))},
        ),
        (
            lambda item: tg.broadcast_map("string", item),
            {"key": "a", "value": first(1)},
            {"key": "a", "value": second(("from 1", 1))},
        ),
    ],
)
def test_values_of_an_older_version_are_migrated_when_they_are_loaded(declare: Any, before: Any, after: Any) -> None:
    assert taken_in(declare(FIRST), declare(SECOND), before, before) == [after, after]


def test_values_of_the_present_version_are_left_alone() -> None:
    assert taken_in(tg.value(SECOND), tg.value(SECOND), second(1), None, second(2)) == [second(1), None, second(2)]
    assert taken_in(tg.value(SECOND), tg.value(SECOND)) == []


def test_a_key_of_a_map_is_widened_beside() -> None:
    assert taken_in(tg.map_("int", FIRST), tg.map_("long", SECOND), [(1, first(1))]) == [{1: second(("from 1", 1))}]


def test_a_value_of_an_older_version_is_migrated_when_it_is_read_where_nobody_did_before() -> None:
    assert SECOND.handed_out(first({7}), "s") == ("from 1", {7})
    assert SECOND.handed_out(second({7}), "s") == {7}


def test_a_version_that_can_t_be_read_is_refused_before_the_start() -> None:
    with pytest.raises(RestoreError, match=r"version 1 and is declared with version 3.*pickled\(version=3, migrate=…\)"):
        evolve(info_of(tg.value(FIRST)), DeclaredState(info_of(tg.value(Pickled(3))), pickled=Pickled(3)))
    with pytest.raises(RestoreError, match=r"version 2 and is declared with version 1.*or a later one"):
        evolve(info_of(tg.value(SECOND)), DeclaredState(info_of(tg.value(FIRST)), pickled=FIRST))
    with pytest.raises(RestoreError, match=r"state 's' was pickled with version 2 and is declared with version 1"):
        FIRST.handed_out(second(1), "s")


@pytest.mark.parametrize(
    ("old", "new"),
    [(tg.value("binary"), tg.value(FIRST)), (tg.value(FIRST), tg.value("binary")), (tg.list_(FIRST), tg.list_("binary"))],
)
def test_bytes_are_not_taken_for_pickles(old: Descriptor, new: Descriptor) -> None:
    with pytest.raises(RestoreError, match="values that were pickled can't become others, nor the other way round"):
        evolve(info_of(old), DeclaredState(info_of(new), pickled=new.pickled))


def test_a_migration_that_fails_says_where() -> None:
    def broken(value: Any, version: int) -> Any:
        raise KeyError("price")

    with pytest.raises(RestoreError, match=r"state 's': migrate failed for a value of version 1, \{7\}: KeyError: 'price'"):
        taken_in(tg.value(FIRST), tg.value(Pickled(2, broken)), first({7}))


def test_what_is_no_pickle_is_an_error_that_says_so() -> None:
    with pytest.raises(RestoreError, match=r"state 's' holds b'\\x00', which is not a pickled value"):
        FIRST.handed_out(b"\x00", "s")
    with pytest.raises(RestoreError, match=r"state 's' holds a value that can't be unpickled: "):
        FIRST.handed_out(b"\x00\x00\x00\x01" + b"garbage", "s")


class Model:
    """A class that the tests below make disappear."""

    def __init__(self) -> None:
        self.weights = [1.0]


@pytest.fixture
def gone() -> Iterator[bytes]:
    """A pickled value whose class isn't there any more."""
    module = types.ModuleType("shop_models")
    Model.__module__, Model.__qualname__ = "shop_models", "Model"
    module.Model = Model  # type: ignore[attr-defined]
    sys.modules["shop_models"] = module
    try:
        yield first([Model()])
    finally:
        sys.modules.pop("shop_models", None)


def test_a_class_that_is_missing_is_named_at_the_restore(gone: bytes) -> None:
    assert taken_in(tg.value(FIRST), tg.value(FIRST), gone) == [gone]
    del sys.modules["shop_models"].Model
    with pytest.raises(RestoreError, match=r"state 's' holds a value whose class shop_models\.Model is missing here"):
        taken_in(tg.value(FIRST), tg.value(FIRST), None, gone)


def test_a_module_that_is_missing_is_named_at_the_restore(gone: bytes) -> None:
    del sys.modules["shop_models"]
    with pytest.raises(RestoreError, match=r"whose class shop_models\.Model is missing here \(No module named"):
        taken_in(tg.list_(FIRST), tg.list_(SECOND), [gone])
