"""Find the operators at which event time never moves, so that timers of event time never fire and windows never complete.

Event time moves below a watermark operator, and at the end of all input. Windows and joins of event time are known when the
job is built, and are logged as warnings when it starts. Only when a function sets a timer is it known that it does: a slot
logs the first one. It is not an error, since the timer fires if the job is drained, and so are windows complete. A streaming
query can't be drained, so there windows and joins without event time are an error.

Windows over another column than the watermark's complete, but by a time that isn't theirs: that is logged, too. It may be
meant, if both times are close.
"""

from __future__ import annotations

from collections.abc import Iterator

from tidegate.connectors.handover import HandedSource
from tidegate.dataflow.contracts import Source
from tidegate.dataflow.graph import Node
from tidegate.dataflow.plan import Plan
from tidegate.errors import GraphError


def operators_without_event_time(plan: Plan, *, micro_batches: bool) -> frozenset[str]:
    """Return the names of the operators that have no watermark operator above them and input that never ends. A join by
    event time is one of them if that is so of either input, since its time is the lesser of both."""
    with_event_time: set[int] = set()
    endless: set[int] = set()
    held_up: set[int] = set()
    nodes = sorted(plan.nodes, key=lambda node: node.id)  # what is above a node has a lower id
    for node in nodes:
        above = {edge.source for edge in node.inputs}
        if node.assigns_time or above & with_event_time:
            with_event_time.add(node.id)
        if above & endless or (node.source is not None and not _ends(node.source, micro_batches)):
            endless.add(node.id)
        for port in range(len(node.input_schemas)) if node.needs_event_time else ():
            above = {edge.source for edge in node.inputs if edge.port == port}
            if above & endless and not above & with_event_time:
                held_up.add(node.id)
    return frozenset(node.name for node in nodes if node.id in endless - with_event_time | held_up)


def _ends(source: Source, micro_batches: bool) -> bool:
    return not micro_batches if isinstance(source, HandedSource) else source.bounded


def check_windows(plan: Plan) -> None:
    """Raise `GraphError` if a streaming query with this plan has windows that would never be complete, or joins whose state
    would only grow."""
    without = operators_without_event_time(plan, micro_batches=True)
    for node in plan.nodes:
        if node.needs_event_time and node.name in without:
            if len(node.input_schemas) > 1:
                raise GraphError(
                    f"operator {node.name!r} joins by event time, and event time doesn't move in both of its inputs in this "
                    f"query, so that its state would only grow: call .with_watermark(column, delay) on both. A watermark of "
                    f"the DataFrame's own (withWatermark) is not used here"
                )
            if node.spec.kind == "over":
                raise GraphError(
                    f"operator {node.name!r} takes records in the order of event time, and event time doesn't move in this "
                    f"query, so that no record would ever be emitted and its state would only grow: call "
                    f".with_watermark(column, delay) on the input. A watermark of the DataFrame's own (withWatermark) is "
                    f"not used here"
                )
            raise GraphError(
                f"operator {node.name!r} has windows of event time, and event time doesn't move in this query, so that no "
                f"window would ever be complete and its state would only grow: call .with_watermark(column, delay) on the "
                f"input. A watermark of the DataFrame's own (withWatermark) is not used here"
            )


def warnings_of(plan: Plan) -> list[str]:
    """Return what to log when a job with this plan starts."""
    without = operators_without_event_time(plan, micro_batches=False)
    return [
        *(_warning(node) for node in plan.nodes if node.needs_event_time and node.name in without),
        *_windows_over_other_columns(plan),
    ]


def _windows_over_other_columns(plan: Plan) -> Iterator[str]:
    """Warn of windows over a column that was there beside the watermark's own, and so is not another name of it."""
    above: dict[int, list[Node]] = {}  # the watermark operators whose time a node has, by its id
    for node in sorted(plan.nodes, key=lambda node: node.id):
        for port, column in enumerate(node.window_columns):
            made = [each for edge in node.inputs if edge.port == port for each in above.get(edge.source, [])]
            followed = {each.watermark_column or "" for each in made}
            are_beside = followed <= {*node.input_schemas[port].names} and all(column in each.schema.names for each in made)
            if column is not None and followed and column not in followed and are_beside:
                yield (
                    f"operator {node.name!r} has windows over the column {column!r}, and the watermark above it follows "
                    f"{' and '.join(map(repr, sorted(followed)))}: a record is late if its {column!r} is behind that "
                    f"watermark. Use .with_watermark({column!r}, delay), unless both times are close and this is meant."
                )
        found = {each.id: each for edge in node.inputs for each in above.get(edge.source, [])}
        above[node.id] = [node] if node.assigns_time else [*found.values()]


def warning_of_timer(node: Node) -> str:
    """Return what to log when a function sets its first timer of event time."""
    return (
        f"operator {node.name!r} has set a timer of event time, and event time doesn't move there: no with_watermark is "
        f"above it, and its input has no end, so the timer doesn't fire. Use .with_watermark(column, delay) behind the "
        f"source, or set the timer with ctx.timers.processing_time(at)."
    )


def _warning(node: Node) -> str:
    if len(node.input_schemas) > 1:
        return (
            f"operator {node.name!r} joins by event time, and event time doesn't move in both of its inputs: no "
            f"with_watermark is above one of them, and it has no end, so what is kept for the join only grows, and what the "
            f"watermark completes is never emitted. Use .with_watermark(column, delay) behind both sources."
        )
    if node.spec.kind == "over":
        return (
            f"operator {node.name!r} takes records in the order of event time, and event time doesn't move there: no "
            f"with_watermark is above it, and its input has no end, so records are emitted only when the job is drained. "
            f"Use .with_watermark(column, delay) behind the source."
        )
    return (
        f"operator {node.name!r} has windows of event time, and event time doesn't move there: no with_watermark is "
        f"above it, and its input has no end, so the windows are complete only when the job is drained. Use "
        f".with_watermark(column, delay) behind the source."
    )
