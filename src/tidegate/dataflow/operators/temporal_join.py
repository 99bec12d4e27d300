"""Temporal joins: a record is joined with the version of the right side that was valid at its time.

The right side is a table by key that changes: each of its records is a new version of its key, valid from its time until
that of the next version. Of versions with the same time, the one that arrived last counts.

Left records wait until the watermark has reached their time, because then all versions up to it have come. They wait in
stretches of time (timed_records.py), and go in the order of their times: emitted and deleted in one step, so that a snapshot
may come between any two. The versions of many records are found together: records and versions of their keys are sorted
by key and time, and each record takes the last version before it. That costs the same for keys with many versions.

A late version counts for the left records that are still to come. When a key gets a version, those of its versions are
deleted that are older than the one that was valid at the watermark, since no left record can need them. So a key keeps its
last version, and those around the watermark.

With a ttl, a key that is neither asked for nor updated loses its versions, by the clock (`_KeptVersions`). The versions of
keys that were last used about the same time are in one window of the state, whose number is the time at which the last of
them may have been used. A key that is used moves to the newest window. A window is dropped when the ttl of all its keys has
ended: so a key is forgotten between one ttl and one and a quarter after it was last used.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
import pyarrow as pa

from tidegate.channels.elements import MIN_WATERMARK_MS
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import KeyedBackend, Operator
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
from tidegate.dataflow.operators.timed_records import TimedRecords, times_us_of
from tidegate.state.descriptors import Records
from tidegate.state.event_time import WATERMARK
from tidegate.state.key_index import KeyIndex
from tidegate.state.key_store import Array, IntArray
from tidegate.state.record_table import RecordTable
from tidegate.state.sections import StateInfo

Gathered: TypeAlias = Generator[None, None, tuple[IntArray, IntArray, IntArray]]
Found: TypeAlias = Generator[None, None, IntArray]
"""Work in steps, and what it returns."""

SPANS_IN_TTL = 4
"""Windows of the state in the time of a ttl."""
MIN_TRIMMED_VERSIONS = 4
"""Versions of a key are not looked through before it has so many."""


@dataclass(frozen=True, slots=True)
class TemporalJoinSpec:
    """The join as a node of the graph. `how` is inner or left."""

    how: str
    sides: tuple[TimedSide, TimedSide]
    output: tuple[JoinedColumn, ...]
    late: tuple[str | None, str | None] = (None, None)
    ttl_ms: int | None = None
    kind: ClassVar[str] = "temporal join"
    stateful: ClassVar[bool] = True
    in_columns: ClassVar[bool] = True
    needs_event_time: ClassVar[bool] = True

    def create(self, node: Node) -> Operator:
        return TemporalJoinOperator(node, self)

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        of_key = key_type(node.input_schemas[LEFT], self.sides[LEFT].key)
        return (*(each.info(of_key) for each in self.descriptors), WATERMARK)

    @property
    def descriptors(self) -> tuple[Records, Records]:
        left, right = self.sides
        waiting = Records("waiting", left.columns, windowed=True)
        if self.ttl_ms is None:
            return waiting, Records("versions", right.columns)
        return waiting, Records("versions_by_use", right.columns, windowed=True)

    @property
    def text(self) -> str:
        left, right = self.sides
        by = ", ".join(f"{one} = {other}" for one, other in zip(left.key, right.key, strict=True))
        ttl = "" if self.ttl_ms is None else f", ttl {self.ttl_ms} ms"
        return f"{self.how}: {by}; as of {left.time}, versions since {right.time}{ttl}"


class _KeptVersions:
    """The versions of all keys: in one table, or with a ttl by the time of the keys' last use."""

    def __init__(self, spec: TemporalJoinSpec, backend: KeyedBackend, now_ms: Callable[[], int]) -> None:
        self._state = backend.record_state(spec.descriptors[RIGHT])
        self._columns = [field.name for field in spec.sides[RIGHT].columns]
        self._ttl_ms = spec.ttl_ms
        self._now_ms = now_ms

    def used(self, keys: Sequence[pa.Array]) -> RecordTable:
        """Return a table with all versions of these keys, each of which is given once."""
        if self._ttl_ms is None:
            return self._state.table()
        self.expire()
        span_ms = max(1, self._ttl_ms // SPANS_IN_TTL)
        newest = (self._now_ms() // span_ms + 1) * span_ms
        table = self._state.window(newest)
        for at in self._state.windows():
            if at != newest:
                self._move(self._state.window(at), table, keys)
        return table

    def expire(self) -> None:
        """Forget the keys whose ttl has ended."""
        if self._ttl_ms is not None:
            for at in self._state.windows():
                if at + self._ttl_ms <= self._now_ms():
                    self._state.drop(at)

    def _move(self, table: RecordTable, to: RecordTable, keys: Sequence[pa.Array]) -> None:
        for rows in [rows for _, rows in table.matches(keys)]:  # in the order of arrival, which they keep
            to.append(table.key_columns(rows), [table.column(name, rows) for name in self._columns])
            table.delete(rows)


class TemporalJoinOperator(TimedJoinOperator):
    """Joins records with the version that was valid at their time."""

    refuses_late = (True, False)

    def __init__(self, node: Node, spec: TemporalJoinSpec) -> None:
        super().__init__(node, spec.sides, spec.output, spec.late)
        self._spec = spec
        self._keeps_all = spec.how == "left"

    def _open_state(self) -> Sequence[TimedRecords]:
        left, _ = self._spec.descriptors
        self._waiting = TimedRecords(left, self._backend, time=self._sides[LEFT].time, kept_ms=0)
        self._kept_versions = _KeptVersions(self._spec, self._backend, self._user_now_ms)
        return (self._waiting,)

    def _held_back_ms(self) -> int:
        return 0

    # Records.

    def _take(self, arrived: Arrived, can_match: Array, port: int) -> Steps:
        if port == LEFT and self._keeps_all and not can_match.all():
            some = arrived.at(~can_match)
            self._give(some.column, None, len(some))
        arrived = arrived.at(can_match)
        if len(arrived) and port == LEFT:
            for _ in self._waiting.append(arrived.keys, self._kept(arrived, LEFT), arrived.times_us):
                if self._is_spent(STRETCH_ROWS):
                    yield
        elif len(arrived):
            index = KeyIndex(self._key_type)
            index.rows_of(arrived.keys)
            keys = index.keys(np.arange(index.top))
            self._versions = self._kept_versions.used(keys)
            self._versions.append(arrived.keys, self._kept(arrived, RIGHT))
            yield from self._trim(keys)

    def _trim(self, keys: Sequence[pa.Array]) -> Steps:
        """Delete the versions of these keys that no left record can need."""
        many = np.flatnonzero(self._versions.counts(keys) >= MIN_TRIMMED_VERSIONS)
        if not len(many):
            return
        numbers, rows, times_us = yield from self._versions_of([each.take(pa.array(many)) for each in keys])
        over = np.flatnonzero(times_us // 1000 <= self._time.at_ms)
        # In the order of keys and times, and for equal ones of arrival: all but the last one of a key are replaced.
        over = over[np.lexsort((times_us[over], numbers[over]))]
        self._versions.delete(rows[over[:-1][numbers[over[1:]] == numbers[over[:-1]]]])

    def _versions_of(self, keys: Sequence[pa.Array]) -> Gathered:
        """Return all versions of distinct keys: by version, the place of its key, its row and its time."""
        parts: list[tuple[IntArray, IntArray]] = []
        for numbers, rows in self._versions.matches(keys, MAX_ROWS):
            parts.append((numbers, rows))
            if self._is_spent(len(rows)):
                yield
        if not parts:
            nothing = np.empty(0, np.int64)
            return nothing, nothing, nothing
        numbers, rows = (np.concatenate([part[which] for part in parts]) for which in range(2))
        times_us = times_us_of(self.name, self._versions.column(self._sides[RIGHT].time, rows))
        return numbers, rows, times_us

    # Time.

    def maintain(self, budget: int) -> None:
        if not self.has_work():
            self._kept_versions.expire()
        super().maintain(budget)

    def _settle(self) -> Steps:
        at_ms = self._time.at_ms
        if at_ms == MIN_WATERMARK_MS:
            return
        for stretch in self._waiting.stretches():
            if stretch.start_ms > at_ms:
                break
            yield from self._join_due(stretch.table, at_ms)
            if stretch.stop_ms - 1 <= at_ms:
                self._waiting.drop(stretch)

    def _join_due(self, table: RecordTable, at_ms: int) -> Steps:
        """Emit the records of a stretch whose time has come."""
        rows = table.rows()
        times_us = self._waiting.times_us(table, rows)
        order = np.lexsort((table.positions(rows), times_us))
        rows, times_us = rows[order], times_us[order]
        count = int(np.searchsorted(times_us, (at_ms + 1) * 1000)) if at_ms < times_us.max(initial=0) // 1000 else len(rows)
        table.keeps_rows = True  # a snapshot may come between two steps
        for start in range(0, count, MAX_ROWS):
            part = slice(start, min(start + MAX_ROWS, count))
            some = rows[part]
            index = KeyIndex(self._key_type)
            numbers, _ = index.rows_of(table.key_columns(some))
            keys = index.keys(np.arange(index.top))
            self._versions = self._kept_versions.used(keys)
            self._versions.keeps_rows = True
            versions = yield from self._valid_at(numbers, keys, times_us[part])
            found = versions >= 0
            stored = self._stored(LEFT, table, some[found])
            if found.any():
                self._give(stored, self._stored(RIGHT, self._versions, versions[found]), int(found.sum()))
            if self._keeps_all and not found.all():
                self._give(self._stored(LEFT, table, some[~found]), None, int((~found).sum()))
            self._versions.keeps_rows = False
            table.delete(some)
            self._time.on_fired(int(times_us[part][-1]) // 1000)
            if self._is_spent(len(some)):
                yield
        table.keeps_rows = False

    def _valid_at(self, numbers: IntArray, keys: Sequence[pa.Array], times_us: IntArray) -> Found:
        """Return for each record the row of the version that was valid at its time, or -1. `numbers` are those of the
        records' keys."""
        of_version, versions, since_us = yield from self._versions_of(keys)
        key, time = np.concatenate([of_version, numbers]), np.concatenate([since_us, times_us])
        is_record = np.arange(len(key)) >= len(versions)
        order = np.lexsort((is_record, time, key))  # stable: versions with the same time stay in the order of arrival
        latest = np.maximum.accumulate(np.where(is_record[order], -1, np.arange(len(order))))
        best = order[np.maximum(latest, 0)]
        is_valid = (latest >= 0) & (key[best] == key[order])
        found = np.full(len(numbers), -1, np.int64)
        asked = is_record[order]
        there = asked & is_valid
        found[order[there] - len(versions)] = versions[best[there]]
        return found
