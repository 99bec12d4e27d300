"""Regular joins: two inputs without bounds of time, whose records are all kept, or for a ttl.

Theory of operation. A batch of one side is matched with all stored records of the other side. An inserted record makes a
pair with each match, and a deleted one takes these pairs back. A record that has no match is in the result alone if its side
is an outer one (beside nulls) or of an anti join; and for a semi join, if it has one. So such a side counts the matches of
its records, and when the first match of a stored record comes or the last one goes, the row of this record alone is deleted
or inserted.

The result is always that of a join of all records that have arrived, as changes. Of appended inputs, inner and semi joins
only ever insert, so their result is appended. Null equals nothing: a record with a null in its key has no match, and isn't
kept.

A record that the ttl has ended is forgotten. Nothing is deleted from the result then, and a deletion of this record has no
effect any more.

The work is done in parts of a number of matches, with pauses (stepwise.py). Records of a batch that are held meanwhile are
stored with the last part; until then no row of a table moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

from tidegate.dataflow.aggregates.base import BoolArray, IntArray
from tidegate.dataflow.aggregates.numpy_columns import grouped, ranks
from tidegate.dataflow.changelog import APPEND_OR_RETRACT, Changelog
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import KeyedBackend, Operator, OperatorContext
from tidegate.dataflow.operators.join_sides import MATCHES, MATCHES_AT_A_TIME, Arrived, Found, JoinSide, StoredSide
from tidegate.dataflow.operators.joined_columns import Columns, JoinedColumn, stored_columns
from tidegate.dataflow.operators.process import key_type
from tidegate.dataflow.operators.stepwise import Steps, StepwiseOperator
from tidegate.dataflow.row_kinds import kinds_of
from tidegate.state.descriptors import Records
from tidegate.state.record_table import RecordTable
from tidegate.state.sections import FrozenState, StateInfo

# By how a join is made: whether a record of the left and of the right side is in the result alone if it has no match.
ALONE: Mapping[str, tuple[bool, bool]] = {
    "inner": (False, False),
    "left": (True, False),
    "right": (False, True),
    "full": (True, True),
    "semi": (False, False),
    "anti": (True, False),
}
LEFT_ONLY = ("semi", "anti")


@dataclass(frozen=True, slots=True)
class RegularJoinSpec:
    """Joins port 0 and port 1 by key. `retracts`: whether the result is changes."""

    how: str
    keys: tuple[tuple[str, ...], tuple[str, ...]]
    sides: tuple[JoinSide, JoinSide]
    output: tuple[JoinedColumn, ...]
    retracts: bool
    ttl_ms: int | None
    kind: ClassVar[str] = "join"
    stateful: ClassVar[bool] = True
    in_columns: ClassVar[bool] = True
    changelogs: ClassVar[frozenset[Changelog]] = APPEND_OR_RETRACT

    def create(self, node: Node) -> Operator:
        return RegularJoinOperator(node, self)

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        return tuple(each.info(key_type(node.input_schemas[0], self.keys[0])) for each in self.descriptors)

    @property
    def descriptors(self) -> tuple[Records, ...]:
        return tuple(side.descriptor for side in self.sides)

    @property
    def text(self) -> str:
        on = " and ".join(f"{left} = {right}" for left, right in zip(*self.keys, strict=True))
        return f"{self.how} on {on}"


class RegularJoinOperator(StepwiseOperator):
    """Matches each batch with what is stored of the other side."""

    def __init__(self, node: Node, spec: RegularJoinSpec) -> None:
        super().__init__(node)
        self._spec = spec
        self._alone = ALONE[spec.how]
        self._settles = spec.how == "semi" and not spec.retracts
        self._settled: list[tuple[RecordTable, IntArray]] = []  # to be deleted when the batch is done
        self._backend: KeyedBackend | None = None
        self._sides: tuple[StoredSide, ...] = ()

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        spec = self._spec
        self._backend = backend = context.make_backend(key_type(self.node.input_schemas[0], spec.keys[0]))
        self._now_ms = context.user_now_ms
        self._sides = tuple(StoredSide(side, backend, spec.ttl_ms, self._now_ms()) for side in spec.sides)
        for state, batches in context.restored.items():
            for rows in batches:
                backend.load(state, rows, known=context.goes_on)

    def maintain(self, budget: int) -> None:
        assert self._backend is not None
        if not self.has_work():
            for side in self._sides:
                side.expire(self._now_ms())
        self._backend.maintain(budget)

    def freeze(self, epoch: int) -> FrozenState | None:
        assert self._backend is not None
        return self._backend.freeze()

    def close(self) -> None:
        if self._backend is not None:
            self._backend.close()

    # Matching.

    def take_batch(self, batch: pa.RecordBatch, port: int) -> Steps:
        own, other, now_ms = self._sides[port], self._sides[1 - port], self._now_ms()
        for side in self._sides:
            side.expire(now_ms)
        arrived = own.arrived(batch, renews=self._spec.ttl_ms is not None)
        without_key = arrived.has_null_key
        if without_key.any():
            if self._alone[port]:
                self._emit_alone(port, arrived.at(np.flatnonzero(without_key)))
            arrived = arrived.at(np.flatnonzero(~without_key))
        own_tables, other_tables = own.tables(), other.tables()
        for table in (*own_tables, *other_tables):
            table.keeps_rows = True
        found: list[Found] = []
        for _ in own.find(arrived, own_tables, found):
            if self._budget.is_spent:
                yield
        records, gone = _known(arrived, found)
        counts = np.zeros(len(records), np.int64)
        for table in other_tables:
            for probes, rows in table.matches(records.keys, MATCHES_AT_A_TIME):
                counts += np.bincount(probes, minlength=len(records))
                self._meet(port, records, table, probes, rows)
                if self._budget.is_spent:
                    yield
        if own.side.counts:
            # Whether a deleted record was in the result alone is known from its own count.
            held = counts if gone is None else np.concatenate([own.matches_of(gone, own_tables), counts[len(gone.rows) :]])
            is_alone = held == 0 if self._alone[port] else held > 0
            self._emit_alone(port, records.at(np.flatnonzero(is_alone)))
        for table in (*own_tables, *other_tables):
            table.keeps_rows = False
        if gone is not None:
            own.delete(gone, own_tables)
        stays = self._needed_later(port, records, counts, own_tables)
        own.store(records.at(stays), counts[stays], now_ms)

    def _needed_later(self, port: int, records: Arrived, counts: IntArray, own_tables: Sequence[RecordTable]) -> IntArray:
        """Return which records to store. In a semi join of appended records, a left record that has a match is in the result
        for good, and one right record of each key is enough."""
        if not self._settles:
            return records.inserted
        if port == 0:
            return np.flatnonzero(counts == 0)
        for table, rows in self._settled:
            table.delete(rows)
        self._settled = []
        if self._spec.ttl_ms is not None or not len(records):
            return records.inserted  # each of them keeps the key for another ttl
        known = np.zeros(len(records), bool)
        for table in own_tables:
            known |= table.counts(records.keys) > 0
        return np.flatnonzero(~known & (ranks(self._sides[port].numbers_of(records.keys)) == 0))

    def _meet(self, port: int, records: Arrived, table: RecordTable, probes: IntArray, rows: IntArray) -> None:
        """Emit what comes and goes because of these pairs of a record of this port and a stored one of the other."""
        other, signs = self._sides[1 - port].side, records.signs[probes]
        pieces: list[tuple[BoolArray, Columns | None, Columns | None]] = []
        if other.counts:
            some = grouped(rows).rows
            table.change(some)
            matches = table.vectors[MATCHES].values
            before = matches[some] > 0
            np.add.at(matches, rows, signs)
            after = matches[some] > 0
            turned = np.flatnonzero(before != after)
            if len(turned):
                inserts = after[turned] != self._alone[1 - port]
                stored = self._stored(1 - port, table, some[turned])
                if self._settles:
                    self._settled.append((table, some[turned]))
                pieces.append((inserts, *_in_order(1 - port, stored, None)))
        if self._spec.how not in LEFT_ONLY:
            mine = self._of(port, records, probes)
            pieces.append((signs > 0, *_in_order(port, mine, self._stored(1 - port, table, rows))))
        self._emit_pieces(pieces)

    def _emit_alone(self, port: int, records: Arrived) -> None:
        """Emit records of a port beside nulls, or alone."""
        mine = self._of(port, records, np.arange(len(records)))
        self._emit_pieces([(records.signs > 0, *_in_order(port, mine, None))])

    # Columns.

    def _of(self, port: int, records: Arrived, places: IntArray) -> Columns:
        side, some = self._spec.sides[port], pa.array(places)
        found = dict(zip((field.name for field in side.key), records.keys, strict=True))
        found |= zip((field.name for field in side.columns), records.columns, strict=True)
        return lambda name: found[name].take(some)

    def _stored(self, port: int, table: RecordTable, rows: IntArray) -> Columns:
        return stored_columns(table, rows, self._spec.keys[port])

    def _emit_pieces(self, pieces: Sequence[tuple[BoolArray, Columns | None, Columns | None]]) -> None:
        """Emit rows: for each piece whether they are inserted, and their columns of both sides, if they have them."""
        pieces = [piece for piece in pieces if len(piece[0])]
        if not pieces:
            return
        columns = []
        for each in self._spec.output:
            parts = [each.of(left, right, len(inserts)) for inserts, left, right in pieces]
            columns.append(parts[0] if len(parts) == 1 else pa.concat_arrays(parts))
        inserts = np.concatenate([piece[0] for piece in pieces])
        if self._spec.retracts:
            columns.insert(0, kinds_of(inserts))
        else:
            assert inserts.all(), f"{self.name} deletes rows, and its result is appended to"
        self.emit(pa.RecordBatch.from_arrays(columns, schema=self.node.schema))


def _in_order(port: int, mine: Columns | None, theirs: Columns | None) -> tuple[Columns | None, Columns | None]:
    """Return the columns of the left and the right side, given those of a port and of the other one."""
    return (mine, theirs) if port == 0 else (theirs, mine)


def _known(arrived: Arrived, found: Sequence[Found]) -> tuple[Arrived, Found | None]:
    """Return the records without deletions of what isn't stored, deletions first, and what is stored of these."""
    if not len(arrived.deleted):
        return arrived, None
    if not found:
        return arrived.at(arrived.inserted), None
    (gone,) = found
    return arrived.at(np.concatenate([gone.places, arrived.inserted])), gone
