"""The three graphs as text. The golden texts are read by people: change them when the new text reads better."""

from __future__ import annotations

import re
from functools import partial
from textwrap import dedent
from typing import Any

import pytest

from tests.unit.dataflow.described import Nowhere, Records
from tidegate.dataflow.explain import WIDTH, explain_logical, explain_optimised, explain_physical
from tidegate.dataflow.functions import BroadcastProcess, CoProcess, KeyedProcess, Process
from tidegate.dataflow.optimiser import make_plan
from tidegate.dataflow.pipeline import Pipeline
from tidegate.dataflow.stream import Stream
from tidegate.state.declaring import aggregating, broadcast_map, list_, map_, operator_list, reducing, value
from tidegate.state.handles import AggregatingState


class ApplyRules(BroadcastProcess):
    rules = broadcast_map("string", "double")

    def process(self, record: Any, ctx: Any) -> None: ...

    def process_broadcast(self, record: Any, ctx: Any) -> None: ...


class CountBids(KeyedProcess):
    count = value("long", default=0)
    recent = list_("double")
    best = reducing("double", max)
    by_bidder = map_("long", "struct<first:timestamp,n:long>")
    mean: AggregatingState[Any, Any] = aggregating(
        "struct<n:long,total:double>", create=dict, add=lambda mean, price: mean, name="mean price"
    )

    def process(self, record: Any, ctx: Any) -> None: ...


class InHundreds(Process):
    waiting = operator_list("long")
    limits = operator_list("double", redistribute="union")

    def process(self, record: Any, ctx: Any) -> None: ...


class Join(CoProcess):
    def process_left(self, record: Any, ctx: Any) -> None: ...

    def process_right(self, record: Any, ctx: Any) -> None: ...


def auctions() -> Pipeline:
    """A job with one of almost everything."""
    pipeline = Pipeline()
    bids = pipeline.source(
        "bids", Records("auction long, bidder long, price double, ts timestamp"), parallelism=1
    ).with_watermark("ts", "5 seconds", idle_after="1500 ms")
    rules = pipeline.source("rules", Records("kind string, limit double"), parallelism=1)
    checked = bids.connect(rules.broadcast()).process(
        "apply rules", ApplyRules(), returns="auction long, price double", side_outputs={"refused": "why string"}
    )
    checked.side_output("refused").filter(bool).to("refused bids", Nowhere())
    checked.side_output("refused").to("archive", Nowhere())
    counts = checked.key_by("auction").process("count", CountBids(), returns="auction long, n long")
    counts.union(counts.map(lambda row: row, returns="auction long, n long")).process(
        "in hundreds", InHundreds(), returns="ids array<long>"
    ).to("out", Nowhere(), parallelism=1)
    return pipeline


def golden(text: str) -> str:
    return dedent(text).strip("\n")


def test_the_logical_graph_shows_what_the_user_wrote() -> None:
    assert explain_logical(auctions().build()) == golden("""
        == Logical graph: 11 operators ==

        [0] bids · source · Records · parallelism 1
            output  auction long, bidder long, price double, ts timestamp

        [1] watermark-1 · watermark · on ts, delay 5 s, idle after 1500 ms · parallelism 1
            input   [0] bids, forward
            output  auction long, bidder long, price double, ts timestamp

        [2] rules · source · Records · parallelism 1
            output  kind string, limit double

        [3] apply rules · broadcast process · ApplyRules
            left    [1] watermark-1, forward
            right   [2] rules, broadcast
            state   rules  broadcast map<string, double>
            output  auction long, price double
            side    refused: why string

        [4] filter-1 · filter · bool
            input   [3] apply rules side output refused, forward
            output  why string

        [5] refused bids · sink · Nowhere
            input   [4] filter-1, forward

        [6] archive · sink · Nowhere
            input   [3] apply rules side output refused, forward

        [7] count · keyed process · CountBids
            input   [3] apply rules, hash by auction
            state   count       keyed value<long>
                    recent      keyed list<double>
                    best        keyed reducing<double>
                    by_bidder   keyed map<long, struct<first: timestamp, n: long>>
                    mean price  keyed aggregating<struct<n: long, total: double>>
            output  auction long, n long

        [8] map-1 · map · <lambda>
            input   [7] count, forward
            output  auction long, n long

        [9] in hundreds · process · InHundreds
            input   [7] count, forward
                    [8] map-1, forward
            state   waiting  operator list<long>, redistributed by split
                    limits   operator list<double>, redistributed by union
            output  ids array<long>

        [10] out · sink · Nowhere · parallelism 1
            input   [9] in hundreds, forward
        """)


