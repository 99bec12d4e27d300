"""The grouped operator: all records of a key that an epoch has, in one call, and the timers that are due after them.

This is what Spark does in a micro-batch. Records are gathered in Arrow batches as they come. When the epoch's marker has
come on all channels (`before_snapshot`), or all input has ended, the records are sorted by key and passed to the function,
a few thousand keys at a time. Then expired timers are processed. All output is emitted before the marker is forwarded. So
an epoch's records and output are in memory once.

Time stands still within an epoch. Processing time is that of the micro-batch. If there is no micro-batch, it is read from
the clock when the epoch ends. The watermark is Spark's: the watermark of epoch n+1 is the latest event time of all records
up to epoch n, in all subtasks, minus the delay; it never goes back. So each subtask must know all event times: the latest of
each source batch comes over a broadcast edge (`Latest`) to port 1, and at a marker all subtasks have received the same. A
record is late by the watermark of the epoch before its own.

In the first epoch, rows of an initial state are passed to the function before the records: from port 1 if the input is
bounded, from files in a store if it is not. How far the operator is (`Progress`) is broadcast state.

Invariants:
- The records of an epoch are passed to the function before the epoch's state is frozen, and their output is emitted before
  the marker.
- The watermark and `begun` are the same in all subtasks at a marker.

Not here: what a function does with a group (spark/processor_function.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.channels.elements import MAX_WATERMARK_MS
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import AT_ONCE_MS, KeyedBackend, Operator, OperatorContext
from tidegate.dataflow.operators.process import key_type
from tidegate.dataflow.operators.source import event_times_ms
from tidegate.dataflow.operators.user_code import blaming
from tidegate.hashing import hash_columns
from tidegate.keygroups import groups_of, key_groups_of
from tidegate.state.cells import NO_KEY
from tidegate.state.columns import held_as_it_is, key_list
from tidegate.state.cutting import in_batches
from tidegate.state.descriptors import Descriptor
from tidegate.state.evolution import IN_A_CLASS, Advice
from tidegate.state.operator_state import FrozenTogether, OperatorStates
from tidegate.state.sections import FrozenState, StateInfo, StateKind
from tidegate.state.timers import TimeKind, TimerQueue, timers_descriptor
from tidegate.store.checked import checked_chunks
from tidegate.store.opening import open_store

# The number of keys, and the approximate number of records, that are passed to a function at a time.
MAX_GROUPS, MAX_ROWS = 4096, 65_536
NO_TIME_MS = -1
LATEST = pa.schema([pa.field("latest", pa.int64())])


class Times(NamedTuple):
    """The times of an epoch, in milliseconds, or -1 if there is none."""

    now_ms: int
    watermark_ms: int


@dataclass(frozen=True, slots=True)
class Groups:
    """All records of some keys, in the order in which they came: `sizes[0]` records of `keys[0]`, and so on."""

    keys: list[Any]  # as the backend's cursor takes them
    sizes: list[int]
    rows: pa.RecordBatch


class GroupFunction(ABC):
    """The function that a grouped operator runs. It is sent pickled, so each subtask has a copy of its own.

    When a method is called, the cursor has no key. A method that uses state sets `cursor.key` first.
    """

    @property
    @abstractmethod
    def states(self) -> Sequence[Descriptor]:
        """Return the keyed states, which have unique names."""

    @abstractmethod
    def open(self, operator: str, tables: Mapping[str, Any], timers: TimerQueue | None, cursor: Any) -> None:
        """Prepare for the first record. `tables` has the state objects, by the names of the states."""

    @abstractmethod
    def take_initial(self, groups: Groups, times: Times) -> None:
        """Take rows of the initial state, in the first epoch, before its records."""

    @abstractmethod
    def take_records(self, groups: Groups, times: Times) -> Iterator[pa.RecordBatch]:
        """Yield the output as it is made, in batches of any size."""

    @abstractmethod
    def take_expired(self, expired: Iterator[int], times: Times) -> Iterator[pa.RecordBatch]:
        """Take the times of expired timers. The cursor is at a timer's key when its time comes from the iterator."""

    @abstractmethod
    def close(self) -> None: ...


class Latest:
    """Return the latest event time of a batch, in milliseconds. A function for `map_batches`."""

    def __init__(self, column: str) -> None:
        self._column = column

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        latest_ms = pc.max(event_times_ms(batch.column(self._column))).as_py()
        return None if latest_ms is None else pa.record_batch([pa.array([latest_ms], pa.int64())], schema=LATEST)


