"""The steps that random graphs are made of: each can be built into a pipeline, and be taken for one record at a time.

All streams have one schema, so that any stream can go anywhere. `build` adds the step to a pipeline; `take` is what it
does to one record, with its state in plain dictionaries, for the sequential interpreter (random_graphs.py). Whatever the
order in which records arrive, the multiset of what comes out of a step and its state in the end are the same. The
exception is `Running`, which is put only where the order of a key's records is determined.

The number of laps that a record makes in a loop is carried in the record: in `outer`, or in `inner` for a loop within
another one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.simulation.expected import expect_rows
from tidegate.dataflow.functions import BroadcastProcess, CoProcess, KeyedProcess, Process
from tidegate.dataflow.stream import Pipeline, Stream
from tidegate.state import descriptors as state
from tidegate.testing.simulation.faults import Trip
from tidegate.testing.simulation.site import Row, Site, StateOf

DDL = "id long, key long, n long, outer long, inner long"
COPY = 1_000  # added to the id of what a step makes out of a record


class Record(NamedTuple):
    id: int
    key: int
    n: int
    outer: int = 0
    inner: int = 0


class Memory:
    """The state of the steps, by step: sums, counts, and what was kept by id."""

    def __init__(self) -> None:
        self.sums: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self.kept: defaultdict[str, defaultdict[tuple[int, int], list[int]]] = defaultdict(lambda: defaultdict(list))


@dataclass(frozen=True, slots=True)
class Built:
    """A pipeline that is being built: its streams, by their numbers in the graph."""

    pipeline: Pipeline
    site: Site
    streams: dict[int, Stream] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step(ABC):
    """From streams to streams, by their numbers. `spread`: its parallelism is drawn; otherwise it is that of its input."""

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    spread: bool = True

    @abstractmethod
    def build(self, built: Built) -> None: ...

    @abstractmethod
    def take(self, port: int, record: Record, memory: Memory) -> Iterator[tuple[int, Record]]:
        """What comes out, and on which stream."""

    def check(self, state_of: StateOf, memory: Memory, *, exact: bool) -> None:  # noqa: B027  (some have no state)
        """Compares its state in the end."""

    def _parallelism(self, built: Built) -> int | None:
        return built.site.parallelism(self.name) if self.spread else None


# -------------------------------------------------------------------------------------------------- without state


@dataclass(frozen=True, slots=True)
class Move(Step):
    """A map: other numbers, and another key where `by` isn't 0. With `laps` it says how many a record is to make."""

    by: int = 0
    laps: int | None = None
    inner: bool = False

    def build(self, built: Built) -> None:
        built.streams[self.outputs[0]] = built.streams[self.inputs[0]].map(
            lambda row: self._moved(Record(*row)), returns=DDL, name=self.name, parallelism=self._parallelism(built)
        )

    def take(self, port: int, record: Record, memory: Memory) -> Iterator[tuple[int, Record]]:
        yield self.outputs[0], self._moved(record)

    def _moved(self, record: Record) -> Record:
        if self.laps is not None:
            laps = (record.id + record.outer + self.by) % (self.laps + 1)
            return record._replace(inner=laps) if self.inner else record._replace(outer=laps)
        return record._replace(key=(record.key + self.by) % 7 if self.by else record.key, n=(record.n * 3 + 1) % 101)


@dataclass(frozen=True, slots=True)
class Keep(Step):
    """A filter."""

    rest: int = 0

    def build(self, built: Built) -> None:
        built.streams[self.outputs[0]] = built.streams[self.inputs[0]].filter(
            lambda row: bool(row.id % 5 != self.rest), name=self.name, parallelism=self._parallelism(built)
        )

    def take(self, port: int, record: Record, memory: Memory) -> Iterator[tuple[int, Record]]:
        if record.id % 5 != self.rest:
            yield self.outputs[0], record


@dataclass(frozen=True, slots=True)
class Copy(Step):
    """A flat_map: some records once, some twice, some not at all."""

    def build(self, built: Built) -> None:
        built.streams[self.outputs[0]] = built.streams[self.inputs[0]].flat_map(
            lambda row: self._copies(Record(*row)), returns=DDL, name=self.name, parallelism=self._parallelism(built)
        )

    def take(self, port: int, record: Record, memory: Memory) -> Iterator[tuple[int, Record]]:
        for copy in self._copies(record):
            yield self.outputs[0], copy

    def _copies(self, record: Record) -> list[Record]:
        match record.id % 4:
            case 0:
                return [record, record._replace(id=record.id + COPY)]
            case 3:
                return []
        return [record]


