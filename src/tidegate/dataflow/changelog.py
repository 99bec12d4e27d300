"""What the records of a stream mean, and who can work on them.

Most streams are *appended to*: each record is a fact of its own, and stays true. An aggregate without windows emits the new
result of a key whenever it changes. Its stream is *upserted*: a record replaces the one before with the same key. A stream
of *changes* has a column `row_kind`: a record is inserted, or takes an equal record back that was inserted before
(row_kinds.py). Counting or filtering upserts or changes as if they were facts gives wrong results, so this is checked when
the job is built (docs/adr/030 and 033).

Rules:
- What a node emits is changes if the node `retracts`, or else upserted if it has `upserts_by`, the columns of the key. If
  it has both, there is one row for each key at any time. Side outputs are appended to.
- An operator takes appended records, unless its spec lists others in `changelogs`. A sink lists what it takes itself.
- The updates of a key must stay in order: they go by the key (or a part of it), or forward to as many subtasks, and are
  not united.
- A record and the one that takes it back are equal, so they stay in order by any key, and in a union. They don't if batches
  are dealt out.
- `stream.as_append()` makes every update and change a record of its own; `stream.as_upserts(…)` is the user's word that
  records replace one another.

A key that its ttl removes is just not updated again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import pyarrow as pa

from tidegate.dataflow.graph import Edge, Node, Partitioning
from tidegate.dataflow.row_kinds import ROW_KIND
from tidegate.errors import GraphError, SchemaError


class Changelog(Enum):
    """What a record means for the records before it."""

    APPEND = "append"
    """Nothing: every record is a fact of its own."""

    UPSERT = "upsert"
    """It replaces the record before with the same key, if there is one."""

    RETRACT = "retract"
    """Its column `row_kind` says whether it is inserted ("+I"), or takes an equal record back ("-D")."""


APPEND_ONLY = frozenset({Changelog.APPEND})
APPEND_OR_RETRACT = frozenset({Changelog.APPEND, Changelog.RETRACT})
ANY = frozenset(Changelog)


@dataclass(frozen=True, slots=True)
class Meaning:
    """What records mean, and the key of which there is one row at a time, if there is such a key."""

    changelog: Changelog
    key: tuple[str, ...] = ()

    @property
    def retracts(self) -> bool:
        return self.changelog is Changelog.RETRACT


APPENDED = Meaning(Changelog.APPEND)


def meaning(nodes: Sequence[Node], *edges: Edge) -> Meaning:
    """Return what the records mean that travel on an edge, or on several that were united."""
    found = {_meaning(nodes, edge) for edge in edges}
    if any(each.retracts for each in found) and len(edges) > 1:
        return Meaning(Changelog.RETRACT)
    return found.pop() if len(found) == 1 else APPENDED


def _meaning(nodes: Sequence[Node], edge: Edge) -> Meaning:
    node = nodes[edge.source]
    if edge.upserts_by:
        return Meaning(Changelog.UPSERT, edge.upserts_by)
    if edge.as_append or edge.tag is not None:
        return APPENDED
    if node.retracts:
        # By another key, the rows of one key come from several subtasks.
        is_kept = edge.partitioning is not Partitioning.HASH or set(edge.key) <= set(node.upserts_by)
        return Meaning(Changelog.RETRACT, node.upserts_by if is_kept else ())
    return Meaning(Changelog.UPSERT, node.upserts_by) if node.upserts_by else APPENDED


def check_input(nodes: Sequence[Node], what: str, edges: Sequence[Edge], *, takes: frozenset[Changelog], sink: bool) -> None:
    """Check that an operator or sink can work on the records of its input."""
    for edge in edges:
        given = _meaning(nodes, edge)
        if given.changelog not in takes:
            raise GraphError(f"{what} takes {_taken(takes)}, and {_emits(nodes, edge)}; {_advice(given, takes, sink)}")
        if given.changelog is Changelog.UPSERT and _is_disordered(edge, given.key):
            raise GraphError(
                f"{what}: key_by({_quoted(edge.key)}) would bring the upserts by ({', '.join(given.key)}) of "
                f"{_named(nodes, edge)} out of order; use key_by on columns of that key, or omit it"
            )
        if given.retracts and ROW_KIND in edge.key:
            raise GraphError(
                f"{what}: key_by({_quoted(edge.key)}) would send a record and the one that takes it back to different "
                f"subtasks; omit {ROW_KIND!r}, or use .as_append() before key_by"
            )


def check_not_spread(nodes: Sequence[Node], node: Node, parallelism: Sequence[int]) -> None:
    """Check that no updates are dealt out over another number of subtasks, batch by batch. `parallelism` is by node."""
    for edge in node.inputs:
        given = _meaning(nodes, edge)
        ours, theirs = parallelism[node.id], parallelism[edge.source]
        if given != APPENDED and edge.partitioning is Partitioning.FORWARD and ours != theirs:
            what = "changes" if given.retracts else "upserts of a key"
            raise GraphError(
                f"{node.spec.kind} {node.name!r} has {ours} {'subtask' if ours == 1 else 'subtasks'}, and "
                f"{nodes[edge.source].name!r} has {theirs}, so that the {what} would come out of order; give both "
                f"the same parallelism, or use key_by({_quoted(given.key) or '…'}) between them"
            )


def check_ordered(
    nodes: Sequence[Node], where: str, edges: Sequence[Edge], reason: str, *, retracts_too: bool = False
) -> None:
    """Check that the records are not upserts, since here their order gets lost; with `retracts_too`, nor changes."""
    for edge in edges:
        given = _meaning(nodes, edge)
        if given.changelog is Changelog.UPSERT or (given.retracts and retracts_too):
            what = "insertions and deletions" if given.retracts else f"upserts by ({', '.join(given.key)})"
            raise GraphError(
                f"{where}: {nodes[edge.source].name!r} emits {what}, and {reason}; use "
                f".as_append() before it if every update shall be a record of its own"
            )


def check_no_row_kind(where: str, names: Sequence[str]) -> None:
    """Check that columns of what will be a stream of changes leave the name of the row kinds free."""
    if ROW_KIND in names:
        raise SchemaError(
            f"{where}: {ROW_KIND!r} is the name of the column that says which records are inserted or deleted, and there is "
            f"a column with that name already; give it another name, such as with select('{ROW_KIND} AS kind', …)"
        )


def check_reads_no_row_kind(where: str, given: Meaning, columns: Sequence[str], text: str) -> None:
    """Check that an expression over changes is the same for a record and for the one that takes it back."""
    if given.retracts and ROW_KIND in columns:
        raise SchemaError(
            f"{where}: {text!r} reads {ROW_KIND!r}, which says what a change means, and not what its record is; omit "
            f"it, or use .as_append() before if every change shall be a record of its own"
        )


def check_appended(nodes: Sequence[Node], where: str, edges: Sequence[Edge], reason: str) -> None:
    """Check that records which leave the pipeline are appended."""
    given = meaning(nodes, *edges)
    if given == APPENDED:
        return
    what = "changes, which insert and delete rows" if given.retracts else f"upserts by ({', '.join(given.key)})"
    left = (
        f"each with its {ROW_KIND}: +I inserts a row, and -D takes an equal one back"
        if given.retracts
        else "of which the last one of a key is its result"
    )
    raise GraphError(f"{where} {what}, and {reason}; return stream.as_append(), which has them as records, {left}")


def without_row_kind(schema: pa.Schema) -> pa.Schema:
    """Return the columns of the rows that changes insert and delete."""
    return schema.remove(schema.get_field_index(ROW_KIND)) if ROW_KIND in schema.names else schema


def _is_disordered(edge: Edge, key: Sequence[str]) -> bool:
    return edge.partitioning is Partitioning.HASH and not set(edge.key) <= set(key)


def _taken(takes: frozenset[Changelog]) -> str:
    if takes == APPEND_ONLY:
        return "records that are appended"
    words = {Changelog.APPEND: "appended records", Changelog.UPSERT: "upserts", Changelog.RETRACT: "changes"}
    return " or ".join(words[each] for each in Changelog if each in takes)


def _emits(nodes: Sequence[Node], edge: Edge) -> str:
    given = _meaning(nodes, edge)
    if given.retracts:
        return f"{_named(nodes, edge)} emits insertions and deletions: a deletion takes a row back that was inserted before"
    return (
        f"{_named(nodes, edge)} emits upserts by ({', '.join(given.key)}): each replaces the one before with that key"
        if given.key
        else f"{_named(nodes, edge)} emits records that are appended"
    )


def _advice(given: Meaning, takes: frozenset[Changelog], sink: bool) -> str:
    if given.changelog is Changelog.APPEND:
        return "use .as_upserts(…) if each record replaces the one before with the same key"
    every = "change" if given.retracts else "update"
    as_append = (
        f".as_append() to write every {every} as a record of its own"
        if sink
        else f".as_append() if every {every} shall be a record of its own"
    )
    if sink:
        return (
            f"use a sink with Changelog.{given.changelog.name} in its `changelogs`, as tg.sinks.collect() and "
            f"tg.sinks.print() have, or {as_append}"
        )
    if not given.retracts and Changelog.RETRACT in takes:
        return f"use .as_changelog(name), which takes a replaced row back, or {as_append}"
    return f"use {as_append}"


def _named(nodes: Sequence[Node], edge: Edge) -> str:
    return f"{nodes[edge.source].spec.kind} {nodes[edge.source].name!r}"


def _quoted(key: Sequence[str]) -> str:
    return ", ".join(map(repr, key))
