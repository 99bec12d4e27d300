"""The operators and states that a job declares, in the form that a restore plan compares with a snapshot
(snapshots/plan.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tidegate.dataflow.aggregates.partials import PARTIALS_PORT
from tidegate.dataflow.functions import Function
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.grouped import GroupFunction
from tidegate.dataflow.places import Place, places_of
from tidegate.dataflow.plan import Plan
from tidegate.snapshots.plan import DeclaredOperator
from tidegate.state.descriptors import Descriptor, descriptors_of
from tidegate.state.evolution import IN_A_CLASS, Changes, DeclaredState


def declared_operators(plan: Plan) -> tuple[DeclaredOperator, ...]:
    """Return the operators of a job's plan with the states that they declare."""
    return tuple(
        DeclaredOperator(
            node.name,
            vertex.parallelism,
            _declared_states(node),
            node.aliases,
            tuple(_in_flight(node, place) for place in places_of(node) if not place.is_feedback),
            getattr(node.spec, "advice", IN_A_CLASS),
        )
        for vertex in plan.vertices
        for node in vertex.nodes
    )


def _in_flight(node: Node, place: Place) -> DeclaredState:
    """Partial aggregates in flight evolve like the state that they are merged into."""
    if (partials := node.partials) is None or place.port != PARTIALS_PORT:
        return DeclaredState(place.info)
    (changes,) = (descriptor.changes for descriptor in node.descriptors)
    names = partials.schema.names
    return DeclaredState(
        place.info,
        changes=Changes(
            {name: default for name, default in changes.added.items() if name in names},
            {name: before for name, before in changes.renamed.items() if name in names},
        ),
    )


def _declared_states(node: Node) -> tuple[DeclaredState, ...]:
    function: Any = getattr(node.spec, "function", None)
    declared: Iterable[Descriptor] = node.descriptors
    if isinstance(function, Function):
        declared = descriptors_of(function).values()
    elif isinstance(function, GroupFunction):
        declared = function.states
    by_name = {descriptor.name: descriptor for descriptor in declared}
    return tuple(
        DeclaredState(info)
        if (found := by_name.get(info.name)) is None
        else DeclaredState(info, found.aliases, found.changes, found.pickled)
        for info in node.spec.states(node)
    )