@dataclass(frozen=True, slots=True)
class Deal(Step):
    """Deals the records out anew: they lose their order."""

    def build(self, built: Built) -> None:
        built.streams[self.outputs[0]] = (
            built.streams[self.inputs[0]]
            .rebalance()
            .map(tuple, returns=DDL, name=self.name, parallelism=self._parallelism(built))
        )

    def take(self, port: int, record: Record, memory: Memory) -> Iterator[tuple[int, Record]]:
        yield self.outputs[0], record


@dataclass(frozen=True, slots=True)
class Unite(Step):
    """A union, which is no node."""

    def build(self, built: Built) -> None:
        first, *others = (built.streams[number] for number in self.inputs)
        built.streams[self.outputs[0]] = first.union(*others)

    def take(self, port: int, record: Record, memory: Memory) -> Iterator[tuple[int, Record]]:
        yield self.outputs[0], record


class _Part(Process):
    def __init__(self, trip: Trip, part: Part) -> None:
        self._trip = trip
        self._part = part

    def process(self, record: Any, ctx: Any) -> Iterable[Row]:
        self._trip.at(record)
        main, row = self._part.parted(Record(*record))
        if main:
            yield row
        else:
            ctx.side("rest", row)


@dataclass(frozen=True, slots=True)
class Part(Step):
    """A main and a side output. With `turns` it is the end of a loop: the main output goes back, the side one leaves."""

    turns: str | None = None

    def build(self, built: Built) -> None:
        main = built.streams[self.inputs[0]].process(
            self.name,
            _Part(built.site.trip, self),
            returns=DDL,
            side_outputs={"rest": DDL},
            parallelism=self._parallelism(built),
        )
        built.streams[self.outputs[0]] = main
        built.streams[self.outputs[1]] = main.side_output("rest")

    def take(self, port: int, record: Record, memory: Memory) -> Iterator[tuple[int, Record]]:
        main, row = self.parted(record)
        yield self.outputs[0 if main else 1], row

    def parted(self, record: Record) -> tuple[bool, Record]:
        if self.turns is None:
            return record.id % 3 != 0, record
        laps = record.outer if self.turns == "outer" else record.inner
        if laps == 0:
            return False, record
        moved = record._replace(key=(record.key * 3 + 1) % 7, n=(record.n + 7) % 101)
        return True, moved._replace(outer=laps - 1) if self.turns == "outer" else moved._replace(inner=laps - 1)


# --------------------------------------------------------------------------------------------------------- by key


class _Tally(KeyedProcess):
    total = state.value("long", default=0)
    count = state.value("long", default=0)

    def __init__(self, trip: Trip, tally: Tally) -> None:
        self._trip = trip
        self._tally = tally

    def process(self, record: Any, ctx: Any) -> Iterable[Row]:
        self._trip.at(record)
        self.total.set(self.total.get() + record.n)
        self.count.set(self.count.get() + 1)
        yield self._tally.told(Record(*record), self.total.get(), self.count.get())


@dataclass(frozen=True, slots=True)
class Tally(Step):
    """Sums and counts by key, and passes the record on."""

    def build(self, built: Built) -> None:
        built.streams[self.outputs[0]] = (
            built.streams[self.inputs[0]]
            .key_by("key")
            .process(self.name, _Tally(built.site.trip, self), returns=DDL, parallelism=built.site.parallelism(self.name))
        )

    def take(self, port: int, record: Record, memory: Memory) -> Iterator[tuple[int, Record]]:
        totals, counts = memory.sums[self.name], memory.sums[self.name + " count"]
        totals[record.key] += record.n
        counts[record.key] += 1
        yield self.outputs[0], self.told(record, totals[record.key], counts[record.key])

    def told(self, record: Record, total: int, count: int) -> Record:
        return record

    def check(self, state_of: StateOf, memory: Memory, *, exact: bool) -> None:
        expect_totals(f"counts of {self.name}", state_of(self.name, "count"), memory.sums[self.name + " count"], exact=exact)
        if exact:  # or numbers may be other ones
            expect_totals(f"totals of {self.name}", state_of(self.name, "total"), memory.sums[self.name], exact=True)


