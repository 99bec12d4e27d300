"""Interval joins: a record matches those of the other input with its key whose time is within an interval around its own.

A pair matches if `lower <= right time - left time <= upper`, in microseconds, bounds included. It is emitted when the second
of its records comes. Both inputs are kept in stretches of time (timed_records.py), each record as long as a record of the
other input may come that matches and isn't late:

- a left record until the watermark has reached its time + upper;
- a right record until the watermark has reached its time - lower.

If a result depends on whether a record has matches (left, right, full, semi and anti joins), a flag beside the record says
that it has had its result (*settled*). A record that isn't settled when its time is up has no match: it is emitted alone,
and is settled in the same step.

Records leave by the stretch, when the time of all of them is up. Until then they match nothing any more, as whatever they
matched would be late. At the end of time records stay, for input that is added later (docs/adr/018).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

from tidegate.channels.elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import Operator
from tidegate.dataflow.operators.joined_columns import JoinedColumn
from tidegate.dataflow.operators.joining import (
    LEFT,
    MAX_ROWS,
    RIGHT,
    STRETCH_ROWS,
    Arrived,
    TimedJoinOperator,
    TimedSide,
)
from tidegate.dataflow.operators.process import key_type
from tidegate.dataflow.operators.stepwise import Steps
from tidegate.dataflow.operators.timed_records import Stretch, TimedRecords
from tidegate.state.descriptors import Records
from tidegate.state.event_time import WATERMARK
from tidegate.state.key_store import Array, IntArray
from tidegate.state.record_table import RecordTable
from tidegate.state.sections import StateInfo
from tidegate.state.vectors import VectorField

SETTLED = "__settled"
SIDES = ("left", "right")

ALONE = {
    "inner": (False, False),
    "left": (True, False),
    "right": (False, True),
    "full": (True, True),
    "semi": (False, False),
    "anti": (True, False),
}
"""By kind of join, whether a left and a right record without a match are emitted."""
MAX_UNSORTED_ROWS = 1024
"""A stretch is sorted again when so many rows, and a quarter of all, were added since."""
LEFT_ONLY = ("semi", "anti")
"""The kinds whose result is left records."""


@dataclass(frozen=True, slots=True)
class IntervalJoinSpec:
    """The join as a node of the graph."""

    how: str
    sides: tuple[TimedSide, TimedSide]
    lower_ms: int
    upper_ms: int
    output: tuple[JoinedColumn, ...]
    late: tuple[str | None, str | None] = (None, None)
    kind: ClassVar[str] = "interval join"
    stateful: ClassVar[bool] = True
    in_columns: ClassVar[bool] = True
    needs_event_time: ClassVar[bool] = True

    def create(self, node: Node) -> Operator:
        return IntervalJoinOperator(node, self)

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        of_key = key_type(node.input_schemas[LEFT], self.sides[LEFT].key)
        return (*(each.info(of_key) for each in self.descriptors), WATERMARK)

    @property
    def descriptors(self) -> tuple[Records, Records]:
        left, right = (
            Records(name, side.columns, [VectorField(SETTLED, pa.bool_(), False)] if settles else [], windowed=True)
            for name, side, settles in zip(self.state_names, self.sides, self.settles, strict=True)
        )
        return left, right

    @property
    def state_names(self) -> tuple[str, str]:
        """Return the names of the states. A kind of join that keeps other records, or knows less of them, has other names:
        with the state of an inner join, an outer one would emit records alone that had matches."""
        if self.how in LEFT_ONLY:
            return "left_near_once", "right_near_times"
        left, right = (
            f"{side}_near_settled" if alone else f"{side}_near" for side, alone in zip(SIDES, self.settles, strict=True)
        )
        return left, right

    @property
    def settles(self) -> tuple[bool, bool]:
        """Whether the result depends on whether a left, and a right, record has matches."""
        left, right = ALONE[self.how]
        return left or self.how in LEFT_ONLY, right

    @property
    def kept_ms(self) -> tuple[int, int]:
        """How far the watermark has to be behind (or ahead of) a left, and a right, record's time when its time is up."""
        return self.upper_ms, -self.lower_ms

    @property
    def text(self) -> str:
        left, right = self.sides
        by = ", ".join(f"{one} = {other}" for one, other in zip(left.key, right.key, strict=True))
        return f"{self.how}: {by}; {right.time} - {left.time} from {self.lower_ms} ms to {self.upper_ms} ms"


