"""Window operators by themselves: several subtasks side by side, stepped, frozen, restored and rescaled in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from random import Random
from typing import Any

import pyarrow as pa

from tests.unit.operators.harness import GROUPS, Bench, Restored, on_heap
from tests.unit.operators.window_oracle import Record, Result, Summary, count_and_sum, group_of, oracle_of
from tidegate.dataflow.aggregates.aggregation import Aggregation
from tidegate.dataflow.aggregates.base import Aggregate
from tidegate.dataflow.aggregates.declaring import count, sum_
from tidegate.dataflow.operators.window import WindowOperator
from tidegate.dataflow.operators.window_aggregates import WindowSettings
from tidegate.dataflow.operators.window_spec import WindowSpec
from tidegate.dataflow.triggers import Trigger
from tidegate.dataflow.windows import Assigner
from tidegate.hashing import hash_columns
from tidegate.keygroups import groups_of, key_groups_of, owner_of
from tidegate.protocol.watermarks import MAX_WATERMARK_MS
from tidegate.types import parse_schema

RECORDS = "key long, ts long, n long"
RESULTS = "key long, window_start long not null, window_end long not null, count long, total long"


def spec_of(
    assigner: Assigner,
    *,
    records: str = RECORDS,
    key: tuple[str, ...] = ("key",),
    aggregates: Mapping[str, Aggregate] | None = None,
    triggers: Sequence[Trigger] = (),
    **settings: Any,
) -> WindowSpec:
    named = {"count": count(), "total": sum_("n")} if aggregates is None else aggregates
    aggregation = Aggregation("here", named, parse_schema(records), triggers=triggers, numbering=assigner.merges)
    return WindowSpec(assigner, WindowSettings(key, aggregation, **settings))


class Windows:
    """All subtasks of a window operator keyed by a long. A record goes to the subtask of its key."""

    def __init__(
        self,
        spec: Any,
        *,
        inputs: Sequence[str] = (RECORDS,),
        returns: str = RESULTS,
        sides: Sequence[str] = ("late",),
        parallelism: int = 1,
        whole: Restored | None = None,
        resumed: bool = True,
        make_backend: Any = on_heap,
    ) -> None:
        self.spec = spec
        self.parallelism = parallelism
        self._rest: dict[str, Any] = dict(inputs=inputs, returns=returns, sides=sides, make_backend=make_backend)
        self.benches = [
            Bench(
                spec,
                *inputs,
                returns=returns,
                sides=dict.fromkeys(sides, inputs[0]),
                restored=None if whole is None else own_part(whole, subtask, parallelism),
                subtask=subtask,
                parallelism=parallelism,
                make_backend=make_backend,
            )
            for subtask in range(parallelism)
        ]
        if resumed:
            self.resume()

    def resume(self) -> None:
        for bench in self.benches:
            bench.operator.resume()

    def operator(self, subtask: int) -> WindowOperator:
        operator = self.benches[subtask].operator
        assert isinstance(operator, WindowOperator)
        return operator

    def groups(self, subtask: int) -> range:
        return key_groups_of(subtask, parallelism=self.parallelism, key_group_count=GROUPS)

    def feed(self, records: Sequence[Record], port: int = 0) -> None:
        for subtask, bench in enumerate(self.benches):
            own = [each for each in records if subtask_of(each[0], self.parallelism) == subtask]
            if own:
                bench.feed(*own, port=port)
            bench.operator.maintain(1000)

    def watermark(self, subtask: int, at_ms: int) -> None:
        self.benches[subtask].operator.on_watermark(at_ms)

    def finish_work(self) -> None:
        for subtask in range(self.parallelism):
            while self.operator(subtask).has_work():
                self.operator(subtask).work()

    def taken(self) -> tuple[list[Any], list[Any]]:
        """The results and the late records since the last call."""
        rows = [row for bench in self.benches for row in bench.out.rows]
        late = [row for bench in self.benches for side in bench.sides.values() for row in side.rows]
        for bench in self.benches:
            bench.out.events.clear()
            for side in bench.sides.values():
                side.events.clear()
        return rows, late

    def restored(self, *, parallelism: int, resumed: bool = True) -> Windows:
        """The same after a snapshot now, at another parallelism."""
        whole: Restored = {}
        for bench in self.benches:
            bench.operator.before_snapshot()
            while bench.operator.holds_records():
                bench.operator.work()
            for state, batches in bench.freeze().items():
                whole.setdefault(state, []).extend(batches)
            bench.operator.close()
        return Windows(self.spec, parallelism=parallelism, whole=whole, resumed=resumed, **self._rest)


def own_part(whole: Restored, subtask: int, parallelism: int) -> Restored:
    """The rows of a subtask's key-groups, and all of operator state."""
    groups = key_groups_of(subtask, parallelism=parallelism, key_group_count=GROUPS)
    part: Restored = {}
    for state, batches in whole.items():
        part[state] = batches
        if batches and "key" in batches[0].schema.names:
            found = [groups_of(hash_columns([batch.column("key")]), GROUPS) for batch in batches]
            part[state] = [
                batch.filter(pa.array((each >= groups.start) & (each < groups.stop)))
                for batch, each in zip(batches, found, strict=True)
            ]
    return part


