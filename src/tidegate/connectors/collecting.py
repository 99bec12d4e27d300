"""The collect sink, which brings rows to the driver, and how the driver reads them.

An epoch's rows are the committable itself: JSON with the id of the delivery, and the rows as an Arrow stream in base64.
So they are part of the snapshot, and `commit` sends them to the driver. A commit that is repeated after a recovery
delivers the same id again. The driver accepts each id once, so delivery is exactly-once.

Invariants:
- A delivery's id (sink, epoch, subtask, attempt) is never given to other rows.
- The rows of an epoch are limited in size, because they are in the snapshot and on the control connection.

Not here: the way from slot to driver (`SinkContext.deliver` is the runtime's).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tidegate.dataflow.changelog import ANY, Changelog
from tidegate.dataflow.contracts import Committable, Sink, SinkContext, SinkWriter
from tidegate.errors import CommitError, JobError
from tidegate.types import rows_of

MAX_EPOCH_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, order=True)
class DeliveryId:
    """The rows that one subtask wrote in one epoch. Ordered as the rows are shown."""

    epoch: int
    subtask: int
    sink: str
    attempt: int


@dataclass(frozen=True, slots=True)
class CollectSink(Sink):
    @property
    def changelogs(self) -> frozenset[Changelog]:
        """Of upserts and changes it delivers every one."""
        return ANY

    def open(self, context: SinkContext) -> SinkWriter:
        return CollectWriter(context)


class CollectWriter(SinkWriter):
    """Keeps the rows of an epoch, which become the committable. The rows that a subclass doesn't keep are counted."""

    def __init__(self, context: SinkContext) -> None:
        self._context = context
        self._batches: list[pa.RecordBatch] = []
        self._bytes = 0
        self._omitted_count = 0

    def write(self, batch: pa.RecordBatch) -> None:
        self._bytes += batch.nbytes
        if self._bytes > MAX_EPOCH_BYTES:
            raise JobError(
                f"sink {self._context.sink!r}: one epoch has more than {MAX_EPOCH_BYTES >> 20} MB, too much to collect on "
                "the driver. Write the records with tg.sinks.parquet(…), filter them, or take snapshots more often"
            )
        if batch.num_rows:
            self._batches.append(batch)

    def pre_commit(self, epoch: int) -> Callable[[], Sequence[Committable]]:
        batches, omitted_count = self._batches, self._omitted_count
        self._batches, self._bytes, self._omitted_count = [], 0, 0
        if not batches:
            return lambda: ()
        context = self._context
        delivery = DeliveryId(epoch, context.subtask, context.sink, context.attempt)
        return lambda: (encode_delivery(delivery, pa.Table.from_batches(batches), omitted_count=omitted_count),)

    def commit(self, committables: Sequence[Committable]) -> None:
        for committable in committables:
            self._context.deliver(committable)


def encode_delivery(delivery: DeliveryId, rows: pa.Table, *, omitted_count: int = 0) -> Committable:
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, rows.schema) as writer:
        writer.write_table(rows)
    name = {"sink": delivery.sink, "epoch": delivery.epoch, "subtask": delivery.subtask, "attempt": delivery.attempt}
    return json.dumps({"id": name, "omitted": omitted_count, "rows": base64.b64encode(stream.getvalue()).decode()})


def decode_delivery(committable: Committable) -> tuple[DeliveryId, pa.Table, int]:
    """Return the id of a delivery, its rows, and how many rows the sink omitted (only the print sink does)."""
    try:
        content = json.loads(committable)
        with pa.ipc.open_stream(base64.b64decode(content["rows"], validate=True)) as reader:
            return DeliveryId(**content["id"]), reader.read_all(), int(content["omitted"])
    except (ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise CommitError(f"a delivery to the driver can't be read: {error}") from error


def delivered_rows(committables: Iterable[Committable]) -> list[tuple[Any, ...]]:
    """Return the rows as named tuples, each delivery once, ordered by epoch and subtask."""
    deliveries = {delivery: rows for delivery, rows, _ in map(decode_delivery, committables)}
    batches = [batch for delivery in sorted(deliveries) for batch in deliveries[delivery].to_batches()]
    return [row for batch in batches for row in rows_of(batch)]