@dataclass(frozen=True, slots=True)
class EventTime:
    """The watermark is `delay_ms` behind the latest time in this column. If the query has several watermarks, only the query
    knows the resulting one (`is_of_query`)."""

    column: str
    delay_ms: int
    drops_late: bool
    is_of_query: bool = False


@dataclass(frozen=True, slots=True)
class InitialFile:
    """An Arrow stream with rows of an initial state. `checksum` is the CRC-32 of all of it."""

    name: str
    bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class InitialFiles:
    """The files of an initial state in a store."""

    address: str
    files: tuple[InitialFile, ...]
    schema: pa.Schema
    key: tuple[str, ...]


class SecondPort(Enum):
    """What comes on port 1, if it is used."""

    LATEST = "latest"
    INITIAL = "initial"


@dataclass(frozen=True, slots=True)
class GroupedSpec:
    """`timers` is the kind of time of the function's timers. `is_bounded`: there is one epoch, and no watermark.
    `initial_key` has the key columns of port 1, or of the files. `advice` is for a restore that is refused."""

    function: GroupFunction
    key: tuple[str, ...]
    timers: TimeKind | None = None
    event_time: EventTime | None = None
    second: SecondPort | None = None
    initial_key: tuple[str, ...] = ()
    initial: InitialFiles | None = None
    is_bounded: bool = False
    advice: Advice = IN_A_CLASS
    kind: str = "grouped process"
    stateful: bool = True
    gathers: ClassVar[bool] = True

    @property
    def sets_alarm(self) -> bool:
        """Whether its operator's `alarm_ms` may ever return a time."""
        return self.timers is not None and not self.is_bounded

    def create(self, node: Node) -> Operator:
        return GroupedOperator(node, self)

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        of_key = key_type(node.input_schemas[0], self.key)
        timers = [] if self.timers is None else [timers_descriptor(self.timers)]
        return (*(each.info(of_key) for each in [*self.function.states, *timers]), progress_descriptor().info())


def progress_descriptor() -> Descriptor:
    return Descriptor(kind=StateKind.BROADCAST, shape="map", item="long", map_key="string", name="__progress")


class Progress:
    """How far the operator is, as broadcast state: whether a first epoch is over, and event time."""

    def __init__(self, states: OperatorStates) -> None:
        self._states = states
        self._items = states.state(progress_descriptor())
        self.latest_ms: int | None = None  # the latest event time so far
        self.wants_more = False  # whether event time has moved, or may have moved, in the epoch that ended

    @property
    def begun(self) -> bool:
        return "begun" in self._items

    @property
    def watermark_ms(self) -> int:
        return int(self._items.get("watermark", 0))

    @property
    def late_ms(self) -> int:
        """The watermark of the epoch before."""
        return int(self._items.get("late", 0))

    def hear(self, latest_ms: int) -> None:
        self.latest_ms = latest_ms if self.latest_ms is None else max(self.latest_ms, latest_ms)

    def end_epoch(self, event_time: EventTime | None, watermark_ms: int) -> None:
        """Note that an epoch with this watermark ends. If the watermark is the query's, that of the next epoch isn't known
        yet; it is behind the latest time, whatever the delays are."""
        items = {"begun": 1}
        if event_time is not None:
            delay_ms = 0 if event_time.is_of_query else event_time.delay_ms
            reached_ms = 0 if self.latest_ms is None else self.latest_ms - delay_ms
            self.wants_more = reached_ms > watermark_ms
            items |= {
                "late": watermark_ms,
                "watermark": watermark_ms if event_time.is_of_query else max(watermark_ms, reached_ms),
            }
        self.latest_ms = None
        self._states.set_writable(True)
        for name, value in items.items():
            self._items.put(name, value)
        self._states.set_writable(False)