@cache
def group(key: Any) -> int:
    return group_of(key, pa.int64(), GROUPS)


def subtask_of(key: Any, parallelism: int) -> int:
    return owner_of(group(key), parallelism=parallelism, key_group_count=GROUPS)


def check_random_run(
    assigner: Assigner,
    seed: int,
    *,
    lateness_ms: int,
    rescales: bool = True,
    stops_in_the_middle: bool = False,
    make_backend: Any = on_heap,
    make_spec: Callable[..., Any] = spec_of,
    summary: Summary = count_and_sum,
    **settings: Any,
) -> None:
    """A run at random: disordered and late records, records without a time, subtasks whose watermarks differ, snapshots at
    any step, other numbers of subtasks."""
    rng = Random(seed)
    windows = Windows(
        make_spec(assigner, lateness_ms=lateness_ms, late="late", **settings),
        parallelism=rng.choice((1, 2, 3)),
        make_backend=make_backend,
    )
    oracle = oracle_of(assigner, group, lateness_ms=lateness_ms, summary=summary)
    now, number = rng.randrange(-50, 50), 0
    reached = [now - 1000] * windows.parallelism
    for _ in range(rng.randrange(5, 40)):
        what = rng.random()
        if what < 0.6:
            records = []
            for _ in range(rng.choice((1, 3, 20))):
                number += 1
                ts = None if rng.random() < 0.03 else now - rng.choice((0, 2, 5, 12, 40))
                records.append((rng.randrange(8), ts, number))
            now += rng.choice((0, 1, 3, 30))
            expected, late = oracle.on_records(records)
            windows.feed(records)
            windows.finish_work()
            found, found_late = windows.taken()
            assert sorted(found) == sorted(expected)
            assert sorted(found_late) == sorted(late)
        elif what < 0.9 or not rescales:
            subtask = rng.randrange(windows.parallelism)
            at_ms = reached[subtask] = max(reached[subtask], now - rng.randrange(15))
            expected_rows = oracle.on_watermark(at_ms, windows.groups(subtask))
            windows.watermark(subtask, at_ms)
            rows: list[Result] = []
            while stops_in_the_middle and windows.operator(subtask).has_work():
                rows += windows.taken()[0]
                if rng.random() < 0.3:
                    windows = restored_at(windows, windows.parallelism, rows)
                    windows.watermark(subtask, at_ms)
                elif windows.operator(subtask).has_work():
                    windows.operator(subtask).work()
            windows.finish_work()
            rows += windows.taken()[0]
            assert sorted(rows) == sorted(expected_rows)
            assert [row[2] for row in rows] == sorted(row[2] for row in rows), "windows fire in the order of their ends"
        else:
            parallelism = rng.choice((1, 2, 3))
            windows = restored_at(windows, parallelism, [])
            reached = [now - 1000] * parallelism
    windows = restored_at(windows, 1, [])
    expected_rows = oracle.on_watermark(MAX_WATERMARK_MS, windows.groups(0))
    windows.watermark(0, MAX_WATERMARK_MS)
    windows.finish_work()
    assert sorted(windows.taken()[0]) == sorted(expected_rows)


def restored_at(windows: Windows, parallelism: int, rows: list[Result]) -> Windows:
    """What is emitted before the snapshot, and at the restore the rest of a window that was under way."""
    other = windows.restored(parallelism=parallelism)
    was_whole = not any(windows.operator(subtask).has_work() for subtask in range(windows.parallelism))
    rows += windows.taken()[0]
    emitted, late = other.taken()
    assert not late and not (was_whole and emitted)
    rows += emitted
    return other