def test_the_optimised_graph_shows_the_chains() -> None:
    plan = make_plan(auctions().build(), slots=2, key_group_count=128)
    assert explain_optimised(plan) == golden("""
        == Optimised graph: 11 operators in 6 vertices, 6 edges ==

        v0 · parallelism 1
            chain   bids            source
                    └─ watermark-1  watermark

        v1 · parallelism 1
            chain   rules  source

        v2 · parallelism 2
            left    v0 watermark-1, rebalance 1 → 2: auction long, bidder long, price double, ts timestamp
            right   v1 rules, broadcast: kind string, limit double
            chain   apply rules            broadcast process  state rules
                    ├─ (refused) filter-1  filter
                    │  └─ refused bids     sink
                    └─ (refused) archive   sink

        v3 · parallelism 2
            input   v2 apply rules, hash by auction: auction long, price double
            chain   count     keyed process  state count, recent, best, by_bidder, mean price
                    └─ map-1  map

        v4 · parallelism 2
            input   v3 count, forward: auction long, n long
                    v3 map-1, forward: auction long, n long
            chain   in hundreds  process  state waiting, limits

        v5 · parallelism 1
            input   v4 in hundreds, rebalance 2 → 1: ids array<long>
            chain   out  sink
        """)


def test_the_physical_plan_shows_who_runs_where() -> None:
    plan = make_plan(auctions().build(), slots=2, key_group_count=128)
    assert explain_physical(plan) == golden("""
        == Physical plan: 2 slots, 9 subtasks, 14 channels, 128 key-groups ==

        slot  subtask  operators                                        key-groups
        0     v0[0]    bids → watermark-1
              v1[0]    rules
              v2[0]    apply rules → filter-1 → refused bids → archive
              v3[0]    count → map-1                                    [0, 64)
              v4[0]    in hundreds
              v5[0]    out
        1     v2[1]    apply rules → filter-1 → refused bids → archive
              v3[1]    count → map-1                                    [64, 128)
              v4[1]    in hundreds

        edge  from    to            channels          records go
        e0    v0 × 1  v2 × 2 left   2, 1 in memory    rebalance
        e1    v1 × 1  v2 × 2 right  2, 1 in memory    broadcast
        e2    v2 × 2  v3 × 2        4, 2 in memory    hash by auction
        e3    v3 × 2  v4 × 2        2, all in memory  forward
        e4    v3 × 2  v4 × 2        2, all in memory  forward
        e5    v4 × 2  v5 × 1        2, 1 in memory    rebalance
        """)


def retries() -> Pipeline:
    """A loop in a loop."""
    pipeline = Pipeline()

    def settle(orders: Stream) -> tuple[Stream, Stream]:
        settled = orders.key_by("id").process("settle", CountBids(), returns="id long, tries long")
        return settled.filter(bool, name="unsettled"), settled

    def attempt(orders: Stream) -> tuple[Stream, Stream]:
        done = orders.iterate("settling", settle)
        return done.filter(bool, name="failed", parallelism=1), done

    orders = pipeline.source("orders", Records("id long, tries long"))
    orders.iterate("retry", attempt, parallelism=2).to("out", Nowhere())
    return pipeline


