"""Process operators: the user's function with state, timers and side outputs, record by record.

`ProcessOperator` binds a function to its state. The kinds of functions differ only in their inputs. The loop over the
records of a batch is the hottest of the system: it sets the cursor to the record's key and calls the function, and does
nothing else. Columns are converted to Python values once, for records and keys alike. Records are made one by one as the
loop reaches them, so that each is freed before the next needs its memory. Between portions of the records the operator
looks at the clock, and may keep the rest for later (stepwise.py).

Timers fire in steps, too. Timers that have not fired when the state is frozen are part of the state. They are due by the
operator's own event time, so after a restore they fire first, whether or not a watermark comes.

If there is no key (in `open`, on a broadcast side, and so on), the cursor is at `NO_KEY`, so that keyed state can't be
used by mistake.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice, repeat
from typing import Any, TypeAlias

import pyarrow as pa

from tidegate.channels.elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import AT_ONCE_MS, KeyedBackend, Operator, OperatorContext
from tidegate.dataflow.operators.budget import MOST_ROWS, Pace
from tidegate.dataflow.operators.event_time import OperatorTime
from tidegate.dataflow.operators.returned import taker
from tidegate.dataflow.operators.stepwise import Steps, StepwiseOperator
from tidegate.dataflow.operators.user_code import RAISED, blame, fit
from tidegate.errors import GraphError, JobError
from tidegate.state.cells import NO_KEY, Cursor
from tidegate.state.columns import held_as_it_is, key_list, keys_to_arrow
from tidegate.state.descriptors import Descriptor, descriptors_of
from tidegate.state.event_time import WATERMARK
from tidegate.state.operator_state import FrozenTogether, OperatorStates
from tidegate.state.sections import FrozenState, StateInfo, StateKind
from tidegate.state.timers import TimeKind, TimerQueue, instant_ms, timers_descriptor
from tidegate.types import row_class, to_list

Method: TypeAlias = Callable[[Any, Any], Iterable[Any] | None]

# A step ends when this many timers have fired, however fast: an output may be full.
MOST_TIMERS = 8192


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A `Process`: records of one stream, operator state."""

    function: Any
    kind: str = "process"

    @property
    def stateful(self) -> bool:
        return bool(descriptors_of(self.function))

    def create(self, node: Node) -> Operator:
        return ProcessOperator(node, self.function, keys=((),))

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        return function_states(node, self.function, ())


@dataclass(frozen=True, slots=True)
class KeyedProcessSpec:
    """A `KeyedProcess`: records of one keyed stream, keyed state and timers."""

    function: Any
    key: tuple[str, ...]
    kind: str = "keyed process"
    stateful: bool = True

    def create(self, node: Node) -> Operator:
        return ProcessOperator(node, self.function, keys=(self.key,))

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        return function_states(node, self.function, self.key)


@dataclass(frozen=True, slots=True)
class CoProcessSpec:
    """A `CoProcess`: two streams, on ports 0 and 1, that share state. `keys` has the key of each, if they are keyed."""

    function: Any
    keys: tuple[tuple[str, ...], tuple[str, ...]] | None
    kind: str = "co-process"
    stateful: bool = True

    def create(self, node: Node) -> Operator:
        return ProcessOperator(node, self.function, keys=self.keys or ((), ()))

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        return function_states(node, self.function, self.keys[0] if self.keys else ())


class UserTimers:
    """`ctx.timers`."""

    __slots__ = ("_event", "_processing")

    def __init__(self, event: TimerQueue, processing: TimerQueue) -> None:
        self._event = event
        self._processing = processing

    def event_time(self, at: int | datetime) -> None:
        self._event.set(instant_ms(at))

    def processing_time(self, at: int | datetime) -> None:
        self._processing.set(instant_ms(at))

    def delete_event_time(self, at: int | datetime) -> None:
        self._event.delete(instant_ms(at))

    def delete_processing_time(self, at: int | datetime) -> None:
        self._processing.delete(instant_ms(at))


