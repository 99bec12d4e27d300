"""Operators at which event time never moves, so that a timer of event time never fires; and what is said about it.

Event time moves below a watermark operator, and at the end of all input. Whether a function sets such timers is known only
when it does. The first one is a warning then, not an error: a job may go on to be drained.
"""

from __future__ import annotations

from tidegate.connectors.handover import HandedSource
from tidegate.dataflow.contracts import Source
from tidegate.dataflow.plan import Plan


def untimed_operators(plan: Plan, *, micro_batches: bool) -> frozenset[str]:
    """The names of those that have no watermark operator above them, and input that doesn't end."""
    timed: set[int] = set()
    endless: set[int] = set()
    nodes = sorted(plan.nodes, key=lambda node: node.id)  # what is above a node has a lower id
    for node in nodes:
        above = {edge.source for edge in node.inputs}
        if node.assigns_time or above & timed:
            timed.add(node.id)
        if above & endless or (node.source is not None and not _ends(node.source, micro_batches)):
            endless.add(node.id)
    return frozenset(node.name for node in nodes if node.id in endless - timed)


def _ends(source: Source, micro_batches: bool) -> bool:
    return not micro_batches if isinstance(source, HandedSource) else source.bounded


def warning_of(operator: str) -> str:
    return (
        f"operator {operator!r} has set a timer of event time, and event time doesn't move there: no with_watermark is "
        f"above it, and its input has no end, so the timer doesn't fire. Use .with_watermark(column, delay) behind the "
        f"source, or set the timer with ctx.timers.processing_time(at)."
    )
