"""Session windows: the times of activity of each key, which end when a key has no records for a while.

A record at t is in the session [t, t + gap), and sessions of a key that overlap or touch are one. A session is complete when
the watermark has reached its end, since a record at the end itself would still belong to it. A record is late if its own
session [t, t + gap) is over, whatever other sessions its key has (as in Spark): so it makes no difference how records are
cut into batches.

A key may have several sessions at a time, if records come in disorder. State is a table for each *level*: level 0 has one
session of each key, with its bounds and accumulators, level 1 a second one of those keys that have two, and so on. Most keys
have only the first. The order of levels has no meaning.

A batch is processed as a whole. Its records are sorted by key and time and cut at gaps; these pieces and the sessions that
their keys have in the state are intervals. Intervals of a key that overlap are merged: into the session of the state that
begins first, or into a new one on the lowest level that is free for the key. All of that is arithmetic on columns; Python's
loops are over levels only.

Invariants:
- No two sessions of a key in the state overlap or touch.
- Without lateness, a session in the state has not fired. With lateness, one has fired for its key if the key's time has
  reached its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from tidegate.channels.elements import MAX_WATERMARK_MS
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.stepwise import Steps
from tidegate.dataflow.operators.window import (
    END,
    MAX_ROWS,
    START,
    times_from,
    times_ms_of,
    with_times,
)
from tidegate.dataflow.operators.window_aggregates import AggregatingWindowOperator, WindowSettings
from tidegate.dataflow.windows import Sessions, Times
from tidegate.state.column_table import ColumnTable

Rows: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


@dataclass(slots=True)
class Intervals:
    """Sessions of the state and pieces of a batch, by a number for each key. `levels` is -1 for pieces of the batch; `rows`
    are rows in the table of the level, or numbers of pieces."""

    keys: Rows
    starts: Times
    ends: Times
    levels: Rows
    rows: Rows

    def united(self) -> tuple[Intervals, Rows]:
        """Return the intervals in order of key and start, and for each the number of the session that it is part of."""
        starts, ends = packed(self.keys, [self.starts, self.ends])
        order = np.argsort(starts)
        inside = Intervals(self.keys[order], self.starts[order], self.ends[order], self.levels[order], self.rows[order])
        latest = np.maximum.accumulate(ends[order])  # of the same key, or the last one of the key before
        begins = np.ones(len(order), bool)
        begins[1:] = starts[order[1:]] > latest[:-1]
        return inside, np.cumsum(begins) - 1


class SessionWindowOperator(AggregatingWindowOperator):
    def __init__(self, node: Node, assigner: Sessions, settings: WindowSettings) -> None:
        super().__init__(node, assigner, settings)
        self._columns: tuple[str, ...] = (assigner.column,)  # of event time, by port
        self._gap_ms = assigner.gap_ms
        self._keeps = settings.lateness_ms > 0
        self._no_end_before_ms = 0  # no session that has not fired ends before; only known if `_is_scanned`
        self._is_scanned = False

    # Records.

    def _add(self, batch: pa.RecordBatch, port: int) -> Steps:
        column = self._columns[port]
        batch = with_times(batch, column)
        if not batch.num_rows:
            return
        times_ms = times_ms_of(self.name, batch.column(column))
        late = times_ms + (self._gap_ms + self._lateness_ms) <= self._times_of_keys(self._keys(batch, port))
        if late.any():
            batch, times_ms = self._emit_late(batch, late, port), times_ms[~late]
            if not batch.num_rows:
                return
        self._keep(batch, port)
        batch = self._numbered(batch)
        known = ColumnTable(self._key_type, [])
        numbers = known.rows_of(self._keys(batch, port))
        keys = known.keys(known.rows())
        pieces, piece_of = self._pieces(numbers, times_ms)
        inside, sessions = self._with_state(pieces, keys).united()
        places = self._merged(inside, sessions, keys)
        is_touched = np.zeros(len(places.keys), bool)
        is_touched[sessions[inside.levels < 0]] = True
        self._set_bounds(places, is_touched)
        of_piece = np.empty(len(pieces.rows), np.int64)
        is_piece = inside.levels < 0
        of_piece[inside.rows[is_piece]] = sessions[is_piece]
        of_record = of_piece[piece_of]
        for level in np.unique(places.levels[is_touched]).tolist():
            here = places.levels[of_record] == level
            records = batch if here.all() else batch.filter(pa.array(here))
            self._accumulate(self._state.window(level), places.rows[of_record[here]], records)
        self._no_end_before_ms = min(self._no_end_before_ms, int(places.ends.min()))
        if self._keeps:
            yield from self._fire_again(places, np.flatnonzero(is_touched), keys)

    def _keep(self, batch: pa.RecordBatch, port: int) -> None:
        """Keep the records themselves, if they are needed. None of them is late."""

    def _pieces(self, numbers: Rows, times_ms: Times) -> tuple[Intervals, Rows]:
        """Cut the records of a batch at gaps; return the pieces, and the piece of each record."""
        (pairs,) = packed(numbers, [times_ms])
        order = np.argsort(pairs)
        keys, times = numbers[order], times_ms[order]
        begins = np.ones(len(order), bool)
        begins[1:] = (keys[1:] != keys[:-1]) | (times[1:] - times[:-1] > self._gap_ms)
        firsts = np.flatnonzero(begins)
        lasts = np.append(firsts[1:], len(order)) - 1
        count = len(firsts)
        piece_of = np.empty(len(order), np.int64)
        piece_of[order] = np.cumsum(begins) - 1
        levels = np.full(count, -1, np.int64)
        return Intervals(keys[firsts], times[firsts], times[lasts] + self._gap_ms, levels, np.arange(count)), piece_of

    def _with_state(self, pieces: Intervals, keys: list[pa.Array]) -> Intervals:
        """Add the sessions that these keys have in the state."""
        parts = [pieces]
        for level in self._state.windows():
            table = self._state.window(level)
            rows = table.find(keys)
            numbers = np.flatnonzero(rows >= 0)
            rows = rows[numbers]
            starts, ends = table.vectors[START].values[rows], table.vectors[END].values[rows]
            parts.append(Intervals(numbers, starts, ends, np.full(len(rows), level, np.int64), rows))
        return Intervals(
            *(
                np.concatenate([getattr(part, name) for part in parts])
                for name in ("keys", "starts", "ends", "levels", "rows")
            )
        )

    def _merged(self, inside: Intervals, sessions: Rows, keys: list[pa.Array]) -> Intervals:
        """Merge the sessions of the state that have become one, and give a place to the new ones. Return all sessions with
        their bounds and places, by their numbers."""
        firsts = np.flatnonzero(np.diff(sessions, prepend=-1))
        ends, nothing = np.maximum.reduceat(inside.ends, firsts), np.full(len(firsts), -1, np.int64)
        united = Intervals(inside.keys[firsts], inside.starts[firsts], ends, nothing, nothing.copy())
        old = np.flatnonzero(inside.levels >= 0)
        if len(old):
            # The first one of a session in the state stays; those after it are merged into it, one in each round.
            is_first = np.diff(sessions[old], prepend=-1) != 0
            kept = old[is_first]
            united.levels[sessions[kept]], united.rows[sessions[kept]] = inside.levels[kept], inside.rows[kept]
            for other in old[~is_first].tolist():
                self._merge_into(united, int(sessions[other]), int(inside.levels[other]), int(inside.rows[other]))
        self._place_new(united, keys)
        return united

    def _set_bounds(self, places: Intervals, is_touched: Any) -> None:
        for level in np.unique(places.levels[is_touched]).tolist():
            here = is_touched & (places.levels == level)
            table, rows = self._state.window(level), places.rows[here]
            table.change(rows)
            table.vectors[START].values[rows] = places.starts[here]
            table.vectors[END].values[rows] = places.ends[here]

    def _merge_into(self, united: Intervals, session: int, level: int, row: int) -> None:
        """Two sessions of a key were joined by a record between them. That is rare."""
        table, other = self._state.window(int(united.levels[session])), self._state.window(level)
        rows = np.array([row], np.int64)
        self._merge_rows(table, united.rows[session : session + 1], other, rows)
        other.delete(rows)

    def _place_new(self, united: Intervals, keys: list[pa.Array]) -> None:
        """Put each new session on the lowest level on which its key has none."""
        level = 0
        new = np.flatnonzero(united.levels < 0)
        while len(new):
            table = self._state.window(level)
            of_new = [column.take(pa.array(united.keys[new])) for column in keys]
            is_free = table.find(of_new) < 0
            is_free[1:] &= united.keys[new[1:]] != united.keys[new[:-1]]  # the first one of each key
            here = new[is_free]
            united.levels[here] = level
            united.rows[here] = table.rows_of([column.filter(pa.array(is_free)) for column in of_new])
            new = new[~is_free]
            level += 1

    def _fire_again(self, places: Intervals, touched: Rows, keys: list[pa.Array]) -> Steps:
        """Emit those of the sessions that are complete already."""
        reached_ms = self._times_of_keys([column.take(pa.array(places.keys[touched])) for column in keys])
        due = touched[places.ends[touched] <= reached_ms]
        while len(due):
            some = due[: self._most_sessions(places.levels[due], places.rows[due])]
            yield from self._give_sessions(places.levels[some], places.rows[some], places.ends[some])
            due = due[len(some) :]
            if len(due) and self._is_spent(len(some)):
                yield

    # Sessions that are complete.

    def _fire(self, at_ms: int) -> Steps:
        if self._is_scanned and self._no_end_before_ms > at_ms:
            return
        levels, rows, ends = self._due(at_ms)
        self._keep_rows(True)  # a snapshot may come between two steps
        start = 0
        while start < len(ends):
            self._is_whole = False
            stop = start + self._most_sessions(levels[start:], rows[start:])
            yield from self._give_sessions(levels[start:stop], rows[start:stop], ends[start:stop])
            if not self._keeps:
                for level, table in self._tables():
                    table.delete(rows[start:stop][levels[start:stop] == level])
            # Sessions that end before the next one were all emitted.
            next_ms = int(ends[stop]) if stop < len(ends) else int(ends[-1]) + 1
            self._time.advance(next_ms - 1)
            self._is_whole = next_ms > ends[stop - 1]
            if stop < len(ends) and self._is_spent(stop - start):
                yield
            start = stop
        self._keep_rows(False)
        self._is_whole = True

    def _most_sessions(self, levels: Rows, rows: Rows) -> int:
        """Return how many of the first of these sessions to emit at a time."""
        return min(len(rows), MAX_ROWS)

    def _due(self, at_ms: int) -> tuple[Rows, Rows, Times]:
        """Return the sessions that are complete and have not fired, in the order of their ends."""
        self._no_end_before_ms, self._is_scanned = MAX_WATERMARK_MS, True
        found = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64))]
        for level, table in self._tables():
            rows = table.rows()
            ends = table.vectors[END].values[rows]
            later = ends > at_ms
            if later.any():
                self._no_end_before_ms = min(self._no_end_before_ms, int(ends[later].min()))
            is_due = ~later
            if self._keeps:
                is_due &= ends > self._times_of_keys(table.keys(rows))
            found.append((np.full(int(is_due.sum()), level, np.int64), rows[is_due], ends[is_due]))
        levels, rows, ends = (np.concatenate(columns) for columns in zip(*found, strict=True))
        order = np.argsort(ends, kind="stable")
        return levels[order], rows[order], ends[order]

    def _expire(self) -> None:
        for level, table in list(self._tables()):
            if self._keeps:
                rows = table.rows()
                self._forget(table, rows[table.vectors[END].values[rows] + self._lateness_ms <= self._time.at_ms])
            if level and not len(table):
                self._state.drop(level)

    def _forget(self, table: ColumnTable, rows: Rows) -> None:
        """Delete sessions of one level."""
        table.delete(rows)

    def _keep_rows(self, keeps: bool) -> None:
        for _, table in self._tables():
            table.keeps_rows = keeps

    def _tables(self) -> Iterator[tuple[int, ColumnTable]]:
        for level in self._state.windows():
            yield level, self._state.window(level)

    def _give_sessions(self, levels: Rows, rows: Rows, ends: Times) -> Steps:
        """Emit sessions, which are in order. Until the last step a snapshot waits."""
        yield from ()
        kind = self.node.schema.field(END).type
        parts, order = [], []
        for level in np.unique(levels).tolist():
            here = np.flatnonzero(levels == level)
            table = self._state.window(level)
            starts = times_from(table.vectors[START].values[rows[here]], kind)
            parts.append(self._results(table, rows[here], [starts, times_from(ends[here], kind)]))
            order.append(here)
        out = parts[0]
        if len(parts) > 1:
            out = pa.concat_batches(parts).take(pa.array(np.argsort(np.concatenate(order))))
        self._give(out)


def packed(keys: Rows, times: Sequence[Times]) -> list[Rows]:
    """Return a number for each pair of a key and a time, for several columns of times. The numbers are in the order of the
    pairs, and one column is sorted faster than two."""
    low, high = min(int(each.min()) for each in times), max(int(each.max()) for each in times)
    span = high - low + 1
    if span * (int(keys.max()) + 1) < 1 << 63:
        return [keys * span + (each - low) for each in times]
    # Times are so far apart that 64 bits don't hold the pairs: their ranks do.
    ranks = np.unique(np.concatenate(times), return_inverse=True)[1]
    count = len(ranks) + 1
    return [keys * count + each for each in np.split(ranks, len(times))]
