"""The form in which state is written to a snapshot and read back: sections of Arrow rows.

Every state of an operator becomes rows of one Arrow schema. Keyed state (timers included) has the columns `key` and `value`
and is cut by key-group; operator state has the column `value` and no key-group. The file format, the stores and recovery
depend on nothing else, so backends can differ freely.

A layer is what changed between two freezes of keyed state: rows that were set, and keys that were deleted. All layers
together are the state; the newer layer wins (merging.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import pyarrow as pa

from tidegate.hashing import hash_columns
from tidegate.keygroups import groups_of
from tidegate.protocol.recovery import StateKind as StateKind

WINDOW = "window"
"""The column of columnar state that says which window a row belongs to."""
POSITION = "position"
"""The column of a state of records that says where a record is among those of its key, in the order of arrival."""
IDENTITY = ("key", WINDOW, POSITION)
"""The columns that identify a row of keyed state, as far as the state has them."""


@dataclass(frozen=True, slots=True)
class StateInfo:
    """What a manifest holds about one state. `shape` is value, list, map, reducing, aggregating, timers, columns,
    records, offsets…"""

    name: str
    kind: StateKind
    shape: str
    schema: pa.Schema


@dataclass(frozen=True, slots=True)
class Section:
    """Rows of one state, in some consecutive key-groups if the state is keyed (otherwise `groups` is None).

    `deleted`: the rows have only the columns that identify them, and were deleted.
    """

    state: str
    groups: range | None
    rows: pa.RecordBatch
    deleted: bool = False


def deleted_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema of the deleted keys of a keyed state: of what identifies a row."""
    return pa.schema([schema.field(name) for name in IDENTITY if name in schema.names])


def row_identity(schema: pa.Schema) -> list[str]:
    """Return the columns that identify a row beside its key."""
    return [name for name in IDENTITY[1:] if name in schema.names]


def by_text(beside: Sequence[str]) -> str:
    """Return what state is by, for messages: key, perhaps window, perhaps position."""
    return "by " + " and ".join(["key", *beside])


def within(section: Section, groups: range, *, key_group_count: int) -> Section:
    """Return the part of a keyed section that is in these key-groups."""
    assert section.groups is not None
    start, stop = max(section.groups.start, groups.start), min(section.groups.stop, groups.stop)
    if (start, stop) == (section.groups.start, section.groups.stop):
        return section
    found = groups_of(hash_columns([section.rows.column("key")]), key_group_count)
    rows = section.rows.filter(pa.array((found >= start) & (found < stop)))
    return Section(section.state, range(start, max(start, stop)), rows, section.deleted)


class SectionReader(Protocol):
    """A source of sections of keyed state by key-group: a file, or a layer in memory."""

    def read_sections(self, state: str, groups: range) -> Iterable[Section]:
        """Return the state's sections in these key-groups only. Deleted keys come last."""

    def row_count(self, state: str) -> int:
        """Return the number of rows of the state, including deleted keys."""


@dataclass(frozen=True, slots=True)
class NativeFile:
    """A file in a backend's own format. `immutable`: in all snapshots of a backend's life, a file with this name has this
    content."""

    local: str
    path: Path
    immutable: bool


class FrozenState(Protocol):
    """A version of an operator's state that no longer changes. Made in O(1); read by a background thread, once."""

    @property
    def states(self) -> tuple[StateInfo, ...]: ...

    @property
    def complete(self) -> bool:
        """Whether the sections are all of the state. If not, those of keyed state are only what changed since the freeze
        before. Known after the sections were read."""

    def sections(self) -> Iterable[Section]:
        """Return the sections state by state in the order of `states`: those of keyed state by ascending key-group, its
        deleted keys after its rows. Empty sections are omitted."""

    def release(self) -> None:
        """Release what was held for the snapshot. The slot's loop calls this when the snapshot was written or aborted."""


@runtime_checkable
class FrozenFiles(FrozenState, Protocol):
    """A frozen version that can also be kept as files in the backend's own format."""

    native: str

    def files(self) -> Iterable[NativeFile]: ...
