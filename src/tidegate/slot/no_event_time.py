"""Find the operators at which event time never moves, so that a timer of event time never fires.

Event time moves below a watermark operator, and at the end of all input. Only when a function sets a timer is it known that
it does. The first such timer is logged as a warning. It is not an error, since the timer fires if the job is drained.
"""

from __future__ import annotations

from tidegate.connectors.handover import HandedSource
from tidegate.dataflow.contracts import Source
from tidegate.dataflow.plan import Plan


def operators_without_event_time(plan: Plan, *, micro_batches: bool) -> frozenset[str]:
    """Return the names of the operators that have no watermark operator above them and input that never ends."""
    with_event_time: set[int] = set()
    endless: set[int] = set()
    nodes = sorted(plan.nodes, key=lambda node: node.id)  # what is above a node has a lower id
    for node in nodes:
        above = {edge.source for edge in node.inputs}
        if node.assigns_time or above & with_event_time:
            with_event_time.add(node.id)
        if above & endless or (node.source is not None and not _ends(node.source, micro_batches)):
            endless.add(node.id)
    return frozenset(node.name for node in nodes if node.id in endless - with_event_time)


def _ends(source: Source, micro_batches: bool) -> bool:
    return not micro_batches if isinstance(source, HandedSource) else source.bounded


def warning_of(operator: str) -> str:
    return (
        f"operator {operator!r} has set a timer of event time, and event time doesn't move there: no with_watermark is "
        f"above it, and its input has no end, so the timer doesn't fire. Use .with_watermark(column, delay) behind the "
        f"source, or set the timer with ctx.timers.processing_time(at)."
    )
