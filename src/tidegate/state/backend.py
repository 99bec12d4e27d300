"""A backend of keyed state over cells: the common part of all backends.

To write a backend, subclass `CellBackend`: make cells of the three kinds (cells.py), freeze what they hold, load rows and
return rows. The base class provides the shapes of state and time to live. What a backend guarantees is tested in
tests/contract/test_backends.py; a small backend that passes is in tests/contract/sqlite_backend.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, ClassVar

import pyarrow as pa

from tidegate.errors import JobError
from tidegate.state.cells import AnyCells, Cursor
from tidegate.state.column_table import ColumnState
from tidegate.state.columns import key_list
from tidegate.state.cutting import cut_by_group
from tidegate.state.descriptors import Columns, Descriptor, Records
from tidegate.state.expiring import Expiring, ExpiringEntries, ExpiringItems, ExpiringThings
from tidegate.state.record_table import RecordState
from tidegate.state.sections import FrozenState, Section, StateInfo, deleted_schema
from tidegate.state.shapes import SHAPES, Row, Shape
from tidegate.state.ttl import EXPIRES, put_together, soonest_ends, split_by_end, stored_info, taken_apart, with_ends
from tidegate.state.vectors import VectorField


class CellBackend(ABC):
    """The keyed states of one operator in one subtask. See `KeyedBackend` (dataflow/operators/base.py).

    `now_ms` is the slot's clock. Only state with a ttl needs it.
    """

    # Faster versions for a backend's cells, if a measurement shows that they are worth it: of shapes without a ttl whose
    # things aren't copied on their way out; of shapes with a ttl that reads don't renew; of cells of things with a ttl.
    fast_shapes: ClassVar[Mapping[type[Shape], type[Shape]]] = {}
    expiring_shapes: ClassVar[Mapping[type[Shape], type[Shape]]] = {}
    expiring_things: ClassVar[type[ExpiringThings]] = ExpiringThings

    def __init__(self, *, key_type: pa.DataType, key_group_count: int, now_ms: Callable[[], int] | None = None) -> None:
        self.cursor = Cursor()
        self.key_type = key_type
        self.key_group_count = key_group_count
        self._now_ms = now_ms
        self.cells: dict[str, Any] = {}  # what `make_cells` returned, by the states' names
        self.columns: dict[str, ColumnState | RecordState] = {}  # what `make_columns` and `make_records` returned
        self._infos: dict[str, StateInfo] = {}  # as they are in a manifest
        self._expiring: dict[str, Expiring] = {}

    # What a backend implements. Rows have the columns `key` and `value`, of the types in the state's `info`.

    @abstractmethod
    def make_cells(self, info: StateInfo, *, as_tuples: bool, in_place: bool) -> AnyCells:
        """Make the cells of a state: `ListCells` if its shape is list, `MapCells` if it is map, else `Cells`. `in_place`:
        things are changed in place, or read whenever they are written; otherwise they are replaced."""

    @abstractmethod
    def load_rows(self, state: str, rows: pa.RecordBatch, *, known: bool) -> None:
        """Load rows, before the first record. `known`: the next frozen version builds on the rows' snapshot."""

    @abstractmethod
    def all_rows(self, state: str) -> Iterator[pa.RecordBatch]:
        """Return all rows of a state, before the first record."""

    @abstractmethod
    def freeze_rows(self) -> FrozenState:
        """Return what changed since the last freeze, or all of the state as it is now."""

    def make_columns(self, info: StateInfo, fields: Sequence[VectorField]) -> ColumnState:
        """Make the tables of a columnar state. Rows of them are loaded, returned and frozen with those of the cells."""
        raise JobError(
            f"state {info.name!r} is columnar, and {type(self).__name__} has no columnar state: use the heap backend, "
            f"or an operator that works on one record at a time"
        )

    def make_records(self, info: StateInfo, columns: Sequence[pa.Field], fields: Sequence[VectorField]) -> RecordState:
        """Make the tables of a state of records. Rows of them are loaded, returned and frozen with those of the cells."""
        raise JobError(
            f"state {info.name!r} is columnar, and {type(self).__name__} has no columnar state: use the heap backend, "
            f"or an operator that works on one record at a time"
        )

    def begin_batch(self, keys: Sequence[Any]) -> None:  # noqa: B027  (many backends have nothing to do)
        """Prepare for a batch of records with these keys."""

    def end_batch(self) -> None:  # noqa: B027
        """End the batch."""

    def tidy(self, budget: int) -> None:  # noqa: B027
        """Do a step of the work that is due between batches. `budget` is in entries."""

    @abstractmethod
    def close(self) -> None: ...

    # What operators call.

    def table(self, descriptor: Descriptor) -> Any:
        """Return the state object for a descriptor, which the user's function calls."""
        info = descriptor.info(self.key_type)
        assert info.name not in self._infos, f"two states are named {info.name!r}"
        shape, ttl = Row if descriptor.as_tuples else SHAPES[descriptor.shape], descriptor.ttl
        merges = descriptor.shape == "aggregating"
        cells: Any = self.make_cells(
            stored_info(info), as_tuples=descriptor.as_tuples or ttl is not None, in_place=merges or ttl is not None
        )
        self._infos[info.name], self.cells[info.name] = info, cells
        if ttl is None:
            if descriptor.as_tuples or descriptor.form.copied is None:
                shape = self.fast_shapes.get(shape, shape)
            return shape(descriptor, cells, self.cursor)
        assert self._now_ms is not None, f"state {info.name!r} has a ttl, and the backend has no clock"
        if descriptor.shape == "list":
            expiring: Expiring = ExpiringItems(cells, ttl, self._now_ms)
        elif descriptor.shape == "map":
            expiring = ExpiringEntries(cells, ttl, self._now_ms, plain_key=descriptor.key_form.plain)
        else:
            expiring = self.expiring_things(cells, ttl, self._now_ms, copied=descriptor.form.copied if merges else None)
        self._expiring[info.name] = expiring
        if not ttl.by_reads:
            shape = self.expiring_shapes.get(shape, shape)
        return shape(descriptor, expiring, self.cursor)

    def column_state(self, descriptor: Columns) -> ColumnState:
        """Return the state object for a columnar state, which operators use (column_table.py)."""
        info = descriptor.info(self.key_type)
        assert info.name not in self._infos, f"two states are named {info.name!r}"
        self._infos[info.name] = info
        state = self.columns[info.name] = self.make_columns(info, descriptor.fields)
        return state

    def record_state(self, descriptor: Records) -> RecordState:
        """Return the state object for a state of records, which operators use (record_table.py)."""
        info = descriptor.info(self.key_type)
        assert info.name not in self._infos, f"two states are named {info.name!r}"
        self._infos[info.name] = info
        state = self.columns[info.name] = self.make_records(info, descriptor.columns, descriptor.fields)
        return state

    def load(self, state: str, rows: pa.RecordBatch, *, known: bool = False) -> None:
        """Load rows of a snapshot, before the first record. `known`: the next frozen version builds on that snapshot."""
        info, expiring = self._infos[state], self._expiring.get(state)
        if expiring is None and EXPIRES not in rows.schema.names:
            self.load_rows(state, rows, known=known)
            return
        assert self._now_ms is not None, f"state {state!r} had a ttl in the snapshot, and the backend has no clock"
        now_ms = self._now_ms()
        rows = with_ends(rows, info, otherwise=now_ms + (1 if expiring is None else expiring.ttl_ms))
        left, ended = split_by_end(rows, info, now_ms)
        if expiring is None:
            assert not known, "the state had a ttl when the snapshot was written"
            self.load_rows(state, left.drop_columns([EXPIRES]).cast(info.schema), known=False)
            return
        self.load_rows(state, put_together(left, info), known=known)
        expiring.loaded(key_list(left.column("key")), soonest_ends(left, info))
        if known and ended.num_rows:  # the next frozen version has to record that they are deleted
            self.load_rows(state, put_together(ended, info), known=True)
            for key in key_list(ended.column("key")):
                self.cells[state].delete(key)

    def rows(self, state: str) -> Iterator[pa.RecordBatch]:
        """Return all rows of a state, before the first record, for what is derived from state at a restore."""
        return (taken_apart(rows, self._infos[state]) for rows in self.all_rows(state))

    def maintain(self, budget: int) -> None:
        """Do a small step of the work that is due between batches."""
        for expiring in self._expiring.values():
            expiring.sweep(budget)
        self.tidy(budget)

    def freeze(self) -> FrozenState:
        frozen = self.freeze_rows()
        if not self._expiring:
            return frozen
        assert self._now_ms is not None
        return FrozenExpiring(frozen, self._infos, self.key_group_count, self._now_ms())


