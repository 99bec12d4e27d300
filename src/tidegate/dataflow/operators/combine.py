"""Aggregating records before they are sent to the subtasks of their keys: fewer of them cross the exchange.

A `CombineOperator` stands at the end of a chain, before the edge of an aggregate. It has a table like the aggregate's, and
emits what is in it as partials: one for each key, which the aggregate merges into its own. Under load, each stands for many
records.

What is held is no state, so none of it may be missing in a snapshot: it is emitted before the subtask freezes its operators,
which comes before the marker in every mode of snapshots. It is also emitted at the end, when the stream becomes idle, when
the subtask finds no more records (so nothing waits while a source keeps up), when it stands for enough records, when it is
`hold_ms` old, or when it is large. A watermark that comes while records are held follows them.

If keys repeat too rarely, every record costs two look-ups and none is saved. Then records pass for a while, each as a
partial of its own; after that the operator tries again. All partials go the same way, so the records of one key stay in
their order.

Not here: where such operators are put (combining.py), and the merging (aggregate.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

from tidegate.dataflow.aggregates.base import BoolArray
from tidegate.dataflow.aggregates.numpy_columns import HeldVector, copy_rows, held_vectors
from tidegate.dataflow.aggregates.partials import Partials
from tidegate.dataflow.graph import Node
from tidegate.dataflow.null_keys import refuse_null_keys
from tidegate.dataflow.operators.aggregate import inputs_of
from tidegate.dataflow.operators.base import Operator, OperatorContext
from tidegate.dataflow.operators.keyed_table import plain
from tidegate.dataflow.operators.process import key_type
from tidegate.dataflow.operators.user_code import RAISED, blame
from tidegate.errors import TidegateError
from tidegate.state.key_index import KeyIndex
from tidegate.state.sections import StateInfo

PASSED_FACTOR = 4
"""By how much more records pass after each try that has failed."""
_LEAST_ROWS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CombineLimits:
    """How much is held, and how long.

    With `enough_records`, and `enough_per_key` of each key, little is gained by waiting for more. With fewer than
    `least_per_key`, nothing is gained: then `least_passed` records pass before the next try, and up to `most_passed` if
    tries fail again and again.
    """

    hold_ms: int
    records: int = 1 << 22
    keys: int = 1 << 18
    key_bytes: int = 64 << 20
    enough_records: int = 1 << 16
    enough_per_key: int = 32
    least_per_key: int = 2
    least_passed: int = 1 << 20
    most_passed: int = 1 << 25


@dataclass(frozen=True, slots=True, eq=False)
class CombineSpec:
    """`of` is the name of the aggregate."""

    of: str
    partials: Partials
    limits: CombineLimits
    refuses_nulls: bool
    stateful: bool = False
    in_columns: ClassVar[bool] = True
    kind: ClassVar[str] = "combine"

    @property
    def text(self) -> str:
        return self.partials.aggregation.text

    def create(self, node: Node) -> Operator:
        return CombineOperator(node, self)

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        return ()


class CombineOperator(Operator):
    _vectors: dict[str, HeldVector]
    _touched: BoolArray  # by row: whether records are held there

    def __init__(self, node: Node, spec: CombineSpec) -> None:
        super().__init__(node)
        self._spec = spec
        self._limits = spec.limits
        self._partials = spec.partials
        self._aggregation = spec.partials.aggregation
        self._key_type = key_type(node.input_schemas[0], spec.partials.key)
        self._blank = held_vectors(self._aggregation.accumulators, 1)
        self._held = 0  # records, in the table
        self._since_ms = 0
        self._watermark_ms: int | None = None  # that came behind what is held
        self._passing = 0  # records that pass before the next try
        self._next_passing = self._limits.least_passed
        self._forget_keys()

    def open(self, context: OperatorContext) -> None:
        self._now_ms = context.now_ms

    def on_batch(self, batch: pa.RecordBatch, port: int) -> None:
        spec, count = self._spec, batch.num_rows
        if spec.refuses_nulls:
            refuse_null_keys(batch, self._partials.key, spec.of)
        inputs = inputs_of(spec.of, self._aggregation, batch)
        keys = [plain(batch.column(name)) for name in self._partials.key]
        try:
            if self._passing > 0:
                self._passing -= count
                self.emit(self._partials.singles(keys, inputs))
            elif count > self._limits.records or not self._aggregation.fits(inputs, self._limits.records):
                self._flush()
                self.emit(self._partials.singles(keys, inputs))
            else:
                self._hold(keys, inputs, count)
        except TidegateError:
            raise
        except RAISED as error:
            blame(spec.of, error, at=f"a batch of {count} records")

    def on_watermark(self, at_ms: int) -> None:
        if self._held:
            self._watermark_ms = at_ms
        else:
            self.forward_watermark(at_ms)

    def on_idle(self) -> None:
        self._flush()
        super().on_idle()

    def on_end(self) -> None:
        self._flush()
        super().on_end()

    def on_lull(self) -> bool:
        return self._flush() > 0

    def on_time(self, now_ms: int) -> None:
        self._flush()

    def deadline_ms(self) -> int | None:
        return self._since_ms + self._limits.hold_ms if self._held else None

    def before_snapshot(self) -> None:
        self._flush()

    # Inside.

    def _hold(self, keys: Sequence[pa.Array], inputs: Sequence[pa.Array], count: int) -> None:
        if self._held + count > self._limits.records:
            self._flush()
        if not self._held:
            self._since_ms = self._now_ms()
        rows = self._index.rows_of(keys)[0]
        self._make_room()
        self._aggregation.add(self._vectors, rows, inputs)
        self._touched[rows] = True
        self._held += count
        if self._is_enough():
            held = self._held
            self._judge(held, self._flush())

    def _is_enough(self) -> bool:
        """Return whether to wait for more records would gain little, or take too long or too much memory."""
        limits, keys = self._limits, int(np.count_nonzero(self._touched))
        return (
            self._held >= max(limits.enough_records, limits.enough_per_key * keys)
            or abs(self._now_ms() - self._since_ms) >= self._limits.hold_ms
            or self._is_large()
        )

    def _is_large(self) -> bool:
        return self._index.count >= self._limits.keys or self._index.nbytes >= self._limits.key_bytes

    def _judge(self, held: int, emitted: int) -> None:
        """Let records pass for a while if too few had the same key."""
        if held >= self._limits.least_per_key * emitted:
            self._next_passing = self._limits.least_passed
        else:
            self._passing = self._next_passing
            self._next_passing = min(self._next_passing * PASSED_FACTOR, self._limits.most_passed)
            self._forget_keys()

    def _flush(self) -> int:
        """Emit what is held, and return how many partials that was."""
        if not self._held:
            return 0
        rows = np.flatnonzero(self._touched)
        partials = self._partials.batch(self._index.keys(rows), self._vectors, rows)
        self._held = 0
        if self._is_large():
            self._forget_keys()
        else:
            self._touched[rows] = False
            copy_rows(self._vectors, rows, self._blank, np.zeros(len(rows), np.int64))
        self.emit(partials)
        if self._watermark_ms is not None:
            at_ms, self._watermark_ms = self._watermark_ms, None
            self.forward_watermark(at_ms)
        return len(rows)

    def _make_room(self) -> None:
        before, top = len(self._touched), self._index.top
        if top <= before:
            return
        count = max(2 * before, top)
        vectors, rows = held_vectors(self._aggregation.accumulators, count), np.arange(before)
        copy_rows(vectors, rows, self._vectors, rows)
        self._vectors = vectors
        self._touched = np.concatenate([self._touched, np.zeros(count - before, bool)])

    def _forget_keys(self) -> None:
        """Begin with an empty table. Keys are kept otherwise, since they are likely to come again."""
        self._index = KeyIndex(self._key_type)
        self._vectors = held_vectors(self._aggregation.accumulators, _LEAST_ROWS)
        self._touched = np.zeros(_LEAST_ROWS, bool)
