"""Records in flight: logged in a snapshot beside the state, and fed in again first after a restore.

They belong to the operator that they were sent to. A *place* is where they wait: a port of an operator, or the feedback of
a loop. A subtask logs each of its places in every snapshot (protocol/alignment.py decides which records); most logs are
empty, and without unaligned snapshots and loops there are no places at all.

After a restore the operator may have another parallelism, or be in the middle of a chain. Keyed records go to the subtask
that has their key now; other records are spread over the subtasks; records of a loop stay together, in their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import count

import numpy as np
import pyarrow as pa

from tidegate.channels.spill import Spill
from tidegate.dataflow.graph import Node, Partitioning
from tidegate.dataflow.in_flight import (
    FEEDBACK,
    in_flight_name,
    rows_to_value,
    value_to_rows,
)
from tidegate.dataflow.operators.base import Operator
from tidegate.dataflow.places import Place
from tidegate.dataflow.plan import PlanEdge
from tidegate.hashing import hash_columns
from tidegate.keygroups import groups_of, owners_of
from tidegate.state.sections import FrozenState, Section

LOG_MEMORY_BYTES = 32 << 20


def waits_in(edge: PlanEdge) -> str:
    """Return the name of the state that holds records in flight on this edge in a snapshot."""
    return FEEDBACK if edge.feedback else in_flight_name(edge.port)


class FrozenLog:
    """The log of one place, as frozen state."""

    complete = True

    def __init__(self, place: Place, records: Spill) -> None:
        self.states = (place.info,)
        self._schema = place.schema
        self._records = records

    def sections(self) -> Iterator[Section]:
        (info,) = self.states
        for batch in self._records.batches():
            yield Section(info.name, None, rows_to_value(batch, self._schema))

    def release(self) -> None:
        self._records.close()


class Logs:
    """The logs of one snapshot of one subtask."""

    def __init__(self, places: Iterable[Place]) -> None:
        self._records = {place: Spill(place.schema, memory_bytes=LOG_MEMORY_BYTES) for place in places}

    def append(self, place: Place, batch: pa.RecordBatch) -> None:
        # A column of one of several united streams may be declared without nulls.
        schema = place.schema
        self._records[place].append(batch if batch.schema.equals(schema) else pa.record_batch(batch.columns, schema=schema))

    def of(self, operator: str) -> list[FrozenState]:
        return [FrozenLog(place, records) for place, records in self._records.items() if place.operator == operator]

    def byte_count(self, *, feedback: bool) -> int:
        """Return the size of the records in loops (`feedback`), or that of all other records."""
        return sum(records.byte_count for place, records in self._records.items() if place.is_feedback is feedback)


class Replay:
    """The records in flight of the restored snapshot. They are fed in before anything else, batch by batch."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Place, Operator, Spill]] = deque()

    def add(self, place: Place, operator: Operator, batches: Iterable[pa.RecordBatch]) -> None:
        records = Spill(place.schema, memory_bytes=LOG_MEMORY_BYTES)
        for batch in batches:
            if batch.num_rows:
                records.append(batch)
        if len(records):
            self._waiting.append((place, operator, records))

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def feed(self) -> int:
        """One batch; the number of its records."""
        place, operator, records = self._waiting[0]
        batch = records.popleft()
        if not len(records):
            self._waiting.popleft()
            records.close()
        operator.on_batch(batch, place.port)
        return int(batch.num_rows)

    def log(self, logs: Logs) -> None:
        """Log the records that were not fed in yet: they are still in flight."""
        for place, _, records in self._waiting:
            for batch in records.batches():
                logs.append(place, batch)

    def close(self) -> None:
        for _, _, records in self._waiting:
            records.close()
        self._waiting.clear()


def own_records(
    place: Place, node: Node, rows: Iterable[pa.RecordBatch], *, subtask: int, parallelism: int, key_group_count: int
) -> Iterator[pa.RecordBatch]:
    """Return the records in the restored rows of a place that belong to this subtask now."""
    # Partial aggregates, which have a port of their own, have the key of the records.
    edge = next((edge for edge in node.inputs if edge.port == place.port), node.inputs[0])
    numbers = count()
    for batch in (value_to_rows(each, place.schema) for each in rows):
        if place.is_feedback or parallelism == 1:
            yield batch
            continue
        if edge.partitioning is Partitioning.HASH:
            groups = groups_of(hash_columns([batch.column(name) for name in edge.key]), key_group_count)
            owners = owners_of(groups, parallelism=parallelism, key_group_count=key_group_count)
        else:
            owners = np.fromiter(numbers, dtype=np.int32, count=batch.num_rows) % np.int32(parallelism)
        yield batch.filter(pa.array(owners == subtask))
