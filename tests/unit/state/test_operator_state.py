"""Operator state: lists by split and by union, broadcast dictionaries."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime
from typing import Any

import pyarrow as pa
import pytest

from tests import declaring as tg
from tidegate.errors import JobError, SchemaError
from tidegate.state.descriptors import Descriptor
from tidegate.state.operator_state import FrozenTogether, OperatorStates
from tidegate.state.sections import Section, StateInfo


def declared(descriptor: Descriptor) -> Descriptor:
    descriptor.name = "state"
    return descriptor


def subtasks(descriptor: Descriptor, count: int, *, attempt: int) -> list[tuple[OperatorStates, Any]]:
    owners = [OperatorStates(attempt=attempt, subtask=index) for index in range(count)]
    return [(owner, owner.state(descriptor)) for owner in owners]


def snapshot(owners: list[tuple[OperatorStates, Any]]) -> list[pa.RecordBatch]:
    return [section.rows for owner, _ in owners for section in owner.freeze().sections()]


def test_union_state_is_whole_everywhere_and_does_not_grow_over_ten_restarts() -> None:
    descriptor = declared(tg.operator_list("long", redistribute="union"))
    owners = subtasks(descriptor, 3, attempt=1)
    for index, (_, items) in enumerate(owners):
        items.extend([index, 7])  # equal items are items of their own
    sizes = []
    for attempt in range(2, 12):
        written = snapshot(owners)
        sizes.append(sum(rows.num_rows for rows in written))
        owners = subtasks(descriptor, 3, attempt=attempt)
        for owner, _ in owners:
            for rows in written:
                owner.load("state", rows)
        assert [sorted(items.get()) for _, items in owners] == [[0, 1, 2, 7, 7, 7]] * 3
    assert sizes[1:] == [18] * 9  # each of three subtasks writes the six items, no more


def test_union_items_added_after_a_restore_are_new_items() -> None:
    descriptor = declared(tg.operator_list("string", redistribute="union"))
    (first,) = subtasks(descriptor, 1, attempt=1)
    first[1].add("a")
    written = snapshot([first])
    again = subtasks(descriptor, 2, attempt=2)
    for owner, items in again:
        for rows in written:
            owner.load("state", rows)
        items.add("a")
    (last,) = subtasks(descriptor, 1, attempt=3)
    for rows in snapshot(again):
        last[0].load("state", rows)
    assert last[1].get() == ("a", "a", "a")


def test_split_state_is_written_by_whoever_holds_it() -> None:
    descriptor = declared(tg.operator_list("long"))
    owners = subtasks(descriptor, 2, attempt=1)
    owners[0][1].extend([1, 2])
    owners[1][1].add(3)
    assert [rows.column("value").to_pylist() for rows in snapshot(owners)] == [[1, 2], [3]]


def test_broadcast_state_is_written_by_subtask_0_alone_and_only_by_the_broadcast_side() -> None:
    descriptor = declared(tg.broadcast_map("string", "long"))
    owners = subtasks(descriptor, 2, attempt=1)
    for owner, rules in owners:
        with pytest.raises(JobError, match="process_broadcast"):
            rules.put("a", 1)
        owner.set_writable(True)
        rules.put("a", 1)
        owner.set_writable(False)
    (written,) = snapshot(owners)
    fresh = subtasks(descriptor, 1, attempt=2)
    fresh[0][0].load("state", written)
    assert dict(fresh[0][1].items()) == {"a": 1}


def test_what_is_read_or_given_can_be_changed_without_changing_the_state() -> None:
    descriptor = declared(tg.operator_list("array<long>"))
    ((owner, items),) = subtasks(descriptor, 1, attempt=1)
    given = [1]
    items.add(given)
    given.append(2)
    items.get()[0].append(3)
    assert items.get() == ([1],)
    assert owner.freeze().states[0].name == "state"


@pytest.mark.parametrize("redistribute", ["split", "union"])
def test_a_frozen_list_stays_as_it_was(redistribute: str) -> None:
    descriptor = declared(tg.operator_list("array<long>", redistribute=redistribute))
    ((owner, items),) = subtasks(descriptor, 1, attempt=1)
    items.extend([[1], [2]])
    frozen = owner.freeze()
    items.add([3])
    items.replace([[4]])
    items.clear()
    assert (items.get(), list(items), len(items)) == ((), [], 0)
    (section,) = frozen.sections()
    (again,) = subtasks(descriptor, 1, attempt=2)
    again[0].load("state", section.rows)
    assert again[1].get() == ([1], [2])
    assert section.groups is None and section.state == "state"


@pytest.mark.parametrize("type", ["map<string, array<long>>", "struct<m: map<long, timestamp>>", "date"])
def test_values_of_any_type_come_back(type: str) -> None:
    value = {
        "map<string, array<long>>": {"a": [1, None]},
        "date": date(2024, 5, 1),
        "struct<m: map<long, timestamp>>": {"m": {1: datetime(2024, 5, 1, tzinfo=UTC)}},
    }[type]
    lists = [tg.operator_list(type, redistribute=redistribute) for redistribute in ("split", "union")]
    for descriptor in (*lists, tg.broadcast_map("string", type)):
        ((owner, state),) = subtasks(declared(descriptor), 1, attempt=1)
        owner.set_writable(True)
        if hasattr(state, "put"):
            state.put("key", value)
        else:
            state.add(value)
        ((fresh, restored),) = subtasks(descriptor, 1, attempt=2)
        for rows in snapshot([(owner, state)]):
            fresh.load("state", rows)
        got = restored.get("key") if hasattr(state, "put") else restored.get()[0]
        assert got == value and repr(got) == repr(value)


def test_broadcast_state_is_a_dictionary() -> None:
    ((owner, rules),) = subtasks(declared(tg.broadcast_map("string", "array<long>")), 1, attempt=1)
    owner.set_writable(True)
    given = [1]
    rules.put("a", given)
    rules.put("b", [])
    rules.remove("nothing")
    for handed_out in (given, rules.get("a"), dict(rules.items())["a"], next(iter(rules.values()))):
        handed_out.append(9)
    assert (rules.get("a"), rules.get("c"), rules.get("c", 0)) == ([1], None, 0)
    assert list(rules) == list(rules.keys()) == ["a", "b"] and len(rules) == 2
    assert "a" in rules and "c" not in rules
    for name in rules:
        rules.remove(name)
    rules.put("z", [])
    rules.clear()
    assert len(rules) == 0


@pytest.mark.parametrize(
    "write", [lambda rules: rules.put("a", 1), lambda rules: rules.remove("a"), lambda rules: rules.clear()]
)
def test_broadcast_state_can_t_be_written_on_the_main_side(write: Any) -> None:
    ((_, rules),) = subtasks(declared(tg.broadcast_map("string", "long")), 1, attempt=1)
    with pytest.raises(JobError, match="'state' can be written in process_broadcast only"):
        write(rules)


@pytest.mark.parametrize(
    "write", [lambda items: items.add("x"), lambda items: items.extend([1, "x"]), lambda items: items.replace(["x"])]
)
def test_an_item_that_doesn_t_fit_is_refused_at_once(write: Any) -> None:
    for redistribute in ("split", "union"):
        ((_, items),) = subtasks(declared(tg.operator_list("long", redistribute=redistribute)), 1, attempt=1)
        with pytest.raises(SchemaError, match="state 'state' is declared with 'long'"):
            write(items)
        assert items.get() == ()


def test_what_doesn_t_fit_its_column_fails_the_snapshot_by_the_state_s_name() -> None:
    ((owner, items),) = subtasks(declared(tg.operator_list("long")), 1, attempt=1)
    items.add(2**70)
    with pytest.raises(SchemaError, match="'state'"):
        list(owner.freeze().sections())


def test_states_without_items_are_named_but_not_written() -> None:
    owner = OperatorStates(attempt=1, subtask=1)
    rules = owner.state(tg.broadcast_map("string", "long", name="rules"))
    owner.state(tg.operator_list("long", name="items"))
    owner.set_writable(True)
    rules.put("a", 1)
    assert "rules" in owner and "items" in owner and "more" not in owner
    frozen = owner.freeze()
    assert [info.name for info in frozen.states] == ["rules", "items"]
    assert list(frozen.sections()) == []
    frozen.release()


def test_parts_are_one_after_the_other() -> None:
    released = []

    class Part:
        complete = True

        def __init__(self, name: str) -> None:
            self.info = tg.operator_list("long", name=name).info()

        @property
        def states(self) -> tuple[StateInfo, ...]:
            return (self.info,)

        def sections(self) -> Iterator[Section]:
            yield Section(self.info.name, None, pa.record_batch([pa.array([1])], schema=self.info.schema))

        def release(self) -> None:
            released.append(self.info.name)

    parts = FrozenTogether(Part("a"), Part("b"))
    assert [info.name for info in parts.states] == [section.state for section in parts.sections()] == ["a", "b"]
    parts.release()
    assert released == ["a", "b"]
