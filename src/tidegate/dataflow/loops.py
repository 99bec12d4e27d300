"""The loops of a logical graph: which operators are in them.

The graph has no cycles; a loop is a head and the tail that names it. In a loop is whatever lies on a way from its head to
its tail. A way may go through the feedback of a loop that was built in the body of this one, since records of this one
may go round there; never through that of an enclosing one. By this order loops that were built in each other's bodies are
nested, whatever they read from each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tidegate.dataflow.graph import Node


@dataclass(frozen=True, slots=True)
class LogicalLoop:
    """`nodes` are the ids of all that is in it, head and tail included."""

    head: Node
    tail: Node
    nodes: frozenset[int]


def loops_in(nodes: Sequence[Node]) -> tuple[LogicalLoop, ...]:
    """In the order of their heads, so that an enclosing loop comes before those in it."""
    ends = sorted(_ends(nodes))
    return tuple(LogicalLoop(nodes[head], nodes[tail], _between(nodes, ends, head, tail)) for head, tail in ends)


def unfinished_loops(nodes: Sequence[Node]) -> list[Node]:
    """Heads without a tail: of loops whose bodies failed, or are still being built."""
    finished = {node.loop_head for node in nodes}
    return [node for node in nodes if node.begins_loop and node.id not in finished]


def entered_sideways(nodes: Sequence[Node]) -> list[tuple[LogicalLoop, LogicalLoop]]:
    """Loops (inner, outer) such that records of the outer one get into the inner one, but not at its head. The laps of the
    outer one, which find out when it has ended, would have no way in."""
    loops = loops_in(nodes)
    return [
        (inner, outer)
        for number, outer in enumerate(loops)
        for inner in loops[number + 1 :]
        if inner.head.id in outer.nodes and not any(edge.source in outer.nodes for edge in inner.head.inputs)
    ]


def reached_from(head: int, nodes: Sequence[Node]) -> frozenset[int]:
    """What gets records, sooner or later, of a head whose loop is being built; itself included."""
    ends = _ends(nodes)
    return _reached(head, _links(nodes, [(inner, tail) for inner, tail in ends if inner > head]))


def _ends(nodes: Iterable[Node]) -> list[tuple[int, int]]:
    """The ids of the loops' heads and tails."""
    return [(node.loop_head, node.id) for node in nodes if node.loop_head is not None]


def _between(nodes: Sequence[Node], ends: Iterable[tuple[int, int]], head: int, tail: int) -> frozenset[int]:
    inner = [(of_inner, tail_of_inner) for of_inner, tail_of_inner in ends if head < of_inner and tail_of_inner < tail]
    links = _links(nodes, inner)
    return _reached(head, links) & _reached(tail, [(target, source) for source, target in links])


def _links(nodes: Sequence[Node], ends: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(from, to), the feedback of these loops included."""
    links = [(edge.source, node.id) for node in nodes for edge in node.inputs]
    return links + [(tail, head) for head, tail in ends]


def _reached(start: int, links: Iterable[tuple[int, int]]) -> frozenset[int]:
    behind: defaultdict[int, list[int]] = defaultdict(list)
    for source, target in links:
        behind[source].append(target)
    found, left = {start}, [start]
    while left:
        new = set(behind[left.pop()]) - found
        found |= new
        left += new
    return frozenset(found)
