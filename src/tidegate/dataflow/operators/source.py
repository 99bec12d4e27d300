"""The source operator and the watermark operator.

A source's state is the offset of every split it owns, as operator state that goes to everyone at a restore (`union`):
the reader takes what it owns at the present parallelism. Offsets and emitted records move together in one thread, so the
offsets at a marker are exactly those behind the last record before it (FAULTS row 7).

A watermark operator begins a stream's event time anew: of what comes from above only the end of time passes it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.channels.elements import MAX_WATERMARK_MS
from tidegate.dataflow.contracts import Offset, Source, SourceContext, SourceReader
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import Operator, OperatorContext
from tidegate.dataflow.operators.user_code import blaming
from tidegate.errors import JobError, SchemaError
from tidegate.protocol.watermarks import Advanced, BecameIdle, BoundedOutOfOrderness
from tidegate.state.operator_state import FrozenItems
from tidegate.state.sections import FrozenState, StateInfo, StateKind
from tidegate.types import ddl_of

_SPLIT = pa.struct([pa.field("split", pa.string()), pa.field("offset", pa.string())])
OFFSETS = StateInfo("__offsets", StateKind.UNION, "offsets", pa.schema([pa.field("value", _SPLIT)]))


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """Reads a source; has no input."""

    source: Source
    kind: str = "source"
    stateful: bool = True

    def create(self, node: Node) -> Operator:
        return SourceOperator(node, self.source)

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        return (OFFSETS,)


@dataclass(frozen=True, slots=True)
class WatermarkSpec:
    """Event time from a column: no record is later than `delay_ms` behind the latest seen."""

    column: str
    delay_ms: int
    idle_after_ms: int | None
    kind: str = "watermark"
    stateful: bool = False

    def create(self, node: Node) -> Operator:
        return WatermarkOperator(node, self)

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        return ()


class SourceOperator(Operator):
    def __init__(self, node: Node, source: Source) -> None:
        super().__init__(node)
        self._source = source
        self._reader: SourceReader | None = None
        self.ended = False

    def open(self, context: OperatorContext) -> None:
        restored = {row["split"]: json.loads(row["offset"])
                    for rows in context.rows(OFFSETS.name) for row in rows.column("value").to_pylist()}
        with blaming(self.name):
            self._reader = self._source.open(
                SourceContext(context.subtask, context.parallelism, restored, context.now_ms))

    def poll(self, max_rows: int) -> int:
        """Reads and emits what is there; the number of records, 0 where there is none now."""
        assert self._reader is not None and not self.ended
        with blaming(self.name):
            batch = self._reader.poll(max_rows)
        if batch is None or not batch.num_rows:
            return 0
        if not batch.schema.equals(self.node.schema):
            raise SchemaError(f"source {self.name!r} declares the schema {ddl_of(self.node.schema)!r}, and its reader "
                              f"gave a batch of {ddl_of(batch.schema)!r}: they must be the same, in order and nullability")
        self.emit(batch)
        return int(batch.num_rows)

    @property
    def finished(self) -> bool:
        assert self._reader is not None
        with blaming(self.name):
            return self._reader.finished

    def end(self) -> None:
        """Nothing follows: event time is over, and so are the records."""
        assert not self.ended
        self.ended = True
        self.forward_watermark(MAX_WATERMARK_MS)
        self.on_end()

    def freeze(self, epoch: int) -> FrozenState | None:
        assert self._reader is not None
        with blaming(self.name):
            offsets = self._reader.offsets()
        frozen = FrozenItems()
        frozen.put(OFFSETS, [{"split": split, "offset": self._offset_text(split, offset)}
                             for split, offset in offsets.items()])
        return frozen

    def close(self) -> None:
        if self._reader is not None:
            with blaming(self.name):
                self._reader.close()

    def _offset_text(self, split: str, offset: Offset) -> str:
        try:
            return json.dumps(offset)
        except (TypeError, ValueError) as error:
            raise JobError(f"source {self.name!r}: the offset of split {split!r} is {offset!r}, and an offset must be "
                           f"something that JSON can carry: {error}") from error


class WatermarkOperator(Operator):
    def __init__(self, node: Node, spec: WatermarkSpec) -> None:
        super().__init__(node)
        self._column = spec.column
        self._clock = BoundedOutOfOrderness(spec.delay_ms, spec.idle_after_ms)
        self._over = False

    def open(self, context: OperatorContext) -> None:
        self._now_ms = context.now_ms
        self._clock.on_time(context.now_ms())       # the quiet before the first record counts, too

    def on_batch(self, batch: pa.RecordBatch, port: int) -> None:
        self.emit(batch)
        latest_ms = pc.max(event_times_ms(batch.column(self._column))).as_py()
        if latest_ms is not None:
            self._act(self._clock.on_batch(latest_ms, self._now_ms()))

    def on_watermark(self, at_ms: int) -> None:
        if at_ms == MAX_WATERMARK_MS:
            self._over = True
            self.forward_watermark(at_ms)

    def on_idle(self) -> None:
        """Whether this stream is idle is told by its own records."""

    def on_time(self, now_ms: int) -> None:
        if not self._over:
            self._act(self._clock.on_time(now_ms))

    def deadline_ms(self) -> int | None:
        return None if self._over else self._clock.deadline_ms()

    def _act(self, outcome: Advanced | BecameIdle | None) -> None:
        if isinstance(outcome, Advanced):
            self.forward_watermark(outcome.at_ms)
        elif outcome is not None:
            super().on_idle()


def event_times_ms(column: pa.Array) -> pa.Array:
    """A time column as milliseconds since the epoch."""
    if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
        return column.cast(pa.timestamp("ms"), safe=False).cast(pa.int64())
    return column
