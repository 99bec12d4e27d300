"""The two ends of a loop.

A loop has a head, where its input enters and where records come back to, and a tail, which sends them back (Carbone et al.
2017, §3.3: IterationHead and IterationTail). It is no cycle of the logical graph: the tail names its head, and the plan has
a feedback edge from one to the other, from subtask i to subtask i. Both operators pass records on and do nothing else. The
runtime makes a loop of them: it feeds what comes back into the head, logs it between a marker and that marker's return,
counts laps, and lets the end pass when nothing is in flight any more.

Event time comes from outside: the head passes the watermarks of its input on, the tail keeps those of the body to itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa

from tidegate.dataflow.graph import Node
from tidegate.dataflow.in_flight import feedback_state
from tidegate.dataflow.operators.base import Operator
from tidegate.state.sections import StateInfo


@dataclass(frozen=True, slots=True)
class IterationHeadSpec:
    """Where a loop begins. Its state, the log of what came back, is kept by the runtime."""

    kind: str = "iterate"
    stateful: bool = True
    begins_loop: ClassVar[bool] = True

    def create(self, node: Node) -> Operator:
        return IterationHeadOperator(node)

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        return (feedback_state(node.schema),)


@dataclass(frozen=True, slots=True)
class IterationTailSpec:
    """Where a loop goes back to its head, which is the node of that id."""

    head: int
    kind: str = "feedback"
    stateful: bool = False

    def create(self, node: Node) -> Operator:
        return IterationTailOperator(node)

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        return ()


class IterationHeadOperator(Operator):
    """Takes the loop's input and what comes back alike."""

    def on_batch(self, batch: pa.RecordBatch, port: int) -> None:
        self.emit(_of_schema(batch, self.node.input_schemas[0]))


class IterationTailOperator(Operator):
    """Sends records back, and nothing else. Its consumer is the writer of the feedback edge."""

    def on_batch(self, batch: pa.RecordBatch, port: int) -> None:
        self.emit(_of_schema(batch, self.node.input_schemas[0]))

    def on_watermark(self, at_ms: int) -> None:
        """Event time doesn't go round."""

    def on_idle(self) -> None:
        """Nor does the lack of it."""

    def on_end(self) -> None:
        """The head has ended already: that is why this has come."""


def _of_schema(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """United streams may come with columns that are nullable in one and not in the other: all leave as one."""
    return batch if batch.schema.equals(schema) else pa.record_batch(batch.columns, schema=schema)
