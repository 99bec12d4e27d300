"""The classes that users subclass, and the contexts that their methods get.

    KeyedProcess      after `key_by`; keyed state and timers
    KeyedBatchProcess after `key_by`; whole batches, with columns of keyed state and timers
    Process           on a stream without key; operator state
    CoProcess         on two connected streams, both keyed or neither
    BroadcastProcess  on a stream connected with a broadcast one; broadcast state

Every method that handles one record may be a generator, return an iterable of rows, or return None. A row is a tuple (a
named one or not) or list with the values of the schema declared as `returns`, in its order.

An instance is built on the driver, pickled, and unpickled once for each subtask. What `__init__` sets is pickled with it;
what can't be pickled (connections, caches) belongs in `open`. All methods of one instance are called from one thread.
After a failure a new copy of the instance resumes with the restored state, so whatever must survive has to be state, not
an attribute.

This module declares contracts only. The contexts are implemented by the operators, the states by the backends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.errors import JobError
from tidegate.state.batch_keys import Keys

# The values of one record in the order of its schema. Records come in as named tuples: `bid.price`, `bid[1]`.
Row: TypeAlias = tuple[Any, ...]
# Rows to emit: an iterable, or nothing. A generator is annotated with what it yields: `Iterator[tuple[str, int]]`.
Rows: TypeAlias = Iterable[Any] | None
# Epoch milliseconds, or a datetime (a naive one is taken as UTC).
Instant: TypeAlias = int | datetime
# An instant for each of some keys, in epoch milliseconds, or one instant for all of them.
Instants: TypeAlias = "Instant | npt.NDArray[np.int64] | pa.Array"
# What a function on columns emits.
Batches: TypeAlias = "pa.RecordBatch | Iterable[pa.RecordBatch] | None"


class Timers(Protocol):
    """Sets and deletes the timers of the present key. A timer is keyed state: it is in snapshots and is rescaled.

    A key has at most one timer for one instant and kind: setting it again changes nothing. Timers fire in the order of
    their instants, as `on_timer(at, ctx)` with `at` in epoch milliseconds and `ctx.key` set.
    """

    def event_time(self, at: Instant) -> None:
        """Set a timer that fires when the watermark reaches `at`. If the watermark is there already, the timer fires when
        the watermark moves next, or at the end of the micro-batch."""

    def processing_time(self, at: Instant) -> None:
        """Set a timer that fires when processing time reaches `at`. In a streaming DataFrame that is the time of a
        micro-batch: the timer fires in the first batch whose time is `at` or later, before the batch's records."""

    def delete_event_time(self, at: Instant) -> None:
        """Delete the timer that `event_time(at)` has set. Nothing happens if there is none."""

    def delete_processing_time(self, at: Instant) -> None:
        """Delete the timer that `processing_time(at)` has set. Nothing happens if there is none."""


class Context(Protocol):
    """What a function can use while it handles a record or a timer. It is valid only during that call.

    In `open` only `subtask`, `parallelism` and `now_ms` are meaningful: there is no record and no key yet.
    """

    @property
    def key(self) -> Any:
        """The key of the record or timer: a value if `key_by` has one column, a tuple if it has several. None if there is no
        key: on a stream without one, in `open`, and in `process_broadcast`."""

    @property
    def watermark_ms(self) -> int:
        """The event time up to which no more records are expected, in epoch milliseconds. -2**63 before the first watermark,
        2**63 - 1 after the end of all input."""

    def now_ms(self) -> int:
        """Return processing time, which is the slot's clock. In a streaming DataFrame it is the time that Spark gave the
        micro-batch: it stands still during the batch and is the same when the batch runs again."""

    @property
    def timers(self) -> Timers:
        """The timers of the present key. Raises an error if there is no key."""

    def side(self, tag: str, row: Any) -> None:
        """Emit a row to the side output `tag`, which `process(…, side_outputs={tag: ddl})` must have declared."""

    @property
    def subtask(self) -> int:
        """Which parallel instance this is: 0 ≤ subtask < parallelism."""

    @property
    def parallelism(self) -> int:
        """How many parallel instances there are."""


