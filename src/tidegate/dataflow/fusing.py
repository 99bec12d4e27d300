"""Which nodes of a chain run as one operator: consecutive ones of select, filter, with_columns and explode.

A node joins the one before if it is the only consumer of that node's records. Nothing else changes: each keeps its name
and its place in the graph, so that another plan may divide them differently. None of them has state.
"""

from __future__ import annotations

from collections import Counter

from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.columns import ColumnsSpec
from tidegate.dataflow.plan import Plan, Vertex


def fused_runs(plan: Plan, vertex: Vertex) -> list[tuple[Node, ...]]:
    """Return the runs of two or more nodes that are one operator, each in the order of its steps."""
    consumer_counts = Counter(edge.source_node for edge in plan.outputs_of(vertex))
    consumer_counts.update(edge.source for node in vertex.nodes[1:] for edge in node.inputs)
    runs: dict[int, list[Node]] = {}  # by the id of the last node
    for node in vertex.nodes:
        if not isinstance(node.spec, ColumnsSpec):
            continue
        source = None if node is vertex.first else node.inputs[0].source
        before = runs.pop(source) if source in runs and consumer_counts[source] == 1 else []
        runs[node.id] = [*before, node]
    return [tuple(run) for run in runs.values() if len(run) > 1]
