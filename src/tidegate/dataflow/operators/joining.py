"""What joins by event time have in common: sides, records of a batch, and lateness.

A record whose time the operator's watermark has reached is late: what it would be joined with may be gone. It changes
nothing, and goes to the side output for late records if there is one. A record without a time, or with a null in its key,
equals nothing: it has no match, but isn't late.

Event time moves first, and then follows what it makes due. What is due and was not emitted is found again in the restored
state by its time, so that a snapshot may come between any two steps.

Aggregates over the last records of a key (over.py) have one input, and the rest in common with joins.

Not here: what matches (interval_join.py, temporal_join.py).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from tidegate.channels.elements import MAX_WATERMARK_MS
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import OperatorContext
from tidegate.dataflow.operators.event_time import OperatorTime
from tidegate.dataflow.operators.joined_columns import Columns, JoinedColumn, stored_columns
from tidegate.dataflow.operators.keyed_table import plain
from tidegate.dataflow.operators.process import key_type
from tidegate.dataflow.operators.stepwise import Steps, StepwiseOperator
from tidegate.dataflow.operators.timed_records import TimedRecords, times_us_of
from tidegate.state.event_time import WATERMARK
from tidegate.state.key_store import Array, IntArray
from tidegate.state.operator_state import FrozenTogether
from tidegate.state.record_table import RecordTable
from tidegate.state.sections import FrozenState
from tidegate.types.limits import joined

MAX_ROWS = 65_536
"""A step ends when it has emitted so many rows. It takes at most as many matches at a time."""
STRETCH_ROWS = MAX_ROWS // 256
"""What a stretch of time costs apart from its records, as a number of rows."""
LEFT, RIGHT = 0, 1
"""The ports."""


@dataclass(frozen=True, slots=True)
class TimedSide:
    """One input: its key columns, its column of event time, and the columns that are kept beside the key."""

    key: tuple[str, ...]
    time: str
    columns: tuple[pa.Field, ...]


@dataclass(frozen=True, slots=True)
class Arrived:
    """Records of a batch, by column, with their keys and times."""

    columns: Mapping[str, pa.Array]
    keys: Sequence[pa.Array]
    times_us: IntArray

    def __len__(self) -> int:
        return len(self.times_us)

    def at(self, places: Array) -> Arrived:
        """Return the records at these places, or where this is true."""
        if places.dtype == bool:
            if places.all():
                return self
            places = np.flatnonzero(places)
        some = pa.array(places)
        keys = [column.take(some) for column in self.keys]
        return Arrived({name: column.take(some) for name, column in self.columns.items()}, keys, self.times_us[places])

    def column(self, name: str) -> pa.Array:
        return self.columns[name]

    def taken(self, places: IntArray) -> Columns:
        """Return the columns of the records at these places, each when it is asked for."""
        some = pa.array(places)
        return lambda name: self.columns[name].take(some)


class TimedOperator(StepwiseOperator):
    """Keeps the records of keyed inputs until event time makes them due. Joins have two inputs."""

    refuses_late: ClassVar[tuple[bool, bool]] = (True, True)

    def __init__(self, node: Node, sides: Sequence[TimedSide], late: Sequence[str | None]) -> None:
        """`late` are the tags of the side outputs for late records, by port."""
        super().__init__(node)
        self._sides = sides
        self._late = late
        self._key_type = key_type(node.input_schemas[LEFT], sides[LEFT].key)
        self._out: list[pa.RecordBatch] = []
        self._spent_rows = 0  # in this step

    # What a kind of operator implements.

    @abstractmethod
    def _open_state(self) -> Sequence[TimedRecords]:
        """Declare the states in `_backend`, and return those in stretches."""

    @abstractmethod
    def _take(self, arrived: Arrived, can_match: Array, port: int) -> Steps:
        """Process records that are not late. `can_match`: whether a record has a time, and no null in its key."""

    @abstractmethod
    def _settle(self) -> Steps:
        """Emit what is due by the operator's time, and drop what nobody needs."""

    @abstractmethod
    def _held_back_ms(self) -> int:
        """Return how far the times of later results may be behind the watermark."""

    # What the subtask calls.

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._by_epoch = context.batch_now_ms is not None
        self._time = OperatorTime(context, keyed=True)
        self._user_now_ms = context.user_now_ms
        self._backend = context.make_backend(self._key_type)
        timed = self._open_state()
        for state, batches in context.restored.items():
            if state == WATERMARK.name:
                self._time.load(batches)
            else:
                for rows in batches:
                    self._backend.load(state, rows, known=context.goes_on)
        for records in timed:
            records.unnest()

    def resume(self) -> None:
        """What is due by the restored time was in the state that was restored."""
        self._do(self._steps(self._settle()))

    def take_batch(self, batch: pa.RecordBatch, port: int) -> Steps:
        side = self._sides[port]
        columns = {name: plain(column) for name, column in zip(batch.schema.names, batch.columns, strict=True)}
        arrived = Arrived(columns, [columns[name] for name in side.key], times_us_of(self.name, columns[side.time]))
        has_time = valid_values(columns[side.time])
        late = np.bool_(self.refuses_late[port]) & has_time & (arrived.times_us // 1000 <= self._reached_ms(arrived.keys))
        if late.any():
            tag = self._late[port]
            if tag is None:
                self.late_dropped += int(np.count_nonzero(late))
            else:
                self.emit_side(tag, batch.filter(pa.array(late)))
            arrived, has_time = arrived.at(~late), has_time[~late]
        can_match = has_time
        for column in arrived.keys:
            can_match = can_match & valid_values(column)
        if len(arrived):
            yield from self._steps(self._take(arrived, can_match, port))

    def take_watermark(self, at_ms: int) -> Steps:
        reached_ms = self._time.advance(at_ms)
        yield from self._steps(self._settle())
        if reached_ms != MAX_WATERMARK_MS:
            reached_ms -= self._held_back_ms()
        self.forward_watermark(reached_ms)

    def before_snapshot(self) -> None:
        if self._by_epoch:  # all that the epoch's watermark made due belongs to the epoch
            self._finish()

    def freeze(self, epoch: int) -> FrozenState:
        return FrozenTogether(self._backend.freeze(), self._time.freeze())

    def maintain(self, budget: int) -> None:
        if not self.has_work():  # work under way knows the numbers of rows, which this may change
            self._backend.maintain(budget)

    def close(self) -> None:
        self._backend.close()

    # What the kinds of operators use.

    def _reached_ms(self, keys: Sequence[pa.Array]) -> Any:
        """Return the operator's time for each of these keys, or one number if it is the same for all."""
        return self._time.at_ms if self._time.is_one else self._time.of_keys(keys)

    def _stored(self, port: int, table: RecordTable, rows: IntArray) -> Columns:
        """Return the columns of stored records."""
        return stored_columns(table, rows, self._sides[port].key)

    def _kept(self, arrived: Arrived, port: int) -> list[pa.Array]:
        """Return the columns of records that are kept beside the key."""
        return [arrived.columns[field.name] for field in self._sides[port].columns]

    def _is_spent(self, rows: int) -> bool:
        """Whether this step has done enough, after so many further rows."""
        self._spent_rows += rows
        return self._spent_rows >= MAX_ROWS or self._budget.is_spent

    # Inside.

    def _steps(self, steps: Steps) -> Steps:
        """Emit what each step gave before it pauses."""
        self._spent_rows = 0
        for _ in steps:
            self._flush()
            yield
            self._spent_rows = 0
        self._flush()

    def _flush(self) -> None:
        if self._out:
            out, self._out = self._out, []
            for batch in joined(out):
                self.emit(batch)


class TimedJoinOperator(TimedOperator):
    """Joins two keyed inputs by event time."""

    def __init__(
        self,
        node: Node,
        sides: tuple[TimedSide, TimedSide],
        output: Sequence[JoinedColumn],
        late: tuple[str | None, str | None],
    ) -> None:
        super().__init__(node, sides, late)
        self._output = output

    def _give(self, left: Columns | None, right: Columns | None, count: int) -> None:
        """Emit rows of both sides, or of one whose other side is null, when the step ends."""
        made = [each.of(left, right, count) for each in self._output]
        self._out.append(pa.RecordBatch.from_arrays(made, schema=self.node.schema))


def valid_values(column: pa.Array) -> Array:
    if not column.null_count:
        return np.ones(len(column), bool)
    flags: Array = column.is_valid().to_numpy(zero_copy_only=False)
    return flags
