"""The source operator and the watermark operator.

The state of a source is the offset of every split it owns. It is operator state that every subtask receives at a restore
(`union`): the reader takes what it owns at the present parallelism. Splits that were read to their end may be keyed state
instead (dataflow/finished_splits.py). Offsets and emitted records advance together in one
thread, so the offsets at a marker are exactly those behind the last record before it (docs/promises.md, row 7).

If the source is in a time group, it reads nothing while it is too far ahead of the other sources
(protocol/time_groups.py). Its watermark operator knows this, and the reader asks through `Splits`, for one split or for the
whole source. Only reading stops. Markers, snapshots and the end of the job don't wait.

A watermark operator begins a stream's event time: of the watermarks from upstream it forwards only the end of time. In the
chain of a source whose reader reports its splits, each split has a watermark of its own (protocol/watermarks.py). Everything
in a chain is called while the source polls, so a batch belongs to the split that the reader named last. Elsewhere (behind a
rebalance or a union) the records of a subtask count as one split.

If time moves `by_epoch`, between Spark's DataFrames, the order of records means nothing. The watermark moves when an epoch
ends, and no record is late compared with another of its epoch. A subtask without records in an epoch is idle in that epoch,
and reports that at the end. In a plan with loops time moves by order, before the marker (driver/moving_time.py).

The latest event time of each split is operator state (`union`). A row names the sources and the column that it belongs to,
because a generated name may mean another operator after the program has changed. Rows of other streams are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.channels.elements import MAX_WATERMARK_MS
from tidegate.dataflow.contracts import Offset, Source, SourceContext, SourceReader, Splits
from tidegate.dataflow.finished_splits import FINISHED, FinishedSplits
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import Operator, OperatorContext
from tidegate.dataflow.operators.user_code import blaming
from tidegate.errors import JobError, SchemaError
from tidegate.protocol.time_groups import FIRST_RECORD_MS
from tidegate.protocol.watermarks import MIN_WATERMARK_MS, Advanced, Progress, SplitWatermarks
from tidegate.state.event_time import SPLIT_WATERMARKS
from tidegate.state.operator_state import FrozenItems, FrozenTogether
from tidegate.state.sections import FrozenState, StateInfo, StateKind
from tidegate.state.timers import instant_ms
from tidegate.types import ddl_of

_SPLIT = pa.struct([pa.field("split", pa.string()), pa.field("offset", pa.string())])
OFFSETS = StateInfo("__offsets", StateKind.UNION, "offsets", pa.schema([pa.field("value", _SPLIT)]))

# Returns the watermark behind a batch, in epoch milliseconds or as a datetime, or None if the batch doesn't change it.
WatermarkFunction: TypeAlias = Callable[[pa.RecordBatch], int | datetime | None]

ONE_SPLIT = ""
# A split counts as quiet if none of this many looks for records, times the number of splits, has found one of it.
LOOKS_FOR_EACH_SPLIT = 2
# The split of records that came after the time of their micro-batch was held. They count for the next micro-batch.
NEXT = "next micro-batch"


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """A source: it has no input."""

    source: Source
    kind: str = "source"
    stateful: bool = True
    in_columns: ClassVar[bool] = True

    def create(self, node: Node) -> Operator:
        return SourceOperator(node, self.source)

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        return (OFFSETS, FINISHED) if self.source.finishes_splits else (OFFSETS,)


@dataclass(frozen=True, slots=True)
class WatermarkSpec:
    """Event time comes from a column (no record is later than `delay_ms` behind the latest one), or from a function of the
    batch: `by`, if `column` is None. `sources` are the sources upstream. With a `group`, the source waits if it is more than
    `max_ahead_ms` ahead of the other sources of that time group."""

    column: str | None
    delay_ms: int
    idle_after_ms: int | None
    sources: tuple[str, ...] = ()
    by_epoch: bool = False
    by: WatermarkFunction | None = None
    group: str | None = None
    max_ahead_ms: int = 0
    kind: str = "watermark"
    stateful: bool = True
    assigns_time: ClassVar[bool] = True
    in_columns: ClassVar[bool] = True

    def create(self, node: Node) -> Operator:
        return WatermarkOperator(node, self)

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        return (SPLIT_WATERMARKS,)


class SourceOperator(Operator):
    def __init__(self, node: Node, source: Source) -> None:
        super().__init__(node)
        self._source = source
        self._reader: SourceReader | None = None
        self._finished = FinishedSplits()  # empty, unless the source has such splits
        self.splits = Splits()
        self.is_busy: Callable[[], bool] = bool  # whether the chain is still at work on what was emitted
        self.ended = False

    def open(self, context: OperatorContext) -> None:
        restored = {
            row["split"]: json.loads(row["offset"])
            for rows in context.rows(OFFSETS.name)
            for row in rows.column("value").to_pylist()
        }
        if self._source.finishes_splits:
            self._finished = FinishedSplits(
                subtask=context.subtask, parallelism=context.parallelism, key_group_count=context.key_group_count
            )
            self._finished.load(context.rows(FINISHED.name), known=context.goes_on)
        with blaming(self.name):
            self._reader = self._source.open(
                SourceContext(context.subtask, context.parallelism, restored, context.now_ms, self.splits, self._finished)
            )

    def poll(self, max_rows: int) -> int:
        """Read and emit what is there. Return the number of records: 0 if there are none now, or if the source waits for
        other sources."""
        assert self._reader is not None and not self.ended
        count = self._poll_unless_ahead(max_rows)
        # A batch belongs to one split, and other splits may have records, too. While the chain works, the split must stay.
        while (
            self.splits.is_followed
            and 0 < count < max_rows
            and not self.is_busy()
            and (more := self._poll_unless_ahead(max_rows - count))
        ):
            count += more
        return count

    def _poll_unless_ahead(self, max_rows: int) -> int:
        return 0 if self.splits.must_wait else self._poll(max_rows)

    def _poll(self, max_rows: int) -> int:
        assert self._reader is not None
        with blaming(self.name):
            batch = self._reader.poll(max_rows)
        self.splits.tell_discovered()
        if batch is None or not batch.num_rows:
            self.splits.tell_finished()
            return 0
        if not batch.schema.equals(self.node.schema):
            raise SchemaError(
                f"source {self.name!r} declares the schema {ddl_of(self.node.schema)!r}, and its reader "
                f"gave a batch of {ddl_of(batch.schema)!r}: they must be the same, in order and nullability"
            )
        if self.splits.is_followed and self.splits.is_reported and not self.splits.is_current_known:
            raise JobError(
                f"source {self.name!r}: its reader gave a batch of split {self.splits.current!r}, which it has not "
                f"discovered, or has finished before. Call splits.discover(split) for every split as soon as it is known, "
                f"and splits.read(split) before poll returns a batch of it (SourceContext.splits)"
            )
        self.emit(batch)
        if not self.is_busy():
            self.settle()
        return int(batch.num_rows)

    def settle(self) -> None:
        """Note that the whole batch has passed the chain. After a poll that left the chain busy, the subtask calls this."""
        self.splits.tell_finished()

    @property
    def finished(self) -> bool:
        assert self._reader is not None
        with blaming(self.name):
            return self._reader.finished

    def end(self) -> None:
        """End the stream: no record follows, and event time is over."""
        assert not self.ended
        self.ended = True
        self.forward_watermark(MAX_WATERMARK_MS)
        self.on_end()

    def freeze(self, epoch: int) -> FrozenState | None:
        assert self._reader is not None
        with blaming(self.name):
            offsets = self._reader.offsets()
        frozen = FrozenItems()
        frozen.put(
            OFFSETS, [{"split": split, "offset": self._offset_text(split, offset)} for split, offset in offsets.items()]
        )
        return FrozenTogether(frozen, self._finished.freeze()) if self._source.finishes_splits else frozen

    def maintain(self, budget: int) -> None:
        self._finished.maintain(budget)

    def close(self) -> None:
        if self._reader is not None:
            with blaming(self.name):
                self._reader.close()

    def _offset_text(self, split: str, offset: Offset) -> str:
        try:
            return json.dumps(offset)
        except (TypeError, ValueError) as error:
            raise JobError(
                f"source {self.name!r}: the offset of split {split!r} is {offset!r}, and an offset must be "
                f"something that JSON can carry: {error}"
            ) from error


class WatermarkOperator(Operator):
    makes_time = True

    def __init__(self, node: Node, spec: WatermarkSpec) -> None:
        super().__init__(node)
        self.group = spec.group
        self.max_ahead_ms = spec.max_ahead_ms
        self._limit_ms = MAX_WATERMARK_MS if spec.group is None else MIN_WATERMARK_MS  # further ahead, nothing is read
        self._column = spec.column
        self._by = spec.by
        self._delay_ms = spec.delay_ms
        self._idle_after_ms = None if spec.by_epoch else spec.idle_after_ms
        self._by_epoch = spec.by_epoch
        self._of = f"{spec.column or 'a function'} of {', '.join(spec.sources)}"
        self._splits: Splits | None = None
        self._is_split_held: Callable[[str], bool] = lambda split: False
        self._looks = 0  # how often the subtask has looked for records
        self._none_found_at = 0  # the last look that found none
        self._seen_at: dict[str, int] = {}  # by split, how many looks there had been when its last batch came
        self._latest_ms: int | None = None  # in this epoch, if time moves by epochs
        self._is_told = False  # whether that was forwarded; the epoch may be aborted and end again
        self._is_ordered = False  # whether the driver moves time, instead of the end of an epoch
        self._held_ms: int | None = None  # the value of `_latest_ms` when time was held
        self._is_held = False
        self._over = False

    def follow(self, splits: Splits) -> None:
        """Follow the splits of the source that its chain begins with. Called before any operator is opened."""
        self._splits = splits
        self._is_split_held = splits.is_ahead
        splits.is_followed = True

    def open(self, context: OperatorContext) -> None:
        self._now_ms = context.now_ms
        self._subtask = context.subtask
        self._parallelism = context.parallelism
        self._clock = SplitWatermarks(
            self._delay_ms, self._idle_after_ms, now_ms=context.now_ms(), is_held=self._may_have_records
        )
        self._restored = self._latest_restored(context)
        splits = self._splits
        if splits is not None and self.group is not None:
            splits.member = self
        if splits is None or not splits.is_reported or self._by_epoch:
            self._splits = None
            self._discover({ONE_SPLIT: False})
            return
        splits.follow(self)
        self._discover(splits.live)

    def resume(self) -> None:
        if self._clock.current_ms != MIN_WATERMARK_MS:
            self.forward_watermark(self._clock.current_ms)

    def on_batch(self, batch: pa.RecordBatch, port: int) -> None:
        latest_ms = self._latest_in(batch)
        if latest_ms is None:
            self.emit(batch)
            return
        self._act(self._clock.on_active())
        self.emit(batch)
        if self._by_epoch:
            if self._is_told:
                self._begin_epoch()
            self._latest_ms = latest_ms if self._latest_ms is None else max(self._latest_ms, latest_ms)
        else:
            split = ONE_SPLIT if self._splits is None else self._splits.current
            self._seen_at[split] = self._looks
            self._act(self._clock.on_batch(split, latest_ms, self._now_ms()))

    def on_watermark(self, at_ms: int) -> None:
        if at_ms == MAX_WATERMARK_MS:
            self.before_snapshot()
            self._over = True
            self.forward_watermark(at_ms)

    def on_idle(self) -> None:
        """Ignore it: the records of this stream decide whether it is idle."""

    def on_asked(self, *, found_none: bool) -> None:
        self._looks += 1
        if found_none:
            self._none_found_at = self._looks

    def on_time(self, now_ms: int) -> None:
        if not self._over:
            self._act(self._clock.on_time(now_ms))

    def deadline_ms(self) -> int | None:
        return None if self._over else self._clock.deadline_ms()

    def hold_time(self) -> None:
        self._is_ordered = self._is_held = True
        self._held_ms, self._latest_ms = self._latest_ms, None

    def move_time(self) -> None:
        if not self._is_held:
            self.hold_time()
        self._is_held = False
        self._move_to(self._held_ms)

    def before_snapshot(self) -> None:
        if self._by_epoch and not self._over and not self._is_ordered:
            self._is_told = True
            self._move_to(self._latest_ms)

    def on_complete(self, epoch: int) -> None:
        if self._is_told:  # otherwise records of the next epoch have come before this message, on another way
            self._begin_epoch()

    def freeze(self, epoch: int) -> FrozenState:
        found = [(None if self._splits is None else split, at_ms) for split, at_ms in self._clock.latest_ms().items()]
        if self._is_ordered and self._latest_ms is not None:
            found.append((NEXT, self._latest_ms))
        frozen = FrozenItems()
        frozen.put(
            SPLIT_WATERMARKS,
            [
                {
                    "of": self._of,
                    "split": split,
                    "subtask": self._subtask,
                    "parallelism": self._parallelism,
                    "latest_ms": at_ms,
                }
                for split, at_ms in found
            ],
        )
        return frozen

    # What the source reports of its splits.

    def on_discovered(self, splits: Mapping[str, bool]) -> None:
        self._act(self._discover(splits))

    def on_finished(self, split: str) -> None:
        self._seen_at.pop(split, None)
        self._act(self._clock.on_finished(split, self._now_ms()))

    def watermark_ms(self, split: str) -> int:
        return self._clock.watermark_ms(split)

    # What its time group asks and reports.

    @property
    def first_record_ms(self) -> int:
        """Return how long the other sources of the group wait for its first record."""
        return self._idle_after_ms or FIRST_RECORD_MS

    @property
    def is_over(self) -> bool:
        """Whether no record follows."""
        return self._over

    def reached_ms(self) -> int | None:
        """Return how far event time has come for the other sources of the group, or None if they needn't wait."""
        return None if self._over else self._clock.reached_ms()

    def on_least(self, at_ms: int | None) -> None:
        """Take the least time of the group, or None if there is no source to wait for."""
        self._limit_ms = MAX_WATERMARK_MS if at_ms is None else at_ms + self.max_ahead_ms

    def is_ahead(self, split: str) -> bool:
        return self._clock.watermark_ms(split if self._splits is not None else ONE_SPLIT) > self._limit_ms

    @property
    def waits(self) -> bool:
        at_ms = self.reached_ms()
        return at_ms is not None and at_ms > self._limit_ms

    # Inside.

    def _may_have_records(self, split: str) -> bool:
        """Return whether a quiet split may have records that nobody has looked for: its source waits for others, or the
        subtask was busy. It has none if a look found none at all, or if many looks found only records of other splits."""
        if self._is_split_held(split):
            return True
        seen_at = self._seen_at.get(split, 0)
        split_count = 1 if self._splits is None else len(self._splits.live)
        return self._none_found_at <= seen_at and self._looks - seen_at < LOOKS_FOR_EACH_SPLIT * (split_count + 1)

    def _latest_in(self, batch: pa.RecordBatch) -> int | None:
        """Return the latest event time of the batch, or None if it has none."""
        if self._column is not None:
            latest_ms: int | None = pc.max(event_times_ms(batch.column(self._column))).as_py()
            return latest_ms
        assert self._by is not None
        with blaming(self.name):
            at = self._by(batch)
            # A watermark excludes its own instant, so the latest event time that it stands for is one later.
            return None if at is None else min(instant_ms(at), MAX_WATERMARK_MS - 2) + 1

    def _move_to(self, latest_ms: int | None) -> None:
        """Move time to the latest of an epoch's records, or report idleness if there were none. Called in every epoch."""
        if latest_ms is None:
            super().on_idle()
            return
        self._clock.on_batch(ONE_SPLIT, latest_ms, self._now_ms())
        self.forward_watermark(self._clock.current_ms)

    def _begin_epoch(self) -> None:
        self._latest_ms, self._is_told = None, False

    def _discover(self, splits: Mapping[str, bool]) -> Progress:
        self._seen_at |= dict.fromkeys(splits, self._looks)
        latest_ms = {split: self._restored.pop(split) for split in splits if split in self._restored}
        return self._clock.on_discovered(splits, self._now_ms(), latest_ms=latest_ms)

    def _latest_restored(self, context: OperatorContext) -> dict[str, int]:
        """Return the restored times by split. For a stream that is one split, that is what this subtask had. At another
        parallelism nobody knows which subtask gets which records, so it is the least of all subtasks, if all had one."""
        rows = [
            row
            for rows in context.rows(SPLIT_WATERMARKS.name)
            for row in rows.column("value").to_pylist()
            if row["of"] == self._of
        ]
        self._latest_ms = _held_for(context, [row for row in rows if row["split"] == NEXT]) if self._by_epoch else None
        latest_ms = {row["split"]: row["latest_ms"] for row in rows if row["split"] is not None}
        of_one = {row["subtask"]: row["latest_ms"] for row in rows if row["split"] is None}
        count = next((row["parallelism"] for row in rows if row["split"] is None), None)
        if count == context.parallelism:
            latest_ms |= {ONE_SPLIT: of_one[context.subtask]} if context.subtask in of_one else {}
        elif count == len(of_one):
            latest_ms[ONE_SPLIT] = min(of_one.values())
        return latest_ms

    def _act(self, outcome: Progress) -> None:
        if isinstance(outcome, Advanced):
            self.forward_watermark(outcome.at_ms)
        elif outcome is not None:
            super().on_idle()


def _held_for(context: OperatorContext, rows: Sequence[dict[str, int]]) -> int | None:
    """Return what this subtask held for the next micro-batch, or at another parallelism the least of all subtasks."""
    if any(row["parallelism"] != context.parallelism for row in rows):
        return min(row["latest_ms"] for row in rows)
    return next((row["latest_ms"] for row in rows if row["subtask"] == context.subtask), None)


def follow_splits(chain: Sequence[Operator]) -> None:
    """Let the watermark operators of a source's chain follow its splits."""
    if isinstance(chain[0], SourceOperator):
        for operator in chain:
            if isinstance(operator, WatermarkOperator):
                operator.follow(chain[0].splits)


def event_times_ms(column: pa.Array) -> pa.Array:
    """Return a time column as milliseconds since 1970."""
    if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
        return column.cast(pa.timestamp("ms"), safe=False).cast(pa.int64())
    return column