class GroupedOperator(Operator):
    def __init__(self, node: Node, spec: GroupedSpec) -> None:
        super().__init__(node)
        self._spec = spec
        self._function = spec.function
        self._gathered: list[pa.RecordBatch] = []
        self._initial: list[pa.RecordBatch] = []
        self._timers: TimerQueue | None = None
        self._has_ended = False

    def open(self, context: OperatorContext) -> None:
        self._context = context
        self._backend: KeyedBackend = context.make_backend(key_type(self.node.input_schemas[0], self._spec.key))
        self._cursor = self._backend.cursor
        self._operator_states = OperatorStates(attempt=context.attempt, subtask=context.subtask)
        self._progress = Progress(self._operator_states)
        tables = {str(each.name): self._backend.table(each) for each in self._function.states}
        if self._spec.timers is not None:
            self._timers = TimerQueue(self._spec.timers, self._backend)
        for state, batches in context.restored.items():
            self._load(state, batches)
        if context.is_native and self._timers is not None:
            assert self._timers.state is not None
            self._timers.queue((key_list(rows.column("key")), rows) for rows in self._backend.rows(self._timers.state))
        self._call(lambda: self._function.open(self.name, tables, self._timers, self._cursor))

    def on_batch(self, batch: pa.RecordBatch, port: int) -> None:
        if port == 0:
            event_time = self._spec.event_time
            if event_time is not None and event_time.drops_late:
                batch = without_late(batch, event_time.column, self._progress.late_ms)
            self._gathered.append(batch)
        elif self._spec.second is SecondPort.LATEST:
            self._progress.hear(pc.max(batch.column(0)).as_py())
        else:
            self._initial.append(batch)

    def on_watermark(self, at_ms: int) -> None:
        """Ignore it: event time is what Spark's would be, and does not come from the channels."""

    def on_idle(self) -> None:
        """Ignore it, too."""

    def before_snapshot(self) -> None:
        if not self._has_ended:
            self._end_epoch()

    def on_end(self) -> None:
        self._end_epoch()
        self._has_ended = True
        self.forward_watermark(MAX_WATERMARK_MS)
        super().on_end()

    def alarm_ms(self) -> int | None:
        """Return when the next timer is due. As in Spark, event time needs another epoch when the watermark has moved,
        whether or not a timer is due: the watermark of that epoch decides which records of the next one are late."""
        if self._timers is None:
            return None
        if self._spec.timers is TimeKind.PROCESSING:
            return self._timers.next_ms()
        return AT_ONCE_MS if self._progress.wants_more else None

    def maintain(self, budget: int) -> None:
        self._backend.maintain(budget)

    def freeze(self, epoch: int) -> FrozenState:
        return FrozenTogether(self._backend.freeze(), self._operator_states.freeze())

    def close(self) -> None:
        self._call(self._function.close)
        self._backend.close()

    # Inside.

    def _end_epoch(self) -> None:
        times = self._times()
        gathered, self._gathered = self._gathered, []
        # An epoch has few steps and thousands of records. So the background work for all of its records is done here.
        self._backend.maintain(sum(batch.num_rows for batch in gathered))
        if not self._progress.begun:
            for groups in self._grouped(self._initial_rows(), self._spec.initial_key):
                self._function.take_initial(groups, times)
        self._initial = []
        self._emit_all(
            batch
            for groups in self._grouped(gathered, self._spec.key)
            for batch in self._function.take_records(groups, times)
        )
        if self._timers is not None:
            due_ms = times.now_ms if self._spec.timers is TimeKind.PROCESSING else times.watermark_ms
            self._emit_all(self._function.take_expired(self._timers.expired(due_ms), times))
        self._cursor.key = NO_KEY
        self._progress.end_epoch(self._spec.event_time, self._watermark_ms())

    def _times(self) -> Times:
        return Times(self._context.user_now_ms(), NO_TIME_MS if self._spec.is_bounded else self._watermark_ms())

    def _watermark_ms(self) -> int:
        """Return the watermark of the epoch. The watermark of a query that starts from a savepoint may be behind."""
        event_time, of_query = self._spec.event_time, self._context.batch_watermark_ms
        if event_time is None or not event_time.is_of_query or of_query is None:
            return self._progress.watermark_ms
        return max(self._progress.watermark_ms, of_query())

    def _emit_all(self, batches: Iterable[pa.RecordBatch]) -> None:
        for batch in in_batches(batches):
            self.emit(batch)

    def _grouped(self, batches: list[pa.RecordBatch], key: tuple[str, ...]) -> Iterator[Groups]:
        """Yield the groups, with the backend prepared for their keys."""
        for groups in grouped(batches, key):
            self._backend.begin_batch(groups.keys)
            yield groups
            self._cursor.key = NO_KEY
            self._backend.end_batch()

    def _initial_rows(self) -> list[pa.RecordBatch]:
        """Return this subtask's rows of the initial state."""
        files = self._spec.initial
        if files is None:
            return self._initial
        context = self._context
        groups = key_groups_of(context.subtask, parallelism=context.parallelism, key_group_count=context.key_group_count)
        store, own = open_store(files.address), []
        for file in files.files:
            content = b"".join(checked_chunks(store, file, listed_by="the query that wrote it"))
            for batch in pa.ipc.open_stream(content):
                rows = pa.RecordBatch.from_arrays(
                    [
                        column if column.type == field.type else column.cast(field.type)
                        for column, field in zip(batch.columns, files.schema, strict=True)
                    ],
                    schema=files.schema,
                )
                found = groups_of(hash_columns([rows.column(each) for each in files.key]), context.key_group_count)
                own.append(rows.filter(pa.array((found >= groups.start) & (found < groups.stop))))
        return own

    def _load(self, state: str, batches: Iterable[pa.RecordBatch]) -> None:
        known = self._context.goes_on
        if self._timers is not None and self._timers.state == state:
            self._timers.load(((key_list(rows.column("key")), rows) for rows in batches), known=known)
            return
        for rows in batches:
            if state in self._operator_states:
                self._operator_states.load(state, rows)
            else:
                self._backend.load(state, rows, known=known)

    def _call(self, method: Callable[[], None]) -> None:
        self._cursor.key = NO_KEY
        with blaming(self.name):
            method()