class BatchTimers(Protocol):
    """Sets and deletes timers of many keys. They are the same timers as those of a `KeyedProcess`, and cost as much: a few
    microseconds each, so set one for each key and window rather than for each record.

    `at` is an array of epoch milliseconds with an instant for each key, or one instant for all of them.
    """

    def event_time(self, keys: Keys, at: Instants) -> None:
        """Set timers that fire when the watermark reaches them. See `Timers.event_time`."""

    def processing_time(self, keys: Keys, at: Instants) -> None:
        """Set timers that fire when processing time reaches them. See `Timers.processing_time`."""

    def delete_event_time(self, keys: Keys, at: Instants) -> None:
        """Delete timers that `event_time` has set. Nothing happens if there are none."""

    def delete_processing_time(self, keys: Keys, at: Instants) -> None:
        """Delete timers that `processing_time` has set. Nothing happens if there are none."""


class BatchContext(Protocol):
    """What a `KeyedBatchProcess` can use while it handles a batch or timers. It is valid only during that call.

    In `open` only `subtask`, `parallelism` and `now_ms` are meaningful.
    """

    @property
    def keys(self) -> Keys:
        """The distinct keys of the batch, or of the timers, and which of them each record has."""

    @property
    def watermark_ms(self) -> int:
        """The event time up to which no more records of these keys are expected. See `Context.watermark_ms`."""

    def now_ms(self) -> int:
        """Return processing time. See `Context.now_ms`."""

    @property
    def timers(self) -> BatchTimers:
        """The timers of the keys."""

    def side(self, tag: str, batch: pa.RecordBatch) -> None:
        """Emit a batch to the side output `tag`, which `process(…, side_outputs={tag: ddl})` must have declared."""

    @property
    def subtask(self) -> int:
        """Which parallel instance this is: 0 ≤ subtask < parallelism."""

    @property
    def parallelism(self) -> int:
        """How many parallel instances there are."""


class Function(ABC):  # noqa: B024  (the abstract methods are in the kinds below)
    """What the kinds of process function have in common. Subclass one of those, not this class."""

    def open(self, ctx: Any) -> None:  # noqa: B027  (optional)
        """Called once per subtask, before the first record, with the state restored. For connections, models…"""

    def close(self) -> None:  # noqa: B027  (optional)
        """Called when the subtask ends, also by failure. A crash of the process skips it: nothing may depend on it."""

    def on_snapshot_complete(self, epoch: int) -> None:  # noqa: B027  (optional)
        """Called when the snapshot of `epoch` is complete: the job never goes back behind it.

        Use it to make effects of that epoch visible outside. A crash can skip the call, and the next completed epoch stands
        for all before it. State must not be changed here.
        """


class KeyedProcess(Function):
    """Handles the records of a keyed stream one by one, with state for each key.

    State is declared as class attributes; in `process` and `on_timer` they hold the state of the present key.

        class CountBids(tg.KeyedProcess):
            count = tg.value("long", default=0)

            def process(self, bid, ctx):
                self.count.set(self.count.get() + 1)
                ctx.timers.event_time(bid.ts + 60_000)
                yield bid.auction, self.count.get()

            def on_timer(self, at, ctx):
                self.count.clear()

        bids.key_by("auction").process("count", CountBids(), returns="auction long, n long")
    """

    @abstractmethod
    def process(self, record: Any, ctx: Context) -> Rows:
        """Handle one record, a named tuple. Records of one key come in the order in which an upstream subtask sent them."""

    def on_timer(self, at: int, ctx: Context) -> Rows:
        """Handle a timer that this function has set and that is due. May emit, use state and set timers like `process`."""
        raise _no_on_timer(self)


