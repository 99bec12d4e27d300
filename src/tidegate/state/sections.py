"""The form in which state goes to a snapshot and comes back: sections of Arrow rows.

Every state of an operator becomes rows of one Arrow schema. Keyed state (timers included) has the columns `key` and
`value` and is cut by key-group; operator state has the column `value` and has no key-group. This is all that the file
format, the stores and the recovery know about state, so backends can differ freely.

A layer is what changed between two freezes of keyed state: rows that were set, and keys that were deleted. The state is
all its layers one over the other, the last one on top (merging.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import pyarrow as pa

from tidegate.hashing import hash_columns
from tidegate.keygroups import groups_of
from tidegate.protocol.recovery import StateKind as StateKind


@dataclass(frozen=True, slots=True)
class StateInfo:
    """What a manifest says about one state. `shape` is value, list, map, reducing, aggregating, timers, offsets…"""

    name: str
    kind: StateKind
    shape: str
    schema: pa.Schema


@dataclass(frozen=True, slots=True)
class Section:
    """Rows of one state; of some consecutive key-groups where the state is keyed (`groups` is None otherwise).

    `deleted`: the rows have the column `key` only, and these keys are gone.
    """

    state: str
    groups: range | None
    rows: pa.RecordBatch
    deleted: bool = False


def deleted_schema(schema: pa.Schema) -> pa.Schema:
    """The schema of the deleted keys of a keyed state."""
    return pa.schema([schema.field("key")])


def within(section: Section, groups: range, *, key_group_count: int) -> Section:
    """The part of a keyed section that is in these key-groups."""
    assert section.groups is not None
    start, stop = max(section.groups.start, groups.start), min(section.groups.stop, groups.stop)
    if (start, stop) == (section.groups.start, section.groups.stop):
        return section
    found = groups_of(hash_columns([section.rows.column("key")]), key_group_count)
    rows = section.rows.filter(pa.array((found >= start) & (found < stop)))
    return Section(section.state, range(start, max(start, stop)), rows, section.deleted)


class SectionReader(Protocol):
    """Where sections of keyed state can be read by key-group: a file, or a layer in memory."""

    def read_sections(self, state: str, groups: range) -> Iterable[Section]:
        """What there is of the state in these key-groups and no others. Deleted keys come last."""

    def row_count(self, state: str) -> int:
        """Rows of the state, deleted ones included."""


@dataclass(frozen=True, slots=True)
class NativeFile:
    """A file in a backend's own form. `immutable`: a file with this name is this file, in all snapshots of a backend's
    life."""

    local: str
    path: Path
    immutable: bool


class FrozenState(Protocol):
    """A version of an operator's state that no longer changes. Made in O(1); read by a background thread, once."""

    @property
    def states(self) -> tuple[StateInfo, ...]: ...

    @property
    def complete(self) -> bool:
        """Whether the sections are all of the state. If not, keyed state is only what changed since the freeze before.
        Known when the sections were taken."""

    def sections(self) -> Iterable[Section]:
        """State by state in the order of `states`, keyed ones by growing key-group, the deleted keys of a state after its
        rows. Empty sections are left out."""

    def release(self) -> None:
        """Called in the slot's loop when the snapshot was written or given up."""


@runtime_checkable
class FrozenFiles(FrozenState, Protocol):
    """A frozen version that can also be kept as files in the backend's own form."""

    native: str

    def files(self) -> Iterable[NativeFile]: ...
