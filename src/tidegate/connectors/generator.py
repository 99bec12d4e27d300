"""A source of records that are computed from their number: replayable, without anything outside of the program.

Split s of S yields the records s, s + S, s + 2·S, … of the whole; the offset of a split is the number of its records
that were read. Because `make` is a pure function of (split, start, count), a reader opened at an offset continues with
exactly the next records.

Invariants:
- No Python code runs per record in the vectorised form.
- The rate is counted from when a reader is opened, so there is no burst of records after a restore.

Not here: random data (seed a generator with (split, start) in `make`; a random function isn't replayable).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from tidegate import arguments
from tidegate.connectors.rows import SplitsReader, fitted, next_split, restored_counts, split_id
from tidegate.dataflow.contracts import Source, SourceContext, SourceReader, Splits
from tidegate.errors import SchemaError
from tidegate.types import batch_of, from_list

# A longer time between two polls is a jump of the clock, and counts as this long.
_LONGEST_STEP_MS = 60_000

# More records than can ever be made.
_UNLIMITED = 2**62

Make = Callable[[int, int, int], Any]


@dataclass(frozen=True, slots=True)
class RowWise:
    """A `make` that calls a function for each record, with the record's number in the whole."""

    make_row: Callable[[int], Sequence[Any]]
    schema: pa.Schema
    split_count: int

    def __call__(self, split: int, start: int, count: int) -> pa.RecordBatch:
        step = self.split_count
        numbers = range(split + start * step, split + (start + count) * step, step)
        return batch_of([self.make_row(number) for number in numbers], self.schema)


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSource(Source):
    schema: pa.Schema = field()  # without `field()`, the property of `Source` would be its default
    make: Make
    rows: int | None
    rate: float | None
    split_count: int

    def __post_init__(self) -> None:
        where = "sources.generator"
        arguments.function(where, "make", self.make, "a function of the split, the first record and their count")
        arguments.whole_number(where, "splits", self.split_count, at_least=1)
        if self.rows is not None:
            arguments.whole_number(where, "rows", self.rows)
        if self.rate is not None and arguments.number(where, "rate", self.rate, at_least=0) == 0:
            arguments.refuse(where, "rate", self.rate, "records per second, or None for as many as the job takes")

    @property
    def bounded(self) -> bool:
        return self.rows is not None

    def open(self, context: SourceContext) -> SourceReader:
        return GeneratorReader(self, restored_counts(context, split_count=self.split_count), context.now_ms, context.splits)

    def limit_of(self, split: int) -> int:
        """Return how many of the records 0 … rows - 1 belong to the split."""
        return _UNLIMITED if self.rows is None else _share(self.rows, split=split, split_count=self.split_count)

    def batch(self, split: int, start: int, count: int) -> pa.RecordBatch:
        """Return what `make` returns, checked and under the declared schema."""
        made = self.make(split, start, count)
        where = f"the generator's make(split={split}, start={start}, count={count})"
        if not (isinstance(made, pa.RecordBatch) and made.schema.equals(self.schema)):
            made = self._under_schema(made, where)
        if made.num_rows != count:
            raise SchemaError(f"{where} returned {made.num_rows} records: return exactly `count` records")
        return made

    def _under_schema(self, made: Any, where: str) -> pa.RecordBatch:
        if isinstance(made, (pa.RecordBatch, pa.Table)):
            columns = dict(zip(made.schema.names, made.columns, strict=True))
        elif isinstance(made, Mapping):
            columns = dict(made)
        else:
            raise SchemaError(
                f"{where} returned {type(made).__name__}: return an Arrow record batch or table, or a dictionary of columns"
            )
        if set(columns) != set(self.schema.names):
            raise SchemaError(
                f"{where} returned the columns {sorted(columns)}, the schema declares {sorted(self.schema.names)}"
            )
        arrays = [_array(columns[field.name], field, where) for field in self.schema]
        if len({len(array) for array in arrays}) > 1:
            raise SchemaError(f"{where} returned columns of different lengths: {[len(array) for array in arrays]}")
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _array(values: Any, field: pa.Field, where: str) -> pa.Array:
    if isinstance(values, (list, tuple)):
        return fitted(from_list(values, field.type), field, where=where)
    if not isinstance(values, (pa.Array, pa.ChunkedArray)):
        try:
            values = pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
            raise SchemaError(f"{where}: column {field.name!r} isn't an array of one type: {error}") from error
    return fitted(values, field, where=where)


def _share(total: int, *, split: int, split_count: int) -> int:
    """Return how many of the numbers 0 … total - 1 are `split` modulo `split_count`."""
    return (total - split + split_count - 1) // split_count


class GeneratorReader(SplitsReader):
    """Makes the records that are due, one split after the other. If event time is followed, each batch is of one split: of
    the splits with due records, the one with the lowest watermark."""

    def __init__(self, source: GeneratorSource, counts: dict[int, int], now_ms: Callable[[], int], splits: Splits) -> None:
        self._source = source
        self._opened_at = dict(counts)
        self._now_ms = now_ms
        self._last_ms = now_ms()
        self._elapsed_ms = 0
        limits = {split: source.limit_of(split) for split in counts}
        super().__init__(counts, limits, splits, has_records=source.rate is None)

    def poll(self, max_rows: int) -> pa.RecordBatch | None:
        due = self._due()
        if self._splits.is_followed:
            return self._poll_one(max_rows, due)
        parts: list[pa.RecordBatch] = []
        room = max_rows
        for split in self._turns[:]:
            count = min(room, self._available(split, due))
            if count:
                parts.append(self._take(split, count))
                room -= count
            if room == 0:
                break
        if len(parts) <= 1:
            return parts[0] if parts else None
        return pa.concat_batches(parts)

    def _poll_one(self, max_rows: int, due: int) -> pa.RecordBatch | None:
        available = {split: count for split in self._turns if (count := self._available(split, due)) > 0}
        if not available:
            return None
        split = next_split(list(available), self._splits)
        if split is None:
            return None
        self._splits.read(split_id(split))
        return self._take(split, min(max_rows, available[split]))

    def _due(self) -> int:
        """Return how many records the whole source should have made since this reader was opened."""
        if self._source.rate is None:
            return _UNLIMITED
        now = self._now_ms()
        self._elapsed_ms += min(max(now - self._last_ms, 0), _LONGEST_STEP_MS)
        self._last_ms = now
        return int(self._elapsed_ms * self._source.rate / 1000)

    def _available(self, split: int, due: int) -> int:
        made = self._counts[split] - self._opened_at[split]
        share = _share(due, split=split, split_count=self._source.split_count)
        return min(share - made, self._limits[split] - self._counts[split])

    def _take(self, split: int, count: int) -> pa.RecordBatch:
        batch = self._source.batch(split, self._counts[split], count)
        self._passed(split, count)
        return batch
