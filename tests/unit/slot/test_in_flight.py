"""Records under way: logged once for each place, found again by whoever their key or number belongs to now."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tidegate as tg
from tidegate.dataflow.graph import Node
from tidegate.dataflow.in_flight import FEEDBACK, rows_to_value
from tidegate.dataflow.operators.base import Operator
from tidegate.dataflow.pipeline import Pipeline
from tidegate.dataflow.places import Place, places_of
from tidegate.hashing import hash_columns
from tidegate.keygroups import groups_of, owner_of
from tidegate.slot.in_flight import Logs, Replay, own_records
from tidegate.types import parse_schema

GROUPS = 16
SCHEMA = parse_schema("key long, text string")


class Keep(tg.KeyedProcess):
    kept = tg.value("long")

    def process(self, record: Any, ctx: Any) -> Any:
        yield tuple(record)


def nodes() -> dict[str, Node]:
    """A keyed operator, one that is dealt its records, and a loop's head."""
    pipeline = Pipeline()
    stream = pipeline.source("in", tg.sources.rows([(1, "a")], schema="key long, text string"))
    kept = stream.key_by("key").process("keep", Keep(), returns="key long, text string")
    dealt = kept.rebalance().map(lambda r: tuple(r), returns="key long, text string", name="deal")
    looped = dealt.iterate("loop", lambda s: (s.filter(lambda r: False, name="again"), s.filter(lambda r: True, name="out")))
    looped.to("sink", tg.sinks.collect())
    return {node.name: node for node in pipeline.build().nodes}


def batch(rows: list[tuple[int, str]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"key": key, "text": text} for key, text in rows], schema=SCHEMA)


def place(node: Node, state: str) -> Place:
    return next(each for each in places_of(node) if each.info.name == state)


def shares(node: Node, state: str, batches: list[pa.RecordBatch], parallelism: int) -> list[list[tuple[int, str]]]:
    where = place(node, state)
    rows = [rows_to_value(each, SCHEMA) for each in batches]
    return [
        [
            (row["key"], row["text"])
            for found in own_records(
                where, node, iter(rows), subtask=subtask, parallelism=parallelism, key_group_count=GROUPS
            )
            for row in found.to_pylist()
        ]
        for subtask in range(parallelism)
    ]


@given(st.lists(st.lists(st.tuples(st.integers(0, 40), st.text(max_size=2)), max_size=6), max_size=4), st.integers(1, 8))
def test_every_record_is_somebodys_and_nobody_elses(runs: list[list[tuple[int, str]]], parallelism: int) -> None:
    of, all_rows = nodes(), Counter(row for run in runs for row in run)
    batches = [batch(run) for run in runs]
    keyed = shares(of["keep"], "__in_flight_0", batches, parallelism)
    dealt = shares(of["deal"], "__in_flight_0", batches, parallelism)
    assert Counter(row for share in keyed for row in share) == all_rows
    assert Counter(row for share in dealt for row in share) == all_rows
    for subtask, share in enumerate(keyed):
        for key, _ in share:
            group = int(groups_of(hash_columns([pa.array([key])]), GROUPS)[0])
            assert owner_of(group, parallelism=parallelism, key_group_count=GROUPS) == subtask
    for share in keyed:
        for key in {key for key, _ in share}:
            in_order = [row for run in runs for row in run if row[0] == key]
            assert [row for row in share if row[0] == key] == in_order
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_what_goes_round_in_a_loop_stays_together() -> None:
    """Which subtask gets which log is decided by the kind of its state; of what it gets, it takes all."""
    of = nodes()
    assert [each.info.name for each in places_of(of["loop"])] == ["__in_flight_0", FEEDBACK]
    assert shares(of["loop"], FEEDBACK, [batch([(1, "a"), (2, "b")])], 2) == [[(1, "a"), (2, "b")]] * 2


class Taking(Operator):
    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.took: list[tuple[str, int]] = []

    def on_batch(self, batch: pa.RecordBatch, port: int) -> None:
        self.took += [(text, port) for text in batch.column("text").to_pylist()]


def test_a_replay_feeds_in_order_and_what_is_left_is_still_under_way() -> None:
    node = nodes()["keep"]
    where, operator, replay = place(node, "__in_flight_0"), Taking(node), Replay()
    replay.add(where, operator, [batch([(1, "a")]), batch([]), batch([(2, "b"), (3, "c")])])
    assert replay and replay.feed() == 1
    assert operator.took == [("a", 0)]
    logs = Logs([where])
    replay.log(logs)
    (frozen,) = logs.of("keep")
    assert [row["value"]["text"] for section in frozen.sections() for row in section.rows.to_pylist()] == ["b", "c"]
    assert logs.byte_count(feedback=False) > 0 and logs.byte_count(feedback=True) == 0
    frozen.release()
    assert replay.feed() == 2 and not replay
    assert operator.took == [("a", 0), ("b", 0), ("c", 0)]


def test_columns_that_one_of_several_united_streams_promises_are_logged_as_all_have_them() -> None:
    node = nodes()["keep"]
    where = place(node, "__in_flight_0")
    strict = pa.schema([field.with_nullable(False) for field in SCHEMA])
    logs = Logs([where])
    logs.append(where, pa.record_batch(batch([(1, "a")]).columns, schema=strict))
    (frozen,) = logs.of("keep")
    (section,) = frozen.sections()
    assert section.rows.schema.equals(where.info.schema)


@pytest.mark.parametrize("name", ["sink", "in"])
def test_places_are_ports(name: str) -> None:
    assert [each.info.name for each in places_of(nodes()[name])] == (["__in_flight_0"] if name == "sink" else [])
