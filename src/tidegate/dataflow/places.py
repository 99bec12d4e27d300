"""Places at which records wait: a port of an operator, or the feedback of a loop."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from tidegate.dataflow.aggregates.partials import PARTIALS_PORT
from tidegate.dataflow.graph import Node
from tidegate.dataflow.in_flight import FEEDBACK, feedback_state, in_flight_state
from tidegate.state.sections import StateInfo


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A port of an operator, or the feedback of its loop. `info` is the state that holds waiting records in a snapshot."""

    operator: str
    port: int
    info: StateInfo
    schema: pa.Schema

    @property
    def is_feedback(self) -> bool:
        return self.info.name == FEEDBACK


def places_of(node: Node) -> tuple[Place, ...]:
    """Return every place at which records for this operator may have waited in a snapshot."""
    ports = tuple(
        Place(node.name, port, in_flight_state(port, schema), schema) for port, schema in enumerate(node.input_schemas)
    )
    if (partials := node.partials) is not None:
        ports += (Place(node.name, PARTIALS_PORT, in_flight_state(PARTIALS_PORT, partials.schema), partials.schema),)
    if node.begins_loop:
        return *ports, Place(node.name, 0, feedback_state(node.schema), node.schema)
    return ports
