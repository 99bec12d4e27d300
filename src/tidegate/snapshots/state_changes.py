"""What changed in a state from one snapshot to another, as a table.

Keyed state: a row for each key that was *added*, *removed* or *changed*, with the key's columns, the values `before` and
`after` (lists and maps as a whole) and the `key_group`. Columnar state with windows has a row for each key and `window`, and
records have one for each `position`.
Values are compared, not bytes: the order of a map's entries and expiry times don't count, and NaN equals NaN. State without
keys is compared as a bag of values: a changed value is one that was removed and one that was added.

A part is compared as a whole by Arrow and numpy, without Python for each row unless values hold maps. The backends, chains
and parallelisms of the two snapshots may differ. If their numbers of key-groups differ, the same key is in another
key-group, so everything is one part.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.errors import JobError, NotFound, SchemaError
from tidegate.hashing import hash_columns
from tidegate.keygroups import groups_of
from tidegate.snapshots.manifest import StateEntry
from tidegate.snapshots.snapshot import Snapshot
from tidegate.snapshots.state_tables import (
    KEY_GROUP,
    GroupRanges,
    KeyColumns,
    KeyedRows,
    Table,
    UncutTable,
    find_state,
    item_rows,
    listed,
    table_schema,
)
from tidegate.state.merging import key_codes
from tidegate.state.sections import by_text, row_identity
from tidegate.types import ddl_of, to_list

CHANGE, BEFORE, AFTER = "change", "before", "after"
ADDED, REMOVED, CHANGED = "added", "removed", "changed"

Bools = Any  # numpy arrays
Ints = Any


@dataclass(frozen=True, slots=True)
class Changes:
    """The rows of a part that changed, and the number of those that didn't. State without keys has no `keys`."""

    kinds: list[str]
    keys: pa.Array | None
    before: pa.Array
    after: pa.Array
    unchanged: int
    beside: Sequence[pa.Array] = ()  # windows and positions, in state that has them


class KeyedChanges:
    """The changes of a keyed state."""

    def __init__(
        self,
        before: Snapshot,
        after: Snapshot,
        operator: str,
        was: StateEntry,
        now: StateEntry,
        *,
        key: Sequence[str] = (),
    ) -> None:
        key_types = [state.arrow_schema().field("key").type for state in (was, now)]
        if key_types[0] != key_types[1]:
            raise SchemaError(
                f"state {now.name!r} can't be compared: its key was {ddl_of(key_types[0])} and is {ddl_of(key_types[1])}"
            )
        beside = [row_identity(state.arrow_schema()) for state in (was, now)]
        if beside[0] != beside[1]:
            raise SchemaError(f"state {now.name!r} can't be compared: only one side is {by_text(max(beside))}")
        self._beside = beside[1]
        self._before = KeyedRows(before, operator, was)
        self._after = KeyedRows(after, operator, now)
        self._group_counts = before.manifest.key_group_count, after.manifest.key_group_count
        self.keys = KeyColumns.of(key_types[1], key)
        self.schema = table_schema(
            [
                pa.field(CHANGE, pa.string()),
                *self.keys.fields(),
                *map(now.arrow_schema().field, self._beside),
                pa.field(BEFORE, was.arrow_schema().field("value").type),
                pa.field(AFTER, now.arrow_schema().field("value").type),
                pa.field(KEY_GROUP, pa.int32()),
            ]
        )

    def parts(self, groups: Collection[int] | None, *, count: int | None = None) -> list[GroupRanges]:
        if self._group_counts[0] != self._group_counts[1]:
            return [((0, max(self._group_counts)),)]
        # Parts omit pieces without files, but the other snapshot may have state in their key-groups.
        parts = self._after.parts(groups, count=count)
        covered = {group for part in parts for bounds in part for group in range(*bounds)}
        wanted = range(self._group_counts[1]) if groups is None else groups
        return [*parts, *self._before.parts(set(wanted) - covered, count=count)]

    def read(self, part: GroupRanges) -> Iterator[pa.RecordBatch]:
        found = self.compare(part)
        if found.kinds:
            groups = pa.array(groups_of(hash_columns([found.keys]), self._group_counts[1]))
            of_key = [*self.keys.columns(found.keys), *found.beside]
            columns = [pa.array(found.kinds), *of_key, found.before, found.after, groups]
            yield pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def compare(self, part: GroupRanges) -> Changes:
        before, after = (_together(rows.read(part), rows.schema) for rows in (self._before, self._after))
        keys = pa.concat_arrays([before.column("key"), after.column("key")])
        if not len(keys):
            return Changes([], keys, before.column("value"), after.column("value"), 0)
        beside = [pa.concat_arrays([before.column(name), after.column(name)]) for name in self._beside]
        codes = key_codes(pa.StructArray.from_arrays([keys, *beside], ["key", *self._beside]) if beside else keys)
        place_before, place_after = _places(codes[: before.num_rows], codes), _places(codes[before.num_rows :], codes)
        both = np.flatnonzero((place_before >= 0) & (place_after >= 0))
        same = _same(
            before.column("value").take(pa.array(place_before[both])),
            after.column("value").take(pa.array(place_after[both])),
        )
        added, removed = np.flatnonzero(place_before < 0), np.flatnonzero(place_after < 0)
        changed = both[~same]
        which = np.concatenate([added, removed, changed])
        found = pa.array(np.where(place_after >= 0, place_after + before.num_rows, place_before)[which])
        return Changes(
            [ADDED] * len(added) + [REMOVED] * len(removed) + [CHANGED] * len(changed),
            keys.take(found),
            before.column("value").take(_or_null(place_before[which])),
            after.column("value").take(_or_null(place_after[which])),
            int(same.sum()),
            [column.take(found) for column in beside],
        )


