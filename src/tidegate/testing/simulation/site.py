"""Where a simulated job is built, what it is, and how its output is compared with what must come out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pyarrow as pa

from tidegate.connectors.rows import RowsSource
from tidegate.dataflow.contracts import Offset, Source, SourceContext, SourceReader
from tidegate.dataflow.pipeline import Pipeline
from tidegate.dataflow.plan import Plan
from tidegate.testing.simulation.external import External, TransactionalSink
from tidegate.testing.simulation.faults import Trip
from tidegate.testing.simulation.world import World

Row = tuple[Any, ...]
# The items of an operator's state in the last snapshot, (key, value) pairs where it is keyed.
StateOf = Callable[[str, str], list[Any]]


@dataclass(frozen=True, slots=True)
class PacedSource(Source):
    """Rows that come bit by bit: a poll finds nothing or some, as chance has it."""

    rows: RowsSource
    world: World
    trip: Trip
    idle: float  # the share of polls that find nothing

    @property
    def schema(self) -> pa.Schema:
        return self.rows.schema

    @property
    def bounded(self) -> bool:
        return True

    def open(self, context: SourceContext) -> SourceReader:
        return _PacedReader(self.rows.open(context), self.world, self.trip, self.idle)


class _PacedReader(SourceReader):
    def __init__(self, reader: SourceReader, world: World, trip: Trip, idle: float) -> None:
        self._idle = idle
        self._reader = reader
        self._world = world
        self._trip = trip

    def poll(self, max_rows: int) -> pa.RecordBatch | None:
        self._trip.at("a poll")
        if self._world.rng.random() < self._idle:
            return None
        return self._reader.poll(self._world.rng.randint(1, max_rows))

    def offsets(self) -> Mapping[str, Offset]:
        return self._reader.offsets()

    @property
    def finished(self) -> bool:
        return self._reader.finished


@dataclass(slots=True)
class Site:
    """Where a job is built: the world it touches, and how parallel its operators are in the present layout."""

    world: World
    external: External
    trip: Trip
    slots: int
    exact: bool  # every record counts once, also after a rollback
    idle: float  # how often a source has nothing when it is asked
    rng: Random
    drawn: dict[str, int | None] = field(default_factory=dict)
    plan: Plan | None = None  # of the job in this layout: it is built once, for all coordinators and slots

    def parallelism(self, operator: str) -> int | None:
        """Drawn once per layout; None (as many as slots) as a rule."""
        if operator not in self.drawn:
            self.drawn[operator] = self.rng.choice((None, None, self.rng.randint(1, self.slots)))
        return self.drawn[operator]

    def sink(self) -> TransactionalSink:
        return TransactionalSink(self.external, self.world)

    def source(self, rows: RowsSource) -> PacedSource:
        return PacedSource(rows, self.world, self.trip, self.idle)


class SimulatedJob(ABC):
    """A dataflow, and what is to be true at its end."""

    name: str
    can_drain = True  # False where the end of event time changes the output
    span = 1.0  # how long a run is, compared with others: so much sooner and less goes wrong
    most_slots = 4

    @abstractmethod
    def build(self, pipeline: Pipeline, site: Site) -> None: ...

    @abstractmethod
    def check(self, rows: Callable[[str], list[Row]], state_of: StateOf, *, exact: bool) -> None:
        """`rows(sink)` is what was committed, in the order of commits. Asserts.

        Where not `exact`, a record may have been processed several times: nothing may be missing.
        """

    def check_delivered(self, delivered: Mapping[str, list[str]], *, exact: bool) -> None:  # noqa: B027  (optional)
        """`delivered` is what the one driver of the whole run was given by sinks that end there. Asserts."""


def expect_rows(what: str, got: Iterable[Any], expected: Iterable[Any], *, exact: bool = True) -> None:
    """As multisets. Where not `exact`, there may be more than expected."""
    found, wanted = Counter(got), Counter(expected)
    lost, surplus = wanted - found, found - wanted if exact else Counter()
    assert not lost and not surplus, (
        f"{what}: {lost.total()} lost ({_some(lost)}), {surplus.total()} too many ({_some(surplus)}), of {wanted.total()}"
    )


def expect_order(what: str, rows: Iterable[Row], expected: Iterable[Row], key: Callable[[Row], Any]) -> None:
    """The rows of each key, in order."""
    found, wanted = _by_key(rows, key), _by_key(expected, key)
    wrong = [each for each in wanted if found.get(each) != wanted[each]]
    assert not wrong, f"{what}: key {wrong[0]!r} has {found.get(wrong[0])}, not {wanted[wrong[0]]}"


def _by_key(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    grouped: defaultdict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        grouped[key(row)].append(row)
    return grouped


def _some(counter: Counter[Any]) -> str:
    return ", ".join(map(str, list(counter)[:6]))
