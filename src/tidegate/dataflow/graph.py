"""The logical graph: what the user wrote, node by node.

Nodes are immutable and named; an edge defines how records are partitioned on their way. A union is not a node, but several
edges into one port. A node's `spec` describes the operator and creates it on a slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

if TYPE_CHECKING:
    from tidegate.dataflow.aggregates.partials import Partials
    from tidegate.dataflow.contracts import Sink, Source
    from tidegate.dataflow.operators.base import Operator
    from tidegate.state.descriptors import Descriptor
    from tidegate.state.sections import StateInfo


class Partitioning(Enum):
    FORWARD = "forward"  # subtask i to subtask i
    HASH = "hash"  # by the key-group of the key columns
    BROADCAST = "broadcast"  # every record to every subtask
    REBALANCE = "rebalance"  # whole batches, round robin


@dataclass(frozen=True, slots=True)
class Edge:
    """From a node's main output (`tag` None) or a side output into a port of the node that holds this edge."""

    source: int
    tag: str | None
    port: int
    partitioning: Partitioning
    key: tuple[str, ...] = ()
    refuses_nulls: bool = False  # in the key
    as_append: bool = False  # updates and changes travel as records of their own
    upserts_by: tuple[str, ...] = ()  # records replace one another by this key, as the user says


class Spec(Protocol):
    """The description of an operator, with the user's function. It can be pickled."""

    @property
    def kind(self) -> str:
        """One word for `explain`: source, map, process…"""

    @property
    def stateful(self) -> bool: ...

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        """Return every state of the operator, including the engine's own (offsets, timers, committables)."""

    def create(self, node: Node) -> Operator:
        """Return a new operator for one subtask."""


@dataclass(frozen=True, slots=True)
class Node:
    id: int
    name: str
    spec: Spec
    inputs: tuple[Edge, ...]
    schema: pa.Schema
    input_schemas: tuple[pa.Schema, ...] = ()  # by port
    side_schemas: Mapping[str, pa.Schema] = field(default_factory=dict)
    parallelism: int | None = None  # None: the job's slots
    named_by_user: bool = False
    aliases: tuple[str, ...] = ()  # names under which older snapshots may have its state
    upserts_by: tuple[str, ...] = ()  # the key by which a record replaces the one before (changelog.py)
    retracts: bool = False  # whether its records have a row kind, and may take earlier ones back (changelog.py)

    # Properties of the spec, so that callers needn't know its class.

    @property
    def source(self) -> Source | None:
        """The source that it reads, if it is a source's operator."""
        return getattr(self.spec, "source", None)

    @property
    def sink(self) -> Sink | None:
        """The sink that it writes to, if it is a sink's operator."""
        return getattr(self.spec, "sink", None)

    @property
    def assigns_time(self) -> bool:
        """Whether it makes watermarks."""
        return getattr(self.spec, "assigns_time", False)

    @property
    def watermark_column(self) -> str | None:
        """The column of the event time that its watermarks follow, if it makes them of a column."""
        return getattr(self.spec, "column", None) if self.assigns_time else None

    @property
    def window_columns(self) -> tuple[str | None, ...]:
        """The columns of the times that say in which windows records are, by port. Nothing for other operators."""
        return getattr(self.spec, "window_columns", ())

    @property
    def assigns_time_by_epoch(self) -> bool:
        """Whether its watermarks move only between two epochs."""
        return self.assigns_time and getattr(self.spec, "by_epoch", False)

    @property
    def time_group(self) -> str | None:
        """The group of sources that its source waits for, if it makes watermarks with `max_ahead`."""
        return getattr(self.spec, "group", None)

    @property
    def begins_loop(self) -> bool:
        return getattr(self.spec, "begins_loop", False)

    @property
    def loop_head(self) -> int | None:
        """The id of its loop's head, if it is the tail of a loop."""
        return getattr(self.spec, "head", None)

    @property
    def gathers(self) -> bool:
        """Whether it holds records back until their epoch ends."""
        return getattr(self.spec, "gathers", False)

    @property
    def in_columns(self) -> bool:
        """Whether it handles whole batches, so that large ones cost less for each record."""
        return getattr(self.spec, "in_columns", False)

    @property
    def needs_event_time(self) -> bool:
        """Whether it emits nothing, or keeps everything, before event time moves."""
        return getattr(self.spec, "needs_event_time", False)

    @property
    def partials(self) -> Partials | None:
        """The form of the partial aggregates that it takes instead of records, if it does."""
        find = getattr(self.spec, "partials", None)
        return find(self) if callable(find) else None

    @property
    def descriptors(self) -> tuple[Descriptor, ...]:
        """The states that the operator itself declares, and not a user's function."""
        return getattr(self.spec, "descriptors", ())

    @property
    def sets_alarm(self) -> bool:
        """Whether it may ask for an epoch although there is no record for it."""
        return getattr(self.spec, "sets_alarm", False)


@dataclass(frozen=True, slots=True)
class LogicalGraph:
    """The nodes in the order in which they were added, which is a topological order."""

    nodes: tuple[Node, ...]

    def node(self, node_id: int) -> Node:
        return self.nodes[node_id]

    def consumers(self, node_id: int) -> list[tuple[Node, Edge]]:
        return [(node, edge) for node in self.nodes for edge in node.inputs if edge.source == node_id]


def sources_above(nodes: Sequence[Node], edges: Iterable[Edge]) -> tuple[str, ...]:
    """Return the names of the sources that the records of these edges come from, in the order of the graph. `nodes[i]` has
    the id i."""
    reached: set[int] = set()
    waiting = [edge.source for edge in edges]
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached.add(node)
            waiting += [edge.source for edge in nodes[node].inputs]
    return tuple(nodes[each].name for each in sorted(reached) if not nodes[each].inputs)
