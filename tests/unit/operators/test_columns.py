"""select, filter, with_columns and explode: alone, and several as one operator."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from tests.unit.dataflow.described import Nowhere, Records
from tests.unit.operators.harness import Collected
from tidegate.dataflow.fusing import fused_runs
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.columns import ColumnsOperator
from tidegate.dataflow.optimiser import make_plan
from tidegate.dataflow.pipeline import Pipeline
from tidegate.dataflow.stream import Stream
from tidegate.errors import SchemaError, UserFunctionError
from tidegate.types import ddl_of

SCHEMA = "n long, price double, word string, tags array<string>"
ROWS: list[dict[str, Any]] = [
    {"n": 1, "price": 2.0, "word": "a b", "tags": ["x", "y"]},
    {"n": 2, "price": None, "word": None, "tags": []},
    {"n": 0, "price": 300.0, "word": "", "tags": None},
    {"n": 4, "price": 0.5, "word": "c", "tags": [None]},
]
Build = Callable[[Stream], Stream]


def stream() -> Stream:
    return Pipeline().source("numbers", Records(SCHEMA))


def nodes_of(build: Build) -> list[Node]:
    made = build(stream())
    return made._pipeline._nodes[1:]


def run(build: Build, rows: list[dict[str, Any]] = ROWS) -> list[dict[str, Any]]:
    """Return what comes out if all nodes are one operator, which is what comes out if each is an operator of its own."""
    nodes = nodes_of(build)
    batch = pa.RecordBatch.from_pylist(rows, nodes[0].input_schemas[0])
    together = outputs(ColumnsOperator(pickle.loads(pickle.dumps(nodes))), [batch])
    one_by_one = [batch]
    for node in nodes:
        one_by_one = outputs(node.spec.create(node), one_by_one)
    assert together == one_by_one
    assert all(out.schema == nodes[-1].schema for out in together)
    return [row for out in together for row in out.to_pylist()]


class Kept(Collected):
    def __init__(self) -> None:
        self.batches: list[pa.RecordBatch] = []
        super().__init__()

    def on_batch(self, batch: pa.RecordBatch, port: int) -> None:
        super().on_batch(batch, port)
        self.batches.append(batch)


def outputs(operator: Any, batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    kept = Kept()
    operator.consumers.append(kept)
    for batch in batches:
        operator.on_batch(batch, 0)
    return kept.batches


def test_select_makes_columns_of_expressions() -> None:
    assert run(lambda s: s.select("n", "price * 2 AS twice"))[:2] == [{"n": 1, "twice": 4.0}, {"n": 2, "twice": None}]
    assert ddl_of(stream().select("n", "upper(word)", "n / 2 AS half").schema) == "n long, `upper(word)` string, half double"


def test_filter_keeps_what_is_true_and_neither_false_nor_null() -> None:
    assert [row["n"] for row in run(lambda s: s.filter("price > 1"))] == [1, 0]
    assert [row["n"] for row in run(lambda s: s.filter("NOT price > 1"))] == [4]
    assert run(lambda s: s.filter("n > 100")) == []


def test_a_filter_that_keeps_all_records_passes_the_batch_on() -> None:
    (node,) = nodes_of(lambda s: s.filter("n >= 0"))
    batch = pa.RecordBatch.from_pylist(ROWS, node.schema)
    assert outputs(node.spec.create(node), [batch])[0] is batch


def test_with_columns_adds_and_replaces_and_sees_the_columns_as_they_were() -> None:
    rows = run(lambda s: s.select("n", "price").with_columns(n="n + 1", before="n"))
    assert rows[0] == {"n": 2, "price": 2.0, "before": 1}
    assert run(lambda s: s.select("n").with_columns({"name": "n"}, m="n"))[0] == {"n": 1, "name": 1, "m": 1}


def test_explode_makes_a_record_of_each_element() -> None:
    assert run(lambda s: s.select("n", "tags").explode("tags AS tag")) == [
        {"n": 1, "tag": "x"},
        {"n": 1, "tag": "y"},
        {"n": 4, "tag": None},
    ]
    assert run(lambda s: s.select("n", "tags").explode("tags", keep_empty=True)) == [
        {"n": 1, "tags": "x"},
        {"n": 1, "tags": "y"},
        {"n": 2, "tags": None},
        {"n": 0, "tags": None},
        {"n": 4, "tags": None},
    ]
    assert [row["part"] for row in run(lambda s: s.explode("split(word, ' ') AS part"))] == ["a", "b", "", "c"]
    assert ddl_of(stream().explode("tags AS tag").schema) == "n long, price double, word string, tag string"


def test_a_slice_of_a_batch_is_exploded_like_others() -> None:
    (node,) = nodes_of(lambda s: s.explode("tags AS tag", keep_empty=True))
    batch = pa.RecordBatch.from_pylist(ROWS, node.input_schemas[0]).slice(1)
    (out,) = outputs(node.spec.create(node), [batch])
    assert list(zip(out["n"].to_pylist(), out["tag"].to_pylist(), strict=True)) == [(2, None), (0, None), (4, None)]


@pytest.mark.parametrize(
    "build",
    [
        lambda s: s.filter("n > 0").select("word", "price * n AS paid"),
        lambda s: s.filter("n > 0").filter("price IS NOT NULL").select("tags"),
        lambda s: s.with_columns(m="n * 2", unused="price + 1").filter("m > 1").select("m", "word"),
        lambda s: s.select("n AS price", "price AS n").filter("n > 1").with_columns(price="n"),
        lambda s: s.filter("n > 0").explode("tags AS tag").filter("tag <> 'x'").select("tag"),
        lambda s: s.explode("split(word, ' ') AS part").filter("n > 0").select("n"),
        lambda s: s.filter("n = 1").with_columns(n="0").filter("n = 0"),
    ],
)
def test_steps_as_one_operator_give_what_they_give_one_by_one(build: Build) -> None:
    assert run(build)


def test_a_column_that_no_later_step_reads_is_not_copied() -> None:
    nodes = nodes_of(lambda s: s.filter("n > 0").select("price"))
    operator = ColumnsOperator(nodes)
    _, step, needed = operator._steps[0]
    kept = step.run(pa.RecordBatch.from_pylist(ROWS, nodes[0].schema), needed)
    assert [str(field.type) for field in kept.schema] == ["null", "double", "null", "null"]


def test_dictionaries_stay_dictionaries() -> None:
    words = pa.array(["x", "y", "x"]).dictionary_encode()
    schema = pa.schema([("word", words.type), ("n", pa.int64())])
    nodes = Pipeline().source("words", Records(schema)).filter("word = 'x'").select("word", "n")._pipeline._nodes[1:]
    (out,) = outputs(ColumnsOperator(nodes), [pa.record_batch([words, [1, 2, 3]], schema=schema)])
    assert out.schema.field("word").type == words.type and out["n"].to_pylist() == [1, 3]


def test_an_error_names_the_operator_the_record_and_the_expression() -> None:
    nodes = nodes_of(lambda s: s.filter("n < 4", name="few").select("n", "10 / n AS share", name="shares"))
    batch = pa.RecordBatch.from_pylist(ROWS, nodes[0].input_schemas[0])
    with pytest.raises(UserFunctionError) as raised:
        ColumnsOperator(nodes).on_batch(batch, 0)
    assert raised.value.operator == "shares"
    assert raised.value.record == "Row(n=0)"
    assert "division by zero, in (10 / n)" in raised.value.user_traceback


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda s: s.select("prize"), "operator 'select-1': .*unknown column 'prize'"),
        (lambda s: s.select(), "takes at least one expression"),
        (lambda s: s.select("n", "price AS n"), "'n' and 'price AS n' are both called 'n'"),
        (lambda s: s.filter("n + 1"), "a filter takes a condition, and 'n \\+ 1' is of type long"),
        (lambda s: s.filter("sum(n) > 1", name="much"), "operator 'much': .*an aggregate needs several records"),
        (lambda s: s.with_columns(), "takes at least one column"),
        (lambda s: s.with_columns(n=1), "operator 'with_columns-1': an expression is text .* not 1"),
        (lambda s: s.explode("n"), "explode takes an array, and 'n' is of type long"),
        (lambda s: s.explode("split(word, ' ') AS n"), "a column 'n' already"),
    ],
)
def test_a_mistake_is_an_error_where_it_is_made(build: Build, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        build(stream())


def test_a_keyed_stream_says_where_its_columns_are_made() -> None:
    with pytest.raises(AttributeError, match=r"'select': call \.select"):
        stream().key_by("n").select("n")  # type: ignore[attr-defined]


# Which nodes are one operator.


def runs_of(build: Callable[[Stream], Stream]) -> list[list[str]]:
    made = build(stream())
    made.to("out", Nowhere())
    plan = make_plan(made._pipeline.build(), slots=2, key_group_count=16)
    return [[node.name for node in run] for vertex in plan.vertices for run in fused_runs(plan, vertex)]


def test_consecutive_steps_are_one_operator() -> None:
    assert runs_of(lambda s: s.filter("n > 0").select("n").with_columns(m="n")) == [
        ["filter-1", "select-1", "with_columns-1"]
    ]
    assert runs_of(lambda s: s.filter("n > 0").map(tuple, SCHEMA).select("n")) == []


def test_steps_across_an_exchange_or_with_two_consumers_are_not() -> None:
    def forked(source: Stream) -> Stream:
        few = source.select("n").filter("n > 0")
        few.filter("n > 1").to("more", Nowhere())
        return few.with_columns(m="n").select("m")

    assert runs_of(forked) == [["select-1", "filter-1"], ["with_columns-1", "select-2"]]
    assert runs_of(lambda s: s.select("n").rebalance().filter("n > 0").select("n")) == [["filter-1", "select-2"]]

    def written_and_continued(source: Stream) -> Stream:
        few = source.select("n")
        few.key_by("n").to("copy", Nowhere())
        return few.filter("n > 0")

    assert runs_of(written_and_continued) == []
