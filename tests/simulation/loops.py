"""Cyclic dataflows that are written down, beside the random ones: what loops are for, and a sequential oracle each."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

from tests.simulation.expected import expect_rows
from tidegate.connectors.rows import RowsSource
from tidegate.dataflow.functions import CoProcess, KeyedProcess, Process
from tidegate.dataflow.stream import Pipeline, Stream
from tidegate.state import descriptors as state
from tidegate.testing.simulation.faults import Trip
from tidegate.testing.simulation.site import Row, SimulatedJob, Site, StateOf
from tidegate.types import parse_schema

LONG = 40  # laps of one record that goes round when everything else has ended


def _rows_source(rows: list[Row], ddl: str, splits: int) -> RowsSource:
    return RowsSource.of(rows, parse_schema(ddl), split_count=splits)


# ------------------------------------------------------------------------------------------------------- retries


class _Try(KeyedProcess):
    """Succeeds at the last of the tries that a record needs, and counts all of them."""

    tries = state.value("long", default=0)

    def __init__(self, trip: Trip) -> None:
        self._trip = trip

    def process(self, record: Any, ctx: Any) -> Iterable[Row]:
        self._trip.at(record)
        self.tries.set(self.tries.get() + 1)
        if record.tried + 1 < record.needs:
            yield record.id, record.key, record.needs, record.tried + 1
        else:
            ctx.side("done", (record.id, record.key, record.tried + 1))


class Retries(SimulatedJob):
    """The simplest loop: what fails goes back to the same key, and is tried again."""

    name = "retries"
    span = 0.7

    def __init__(self, rng: Random) -> None:
        keys = rng.randint(1, 8)
        count = rng.randint(10, 30)
        self._rows: list[Row] = [
            (number, rng.randrange(keys), rng.choice((1, 1, 2, 3, 7)) if number < count - 1 else LONG, 0)
            for number in range(count)
        ]
        self._source = _rows_source(self._rows, "id long, key long, needs long, tried long", rng.randint(1, 3))

    def build(self, pipeline: Pipeline, site: Site) -> None:
        def body(stream: Stream) -> tuple[Stream, Stream]:
            tried = stream.key_by("key").process(
                "try",
                _Try(site.trip),
                returns="id long, key long, needs long, tried long",
                side_outputs={"done": "id long, key long, tries long"},
                parallelism=site.parallelism("try"),
            )
            return tried, tried.side_output("done")

        (
            pipeline.source("in", site.source(self._source), parallelism=site.parallelism("in"))
            .iterate("retry", body, parallelism=site.parallelism("retry"))
            .to("out", site.sink(), parallelism=site.parallelism("out"))
        )

    def check(self, rows: Callable[[str], list[Row]], state_of: StateOf, *, exact: bool) -> None:
        expect_rows("what was done", rows("out"), [(id, key, needs) for id, key, needs, _ in self._rows], exact=exact)
        tries: Counter[int] = Counter()
        for _, key, needs, _ in self._rows:
            tries[key] += needs
        expect_rows("tries", Counter(dict(state_of("try", "tries"))).elements(), tries.elements(), exact=exact)


# ---------------------------------------------------------------------------------------------------- components


class _Label(CoProcess):
    """A node of a graph: it knows its neighbours and the least node that it has heard of, and passes that on."""

    neighbours = state.map_("long", "boolean")
    label = state.value("long")

    def __init__(self, trip: Trip) -> None:
        self._trip = trip

    def process_left(self, record: Any, ctx: Any) -> Iterable[Row]:
        self._trip.at(record)
        yield from self._hear(record.label, ctx)

    def process_right(self, record: Any, ctx: Any) -> Iterable[Row]:
        yield from self._hear(record.node, ctx)
        self.neighbours.put(record.other, True)
        yield record.other, self.label.get()

    def _hear(self, label: int, ctx: Any) -> Iterable[Row]:
        known = self.label.get()
        if known is None or label < known:
            self.label.set(label)
            ctx.side("labels", (ctx.key, label))
            for neighbour in sorted(self.neighbours.keys()):
                yield neighbour, label


class Components(SimulatedJob):
    """Connected components of a graph that comes edge by edge, from outside into the loop: a two-input body.

    Labels only fall, so that it comes to the same in every order, and also where something is done twice.
    """

    name = "components"
    span = 0.7

    def __init__(self, rng: Random) -> None:
        nodes = rng.randint(2, 7)
        edges = [(rng.randrange(nodes), rng.randrange(nodes)) for _ in range(rng.randint(3, 9))]
        self._edges: list[Row] = [way for one, other in edges for way in ((one, other), (other, one))]
        self._hints: list[Row] = [(node, node) for node in sorted({one for one, _ in self._edges})[:3]]
        self._sources = (
            _rows_source(self._hints, "node long, label long", 1),
            _rows_source(self._edges, "node long, other long", rng.randint(1, 3)),
        )

    def build(self, pipeline: Pipeline, site: Site) -> None:
        hints = pipeline.source("hints", site.source(self._sources[0]), parallelism=site.parallelism("hints"))
        edges = pipeline.source("edges", site.source(self._sources[1]), parallelism=site.parallelism("edges"))

        def body(labels: Stream) -> tuple[Stream, Stream]:
            heard = (
                labels.key_by("node")
                .connect(edges.key_by("node"))
                .process(
                    "label",
                    _Label(site.trip),
                    returns="node long, label long",
                    side_outputs={"labels": "node long, label long"},
                    parallelism=site.parallelism("label"),
                )
            )
            return heard, heard.side_output("labels")

        (
            hints.iterate("spread", body, parallelism=site.parallelism("spread"))
            .key_by("node")
            .to("out", site.sink(), parallelism=site.parallelism("out"))
        )

    def check(self, rows: Callable[[str], list[Row]], state_of: StateOf, *, exact: bool) -> None:
        least = {node: node for row in self._edges for node in row}
        for _ in least:
            for one, other in self._edges:
                least[one] = min(least[one], least[other])
        expect_rows("components", state_of("label", "label"), least.items())
        told: defaultdict[int, list[int]] = defaultdict(list)
        for node, label in rows("out"):
            told[node].append(label)
        for node, label in least.items():
            assert label in told[node], f"nobody was told that {node} belongs to {label}, but {told[node]}"
            assert not exact or told[node] == sorted(set(told[node]), reverse=True), f"{node} went from {told[node]}"


# ---------------------------------------------------------------------------------------------------------- laps

WINDOW_MS = 20


class _Lap(KeyedProcess):
    laps = state.value("long", default=0)

    def __init__(self, trip: Trip, *, turns: str) -> None:
        self._trip = trip
        self._turns = turns

    def process(self, record: Any, ctx: Any) -> Iterable[Row]:
        self._trip.at(record)
        self.laps.set(self.laps.get() + 1)
        key, ts, n, outer, inner = record
        if self._turns == "inner":
            if inner > 0:
                yield (key + 1) % 5, ts, n, outer, inner - 1
            else:
                ctx.side("out", (key, ts, n, outer, 0))
        elif outer > 0:
            yield (key + 2) % 5, ts, n, outer - 1, n % 3
        else:
            ctx.side("out", (key, ts, n, 0, 0))


class _Sums(KeyedProcess):
    """Sums by windows of event time. What comes late opens its window once more."""

    sums = state.map_("long", "long")

    def process(self, record: Any, ctx: Any) -> Iterable[Row]:
        end = record.ts - record.ts % WINDOW_MS + WINDOW_MS
        self.sums.put(end, self.sums.get(end, 0) + record.n)
        ctx.timers.event_time(end)
        return ()

    def on_timer(self, at: int, ctx: Any) -> Iterable[Row]:
        total = self.sums.get(at)
        self.sums.remove(at)
        yield ctx.key, at, total


class _Spread(Process):
    def __init__(self, trip: Trip) -> None:
        self._trip = trip

    def process(self, record: Any, ctx: Any) -> Iterable[Row]:
        self._trip.at(record)
        yield record


class NestedLoops(SimulatedJob):
    """A loop within a loop, and windows behind them: the end of event time is behind the last lap of all."""

    name = "nested loops"
    can_drain = False
    span = 0.7
    _ddl = "key long, ts long, n long, outer long, inner long"

    def __init__(self, rng: Random) -> None:
        count = rng.randint(4, 14)
        self._rows: list[Row] = [
            (rng.randrange(5), 5 + number * 3, number, rng.randrange(3), number % 3 if number < count - 1 else LONG)
            for number in range(count)
        ]
        self._source = _rows_source(self._rows, self._ddl, rng.randint(1, 2))
        self._rebalanced = rng.random() < 0.5

    def build(self, pipeline: Pipeline, site: Site) -> None:
        def turn(stream: Stream, turns: str) -> tuple[Stream, Stream]:
            turned = stream.key_by("key").process(
                f"{turns} lap",
                _Lap(site.trip, turns=turns),
                returns=self._ddl,
                side_outputs={"out": self._ddl},
                parallelism=site.parallelism(f"{turns} lap"),
            )
            return turned, turned.side_output("out")

        def outer(stream: Stream) -> tuple[Stream, Stream]:
            spread = (stream.rebalance() if self._rebalanced else stream).process(
                "spread", _Spread(site.trip), returns=self._ddl
            )
            return turn(
                spread.iterate("inner", lambda inside: turn(inside, "inner"), parallelism=site.parallelism("inner")), "outer"
            )

        (
            pipeline.source("in", site.source(self._source), parallelism=site.parallelism("in"))
            .with_watermark("ts", 4)
            .iterate("outer", outer, parallelism=site.parallelism("outer"))
            .key_by("key")
            .process("sums", _Sums(), returns="key long, at long, n long", parallelism=site.parallelism("sums"))
            .to("out", site.sink(), parallelism=site.parallelism("out"))
        )

    def check(self, rows: Callable[[str], list[Row]], state_of: StateOf, *, exact: bool) -> None:
        windows: Counter[tuple[int, int]] = Counter()
        laps: Counter[int] = Counter()
        for key, ts, n, outer, inner in self._rows:
            at = key
            for lap in range(outer, -1, -1):
                for _ in range(inner if lap == outer else n % 3):
                    laps[at] += 1
                    at = (at + 1) % 5
                laps[at] += 1
                at = (at + 2) % 5 if lap else at
            windows[at, ts - ts % WINDOW_MS + WINDOW_MS] += n
        found: Counter[tuple[int, int]] = Counter()
        for key, end, n in rows("out"):
            found[key, end] += n
        expect_rows("window sums", found.elements(), windows.elements(), exact=exact)
        expect_rows("inner laps", Counter(dict(state_of("inner lap", "laps"))).elements(), laps.elements(), exact=exact)
        assert not state_of("sums", "sums") and not state_of("sums", "__event_timers"), "all windows are closed"


# ---------------------------------------------------------------------------------------------------------- bills


class _Bill(KeyedProcess):
    """Sums by windows of event time, inside the loop: when a window closes its sum goes round before it leaves."""

    sums = state.map_("long", "long")

    def __init__(self, trip: Trip) -> None:
        self._trip = trip

    def process(self, record: Any, ctx: Any) -> Iterable[Row]:
        self._trip.at(record)
        if record.laps is None:
            end = record.ts - record.ts % WINDOW_MS + WINDOW_MS
            self.sums.put(end, self.sums.get(end, 0) + record.n)
            ctx.timers.event_time(end)
        elif record.laps > 0:
            yield record.key, record.ts, record.n, record.laps - 1
        else:
            ctx.side("paid", (record.key, record.ts, record.n))

    def on_timer(self, at: int, ctx: Any) -> Iterable[Row]:
        total = self.sums.get(at)
        self.sums.remove(at)
        yield ctx.key, at, total, 2


class Bills(SimulatedJob):
    """Timers inside a loop: at the end of event time they make records of a loop that seemed to be empty."""

    name = "bills"
    can_drain = False
    span = 0.7
    _ddl = "key long, ts long, n long, laps long"

    def __init__(self, rng: Random) -> None:
        self._rows: list[Row] = [(rng.randrange(4), 5 + number * 3, number, None) for number in range(rng.randint(5, 25))]
        self._source = _rows_source(self._rows, self._ddl, rng.randint(1, 3))

    def build(self, pipeline: Pipeline, site: Site) -> None:
        def body(stream: Stream) -> tuple[Stream, Stream]:
            billed = stream.key_by("key").process(
                "bill",
                _Bill(site.trip),
                returns=self._ddl,
                side_outputs={"paid": "key long, at long, n long"},
                parallelism=site.parallelism("bill"),
            )
            return billed, billed.side_output("paid")

        (
            pipeline.source("in", site.source(self._source), parallelism=site.parallelism("in"))
            .with_watermark("ts", 4)
            .iterate("dun", body, parallelism=site.parallelism("dun"))
            .to("out", site.sink(), parallelism=site.parallelism("out"))
        )

    def check(self, rows: Callable[[str], list[Row]], state_of: StateOf, *, exact: bool) -> None:
        windows: Counter[tuple[int, int]] = Counter()
        for key, ts, n, _ in self._rows:
            windows[key, ts - ts % WINDOW_MS + WINDOW_MS] += n
        found: Counter[tuple[int, int]] = Counter()
        for key, at, n in rows("out"):
            found[key, at] += n
        expect_rows("bills", found.elements(), windows.elements(), exact=exact)
        assert not state_of("bill", "sums") and not state_of("bill", "__event_timers"), "all windows are closed"
