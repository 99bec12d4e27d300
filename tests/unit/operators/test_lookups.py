"""Look-ups by themselves: in a table that every subtask has, and in one outside with a cache."""

from __future__ import annotations

from decimal import Decimal
from random import Random
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tests.unit.operators.harness import Bench, Restored
from tidegate.dataflow.lookups import lookup_join_spec, lookup_spec
from tidegate.dataflow.operators import rows_by_key
from tidegate.dataflow.pipeline import Pipeline
from tidegate.errors import SchemaError, UserFunctionError
from tidegate.types import parse_schema

RECORD, TABLE = "id long, k long, t string", "key long, t string, rate double, note string"
ON = {"k": "key", "t": "t"}
JOINED = "id long, k long, t string, rate double, note string"


def join(how: str, restored: Restored | None = None, subtask: int = 0, parallelism: int = 1) -> Bench:
    spec, schema = lookup_join_spec("op", parse_schema(RECORD), parse_schema(TABLE), on=ON, how=how)
    assert schema.equals(parse_schema(JOINED))
    return Bench(spec, RECORD, TABLE, returns=schema, restored=restored, subtask=subtask, parallelism=parallelism)


@pytest.mark.parametrize("how", ["inner", "left"])
@pytest.mark.parametrize("seed", range(3))
def test_a_record_finds_the_newest_row_of_its_key(how: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_by_key, "MIN_UNUSED", 5)
    rng, bench = Random(seed), join(how)
    table: dict[Any, Any] = {}
    for number in range(80):
        if rng.random() < 0.5:
            rows = [
                (rng.choice((None, *range(6))), rng.choice("ab"), float(number), f"{number} {i}")
                for i in range(rng.choice((1, 3, 8)))
            ]
            bench.feed(*rows, port=1)
            table |= {row[:2]: row[2:] for row in rows if row[0] is not None}
        elif rng.random() < 0.8:
            records = [(i, rng.choice((None, *range(8))), rng.choice(("a", "b", None))) for i in range(rng.randrange(1, 9))]
            found = [(*each, *table.get(each[1:], (None, None))) for each in records]
            assert bench.feed(*records) == [row for row in found if how == "left" or row[3] is not None]
        else:
            frozen = bench.freeze()
            if rng.random() < 0.5:
                assert sum(batch.num_rows for batch in join(how, frozen, 1, 2).freeze().get("table", [])) == 0
            bench = join(how, frozen)


def test_a_frozen_table_stays_as_it_was() -> None:
    bench = join("left")
    bench.feed((1, "a", 1.0, "before"), port=1)
    frozen = bench.operator.freeze(1)
    assert frozen is not None
    bench.feed((1, "a", 2.0, "after"), (2, "a", 3.0, "new"), port=1)
    (section,) = frozen.sections()
    assert section.rows.to_pylist() == [{"value": {"key": {"key": 1, "t": "a"}, "value": {"rate": 1.0, "note": "before"}}}]


def test_a_table_of_the_program_needs_no_state() -> None:
    table = pa.table({"key": [1, 2], "rate": [0.5, None]})
    spec, schema = lookup_join_spec("op", parse_schema("k long"), table, on={"k": "key"}, how="inner")
    bench = Bench(spec, "k long", returns=schema)
    assert bench.feed((1,), (3,), (2,), (None,), (1,)) == [(1, 0.5), (2, None), (1, 0.5)]
    assert bench.operator.freeze(1) is None and spec.states(bench.node) == ()


