"""Where a simulated job is built, what it is, and how its output is compared with what must come out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pyarrow as pa

from tidegate.dataflow.contracts import Offset, Source, SourceContext, SourceReader
from tidegate.dataflow.graph import LogicalGraph
from tidegate.dataflow.plan import Plan
from tidegate.dataflow.stream import Pipeline
from tidegate.testing.simulation.external import External, TransactionalSink
from tidegate.testing.simulation.faults import Trip
from tidegate.testing.simulation.world import World

Row = tuple[Any, ...]
# The items of an operator's state in the last snapshot, (key, value) pairs where it is keyed.
StateOf = Callable[[str, str], list[Any]]


@dataclass(frozen=True, slots=True)
class PacedSource(Source):
    """Rows that come bit by bit: a poll finds nothing or some, as chance has it."""

    source: Source
    world: World
    trip: Trip
    idle: float  # the share of polls that find nothing

    @property
    def schema(self) -> pa.Schema:
        return self.source.schema

    @property
    def bounded(self) -> bool:
        return True

    def open(self, context: SourceContext) -> SourceReader:
        return _PacedReader(self.source.open(context), self.world, self.trip, self.idle)


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

    def close(self) -> None:
        self._reader.close()


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

    def source(self, source: Source) -> PacedSource:
        return PacedSource(source, self.world, self.trip, self.idle)


class SimulatedJob(ABC):
    """A dataflow, and what is to be true at its end."""

    name: str
    can_drain = True  # False where the end of event time changes the output
    span = 1.0  # how long a run is, compared with others: so much sooner and less goes wrong
    most_slots = 4

    @abstractmethod
    def build(self, pipeline: Pipeline, site: Site) -> None: ...

    def placed(self, graph: LogicalGraph, site: Site) -> LogicalGraph:
        """The graph as it is run in the simulated world: by default as it was built."""
        return graph

    @abstractmethod
    def check(self, rows: Callable[[str], list[Row]], state_of: StateOf, *, exact: bool) -> None:
        """`rows(sink)` is what was committed, in the order of commits. Asserts.

        Where not `exact`, a record may have been processed several times: nothing may be missing.
        """

    def check_delivered(self, delivered: Mapping[str, list[str]], *, exact: bool) -> None:  # noqa: B027  (optional)
        """`delivered` is what the one driver of the whole run was given by sinks that end there. Asserts."""
