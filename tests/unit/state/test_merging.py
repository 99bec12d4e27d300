"""Layers laid over one another give what a dictionary would hold."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.state import merging
from tidegate.state.columns import key_list
from tidegate.state.cutting import cut_by_group
from tidegate.state.merging import LayerInMemory, key_codes, merged_sections, resolved_rows
from tidegate.state.sections import Section, StateInfo, StateKind, deleted_schema
from tidegate.types import parse_type

GROUPS = 16
KEYS: dict[str, list[Any]] = {
    "long": [0, 1, -1, 2**62, None, 7],
    "string": ["", "a", "é", None, "b", "c"],
    "double": [0.0, 1.5, float("nan"), None, 2.0],
    "boolean": [True, False, None],
    "array<double>": [[], [0.0], [1.0, None], None],
    "struct<a: long, b: string>": [(1, "x"), (1, None), (None, "x"), (None, None), (2, "x")],
    "struct<a: double, b: struct<c: long, d: date>>": [(0.0, (1, None)), (0.0, (2, None)), (float("nan"), (None, None))],
}
layers_of_changes = st.lists(st.dictionaries(st.integers(0, 5), st.none() | st.integers(0, 9)), min_size=1, max_size=6)


def info(key_type: str) -> StateInfo:
    schema = pa.schema([("key", parse_type(key_type)), ("value", pa.int64())])
    return StateInfo("state", StateKind.KEYED, "value", schema)


def keys_of(numbers: list[int], key_type: str) -> pa.Array:
    spelled = KEYS[key_type]
    return pa.array([spelled[number % len(spelled)] for number in numbers], parse_type(key_type))


def layer(changes: dict[int, int | None], key_type: str) -> LayerInMemory:
    """None is a deletion. Numbers that stand for the same key are taken as one."""
    once = {number % len(KEYS[key_type]): value for number, value in changes.items()}
    schema = info(key_type).schema
    live = {number: value for number, value in once.items() if value is not None}
    rows = pa.record_batch([keys_of(list(live), key_type), pa.array(live.values(), pa.int64())], schema=schema)
    gone = pa.record_batch(
        [keys_of([number for number in once if number not in live], key_type)], schema=deleted_schema(schema)
    )
    sections = [*cut_by_group("state", [rows], GROUPS), *cut_by_group("state", [gone], GROUPS, deleted=True)]
    return LayerInMemory(sections, key_group_count=GROUPS)


def laid_over(changes: list[dict[int, int | None]], key_type: str) -> dict[int, int]:
    held: dict[int, int] = {}
    for each in changes:
        for number, value in {number % len(KEYS[key_type]): value for number, value in each.items()}.items():
            if value is None:
                held.pop(number, None)
            else:
                held[number] = value
    return held


def entries(batches: list[pa.RecordBatch], key_type: str) -> dict[int, int]:
    numbers = {repr(key): number for number, key in enumerate(key_list(keys_of(list(range(len(KEYS[key_type]))), key_type)))}
    found = [
        (numbers[repr(key)], value)
        for batch in batches
        for key, value in zip(key_list(batch.column("key")), batch.column("value").to_pylist(), strict=True)
    ]
    assert len(dict(found)) == len(found), "a key is there once"
    return dict(found)


@pytest.mark.parametrize("key_type", KEYS)
@pytest.mark.parametrize("block_rows", [1, 1000])
@given(changes=layers_of_changes)
def test_the_last_layer_that_knows_a_key_has_the_word(
    key_type: str, block_rows: int, changes: list[dict[int, int | None]]
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(merging, "BLOCK_ROWS", block_rows)
        layers = [layer(each, key_type) for each in changes]
        whole = list(resolved_rows("state", layers, range(GROUPS)))
        assert entries(whole, key_type) == laid_over(changes, key_type)
        halves = [row for groups in (range(7), range(7, GROUPS)) for row in resolved_rows("state", layers, groups)]
        assert entries(halves, key_type) == laid_over(changes, key_type), "by any cut of the key-groups"


@pytest.mark.parametrize("key_type", ["long", "struct<a: long, b: string>"])
@given(changes=layers_of_changes, cut=st.integers(0, 6))
def test_it_makes_no_difference_which_layers_are_merged_first(
    key_type: str, changes: list[dict[int, int | None]], cut: int
) -> None:
    layers = [layer(each, key_type) for each in changes]
    base = merged(layers[:cut], key_type, with_deleted=False) if cut else []
    deltas = merged(layers[cut:], key_type, with_deleted=True) if layers[cut:] else []
    chain = [LayerInMemory(sections, key_group_count=GROUPS) for sections in (base, deltas)]
    assert entries(list(resolved_rows("state", chain, range(GROUPS))), key_type) == laid_over(changes, key_type)
    assert not any(section.deleted for section in base)


def merged(layers: list[LayerInMemory], key_type: str, *, with_deleted: bool) -> list[Section]:
    sections = list(merged_sections(info(key_type), layers, key_group_count=GROUPS, with_deleted=with_deleted))
    places = [(section.deleted, section.groups.start) for section in sections if section.groups is not None]
    assert places == sorted(places) and len(places) == len(sections), "as a file wants them"
    return sections


@pytest.mark.parametrize("key_type", KEYS)
def test_equal_keys_have_equal_codes(key_type: str) -> None:
    keys = keys_of([0, 1, 2, 0, 1, 2, 3, 3, 4, 5], key_type)
    codes, spelled = key_codes(keys).tolist(), list(map(repr, key_list(keys)))
    assert all((codes[i] == codes[j]) == (spelled[i] == spelled[j]) for i in range(10) for j in range(10))
    assert max(codes) < 10
