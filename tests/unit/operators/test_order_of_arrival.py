"""Aggregates that go by the order of arrival, in windows that are merged of panes or sessions, in the order of time.

In a random run the numbers of records grow as they arrive.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from tests.unit.operators.harness import Bench, on_heap
from tests.unit.operators.test_windows_on_rocksdb import on_rocksdb
from tests.unit.operators.window_oracle import Summary
from tests.unit.operators.windowing import RECORDS, RESULTS, Windows, check_random_run, spec_of
from tidegate.dataflow.aggregates.aggregation import Aggregation
from tidegate.dataflow.aggregates.base import Aggregate
from tidegate.dataflow.aggregates.declaring import first, last, max_by, min_by
from tidegate.dataflow.operators.window_spec import WindowSpec
from tidegate.dataflow.windows import Assigner, cumulating, sessions, sliding, tumbling
from tidegate.state.evolution import DeclaredState, evolve
from tidegate.types import parse_schema

WINDOWS = [
    tumbling("ts", 10),
    sliding("ts", 20, 5),
    sliding("ts", 10, 4, offset=1),
    cumulating("ts", 30, 10),
    sessions("ts", 10),
]
AGGREGATES: dict[str, tuple[Aggregate, Aggregate, Summary]] = {
    "first and last": (first("n"), last("n"), lambda numbers: (min(numbers), max(numbers))),
    "known only": (
        first("nullif(n, 1)", ignore_nulls=True),
        last("n", ignore_nulls=True),
        lambda numbers: (min((n for n in numbers if n != 1), default=None), max(numbers)),
    ),
    "with ties": (
        max_by("n", by="n % 2"),
        min_by("n", by="n % 3"),
        lambda numbers: (max(numbers, key=lambda n: (n % 2, -n)), min(numbers, key=lambda n: (n % 3, n))),
    ),
    "by, with ties": (
        first("n", by="n % 2"),
        last("n", by="cast(n % 2 as string)"),
        lambda numbers: (min(numbers, key=lambda n: (n % 2, n)), max(numbers, key=lambda n: (n % 2, n))),
    ),
}


@pytest.mark.parametrize(("make_backend", "lateness_ms"), [(on_heap, 0), (on_heap, 17), (on_rocksdb, 17)])
@pytest.mark.parametrize("aggregates", AGGREGATES.values(), ids=AGGREGATES)
@pytest.mark.parametrize("assigner", WINDOWS, ids=lambda each: each.text)
def test_they_go_by_it(
    assigner: Assigner, aggregates: tuple[Aggregate, Aggregate, Summary], make_backend: Any, lateness_ms: int
) -> None:
    one, other, summary = aggregates
    for seed in range(3 if make_backend is on_heap else 1):
        check_random_run(
            assigner,
            seed,
            lateness_ms=lateness_ms,
            make_backend=make_backend,
            aggregates={"count": one, "total": other},
            summary=summary,
        )


@pytest.mark.parametrize("assigner", WINDOWS[1:], ids=lambda each: each.text)
def test_numbers_continue_above_all_that_were_restored(assigner: Assigner) -> None:
    windows = Windows(spec_of(assigner, aggregates={"count": first("n"), "total": last("n")}), parallelism=2)
    windows.feed([(key, 7, 10 * step) for step in range(1, 5) for key in range(20) if step == 1 or key % 2])
    windows = windows.restored(parallelism=1)
    windows.feed([(key, 3, 100) for key in range(20)])
    windows = windows.restored(parallelism=3)
    windows.feed([(key, 9, 200) for key in range(0, 20, 3)])
    windows = windows.restored(parallelism=1)
    windows.watermark(0, 1000)
    windows.finish_work()
    whole = [row for row in windows.taken()[0] if row[1] <= 3 and row[2] >= 10]
    assert {row[0] for row in whole} == set(range(20))
    assert all(row[3:] == (10, 100 if row[0] % 3 else 200) for row in whole)


def test_state_of_a_version_that_had_no_numbers_arrived_before_all_other_records() -> None:
    assigner, aggregates = sliding("ts", 20, 10), {"count": first("n"), "total": last("n", by="key")}
    now = spec_of(assigner, aggregates=aggregates)
    without = Aggregation("here", aggregates, parse_schema(RECORDS))
    was = WindowSpec(assigner, replace(now.settings, aggregation=without))
    before = Bench(was, RECORDS, returns=RESULTS)
    before.feed((1, 15, 1))
    (old,), (new,) = was.descriptors, now.descriptors
    evolved = evolve(old.info(pa.int64()), DeclaredState(new.info(pa.int64()), changes=new.changes))
    assert evolved.convert is not None
    state = before.freeze()
    state["windows"] = list(map(evolved.convert, state["windows"]))
    bench = Bench(now, RECORDS, returns=RESULTS, restored=state)
    bench.feed((1, 5, 2))
    bench.operator.on_watermark(100)
    assert (1, 0, 20, 1, 2) in bench.out.rows


def test_tumbling_windows_need_no_numbers() -> None:
    spec = spec_of(tumbling("ts", 10), aggregates={"count": first("n"), "total": last("n", by="ts")})
    assert not spec.settings.aggregation.needs_numbers
    assert [each.name for each in spec.settings.aggregation.accumulators] == [
        "count_first_value",
        "count_first_seen",
        "total_last_value",
        "total_last_by",
    ]
