"""Operator state: lists by split and by union, broadcast dictionaries."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.errors import JobError
from tidegate.state.descriptors import Descriptor
from tidegate.state.operator_state import OperatorStates


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
        items.extend([index, 7])                        # equal items are items of their own
    sizes = []
    for attempt in range(2, 12):
        written = snapshot(owners)
        sizes.append(sum(rows.num_rows for rows in written))
        owners = subtasks(descriptor, 3, attempt=attempt)
        for owner, _ in owners:
            for rows in written:
                owner.load("state", rows)
        assert [sorted(items.get()) for _, items in owners] == [[0, 1, 2, 7, 7, 7]] * 3
    assert sizes[1:] == [18] * 9                        # each of three subtasks writes the six items, no more


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