class Service(tg.Lookup):
    """Knows all even numbers but 6."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []
        self.errors: list[BaseException] = []
        self.is_open = False
        self.version = 0

    def open(self) -> None:
        self.is_open = True

    def close(self) -> None:
        self.is_open = False

    def look_up(self, keys: pa.RecordBatch) -> pa.RecordBatch | pa.Table:
        assert self.is_open
        if self.errors:
            raise self.errors.pop(0)
        self.calls.append(keys["k"].to_pylist())
        known = [key for key in keys["k"].to_pylist()[::-1] if key % 2 == 0 and key != 6]
        return pa.table({"name": [f"{key} of version {self.version}" for key in known], "k": pa.array(known, pa.int64())})


def outside(service: Any, how: str = "left", **options: Any) -> Bench:
    options = {"cache": 100, "ttl": None, "retries": 2} | options
    spec, schema = lookup_spec("op", parse_schema("k long"), service, "name string", on="k", how=how, **options)
    return Bench(spec, "k long", returns=schema)


def test_each_key_is_looked_up_once_in_one_call_for_each_batch() -> None:
    service = Service()
    bench = outside(service)
    assert bench.feed((2,), (1,), (2,), (None,), (4,)) == [
        (2, "2 of version 0"),
        (1, None),
        (2, "2 of version 0"),
        (None, None),
        (4, "4 of version 0"),
    ]
    assert bench.feed((4,), (6,), (1,)) == [(4, "4 of version 0"), (6, None), (1, None)]
    assert service.calls == [[2, 1, 4], [6]]
    bench.feed((4,), (6,), (None,))
    assert len(service.calls) == 2
    bench.operator.close()
    assert not service.is_open


def test_an_inner_look_up_drops_what_finds_nothing() -> None:
    bench = outside(Service(), how="inner")
    assert bench.feed((1,), (2,), (None,)) == [(2, "2 of version 0")]
    assert bench.feed((1,)) == []


def test_a_key_is_looked_up_again_after_the_ttl() -> None:
    service = Service()
    bench = outside(service, ttl="1 s")
    bench.clock.now_ms = 5_000
    bench.feed((2,), (1,))
    service.version, bench.clock.now_ms = 1, 5_999
    assert bench.feed((2,), (4,)) == [(2, "2 of version 0"), (4, "4 of version 1")]
    bench.clock.now_ms = 6_000
    assert bench.feed((2,), (4,)) == [(2, "2 of version 1"), (4, "4 of version 1")]
    assert service.calls == [[2, 1], [4], [2]]


def test_the_cache_is_bounded_and_forgets_what_was_used_least_lately() -> None:
    service = Service()
    bench = outside(service, cache=8)
    bench.feed(*((key,) for key in range(8)))
    bench.feed((0,), (3,))
    bench.feed((100,))  # now nine: six stay, these three among them
    calls = len(service.calls)
    bench.feed((0,), (3,), (100,))
    assert len(service.calls) == calls
    for start in range(0, 1000, 50):
        rows = bench.feed(*((key,) for key in range(start, start + 50)))
        assert [row[0] for row in rows if row[1] is not None] == [
            k for k in range(start, start + 50) if k % 2 == 0 and k != 6
        ]
        assert bench.operator._cached.count <= 8  # type: ignore[attr-defined]
    assert len(bench.operator._used) < 200  # type: ignore[attr-defined]


def test_an_error_of_the_world_is_retried_after_a_pause() -> None:
    service = Service()
    service.errors = [ConnectionError("no route"), TimeoutError("too slow")]
    bench = outside(service)
    assert bench.feed((2,)) == [] and bench.operator.holds_records()
    bench.clock.now_ms += 99
    bench.operator.work()
    assert len(service.errors) == 1
    bench.clock.now_ms += 1
    bench.operator.work()
    assert service.errors == [] and bench.operator.has_work()
    bench.clock.now_ms += 200
    bench.operator.work()
    assert bench.out.rows == [(2, "2 of version 0")] and not bench.operator.has_work()


def test_an_error_that_lasts_and_one_of_the_program_end_the_attempt() -> None:
    service = Service()
    service.errors = [ConnectionError("no route")] * 3
    bench = outside(service, retries=1)
    bench.feed((2,))
    bench.clock.now_ms += 100
    with pytest.raises(UserFunctionError, match="no route"):
        bench.operator.work()
    service.errors = [ValueError("a bug")]
    with pytest.raises(UserFunctionError, match="a bug"):
        outside(service).feed((2,))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"k": [2, 2], "name": ["a", "b"]}, r"gave several rows of the key \{'k': 2\}"),
        ({"k": [2]}, r"gave 'k long'; give a record batch of \(k long, name string\)"),
        (
            {"k": ["x"], "name": ["a"]},
            r"operator 'the operator': the look-up gave column 'k' as string, and it is the key, of type long",
        ),
        (
            {"k": [2], "name": [5]},
            r"operator 'the operator': the look-up gave column 'name' as long, and it is declared as string",
        ),
        ({"k": [2], "name": [[5]]}, r"gave column 'name' as array<long>, and it is declared as string"),
        ({"k": pa.array([2**63], pa.uint64()), "name": ["a"]}, r"which can't become \(k long, name string\)"),
    ],
)
def test_what_a_look_up_gives_is_checked(given: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        outside(lambda keys: pa.RecordBatch.from_pydict(given)).feed((2,))
    with pytest.raises(SchemaError, match="gave 'a list'"):
        outside(lambda keys: [1]).feed((2,))


@pytest.mark.parametrize(
    ("given", "declared", "value"),
    [
        (pa.array([5], pa.int16()), "int", 5),
        (pa.array([5]), "double", 5.0),
        (pa.array([5]), "decimal(30, 2)", Decimal(5)),
        (pa.array([1.5]), "float", 1.5),
        (pa.array(["a"], pa.large_string()), "string", "a"),
        (pa.array(["a"]).dictionary_encode(), "string", "a"),
        (pa.array([None]), "date", None),
        (pa.array([[1]]), "array<int>", [1]),
    ],
)
def test_a_look_up_may_give_another_width_of_the_declared_type(given: pa.Array, declared: str, value: Any) -> None:
    def look_up(keys: pa.RecordBatch) -> pa.Table:
        return pa.table({"k": [2], "found": given})

    options: dict[str, Any] = {"cache": 100, "ttl": None, "retries": 2}
    spec, schema = lookup_spec("op", parse_schema("k long"), look_up, f"found {declared}", on="k", how="left", **options)
    assert Bench(spec, "k long", returns=schema).feed((2,)) == [(2, value)]


def test_mistakes_are_errors_when_the_job_is_built() -> None:
    def stream(ddl: str = RECORD) -> tg.Stream:
        return Pipeline().source("in", tg.sources.rows([], ddl))

    table = pa.table({"key": [1, 1], "rate": [0.5, 0.5]})
    mistakes: tuple[tuple[Any, str], ...] = (
        (lambda: stream().lookup_join("op", table, on={"k": "key"}), "the table has 2 rows and 1 different keys"),
        (lambda: stream().lookup_join("op", table, on={"t": "key"}), "column 't' is of type string, and 'key' of the table"),
        (lambda: stream().lookup_join("op", table, on={"m": "key"}), "there is no column 'm'"),
        (lambda: stream().lookup_join("op", table.select(["key"]), on={"k": "key"}), "no columns but 'key'"),
        (lambda: stream().lookup_join("op", table.rename_columns(["key", "id"]), on={"k": "key"}), "have a column 'id'"),
        (
            lambda: stream().lookup_join("op", pa.table({"k": pa.array([1], pa.int32()), "x": [1]}), on="k"),
            r"of the table of type int; bring one .* type: with_columns\(…\) of a stream, cast\(…\) of an Arrow table",
        ),
        (lambda: stream().lookup_join("op", stream(), on="k"), "takes a broadcast stream"),
        (lambda: stream().lookup_join("op", table, on={"k": "key"}, how="full"), "how='full'"),  # type: ignore[arg-type]
        (lambda: stream().lookup("op", Service, "name string", on="k"), "Service is a class; pass an instance"),  # type: ignore[arg-type]
        (lambda: stream().lookup("op", 5, "name string", on="k"), "5 can't look up"),  # type: ignore[arg-type]
        (lambda: stream().lookup("op", Service(), "name string", on="m"), "there is no column 'm'"),
        (lambda: stream().lookup("op", Service(), "t string", on="k"), "have a column 't'"),
        (lambda: stream().lookup("op", Service(), "name string", on="k", cache=0), "cache=0"),
    )
    for build, message in mistakes:
        with pytest.raises(tg.TidegateError, match=message):
            build()