def without_late(batch: pa.RecordBatch, column: str, watermark_ms: int) -> pa.RecordBatch:
    """Return the records that the watermark has not reached, and those without a time. A watermark begins at 0, so in Spark,
    as here, records from before 1970 are always late."""
    late = pc.fill_null(_at_or_before(batch.column(column), watermark_ms), False)
    return batch.filter(pc.invert(late)) if pc.any(late).as_py() else batch


def _at_or_before(times: pa.Array, at_ms: int) -> pa.Array:
    if pa.types.is_timestamp(times.type):
        return pc.less_equal(times.cast(pa.timestamp("us", times.type.tz)).cast(pa.int64()), at_ms * 1000)
    return pc.less_equal(event_times_ms(times), at_ms)


# ------------------------------------------------------------------------------------------------------------- grouping


def grouped(batches: Sequence[pa.RecordBatch], key: tuple[str, ...]) -> Iterator[Groups]:
    """Yield the records by key, some thousands at a time. Within a key they keep their order."""
    batches = [batch for batch in batches if batch.num_rows]
    if not batches:
        return
    rows = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
    codes = _codes([rows.column(name) for name in key])
    sizes = np.bincount(codes)
    rows = rows.take(pa.array(np.argsort(codes, kind="stable")))
    stops = np.cumsum(sizes)
    parts = [key_list(rows.column(name).take(pa.array(stops - sizes))) for name in key]
    keys = parts[0] if len(parts) == 1 else list(zip(*parts, strict=True))
    first = start = 0
    while first < len(keys):
        last = min(first + MAX_GROUPS, max(first + 1, int(np.searchsorted(stops, start + MAX_ROWS, side="right"))))
        stop = int(stops[last - 1])
        yield Groups(keys[first:last], sizes[first:last].tolist(), rows.slice(start, stop - start))
        first, start = last, stop


def _codes(columns: Sequence[pa.Array]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return a number for each row, from 0 without gaps, in the order of the keys. Rows with equal keys have one number."""
    codes = _codes_of(columns[0])
    for column in columns[1:]:
        more = _codes_of(column)
        _, codes = np.unique(codes * (int(more.max()) + 1) + more, return_inverse=True)
    return codes


def _codes_of(column: pa.Array) -> np.ndarray[Any, np.dtype[np.int64]]:
    if held_as_it_is(column.type):
        encoded = column.dictionary_encode("encode")
        order = np.asarray(pc.sort_indices(encoded.dictionary))
        ranks = np.empty(len(order), np.int64)
        ranks[order] = np.arange(len(order))
        codes: np.ndarray[Any, np.dtype[np.int64]] = ranks[np.asarray(encoded.indices)]
        return codes
    # NaN and zero have several forms, and Arrow can't encode what is nested.
    found: dict[Any, int] = {}
    return np.fromiter((found.setdefault(each, len(found)) for each in key_list(column)), np.int64, len(column))
