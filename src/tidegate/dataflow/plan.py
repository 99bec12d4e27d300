"""The physical plan: vertices (chains of nodes), the edges between them, and who runs where.

Subtask i of every vertex runs in slot i. Inside a vertex, `nodes` are in topological order: the first is the head,
which takes the vertex's input; every other has exactly one input edge, from a node of the same vertex. Edges between
vertices become channels. This module is pure arithmetic over those; `optimiser.py` decides what is chained.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tidegate.dataflow.graph import Node, Partitioning
from tidegate.protocol.ids import ChannelId


@dataclass(frozen=True, slots=True)
class Vertex:
    id: int
    name: str
    parallelism: int
    nodes: tuple[Node, ...]

    @property
    def head(self) -> Node:
        return self.nodes[0]


@dataclass(frozen=True, slots=True)
class PlanEdge:
    """From `source_node` (in `source_vertex`), main output or side output `tag`, into `port` of the target's head."""

    id: int
    source_vertex: int
    source_node: int
    tag: str | None
    target_vertex: int
    port: int
    partitioning: Partitioning
    key: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    vertices: tuple[Vertex, ...]          # topological order; `vertices[i].id == i`
    edges: tuple[PlanEdge, ...]           # `edges[i].id == i`
    slots: int
    key_group_count: int

    def subtasks_in(self, slot: int) -> Iterator[Vertex]:
        return (vertex for vertex in self.vertices if slot < vertex.parallelism)

    def subtask_count(self) -> int:
        return sum(vertex.parallelism for vertex in self.vertices)

    def inputs_of(self, vertex: Vertex) -> list[PlanEdge]:
        return [edge for edge in self.edges if edge.target_vertex == vertex.id]

    def outputs_of(self, vertex: Vertex) -> list[PlanEdge]:
        return [edge for edge in self.edges if edge.source_vertex == vertex.id]

    def targets(self, edge: PlanEdge, upstream: int) -> list[ChannelId]:
        """The channels that subtask `upstream` writes on this edge, in the order of their downstream subtask."""
        if edge.partitioning is Partitioning.FORWARD:
            return [ChannelId(edge.id, upstream, upstream)]
        count = self.vertices[edge.target_vertex].parallelism
        return [ChannelId(edge.id, upstream, downstream) for downstream in range(count)]

    def origins(self, edge: PlanEdge, downstream: int) -> list[ChannelId]:
        """The channels that subtask `downstream` reads on this edge."""
        if edge.partitioning is Partitioning.FORWARD:
            return [ChannelId(edge.id, downstream, downstream)]
        count = self.vertices[edge.source_vertex].parallelism
        return [ChannelId(edge.id, upstream, downstream) for upstream in range(count)]
