"""A user's own job in the simulation: built as for Spark, and placed in the simulated world.

- Its sources are used as they are, but a poll returns a random number of records, or none. They must be bounded, and must
  not end the process they run in.
- What the job writes to `tg.sinks.collect()` goes to the simulated outside, in transactions that can be refused or whose
  answers can be lost. `Outcome.committed` has the rows. Any other sink is used as it is.
- The seed decides the number of slots, the faults and everything else.

The function that builds the job is called for each layout (that is, again when the job resumes with another number of
slots). As on a cluster, each subtask has a copy of an operator's function. Here the copy is shallow, so a function must
create in `open` whatever it changes beside its declared state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tidegate.connectors.collecting import CollectSink
from tidegate.dataflow.graph import LogicalGraph, Node
from tidegate.dataflow.operators.sink import SinkSpec
from tidegate.dataflow.operators.source import SourceSpec
from tidegate.dataflow.pipeline import Pipeline
from tidegate.errors import JobError
from tidegate.testing.scripted import Kill, ScriptedSource
from tidegate.testing.simulation.site import Row, SimulatedJob, Site, StateOf


class OwnJob(SimulatedJob):
    """A user's job. The test checks what it has committed; the engine's own checks are made as for any job."""

    can_drain = False  # a drain half-way would end event time, and so fire the job's timers

    def __init__(self, builder: Callable[[Pipeline], object]) -> None:
        self.name = getattr(builder, "__qualname__", repr(builder))
        self._builder = builder

    def build(self, pipeline: Pipeline, site: Site) -> None:
        self._builder(pipeline)

    def placed(self, graph: LogicalGraph, site: Site) -> LogicalGraph:
        return replace(graph, nodes=tuple(_placed(node, site) for node in graph.nodes))

    def check(self, rows: Callable[[str], list[Row]], state_of: StateOf, *, exact: bool) -> None:
        """Check nothing: the test compares `Outcome.committed`."""


def _placed(node: Node, site: Site) -> Node:
    match node.spec:
        case SourceSpec(source=source):
            if not source.bounded:
                raise JobError(f"source {node.name!r} never ends, so a simulation of it wouldn't either: give it an end")
            if isinstance(source, ScriptedSource) and any(isinstance(item, Kill) for s in source.scripts for item in s):
                raise JobError(
                    f"source {node.name!r}: Kill() would kill this process, which simulates all others; use Crash(), or "
                    f"rely on the seed's faults (FaultRates)"
                )
            return replace(node, spec=SourceSpec(site.source(source)))
        case SinkSpec(sink=CollectSink()):
            return replace(node, spec=SinkSpec(site.sink()))
    return node
