"""The print sink: what the driver writes."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tidegate import sinks
from tidegate.connectors import printing
from tidegate.connectors.printing import DeliveryPrinter
from tidegate.dataflow.contracts import SinkContext, SinkWriter
from tidegate.errors import JobError

SCHEMA = pa.schema([("word", pa.string()), ("n", pa.int64())])


def _open(delivered: list[str], *, limit: int = 1000) -> SinkWriter:
    return sinks.print(limit=limit).open(
        SinkContext(job="job", sink="out", subtask=0, parallelism=1, attempt=1, schema=SCHEMA, deliver=delivered.append)
    )


def _batch(count: int) -> pa.RecordBatch:
    return pa.record_batch([[f"w{i}" for i in range(count)], list(range(count))], SCHEMA)


def _epoch(writer: SinkWriter, epoch: int, *counts: int) -> None:
    for count in counts:
        writer.write(_batch(count))
    writer.commit(writer.pre_commit(epoch)())


def test_a_row_is_a_line_with_the_sinks_name(capsys: pytest.CaptureFixture[str]) -> None:
    delivered: list[str] = []
    _epoch(_open(delivered), 1, 2)
    printer = DeliveryPrinter()
    for committable in delivered * 2:
        printer.take(committable)
    assert capsys.readouterr().out == "out> word='w0', n=0\nout> word='w1', n=1\n"


def test_rows_beyond_the_limit_are_counted_by_epoch() -> None:
    delivered: list[str] = []
    lines: list[str] = []
    writer = _open(delivered, limit=3)
    _epoch(writer, 4, 2, 2, 5)
    _epoch(writer, 5)
    _epoch(writer, 6, 1)
    printer = DeliveryPrinter(lines.append)
    for committable in delivered:
        printer.take(committable)
    assert lines == [
        "out> word='w0', n=0",
        "out> word='w1', n=1",
        "out> word='w0', n=0",
        "out> … and 6 more in epoch 4",
        "out> word='w0', n=0",
    ]


def test_large_rows_dont_fill_the_snapshot() -> None:
    delivered: list[str] = []
    writer = _open(delivered)
    large = pa.record_batch([["x" * 400_000], [1]], SCHEMA)
    for _ in range(100):
        writer.write(large)
    (committable,) = writer.pre_commit(1)()
    assert len(committable) < 2_500_000
    lines: list[str] = []
    DeliveryPrinter(lines.append).take(committable)
    assert lines[-1] == "out> … and 97 more in epoch 1"


def test_the_printer_forgets_old_deliveries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printing, "_REMEMBERED_DELIVERIES", 3)
    delivered: list[str] = []
    lines: list[str] = []
    writer = _open(delivered)
    for epoch in range(10):
        _epoch(writer, epoch, 1)
    printer = DeliveryPrinter(lines.append)
    for committable in [*delivered, *delivered[-3:]]:
        printer.take(committable)
    assert len(lines) == 10


def test_a_limit_is_a_number_of_rows() -> None:
    with pytest.raises(JobError, match="limit"):
        sinks.print(limit=0)
