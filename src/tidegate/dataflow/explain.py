"""Show the logical graph, the optimised graph and the physical plan as text.

A loop isn't drawn as a cycle: its head has one more input, the feedback, and what is in a loop is labelled with it.

No line is wider than 120 columns: schemas are wrapped, names are cut. The text is for people; nothing parses it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from tidegate.dataflow.fusing import fused_runs
from tidegate.dataflow.graph import Edge, LogicalGraph, Node, Partitioning
from tidegate.dataflow.loops import LogicalLoop, loops_in
from tidegate.dataflow.plan import Plan, PlanEdge, Vertex
from tidegate.keygroups import key_groups_of
from tidegate.state.descriptors import Descriptor, descriptors_of
from tidegate.state.sections import StateKind
from tidegate.types import ddl_of

WIDTH = 120
_SLOTS_SHOWN = 8
_CELL_LIMIT = 56
_FEEDBACK = "feedback"
_KEPT_SPACE = "\N{NO-BREAK SPACE}"


def explain_logical(graph: LogicalGraph) -> str:
    """Return what the user wrote: operators with their inputs, states and schemas."""
    loops = loops_in(graph.nodes)
    lines = [f"== Logical graph: {_count(len(graph.nodes), 'operator')}{_loop_count(loops)} =="]
    for node in graph.nodes:
        lines += ["", _cut(f"[{node.id}] {node.name} · {_what(graph, node)}", WIDTH)]
        lines += _labelled(_facts(graph, node, loops))
    return "\n".join(lines)


def explain_optimised(plan: Plan) -> str:
    """Return what the optimiser made of it: chains of operators, and the edges between them."""
    operator_count = sum(len(vertex.nodes) for vertex in plan.vertices)
    lines = [
        f"== Optimised graph: {_count(operator_count, 'operator')} in "
        f"{_count(len(plan.vertices), 'vertex', 'vertices')}, {_count(len(plan.edges), 'edge')}"
        f"{_loop_count(plan.loops)} =="
    ]
    for vertex in plan.vertices:
        runs = {node.id: run[0].name for run in fused_runs(plan, vertex) for node in run[1:]}
        lines += ["", f"v{vertex.id} · parallelism {vertex.parallelism}"]
        lines += _labelled(_in_loops(loop.name for loop in plan.loops_of(vertex.id)))
        lines += _labelled(_plan_input(plan, edge) for edge in plan.inputs_of(vertex))
        chain = _table((stem + node.name, node.spec.kind, _notes(node, runs.get(node.id))) for stem, node in _tree(vertex))
        lines += [_cut(f"    {'' if index else 'chain':8}{row}", WIDTH) for index, row in enumerate(chain)]
    return "\n".join(lines)


def explain_physical(plan: Plan) -> str:
    """Return what is deployed: subtasks in slots, key-group ranges, channels."""
    channel_count = sum(_channel_counts(plan, edge)[0] for edge in plan.edges)
    lines = [
        f"== Physical plan: {_count(plan.slots, 'slot')}, {_count(plan.subtask_count(), 'subtask')}, "
        f"{_count(channel_count, 'channel')}, {_count(plan.key_group_count, 'key-group')}"
        f"{_loop_count(plan.loops)} ==",
        "",
    ]
    lines += _table([("slot", "subtask", "operators", "key-groups"), *_slot_rows(plan)])
    if plan.edges:
        lines += ["", *_table([("edge", "from", "to", "channels", "records go"), *_edge_rows(plan)])]
    if plan.loops:
        lines += ["", *_table([("loop", "head", "tail", "name", "vertices"), *_loop_rows(plan)])]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------ operators


def _what(graph: LogicalGraph, node: Node) -> str:
    """Return the operator's kind and function, and its parallelism if the user gave one."""
    spec: Any = node.spec
    words = [spec.kind]
    if node.assigns_time:
        idle = "" if spec.idle_after_ms is None else f", idle after {_duration(spec.idle_after_ms)}"
        made = (
            f"by {getattr(spec.by, '__name__', type(spec.by).__name__)}"
            if spec.column is None
            else f"on {spec.column}, delay {_duration(spec.delay_ms)}"
        )
        ahead = "" if spec.group is None else f", at most {_duration(spec.max_ahead_ms)} ahead of {spec.group}"
        words.append(f"{made}{idle}{ahead}")
    elif (end := node.source or node.sink) is not None:
        words.append(type(end).__name__)
    elif node.loop_head is not None:
        words.append(f"to [{node.loop_head}] {graph.node(node.loop_head).name}")
    elif (text := getattr(spec, "text", None)) is not None:
        words.append(text)
    elif not node.begins_loop:
        function = getattr(spec, "function", None)
        words.append(getattr(function, "__name__", type(function).__name__))
    if node.parallelism is not None:
        words.append(f"parallelism {node.parallelism}")
    return " · ".join(words)


