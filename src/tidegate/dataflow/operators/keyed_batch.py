"""The operator of a `KeyedBatchProcess`: the user's function on whole batches, with columns of keyed state.

It differs from `ProcessOperator` in what the function is called with. Timers are the same state, fire in the same steps, and
are given to the function some at a time.

After a rescale, event time may differ between the keys of a batch for a while (event_time.py). Then the batch is cut by the
watermarks of its keys, so that `ctx.watermark_ms` is right for all records of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from tidegate.channels.elements import MIN_WATERMARK_MS
from tidegate.dataflow.functions import Instants
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import Operator, OperatorContext
from tidegate.dataflow.operators.given_batches import batches_of, checked_batch
from tidegate.dataflow.operators.process import ProcessOperator, UserTimers, function_states, key_type
from tidegate.dataflow.operators.stepwise import Steps
from tidegate.dataflow.operators.user_code import RAISED, blame
from tidegate.errors import GraphError, JobError
from tidegate.state.batch_keys import Keys, keys_of
from tidegate.state.cells import NO_KEY, Cursor
from tidegate.state.column_handles import ColumnsHandle
from tidegate.state.columns import key_list, keys_to_arrow
from tidegate.state.descriptors import DeclaredColumns, Descriptor
from tidegate.state.sections import StateInfo
from tidegate.state.timers import TimerQueue

_OVER = object()


@dataclass(frozen=True, slots=True)
class KeyedBatchSpec:
    """A `KeyedBatchProcess`: batches of one keyed stream, columns of keyed state and timers."""

    function: Any
    key: tuple[str, ...]
    kind: str = "keyed batch process"
    stateful: bool = True
    in_columns: ClassVar[bool] = True

    def create(self, node: Node) -> Operator:
        return KeyedBatchOperator(node, self.function, keys=(self.key,))

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        return function_states(node, self.function, self.key)


class KeysTimers:
    """`ctx.timers`, for many keys."""

    def __init__(self, timers: UserTimers, cursor: Cursor) -> None:
        self._timers = timers
        self._cursor = cursor

    def event_time(self, keys: Keys, at: Instants) -> None:
        self._each(self._timers.event_time, keys, at)

    def processing_time(self, keys: Keys, at: Instants) -> None:
        self._each(self._timers.processing_time, keys, at)

    def delete_event_time(self, keys: Keys, at: Instants) -> None:
        self._each(self._timers.delete_event_time, keys, at)

    def delete_processing_time(self, keys: Keys, at: Instants) -> None:
        self._each(self._timers.delete_processing_time, keys, at)

    def _each(self, call: Callable[[Any], None], keys: Keys, at: Any) -> None:
        if not isinstance(keys, Keys):
            raise JobError(
                f"timers are set for ctx.keys or for a part of them, such as ctx.keys.where(mask), and not for {keys!r:.60}"
            )
        instants = at.tolist() if isinstance(at, np.ndarray | pa.Array) else [at] * len(keys)
        if len(instants) != len(keys):
            raise JobError(f"timers of {len(keys)} keys were given {len(instants)} instants: give one for each key, or one")
        columns = [key_list(column) for column in keys.columns.columns]
        try:
            for key, instant in zip(columns[0] if len(columns) == 1 else zip(*columns, strict=True), instants, strict=True):
                self._cursor.key = key
                call(instant)
        finally:
            self._cursor.key = NO_KEY


class KeysContext:
    """`ctx`, as a user's function on columns sees it."""

    def __init__(self, context: OperatorContext, timers: KeysTimers, sides: dict[str, list[pa.RecordBatch]]) -> None:
        self.subtask = context.subtask
        self.parallelism = context.parallelism
        self.now_ms = context.user_now_ms
        self.watermark_ms = MIN_WATERMARK_MS
        self.timers = timers
        self._keys: Keys | None = None
        self._make_keys: Callable[[], Keys] | None = None
        self._sides = sides

    @property
    def keys(self) -> Keys:
        if self._keys is None:
            if self._make_keys is None:
                raise JobError("there are no keys here: use ctx.keys in process and on_timers")
            self._keys = self._make_keys()
        return self._keys

    def at(self, make_keys: Callable[[], Keys] | None) -> None:
        """Say what the keys are, which are computed when they are asked for. None: there are none."""
        self._keys, self._make_keys = None, make_keys

    def side(self, tag: str, batch: pa.RecordBatch) -> None:
        if tag not in self._sides:
            raise GraphError(f"no side output {tag!r}: declare it with side_outputs={{{tag!r}: '…'}} at process()")
        self._sides[tag].append(batch)


