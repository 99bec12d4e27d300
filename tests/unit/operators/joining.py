"""Joins by event time by themselves: several subtasks side by side, stepped, frozen, restored and rescaled in memory."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from tests.unit.operators.harness import GROUPS, Bench, Restored, on_heap
from tests.unit.operators.windowing import own_part, subtask_of
from tidegate.dataflow.graph import Spec
from tidegate.dataflow.operators.joining import TimedJoinOperator
from tidegate.keygroups import key_groups_of
from tidegate.protocol.watermarks import MAX_WATERMARK_MS
from tidegate.types import ddl_of

LEFT_RECORDS, RIGHT_RECORDS = "key long, ts long, n long", "key long, at long, m long"
LATE = ("late left", "late right")

Record = tuple[Any, Any, int]  # key, time, number


class Joins:
    """All subtasks of a join keyed by a long. A record goes to the subtask of its key."""

    def __init__(
        self, spec: Any, *, parallelism: int = 1, whole: Restored | None = None, make_backend: Any = on_heap
    ) -> None:
        self.spec: Spec = spec
        self.parallelism = parallelism
        self._make_backend = make_backend
        self.benches = [
            Bench(
                spec,
                LEFT_RECORDS,
                RIGHT_RECORDS,
                returns=", ".join(f"{each.field.name} {ddl_of(each.field.type)}" for each in spec.output),
                sides=dict(zip(LATE, (LEFT_RECORDS, RIGHT_RECORDS), strict=True)),
                restored=None if whole is None else own_part(whole, subtask, parallelism),
                subtask=subtask,
                parallelism=parallelism,
                make_backend=make_backend,
            )
            for subtask in range(parallelism)
        ]
        for bench in self.benches:
            bench.operator.resume()

    def feed(self, records: Sequence[Record], port: int) -> None:
        for subtask, bench in enumerate(self.benches):
            own = [each for each in records if subtask_of(each[0], self.parallelism) == subtask]
            if own:
                bench.feed(*own, port=port)
            bench.operator.maintain(1000)

    def groups(self, subtask: int) -> range:
        return key_groups_of(subtask, parallelism=self.parallelism, key_group_count=GROUPS)

    def work(self, subtask: int) -> bool:
        """Do a step, if there is anything to do."""
        operator = self.benches[subtask].operator
        if operator.has_work():
            operator.work()
        return operator.has_work()

    def finish_work(self) -> None:
        for subtask in range(self.parallelism):
            while self.work(subtask):
                pass

    def taken(self) -> tuple[list[Any], list[list[Record]]]:
        """The results, and the late records by port, since the last call."""
        rows = [row for bench in self.benches for row in bench.out.rows]
        late = [[row for bench in self.benches for row in bench.sides[tag].rows] for tag in LATE]
        for bench in self.benches:
            bench.out.events.clear()
            for side in bench.sides.values():
                side.events.clear()
        return rows, late

    def restored(self, parallelism: int) -> Joins:
        """The same after a snapshot now, at another parallelism."""
        whole: Restored = {}
        for bench in self.benches:
            operator = bench.operator
            assert isinstance(operator, TimedJoinOperator)
            while operator.holds_records():
                operator.work()
            for state, batches in bench.freeze().items():
                whole.setdefault(state, []).extend(batches)
            operator.close()
        return Joins(self.spec, parallelism=parallelism, whole=whole, make_backend=self._make_backend)


class Oracle:
    """What a join by event time emits, by brute force. Subclasses know which records match.

    `reached` is the watermark of each key-group. Records that are late are dropped.
    """

    def __init__(self, group_of: Any) -> None:
        self.reached = [-(10**9)] * GROUPS
        self.records: tuple[list[Record], list[Record]] = ([], [])
        self._group_of = group_of

    def on_records(self, records: Sequence[Record], port: int) -> list[Record]:
        """Take records, and return those that are late."""
        late = [each for each in records if each[1] is not None and each[1] <= self.reached[self._group_of(each[0])]]
        self.records[port].extend(each for each in records if each not in late)
        return late

    def on_watermark(self, at_ms: int, groups: range) -> None:
        for group in groups:
            self.reached[group] = max(self.reached[group], at_ms)

    def results(self) -> list[Any]:
        """Return all that must have been emitted by now."""
        raise NotImplementedError


def check_random_run(joins: Joins, oracle: Oracle, rng: Random) -> None:
    """A run at random: disordered and late records, records without a time or key, subtasks whose watermarks differ, pauses
    and snapshots at any step, other numbers of subtasks."""
    now, number, found = rng.randrange(-50, 50), 0, []
    reached = [now - 1000] * joins.parallelism
    for _ in range(rng.randrange(5, 40)):
        what = rng.random()
        if what < 0.6:
            records: list[Record] = []
            for _ in range(rng.choice((1, 3, 20))):
                number += 1
                ts = None if rng.random() < 0.03 else now - rng.choice((0, 2, 5, 12, 40))
                records.append((None if rng.random() < 0.05 else rng.randrange(5), ts, number))
            now += rng.choice((0, 1, 3, 10))
            port = rng.randrange(2)
            late = oracle.on_records(records, port)
            joins.feed(records, port)
            joins.finish_work()
            rows, found_late = joins.taken()
            found += rows
            assert sorted(found_late[port], key=str) == sorted(late, key=str)
        elif what < 0.9:
            subtask = rng.randrange(joins.parallelism)
            at_ms = reached[subtask] = max(reached[subtask], now - rng.randrange(15))
            joins.benches[subtask].operator.on_watermark(at_ms)
            oracle.on_watermark(at_ms, joins.groups(subtask))
            while joins.work(subtask):
                found += joins.taken()[0]
                if rng.random() < 0.3:
                    joins = joins.restored(joins.parallelism)
            found += joins.taken()[0]
        else:
            joins = joins.restored(rng.choice((1, 2, 3)))
            found += joins.taken()[0]
            reached = [max(oracle.reached[group] for group in joins.groups(each)) for each in range(joins.parallelism)]
        joins.finish_work()
        found += joins.taken()[0]
        if len({oracle.reached[group] for each in range(joins.parallelism) for group in joins.groups(each)}) == 1:
            assert sorted(found, key=str) == sorted(oracle.results(), key=str)
    for subtask in range(joins.parallelism):
        joins.benches[subtask].operator.on_watermark(MAX_WATERMARK_MS)
        oracle.on_watermark(MAX_WATERMARK_MS, joins.groups(subtask))
    joins.finish_work()
    found += joins.taken()[0]
    assert sorted(found, key=str) == sorted(oracle.results(), key=str)