class IntervalJoinOperator(TimedJoinOperator):
    """Joins records by key and an interval of time."""

    def __init__(self, node: Node, spec: IntervalJoinSpec) -> None:
        super().__init__(node, spec.sides, spec.output, spec.late)
        self._spec = spec
        self._alone = ALONE[spec.how]
        self._gives_pairs = spec.how not in LEFT_ONLY
        self._orders: dict[tuple[int, int], _Order] = {}  # by port and stretch, of stretches of which a part is due
        lower_us, upper_us = spec.lower_ms * 1000, spec.upper_ms * 1000
        # By port: from when to when the times of the matches are, after a record's own time.
        self._reach_us = ((lower_us, upper_us), (-upper_us, -lower_us))

    def _open_state(self) -> Sequence[TimedRecords]:
        kept = max(*self._spec.kept_ms, self._spec.upper_ms - self._spec.lower_ms)
        self._records = tuple(
            TimedRecords(descriptor, self._backend, time=side.time, kept_ms=kept)
            for descriptor, side in zip(self._spec.descriptors, self._sides, strict=True)
        )
        return self._records

    def _held_back_ms(self) -> int:
        return max(0, *self._spec.kept_ms)

    # Records.

    def _take(self, arrived: Arrived, can_match: Array, port: int) -> Steps:
        if not can_match.all():
            if self._alone[port]:
                self._give_arrived(arrived.at(~can_match), port)
            arrived = arrived.at(can_match)
        matched = np.zeros(len(arrived), bool)
        for stretch, places in self._near(arrived, port):
            yield from self._match(arrived, places, port, stretch.table, matched)
            if self._is_spent(STRETCH_ROWS):
                yield
        if not self._gives_pairs and port == LEFT:
            if self._spec.how == "semi":
                self._give_arrived(arrived.at(matched), port)
            arrived, matched = arrived.at(~matched), matched[~matched]
        yield from self._store(arrived, matched, port)

    def _near(self, arrived: Arrived, port: int) -> Iterator[tuple[Stretch, IntArray]]:
        """Yield the stretches of the other input in which matches may be, and the places of the records that may have some
        there."""
        if not len(arrived):
            return
        first_us, last_us = (arrived.times_us + reach for reach in self._reach_us[port])
        least_us, most_us = int(first_us.min()), int(last_us.max())
        order = np.argsort(first_us, kind="stable")
        first_us, last_us = first_us[order], last_us[order]
        for stretch in self._records[1 - port].stretches():
            start_us, stop_us = stretch.start_ms * 1000, stretch.stop_ms * 1000
            if start_us <= most_us and least_us < stop_us:
                places = np.sort(order[np.searchsorted(last_us, start_us) : np.searchsorted(first_us, stop_us)])
                if len(places):
                    yield stretch, places

    def _match(self, arrived: Arrived, places: IntArray, port: int, table: RecordTable, matched: Array) -> Steps:
        """Emit the pairs of some records with those of a stretch, and note which records have a match."""
        other = self._records[1 - port]
        lower_us, upper_us = self._reach_us[port]
        settles = self._spec.settles[1 - port]
        keys = arrived.keys if len(places) == len(arrived) else [each.take(pa.array(places)) for each in arrived.keys]
        for probes, rows in table.matches(keys, MAX_ROWS):
            at = places[probes]
            apart_us = other.times_us(table, rows) - arrived.times_us[at]
            hit = (apart_us >= lower_us) & (apart_us <= upper_us)
            at, rows = at[hit], rows[hit]
            matched[at] = True
            if settles and len(rows):
                self._settle_rows(table, rows)
            if self._gives_pairs and len(rows):
                some, stored = arrived.taken(at), self._stored(1 - port, table, rows)
                left, right = (some, stored) if port == LEFT else (stored, some)
                self._give(left, right, len(rows))
            if self._is_spent(len(probes)):
                yield

    def _settle_rows(self, table: RecordTable, rows: IntArray) -> None:
        """Note that stored records have a match; emit them now if that is the result."""
        settled = table.vectors[SETTLED].values
        rows = rows[~settled[rows]]
        if not len(rows):
            return
        if self._spec.how == "semi":
            rows = np.unique(rows)
            rows = rows[np.argsort(table.positions(rows))]
            self._give(self._stored(LEFT, table, rows), None, len(rows))
        table.change(rows)
        table.vectors[SETTLED].values[rows] = True

    def _store(self, arrived: Arrived, matched: Array, port: int) -> Steps:
        """Keep the records whose time isn't up. Those without a match whose time is up are emitted."""
        at_ms = self._time.at_ms
        is_over = arrived.times_us // 1000 + self._spec.kept_ms[port] <= at_ms
        if is_over.any():
            if self._alone[port]:
                self._give_arrived(arrived.at(is_over & ~matched), port)
            arrived, matched = arrived.at(~is_over), matched[~is_over]
        if not len(arrived):
            return
        columns = self._kept(arrived, port)
        for table, rows, places in self._records[port].append(arrived.keys, columns, arrived.times_us):
            if self._spec.settles[port]:
                table.change(rows)
                table.vectors[SETTLED].values[rows] = matched[places]
            if self._is_spent(STRETCH_ROWS):
                yield

    def _give_arrived(self, arrived: Arrived, port: int) -> None:
        """Emit records of a batch alone."""
        if len(arrived):
            left, right = (arrived.column, None) if port == LEFT else (None, arrived.column)
            self._give(left, right, len(arrived))

    # Time.

    def _settle(self) -> Steps:
        at_ms = self._time.at_ms
        if at_ms == MIN_WATERMARK_MS:
            return
        for port in (LEFT, RIGHT):
            due_ms = at_ms if at_ms == MAX_WATERMARK_MS else at_ms - self._spec.kept_ms[port]
            for stretch in self._records[port].stretches():
                if stretch.start_ms > due_ms:
                    break
                if self._alone[port]:
                    yield from self._give_alone(port, stretch, due_ms)
                if stretch.stop_ms - 1 <= due_ms:
                    self._orders.pop((port, stretch.number), None)
                    if at_ms != MAX_WATERMARK_MS:
                        self._records[port].drop(stretch)
                if self._is_spent(1):
                    yield

    def _give_alone(self, port: int, stretch: Stretch, due_ms: int) -> Steps:
        """Emit the records of a stretch that have no match and whose time is up."""
        table = stretch.table
        rows, times_ms = self._due(port, stretch, due_ms)
        left = ~table.vectors[SETTLED].values[rows]
        rows, times_ms = rows[left], times_ms[left]
        table.keeps_rows = True  # a snapshot may come between two steps
        for start in range(0, len(rows), MAX_ROWS):
            some = rows[start : start + MAX_ROWS]
            stored = self._stored(port, table, some)
            one, other = (stored, None) if port == LEFT else (None, stored)
            self._give(one, other, len(some))
            table.change(some)
            table.vectors[SETTLED].values[some] = True
            self._time.on_fired(int(times_ms[start : start + MAX_ROWS].max()) + self._spec.kept_ms[port])
            if self._is_spent(len(some)):
                yield
        table.keeps_rows = False

    def _due(self, port: int, stretch: Stretch, due_ms: int) -> tuple[IntArray, IntArray]:
        """Return the rows whose time is up, and their times, without most of those that an earlier call has returned."""
        table = stretch.table
        order = self._orders.get((port, stretch.number))
        if order is None or not order.holds_for(table):
            rows = table.rows()
            times_ms = self._records[port].times_us(table, rows) // 1000
            by_time = np.lexsort((table.positions(rows), times_ms))
            order = _Order(table.generation, table.top, rows[by_time], times_ms[by_time])
            self._orders[port, stretch.number] = order
        start, order.given = order.given, int(np.searchsorted(order.times_ms, due_ms, side="right"))
        part = slice(start, max(start, order.given))
        rows, times_ms = order.rows[part], order.times_ms[part]
        if table.top > order.top:
            more = np.arange(order.top, table.top)
            more_ms = self._records[port].times_us(table, more) // 1000
            late = more_ms <= due_ms
            rows, times_ms = np.concatenate([rows, more[late]]), np.concatenate([times_ms, more_ms[late]])
        return rows, times_ms


@dataclass(slots=True, eq=False)
class _Order:
    """The rows of a stretch in the order of their times, without those that were added since; the first `given` were due at
    an earlier watermark. So a watermark doesn't look through a stretch of which little is due."""

    generation: int
    top: int
    rows: IntArray
    times_ms: IntArray
    given: int = 0

    def holds_for(self, table: RecordTable) -> bool:
        """Whether the rows still have their numbers, and few were added."""
        return self.generation == table.generation and table.top - self.top <= MAX_UNSORTED_ROWS + len(self.rows) // 4
