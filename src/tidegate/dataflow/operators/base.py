"""An operator: one node of the graph at work in one subtask.

Records reach an operator as Arrow batches, and event time as watermarks. The operator passes both on to its consumers:
further operators of the same chain, or the writers of outgoing edges. Everything runs in the slot's single thread. Operators
don't see markers: the subtask freezes the operators of its chain one after another, between two batches. An operator that
keeps records until their epoch ends (grouped.py) emits their results in `before_snapshot`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.budget import Budget
from tidegate.state.column_table import ColumnState
from tidegate.state.descriptors import Columns, Descriptor, Records
from tidegate.state.record_table import RecordState
from tidegate.state.sections import FrozenState

AT_ONCE_MS = 0
"""A deadline that has already passed."""


class Consumer(Protocol):
    """Whatever takes an operator's output."""

    def on_batch(self, batch: pa.RecordBatch, port: int) -> None: ...

    def on_watermark(self, at_ms: int) -> None: ...

    def on_idle(self) -> None: ...

    def on_end(self) -> None: ...


class KeyedBackend(Protocol):
    """Where the keyed state of one operator in one subtask is kept.

    tests/contract/test_backends.py checks what a backend promises. In short: `cursor.key` is the key that the state objects
    work on. A frozen version never changes, whatever happens to the state afterwards, and another thread may read it
    meanwhile. Several frozen versions may be outstanding; they are released in any order.
    """

    cursor: Any

    def table(self, descriptor: Descriptor) -> Any:
        """Return the state object that the user's function calls. Its methods are those of state/handles.py."""

    def column_state(self, descriptor: Columns) -> ColumnState:
        """Return the tables of a columnar state, which operators work on in whole batches."""

    def record_state(self, descriptor: Records) -> RecordState:
        """The tables of a state of records, which operators work on in whole batches."""

    def load(self, state: str, rows: pa.RecordBatch, *, known: bool) -> None:
        """Load rows of a snapshot, before the first record. `known`: the next snapshot builds on that one, so the rows are
        not changes."""

    def begin_batch(self, keys: Sequence[Any]) -> None:
        """Prepare for the records of these keys, which come next."""

    def end_batch(self) -> None:
        """End the batch that `begin_batch` has begun."""

    def maintain(self, budget: int) -> None:
        """Do one step of background work. `budget` is in entries."""

    def rows(self, state: str) -> Iterable[pa.RecordBatch]:
        """Return all rows of a state. Called before the first record."""

    def close(self) -> None:
        """Release everything. Frozen versions stay readable."""

    def freeze(self) -> FrozenState:
        """Return what changed since the last freeze, or all of the present state, in O(1)."""


@dataclass(frozen=True, slots=True)
class OperatorContext:
    """What a subtask passes to its operators."""

    job: str
    subtask: int
    parallelism: int
    attempt: int
    key_group_count: int
    now_ms: Callable[[], int]  # the slot's clock
    deliver: Callable[[str, str], None]  # (sink, committable) to the driver
    make_backend: Callable[[pa.DataType], KeyedBackend]  # by the type of the key
    restored: Mapping[str, Iterable[pa.RecordBatch]] = field(default_factory=dict)  # the subtask's rows, by state
    is_restored: bool = False  # False on the very first start
    goes_on: bool = False  # whether the next snapshot builds on the restored one
    is_native: bool = False  # whether the backend has the keyed state already, in its own files
    batch_now_ms: Callable[[], int] | None = None  # the time of the micro-batch, if micro-batches are the epochs
    batch_watermark_ms: Callable[[], int] | None = None  # and the streaming query's watermark
    on_timer_without_event_time: Callable[[], None] | None = None  # called at the first timer if event time never moves
    snapshots: str = ""  # the address of the job's snapshots, without secrets
    budget: Budget = field(default_factory=Budget)  # of a step of the subtask

    @property
    def user_now_ms(self) -> Callable[[], int]:
        """Processing time as users' functions see it. It stands still during a micro-batch."""
        return self.batch_now_ms or self.now_ms

    def rows(self, state: str) -> Iterator[pa.RecordBatch]:
        return iter(self.restored.get(state, ()))


