"""The two ends of a loop.

A loop has a head, where its input enters and where records return, and a tail, which sends them back (Carbone et al. 2017,
§3.3: IterationHead and IterationTail). The logical graph has no cycle: the tail names its head, and the plan has a feedback
edge from one to the other, from subtask i to subtask i. Both operators only forward records. The runtime makes a loop of
them: it feeds returning records into the head, logs them between a marker and that marker's return, counts laps, and
forwards the end when no record is in flight any more.

Event time comes from outside: the head forwards the watermarks of its input, and the tail drops those of the body.
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
    """The beginning of a loop. The runtime keeps its state, which is the log of returning records."""

    kind: str = "iterate"
    stateful: bool = True
    begins_loop: ClassVar[bool] = True

    def create(self, node: Node) -> Operator:
        return IterationHeadOperator(node)

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        return (feedback_state(node.schema),)


@dataclass(frozen=True, slots=True)
class IterationTailSpec:
    """The end of a loop, which sends records back to the head: the node with that id."""

    head: int
    kind: str = "feedback"
    stateful: bool = False

    def create(self, node: Node) -> Operator:
        return IterationTailOperator(node)

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        return ()


class IterationHeadOperator(Operator):
    """Forwards the loop's input and the returning records alike."""

    def on_batch(self, batch: pa.RecordBatch, port: int) -> None:
        self.emit(_of_schema(batch, self.node.input_schemas[0]))


class IterationTailOperator(Operator):
    """Sends records back, and nothing but records. Its consumer is the writer of the feedback edge."""

    def on_batch(self, batch: pa.RecordBatch, port: int) -> None:
        self.emit(_of_schema(batch, self.node.input_schemas[0]))

    def on_watermark(self, at_ms: int) -> None:
        """Drop it: event time doesn't return to the head."""

    def on_idle(self) -> None:
        """Drop it, too."""

    def on_end(self) -> None:
        """Drop it: the head has already ended, or the end would not have come here."""


def _of_schema(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the batch under one schema. Of united streams, one may have a nullable column where the other has not."""
    return batch if batch.schema.equals(schema) else pa.record_batch(batch.columns, schema=schema)
