"""What changed between two snapshots, row by row.

Keyed state is compared part by part (snapshots/state_changes.py), so that a part bounds the memory. A key is *added*,
*removed*, *changed* or *unchanged*. State without keys is compared as a whole, as a bag of rows: a changed row is one that
was removed and one that was added. Values are compared, not bytes: the order of a map's entries doesn't count, NaN equals
NaN, and a number equals itself in a wider type.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from tidegate.snapshots.manifest import ROWS, StateEntry
from tidegate.snapshots.savepoints import export_snapshot
from tidegate.snapshots.snapshot import Snapshot
from tidegate.snapshots.state_changes import ADDED, CHANGED, REMOVED, Changes, ItemChanges, KeyedChanges
from tidegate.state.sections import by_text, row_identity
from tidegate.store.local import LocalStore
from tidegate.types import to_list

_T = TypeVar("_T")


@contextmanager
def readable(snapshot: Snapshot) -> Iterator[Snapshot]:
    """Provide the snapshot in a form that is cheap to read by key-group many times. Native files would be opened as a
    database each time; if there are any, the snapshot is first copied in canonical form to a temporary folder."""
    if all(file.form == ROWS for file in snapshot.manifest.files()):
        yield snapshot
        return
    with TemporaryDirectory(prefix="tidegate-diff-") as folder:
        store, created_ms = LocalStore(folder), snapshot.manifest.created_ms
        yield Snapshot(store, export_snapshot(snapshot, store, created_ms=created_ms, rewrite=Snapshot.rewrite))


@dataclass(slots=True)
class StateDifference:
    """How the rows of a state differ. `examples` are a few keys with both values; `note` is why rows weren't compared."""

    operator: str
    state: str
    added: int = 0
    removed: int = 0
    changed: int = 0
    unchanged: int = 0
    note: str = ""
    examples: list[dict[str, Any]] = field(default_factory=list)

    def add(self, changes: Changes, most: int) -> None:
        """Count the rows of a part, and keep examples of them, up to `most` in all."""
        counts = Counter(changes.kinds)
        self.added += counts[ADDED]
        self.removed += counts[REMOVED]
        self.changed += counts[CHANGED]
        self.unchanged += changes.unchanged
        shown = slice(0, most - len(self.examples))
        keys = [None] * len(changes.kinds) if changes.keys is None else to_list(changes.keys[shown])
        if changes.beside:
            keys = list(zip(keys, *(to_list(column[shown]) for column in changes.beside), strict=True))
        for kind, key, was, now in zip(
            changes.kinds[shown], keys, to_list(changes.before[shown]), to_list(changes.after[shown]), strict=False
        ):
            example = {"key": key, "before": [] if kind == ADDED else [was], "after": [] if kind == REMOVED else [now]}
            self.examples.append(example)


def compare(
    one: Snapshot,
    other: Snapshot,
    *,
    examples: int = 0,
    on_step: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Iterator[StateDifference]:
    """Compare state by state, from `one` to `other`. `on_step` gets the state, and the steps done and in all."""
    for operator in _union(one.manifest.operators, other.manifest.operators):
        before, after = _states_of(one, operator), _states_of(other, operator)
        for state in _union(before, after):
            known = [side[state] for side in (before, after) if state in side]
            was, now = known[0], known[-1]
            difference = StateDifference(operator, state)
            sides = (
                one if state in before else _emptied(other, operator),
                other if state in after else _emptied(one, operator),
            )
            if was.kind != now.kind:
                difference.note = f"not compared: it was {was.kind} and is {now.kind}"
            elif was.kind != "keyed":
                difference.add(ItemChanges(*sides, operator, was, now).compare(()), examples)
            elif was.arrow_schema().field("key").type != now.arrow_schema().field("key").type:
                difference.note = "not compared: the type of the key differs"
            elif (one_by := row_identity(was.arrow_schema())) != (other_by := row_identity(now.arrow_schema())):
                difference.note = f"not compared: only one side is {by_text(max(one_by, other_by))}"
            else:
                changes = KeyedChanges(*sides, operator, was, now)
                parts = changes.parts(None)
                for index, part in enumerate(parts):
                    difference.add(changes.compare(part), examples)
                    on_step(f"{operator} {state}", index + 1, len(parts))
            yield difference


def structure(one: Snapshot, other: Snapshot) -> list[str]:
    """Return the differences that are not in rows: operators, states, their types, parallelism, key-groups."""
    found: list[str] = []
    before, after = one.manifest, other.manifest
    if before.job != after.job:
        found.append(f"the job was {before.job!r} and is {after.job!r}")
    if before.key_group_count != after.key_group_count:
        found.append(f"there were {before.key_group_count} key-groups and are {after.key_group_count}")
    for operator in _union(before.operators, after.operators):
        if operator not in after.operators:
            found.append(f"operator {operator!r} is gone")
        elif operator not in before.operators:
            found.append(f"operator {operator!r} is new")
        else:
            was, now = before.operators[operator].parallelism, after.operators[operator].parallelism
            if was != now:
                found.append(f"operator {operator!r} had parallelism {was} and has {now}")
            found += _states(operator, _states_of(one, operator), _states_of(other, operator))
    return found


def _states_of(snapshot: Snapshot, operator: str) -> dict[str, StateEntry]:
    entry = snapshot.manifest.operators.get(operator)
    return {} if entry is None else {state.name: state for state in entry.states}


def _states(operator: str, before: dict[str, StateEntry], after: dict[str, StateEntry]) -> Iterator[str]:
    for state in _union(before, after):
        where = f"state {state!r} of operator {operator!r}"
        if state not in after:
            yield f"{where} is gone"
        elif state not in before:
            yield f"{where} is new"
        else:
            was, now = before[state], after[state]
            if (was.kind, was.shape) != (now.kind, now.shape):
                yield f"{where} was {was.kind} {was.shape} and is {now.kind} {now.shape}"
            if was.arrow_schema() != now.arrow_schema():
                yield f"{where} had the type ({was.type}) and has ({now.type})"


def _emptied(snapshot: Snapshot, operator: str) -> Snapshot:
    """Return a snapshot whose operator has the same states, and no rows."""
    entry = snapshot.manifest.operators[operator]
    pieces = tuple(replace(piece, files=(), item_counts={}) for piece in entry.pieces)
    operators = {**snapshot.manifest.operators, operator: replace(entry, pieces=pieces)}
    return Snapshot(snapshot.store, replace(snapshot.manifest, operators=operators, savepoint=None))


def _union(one: Iterable[_T], other: Iterable[_T]) -> list[_T]:
    """Return the items of `one`, then those that only `other` has."""
    return list(dict.fromkeys((*one, *other)))
