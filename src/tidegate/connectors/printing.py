"""The print sink: the driver prints one line for each row when the row's epoch is committed.

It uses the deliveries of collecting.py, so it works on a cluster as on one machine, and shows committed rows only. Of
each epoch and subtask it keeps the first `limit` rows, up to about 1 MB, and counts the rest.

Invariant: a line is printed at least once. The driver skips a delivery that it has printed before. After a restart of
the program, a new driver may print the last epoch again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from tidegate import arguments
from tidegate.connectors.collecting import CollectWriter, DeliveryId, decode_delivery
from tidegate.dataflow.changelog import ANY, Changelog
from tidegate.dataflow.contracts import Committable, Sink, SinkContext, SinkWriter
from tidegate.types import rows_of

# Deliveries are repeated soon after the first time, at a recovery, so this is more than enough.
_REMEMBERED_DELIVERIES = 10_000

_SHOWN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PrintSink(Sink):
    limit: int

    def __post_init__(self) -> None:
        arguments.whole_number("sinks.print", "limit", self.limit, at_least=1)

    @property
    def changelogs(self) -> frozenset[Changelog]:
        """Of upserts and changes it prints every one."""
        return ANY

    def open(self, context: SinkContext) -> SinkWriter:
        return PrintWriter(self.limit, context)


class PrintWriter(CollectWriter):
    """Keeps the first rows of an epoch, and counts the rest."""

    def __init__(self, limit: int, context: SinkContext) -> None:
        super().__init__(context)
        self._limit = limit
        self._rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        shown = batch.slice(0, self._limit - self._rows if self._bytes < _SHOWN_BYTES else 0)
        if shown.num_rows:
            self._batches.append(shown)
        self._rows += shown.num_rows
        self._bytes += shown.nbytes
        self._omitted_count += batch.num_rows - shown.num_rows

    def pre_commit(self, epoch: int) -> Callable[[], Sequence[Committable]]:
        self._rows = 0
        return super().pre_commit(epoch)


def _lines(delivery: DeliveryId, rows: pa.Table, omitted_count: int) -> list[str]:
    """Return `out> word='tide', n=3` for each row, and a last line with the number of omitted rows."""
    lines = [
        f"{delivery.sink}> " + ", ".join(f"{name}={value!r}" for name, value in zip(rows.column_names, row, strict=True))
        for batch in rows.to_batches()
        for row in rows_of(batch)
    ]
    if omitted_count:
        lines.append(f"{delivery.sink}> … and {omitted_count} more in epoch {delivery.epoch}")
    return lines


class DeliveryPrinter:
    """Prints each delivery once, on the driver."""

    def __init__(self, write_line: Callable[[str], object] | None = None) -> None:
        self._write_line = write_line or (lambda line: print(line, file=sys.stdout, flush=True))
        self._printed: dict[DeliveryId, None] = {}

    def take(self, committable: Committable) -> None:
        delivery, rows, omitted_count = decode_delivery(committable)
        if delivery in self._printed:
            return
        self._printed[delivery] = None
        if len(self._printed) > _REMEMBERED_DELIVERIES:
            del self._printed[next(iter(self._printed))]
        for line in _lines(delivery, rows, omitted_count):
            self._write_line(line)