class ItemChanges(UncutTable):
    """The changes of a state without keys."""

    def __init__(self, before: Snapshot, after: Snapshot, operator: str, was: StateEntry, now: StateEntry) -> None:
        self._sides = [(snapshot, operator, state) for snapshot, state in ((before, was), (after, now))]
        types = [state.arrow_schema().field("value").type for state in (was, now)]
        self.schema = table_schema([pa.field(CHANGE, pa.string()), pa.field(BEFORE, types[0]), pa.field(AFTER, types[1])])

    def read(self, part: GroupRanges) -> Iterator[pa.RecordBatch]:
        found = self.compare(part)
        if found.kinds:
            yield pa.RecordBatch.from_arrays([pa.array(found.kinds), found.before, found.after], schema=self.schema)

    def compare(self, part: GroupRanges) -> Changes:
        before, after = (_items(*side) for side in self._sides)
        was, now = _codes_of_both(before, after)
        removed, added = _more_often(was, now), _more_often(now, was)
        nothing = np.full(len(removed), -1), np.full(len(added), -1)
        return Changes(
            [REMOVED] * len(removed) + [ADDED] * len(added),
            None,
            before.take(_or_null(np.concatenate([removed, nothing[1]]))),
            after.take(_or_null(np.concatenate([nothing[0], added]))),
            len(after) - len(added),
        )


def changes_table(
    before: Snapshot, after: Snapshot, state: str | None, operator: str | None, *, key: Sequence[str] = ()
) -> Table:
    """Return the changes from `before` to `after`. Both must have the state, in the same operator."""
    name, now = find_state(after.manifest, state, operator)
    entry = before.manifest.operators.get(name)
    was = next((each for each in entry.states if each.name == now.name), None) if entry is not None else None
    if was is None:
        raise NotFound(
            f"the snapshot to compare with (epoch {before.manifest.epoch}) has no state {now.name!r} in operator "
            f"{name!r}. {listed(before.manifest)}"
        )
    if was.kind != now.kind:
        raise JobError(f"state {now.name!r} can't be compared: it was {was.kind} and is {now.kind}")
    if now.kind == "keyed":
        return KeyedChanges(before, after, name, was, now, key=key)
    return ItemChanges(before, after, name, was, now)


def _together(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    found = list(batches)
    return pa.concat_batches(found) if found else pa.RecordBatch.from_pylist([], schema=schema)


def _items(snapshot: Snapshot, operator: str, state: StateEntry) -> pa.Array:
    rows = (
        rows
        for piece in snapshot.manifest.operators[operator].pieces
        for rows in item_rows(snapshot, operator, piece, state.name)
    )
    return _together(rows, state.arrow_schema()).column("value")


def _places(mine: Ints, codes: Ints) -> Ints:
    """Return by code the index of the code in `mine`, or -1."""
    places = np.full(int(codes.max()) + 1, -1, dtype=np.int64)
    places[mine] = np.arange(len(mine))
    return places


def _or_null(places: Ints) -> pa.Array:
    """Return indexes for `take`, with null for -1."""
    return pa.array(places, pa.int64(), mask=places < 0)


def _same(before: pa.Array, after: pa.Array) -> Bools:
    """Row by row."""
    was, now = _codes_of_both(before, after)
    equal: Bools = was == now
    return equal


def _codes_of_both(before: pa.Array, after: pa.Array) -> tuple[Ints, Ints]:
    """A number for each value, the same for equal ones on either side."""
    if not len(before) + len(after):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    if before.type == after.type and not _holds_maps(before.type):
        codes = key_codes(pa.concat_arrays([before, after]))
    else:
        known: dict[Hashable, int] = {}
        values = (comparable(value) for side in (before, after) for value in to_list(side))
        codes = np.fromiter((known.setdefault(value, len(known)) for value in values), np.int64, len(before) + len(after))
    return codes[: len(before)], codes[len(before) :]


def _more_often(these: Ints, those: Ints) -> Ints:
    """Return the indexes of the values in `these` that are surplus: not matched by an equal value in `those`."""
    spare = dict(zip(*(found.tolist() for found in np.unique(those, return_counts=True)), strict=True))
    left = []
    for place, code in enumerate(these.tolist()):
        if spare.get(code, 0):
            spare[code] -= 1
        else:
            left.append(place)
    return np.array(left, dtype=np.int64)


def _holds_maps(kind: pa.DataType) -> bool:
    return pa.types.is_map(kind) or any(_holds_maps(kind.field(index).type) for index in range(kind.num_fields))


def comparable(value: Any) -> Hashable:
    """Return a hashable that is equal for values that users consider equal."""
    if isinstance(value, float):
        # NaN differs from itself. A float equals the integer that it was before its column was widened.
        return "NaN" if value != value else value
    if isinstance(value, dict):
        return frozenset((comparable(key), comparable(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(comparable(item) for item in value)
    hashed: Hashable = value
    return hashed