class Operator:
    """A stateless operator that passes everything on except records, unless a subclass says otherwise.

    `makes_time`: event time downstream comes from the records that pass the operator, and not from upstream.
    """

    makes_time = False

    def __init__(self, node: Node) -> None:
        self.node = node
        self.name = node.name
        self.consumers: list[Consumer] = []
        self.side_consumers: dict[str, list[Consumer]] = {tag: [] for tag in node.side_schemas}
        self.late_dropped = 0  # late records that went to no output, in this attempt

    # What the subtask calls, in the order of a life.

    def open(self, context: OperatorContext) -> None:
        """Load the restored state. No record has arrived yet, and none may be emitted."""

    def resume(self) -> None:
        """Begin to work. The in-flight records of the restored snapshot have been processed, and new records follow.
        Operators that know event time from the snapshot forward it here."""

    def on_batch(self, batch: pa.RecordBatch, port: int) -> None:
        raise AssertionError(f"{self.name} takes no records")

    def on_watermark(self, at_ms: int) -> None:
        self.forward_watermark(at_ms)

    def on_idle(self) -> None:
        for consumer in self._everyone():
            consumer.on_idle()

    def on_end(self) -> None:
        for consumer in self._everyone():
            consumer.on_end()

    def on_time(self, now_ms: int) -> None:
        """Do what is due by the clock. Called when the clock has passed `deadline_ms`."""

    def deadline_ms(self) -> int | None:
        """Return when `on_time` is to be called, or None."""
        return None

    def alarm_ms(self) -> int | None:
        """Return the time of day at which the next epoch should end even if no record comes, or None if it can wait for one.
        Called after a freeze, if epochs are the micro-batches of a query."""
        return None

    def on_asked(self, *, found_none: bool) -> None:
        """Note that the subtask has looked for records, and whether there were none. Called if the operator has a deadline.
        A subtask that works, or whose outputs are full, doesn't look."""

    def on_lull(self) -> bool:
        """Note that the subtask has taken all the records that there were, and return whether the operator has emitted some.
        One that holds records to emit them together emits them now: the subtask keeps up."""
        return False

    def maintain(self, budget: int) -> None:
        """Do a small step of background work, between two batches."""

    # Work that is kept for later.

    def has_work(self) -> bool:
        """Return whether work is left from earlier calls."""
        return False

    def work(self) -> None:
        """Do one bounded step of the work that is left. Called if `has_work`, and while no output is full."""
        raise AssertionError(f"{self.name} has no work")

    def holds_records(self) -> bool:
        """Return whether records wait that are not in the state yet. They are in no channel, so a snapshot waits for them.
        All other work must follow from the state, so that it is also done after a restore."""
        return self.has_work()

    # If a plan has loops and its epochs are micro-batches, time moves before the marker, when no record is in flight
    # (driver/moving_time.py).

    def hold_time(self) -> None:
        """Let records that come from now on move time in the next micro-batch, and not in this one."""

    def move_time(self) -> None:
        """Forward the watermark of the micro-batch, once in each."""

    def fire_due(self) -> None:
        """Fire the timers that are due by the time that the micro-batch has reached."""

    def before_snapshot(self) -> None:
        """Emit what still belongs to the epoch: all of its records have come, and its marker follows. The operators of a
        chain are called in order, before the first of them is frozen. If markers may overtake records, those come later, and
        are logged."""

    def freeze(self, epoch: int) -> FrozenState | None:
        """Return the state at the end of the epoch, in O(1), or None if the operator has none."""
        return None

    def on_complete(self, epoch: int) -> None:
        """Note that the snapshot of `epoch` is complete, and with it every earlier epoch."""

    def close(self) -> None:
        """Release what `open` acquired."""

    # What an operator calls.

    def emit(self, batch: pa.RecordBatch) -> None:
        for consumer in self.consumers:
            consumer.on_batch(batch, 0)

    def emit_side(self, tag: str, batch: pa.RecordBatch) -> None:
        for consumer in self.side_consumers[tag]:
            consumer.on_batch(batch, 0)

    def forward_watermark(self, at_ms: int) -> None:
        for consumer in self._everyone():
            consumer.on_watermark(at_ms)

    def _everyone(self) -> Iterator[Consumer]:
        yield from self.consumers
        for consumers in self.side_consumers.values():
            yield from consumers