def _facts(graph: LogicalGraph, node: Node, loops: Sequence[LogicalLoop]) -> Iterator[tuple[str, str]]:
    yield from _in_loops(loop.head.name for loop in loops if node.id in loop.nodes)
    for edge in node.inputs:
        way = _way(edge.partitioning, edge.key)
        yield _port(node, edge.port), f"{_output(graph, edge)}, {way}{_taken_as(graph, edge)}"
    for loop in loops:
        if loop.head is node:
            yield _port(node, 0), f"[{loop.tail.id}] {loop.tail.name}, {_FEEDBACK}"
    states = _states_of(node)
    width = max((len(str(state.name)) for state in states), default=0)
    for state in states:
        yield "state", f"{state.name!s:{width}}  {_state_type(state)}"
    if node.schema.names:
        yield "output", _wrappable(node.schema)
    if node.retracts:
        by = f", one row for each {', '.join(node.upserts_by)}" if node.upserts_by else ""
        yield "emits", f"insertions and deletions{by}"
    elif node.upserts_by:
        yield "emits", f"upserts by {', '.join(node.upserts_by)}"
    for tag, schema in node.side_schemas.items():
        yield "side", f"{tag}: {_wrappable(schema)}"


def _in_loops(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the names of loops, which are in order from the outermost to the innermost, with their label."""
    inside = " › ".join(names)
    if inside:
        yield "in loop", inside


def _loop_count(loops: Sequence[object]) -> str:
    return f", {_count(len(loops), 'loop')}" if loops else ""


def _port(node: Node, port: int) -> str:
    return "input" if len(node.input_schemas) == 1 else ("left", "right")[port]


def _output(graph: LogicalGraph, edge: Edge) -> str:
    side = "" if edge.tag is None else f" side output {edge.tag}"
    return f"[{edge.source}] {graph.node(edge.source).name}{side}"


def _way(partitioning: Partitioning, key: Sequence[str]) -> str:
    return f"{partitioning.value} by {', '.join(key)}" if key else partitioning.value


def _taken_as(graph: LogicalGraph, edge: Edge) -> str:
    """Return what the records are taken for, if that isn't what the operator above emits."""
    if edge.upserts_by:
        return f", as upserts by {', '.join(edge.upserts_by)}"
    above = graph.node(edge.source)
    return ", as appended records" if edge.as_append and (above.retracts or above.upserts_by) else ""


def _states_of(node: Node) -> list[Descriptor]:
    function = getattr(node.spec, "function", None)
    return list(node.descriptors if function is None else descriptors_of(function).values())


def _state_type(state: Descriptor) -> str:
    types = ddl_of(state.item) if state.map_key is None else f"{ddl_of(state.map_key)}, {ddl_of(state.item)}"
    shape = f"{state.shape}<{types}>"
    match state.kind:
        case StateKind.KEYED:
            return f"keyed {shape}"
        case StateKind.BROADCAST:
            return f"broadcast {shape}"
        case StateKind.SPLIT | StateKind.WHOLE | StateKind.UNION:
            return f"operator {shape}, redistributed by {state.kind.value}"


def _notes(node: Node, fused_with: str | None) -> str:
    return _states_in_short(node) if fused_with is None else f"in one pass with {fused_with}"


def _states_in_short(node: Node) -> str:
    names = [str(state.name) for state in _states_of(node)]
    return f"state {', '.join(names)}" if names else ""


# ------------------------------------------------------------------------------------------------------- vertices


def _plan_input(plan: Plan, edge: PlanEdge) -> tuple[str, str]:
    source = next(node for node in plan.vertices[edge.source_vertex].nodes if node.id == edge.source_node)
    if edge.feedback:
        return _port(source, 0), f"v{edge.source_vertex} {source.name}, {_FEEDBACK}: {_wrappable(source.input_schemas[0])}"
    schema = source.schema if edge.tag is None else source.side_schemas[edge.tag]
    side = "" if edge.tag is None else f" side output {edge.tag}"
    target = plan.vertices[edge.target_vertex]
    way = _way(edge.partitioning, edge.key)
    if edge.partitioning is Partitioning.REBALANCE:
        way += f" {plan.vertices[edge.source_vertex].parallelism} → {target.parallelism}"
    return _port(target.first, edge.port), f"v{edge.source_vertex} {source.name}{side}, {way}: {_wrappable(schema)}"


def _tree(vertex: Vertex) -> Iterator[tuple[str, Node]]:
    """Yield the vertex's nodes depth first, each with the branch of the tree that it is on."""
    below: dict[int, list[Node]] = {node.id: [] for node in vertex.nodes}
    for node in vertex.nodes[1:]:
        below[node.inputs[0].source].append(node)

    def walk(node: Node, stem: str, indent: str) -> Iterator[tuple[str, Node]]:
        yield stem, node
        for index, child in enumerate(below[node.id]):
            last = index == len(below[node.id]) - 1
            tag = child.inputs[0].tag
            branch = ("└─ " if last else "├─ ") + ("" if tag is None else f"({tag}) ")
            yield from walk(child, indent + branch, indent + ("   " if last else "│  "))

    return walk(vertex.first, "", "")


# ------------------------------------------------------------------------------------------------- slots, channels


def _slot_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Yield all slots if there are few, otherwise the first ones and the last."""
    left_out = plan.slots - _SLOTS_SHOWN if plan.slots > _SLOTS_SHOWN else 0
    for slot in range(plan.slots):
        if left_out and slot == _SLOTS_SHOWN - 1:
            yield "…", "", f"{_count(left_out, 'more slot')}", ""
        if left_out and _SLOTS_SHOWN - 1 <= slot < plan.slots - 1:
            continue
        first = str(slot)
        for vertex in plan.subtasks_in(slot):
            yield first, f"v{vertex.id}[{slot}]", vertex.name, _key_groups(plan, vertex, slot)
            first = ""
        if first:
            yield first, "none", "", ""


def _key_groups(plan: Plan, vertex: Vertex, subtask: int) -> str:
    if not any(edge.partitioning is Partitioning.HASH for edge in vertex.first.inputs):
        return ""
    groups = key_groups_of(subtask, parallelism=vertex.parallelism, key_group_count=plan.key_group_count)
    return f"[{groups.start}, {groups.stop})"


def _edge_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    for edge in plan.edges:
        source, target = plan.vertices[edge.source_vertex], plan.vertices[edge.target_vertex]
        total, local = _channel_counts(plan, edge)
        way = _FEEDBACK if edge.feedback else _way(edge.partitioning, edge.key)
        side = "" if edge.tag is None else f" ({edge.tag})"
        port = f" {_port(target.first, edge.port)}" if len(target.first.input_schemas) > 1 else ""
        yield (
            f"e{edge.id}",
            f"v{source.id} × {source.parallelism}{side}",
            f"v{target.id} × {target.parallelism}{port}",
            f"{total}, {'all' if local == total else local} in memory",
            way,
        )


def _loop_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    for loop in plan.loops:
        vertices = ", ".join(f"v{vertex}" for vertex in sorted(loop.vertices))
        yield f"l{loop.id}", f"v{loop.head_vertex}", f"v{loop.tail_vertex}", loop.name, vertices


def _channel_counts(plan: Plan, edge: PlanEdge) -> tuple[int, int]:
    """Return how many channels the edge has, and how many of them stay within a slot."""
    channels = [
        channel
        for upstream in range(plan.vertices[edge.source_vertex].parallelism)
        for channel in plan.targets(edge, upstream)
    ]
    return len(channels), sum(channel.upstream == channel.downstream for channel in channels)


# --------------------------------------------------------------------------------------------------------- layout


def _labelled(facts: Iterable[tuple[str, str]]) -> list[str]:
    """Return the lines of facts, with each label on the first of its lines only."""
    lines: list[str] = []
    before = ""
    for label, text in facts:
        wrapped = textwrap.wrap(text, WIDTH - 14, subsequent_indent="  ", break_on_hyphens=False)
        for line in wrapped:
            lines.append(f"    {'' if label == before else label:8}{line.replace(_KEPT_SPACE, ' ')}")
            before = label
    return lines


def _wrappable(schema: pa.Schema) -> str:
    """Return the schema's DDL, with spaces that `textwrap` breaks only between columns."""
    return ", ".join(ddl_of(pa.schema([field])).replace(" ", _KEPT_SPACE) for field in schema)


def _table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return lines with columns as wide as their widest cell. A line that is too long is cut."""
    cells = [[_cut(cell, _CELL_LIMIT) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        _cut("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(), WIDTH) for row in cells
    ]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _duration(duration_ms: int) -> str:
    return f"{duration_ms // 1000} s" if duration_ms % 1000 == 0 and duration_ms else f"{duration_ms} ms"
