"""The source operator and the watermark operator.

A source's state is the offset of every split it owns, as operator state that goes to everyone at a restore (`union`): the
reader takes what it owns at the present parallelism. Offsets and emitted records move together in one thread, so the
offsets at a marker are exactly those behind the last record before it (FAULTS row 7).
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.channels.elements import MAX_WATERMARK_MS
from tidegate.dataflow.contracts import Source, SourceContext, SourceReader
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import Operator, OperatorContext
from tidegate.dataflow.operators.user_code import blame
from tidegate.errors import TidegateError
from tidegate.protocol.watermarks import Advanced, BecameIdle, BoundedOutOfOrderness
from tidegate.state.operator_state import FrozenItems
from tidegate.state.sections import FrozenState, StateInfo, StateKind

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
        self._reader = self._source.open(
            SourceContext(context.subtask, context.parallelism, restored, context.now_ms))

    def poll(self, max_rows: int) -> int:
        """Reads and emits what is there; the number of records, 0 where there is none now."""
        assert self._reader is not None and not self.ended
        try:
            batch = self._reader.poll(max_rows)
        except TidegateError:
            raise
        except Exception as error:
            blame(self.name, error)
        if batch is None or not batch.num_rows:
            return 0
        self.emit(batch)
        return int(batch.num_rows)

    @property
    def finished(self) -> bool:
        assert self._reader is not None
        return self._reader.finished

    def end(self) -> None:
        """Nothing follows: event time is over, and so are the records."""
        assert not self.ended
        self.ended = True
        self.forward_watermark(MAX_WATERMARK_MS)
        self.on_end()

    def freeze(self, epoch: int) -> FrozenState | None:
        assert self._reader is not None
        frozen = FrozenItems()
        frozen.put(OFFSETS, [{"split": split, "offset": json.dumps(offset)}
                             for split, offset in self._reader.offsets().items()])
        return frozen

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()


class WatermarkOperator(Operator):
    def __init__(self, node: Node, spec: WatermarkSpec) -> None:
        super().__init__(node)
        self._column = spec.column
        self._clock = BoundedOutOfOrderness(spec.delay_ms, spec.idle_after_ms)
        self._idle_after_ms = spec.idle_after_ms
        self._last_ms = 0

    def open(self, context: OperatorContext) -> None:
        self._now_ms = context.now_ms
        self._last_ms = context.now_ms()

    def on_batch(self, batch: pa.RecordBatch, port: int) -> None:
        self.emit(batch)
        latest = pc.max(event_times_ms(batch.column(self._column))).as_py()
        if latest is not None:
            self._last_ms = self._now_ms()
            self._act(self._clock.on_batch(latest, self._last_ms))

    def on_watermark(self, at_ms: int) -> None:
        if at_ms == MAX_WATERMARK_MS:
            self.forward_watermark(at_ms)

    def on_time(self, now_ms: int) -> None:
        self._act(self._clock.on_time(now_ms))

    def deadline_ms(self) -> int | None:
        return None if self._idle_after_ms is None else self._last_ms + self._idle_after_ms

    def _act(self, outcome: Advanced | BecameIdle | None) -> None:
        if isinstance(outcome, Advanced):
            self.forward_watermark(outcome.at_ms)
        elif outcome is not None:
            self.on_idle()


def event_times_ms(column: pa.Array) -> pa.Array:
    """A time column as milliseconds since the epoch."""
    if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
        return column.cast(pa.timestamp("ms"), safe=False).cast(pa.int64())
    return column
