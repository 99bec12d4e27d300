"""At most so many records of each key in a time: a token bucket for each key, by the clock.

A bucket holds up to `burst` tokens and begins full. A record takes one; a record that finds none is dropped, or goes to a
side output. Tokens come back evenly. State is the tokens that a key had when it was used last, and the time of that. A key
that wasn't used for as long as an empty bucket needs to become full is the same as a new one, so it is removed: its ttl.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import Operator, OperatorContext
from tidegate.dataflow.operators.keyed_columns import KeyedColumnsOperator, columns_key_type
from tidegate.dataflow.operators.stepwise import Steps
from tidegate.state.column_ttl import NEVER, TOUCHED, TOUCHED_FIELD, ColumnTtl
from tidegate.state.descriptors import Columns
from tidegate.state.sections import StateInfo
from tidegate.state.vectors import VectorField

STATE, TOKENS = "buckets", "tokens"
# What sums of fractions of tokens may lack of a whole one.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class RateLimitSpec:
    """`count` records of a key in `per_ms`, and up to `burst` at once. `excess` is the side output for the others, or
    None."""

    key: tuple[str, ...]
    count: int
    per_ms: int
    burst: int
    excess: str | None
    kind: ClassVar[str] = "rate limit"
    stateful: ClassVar[bool] = True
    in_columns: ClassVar[bool] = True

    @property
    def descriptors(self) -> tuple[Columns, ...]:
        return (Columns(STATE, [VectorField(TOKENS, pa.float64(), float(self.burst)), TOUCHED_FIELD]),)

    @property
    def text(self) -> str:
        """What `explain` shows."""
        return f"{self.count:,} in {self.per_ms} ms, {self.burst:,} at once"

    def create(self, node: Node) -> Operator:
        return RateLimitOperator(node, self)

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        return tuple(each.info(columns_key_type(node, self.key)) for each in self.descriptors)


class RateLimitOperator(KeyedColumnsOperator):
    def __init__(self, node: Node, spec: RateLimitSpec) -> None:
        super().__init__(node, spec.key, spec.descriptors[0])
        self._spec = spec

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._now_ms = context.user_now_ms
        full_after_ms = -(-self._spec.burst * self._spec.per_ms // self._spec.count)
        self._ttl = ColumnTtl(self._state.table(), full_after_ms, self._now_ms)

    def take_batch(self, batch: pa.RecordBatch, port: int) -> Steps:
        keys, table = self._keys(batch), self._state.table()
        rows = table.rows_of(keys.columns.columns)
        tokens, touched = table.vectors[TOKENS].values[rows], table.vectors[TOUCHED].values[rows]
        elapsed_ms = np.where(touched == NEVER, 0, np.maximum(self._now_ms() - touched, 0))
        tokens = np.minimum(tokens + elapsed_ms * (self._spec.count / self._spec.per_ms), self._spec.burst)
        allowed = np.floor(tokens + _ROUNDING).astype(np.int64)
        asked = np.bincount(keys.of, minlength=len(keys))
        table.change(rows)
        table.vectors[TOKENS].values[rows] = tokens - np.minimum(asked, allowed)
        self._ttl.touch(rows)
        if (asked <= allowed).all():
            self.emit(batch)
        else:
            passes = keys.nth < allowed[keys.of]
            if passes.any():
                self.emit(batch.filter(pa.array(passes)))
            if self._spec.excess is not None:
                self.emit_side(self._spec.excess, batch.filter(pa.array(~passes)))
        yield from ()

    def _remove_ended(self, budget: int) -> None:
        self._ttl.sweep(budget)
