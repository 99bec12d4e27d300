"""How a function declares its state."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest

from tests import declaring as tg
from tidegate.errors import JobError, SchemaError
from tidegate.state.descriptors import Descriptor, descriptors_of
from tidegate.state.sections import StateKind
from tidegate.types import parse_type


class Counts:
    count = tg.value("long", default=0)
    recent = tg.list_("double", name="recent prices")


class MoreCounts(Counts):
    best = tg.reducing("double", max)
    recent = tg.list_("long")


def test_a_state_is_named_like_its_attribute_unless_it_has_a_name() -> None:
    assert {attribute: found.name for attribute, found in descriptors_of(Counts()).items()} == {
        "count": "count",
        "recent": "recent prices",
    }


def test_states_are_inherited_and_can_be_replaced() -> None:
    assert [(attribute, found.name, found.shape) for attribute, found in descriptors_of(MoreCounts()).items()] == [
        ("count", "count", "value"),
        ("recent", "recent", "list"),
        ("best", "best", "reducing"),
    ]


def test_a_state_that_a_subclass_hides_is_gone() -> None:
    class Without(Counts):
        count: Any = 5

    assert list(descriptors_of(Without())) == ["recent"]


def test_two_states_of_one_name_are_refused() -> None:
    class Twice(Counts):
        other = tg.value("long", name="count")

    with pytest.raises(JobError, match=r"Twice declares two states named \['count'\]"):
        descriptors_of(Twice())


@pytest.mark.parametrize(
    ("declared", "kind", "shape", "type"),
    [
        (tg.value("long"), StateKind.KEYED, "value", "long"),
        (tg.list_("double"), StateKind.KEYED, "list", "array<double>"),
        (tg.map_("string", "long"), StateKind.KEYED, "map", "map<string, long>"),
        (tg.reducing("long", max), StateKind.KEYED, "reducing", "long"),
        (tg.aggregating("struct<n: long>", create=dict, add=max), StateKind.KEYED, "aggregating", "struct<n: long>"),
        (tg.operator_list("long"), StateKind.SPLIT, "list", "long"),
        (tg.operator_list("long", redistribute="union"), StateKind.UNION, "list", "struct<id: string, item: long>"),
        (tg.broadcast_map("string", "long"), StateKind.BROADCAST, "map", "struct<key: string, value: long>"),
    ],
)
def test_a_snapshot_knows_what_a_state_is(declared: Descriptor, kind: StateKind, shape: str, type: str) -> None:
    declared.name = "state"
    info = declared.info(pa.string() if kind is StateKind.KEYED else None)
    assert (info.name, info.kind, info.shape) == ("state", kind, shape)
    assert info.schema.field("value").type == parse_type(type)
    assert info.schema.names == (["key", "value"] if kind is StateKind.KEYED else ["value"])


def test_a_default_takes_the_form_of_the_type() -> None:
    assert repr(tg.value("double", default=0).default) == "0.0"
    assert tg.value("struct<a: long, b: long>", default=(1, 2)).default == {"a": 1, "b": 2}
    assert tg.value("long").default is None


@pytest.mark.parametrize("default", ["0", 0.5, True, [0]])
def test_a_default_of_another_type_is_refused_where_it_is_written(default: Any) -> None:
    with pytest.raises(SchemaError, match=r"default=.* 'long'"):
        tg.value("long", default=default)


@pytest.mark.parametrize("declare", [tg.map_, tg.broadcast_map])
@pytest.mark.parametrize("key", ["array<long>", "map<string, long>", "struct<a: long>"])
def test_a_map_can_t_have_lists_or_structs_as_keys(declare: Any, key: str) -> None:
    with pytest.raises(JobError, match="map state's key"):
        declare(key, "long")


def test_redistribution_is_split_or_union() -> None:
    with pytest.raises(JobError, match=r"'round robin'.*'split' or 'union'"):
        tg.operator_list("long", redistribute="round robin")


def test_a_wrong_type_is_refused_where_it_is_written() -> None:
    with pytest.raises(SchemaError, match="did you mean 'long'"):
        tg.value("lomg")


def test_what_is_kept_is_refused_by_the_state_s_name() -> None:
    keep = descriptors_of(Counts())["count"].converter()
    assert keep(5) == 5
    with pytest.raises(SchemaError, match=r"state 'count' is declared with 'long'.*'five'"):
        keep("five")


def test_the_key_of_a_map_is_no_null() -> None:
    declared = tg.map_("string", "long", name="counts")
    assert declared.key_converter()("a") == "a"
    with pytest.raises(SchemaError, match=r"state 'counts' is declared with keys of 'string'.*None"):
        declared.key_converter()(None)


def test_functions_with_states_travel_to_the_slots() -> None:
    class Local(Counts):
        mean = tg.aggregating("struct<n: long>", create=lambda: {"n": 0}, add=lambda mean, x: mean)

    for function, library in ((Counts(), pickle), (Local(), cloudpickle)):
        there = pickle.loads(library.dumps(function))
        assert repr(descriptors_of(there)) == repr(descriptors_of(function))


def test_a_descriptor_shows_what_it_is() -> None:
    assert repr(descriptors_of(Counts())["recent"]) == "list recent prices: array<double>"
