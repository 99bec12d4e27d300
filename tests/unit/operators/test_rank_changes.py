"""Top and deduplicate over changes: applied to a table, what comes out are the best of the rows that are left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tests.unit.dataflow.described import Records
from tests.unit.operators.changing import Row, applied, on_rocksdb, random_changes
from tests.unit.operators.harness import Bench, Restored, on_heap
from tidegate.dataflow.operators import rank_changes
from tidegate.dataflow.operators.budget import Budget
from tidegate.dataflow.pipeline import Pipeline

BACKENDS: dict[str, Callable[[pa.DataType], Any]] = {"heap": on_heap, "rocksdb": on_rocksdb}
ROWS = [(k, x, text) for k in ("a", "b", None) for x in (None, 0.5, 2.0, float("inf")) for text in ("one", "two")]


def ranking(
    rank: Callable[[tg.KeyedStream], tg.Stream],
    restored: Restored | None = None,
    *,
    budget: Budget | None = None,
    make_backend: Any = on_heap,
) -> Bench:
    changes = Pipeline().source("in", Records("k string, x double, text string")).as_upserts("k").as_changelog("changes")
    node = rank(changes.key_by("k"))._pipeline._nodes[-1]
    return Bench(
        node.spec, *node.input_schemas, returns=node.schema, restored=restored, budget=budget, make_backend=make_backend
    )


def order(row: Row) -> tuple[bool, float]:
    """Null is the smallest."""
    return row[1] is not None, row[1] or 0.0


def best_of(table: list[Row], count: int, *, descending: bool, ranked: bool) -> Counter[Row]:
    found: Counter[Row] = Counter()
    for key in {row[0] for row in table}:
        ordered = sorted((row for row in table if row[0] == key), key=order, reverse=descending)
        found.update((*row[:2], rank) if ranked else row[:2] for rank, row in enumerate(ordered[:count], start=1))
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("rank", "count", "descending", "ranked"),
    [
        (lambda keyed: keyed.top("op", 2, by="x"), 2, False, True),
        (lambda keyed: keyed.top("op", 3, by="x", descending=True), 3, True, True),
        (lambda keyed: keyed.deduplicate("op", order_by="x"), 1, False, False),
        (lambda keyed: keyed.deduplicate("op", order_by="x", keep="last"), 1, True, False),
    ],
)
def test_the_result_is_the_best_of_the_rows_that_are_left(
    rank: Any, count: int, descending: bool, ranked: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(4 if backend == "heap" else 2):
        rng = Random(seed)
        monkeypatch.setattr(rank_changes, "RANKED_ROWS", rng.choice([2, 1 << 16]))
        bench = ranking(rank, make_backend=BACKENDS[backend])
        table: list[Row] = []
        out: Counter[Row] = Counter()
        for epoch in range(1, 20):
            applied(bench.feed(*random_changes(rng, table, ROWS, rng.randint(1, 12), delete=0.5)), out)
            # Which of several records that are equal in order is chosen, is another test's concern.
            chosen = Counter(tuple(each for each in row if each not in ("one", "two")) for row in out.elements())
            assert chosen == best_of(table, count, descending=descending, ranked=ranked), f"seed {seed}, epoch {epoch}"
            assert out.keys() <= {(*row, place) for row in table for place in range(4)} | set(table)
            bench.operator.maintain(100)
            if rng.random() < 0.3:
                restored = bench.freeze(epoch)
                bench.operator.close()
                bench = ranking(rank, restored, make_backend=BACKENDS[backend])
        if table:
            applied(bench.feed(*(("-D", *row) for row in table)), out)
        assert not out
        assert all(not rows.num_rows for state in bench.freeze(99).values() for rows in state), "nothing is left"
        bench.operator.close()


def test_records_that_are_equal_in_order_are_ranked_by_arrival() -> None:
    bench = ranking(lambda keyed: keyed.top("op", 2, by="x"))
    bench.feed(("+I", "a", 1.0, "first"), ("+I", "a", 1.0, "second"))
    assert bench.feed(("+I", "a", 1.0, "third")) == []
    assert bench.feed(("-D", "a", 1.0, "first")) == [
        ("-D", "a", 1.0, "first", 1),
        ("-D", "a", 1.0, "second", 2),
        ("+I", "a", 1.0, "second", 1),
        ("+I", "a", 1.0, "third", 2),
    ]


@pytest.mark.parametrize(("keep", "chosen"), [("first", ["first", "second"]), ("last", ["third", "second"])])
def test_without_an_order_arrival_decides(keep: Any, chosen: list[str]) -> None:
    bench = ranking(lambda keyed: keyed.deduplicate("op", keep=keep))
    one, other = chosen
    emitted = bench.feed(*(("+I", "a", None, text) for text in ("first", "second", "third")))
    assert emitted == [("+I", "a", None, one)]
    bench = ranking(lambda keyed: keyed.deduplicate("op", keep=keep), bench.freeze())
    assert bench.feed(("-D", "a", None, one)) == [("-D", "a", None, one), ("+I", "a", None, other)]
    assert bench.feed(("+I", "b", None, None)) == [("+I", "b", None, None)]


@pytest.mark.parametrize("together", [True, False])
def test_a_record_that_is_deleted_and_comes_again_arrives_again(together: bool) -> None:
    """However records are cut into batches."""
    bench = ranking(lambda keyed: keyed.deduplicate("op", keep="last"))
    out: Counter[Row] = Counter()
    changes = [("-D", "a", None, "one"), ("+I", "a", None, "one")]
    applied(bench.feed(("+I", "a", None, "one"), ("+I", "a", None, "other")), out)
    for batch in [changes] if together else [[each] for each in changes]:
        applied(bench.feed(*batch), out)
    assert out == {("a", None, "one"): 1}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_key_is_forgotten_when_nothing_came_for_its_ttl(backend: str) -> None:
    bench = ranking(lambda keyed: keyed.top("op", 1, by="x", ttl="1 s"), make_backend=BACKENDS[backend])
    bench.clock.now_ms = 5_000
    bench.feed(("+I", "a", 1.0, ""), ("+I", "a", 2.0, ""), ("+I", "b", 1.0, ""))
    bench.clock.now_ms = 5_900
    assert bench.feed(("-D", "a", 1.0, "")) == [("-D", "a", 1.0, "", 1), ("+I", "a", 2.0, "", 1)]
    bench.clock.now_ms = 6_800
    assert bench.feed(("-D", "a", 2.0, ""), ("+I", "a", 2.5, "")) != [], "it was renewed"
    assert bench.feed(("-D", "b", 1.0, ""), ("+I", "b", 1.0, "")) == [("+I", "b", 1.0, "", 1)], "the former one is forgotten"
    bench.clock.now_ms = 9_000
    for _ in range(3):
        bench.operator.maintain(100)
    assert all(not rows.num_rows for state in bench.freeze().values() for rows in state)
    bench.operator.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_ttl_that_is_new_begins_for_all_keys_at_the_restore(backend: str) -> None:
    before = ranking(lambda keyed: keyed.top("op", 1, by="x"))
    before.feed(("+I", "a", 1.0, ""), ("+I", "a", 2.0, ""), ("+I", None, 1.0, ""))
    bench = ranking(lambda keyed: keyed.top("op", 1, by="x", ttl="1 s"), before.freeze(), make_backend=BACKENDS[backend])
    bench.clock.now_ms = 5_000
    bench.operator.maintain(100)
    bench.clock.now_ms = 5_900
    assert bench.feed(("-D", "a", 1.0, "")) != [], "it is kept for one ttl"
    for now_ms in (6_500, 6_900):
        bench.clock.now_ms = now_ms
        bench.operator.maintain(100)
    assert all(not rows.num_rows for state in bench.freeze().values() for rows in state)
    bench.operator.close()


def test_a_batch_is_ranked_in_steps_and_a_snapshot_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_changes, "RANKED_ROWS", 1)
    budget = Budget()
    bench = ranking(lambda keyed: keyed.top("op", 1, by="x"), budget=budget)
    budget.end()
    bench.feed(*(("+I", key, 1.0, "") for key in "abcde"))
    bench.operator.work()
    assert len(bench.out.rows) == 1 and bench.operator.holds_records()
    while bench.operator.has_work():
        bench.operator.work()
    assert len(bench.out.rows) == 5


def test_what_comes_out_are_changes_with_a_row_for_each_key_and_rank() -> None:
    pipeline = Pipeline()
    upserts = pipeline.source("in", Records("k string, n long, m map<string, long>")).as_upserts("k")
    changes = upserts.select("k", "n").as_changelog("changes")
    top = changes.key_by("n").top("top", 3, by="n")
    assert top.schema.names == ["row_kind", "k", "n", "rank"]
    node = pipeline._nodes[-1]
    assert node.retracts and node.upserts_by == ("n", "rank")
    assert top.filter("rank = 1").key_by("k").deduplicate("one", keep="last").schema.names == top.schema.names
    with pytest.raises(tg.JobError, match=r"as_changelog\(name\), which takes a replaced row back"):
        upserts.select("k", "n").key_by("k").top("refused", 3, by="n")
    with pytest.raises(tg.JobError, match=r"as_changelog\(name\), which takes a replaced row back"):
        upserts.select("k", "n").key_by("k").deduplicate("refused 2")
    with pytest.raises(tg.SchemaError, match=r"column 'm' of the stream .* maps can't be compared"):
        upserts.as_changelog("maps").key_by("n").top("refused 3", 3, by="n")
    with pytest.raises(tg.SchemaError, match="there is no column 'row_kind'"):
        changes.key_by("n").top("refused 4", 3, by="row_kind")
    with pytest.raises(tg.SchemaError, match="'row_kind' is the name of the column"):
        changes.key_by("n").top("refused 5", 3, by="n", rank="row_kind")
