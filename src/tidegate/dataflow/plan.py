"""The physical plan: vertices (chains of nodes), the edges between them, and the slots of their subtasks.

Subtask i of every vertex runs in slot i. Inside a vertex, `nodes` are in topological order: the first one
takes the vertex's input; every other has exactly one input edge, from a node of the same vertex. Edges between
vertices become channels. This module only computes with them; `optimiser.py` decides what is chained.

Vertices are in topological order of all edges but the feedback edges. Each loop has one feedback edge, from its tail,
wherever that is chained, to its head, which is the first node of a vertex. Laps, which find out whether a loop has ended, go
along the edges inside the loop: those between two of its vertices, including its own feedback edge and those of the loops
in it.
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
    def first(self) -> Node:
        return self.nodes[0]


@dataclass(frozen=True, slots=True)
class PlanEdge:
    """From `source_node` in `source_vertex` (side output `tag`, or the main output if that is None) into `port` of the first
    node of `target_vertex`."""

    id: int
    source_vertex: int
    source_node: int
    tag: str | None
    target_vertex: int
    port: int
    partitioning: Partitioning
    key: tuple[str, ...]
    feedback: bool = False  # from a loop's tail back to its head
    refuses_nulls: bool = False  # in the key


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop. `vertices` are those on a path from the head to the tail, which may be in the same vertex."""

    id: int
    name: str
    head_vertex: int
    tail_vertex: int
    vertices: frozenset[int]


@dataclass(frozen=True, slots=True)
class Plan:
    vertices: tuple[Vertex, ...]  # topological order; `vertices[i].id == i`
    edges: tuple[PlanEdge, ...]  # `edges[i].id == i`; feedback edges come last, in the order of `loops`
    slots: int
    key_group_count: int
    loops: tuple[Loop, ...] = ()  # `loops[i].id == i`; an enclosing loop comes before those in it

    @property
    def nodes(self) -> Iterator[Node]:
        """The nodes of all vertices."""
        return (node for vertex in self.vertices for node in vertex.nodes)

    def subtasks_in(self, slot: int) -> Iterator[Vertex]:
        return (vertex for vertex in self.vertices if slot < vertex.parallelism)

    def subtask_count(self) -> int:
        return sum(vertex.parallelism for vertex in self.vertices)

    def inputs_of(self, vertex: Vertex) -> list[PlanEdge]:
        return [edge for edge in self.edges if edge.target_vertex == vertex.id]

    def outputs_of(self, vertex: Vertex) -> list[PlanEdge]:
        return [edge for edge in self.edges if edge.source_vertex == vertex.id]

    def targets(self, edge: PlanEdge, upstream: int) -> list[ChannelId]:
        """Return the channels that subtask `upstream` writes on this edge, in the order of their downstream subtasks."""
        if edge.partitioning is Partitioning.FORWARD:
            return [ChannelId(edge.id, upstream, upstream)]
        count = self.vertices[edge.target_vertex].parallelism
        return [ChannelId(edge.id, upstream, downstream) for downstream in range(count)]

    def origins(self, edge: PlanEdge, downstream: int) -> list[ChannelId]:
        """Return the channels that subtask `downstream` reads on this edge."""
        if edge.partitioning is Partitioning.FORWARD:
            return [ChannelId(edge.id, downstream, downstream)]
        count = self.vertices[edge.source_vertex].parallelism
        return [ChannelId(edge.id, upstream, downstream) for upstream in range(count)]

    def loops_of(self, vertex_id: int) -> list[Loop]:
        """Return the loops that the vertex is in, from the outermost to the innermost."""
        return [loop for loop in self.loops if vertex_id in loop.vertices]

    def edge_inside(self, loop: Loop, edge: PlanEdge) -> bool:
        """Return whether records that go round the loop may take this edge."""
        return edge.source_vertex in loop.vertices and edge.target_vertex in loop.vertices

    def depth_of(self, loop: Loop) -> int:
        """Return how deep loops are nested in this loop, itself included."""
        inner = [each for each in self.loops if each.id > loop.id and each.head_vertex in loop.vertices]
        return 1 + max(map(self.depth_of, inner), default=0)

    def below(self, vertex: Vertex) -> frozenset[int]:
        """Return the other vertices that records of this vertex reach without going round a loop."""
        reached = {vertex.id}
        for each in self.vertices[vertex.id + 1 :]:
            if any(edge.source_vertex in reached and not edge.feedback for edge in self.inputs_of(each)):
                reached.add(each.id)
        return frozenset(reached - {vertex.id})
