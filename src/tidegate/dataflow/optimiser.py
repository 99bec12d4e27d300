"""Make the physical plan from the logical graph: the parallelism of each operator, and the chains.

A node is chained to its upstream node if it reads from no other: it has one input edge, FORWARD, and the same parallelism.
Chained operators call each other directly, without a channel. A node may have several chained consumers, of its main
output and of its side outputs, so that a chain is a tree. Even without chaining, a watermark operator is chained: in the
chain of a source it knows the split of each record.

The head of a loop is never chained to its upstream node, since the feedback enters there too. The tail has the parallelism
of the head, so that subtask i of both is in slot i, and is chained like any other node.

Invariants: every node is in exactly one vertex; the vertices are in the order of their first nodes, which is a topological
order; only a vertex's first node has edges from other vertices. State belongs to operators, by their names: vertices
and their ids may change with every plan.
"""

from __future__ import annotations

from tidegate.dataflow.changelog import check_not_spread
from tidegate.dataflow.combining import with_combiners
from tidegate.dataflow.graph import Edge, LogicalGraph, Node, Partitioning
from tidegate.dataflow.loops import LogicalLoop, loops_in
from tidegate.dataflow.operators.combine import CombineLimits
from tidegate.dataflow.plan import Loop, Plan, PlanEdge, Vertex
from tidegate.errors import GraphError


def make_plan(
    graph: LogicalGraph, *, slots: int, key_group_count: int, chaining: bool = True, combine: CombineLimits | None = None
) -> Plan:
    """Return the plan. Raise `GraphError` if an operator can't have the parallelism that it asks for. With `combine`,
    aggregates are computed in part before the exchange, within these limits (combining.py)."""
    if slots < 1 or key_group_count < 1:
        raise GraphError(f"slots={slots} and {key_group_count} key-groups: a job needs at least one of each")
    assert all(index == node.id for index, node in enumerate(graph.nodes))
    parallelism: list[int] = []
    for node in graph.nodes:
        parallelism.append(_parallelism_of(node, parallelism, slots=slots, key_group_count=key_group_count))
        check_not_spread(graph.nodes, node, parallelism)
    firsts: list[int] = []  # by node: the first node of its chain
    for node in graph.nodes:
        chained = (chaining or node.assigns_time) and _continues_its_upstream(node, parallelism)
        firsts.append(firsts[node.inputs[0].source] if chained else node.id)
    vertices = tuple(
        _vertex(index, first, graph, firsts, parallelism[first]) for index, first in enumerate(sorted(set(firsts)))
    )
    for vertex in vertices:
        _check_time_groups(vertex)
    vertex_of = {node.id: vertex.id for vertex in vertices for node in vertex.nodes}
    edges = [
        PlanEdge(
            id=index,
            source_vertex=vertex_of[edge.source],
            source_node=edge.source,
            tag=edge.tag,
            target_vertex=vertex.id,
            port=edge.port,
            partitioning=_partitioning(edge, vertex.first, parallelism),
            key=edge.key,
            refuses_nulls=edge.refuses_nulls,
        )
        for index, (vertex, edge) in enumerate((vertex, edge) for vertex in vertices for edge in vertex.first.inputs)
    ]
    loops: list[Loop] = []
    for found in loops_in(graph.nodes):
        loop = _loop(len(loops), found, vertex_of)
        loops.append(loop)
        edges.append(
            PlanEdge(
                id=len(edges),
                source_vertex=loop.tail_vertex,
                source_node=found.tail.id,
                tag=None,
                target_vertex=loop.head_vertex,
                port=0,
                partitioning=Partitioning.FORWARD,
                key=(),
                feedback=True,
            )
        )
    plan = Plan(vertices=vertices, edges=tuple(edges), slots=slots, key_group_count=key_group_count, loops=tuple(loops))
    return plan if combine is None or not chaining else with_combiners(plan, combine)


