"""What changed between two snapshots, row by row.

Keyed state is compared a few key-groups at a time, so these bound the memory: one group if there are at most `MAX_SLICES`.
The backends, chains and parallelisms of the two snapshots may differ.

A key with one row in each snapshot is *changed* or *unchanged*; otherwise rows are *added* or *removed*. State without keys
is compared as a whole, as a bag of rows: a changed row is one that was removed and one that was added. Values are compared,
not bytes: the order of a map's entries doesn't count, NaN equals NaN, and a number equals itself in a wider type.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import pyarrow as pa

from tidegate.snapshots.manifest import ROWS, StateEntry
from tidegate.snapshots.savepoints import export_snapshot
from tidegate.snapshots.snapshot import Snapshot
from tidegate.snapshots.state_changes import comparable
from tidegate.store.local import LocalStore
from tidegate.types import to_list

MAX_SLICES = 1024

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
            difference = StateDifference(operator, state)
            known = [side[state] for side in (before, after) if state in side]
            if len({each.kind for each in known}) > 1:
                difference.note = f"not compared: it was {known[0].kind} and is {known[1].kind}"
            elif known[0].kind != "keyed":
                _compare_bags(difference, _rows(one, operator, state), _rows(other, operator, state), examples)
            elif len({each.arrow_schema().field("key").type for each in known}) > 1:
                difference.note = "not compared: the type of the key differs"
            else:
                _compare_keyed(difference, one, other, examples, on_step)
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


def _rows(snapshot: Snapshot, operator: str, state: str, *, subtask: int = 0, parallelism: int = 1) -> pa.Table | None:
    """Return the rows of a state, None if the snapshot doesn't have it."""
    found = _states_of(snapshot, operator).get(state)
    if found is None:
        return None
    batches = snapshot.rows(operator, subtask=subtask, parallelism=parallelism)[state]
    return pa.Table.from_batches(batches, schema=found.arrow_schema())


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


def _compare_keyed(
    difference: StateDifference, one: Snapshot, other: Snapshot, examples: int, on_step: Callable[[str, int, int], None]
) -> None:
    counts = {one.manifest.key_group_count, other.manifest.key_group_count}
    # If the numbers of key-groups differ, a key is in different groups, so everything is compared at once.
    slices = min(MAX_SLICES, *counts) if len(counts) == 1 else 1
    for index in range(slices):
        before, after = (
            _rows(side, difference.operator, difference.state, subtask=index, parallelism=slices) for side in (one, other)
        )
        _compare_by_key(difference, before, after, examples)
        on_step(f"{difference.operator} {difference.state}", index + 1, slices)


def _compare_by_key(difference: StateDifference, before: pa.Table | None, after: pa.Table | None, examples: int) -> None:
    if before is not None and after is not None and before.equals(after):
        difference.unchanged += before.num_rows
        return
    was, now = _by_key(before), _by_key(after)
    room = examples - len(difference.examples)
    differing: list[Hashable] = []
    for key in _union(was, now):
        if not _count(difference, was.get(key) or Counter(), now.get(key) or Counter()) and len(differing) < room:
            differing.append(key)
    if differing:
        originals = [_originals(table, set(differing)) for table in (before, after)]
        for key in differing:
            shown = next(found[key][0] for found in originals if key in found)
            values = [found[key][1] if key in found else [] for found in originals]
            difference.examples.append({"key": shown, "before": values[0], "after": values[1]})


def _count(difference: StateDifference, before: Counter[Hashable], after: Counter[Hashable]) -> bool:
    """Count the rows of one key, and return whether they are the same."""
    if before == after:
        difference.unchanged += before.total()
        return True
    difference.unchanged += (before & after).total()
    gone, new = (before - after).total(), (after - before).total()
    changed = min(gone, new)
    difference.changed += changed
    difference.removed += gone - changed
    difference.added += new - changed
    return False


def _by_key(table: pa.Table | None) -> dict[Hashable, Counter[Hashable]]:
    found: dict[Hashable, Counter[Hashable]] = {}
    for key, value in _pairs(table):
        found.setdefault(comparable(key), Counter())[comparable(value)] += 1
    return found


def _originals(table: pa.Table | None, keys: set[Hashable]) -> dict[Hashable, tuple[Any, list[Any]]]:
    """Return each of these keys, and its values, as the user's types have them."""
    found: dict[Hashable, tuple[Any, list[Any]]] = {}
    for key, value in _pairs(table):
        if (same := comparable(key)) in keys:
            found.setdefault(same, (key, []))[1].append(value)
    return found


def _pairs(table: pa.Table | None) -> Iterator[tuple[Any, Any]]:
    for batch in () if table is None else table.to_batches():
        yield from zip(to_list(batch.column("key")), to_list(batch.column("value")), strict=True)


def _compare_bags(difference: StateDifference, before: pa.Table | None, after: pa.Table | None, examples: int) -> None:
    was, now = _bag(before), _bag(after)
    gone, new = was - now, now - was
    difference.unchanged += (was & now).total()
    difference.removed += gone.total()
    difference.added += new.total()
    for table, rows, place in ((before, gone, "before"), (after, new, "after")):
        for value in _values(table):
            if rows[comparable(value)] and len(difference.examples) < examples:
                rows[comparable(value)] -= 1
                difference.examples.append({"key": None, "before": [], "after": [], place: [value]})


def _bag(table: pa.Table | None) -> Counter[Hashable]:
    return Counter(map(comparable, _values(table)))


def _values(table: pa.Table | None) -> Iterator[Any]:
    for batch in () if table is None else table.to_batches():
        yield from to_list(batch.column("value"))


def _union(one: Iterable[_T], other: Iterable[_T]) -> list[_T]:
    """Return the items of `one`, then those that only `other` has."""
    return list(dict.fromkeys((*one, *other)))