class KeyedBatchOperator(ProcessOperator):
    _context: KeysContext

    def __init__(self, node: Node, function: Any, *, keys: tuple[tuple[str, ...], ...]) -> None:
        super().__init__(node, function, keys=keys)
        self._side_batches: dict[str, list[pa.RecordBatch]] = {tag: [] for tag in node.side_schemas}
        self._handles: list[ColumnsHandle] = []

    def take_batch(self, batch: pa.RecordBatch, port: int) -> Steps:
        names = self._keys[0]
        for part, at_ms in self._by_time(batch):
            columns = [part.column(name) for name in names]
            self._context.watermark_ms = at_ms
            self._context.at(lambda columns=columns: keys_of(names, columns))  # type: ignore[misc]
            yield from self._run(
                lambda part=part: self._function.process(part, self._context),  # type: ignore[misc]
                at=f"a batch of {part.num_rows} records",
            )
        self._context.watermark_ms = self._time.at_ms
        yield from self._fire_at_the_end()

    def maintain(self, budget: int) -> None:
        if not self.has_work():  # a function that pauses has looked up rows, whose numbers this may change
            for handle in self._handles:
                handle.maintain(budget)
            super().maintain(budget)

    # Inside.

    def _context_for(self, context: OperatorContext, timers: UserTimers | None) -> Any:
        assert timers is not None
        return KeysContext(context, KeysTimers(timers, self._cursor), self._side_batches)

    def _state_for(self, descriptor: Descriptor, context: OperatorContext) -> Any:
        assert isinstance(descriptor, DeclaredColumns) and self._backend is not None
        table = self._backend.column_state(descriptor).table()
        self._handles.append(ColumnsHandle(table, descriptor, context.user_now_ms))
        return self._handles[-1]

    def _by_time(self, batch: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Yield the batch, or parts of it, with the watermark that its keys have."""
        if self._time.is_one:
            yield batch, self._time.at_ms
            return
        times = self._time.of_keys([batch.column(name) for name in self._keys[0]])
        for at_ms in np.unique(times):
            yield batch.filter(pa.array(times == at_ms)), int(at_ms)

    def _run(self, call: Callable[[], Any], *, at: str) -> Steps:
        """Call the function, and emit what it gives."""
        given: Iterator[Any] = iter(())
        try:
            given = iter(batches_of(call()))
        except RAISED as error:
            blame(self.name, error, at=at)
        while True:
            try:
                out = next(given, _OVER)
            except RAISED as error:
                blame(self.name, error, at=at)
            self._emit_sides()
            if out is _OVER:
                break
            checked = checked_batch(self.name, out, self.node.schema)
            if checked.num_rows:
                self.emit(checked)
            if self._budget.is_spent:
                yield
        self._context.at(None)
        for handle in self._handles:
            handle.forget()

    def _emit_sides(self) -> None:
        for tag, batches in self._side_batches.items():
            for batch in batches:
                checked = checked_batch(self.name, batch, self.node.side_schemas[tag], side=tag)
                if checked.num_rows:
                    self.emit_side(tag, checked)
            batches.clear()

    def _call_on_timer(self, timers: TimerQueue, due: Iterable[int], take: Callable[[Any], None]) -> int:
        """Call the function with these timers, and return their number."""
        at: list[int] = []
        keys: list[Any] = []
        for at_ms in due:
            at.append(at_ms)
            keys.append(self._cursor.key)
        self._cursor.key = NO_KEY
        if at:
            column = keys_to_arrow(keys, key_type(self.node.input_schemas[0], self._keys[0]))
            columns = column.flatten() if len(self._keys[0]) > 1 else [column]
            is_fired = np.array(at, np.int64)
            for some, at_ms in self._timers_by_time(columns):
                taken = [each.take(pa.array(some)) for each in columns]
                self._context.watermark_ms = at_ms
                self._context.at(lambda taken=taken: keys_of(self._keys[0], taken))  # type: ignore[misc]
                steps = self._run(
                    lambda some=some: self._function.on_timers(is_fired[some], self._context),  # type: ignore[misc]
                    at=f"the {len(some)} timers of {at_ms}",
                )
                for _ in steps:  # timers that were taken out of the state are in no snapshot, so there is no pause here
                    pass
            if timers is self._event:
                self._time.on_fired(max(at))
        self._context.watermark_ms = self._time.at_ms
        return len(at)

    def _timers_by_time(self, columns: list[pa.Array]) -> Iterator[tuple[Any, int]]:
        """Yield which of the timers of these keys have one watermark, and that watermark."""
        if self._time.is_one:
            yield np.arange(len(columns[0])), self._time.at_ms
            return
        times = self._time.of_keys(columns)
        for at_ms in np.unique(times):
            yield np.flatnonzero(times == at_ms), int(at_ms)
