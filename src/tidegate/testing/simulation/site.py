"""A simulated job, the site where it is built, and the check of its output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pyarrow as pa

from tidegate.dataflow.contracts import Offset, Source, SourceContext, SourceReader
from tidegate.dataflow.graph import LogicalGraph
from tidegate.dataflow.operators.combine import CombineLimits
from tidegate.dataflow.pipeline import Pipeline
from tidegate.dataflow.plan import Plan
from tidegate.testing.simulation.external import External, TransactionalSink
from tidegate.testing.simulation.faults import Trip
from tidegate.testing.simulation.world import World

Row = tuple[Any, ...]
# Returns the items of an operator's state in the last snapshot: (key, value) pairs if it is keyed.
StateOf = Callable[[str, str], list[Any]]


@dataclass(frozen=True, slots=True)
class PacedSource(Source):
    """A source whose polls return a random number of rows, or none."""

    source: Source
    world: World
    trip: Trip
    idle: float  # the share of polls that find nothing
    bounded = True

    @property
    def schema(self) -> pa.Schema:
        return self.source.schema

    @property
    def finishes_splits(self) -> bool:
        return self.source.finishes_splits

    def open(self, context: SourceContext) -> SourceReader:
        return _PacedReader(self.source.open(context), self)


@dataclass(frozen=True, slots=True)
class _PacedReader(SourceReader):
    reader: SourceReader
    source: PacedSource

    def poll(self, max_rows: int) -> pa.RecordBatch | None:
        self.source.trip.at("a poll")
        rng = self.source.world.rng
        return None if rng.random() < self.source.idle else self.reader.poll(rng.randint(1, max_rows))

    def offsets(self) -> Mapping[str, Offset]:
        return self.reader.offsets()

    @property
    def finished(self) -> bool:
        return self.reader.finished

    def close(self) -> None:
        self.reader.close()


@dataclass(slots=True)
class Site:
    """What a job is built with: the world around it, and the parallelism of its operators in the present layout."""

    world: World
    external: External
    trip: Trip
    slots: int
    exact: bool  # every record counts once, also after a rollback
    idle: float  # the share of polls that find nothing
    rng: Random
    drawn: dict[str, int | None] = field(default_factory=dict)
    plan: Plan | None = None  # the job's plan in this layout, built once for all coordinators and slots

    def parallelism(self, operator: str) -> int | None:
        """Return the operator's parallelism, drawn once per layout; mostly None (as many subtasks as slots)."""
        if operator not in self.drawn:
            self.drawn[operator] = self.rng.choice((None, None, self.rng.randint(1, self.slots)))
        return self.drawn[operator]

    def sink(self) -> TransactionalSink:
        return TransactionalSink(self.external, self.world)

    def source(self, source: Source) -> PacedSource:
        return PacedSource(source, self.world, self.trip, self.idle)


class SimulatedJob(ABC):
    """A dataflow, and the check of its output."""

    name: str
    can_drain = True  # False if the end of event time changes the output
    span = 1.0  # the length of a run in comparison with others; faults are spread over it
    most_slots = 4

    @abstractmethod
    def build(self, pipeline: Pipeline, site: Site) -> None: ...

    def placed(self, graph: LogicalGraph, site: Site) -> LogicalGraph:
        """Return the graph that the simulated world runs; by default, the graph as it was built."""
        return graph

    def combine(self, site: Site) -> CombineLimits | None:
        """Return the limits of aggregating before the exchange in this layout; by default, there is none."""
        return None

    @abstractmethod
    def check(self, rows: Callable[[str], list[Row]], state_of: StateOf, *, exact: bool) -> None:
        """Assert that the output is right. `rows(sink)` is what was committed, in the order of commits.

        If not `exact`, records may have been processed several times, but none may be missing.
        """

    def check_delivered(self, delivered: Mapping[str, list[str]], *, exact: bool) -> None:  # noqa: B027  (optional)
        """Assert that `delivered` is right: what the run's only driver got from sinks that end at the driver."""
