"""The names that operators and states had: where they are given, and what they may not be."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.dataflow.described import Nowhere, Records
from tests.unit.dataflow.test_stream import BIDS, Collect, Count, Join, Rules
from tidegate.dataflow.pipeline import Pipeline
from tidegate.errors import GraphError, JobError
from tidegate.state import declaring as tg
from tidegate.state.descriptors import descriptors_of


def test_whatever_has_state_can_have_been_called_something_else() -> None:
    pipeline = Pipeline()
    bids = pipeline.source("bids", Records(BIDS), alias="offers")
    bids.process("collect", Collect(), alias=["gather", "heap"])
    counts = bids.key_by("auction").process("count", Count(), "auction long, n long", alias="counts")
    counts.to("out", Nowhere(), alias="log")
    bids.connect(bids).process("join", Join(), alias="match")
    bids.connect(bids.broadcast()).process("rules", Rules(), alias="laws")
    bids.key_by("auction").to("keyed out", Nowhere(), alias="keyed log")
    assert {node.name: node.aliases for node in pipeline.build().nodes} == {
        "bids": ("offers",),
        "collect": ("gather", "heap"),
        "count": ("counts",),
        "out": ("log",),
        "join": ("match",),
        "rules": ("laws",),
        "keyed out": ("keyed log",),
    }


@pytest.mark.parametrize(
    ("alias", "told"),
    [
        ("bids", "not the one that it has"),
        (["a", "a"], "each once"),
        ("", "a name begins with a letter"),
        (5, "give the name"),
        (["a/b"], "neither slashes"),
        ([5], "give a text"),
    ],
)
def test_an_alias_is_a_name_that_it_had_before(alias: Any, told: str) -> None:
    with pytest.raises(GraphError, match=told):
        Pipeline().source("bids", Records(BIDS), alias=alias)


def test_a_name_goes_to_one_operator() -> None:
    pipeline = Pipeline()
    bids = pipeline.source("bids", Records(BIDS), alias="offers")
    with pytest.raises(GraphError, match=r"sink 'out', alias='bids': that is a name or alias of the source 'bids'"):
        bids.to("out", Nowhere(), alias="bids")
    with pytest.raises(GraphError, match=r"sink 'out', alias='offers': that is a name or alias of the source 'bids'"):
        bids.to("out", Nowhere(), alias="offers")
    with pytest.raises(GraphError, match=r"operator 'offers': the name is an alias of 'bids'.*omit that alias"):
        bids.process("offers", Collect())


def test_a_generated_name_is_no_alias_of_another() -> None:
    pipeline = Pipeline()
    bids = pipeline.source("bids", Records(BIDS), alias="filter-1").filter(lambda bid: True)
    bids.to("out", Nowhere())
    assert [node.name for node in pipeline.build().nodes] == ["bids", "filter-2", "out"]


def test_states_have_aliases_too() -> None:
    class Renamed:
        count = tg.value("long", alias="n")
        recent = tg.list_("long", alias=["last", "latest"])

    assert {name: each.aliases for name, each in descriptors_of(Renamed()).items()} == {
        "count": ("n",),
        "recent": ("last", "latest"),
    }


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (tg.value("long", alias="other"), tg.value("long")),
        (tg.value("long", alias="x"), tg.value("long", alias="x")),
        (tg.value("long", alias="one"), tg.value("long")),
        (tg.value("long", alias=["x", "x"]), tg.value("long")),
    ],
)
def test_a_name_goes_to_one_state(one: Any, other: Any) -> None:
    function = type("Twice", (), {"one": one, "other": other})
    with pytest.raises(JobError, match=r"Twice has an alias= that is the name or alias of another state, or its own"):
        descriptors_of(function())


@pytest.mark.parametrize("alias", ["", ["a", ""], [5], "__event_timers"])
def test_a_state_s_alias_is_a_name(alias: Any) -> None:
    with pytest.raises(JobError, match="give the name that it had"):
        tg.value("long", alias=alias)