def _loop(index: int, found: LogicalLoop, vertex_of: dict[int, int]) -> Loop:
    # Other vertices reach only a vertex's first node. So if a node is in a loop, its whole vertex is.
    return Loop(
        id=index,
        name=found.head.name,
        head_vertex=vertex_of[found.head.id],
        tail_vertex=vertex_of[found.tail.id],
        vertices=frozenset(vertex_of[node] for node in found.nodes),
    )


def _parallelism_of(node: Node, upstream: list[int], *, slots: int, key_group_count: int) -> int:
    """Return the parallelism that the user asked for, or else that of the upstream nodes if records are only passed on: to
    rebalance them would let records of one key overtake each other. Otherwise return the number of slots."""
    parallelism = node.parallelism
    if node.loop_head is not None:
        return _parallelism_of_tail(node, upstream[node.loop_head])
    if parallelism is None:
        forwarded = node.inputs and all(edge.partitioning is Partitioning.FORWARD for edge in node.inputs)
        parallelism = max(upstream[edge.source] for edge in node.inputs) if forwarded else slots
    if parallelism > slots:
        raise GraphError(
            f"operator {node.name!r}: parallelism={parallelism} is more than the job's {slots} slots, and "
            f"a slot runs one subtask of an operator; lower it, or give the job slots={parallelism}"
        )
    by_key_group = any(edge.partitioning is Partitioning.HASH for edge in node.inputs) or (
        node.source is not None and node.source.finishes_splits
    )
    if parallelism > key_group_count and by_key_group:
        raise GraphError(
            f"operator {node.name!r}: its parallelism of {parallelism} is more than the job's "
            f"{key_group_count} key-groups, and some subtasks would have no key; pass "
            f"parallelism={key_group_count} or less, or give the job more key-groups (which is fixed once "
            f"it has state)"
        )
    return parallelism


def _parallelism_of_tail(node: Node, of_head: int) -> int:
    if node.parallelism not in (None, of_head):
        raise GraphError(
            f"operator {node.name!r}: parallelism={node.parallelism}, and its loop begins with a parallelism "
            f"of {of_head}; both ends of a loop have the same: give it to the loop, not to its feedback"
        )
    return of_head


def _continues_its_upstream(node: Node, parallelism: list[int]) -> bool:
    return (
        not node.begins_loop
        and len(node.inputs) == 1
        and _partitioning(node.inputs[0], node, parallelism) is Partitioning.FORWARD
    )


def _partitioning(edge: Edge, target: Node, parallelism: list[int]) -> Partitioning:
    """Return REBALANCE instead of FORWARD if the two sides have different numbers of subtasks."""
    if edge.partitioning is Partitioning.FORWARD and parallelism[edge.source] != parallelism[target.id]:
        return Partitioning.REBALANCE
    return edge.partitioning


def _check_time_groups(vertex: Vertex) -> None:
    """Check that operators that keep a source near its time group can hold back that source, and agree about it."""
    members = [node for node in vertex.nodes if node.time_group is not None]
    if members and vertex.first.source is None:
        raise GraphError(
            f"operator {members[0].name!r}: with_watermark(max_ahead=…) holds back the source of its records, and so it "
            f"must follow one source directly; only map, filter, flat_map, map_batches and an unkeyed process of the same "
            f"parallelism may come between them, chained (tg.Tuning(chaining=True)). Here the records come from "
            f"{vertex.first.name!r}. Put with_watermark before the union, rebalance or loop, on each source"
        )
    if len(members) > 1:
        raise GraphError(
            f"operators {members[0].name!r} and {members[1].name!r}: with_watermark(max_ahead=…) is given twice for source "
            f"{vertex.first.name!r}, which would wait for two time groups, and these perhaps for each other. Give max_ahead "
            f"to one of the two"
        )


def _vertex(index: int, first: int, graph: LogicalGraph, firsts: list[int], parallelism: int) -> Vertex:
    nodes = tuple(node for node in graph.nodes if firsts[node.id] == first)
    return Vertex(id=index, name=" → ".join(node.name for node in nodes), parallelism=parallelism, nodes=nodes)