class TimersWithoutEventTime(UserTimers):
    """`ctx.timers` if event time never moves: the first timer of event time is reported."""

    __slots__ = ("_on_first",)

    def __init__(self, event: TimerQueue, processing: TimerQueue, on_first: Callable[[], None]) -> None:
        super().__init__(event, processing)
        self._on_first: Callable[[], None] | None = on_first

    def event_time(self, at: int | datetime) -> None:
        super().event_time(at)
        if self._on_first is not None:
            on_first, self._on_first = self._on_first, None
            on_first()


class UserContext:
    """`ctx`, as the user's function sees it."""

    __slots__ = ("_cursor", "_sides", "_timers", "now_ms", "parallelism", "subtask", "watermark_ms")

    def __init__(
        self, context: OperatorContext, cursor: Cursor, timers: UserTimers | None, sides: dict[str, list[Any]]
    ) -> None:
        self.subtask = context.subtask
        self.parallelism = context.parallelism
        self.now_ms = context.user_now_ms
        self.watermark_ms = MIN_WATERMARK_MS
        self._cursor = cursor
        self._timers = timers
        self._sides = sides

    @property
    def key(self) -> Any:
        key = self._cursor.key
        return None if key is NO_KEY else key

    @property
    def timers(self) -> UserTimers:
        if self._timers is None:
            raise JobError("timers belong to keys: use key_by before process, and a keyed function")
        if self._cursor.key is NO_KEY:
            raise JobError(
                "timers belong to keys, and there is no key here: set them in the methods that are called with "
                "a record of a keyed stream, and in on_timer"
            )
        return self._timers

    def side(self, tag: str, row: Sequence[Any]) -> None:
        if tag not in self._sides:
            raise GraphError(f"no side output {tag!r}: declare it with side_outputs={{{tag!r}: '…'}} at process()")
        self._sides[tag].append(row)