def test_loops_in_the_logical_graph() -> None:
    assert explain_logical(retries().build()) == golden("""
        == Logical graph: 9 operators, 2 loops ==

        [0] orders · source · Records
            output  id long, tries long

        [1] retry · iterate · parallelism 2
            in loop retry
            input   [0] orders, forward
                    [7] retry-feedback, feedback
            output  id long, tries long

        [2] settling · iterate
            in loop retry › settling
            input   [1] retry, forward
                    [5] settling-feedback, feedback
            output  id long, tries long

        [3] settle · keyed process · CountBids
            in loop retry › settling
            input   [2] settling, hash by id
            state   count       keyed value<long>
                    recent      keyed list<double>
                    best        keyed reducing<double>
                    by_bidder   keyed map<long, struct<first: timestamp, n: long>>
                    mean price  keyed aggregating<struct<n: long, total: double>>
            output  id long, tries long

        [4] unsettled · filter · bool
            in loop retry › settling
            input   [3] settle, forward
            output  id long, tries long

        [5] settling-feedback · feedback · to [2] settling
            in loop retry › settling
            input   [4] unsettled, forward

        [6] failed · filter · bool · parallelism 1
            in loop retry
            input   [3] settle, forward
            output  id long, tries long

        [7] retry-feedback · feedback · to [1] retry
            in loop retry
            input   [6] failed, forward

        [8] out · sink · Nowhere
            input   [3] settle, forward
        """)


def test_loops_in_the_optimised_graph() -> None:
    plan = make_plan(retries().build(), slots=2, key_group_count=128)
    assert explain_optimised(plan) == golden("""
        == Optimised graph: 9 operators in 6 vertices, 7 edges, 2 loops ==

        v0 · parallelism 2
            chain   orders  source

        v1 · parallelism 2
            in loop retry
            input   v0 orders, forward: id long, tries long
                    v5 retry-feedback, feedback: id long, tries long
            chain   retry  iterate

        v2 · parallelism 2
            in loop retry › settling
            input   v1 retry, forward: id long, tries long
                    v3 settling-feedback, feedback: id long, tries long
            chain   settling  iterate

        v3 · parallelism 2
            in loop retry › settling
            input   v2 settling, hash by id: id long, tries long
            chain   settle                   keyed process  state count, recent, best, by_bidder, mean price
                    ├─ unsettled             filter
                    │  └─ settling-feedback  feedback
                    └─ out                   sink

        v4 · parallelism 1
            in loop retry
            input   v3 settle, rebalance 2 → 1: id long, tries long
            chain   failed  filter

        v5 · parallelism 2
            in loop retry
            input   v4 failed, rebalance 1 → 2: id long, tries long
            chain   retry-feedback  feedback
        """)


def test_loops_in_the_physical_plan() -> None:
    plan = make_plan(retries().build(), slots=2, key_group_count=128)
    header, _, *rest = explain_physical(plan).splitlines()
    assert header == "== Physical plan: 2 slots, 11 subtasks, 16 channels, 128 key-groups, 2 loops =="
    assert "\n".join(rest[rest.index("") + 1 :]) == golden("""
        edge  from    to      channels          records go
        e0    v0 × 2  v1 × 2  2, all in memory  forward
        e1    v1 × 2  v2 × 2  2, all in memory  forward
        e2    v2 × 2  v3 × 2  4, 2 in memory    hash by id
        e3    v3 × 2  v4 × 1  2, 1 in memory    rebalance
        e4    v4 × 1  v5 × 2  2, 1 in memory    rebalance
        e5    v5 × 2  v1 × 2  2, all in memory  feedback
        e6    v3 × 2  v2 × 2  2, all in memory  feedback

        loop  head  tail  name      vertices
        l0    v1    v5    retry     v1, v2, v3, v4, v5
        l1    v2    v3    settling  v2, v3
        """)


def test_a_job_of_one_vertex_has_no_edges_to_show() -> None:
    pipeline = Pipeline()
    pipeline.source("in", Records("a long")).to("out", Nowhere())
    plan = make_plan(pipeline.build(), slots=1, key_group_count=1)
    assert explain_optimised(plan) == golden("""
        == Optimised graph: 2 operators in 1 vertex, 0 edges ==

        v0 · parallelism 1
            chain   in      source
                    └─ out  sink
        """)
    assert explain_physical(plan) == golden("""
        == Physical plan: 1 slot, 1 subtask, 0 channels, 1 key-group ==

        slot  subtask  operators  key-groups
        0     v0[0]    in → out
        """)


