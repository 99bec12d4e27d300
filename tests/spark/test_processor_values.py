"""Values on their way between a stateful processor and Tidegate's state. Needs PySpark's classes, but no session."""

from __future__ import annotations

import pickle
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import Row

import tidegate as tg
from tidegate.errors import JobError, SchemaError
from tidegate.spark.processor_states import LiveHandle, RecordingHandle
from tidegate.spark.processor_values import python_column, row_class, user_keys
from tidegate.state.timers import TimeKind
from tidegate.types import from_list, parse_type

LOCAL = datetime(2024, 5, 17, 12, 30)
HEAP, ROCKSDB = tg.heap(), tg.rocksdb()
on_both = pytest.mark.parametrize("settings", [HEAP, ROCKSDB], ids=["heap", "rocksdb"])


class Clock:
    now_ms = 0

    def __call__(self) -> int:
        return self.now_ms


def variable(kind: str, *schemas: str, ttl_ms: int | None = None, clock: Clock | None = None, settings: Any = HEAP) -> Any:
    """A state variable at a key."""
    recorded = RecordingHandle(TimeKind.PROCESSING)
    getattr(recorded, f"get{kind}State")("x", *schemas, ttlDurationMs=ttl_ms)
    backend = settings.create(key_type=pa.int64(), key_group_count=8, now_ms=clock or Clock())
    tables = {name: backend.table(declared.descriptor()) for name, declared in recorded.declared.items()}
    backend.cursor.key = 1
    live = LiveHandle(recorded.declared, tables, None, TimeKind.PROCESSING)
    return getattr(live, f"get{kind}State")("x", *schemas, ttlDurationMs=ttl_ms)


@on_both
@pytest.mark.parametrize(
    ("schema", "given", "got"),
    [
        ("a long, b string", (1, "x"), (1, "x")),
        ("a long, b string", [1, None], (1, None)),
        ("a long, b string", Row(b=1, a="x"), (1, "x")),
        ("a long", (np.int64(7),), (7,)),
        ("a double", (1,), (1.0,)),
        ("a float", (0.1,), (float(np.float32(0.1)),)),
        ("a boolean, b binary, c date", (True, b"\x00", date(2024, 1, 2)), (True, b"\x00", date(2024, 1, 2))),
        ("a decimal(10,2)", (Decimal("1.5"),), (Decimal("1.50"),)),
        ("a timestamp", (LOCAL,), (LOCAL,)),
        ("a timestamp", (LOCAL.astimezone(timezone(timedelta(hours=5))),), (LOCAL,)),
        ("a timestamp", (pd.Timestamp(LOCAL),), (LOCAL,)),
        ("a timestamp_ntz", (pd.Timestamp(LOCAL),), (LOCAL,)),
        ("a array<timestamp>", ([LOCAL, None],), ([LOCAL, None],)),
        ("a map<string,timestamp>", ({"k": LOCAL},), ({"k": LOCAL},)),
        ("a struct<b:long,c:timestamp>", (Row(b=1, c=LOCAL),), (Row(b=1, c=LOCAL),)),
        ("a struct<b:long,c:string>", ({"c": "x", "b": 1},), (Row(b=1, c="x"),)),
        ("a array<struct<b:long>>", ([Row(b=1), Row(b=2)],), ([Row(b=1), Row(b=2)],)),
    ],
)
def test_a_value_is_a_tuple_of_what_was_given(schema: str, given: Any, got: Any, settings: Any) -> None:
    state = variable("Value", schema, settings=settings)
    assert state.get() is None and not state.exists()
    state.update(given)
    assert state.exists() and state.get() == got and type(state.get()) is tuple
    assert all(type(one) is type(other) or isinstance(one, Row) for one, other in zip(state.get(), got, strict=True))
    state.clear()
    assert state.get() is None


def test_what_is_handed_out_and_in_is_nobody_elses() -> None:
    state = variable("Value", "a array<long>, b long")
    given = [1, 2]
    state.update((given, 1))
    given.append(3)
    state.get()[0].append(4)
    assert state.get() == ([1, 2], 1)


@pytest.mark.parametrize("given", [(1, 2), (), ("x",), (1.5,), (True,)])
def test_what_does_not_fit_is_an_error_that_names_the_state(given: Any) -> None:
    with pytest.raises(SchemaError, match="state 'x' is declared with"):
        variable("Value", "a long").update(given)


@on_both
def test_a_list(settings: Any) -> None:
    state = variable("List", "a long, b timestamp", settings=settings)
    assert not state.exists() and list(state.get()) == []
    state.appendValue((1, LOCAL))
    state.appendList([[2, None], (3, LOCAL)])
    assert list(state.get()) == [(1, LOCAL), (2, None), (3, LOCAL)] and state.exists()
    state.put([(9, None)])
    assert list(state.get()) == [(9, None)]
    state.clear()
    assert not state.exists()


