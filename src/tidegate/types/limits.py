"""How many bytes go into one column, and batches that are joined within that bound.

The offsets of Arrow's `string`, `binary` and `list` have 32 bits, so a column of text holds 2 GiB at most. Two columns that
fit may be too large together: `pa.concat_batches` and `take` raise `ArrowInvalid` then. So batches are joined only up to
`JOINED_BYTES`, and Python values that are too large for one column become several (`ColumnTooLarge`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from tidegate.errors import SchemaError

MAX_COLUMN_BYTES = (1 << 31) - 1
# Small enough that a copy of it doesn't matter, and large enough that small batches are always joined.
JOINED_BYTES = 64 << 20


class ColumnTooLarge(SchemaError):
    """Values don't fit into one column, although each may fit alone."""


def joined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Join batches to as few as possible, of `JOINED_BYTES` at most; larger ones stay as they are."""
    for run in runs(batches):
        yield run[0] if len(run) == 1 else pa.concat_batches(run)


def runs(batches: Iterable[pa.RecordBatch], *, max_rows: int | None = None) -> Iterator[list[pa.RecordBatch]]:
    """Return the batches in runs that may be joined. A run ends when it has `max_rows`. The batches may be slices."""
    run: list[pa.RecordBatch] = []
    run_rows = run_bytes = 0
    for batch in batches:
        size_bytes = batch.nbytes
        if run and run_bytes + size_bytes > JOINED_BYTES:
            yield run
            run, run_rows, run_bytes = [], 0, 0
        run.append(batch)
        run_rows += batch.num_rows
        run_bytes += size_bytes
        if max_rows is not None and run_rows >= max_rows:
            yield run
            run, run_rows, run_bytes = [], 0, 0
    if run:
        yield run


def joined_columns(columns: list[pa.Array]) -> pa.Array:
    """Join columns to one. If they are too large for 32 bits, text and bytes get offsets of 64 bits."""
    if sum(column.nbytes for column in columns) > MAX_COLUMN_BYTES:
        columns = [column.cast(_large(column.type)) for column in columns]
    return pa.concat_arrays(columns)


def _large(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string(kind):
        return pa.large_string()
    if pa.types.is_binary(kind):
        return pa.large_binary()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_large(field.type)) for field in kind])
    return kind
