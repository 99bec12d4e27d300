"""The loops of a logical graph: which operators are in them.

The graph has no cycles; a loop is a head and the tail that names it. Whatever lies on a path from its head to its tail is
in the loop. A path may go through the feedback of a loop that was built in its body, since its records may go round there,
but never through the feedback of an enclosing loop. So loops are nested as their bodies are, whatever they read from each
other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tidegate.dataflow.graph import Node


@dataclass(frozen=True, slots=True)
class LogicalLoop:
    """A loop. `nodes` are the ids of all nodes in it, including head and tail."""

    head: Node
    tail: Node
    nodes: frozenset[int]


def loops_in(nodes: Sequence[Node]) -> tuple[LogicalLoop, ...]:
    """Return the loops in the order of their heads, so that an enclosing loop comes before the loops in it."""
    ends = sorted(_ends(nodes))
    return tuple(LogicalLoop(nodes[head], nodes[tail], _between(nodes, ends, head, tail)) for head, tail in ends)


def unfinished_loops(nodes: Sequence[Node]) -> list[Node]:
    """Return the heads without a tail: those of loops whose bodies failed, or are still being built."""
    finished = {node.loop_head for node in nodes}
    return [node for node in nodes if node.begins_loop and node.id not in finished]


def entered_sideways(nodes: Sequence[Node]) -> list[tuple[LogicalLoop, LogicalLoop]]:
    """Return pairs of loops (inner, outer) such that records of the outer loop get into the inner loop, but not at its head.
    The laps of the outer loop, which find out when it has ended, could not enter the inner one."""
    loops = loops_in(nodes)
    return [
        (inner, outer)
        for number, outer in enumerate(loops)
        for inner in loops[number + 1 :]
        if inner.head.id in outer.nodes and not any(edge.source in outer.nodes for edge in inner.head.inputs)
    ]


def reached_from(head: int, nodes: Sequence[Node]) -> frozenset[int]:
    """Return the nodes that records of `head` reach, including itself, while its loop is being built."""
    ends = _ends(nodes)
    return _reached(head, _links(nodes, [(inner, tail) for inner, tail in ends if inner > head]))


def _ends(nodes: Iterable[Node]) -> list[tuple[int, int]]:
    """Return the ids of the heads and tails of loops."""
    return [(node.loop_head, node.id) for node in nodes if node.loop_head is not None]


def _between(nodes: Sequence[Node], ends: Iterable[tuple[int, int]], head: int, tail: int) -> frozenset[int]:
    inner = [(of_inner, tail_of_inner) for of_inner, tail_of_inner in ends if head < of_inner and tail_of_inner < tail]
    links = _links(nodes, inner)
    return _reached(head, links) & _reached(tail, [(target, source) for source, target in links])


def _links(nodes: Sequence[Node], ends: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return links (from, to), including the feedback of these loops."""
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