class KeyedBatchProcess(Function):
    """Handles the records of a keyed stream a batch at a time, as Arrow columns, with columns of state for each key.

    A batch has records of many keys, some of them several times. `ctx.keys` are its distinct keys; state is read and written
    once for each of them, and `ctx.keys.of` says which key each record has.

        class Totals(tg.KeyedBatchProcess):
            totals = tg.columns("n long, total double", defaults={"n": 0, "total": 0.0})

            def process(self, batch, ctx):
                keys = ctx.keys
                before = self.totals.get_many(keys)
                n = before["n"].to_numpy() + np.bincount(keys.of)
                total = before["total"].to_numpy() + np.bincount(keys.of, weights=batch["price"].to_numpy())
                self.totals.set_many(keys, n=n, total=total)
                yield pa.record_batch([keys.columns["auction"], n, total], schema=RESULT)

        bids.key_by("auction").process("totals", Totals(), returns="auction long, n long, total double")

    State is declared by `tg.columns`. How records are cut into batches has no meaning.
    """

    @abstractmethod
    def process(self, batch: pa.RecordBatch, ctx: BatchContext) -> Batches:
        """Handle a batch. Records of one key come in the order in which an upstream subtask sent them. Return record batches
        of the declared schema: one, an iterable or generator of them, or None."""

    def on_timers(self, at: npt.NDArray[np.int64], ctx: BatchContext) -> Batches:
        """Handle timers that this function has set and that are due, some at a time and in order. Timer i fires at `at[i]`,
        in epoch milliseconds, for the key `ctx.keys.of[i]`."""
        name = type(self).__name__
        raise JobError(f"{name} has set timers but has no on_timers: define on_timers(self, at, ctx) in {name}")


class Process(Function):
    """Handles the records of a stream without key one by one, with operator state: state of the subtask.

        class InHundreds(tg.Process):
            waiting = tg.operator_list("long", redistribute="split")

            def process(self, event, ctx):
                self.waiting.add(event.id)
                if len(self.waiting) == 100:
                    yield (list(self.waiting),)
                    self.waiting.clear()

        events.process("in hundreds", InHundreds(), returns="ids array<long>")

    There is no `ctx.key` and there are no timers. State for each key is a `KeyedProcess` after `key_by`.
    """

    @abstractmethod
    def process(self, record: Any, ctx: Context) -> Rows:
        """Handle one record, a named tuple."""


class CoProcess(Function):
    """Handles the records of two connected streams one by one; both sides share the state.

    Connected keyed streams share keyed state and timers, connected streams without key share operator state. Nothing is
    promised about the order between the two sides.

        class PayOrder(tg.CoProcess):
            order = tg.value("struct<id:long,total:double>")

            def process_left(self, order, ctx):
                self.order.set(order)

            def process_right(self, payment, ctx):
                if self.order.get() is not None:
                    yield ctx.key, payment.amount

        orders.key_by("id").connect(payments.key_by("order_id")).process(
            "pay", PayOrder(), returns="id long, amount double")
    """

    @abstractmethod
    def process_left(self, record: Any, ctx: Context) -> Rows:
        """Handle one record of `left` in `left.connect(right)`."""

    @abstractmethod
    def process_right(self, record: Any, ctx: Context) -> Rows:
        """Handle one record of `right` in `left.connect(right)`."""

    def on_timer(self, at: int, ctx: Context) -> Rows:
        """Handle a timer that this function has set and that is due. Keyed streams only."""
        raise _no_on_timer(self)


class BroadcastProcess(Function):
    """Handles a stream together with a broadcast one, whose records reach every subtask.

    Broadcast state is the same on every subtask because each gets the same broadcast records: `process_broadcast`
    may write it and must do so deterministically (from the record and the state alone); `process` may only read it.
    If the main stream is keyed, `process` and `on_timer` have keyed state and timers too.

        class ApplyRules(tg.BroadcastProcess):
            rules = tg.broadcast_map("string", "double")

            def process(self, event, ctx):
                limit = self.rules.get(event.kind)
                if limit is not None and event.value > limit:
                    yield event.player, event.kind

            def process_broadcast(self, rule, ctx):
                self.rules.put(rule.kind, rule.limit)

        events.key_by("player").connect(rules.broadcast()).process(
            "apply rules", ApplyRules(), returns="player long, kind string")
    """

    @abstractmethod
    def process(self, record: Any, ctx: Context) -> Rows:
        """Handle one record of the main stream. Broadcast state is read-only here."""

    @abstractmethod
    def process_broadcast(self, record: Any, ctx: Context) -> Rows:
        """Handle one record of the broadcast stream, on every subtask. There is no key here."""

    def on_timer(self, at: int, ctx: Context) -> Rows:
        """Handle a timer that this function has set and that is due. Only if the main stream is keyed."""
        raise _no_on_timer(self)


def _no_on_timer(function: Function) -> JobError:
    name = type(function).__name__
    return JobError(f"{name} has set a timer but has no on_timer: define on_timer(self, at, ctx) in {name}")
