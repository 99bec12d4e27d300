"""The dataflows that are simulated, each with a plain sequential computation of what must come out.

A job is drawn from the seed: its rows, keys and shape. It is built anew for every slot (a real one gets its own copy by
pickling), with the parallelism of its operators drawn for each deployment layout. Where the order of records isn't
determined, the job says what is: rows as a multiset, the order within each key, what state and output hold together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import Any

import pyarrow as pa

from tests.simulation.aggregates import Aggregates
from tests.simulation.column_windows import ColumnWindows
from tests.simulation.combined import Combined
from tests.simulation.crowds import Crowds
from tests.simulation.expected import expect_order, expect_rows
from tests.simulation.joins import Joins
from tests.simulation.loops import Bills, Components, NestedLoops, Retries
from tests.simulation.random_graphs import RandomGraph, RandomLoops
from tests.simulation.ranks import Ranks
from tests.simulation.rows import keys_of_splits, rows_source
from tests.simulation.time_groups import TimeGroup
from tests.simulation.timed_joins import TimedJoins
from tests.simulation.window_joins import WindowJoins
from tests.simulation.windows import Windows
from tidegate.connectors.collecting import CollectSink, delivered_rows
from tidegate.dataflow.functions import BroadcastProcess, CoProcess, KeyedProcess, Process
from tidegate.dataflow.pipeline import Pipeline
from tidegate.state import declaring as state
from tidegate.testing.simulation.faults import Trip
from tidegate.testing.simulation.site import Row, SimulatedJob, Site, StateOf

# ------------------------------------------------------------------------------------------------- running sums


class _Sum(KeyedProcess):
    total = state.value("long", default=0)

    def __init__(self, trip: Trip) -> None:
        self._trip = trip

    def process(self, record: Any, ctx: Any) -> Iterable[Row]:
        self._trip.at(record)
        self.total.set(self.total.get() + record.n)
        yield *record, self.total.get()


class RunningSums(SimulatedJob):
    """Source → filter → key_by (one column or two) → running sum → sink, by key."""

    name = "running sums"

    def __init__(self, rng: Random) -> None:
        count, splits = rng.randint(30, 100), rng.randint(1, 4)
        keys = keys_of_splits(rng, count, splits=splits, keys=rng.choice((rng.randint(1, 12), 40)))
        self._two = rng.random() < 0.5
        self._rows: list[Row] = [(key, f"k{key}", number) if self._two else (key, number) for number, key in enumerate(keys)]
        self._ddl = "key long, also string, n long" if self._two else "key long, n long"
        self._key = ("key", "also") if self._two else ("key",)
        self._source = rows_source(self._rows, self._ddl, splits)
        self._by_key_to_sink = rng.random() < 0.5

    def build(self, pipeline: Pipeline, site: Site) -> None:
        sums = (
            pipeline.source("in", site.source(self._source), parallelism=site.parallelism("in"))
            .filter(lambda row: row.n % 7 != 3)
            .key_by(*self._key)
            .process("sum", _Sum(site.trip), returns=self._ddl + ", total long", parallelism=site.parallelism("sum"))
        )
        if self._by_key_to_sink:
            sums.key_by("key").to("out", site.sink(), parallelism=site.parallelism("out"))
        else:
            sums.to("out", site.sink(), parallelism=site.parallelism("sum"))

    def check(self, rows: Callable[[str], list[Row]], state_of: StateOf, *, exact: bool) -> None:
        totals: Counter[Row] = Counter()
        expected = []
        for row in self._rows:
            if row[-1] % 7 != 3:
                totals[row[:-1]] += row[-1]
                expected.append((*row, totals[row[:-1]]))
        if not exact:
            expect_rows("numbers", [row[:-1] for row in rows("out")], [row[:-1] for row in expected], exact=False)
            return
        expect_rows("running sums", rows("out"), expected)
        expect_order("running sums", rows("out"), expected, lambda row: row[0])
        expect_rows(
            "the state of the sums",
            state_of("sum", "total"),
            [(key if self._two else key[0], total) for key, total in totals.items()],
        )


# -------------------------------------------------------------------------------------------------------- pairs


class _Pair(CoProcess):
    lefts = state.map_("long", "long")
    rights = state.map_("long", "long")

    def __init__(self, trip: Trip) -> None:
        self._trip = trip

    def process_left(self, record: Any, ctx: Any) -> Iterable[Row]:
        self._trip.at(record)
        right = self.rights.get(record.id)
        if right is None:
            self.lefts.put(record.id, record.l)
        else:
            self.rights.remove(record.id)
            yield ctx.key, record.id, record.l, right

    def process_right(self, record: Any, ctx: Any) -> Iterable[Row]:
        left = self.lefts.get(record.id)
        if left is None:
            self.rights.put(record.id, record.r)
        else:
            self.lefts.remove(record.id)
            yield ctx.key, record.id, left, record.r


class Pairs(SimulatedJob):
    """Two keyed streams connected: each pair comes out once, whichever half came first."""

    name = "pairs"

    def __init__(self, rng: Random) -> None:
        count, keys = rng.randint(20, 60), rng.randint(1, 8)
        both = [(f"key {number % keys}", number) for number in range(count)]
        self._left = [(key, number, 2 * number) for key, number in both if rng.random() < 0.9]
        self._right = [(number, key, 3 * number) for key, number in both if rng.random() < 0.9]
        rng.shuffle(self._right)
        self._sources = (
            rows_source(self._left, "key string, id long, l long", rng.randint(1, 3)),
            rows_source(self._right, "id long, name string, r long", rng.randint(1, 3)),
        )

    def build(self, pipeline: Pipeline, site: Site) -> None:
        left = pipeline.source("left", site.source(self._sources[0]), parallelism=site.parallelism("left"))
        right = pipeline.source("right", site.source(self._sources[1]), parallelism=site.parallelism("right"))
        (
            left.key_by("key")
            .connect(right.key_by("name"))
            .process(
                "pair", _Pair(site.trip), returns="key string, id long, l long, r long", parallelism=site.parallelism("pair")
            )
            .to("out", site.sink(), parallelism=site.parallelism("out"))
        )

    def check(self, rows: Callable[[str], list[Row]], state_of: StateOf, *, exact: bool) -> None:
        rights = {number: r for number, _, r in self._right}
        lefts = {number for _, number, _ in self._left}
        expect_rows(
            "pairs",
            rows("out"),
            [(key, number, left, rights[number]) for key, number, left in self._left if number in rights],
            exact=exact,
        )
        expect_rows(
            "halves of the left",
            [item for _, held in state_of("pair", "lefts") for item in held],
            lefts - rights.keys(),
            exact=exact,
        )
        expect_rows(
            "halves of the right",
            [item for _, held in state_of("pair", "rights") for item in held],
            rights.keys() - lefts,
            exact=exact,
        )


# -------------------------------------------------------------------------------------------------------- rules


class _Rules(BroadcastProcess):
    rules = state.broadcast_map("long", "long")
    count = state.value("long", default=0)

    def __init__(self, trip: Trip) -> None:
        self._trip = trip

    def process(self, record: Any, ctx: Any) -> Iterable[Row]:
        self._trip.at(record)
        self.count.set(self.count.get() + 1)
        yield record.key, record.n, self.count.get(), len(self.rules), sum(value for _, value in self.rules.items())

    def process_broadcast(self, record: Any, ctx: Any) -> None:
        self.rules.put(record.rule, record.value)


class Rules(SimulatedJob):
    """Rules are broadcast in their order: every record sees the first so many of them, never others, never fewer than
    an earlier record of its key."""

    name = "rules"

    def __init__(self, rng: Random) -> None:
        count, splits = rng.randint(30, 90), rng.randint(1, 3)
        keys = keys_of_splits(rng, count, splits=splits, keys=rng.choice((rng.randint(1, 9), 30)))
        self._rows = [(key, number) for number, key in enumerate(keys)]
        self._rules = [(number, 10 ** (number % 12) + number) for number in range(rng.randint(3, 20))]
        self._sources = (
            rows_source(self._rows, "key long, n long", splits),
            rows_source(self._rules, "rule long, value long"),
        )

    def build(self, pipeline: Pipeline, site: Site) -> None:
        events = pipeline.source("events", site.source(self._sources[0]), parallelism=site.parallelism("events"))
        rules = pipeline.source("rules", site.source(self._sources[1]), parallelism=site.parallelism("rules"))
        applied = (
            events.key_by("key")
            .connect(rules.broadcast())
            .process(
                "apply",
                _Rules(site.trip),
                returns="key long, n long, count long, rules long, value long",
                parallelism=site.parallelism("apply"),
            )
        )
        applied.to("out", site.sink(), parallelism=site.parallelism("apply"))

    def check(self, rows: Callable[[str], list[Row]], state_of: StateOf, *, exact: bool) -> None:
        out = rows("out")
        counts: Counter[int] = Counter()
        expected = []
        for key, number in self._rows:
            counts[key] += 1
            expected.append((key, number, counts[key]))
        expect_rows("events", [row[:2] for row in out], [row[:2] for row in expected], exact=exact)
        if exact:
            expect_rows("counted events", [row[:3] for row in out], expected)
            expect_order("events", [row[:3] for row in out], expected, lambda row: row[0])
        latest: dict[int, int] = {}
        for key, _, _, rules, value in out:
            first = sum(worth for _, worth in self._rules[:rules])
            assert value == first, f"key {key} saw rules worth {value}, not the first {rules} of them, {first}"
            assert rules >= latest.get(key, 0) or not exact, f"key {key} saw {latest[key]} rules and then {rules}"
            latest[key] = rules
        expect_rows(
            "the rules in the state", [(rule["key"], rule["value"]) for rule in state_of("apply", "rules")], self._rules
        )


# -------------------------------------------------------------------------------------------------------- hands


class _Deal(Process):
    """Keeps ids until it has three. Counts per lane in union state, which each subtask sorts out when it is opened; some
    ids are also kept in union state for ever, by everybody."""

    waiting = state.operator_list("long", redistribute="split")
    lanes = state.operator_list("struct<lane:long,n:long>", redistribute="union")
    marks = state.operator_list("long", redistribute="union")

    def __init__(self, trip: Trip, *, exact: bool) -> None:
        self._trip = trip
        self._exact = exact

    def open(self, ctx: Any) -> None:
        mine: Counter[int] = Counter()
        for entry in self.lanes.get():
            if entry["lane"] % ctx.parallelism == ctx.subtask:
                mine[entry["lane"]] += entry["n"]
        self.lanes.replace({"lane": lane, "n": n} for lane, n in sorted(mine.items()))
        assert not self._exact or len(set(self.marks)) == len(self.marks), "union state has grown by itself"

    def process(self, record: Any, ctx: Any) -> Iterable[Row]:
        self._trip.at(record)
        counts = Counter({entry["lane"]: entry["n"] for entry in self.lanes.get()})
        counts[record.lane] += 1
        self.lanes.replace({"lane": lane, "n": n} for lane, n in sorted(counts.items()))
        if record.id % 8 == 0:
            self.marks.add(record.id)
        self.waiting.add(record.id)
        if len(self.waiting) >= 3:
            yield from ((each,) for each in self.waiting)
            self.waiting.clear()


class Hands(SimulatedJob):
    """Operator state: what has come out and what is still held make up the whole, each once."""

    name = "hands"

    def __init__(self, rng: Random) -> None:
        lanes = rng.randint(1, 5)
        self._rows = [(number, number % lanes) for number in range(rng.randint(30, 100))]
        self._source = rows_source(self._rows, "id long, lane long", rng.randint(1, 4))

    def build(self, pipeline: Pipeline, site: Site) -> None:
        (
            pipeline.source("in", site.source(self._source), parallelism=site.parallelism("in"))
            .rebalance()
            .process("deal", _Deal(site.trip, exact=site.exact), returns="id long", parallelism=site.parallelism("deal"))
            .to("out", site.sink(), parallelism=site.parallelism("out"))
        )

    def check(self, rows: Callable[[str], list[Row]], state_of: StateOf, *, exact: bool) -> None:
        held = state_of("deal", "waiting")
        expect_rows("ids", [row[0] for row in rows("out")] + held, [number for number, _ in self._rows], exact=exact)
        counts: Counter[int] = Counter()
        for entry in state_of("deal", "lanes"):
            counts[entry["item"]["lane"]] += entry["item"]["n"]
        expect_rows("lanes", counts.elements(), [lane for _, lane in self._rows], exact=exact)
        # Every subtask has written all that it was given at the last restore: copies, told by their ids.
        expect_rows(
            "marks",
            {entry["id"]: entry["item"] for entry in state_of("deal", "marks")}.values(),
            [number for number, _ in self._rows if number % 8 == 0],
            exact=exact,
        )


# -------------------------------------------------------------------------------------------------------- sides


class _Sort(Process):
    def __init__(self, trip: Trip) -> None:
        self._trip = trip

    def process(self, record: Any, ctx: Any) -> Iterable[Row]:
        self._trip.at(record)
        if record.n % 3 == 0:
            ctx.side("thirds", (record.n, "third"))
        else:
            yield (record.n,)


def _doubled(row: Any) -> list[Row]:
    return [(row.n,), (row.n + 1000,)]


def _upper(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.record_batch(
        [batch.column(0), pa.array([text.upper() for text in batch.column(1).to_pylist()])], schema=batch.schema
    )


class Sides(SimulatedJob):
    """Union, flat_map, side outputs, map_batches, rebalance, and three sinks, one of them on the driver."""

    name = "sides"

    def __init__(self, rng: Random) -> None:
        count = rng.randint(15, 50)
        self._rows = [(number,) for number in range(2 * count)]
        self._sources = (
            rows_source(self._rows[:count], "n long", rng.randint(1, 3)),
            rows_source(self._rows[count:], "n long", rng.randint(1, 3)),
        )

    def build(self, pipeline: Pipeline, site: Site) -> None:
        one = pipeline.source("one", site.source(self._sources[0]), parallelism=site.parallelism("one"))
        two = pipeline.source("two", site.source(self._sources[1]), parallelism=site.parallelism("two"))
        sorted_out = one.union(two.flat_map(_doubled, returns="n long")).process(
            "sort",
            _Sort(site.trip),
            returns="n long",
            parallelism=site.parallelism("sort"),
            side_outputs={"thirds": "n long, word string"},
        )
        sorted_out.map(lambda row: (row.n, -row.n), returns="n long, minus long").to(
            "rest", site.sink(), parallelism=site.parallelism("rest")
        )
        sorted_out.side_output("thirds").rebalance().map_batches(
            _upper, returns="n long, word string", parallelism=site.parallelism("upper")
        ).to("thirds", site.sink())
        sorted_out.to("seen", CollectSink())

    def check(self, rows: Callable[[str], list[Row]], state_of: StateOf, *, exact: bool) -> None:
        numbers = self._numbers()
        expect_rows("rest", rows("rest"), [(n, -n) for n in numbers if n % 3], exact=exact)
        expect_rows("thirds", rows("thirds"), [(n, "THIRD") for n in numbers if n % 3 == 0], exact=exact)

    def check_delivered(self, delivered: Mapping[str, list[str]], *, exact: bool) -> None:
        expected = [n for n in self._numbers() if n % 3]
        expect_rows(
            "seen by the driver", [row[0] for row in delivered_rows(delivered.get("seen", []))], expected, exact=exact
        )

    def _numbers(self) -> list[int]:
        half = len(self._rows) // 2
        return [n for (n,) in self._rows] + [n + 1000 for (n,) in self._rows[half:]]


ACYCLIC = (RunningSums, Windows, Pairs, Rules, Hands, Sides, RandomGraph)
CYCLIC = (Retries, Components, NestedLoops, Bills, RandomLoops)
COLUMNAR = (Aggregates, Combined, ColumnWindows, Joins, TimedJoins, WindowJoins)
DRAWN: dict[str, type[Any]] = {job.name: job for job in (*ACYCLIC, *CYCLIC)}
# A seed draws none but those, as it always has: the mutants are caught with these seeds.
JOBS: dict[str, type[Any]] = DRAWN | {job.name: job for job in (TimeGroup, Crowds, Ranks, *COLUMNAR)}