class FrozenExpiring:
    """A frozen version as it is in a snapshot: with the ends as a column, and without what had ended at the freeze. A
    backend's native files are not changed."""

    def __init__(self, frozen: FrozenState, infos: Mapping[str, StateInfo], key_group_count: int, now_ms: int) -> None:
        self.states = tuple(infos[info.name] for info in frozen.states)
        self.release = frozen.release
        self._frozen = frozen
        self._key_group_count = key_group_count
        self._now_ms = now_ms
        if hasattr(frozen, "files"):
            self.native, self.files = frozen.native, frozen.files  # type: ignore[attr-defined]

    @property
    def complete(self) -> bool:
        return self._frozen.complete

    def sections(self) -> Iterator[Section]:
        infos = {info.name: info for info in self.states}
        for state, sections in groupby(self._frozen.sections(), key=attrgetter("state")):
            info = infos[state]
            if EXPIRES not in info.schema.names:
                yield from sections
                continue
            gone: list[pa.RecordBatch] = []  # keys that were deleted, and keys of which everything has ended
            for section in sections:
                if section.deleted:
                    gone.append(section.rows)
                    continue
                left, ended = split_by_end(taken_apart(section.rows, info), info, self._now_ms)
                if left.num_rows:
                    yield Section(state, section.groups, left)
                if ended.num_rows and not self.complete:
                    gone.append(pa.RecordBatch.from_arrays([ended.column("key")], schema=deleted_schema(info.schema)))
            yield from cut_by_group(state, gone, self._key_group_count, deleted=True)
