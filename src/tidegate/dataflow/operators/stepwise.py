"""Operators that do their work in bounded steps.

A generator (`take_batch`, `take_watermark`) processes what arrives, and pauses with `yield` when the budget of the step is
spent (budget.py). Before it pauses, it emits its output. The subtask gives the operator steps (`work`) until nothing is
left, and takes nothing from its inputs meanwhile (slot/subtask.py). Whatever else arrives waits behind the work, in order:
an upstream operator of the chain may emit several times in one call.

Between two steps the state may be frozen, unless the operator holds records (`holds_records`). So a generator for a
watermark pauses only when the state is consistent: the rest of its work must follow from the state and the watermark. Held
records are in no channel any more, and not in the state either, so a snapshot waits for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeAlias

import pyarrow as pa

from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import Operator, OperatorContext
from tidegate.dataflow.operators.budget import Budget

Steps: TypeAlias = Iterator[None]
"""Work in steps. Each item is a pause."""


class StepwiseOperator(Operator):
    """Passes everything on except records, unless a subclass says otherwise. Subclasses call `open` first."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._budget = Budget()
        self._works: deque[tuple[Steps, bool]] = deque()  # what is under way, what waits, and whether it holds records

    # What a subclass defines.

    def take_batch(self, batch: pa.RecordBatch, port: int) -> Steps:
        """Process a batch."""
        raise AssertionError(f"{self.name} takes no records")

    def take_watermark(self, at_ms: int) -> Steps:
        """Do what is due, then forward the watermark."""
        self.forward_watermark(at_ms)
        yield from ()

    # What the subtask and upstream operators call.

    def open(self, context: OperatorContext) -> None:
        self._budget = context.budget

    def on_batch(self, batch: pa.RecordBatch, port: int) -> None:
        self._do(self.take_batch(batch, port), holds_records=True)

    def on_watermark(self, at_ms: int) -> None:
        self._do(self.take_watermark(at_ms))

    def on_idle(self) -> None:
        self._do(_once(super().on_idle))

    def on_end(self) -> None:
        self._do(_once(super().on_end))

    def has_work(self) -> bool:
        return bool(self._works)

    def holds_records(self) -> bool:
        return any(holds_records for _, holds_records in self._works)

    def work(self) -> None:
        works = self._works
        while works:
            for _ in works[0][0]:
                return  # the work pauses
            works.popleft()
            if works and self._budget.is_spent:
                return

    # Inside.

    def _do(self, steps: Steps, *, holds_records: bool = False) -> None:
        """Do this after the work that waits already: at once, if there is time."""
        self._works.append((steps, holds_records))
        if not self._budget.is_spent:
            self.work()

    def _do_later(self, steps: Steps) -> None:
        """Do this in a step of its own."""
        self._works.append((steps, False))

    def _finish(self) -> None:
        """Do all that is left, however long it takes."""
        while self._works:
            self._budget.begin()
            self.work()


def _once(call: Callable[[], None]) -> Steps:
    call()
    yield from ()
