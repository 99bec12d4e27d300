"""The broadcast operator: a main stream (keyed or not) beside a stream that every subtask sees whole.

Port 0 is the main stream, whose records read the broadcast state. Port 1 is the broadcast side, whose records write it.
There is no key on the broadcast side, and therefore neither keyed state nor timers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import Operator
from tidegate.dataflow.operators.process import Method, ProcessOperator, function_states
from tidegate.dataflow.operators.stepwise import Steps
from tidegate.state.sections import StateInfo
from tidegate.types import rows_of

_OVER = object()


@dataclass(frozen=True, slots=True)
class BroadcastProcessSpec:
    """A `BroadcastProcess`. `key` is empty if the main stream isn't keyed."""

    function: Any
    key: tuple[str, ...]
    kind: str = "broadcast process"
    stateful: bool = True

    def create(self, node: Node) -> Operator:
        return BroadcastProcessOperator(node, self.function, keys=(self.key,))

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        return function_states(node, self.function, self.key)


class BroadcastProcessOperator(ProcessOperator):
    def _ports(self) -> list[Method]:
        return [self._function.process, self._function.process_broadcast]

    def take_batch(self, batch: pa.RecordBatch, port: int) -> Steps:
        if port == 0:
            yield from super().take_batch(batch, port)
            return
        steps = self._process(self._methods[port], rows_of(batch), None, batch.num_rows)
        while self._writes(steps):
            yield

    def _writes(self, steps: Steps) -> bool:
        """Do one step, in which the broadcast state may be written. Return whether more steps follow."""
        self._operator_states.set_writable(True)
        try:
            return next(steps, _OVER) is not _OVER
        finally:
            self._operator_states.set_writable(False)