def test_a_slot_without_subtasks_is_shown() -> None:
    pipeline = Pipeline()
    pipeline.source("in", Records("a long"), parallelism=1).to("out", Nowhere(), parallelism=1)
    text = explain_physical(make_plan(pipeline.build(), slots=2, key_group_count=8))
    assert text.splitlines()[-1].split() == ["1", "none"]


@pytest.mark.parametrize(
    ("slots", "shown", "left_out"),
    [(8, range(8), None), (9, [*range(7), 8], "1 more slot"), (40, [*range(7), 39], "32 more slots")],
)
def test_of_many_slots_the_first_and_the_last_are_shown(slots: int, shown: range | list[int], left_out: str | None) -> None:
    text = explain_physical(make_plan(auctions().build(), slots=slots, key_group_count=128))
    assert [int(found) for found in re.findall(r"^(\d+) ", text, re.MULTILINE)] == list(shown)
    assert re.findall(r"^… +(.*)$", text, re.MULTILINE) == ([] if left_out is None else [left_out])


def test_the_key_group_ranges_shown_tile() -> None:
    text = explain_physical(make_plan(auctions().build(), slots=5, key_group_count=128))
    ranges = [(int(start), int(stop)) for start, stop in re.findall(r"\[(\d+), (\d+)\)", text)]
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])] and ranges[-1][1] == 128


def test_a_side_output_between_vertices_is_shown_with_its_tag() -> None:
    pipeline = Pipeline()
    stream = pipeline.source("in", Records("a long")).process("op", InHundreds(), side_outputs={"late": "b string"})
    stream.side_output("late").key_by("b").to("out", Nowhere())
    plan = make_plan(pipeline.build(), slots=2, key_group_count=8)
    assert "input   v0 op side output late, hash by b: b string\n" in explain_optimised(plan)
    assert explain_physical(plan).endswith("\ne0    v0 × 2 (late)  v1 × 2  4, 2 in memory  hash by b")


def test_functions_are_shown_by_their_names() -> None:
    def half(row: Any) -> Any: ...

    pipeline = Pipeline()
    stream = pipeline.source("in", Records("a long"))
    stream.map(half, returns="a long").map(partial(half), returns="a long").to("out", Nowhere())
    text = explain_logical(pipeline.build())
    assert "[1] map-1 · map · half\n" in text and "[2] map-2 · map · partial\n" in text


def test_nothing_is_wider_than_the_screen_and_schemas_break_between_columns() -> None:
    columns = [f"a_column_with_quite_a_long_name_{index} struct<x: array<double>>" for index in range(30)]
    pipeline = Pipeline()
    stream = pipeline.source("s" * 64, Records(", ".join(columns)))
    for index in range(20):
        stream = stream.filter(bool, name=f"{index}" + "f" * 62)
    key = [column.split()[0] for column in columns]
    stream.key_by(*key).connect(stream.key_by(*key)).process("j" * 64, Join(), side_outputs={"t" * 200: "a long"})
    graph = pipeline.build()
    plan = make_plan(graph, slots=3, key_group_count=128)
    texts = [explain_logical(graph), explain_optimised(plan), explain_physical(plan)]
    for text in texts:
        assert max(map(len, text.splitlines())) <= WIDTH
        assert all(line == line.rstrip() for line in text.splitlines())
    for column in columns:
        assert column in texts[0] and column in texts[1]


def test_expressions_are_shown_and_which_operators_run_in_one_pass() -> None:
    pipeline = Pipeline()
    bids = pipeline.source("bids", Records("auction long, price double"))
    bids.filter("price > 100").select("auction", "price * 0.9 AS euros").to("out", Nowhere())
    graph = pipeline.build()
    assert "[2] select-1 · select · auction, price * 0.9 AS euros" in explain_logical(graph)
    shown = explain_optimised(make_plan(graph, slots=1, key_group_count=8))
    assert re.search(r"select-1 +select +in one pass with filter-1\n", shown)