@on_both
@pytest.mark.parametrize(
    ("schema", "key"),
    [
        ("k string", ("a",)),
        ("k long", (1,)),
        ("k timestamp", (LOCAL,)),
        ("k string, n long", ("a", 1)),
        ("k date, t timestamp, d decimal(5,1), b binary", (date(2024, 1, 2), LOCAL, Decimal("1.5"), b"\xff")),
        ("k string, n long", ("a", None)),
    ],
)
def test_a_map(schema: str, key: Any, settings: Any) -> None:
    state = variable("Map", schema, "v long", settings=settings)
    assert not state.exists() and state.getValue(key) is None and not state.containsKey(key)
    state.updateValue(key, (5,))
    assert state.exists() and state.getValue(key) == Row(v=5) and state.getValue(key).v == 5 and state.containsKey(list(key))
    assert list(state.keys()) == [key] and list(state.values()) == [(5,)] and list(state.iterator()) == [(key, (5,))]
    state.removeKey(key)
    assert not state.exists()
    state.updateValue(key, (5,))
    state.clear()
    assert not state.exists()


def test_a_key_of_a_map_has_the_declared_fields() -> None:
    state = variable("Map", "k string, n long", "v long")
    with pytest.raises(SchemaError, match=r"tuple of \(k string, n long\)"):
        state.updateValue(("a",), (1,))


@on_both
def test_a_ttl_begins_again_with_every_update(settings: Any) -> None:
    clock = Clock()
    state = variable("Value", "a long", ttl_ms=10, clock=clock, settings=settings)
    state.update((1,))
    clock.now_ms = 9
    assert state.get() == (1,)
    state.update((2,))
    clock.now_ms = 18
    assert state.get() == (2,)
    clock.now_ms = 19
    assert state.get() is None and not state.exists()


@pytest.mark.parametrize(
    ("declare", "match"),
    [
        (lambda handle: handle.getValueState("x", "a long", ttlDurationMs=5), "timeMode='ProcessingTime'"),
        (lambda handle: handle.getValueState("__x", "a long"), "begin with '__'"),
        (
            lambda handle: [handle.getValueState("x", "a long"), handle.getListState("x", "a long")],
            "named 'x' already exists",
        ),
        (
            lambda handle: [handle.deleteIfExists("x"), handle.getListState("x", "a long")],
            "or init deletes one of that name",
        ),
        (lambda handle: handle.getValueState("x", "a long").get(), "used in init or close, where there is no key"),
        (lambda handle: handle.registerTimer(5), "registerTimer in init"),
    ],
)
def test_what_init_does_wrong_is_said_when_the_query_is_built(declare: Any, match: str) -> None:
    with pytest.raises(JobError, match=match):
        declare(RecordingHandle(TimeKind.EVENT))


def test_a_slot_knows_the_states_that_were_declared_and_no_others() -> None:
    state = LiveHandle({}, {}, None).getValueState("y", "a long")
    with pytest.raises(JobError, match="was deleted in init, or not declared when the query was built"):
        state.get()
    recorded = RecordingHandle(None)
    recorded.getListState("y", "a long")
    with pytest.raises(JobError, match="declares the value state 'y' here and didn't"):
        LiveHandle(recorded.declared, {}, None).getValueState("y", "a long")


def test_a_state_may_be_declared_and_deleted() -> None:
    recorded = RecordingHandle(None)
    recorded.getValueState("y", "a long")
    recorded.deleteIfExists("y")
    assert recorded.declared == {} and recorded.deleted == {"y"}


# -------------------------------------------------------------------------------------------------------------- records


def test_rows_are_sparks_with_fields_at_hand() -> None:
    kind = row_class(["a", "count", "class", "a b", "__x"])
    row = tuple.__new__(kind, (1, 2, 3, 4, 5))
    same = Row("a", "count", "class", "a b", "__x")(1, 2, 3, 4, 5)
    assert row == same and repr(row) == repr(same) and row.asDict() == same.asDict() and isinstance(row, Row)
    assert (row.a, row["count"], row["a b"], row[4], getattr(row, "class")) == (1, 2, 4, 5, 3)
    assert all(callable(each.count) for each in (row, same)), "a tuple's method, in Spark as here"
    assert pickle.loads(pickle.dumps(row)) == row
    with pytest.raises(AttributeError):
        _ = row.b


@pytest.mark.parametrize(
    ("ddl", "values"),
    [
        ("long", [1, None]),
        ("string", ["a", None]),
        ("map<string,long>", [{"a": 1}, None]),
        ("array<long>", [[1], None]),
        ("struct<a:long>", [{"a": 1}, None]),
        ("timestamp", [datetime(2024, 1, 1, tzinfo=UTC), None]),
        ("date", [date(2024, 1, 1)]),
        ("array<timestamp>", [[datetime(2024, 1, 1, tzinfo=UTC)]]),
        ("decimal(5,2)", [Decimal("1.50")]),
    ],
)
def test_records_are_what_arrow_makes_of_them_in_the_sessions_zone(ddl: str, values: list[Any]) -> None:
    zone = "America/New_York"
    column = from_list(values, parse_type(ddl))
    plain = column.cast(pa.timestamp("us", zone)) if ddl == "timestamp" else column
    plain = plain.cast(pa.list_(pa.timestamp("us", zone))) if ddl == "array<timestamp>" else plain
    got = python_column(column, zone)
    assert got == plain.to_pylist() and list(map(str, got)) == list(map(str, plain.to_pylist()))


def test_a_key_is_a_tuple() -> None:
    assert list(user_keys([pa.int64()], "UTC")([1, None])) == [(1,), (None,)]
    assert list(user_keys([pa.int64(), pa.string()], "UTC")([(1, "a")])) == [(1, "a")]
    ((moment,),) = user_keys([pa.timestamp("us", "UTC")], "America/New_York")([datetime(2024, 1, 1, tzinfo=UTC)])
    assert moment.hour == 19
