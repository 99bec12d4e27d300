"""Put an operator that aggregates in advance before the exchange of each aggregate that allows it (operators/combine.py).

It is the last node of its branch in the chain above the edge, and what it emits goes to the aggregate's port for partials.
The aggregate and its state are as they were, so snapshots don't depend on whether records are combined.

There is none if the edge has a single channel, if one of the aggregates needs all records, and in plans with loops: these
count the records that are on their way.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

from tidegate.dataflow.aggregates.partials import PARTIALS_PORT, Partials
from tidegate.dataflow.graph import Edge, Node, Partitioning
from tidegate.dataflow.operators.combine import CombineLimits, CombineSpec
from tidegate.dataflow.plan import Plan, PlanEdge


def with_combiners(plan: Plan, limits: CombineLimits) -> Plan:
    """Return the plan with such operators."""
    if plan.loops:
        return plan
    next_id = 1 + max(node.id for node in plan.nodes)
    numbers: Counter[str] = Counter()
    added: defaultdict[int, list[Node]] = defaultdict(list)
    edges: list[PlanEdge] = []
    for edge in plan.edges:
        target = plan.vertices[edge.target_vertex].first
        partials = _partials_on(plan, edge)
        if partials is not None:
            spec = CombineSpec(target.name, partials, limits, edge.refuses_nulls)
            numbers[target.name] += 1
            node = _node(plan, edge, spec, node_id=next_id, number=numbers[target.name])
            next_id += 1
            added[edge.source_vertex].append(node)
            edge = replace(edge, source_node=node.id, tag=None, port=PARTIALS_PORT, refuses_nulls=False)
        edges.append(edge)
    vertices = tuple(replace(each, nodes=(*each.nodes, *added[each.id])) for each in plan.vertices)
    return replace(plan, vertices=vertices, edges=tuple(edges))


def _partials_on(plan: Plan, edge: PlanEdge) -> Partials | None:
    """Return the form of the partials that may take the place of the records on an edge, or None if these must stay."""
    source, target = plan.vertices[edge.source_vertex], plan.vertices[edge.target_vertex]
    if edge.partitioning is not Partitioning.HASH or source.parallelism == target.parallelism == 1:
        return None
    return target.first.partials


def _node(plan: Plan, edge: PlanEdge, spec: CombineSpec, *, node_id: int, number: int) -> Node:
    above = next(node for node in plan.vertices[edge.source_vertex].nodes if node.id == edge.source_node)
    return Node(
        id=node_id,
        name=f"({spec.of})" if number == 1 else f"({spec.of} {number})",  # no user's name begins with a bracket
        spec=spec,
        inputs=(Edge(edge.source_node, edge.tag, 0, Partitioning.FORWARD),),
        schema=spec.partials.schema,
        input_schemas=(above.schema if edge.tag is None else above.side_schemas[edge.tag],),
    )