@dataclass(frozen=True, slots=True)
class Number(Tally):
    """Numbers the records of each key, and tells the key and the number: as a multiset these are known."""

    def told(self, record: Record, total: int, count: int) -> Record:
        return Record(record.key * COPY + count, record.key, count)


@dataclass(frozen=True, slots=True)
class Running(Tally):
    """Running totals, which depend on the order of the key's records."""

    def told(self, record: Record, total: int, count: int) -> Record:
        return record._replace(n=total)


class _Join(CoProcess):
    lefts = state.map_("long", "array<long>")
    rights = state.map_("long", "array<long>")

    def __init__(self, trip: Trip) -> None:
        self._trip = trip

    def process_left(self, record: Any, ctx: Any) -> Iterable[Row]:
        self._trip.at(record)
        self.lefts.put(record.id, [*(self.lefts.get(record.id) or ()), record.n])
        for right in self.rights.get(record.id) or ():
            yield _joined(record.id, record.key, record.n, right)

    def process_right(self, record: Any, ctx: Any) -> Iterable[Row]:
        self.rights.put(record.id, [*(self.rights.get(record.id) or ()), record.n])
        for left in self.lefts.get(record.id) or ():
            yield _joined(record.id, record.key, left, record.n)


def _joined(id: int, key: int, left: int, right: int) -> Record:
    return Record(id, key, (3 * left + right) % 101)


@dataclass(frozen=True, slots=True)
class Join(Step):
    """Each record of the left with each of the right that has its key and id, whichever comes first."""

    def build(self, built: Built) -> None:
        left, right = (built.streams[number].key_by("key") for number in self.inputs)
        built.streams[self.outputs[0]] = left.connect(right).process(
            self.name, _Join(built.site.trip), returns=DDL, parallelism=built.site.parallelism(self.name)
        )

    def take(self, port: int, record: Record, memory: Memory) -> Iterator[tuple[int, Record]]:
        own, other = (memory.kept[f"{self.name} {side}"] for side in (port, 1 - port))
        own[record.key, record.id].append(record.n)
        for n in other.get((record.key, record.id), ()):
            left, right = (record.n, n) if port == 0 else (n, record.n)
            yield self.outputs[0], _joined(record.id, record.key, left, right)

    def check(self, state_of: StateOf, memory: Memory, *, exact: bool) -> None:
        for port, name in enumerate(("lefts", "rights")):
            kept = memory.kept[f"{self.name} {port}"]
            found = [
                (key, id, n) for key, held in state_of(self.name, name) for id, numbers in _items(held) for n in numbers
            ]
            expect_rows(
                f"{name} of {self.name}",
                [row if exact else row[:2] for row in found],
                [(*place, n) if exact else place for place, numbers in kept.items() for n in numbers],
                exact=exact,
            )


class _Meet(CoProcess):
    passed = state.value("long", default=0)
    met = state.value("long", default=0)

    def __init__(self, trip: Trip) -> None:
        self._trip = trip

    def process_left(self, record: Any, ctx: Any) -> Iterable[Row]:
        self._trip.at(record)
        self.passed.set(self.passed.get() + 1)
        yield record

    def process_right(self, record: Any, ctx: Any) -> None:
        self.met.set(self.met.get() + 1)


@dataclass(frozen=True, slots=True)
class Meet(Step):
    """Two inputs by key: the left is counted and passed on, the right is counted."""

    def build(self, built: Built) -> None:
        left, right = (built.streams[number].key_by("key") for number in self.inputs)
        built.streams[self.outputs[0]] = left.connect(right).process(
            self.name, _Meet(built.site.trip), returns=DDL, parallelism=built.site.parallelism(self.name)
        )

    def take(self, port: int, record: Record, memory: Memory) -> Iterator[tuple[int, Record]]:
        if port == 0:
            memory.sums[self.name][record.key] += 1
            yield self.outputs[0], record
        else:
            memory.sums[self.name + " met"][record.key] += 1

    def check(self, state_of: StateOf, memory: Memory, *, exact: bool) -> None:
        expect_totals(f"what passed {self.name}", state_of(self.name, "passed"), memory.sums[self.name], exact=exact)
        expect_totals(f"what {self.name} met", state_of(self.name, "met"), memory.sums[self.name + " met"], exact=exact)


