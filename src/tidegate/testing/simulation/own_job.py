"""A user's own job in the simulation: built as for Spark, and placed in the simulated world.

- Its sources are read as they are, but bit by bit: a poll finds nothing or some records, as chance has it. They must be
  bounded, and must not end the process they run in.
- What it writes to `tg.sinks.collect()` goes to the simulated world outside, in transactions that can be refused or lose
  their answers. `Outcome.committed` has it. Any other sink is used as it is.
- The number of slots, the faults and the rest are the seed's.

The function that builds it is called for each layout (that is, again when the job resumes with other slots). As on a
cluster, an operator's function is copied for each subtask; unlike there the copy is shallow, so what a function changes
beside its declared state must be made in its `open`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tidegate.connectors.collecting import CollectSink
from tidegate.dataflow.graph import LogicalGraph, Node
from tidegate.dataflow.operators.sink import SinkSpec
from tidegate.dataflow.operators.source import SourceSpec
from tidegate.dataflow.stream import Pipeline
from tidegate.errors import JobError
from tidegate.testing.scripted import Kill, ScriptedSource
from tidegate.testing.simulation.site import Row, SimulatedJob, Site, StateOf


class OwnJob(SimulatedJob):
    """What it must commit is for the test to say; the checks of the engine are made as for any job."""

    can_drain = False  # the end of event time, which a drain brings about half-way, would fire the job's timers

    def __init__(self, builder: Callable[[Pipeline], object]) -> None:
        self.name = getattr(builder, "__qualname__", repr(builder))
        self._builder = builder

    def build(self, pipeline: Pipeline, site: Site) -> None:
        self._builder(pipeline)

    def placed(self, graph: LogicalGraph, site: Site) -> LogicalGraph:
        return replace(graph, nodes=tuple(_placed(node, site) for node in graph.nodes))

    def check(self, rows: Callable[[str], list[Row]], state_of: StateOf, *, exact: bool) -> None:
        """Nothing: the test compares `Outcome.committed`."""


def _placed(node: Node, site: Site) -> Node:
    match node.spec:
        case SourceSpec(source=source):
            if not source.bounded:
                raise JobError(f"source {node.name!r} never ends, so a simulation of it wouldn't either: give it an end")
            if isinstance(source, ScriptedSource) and any(isinstance(item, Kill) for s in source.scripts for item in s):
                raise JobError(
                    f"source {node.name!r}: Kill() would kill this very process, which simulates all others; use Crash(), "
                    "or leave it to the seed (FaultRates)"
                )
            return replace(node, spec=SourceSpec(site.source(source)))
        case SinkSpec(sink=CollectSink()):
            return replace(node, spec=SinkSpec(site.sink()))
    return node
