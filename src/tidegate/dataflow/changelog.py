"""What the records of a stream mean, and who can work on them.

Most streams are *appended to*: each record is a fact of its own, and stays true. An aggregate without windows emits the new
result of a key whenever it changes. Its stream is *upserted*: a record replaces the one before with the same key. Counting
or filtering such records as if they were facts gives wrong results, so this is checked when the job is built (docs/adr/030).

Rules:
- What a node emits is upserted if the node has `upserts_by`, the columns of the key. Side outputs are appended to.
- An operator takes appended records, unless its spec lists others in `changelogs`. A sink lists what it takes itself.
- The updates of a key must stay in order: they go by the key (or a part of it), or forward to as many subtasks, and are
  not united.
- `stream.as_append()` makes every update a record of its own.

There are no deletions: a key that its ttl removes is just not updated again.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from tidegate.dataflow.graph import Edge, Node, Partitioning
from tidegate.errors import GraphError


class Changelog(Enum):
    """What a record means for the records before it."""

    APPEND = "append"
    """Nothing: every record is a fact of its own."""

    UPSERT = "upsert"
    """It replaces the record before with the same key, if there is one."""


APPEND_ONLY = frozenset({Changelog.APPEND})
ANY = frozenset(Changelog)


def upserts_by(nodes: Sequence[Node], edge: Edge) -> tuple[str, ...]:
    """Return the key of the upserts that travel on an edge; empty if its records are appended."""
    return () if edge.as_append or edge.tag is not None else nodes[edge.source].upserts_by


def check_input(nodes: Sequence[Node], what: str, edges: Sequence[Edge], *, takes: frozenset[Changelog], sink: bool) -> None:
    """Check that an operator or sink can work on the records of its input."""
    for edge in edges:
        key = upserts_by(nodes, edge)
        if not key:
            continue
        source = f"{nodes[edge.source].spec.kind} {nodes[edge.source].name!r}"
        if Changelog.UPSERT not in takes:
            advice = (
                "use a sink that takes upserts, or .as_append() to write every update as a record of its own"
                if sink
                else "use .as_append() if every update shall be a record of its own"
            )
            raise GraphError(
                f"{what} takes records that are appended, and {source} emits upserts by ({', '.join(key)}): each "
                f"replaces the one before with that key; {advice}"
            )
        if edge.partitioning is Partitioning.HASH and not set(edge.key) <= set(key):
            raise GraphError(
                f"{what}: key_by({', '.join(map(repr, edge.key))}) would bring the upserts by ({', '.join(key)}) of "
                f"{source} out of order; use key_by on columns of that key, or omit it"
            )


def check_not_spread(nodes: Sequence[Node], node: Node, parallelism: Sequence[int]) -> None:
    """Check that no upserts are dealt out over another number of subtasks, batch by batch. `parallelism` is by node."""
    for edge in node.inputs:
        key = upserts_by(nodes, edge)
        ours, theirs = parallelism[node.id], parallelism[edge.source]
        if key and edge.partitioning is Partitioning.FORWARD and ours != theirs:
            raise GraphError(
                f"{node.spec.kind} {node.name!r} has {ours} {'subtask' if ours == 1 else 'subtasks'}, and "
                f"{nodes[edge.source].name!r} has {theirs}, so that the upserts of a key would come out of order; give both "
                f"the same parallelism, or use key_by({', '.join(map(repr, key))}) between them"
            )


def check_ordered(nodes: Sequence[Node], where: str, edges: Sequence[Edge], reason: str) -> None:
    """Check that the records are not upserts, since here their order gets lost."""
    for edge in edges:
        if key := upserts_by(nodes, edge):
            raise GraphError(
                f"{where}: {nodes[edge.source].name!r} emits upserts by ({', '.join(key)}), and {reason}; use "
                f".as_append() before it if every update shall be a record of its own"
            )
