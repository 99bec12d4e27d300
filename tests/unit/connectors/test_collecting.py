"""Deliveries to the driver: each once, in order, within bounds."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tidegate import sinks
from tidegate.connectors import collecting
from tidegate.connectors.collecting import DeliveryId, decode_delivery, delivered_rows
from tidegate.dataflow.contracts import SinkContext, SinkWriter
from tidegate.errors import CommitError, JobError

SCHEMA = pa.schema([("n", pa.int64()), ("tags", pa.list_(pa.string())), ("at", pa.timestamp("us", "UTC"))])


def _open(delivered: list[str], *, subtask: int = 0, attempt: int = 1) -> SinkWriter:
    return sinks.collect().open(
        SinkContext(
            job="job", sink="out", subtask=subtask, parallelism=2, attempt=attempt, schema=SCHEMA, deliver=delivered.append
        )
    )


def _batch(*numbers: int) -> pa.RecordBatch:
    rows = [{"n": n, "tags": ["a", None] if n % 2 else None, "at": None} for n in numbers]
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def test_rows_are_ordered_by_epoch_then_subtask_and_taken_once() -> None:
    delivered: list[str] = []
    committables: dict[tuple[int, int], str] = {}
    writers = [_open(delivered, subtask=subtask) for subtask in range(2)]
    for epoch in (9, 10):
        for subtask, writer in enumerate(writers):
            writer.write(_batch(epoch * 10 + subtask))
            writer.write(_batch(epoch * 10 + subtask, 0))
            (committables[epoch, subtask],) = writer.pre_commit(epoch)()
    for which in [(10, 1), (9, 1), (10, 0), (9, 0), (9, 1), (10, 0)]:
        writers[0].commit([committables[which]])
    rows = delivered_rows(delivered)
    assert [row[0] for row in rows] == [90, 90, 0, 91, 91, 0, 100, 100, 0, 101, 101, 0]
    assert rows[3] == (91, ["a", None], None)
    assert rows[3].n == 91  # type: ignore[attr-defined]


def test_nothing_delivered_is_no_rows() -> None:
    assert delivered_rows([]) == []


def test_a_delivery_has_its_id_and_its_rows() -> None:
    writer = _open([], subtask=1, attempt=7)
    writer.write(_batch(1, 2, 3).slice(1, 1))
    (committable,) = writer.pre_commit(5)()
    delivery, rows, _ = decode_delivery(committable)
    assert delivery == DeliveryId(epoch=5, subtask=1, sink="out", attempt=7)
    assert rows.to_pylist() == [{"n": 2, "tags": None, "at": None}]


def test_too_much_in_an_epoch_is_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "MAX_EPOCH_BYTES", 1 << 20)
    writer = _open([])
    large = _batch(*range(10_000))
    for epoch in range(5):
        writer.write(large)
        writer.pre_commit(epoch)()
    for _ in range((1 << 20) // large.nbytes):
        writer.write(large)
    with pytest.raises(JobError, match=r"sink 'out': one epoch has more than 1 MB.* tg\.sinks\.parquet"):
        writer.write(large)


@pytest.mark.parametrize(
    "nonsense",
    [
        "",
        "{}",
        "[]",
        '{"id": {}, "rows": "", "omitted": 0}',
        '{"id": {"sink": "s", "epoch": 1, "subtask": 0, "attempt": 1}, "rows": "!"}',
    ],
)
def test_a_delivery_that_cant_be_read_is_an_error(nonsense: str) -> None:
    with pytest.raises(CommitError):
        decode_delivery(nonsense)
