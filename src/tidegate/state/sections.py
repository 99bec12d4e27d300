"""The form in which state goes to a snapshot and comes back: sections of Arrow rows.

Every state of an operator becomes rows of one Arrow schema. Keyed state (timers included) has the columns `key` and
`value` and is cut by key-group; operator state has the column `value` and has no key-group. This is all that the file
format, the stores and the recovery know about state, so backends can differ freely.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from tidegate.protocol.recovery import Redistribution

# How a state is redistributed when the parallelism changes.
StateKind = Redistribution


@dataclass(frozen=True, slots=True)
class StateInfo:
    """What a manifest says about one state. `shape` is value, list, map, reducing, aggregating, timers, offsets…"""

    name: str
    kind: StateKind
    shape: str
    schema: pa.Schema


@dataclass(frozen=True, slots=True)
class Section:
    """Rows of one state; of one key-group where the state is keyed (`group` is None otherwise)."""

    state: str
    group: int | None
    rows: pa.RecordBatch


class FrozenState(Protocol):
    """A version of an operator's state that no longer changes. Made in O(1); read by a background thread, once."""

    @property
    def states(self) -> tuple[StateInfo, ...]: ...

    def sections(self) -> Iterable[Section]:
        """State by state in the order of `states`, keyed ones by growing key-group. Empty sections are left out."""

    def release(self) -> None:
        """Called in the slot's loop when the snapshot was written or given up; the backend may merge its layers."""
