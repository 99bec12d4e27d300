"""Operators without state: map, flat_map, filter, map_batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from tests.unit.operators.harness import Bench
from tidegate.dataflow.operators.simple import FilterSpec, FlatMapSpec, MapBatchesSpec, MapSpec
from tidegate.errors import SchemaError, UserFunctionError

IN, OUT = "a long, b string", "b string, twice long"


def test_map_gives_a_row_for_each_record() -> None:
    bench = Bench(MapSpec(lambda record: (record.b, 2 * record.a)), IN, returns=OUT)
    assert bench.feed((1, "x"), (2, None)) == [("x", 2), (None, 4)]
    assert bench.feed() == [] and len(bench.out.events) == 1


def test_flat_map_gives_any_number_of_rows() -> None:
    def words(record: Any) -> Iterator[Any]:
        for number in range(record.a):
            yield record.b, number

    assert Bench(FlatMapSpec(words), IN, returns=OUT).feed((2, "x"), (0, "y"), (1, "z")) == [("x", 0), ("x", 1), ("z", 0)]
    bench = Bench(FlatMapSpec(lambda record: None if record.a else [(record.b, 1), [record.b, 2]]), IN, returns=OUT)
    assert bench.feed((1, "x")) == [] and bench.out.events == []
    assert bench.feed((1, "x"), (0, "y")) == [("y", 1), ("y", 2)]


def test_filter_keeps_what_is_true() -> None:
    bench = Bench(FilterSpec(lambda record: record.b), IN, returns=IN)
    assert bench.feed((1, "x"), (2, ""), (3, None), (4, "y")) == [(1, "x"), (4, "y")]
    assert bench.feed((2, "")) == [] and len(bench.out.events) == 1
    assert bench.feed() == []


@pytest.mark.parametrize(
    "gives",
    [
        lambda batch: batch,
        lambda batch: [batch],
        lambda batch: iter([batch.slice(0, 1), batch.slice(1)]),
        lambda batch: [batch.slice(0, 0), batch],
    ],
)
def test_map_batches_gives_a_batch_or_several(gives: Callable[[pa.RecordBatch], Any]) -> None:
    bench = Bench(MapBatchesSpec(gives), IN, returns=IN)
    assert bench.feed((1, "x"), (2, "y")) == [(1, "x"), (2, "y")]


def test_map_batches_may_give_nothing() -> None:
    nothing: list[Callable[[pa.RecordBatch], Any]] = [lambda batch: None, lambda batch: []]
    for gives in nothing:
        assert Bench(MapBatchesSpec(gives), IN, returns=IN).feed((1, "x")) == []


def test_map_batches_is_vectorised() -> None:
    def twice(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch([batch["b"], pc.multiply(batch["a"], 2)], names=["b", "twice"])

    assert Bench(MapBatchesSpec(twice), IN, returns=OUT).feed((1, "x")) == [("x", 2)]


@pytest.mark.parametrize(
    ("gives", "got"),
    [
        (lambda batch: batch, "a long, b string"),
        (lambda batch: [batch["a"]], "a Int64Array"),
        (
            lambda batch: pa.record_batch([batch["b"], batch["a"].cast(pa.int32())], names=["b", "twice"]),
            "b string, twice int",
        ),
    ],
)
def test_batches_of_another_schema_name_operator_and_declaration(gives: Callable[[pa.RecordBatch], Any], got: str) -> None:
    with pytest.raises(SchemaError) as failed:
        Bench(MapBatchesSpec(gives), IN, returns=OUT, name="double it").feed((1, "x"))
    for told in ("operator 'double it'", "returns='b string, twice long'", got):
        assert told in str(failed.value)


@pytest.mark.parametrize(
    "spec", [MapSpec(lambda record: (record.a, record.b)), FlatMapSpec(lambda record: [(record.a, record.b)])]
)
def test_rows_that_don_t_fit_name_operator_and_declaration(spec: Any) -> None:
    with pytest.raises(SchemaError) as failed:
        Bench(spec, IN, returns=OUT, name="swap").feed((1, "x"))
    for told in ("operator 'swap'", "returns='b string, twice long'", "column 'b'"):
        assert told in str(failed.value)


def third_fails(record: Any) -> Any:
    if record.a == 3:
        raise ValueError("three")
    return [(record.b, record.a)]


@pytest.mark.parametrize("spec", [MapSpec(third_fails), FlatMapSpec(third_fails), FilterSpec(third_fails)])
def test_an_error_tells_the_operator_and_the_record(spec: Any) -> None:
    bench = Bench(spec, IN, returns=OUT, name="picky")
    with pytest.raises(UserFunctionError) as failed:
        bench.feed((1, "x"), (3, "y"), (4, "z"))
    assert (failed.value.operator, failed.value.record) == ("picky", "Row(a=3, b='y')")
    assert failed.value.user_traceback.rstrip().endswith("ValueError: three")
    assert "src/tidegate" not in failed.value.user_traceback
    assert bench.out.events == []


def test_an_error_in_a_batch_tells_how_large_it_was() -> None:
    def fails(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        yield batch
        raise ValueError("no more")

    with pytest.raises(UserFunctionError) as failed:
        Bench(MapBatchesSpec(fails), IN, returns=IN).feed((1, "x"), (2, "y"))
    assert failed.value.record == "a batch of 2 records"


@pytest.mark.parametrize(
    "spec",
    [
        MapSpec(lambda record: record),
        FlatMapSpec(lambda record: [record]),
        FilterSpec(lambda record: True),
        MapBatchesSpec(lambda batch: batch),
    ],
)
def test_time_and_ends_pass_through_and_nothing_is_kept(spec: Any) -> None:
    bench = Bench(spec, IN, returns=IN)
    bench.operator.on_watermark(7)
    bench.operator.on_idle()
    bench.operator.on_end()
    assert bench.out.events == [("watermark", 7), ("idle",), ("end",)]
    assert bench.operator.freeze(1) is None and not spec.stateful and spec.states(bench.node) == ()
    assert bench.operator.deadline_ms() is None
