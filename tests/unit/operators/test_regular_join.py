"""Regular joins by themselves: applied to a table, what comes out is always the join of all that went in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import tidegate as tg
from tests.unit.dataflow.described import Records
from tests.unit.operators.changing import Row, applied, on_rocksdb, random_changes
from tests.unit.operators.harness import Bench, Clock, Restored, on_heap
from tidegate.dataflow.operators import join_sides, regular_join
from tidegate.dataflow.operators.budget import Budget
from tidegate.dataflow.pipeline import Pipeline
from tidegate.dataflow.row_kinds import INSERTED

BACKENDS: dict[str, Callable[[pa.DataType], Any]] = {"heap": on_heap, "rocksdb": on_rocksdb}
HOW = ["inner", "left", "right", "full", "semi", "anti"]
LEFT = [(k, k2, x) for k in (1, 2, None) for k2 in ("a", None) for x in (0.5, None)]
RIGHT = [(y, k, k2, t) for y in (None, 7) for k in (1, 2, None) for k2 in ("a", "b") for t in ([1], None)]
UPSERTS = "k long, k2 string, x double", "y long, k long, other string, t array<long>"


def joined(
    how: Any,
    *,
    changes: tuple[bool, bool] = (True, True),
    key: tuple[tuple[str, ...], tuple[str, ...]] = (("k", "k2"), ("k", "other")),
    ttl: str | None = None,
    restored: Restored | None = None,
    budget: Budget | None = None,
    make_backend: Any = on_heap,
) -> Bench:
    pipeline = Pipeline()
    sides = []
    for number, ddl in enumerate(UPSERTS):
        stream = pipeline.source(f"in {number}", Records(ddl))
        if changes[number]:
            stream = stream.as_upserts("k").as_changelog(f"changes {number}")
        sides.append(stream.key_by(*key[number]))
    sides[0].join("join", sides[1], how=how, ttl=ttl)
    node = pipeline._nodes[-1]
    return Bench(
        node.spec,
        *node.input_schemas,
        returns=node.schema,
        name="join",
        restored=restored,
        budget=budget,
        make_backend=make_backend,
    )


def oracle(how: str, left: list[Row], right: list[Row]) -> Counter[Row]:
    """The join on (k, k2) = (k, other); the column k is one column."""
    found: Counter[Row] = Counter()
    matched = set()
    for k, k2, x in left:
        matches = [index for index, (_, k_, other, _) in enumerate(right) if k is not None and (k, k2) == (k_, other)]
        matched |= set(matches)
        if how in ("semi", "anti"):
            if bool(matches) is (how == "semi"):
                found[k, k2, x] += 1
            continue
        for index in matches:
            y, _, other, t = right[index]
            found[k, k2, x, y, other, tuple(t) if t else t] += 1
        if not matches and how in ("left", "full"):
            found[k, k2, x, None, None, None] += 1
    for index, (y, k, other, t) in enumerate(right):
        if index not in matched and how in ("right", "full"):
            found[k, None, None, y, other, tuple(t) if t else t] += 1
    return found


def feed(bench: Bench, port: int, rows: list[Row]) -> list[Row]:
    """Feed a batch, and work until it is done."""
    before = len(bench.out.rows)
    bench.feed(*rows, port=port)
    while bench.operator.has_work():
        assert bench.operator.holds_records()
        bench.operator.maintain(10)
        bench.context.budget.begin()
        bench.operator.work()
    return bench.out.rows[before:]


def changes_of(bench: Bench, rows: list[Row]) -> list[Row]:
    return rows if bench.node.schema.names[0] == "row_kind" else [(INSERTED, *row) for row in rows]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", HOW)
def test_the_result_is_the_join_of_all_that_has_arrived(how: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(8 if backend == "heap" else 3):
        rng = Random(seed)
        limit = rng.choice([2, 1 << 15])
        for module in (join_sides, regular_join):
            monkeypatch.setattr(module, "MATCHES_AT_A_TIME", limit)
        changes = (rng.random() < 0.7, rng.random() < 0.7)
        clock = Clock()
        kind: dict[str, Any] = {"changes": changes, "make_backend": BACKENDS[backend]}

        def budget(clock: Clock = clock, spent: bool = rng.random() < 0.5) -> Budget | None:
            def tick() -> int:
                clock.now_ms += 200
                return clock.now_ms

            return Budget(tick) if spent else None

        bench = joined(how, budget=budget(), **kind)
        tables: tuple[list[Row], list[Row]] = ([], [])
        out: Counter[Row] = Counter()
        for epoch in range(1, 16):
            port = rng.randrange(2)
            delete = 0.45 if changes[port] else 0.0
            made = random_changes(rng, tables[port], (LEFT, RIGHT)[port], rng.randint(1, 10), delete=delete)
            rows = made if changes[port] else [tuple(row) for _, *row in made]
            applied(changes_of(bench, feed(bench, port, rows)), out)
            assert out == oracle(how, *tables), f"seed {seed}, epoch {epoch}, {how} join, changes {changes}"
            bench.operator.maintain(100)
            if rng.random() < 0.25:
                restored = bench.freeze(epoch)
                bench.operator.close()
                bench = joined(how, restored=restored, budget=budget(), **kind)
        if all(changes):
            for port, table in enumerate(tables):
                if table:
                    applied(feed(bench, port, [("-D", *row) for row in table]), out)
            assert not out
            assert all(not rows.num_rows for state in bench.freeze(99).values() for rows in state), "nothing is left"
        bench.operator.close()


def test_inner_and_semi_joins_of_appended_records_are_appended() -> None:
    assert joined("inner", changes=(False, False)).node.schema.names == ["k", "k2", "x", "y", "other", "t"]
    assert joined("semi", changes=(False, False)).node.schema.names == ["k", "k2", "x"]
    assert joined("left", changes=(False, False)).node.schema.names[0] == "row_kind"
    assert joined("semi", changes=(False, True)).node.schema.names[0] == "row_kind"


def test_a_first_match_takes_the_row_beside_nulls_back() -> None:
    bench = joined("left", changes=(False, False))
    assert feed(bench, 0, [(1, "a", 0.5)]) == [("+I", 1, "a", 0.5, None, None, None)]
    assert feed(bench, 1, [(7, 1, "a", None), (8, 1, "a", None)]) == [
        ("-D", 1, "a", 0.5, None, None, None),
        ("+I", 1, "a", 0.5, 7, "a", None),
        ("+I", 1, "a", 0.5, 8, "a", None),
    ]
    assert feed(bench, 1, [(9, 2, "a", None)]) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_records_are_forgotten_when_their_ttl_has_ended(backend: str) -> None:
    bench = joined("left", changes=(True, True), ttl="4 s", make_backend=BACKENDS[backend])
    bench.clock.now_ms = 10_000
    feed(bench, 0, [("+I", 1, "a", 0.5), ("+I", 2, "a", 0.5)])
    bench.clock.now_ms = 14_500
    bench.operator.maintain(10)
    assert len(feed(bench, 1, [("+I", 7, 1, "a", None)])) == 2, "between one ttl and one and a quarter"
    bench.clock.now_ms = 15_000
    assert feed(bench, 1, [("+I", 8, 2, "a", None)]) == []
    assert feed(bench, 0, [("-D", 2, "a", 0.5)]) == [], "a deletion of what is forgotten"
    assert len(feed(bench, 0, [("-D", 2, "a", 0.5), ("+I", 2, "a", 0.5)])) == 1, "and it comes again in the same batch"
    assert len(feed(bench, 0, [("+I", 2, "a", 1.5), ("-D", 2, "a", 1.5), ("-D", 2, "a", 0.5)])) == 1
    assert feed(bench, 0, [("+I", 1, "a", 1.5)]) == [("+I", 1, "a", 1.5, 7, "a", None)]
    restored = bench.freeze()
    bench = joined("left", changes=(True, True), ttl="9 s", restored=restored, make_backend=BACKENDS[backend])
    bench.clock.now_ms = 23_000
    assert len(feed(bench, 0, [("-D", 1, "a", 1.5)])) == 1, "a longer ttl holds for what is kept already"
    bench.clock.now_ms = 40_000
    bench.operator.maintain(10)
    assert all(not rows.num_rows for state in bench.freeze(2).values() for rows in state)


def test_records_from_before_there_was_a_ttl_are_kept_for_one() -> None:
    first = joined("inner", changes=(False, False))
    feed(first, 0, [(1, "a", 0.5)])
    clock = Clock(50_000)
    bench = joined("inner", changes=(False, False), ttl="4 s", restored=first.freeze())
    bench.clock.now_ms = clock.now_ms = 3_999
    assert len(feed(bench, 1, [(7, 1, "a", None)])) == 1
    bench.clock.now_ms = 4_000
    assert feed(bench, 1, [(7, 1, "a", None)]) == []


def test_a_hot_key_is_joined_in_bounded_parts() -> None:
    bench = joined("inner", changes=(False, False), key=(("k",), ("k",)))
    count = 100_000
    schema = bench.schemas[0]
    ones = pa.array(np.ones(count, np.int64))
    columns = [ones, pa.array(["a"]).take(pa.array(np.zeros(count, np.int64))), pa.array(np.arange(count) * 1.0)]
    bench.operator.on_batch(pa.RecordBatch.from_arrays(columns, schema=schema), 0)
    largest = total = 0

    class Counting:
        def on_batch(self, batch: pa.RecordBatch, port: int) -> None:
            nonlocal largest, total
            largest, total = max(largest, batch.num_rows), total + batch.num_rows

    consumer: Any = Counting()
    bench.operator.consumers[:] = [consumer]
    bench.feed((7, 1, "x", None), (8, 1, "x", None), (9, None, "x", None), port=1)
    assert total == 2 * count
    assert largest <= join_sides.MATCHES_AT_A_TIME


def test_a_key_of_one_name_is_one_column_and_comes_from_either_side() -> None:
    bench = joined("full", changes=(False, False), key=(("k",), ("k",)))
    assert bench.node.schema.names == ["row_kind", "k", "k2", "x", "y", "other", "t"]
    assert feed(bench, 1, [(7, 5, "b", None)]) == [("+I", 5, None, None, 7, "b", None)]
    assert feed(bench, 1, [(7, None, "b", None)]) == [("+I", None, None, None, 7, "b", None)]


def auctions() -> tuple[tg.Stream, tg.Stream]:
    pipeline = Pipeline()
    return (
        pipeline.source("bids", Records("auction long, price double, name string")),
        pipeline.source("auctions", Records("id long, seller string, tags map<string, long>")),
    )


@pytest.mark.parametrize(
    ("use", "error"),
    [
        (
            lambda left, right: left.key_by("auction").join("j", right.key_by("id"), how="outer"),
            r"how='outer' is not a kind of join \(do you mean 'full'\?\); give one of 'inner', 'left'",
        ),
        (
            lambda left, right: (
                left.with_columns(auction="CAST(auction AS int)").key_by("auction").join("j", right.key_by("id"))
            ),
            r"left key is \(auction int\), .* such as left.with_columns\(auction='CAST\(auction AS long\)'\)",
        ),
        (lambda left, right: left.key_by("auction").join("j", right), "use key_by on both"),
        (lambda left, right: left.key_by("auction").join("j", "right"), "join takes a keyed stream, not 'right'"),
        (lambda left, right: left.key_by("auction").join("j", right.key_by("seller")), "would never meet"),
        (lambda left, right: left.key_by("auction").join("j", right.key_by("id"), ttl=0), "ttl=0 would keep no record"),
        (
            lambda left, right: left.key_by("auction").join("j", right.with_columns({"name": "seller"}).key_by("id")),
            r"both sides have a column 'name'; .* right.select\('name AS right_name'",
        ),
        (
            lambda left, right: left.key_by("auction").join("j", right.as_upserts("id").key_by("id")),
            r"join 'j' takes appended records or changes, .* emits upserts by \(id\).*as_changelog\(name\)",
        ),
        (
            lambda left, right: left.key_by("auction").join("j", right.as_upserts("id").as_changelog("c").key_by("id")),
            "column 'tags' of the right stream .* has deletions",
        ),
        (
            lambda left, right: (
                left.with_columns(row_kind="name").key_by("auction").join("j", right.key_by("id"), how="left")
            ),
            "'row_kind' is the name of the column",
        ),
        (lambda left, right: left.join("j", right), r"call left.key_by\(…\).join"),
    ],
)
def test_a_mistake_in_a_join_is_an_error_when_the_job_is_built(use: Callable[[Any, Any], object], error: str) -> None:
    with pytest.raises((tg.JobError, AttributeError), match=error):
        use(*auctions())


def test_texts_of_two_kinds_may_meet_and_dictionaries_are_decoded() -> None:
    pipeline = Pipeline()
    texts = [
        pa.schema([("a", pa.string()), ("n", pa.dictionary(pa.int32(), pa.string()))]),
        pa.schema([("b", pa.large_string()), ("m", pa.int64())]),
    ]
    left, right = (pipeline.source(f"in {number}", Records(schema)) for number, schema in enumerate(texts))
    left.key_by("a").join("join", right.key_by("b"), how="full")
    node = pipeline._nodes[-1]
    bench = Bench(node.spec, *node.input_schemas, returns=node.schema)
    columns = [pa.array(["x"]), pa.array(["one"]).dictionary_encode()]
    bench.operator.on_batch(pa.RecordBatch.from_arrays(columns, schema=bench.schemas[0]), 0)
    columns = [pa.array(["x", "y"], pa.large_string()), pa.array([1, 2])]
    bench.operator.on_batch(pa.RecordBatch.from_arrays(columns, schema=bench.schemas[1]), 1)
    assert bench.out.rows[1:] == [
        ("-D", "x", "one", None, None),
        ("+I", "x", "one", "x", 1),
        ("+I", None, None, "y", 2),
    ]


def test_a_semi_join_of_appended_records_keeps_what_it_still_needs() -> None:
    bench = joined("semi", changes=(False, False))
    feed(bench, 0, [(1, "a", 0.5), (2, "a", 0.5)])
    assert feed(bench, 1, [(7, 1, "a", None), (8, 1, "a", None), (9, 3, "a", None)]) == [(1, "a", 0.5)]
    assert feed(bench, 1, [(7, 3, "a", None)]) == []
    assert feed(bench, 0, [(1, "a", 1.5), (3, "a", 1.5)]) == [(1, "a", 1.5), (3, "a", 1.5)]
    state = bench.freeze()
    held = {name: [key for rows in batches for key in rows.column("key").to_pylist()] for name, batches in state.items()}
    assert held["left with matches"] == [{"k": 2, "k2": "a"}]
    assert sorted(key["k"] for key in held["right"]) == [1, 3]


def test_records_from_before_there_were_deletions_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(side: Any, keys: Any, columns: Any) -> Any:
        return np.full(len(keys[0]), join_sides.UNKNOWN)

    with monkeypatch.context() as patched:
        patched.setattr(join_sides.StoredSide, "_hashes", unknown)
        first = joined("inner")
        feed(first, 0, [("+I", 1, "a", 0.5), ("+I", 1, "a", 1.5)])
    bench = joined("inner", restored=first.freeze())
    feed(bench, 1, [("+I", 7, 1, "a", None)])
    assert feed(bench, 0, [("-D", 1, "a", 1.5)]) == [("-D", 1, "a", 1.5, 7, "a", None)]
    assert feed(bench, 0, [("-D", 1, "a", 1.5)]) == []
