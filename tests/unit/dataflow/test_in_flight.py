"""Records as rows of a state, and back."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from tidegate.dataflow.in_flight import (
    FEEDBACK,
    feedback_state,
    in_flight_name,
    in_flight_state,
    rows_to_value,
    value_to_rows,
)
from tidegate.state.sections import StateKind
from tidegate.types import batch_of, parse_schema

SCHEMA = parse_schema("id long NOT NULL, name string, tags array<string>, at struct<x:double,y:double>, by map<string,long>")
ROWS: list[Any] = [(1, "a", ["x", None], {"x": 1.0, "y": None}, {"k": 1}), (2, None, None, None, None)]


def test_the_states_are_a_struct_of_the_columns_for_each_record() -> None:
    feedback, in_flight = feedback_state(SCHEMA), in_flight_state(1, SCHEMA)
    assert (feedback.name, feedback.kind, feedback.shape) == (FEEDBACK, StateKind.WHOLE, "records")
    assert (in_flight.name, in_flight.kind, in_flight.shape) == ("__in_flight_1", StateKind.UNION, "records")
    assert feedback.schema == in_flight.schema == pa.schema([pa.field("value", pa.struct(list(SCHEMA)))])
    assert in_flight_name(1) == in_flight.name and in_flight_name(0) == "__in_flight_0"


@pytest.mark.parametrize("rows", [ROWS, []])
def test_records_come_back_as_they_were(rows: list[Any]) -> None:
    batch = batch_of(rows, SCHEMA)
    value = rows_to_value(batch, SCHEMA)
    value.validate(full=True)
    assert value.schema == feedback_state(SCHEMA).schema and value.num_rows == len(rows)
    assert value_to_rows(value, SCHEMA).equals(batch)


def test_slices_come_back_as_they_were() -> None:
    batch = batch_of(ROWS * 3, SCHEMA)
    assert value_to_rows(rows_to_value(batch.slice(1, 3), SCHEMA), SCHEMA).equals(batch.slice(1, 3))
    assert value_to_rows(rows_to_value(batch, SCHEMA).slice(2, 3), SCHEMA).equals(batch.slice(2, 3))


def test_a_batch_that_promises_more_about_nulls_is_taken_as_what_the_state_is_for() -> None:
    strict = batch_of([(1,)], parse_schema("id long NOT NULL"))
    nullable = parse_schema("id long")
    value = rows_to_value(strict, nullable)
    assert value.schema == in_flight_state(0, nullable).schema
    assert value_to_rows(value, nullable).schema == nullable


WORD = pa.dictionary(pa.int32(), pa.string())


@pytest.mark.parametrize(
    ("kind", "plain", "values"),
    [
        (WORD, pa.string(), ["a", None, "a"]),
        (pa.struct([pa.field("w", WORD)]), pa.struct([pa.field("w", pa.string())]), [{"w": "a"}, None, {"w": None}]),
        (pa.list_(WORD), pa.list_(pa.string()), [["a", "b"], None, []]),
        (pa.large_list(WORD), pa.large_list(pa.string()), [["a", "b"], None, []]),
        (pa.map_(pa.string(), WORD), pa.map_(pa.string(), pa.string()), [[("k", "a")], None, []]),
    ],
    ids=str,
)
def test_dictionaries_are_decoded_since_no_snapshot_keeps_them(
    kind: pa.DataType, plain: pa.DataType, values: list[Any]
) -> None:
    schema = pa.schema([pa.field("word", kind)])
    batch = pa.record_batch([pa.array(values, plain).cast(kind)], schema=schema)
    value = rows_to_value(batch, schema)
    assert value.schema == in_flight_state(0, schema).schema
    assert value.schema.field("value").type.field("word").type == plain
    back = value_to_rows(value, schema)
    assert back.schema == schema and back.to_pylist() == batch.to_pylist()
