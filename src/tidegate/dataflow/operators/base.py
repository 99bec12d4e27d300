"""An operator: one node of the graph at work in one subtask.

Records reach an operator as Arrow batches, event time as watermarks; it passes both on to its consumers, which are
further operators of the same chain or the writers of outgoing edges. Everything runs in the slot's single thread. Markers
are not seen here: the subtask freezes the operators of its chain one after the other between two batches. An operator that
holds records back until their epoch ends (grouped.py) lets them go in `before_snapshot`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.budget import Budget
from tidegate.state.column_table import ColumnState
from tidegate.state.descriptors import Columns, Descriptor
from tidegate.state.sections import FrozenState

AT_ONCE_MS = 0
"""As a time to wait for: it has come."""


class Consumer(Protocol):
    """Whatever takes an operator's output."""

    def on_batch(self, batch: pa.RecordBatch, port: int) -> None: ...

    def on_watermark(self, at_ms: int) -> None: ...

    def on_idle(self) -> None: ...

    def on_end(self) -> None: ...


class KeyedBackend(Protocol):
    """Where the keyed state of one operator in one subtask lives (heap now; others to come).

    What it promises is in tests/contract/test_backends.py. In short: `cursor.key` is the key that the state objects work
    on; a frozen version never changes, whatever is done to the state afterwards, and may be read by another thread
    meanwhile; several may be outstanding, and they are released in any order.
    """

    cursor: Any

    def table(self, descriptor: Descriptor) -> Any:
        """The state object that the user's function calls (state/handles.py says with which methods)."""

    def column_state(self, descriptor: Columns) -> ColumnState:
        """The tables of a columnar state, which operators work on in whole batches."""

    def load(self, state: str, rows: pa.RecordBatch, *, known: bool) -> None:
        """Takes rows of a snapshot in. Before the first record. `known`: the next snapshot builds on that one, so that
        they are no changes."""

    def begin_batch(self, keys: Sequence[Any]) -> None:
        """Records of these keys come next, in one go."""

    def end_batch(self) -> None:
        """They have come."""

    def maintain(self, budget: int) -> None:
        """A step of whatever is to be done now and then. `budget` is in entries."""

    def rows(self, state: str) -> Iterable[pa.RecordBatch]:
        """All rows of a state. Before the first record."""

    def close(self) -> None:
        """Lets go of everything. What is frozen stays readable."""

    def freeze(self) -> FrozenState:
        """What changed since the last freeze, or all of the state as it is now; in O(1)."""


@dataclass(frozen=True, slots=True)
class OperatorContext:
    """What a subtask gives its operators."""

    job: str
    subtask: int
    parallelism: int
    attempt: int
    key_group_count: int
    now_ms: Callable[[], int]  # the slot's clock
    deliver: Callable[[str, str], None]  # (sink, committable) to the driver
    make_backend: Callable[[pa.DataType], KeyedBackend]  # by the type of the key
    restored: Mapping[str, Iterable[pa.RecordBatch]] = field(default_factory=dict)  # rows of each state, its own only
    is_restored: bool = False  # False on the very first start
    goes_on: bool = False  # whether the next snapshot builds on the restored one
    is_native: bool = False  # the backend has the keyed state already, in its own files
    batch_now_ms: Callable[[], int] | None = None  # the time of the micro-batch, if these are the epochs
    batch_watermark_ms: Callable[[], int] | None = None  # and the streaming query's watermark
    on_timer_without_event_time: Callable[[], None] | None = None  # for the first timer where event time never moves
    snapshots: str = ""  # where the job's are, without secrets
    budget: Budget = field(default_factory=Budget)  # of a step of the subtask

    @property
    def user_now_ms(self) -> Callable[[], int]:
        """Processing time as users' functions see it. In a micro-batch it stands still."""
        return self.batch_now_ms or self.now_ms

    def rows(self, state: str) -> Iterator[pa.RecordBatch]:
        return iter(self.restored.get(state, ()))


class Operator:
    """The default is a stateless operator that passes everything on but records.

    `makes_time`: event time behind the operator comes from the records that pass it, and not from upstream.
    """

    makes_time = False

    def __init__(self, node: Node) -> None:
        self.node = node
        self.name = node.name
        self.consumers: list[Consumer] = []
        self.side_consumers: dict[str, list[Consumer]] = {tag: [] for tag in node.side_schemas}

    # What the subtask calls, in the order of a life.

    def open(self, context: OperatorContext) -> None:
        """Takes the restored state in. No record has arrived yet, none may be emitted."""

    def resume(self) -> None:
        """What was under way in the restored snapshot has been fed in; new records follow. What is known of event time is
        passed on here."""

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
        """Called when the clock has passed `deadline_ms`."""

    def deadline_ms(self) -> int | None:
        return None

    def alarm_ms(self) -> int | None:
        """When, by the time of day, it wants the next epoch to end though no record may come; None: not before one comes.
        Asked when it has been frozen, where epochs are the micro-batches of a query."""
        return None

    def on_busy(self, now_ms: int) -> None:
        """The chain is still at work on what it took last, and takes nothing meanwhile. Called if it has a deadline."""

    def maintain(self, budget: int) -> None:
        """A small step of background work between two batches."""

    # Work that is kept for later.

    def has_work(self) -> bool:
        """Return whether work is left from earlier calls."""
        return False

    def work(self) -> None:
        """Do one bounded step of it. Called if `has_work`, and while no output is full."""
        raise AssertionError(f"{self.name} has no work")

    def holds_records(self) -> bool:
        """Return whether part of the work is records that the state doesn't have yet. They are in no channel, so a snapshot
        waits for them. Other work must follow from the state: it is done after a restore as well."""
        return self.has_work()

    # Where a plan has loops and epochs are micro-batches, time moves before the marker, when no record is under way
    # (driver/moving_time.py).

    def hold_time(self) -> None:
        """Records that come from now on move time in the next micro-batch, and not in this one."""

    def move_time(self) -> None:
        """Passes the watermark of the micro-batch on, once in each."""

    def fire_due(self) -> None:
        """Fires the timers that are due by the time that the micro-batch has reached."""

    def before_snapshot(self) -> None:
        """All records of an epoch have come, and its marker will be passed on: what is emitted here is of that epoch yet.
        The operators of a chain are called in their order, before the first of them is frozen. Not where a marker may
        overtake records."""

    def freeze(self, epoch: int) -> FrozenState | None:
        """The state at the end of the epoch, in O(1); None where there is none to keep."""
        return None

    def on_complete(self, epoch: int) -> None:
        """The snapshot of `epoch`, and with it every earlier one's, is complete."""

    def close(self) -> None:
        """Releases what `open` took."""

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