class ProcessOperator(StepwiseOperator):
    """Runs a function's methods by port: one for a single input, `process_left` and `process_right` for two."""

    def __init__(self, node: Node, function: Any, *, keys: tuple[tuple[str, ...], ...]) -> None:
        super().__init__(node)
        # A copy, since the states are set on it: the slots of a test may share a process, and with it the plan.
        self._function = copy.copy(function)
        self._keys = keys
        self._keyed = bool(keys[0])
        self._methods: list[Method] = []
        self._row_classes = [row_class(schema) for schema in node.input_schemas]
        self._sides: dict[str, list[Any]] = {tag: [] for tag in node.side_schemas}
        self._backend: KeyedBackend | None = None
        self._cursor = Cursor()
        self._event: TimerQueue | None = None
        self._processing: TimerQueue | None = None

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._pace, self._timer_pace = Pace(context.budget), Pace(context.budget)
        self._operator_states = OperatorStates(attempt=context.attempt, subtask=context.subtask)
        timers = self._open_keyed(context) if self._keyed else None
        self._context = self._context_for(context, timers)
        self._batch_now_ms = context.batch_now_ms
        for attribute, descriptor in descriptors_of(self._function).items():
            setattr(self._function, attribute, self._state_for(descriptor, context))
        self._time = OperatorTime(context, keyed=self._keyed)
        for state, batches in context.restored.items():
            self._load(state, batches, known=context.goes_on)
        self._context.watermark_ms = self._time.at_ms
        if context.is_native:
            for queue in (self._event, self._processing):
                assert queue is not None and queue.state is not None and self._backend is not None
                queue.queue((key_list(rows.column("key")), rows) for rows in self._backend.rows(queue.state))
        self._methods = self._ports()
        self._on_timer = getattr(self._function, "on_timer", None)
        self._call(self._function.open, self._context, at="the call of open()")
        if self._event is not None and _is_due(self._event, self._time.at_ms) and self._batch_now_ms is None:
            self._do_later(self._fire(self._event, self._time.at_ms))

    def take_batch(self, batch: pa.RecordBatch, port: int) -> Steps:
        columns = list(map(to_list, batch.columns))
        records: Iterable[Any] = map(tuple.__new__, repeat(self._row_classes[port]), zip(*columns, strict=True))
        if self._backend is None:
            yield from self._process(self._methods[port], records, None, batch.num_rows)
            return
        keys = self._key_list(batch, columns, port)
        if not self._time.is_one:
            at_ms = self._time.of_keys([batch.column(name) for name in self._keys[port]])
            records = self._each_at_its_time(records, at_ms.tolist())
        yield from self._process(self._methods[port], records, keys, batch.num_rows)
        yield from self._fire_at_the_end()

    def take_watermark(self, at_ms: int) -> Steps:
        at_ms = self._context.watermark_ms = self._time.advance(at_ms)
        if self._event is not None:
            yield from self._fire(self._event, at_ms)
        self.forward_watermark(at_ms)

    def on_time(self, now_ms: int) -> None:
        if self._processing is not None:
            self._do(self._fire_by_the_clock(now_ms if self._batch_now_ms is None else self._batch_now_ms()))

    def deadline_ms(self) -> int | None:
        """Return when the next timer is due. In a micro-batch it is due from the beginning, or not in this batch. While work
        is left, no timer is due."""
        at_ms = None if self._processing is None or self.has_work() else self._processing.next_ms()
        if at_ms is None or self._batch_now_ms is None:
            return at_ms
        return AT_ONCE_MS if at_ms <= self._batch_now_ms() else None

    def before_snapshot(self) -> None:
        if self._batch_now_ms is not None:
            self.fire_due()
            self._finish()

    def fire_due(self) -> None:
        """Fire timers that a record has set for a time that the micro-batch has reached. They belong to this batch."""
        if self._event is not None and self._processing is not None and self._batch_now_ms is not None:
            self._do(self._fire_reached(self._event, self._processing, self._batch_now_ms()))

    def maintain(self, budget: int) -> None:
        if self._backend is not None:
            self._backend.maintain(budget)

    def freeze(self, epoch: int) -> FrozenState | None:
        items = (self._operator_states.freeze(), self._time.freeze())
        return FrozenTogether(*items) if self._backend is None else FrozenTogether(self._backend.freeze(), *items)

    def on_complete(self, epoch: int) -> None:
        self._call(self._function.on_snapshot_complete, epoch)

    def close(self) -> None:
        self._call(self._function.close)
        if self._backend is not None:
            self._backend.close()

    # Inside.

    def _context_for(self, context: OperatorContext, timers: UserTimers | None) -> Any:
        """Return what the function is called with as `ctx`."""
        return UserContext(context, self._cursor, timers, self._sides)

    def _state_for(self, descriptor: Descriptor, context: OperatorContext) -> Any:
        """Return what the function calls on a state that it declares."""
        if descriptor.kind is not StateKind.KEYED:
            return self._operator_states.state(descriptor)
        assert self._backend is not None, f"{self.name}: keyed state {descriptor.name!r} without a key"
        return self._backend.table(descriptor)

    def _ports(self) -> list[Method]:
        if len(self._keys) == 1:
            return [self._function.process]
        return [self._function.process_left, self._function.process_right]

    def _process(self, method: Method, records: Iterable[Any], keys: Sequence[Any] | None, count: int) -> Steps:
        """Call the function with each record, and emit the rows that it returns."""
        context, cursor, pace = self._context, self._cursor, self._pace
        done = 0
        calls: Iterator[Any] = iter(records) if keys is None else zip(keys, records, strict=True)
        record: Any = None
        out: list[Any] = []
        take = taker(method, out)
        self._begin_batch(keys)
        while done < count:
            portion = min(pace.portion, count - done)
            try:
                if keys is None:
                    for record in islice(calls, portion):
                        rows = method(record, context)
                        if rows is not None:
                            take(rows)
                else:
                    for cursor.key, record in islice(calls, portion):
                        rows = method(record, context)
                        if rows is not None:
                            take(rows)
            except RAISED as error:
                blame(self.name, error, record)
            done += portion
            if done < count and (pace.is_over() or len(out) >= MOST_ROWS):
                self._end_batch(keys, out)
                self._budget.end()
                yield
                self._begin_batch(None if keys is None else keys[done:])
        self._end_batch(keys, out)

    def _begin_batch(self, keys: Sequence[Any] | None) -> None:
        if keys is not None and self._backend is not None:
            self._backend.begin_batch(keys)

    def _end_batch(self, keys: Sequence[Any] | None, out: list[Any]) -> None:
        """End the batch, or pause it: other keys may be processed during the pause."""
        self._cursor.key = NO_KEY
        self._context.watermark_ms = self._time.at_ms
        if keys is not None and self._backend is not None:
            self._backend.end_batch()
        self._emit_all(out)
        out.clear()

    def _each_at_its_time(self, records: Iterable[Any], at_ms: Sequence[int]) -> Iterator[Any]:
        """Yield the records. When the function receives one, the context has the watermark of its key."""
        context = self._context
        for context.watermark_ms, record in zip(at_ms, records, strict=True):
            yield record

    def _open_keyed(self, context: OperatorContext) -> UserTimers:
        schema = self.node.input_schemas[0]
        self._backend = context.make_backend(key_type(schema, self._keys[0]))
        self._cursor = self._backend.cursor
        self._event = TimerQueue(TimeKind.EVENT, self._backend)
        self._processing = TimerQueue(TimeKind.PROCESSING, self._backend)
        if context.on_timer_without_event_time is not None:
            return TimersWithoutEventTime(self._event, self._processing, context.on_timer_without_event_time)
        return UserTimers(self._event, self._processing)

    def _load(self, state: str, batches: Iterable[pa.RecordBatch], *, known: bool) -> None:
        for timers in (self._event, self._processing):
            if timers is not None and timers.state == state:
                timers.load(((key_list(rows.column("key")), rows) for rows in batches), known=known)
                return
        if state == WATERMARK.name:
            self._time.load(batches)
            return
        for rows in batches:
            if state in self._operator_states:
                self._operator_states.load(state, rows)
            else:
                assert self._backend is not None
                self._backend.load(state, rows, known=known)

    def _key_list(self, batch: pa.RecordBatch, columns: Sequence[list[Any]], port: int) -> Sequence[Any]:
        """Return the records' keys. `columns` are the batch's columns, already as Python values."""
        parts = []
        for name in self._keys[port]:
            index = batch.schema.get_field_index(name)
            column = batch.column(index)
            parts.append(columns[index] if held_as_it_is(column.type) else key_list(column))
        return parts[0] if len(parts) == 1 else list(zip(*parts, strict=True))

    def _fire(self, timers: TimerQueue, now_ms: int) -> Steps:
        """Fire the due timers in order of time, including those that are set meanwhile."""
        due, pace = timers.due(now_ms), self._timer_pace
        fired = 0  # in this step
        out: list[Any] = []
        take = taker(self._on_timer, out) if self._on_timer is not None else out.extend
        while True:
            asked = pace.portion
            count = self._call_on_timer(timers, islice(due, asked), take)
            fired += count
            if count == asked and not (pace.is_over() or fired >= MOST_TIMERS or len(out) >= MOST_ROWS):
                continue
            self._emit_all(out)
            out.clear()
            if count < asked:
                return
            self._budget.end()
            yield
            fired = 0

    def _call_on_timer(self, timers: TimerQueue, due: Iterable[int], take: Callable[[Any], None]) -> int:
        """Call the function with each timer, and return their number. The cursor is at the timer's key at each call."""
        context, count, latest_ms = self._context, 0, MIN_WATERMARK_MS
        at_ms: int | None = None
        try:
            for count, at_ms in enumerate(due, start=1):  # noqa: B007
                assert self._on_timer is not None
                latest_ms = max(latest_ms, at_ms)
                if not self._time.is_one:
                    context.watermark_ms = self._watermark_of_key()
                rows = self._on_timer(at_ms, context)
                if rows is not None:
                    take(rows)
        except RAISED as error:
            blame(self.name, error, at=None if at_ms is None else f"the timer at {at_ms} of key {context.key!r}")
        if timers is self._event:
            self._time.on_fired(latest_ms)
        self._cursor.key = NO_KEY
        context.watermark_ms = self._time.at_ms
        return count

    def _fire_by_the_clock(self, now_ms: int) -> Steps:
        assert self._processing is not None
        yield from self._fire(self._processing, now_ms)
        yield from self._fire_at_the_end()

    def _fire_reached(self, event: TimerQueue, processing: TimerQueue, now_ms: int) -> Steps:
        """Fire timers of both kinds. Each may set timers of the other."""
        reached = (event, self._time.at_ms), (processing, now_ms)
        while any(_is_due(timers, at_ms) for timers, at_ms in reached):
            for timers, at_ms in reached:
                yield from self._fire(timers, at_ms)

    def _fire_at_the_end(self) -> Steps:
        """Fire what is due at the end of event time, when no watermark follows that a timer could wait for. Records may
        still follow: from inputs without event time, and from a loop."""
        if self._time.at_ms == MAX_WATERMARK_MS and self._event is not None and self._event.next_ms() is not None:
            yield from self._fire(self._event, MAX_WATERMARK_MS)

    def _watermark_of_key(self) -> int:
        """Return the watermark of the key that the cursor is at."""
        kind = key_type(self.node.input_schemas[0], self._keys[0])
        return int(self._time.of_keys([keys_to_arrow([self._cursor.key], kind)])[0])

    def _emit_all(self, out: list[Any]) -> None:
        if out:
            for batch in fit(self.name, out, self.node.schema):
                self.emit(batch)
        for tag, rows in self._sides.items():
            if rows:
                for batch in fit(self.name, rows, self.node.side_schemas[tag], side=tag):
                    self.emit_side(tag, batch)
                rows.clear()

    def _call(self, method: Callable[..., Any], *arguments: Any, at: str | None = None) -> None:
        """Call a method of the function that has no key. With `at`, an error that happens twice is recognised."""
        self._cursor.key = NO_KEY
        try:
            method(*arguments)
        except RAISED as error:
            blame(self.name, error, at=at)


def _is_due(timers: TimerQueue, now_ms: int) -> bool:
    next_ms = timers.next_ms()
    return next_ms is not None and next_ms <= now_ms


def key_type(schema: pa.Schema, key: tuple[str, ...]) -> pa.DataType:
    """Return the Arrow type of a key: the column's own type for one column, a struct for several."""
    fields = [_without_dictionary(schema.field(name)) for name in key]
    return fields[0].type if len(fields) == 1 else pa.struct(fields)


def _without_dictionary(field: pa.Field) -> pa.Field:
    """Return the type without dictionary encoding, which is not part of a key and not kept in a snapshot."""
    return field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field


def function_states(node: Node, function: Any, key: tuple[str, ...]) -> tuple[StateInfo, ...]:
    """Return the states of a function, including its timers and its event time. `key` is empty if it is not keyed."""
    of_key = key_type(node.input_schemas[0], key) if key else None
    declared = list(descriptors_of(function).values())
    if key:
        declared += [timers_descriptor(kind) for kind in TimeKind]
    return (*(each.info(of_key if each.kind is StateKind.KEYED else None) for each in declared), WATERMARK)