# ----------------------------------------------------------------------------------------------- broadcast, no key


class _Rules(BroadcastProcess):
    rules = state.broadcast_map("long", "long")
    count = state.value("long", default=0)

    def __init__(self, trip: Trip) -> None:
        self._trip = trip

    def process(self, record: Any, ctx: Any) -> Iterable[Row]:
        self._trip.at(record)
        self.count.set(self.count.get() + 1)
        yield record

    def process_broadcast(self, record: Any, ctx: Any) -> None:
        self.rules.put(record.id, record.id)


@dataclass(frozen=True, slots=True)
class Rules(Step):
    """The left by key, the right to everybody, who must all have it in the end."""

    def build(self, built: Built) -> None:
        left, right = (built.streams[number] for number in self.inputs)
        built.streams[self.outputs[0]] = (
            left.key_by("key")
            .connect(right.broadcast())
            .process(self.name, _Rules(built.site.trip), returns=DDL, parallelism=built.site.parallelism(self.name))
        )

    def take(self, port: int, record: Record, memory: Memory) -> Iterator[tuple[int, Record]]:
        if port == 0:
            memory.sums[self.name][record.key] += 1
            yield self.outputs[0], record
        else:
            memory.kept[self.name][record.id, record.id] = [record.id]

    def check(self, state_of: StateOf, memory: Memory, *, exact: bool) -> None:
        expect_totals(f"counts of {self.name}", state_of(self.name, "count"), memory.sums[self.name], exact=exact)
        expect_rows(
            f"rules of {self.name}",
            [rule["key"] for rule in state_of(self.name, "rules")],
            [id for id, _ in memory.kept[self.name]],
            exact=exact,
        )


class _Note(Process):
    seen = state.operator_list("long", redistribute="split")

    def __init__(self, trip: Trip) -> None:
        self._trip = trip

    def process(self, record: Any, ctx: Any) -> Iterable[Row]:
        self._trip.at(record)
        self.seen.add(record.id)
        yield record


@dataclass(frozen=True, slots=True)
class Note(Step):
    """Operator state: every id that has passed, wherever that was."""

    def build(self, built: Built) -> None:
        built.streams[self.outputs[0]] = built.streams[self.inputs[0]].process(
            self.name, _Note(built.site.trip), returns=DDL, parallelism=self._parallelism(built)
        )

    def take(self, port: int, record: Record, memory: Memory) -> Iterator[tuple[int, Record]]:
        memory.sums[self.name][record.id] += 1
        yield self.outputs[0], record

    def check(self, state_of: StateOf, memory: Memory, *, exact: bool) -> None:
        expect_rows(f"ids noted by {self.name}", state_of(self.name, "seen"), memory.sums[self.name].elements(), exact=exact)


# ---------------------------------------------------------------------------------------------------------- loops


@dataclass(frozen=True, slots=True)
class Loop(Step):
    """A loop: `outputs` are the stream inside and the one that leaves; `feedback` is the one that goes back."""

    body: tuple[Step, ...] = ()
    feedback: int = 0

    def build(self, built: Built) -> None:
        inside, leaving = self.outputs

        def body(stream: Stream) -> tuple[Stream, Stream]:
            built.streams[inside] = stream
            for step in self.body:
                step.build(built)
            return built.streams[self.feedback], built.streams[leaving]

        built.streams[leaving] = built.streams[self.inputs[0]].iterate(self.name, body, parallelism=self._parallelism(built))

    def take(self, port: int, record: Record, memory: Memory) -> Iterator[tuple[int, Record]]:
        yield self.outputs[0], record


# --------------------------------------------------------------------------------------------------------- shared


def expect_totals(what: str, found: Iterable[tuple[int, int]], expected: Counter[int], *, exact: bool) -> None:
    """Totals by key; where not `exact`, no total is less than expected."""
    totals = dict(found)
    wrong = [
        key
        for key in sorted(expected.keys() | totals.keys())
        if (totals.get(key, 0) != expected[key] if exact else totals.get(key, 0) < expected[key])
    ]
    assert not wrong, f"{what}: key {wrong[0]} has {totals.get(wrong[0], 0)}, not {expected[wrong[0]]}"


def _items(held: Any) -> Iterable[tuple[int, list[int]]]:
    """A map, as it is read from a snapshot."""
    return held.items() if isinstance(held, dict) else held
