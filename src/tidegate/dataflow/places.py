"""Places at which records wait: one port of an operator, or a loop's way back to its head."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from tidegate.dataflow.graph import Node
from tidegate.dataflow.in_flight import FEEDBACK, feedback_state, in_flight_state
from tidegate.state.sections import StateInfo


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where records wait: a port of an operator. `info` is the state that they are in a snapshot."""

    operator: str
    port: int
    info: StateInfo
    schema: pa.Schema

    @property
    def is_feedback(self) -> bool:
        return self.info.name == FEEDBACK


def places_of(node: Node) -> tuple[Place, ...]:
    """Every place at which records for this operator may have waited in some snapshot."""
    ports = tuple(
        Place(node.name, port, in_flight_state(port, schema), schema) for port, schema in enumerate(node.input_schemas)
    )
    if node.begins_loop:
        return *ports, Place(node.name, 0, feedback_state(node.schema), node.schema)
    return ports
