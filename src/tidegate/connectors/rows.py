"""A source of rows that the program holds, and functions that all sources with a fixed number of splits share.

Row i of the list is record i // splits of split i % splits; the offset of a split is the number of its records
that were read.

Invariants:
- The list is checked against the schema when the source is built, so that a reader never finds a bad row.
- `fitted` changes the representation of a column, never a value: a conversion that would is a `SchemaError`.

Not here: reading anything from outside of the program (files.py, generator.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.types as kinds

from tidegate import arguments
from tidegate.dataflow.contracts import Offset, Source, SourceContext, SourceReader, Splits
from tidegate.errors import RestoreError, SchemaError
from tidegate.types import batch_of, ddl_of


@dataclass(frozen=True, slots=True)
class RowsSource(Source):
    schema: pa.Schema = field()  # without `field()`, the property of `Source` would be its default
    batches: tuple[pa.RecordBatch, ...]  # by split
    bounded = True

    @classmethod
    def of(cls, values: Sequence[Sequence[Any]], schema: pa.Schema, *, split_count: int) -> RowsSource:
        arguments.whole_number("sources.rows", "splits", split_count, at_least=1)
        return cls(schema, tuple(batch_of(values[split::split_count], schema) for split in range(split_count)))

    def open(self, context: SourceContext) -> SourceReader:
        return RowsReader(self.batches, restored_counts(context, split_count=len(self.batches)), context.splits)


class SplitsReader(SourceReader):
    """Reads a fixed number of splits in turn. `counts` is how many records of each were read, `limits` how many it has."""

    def __init__(self, counts: dict[int, int], limits: Mapping[int, int], splits: Splits, *, has_records: bool) -> None:
        self._counts = counts
        self._limits = limits
        self._turns = [split for split, count in counts.items() if count < limits[split]]
        self._splits = splits.report(holds_back=True)
        for split in self._turns:
            splits.discover(split_id(split), has_records=has_records)

    def _passed(self, split: int, count: int) -> None:
        """Count records that are returned next, and end the turn of their split."""
        self._counts[split] += count
        self._turns.remove(split)
        if self._counts[split] < self._limits[split]:
            self._turns.append(split)
        else:
            self._splits.finish(split_id(split))

    def offsets(self) -> Mapping[str, Offset]:
        return {split_id(split): count for split, count in self._counts.items()}

    @property
    def finished(self) -> bool:
        return not self._turns


class RowsReader(SplitsReader):
    """Returns a slice of one split at a time: of the splits in turn, or in the order of event time if that is followed."""

    def __init__(self, batches: Sequence[pa.RecordBatch], counts: dict[int, int], splits: Splits) -> None:
        for split, count in counts.items():
            if count > batches[split].num_rows:
                raise RestoreError(
                    f"the snapshot was taken when {count} rows of split {split} had been read, but the job's list now has "
                    f"only {batches[split].num_rows} there: give the source the rows it had, or more"
                )
        self._batches = batches
        super().__init__(counts, {split: batches[split].num_rows for split in counts}, splits, has_records=True)

    def poll(self, max_rows: int) -> pa.RecordBatch | None:
        if not self._turns:
            return None
        split = next_split(self._turns, self._splits)
        if split is None:
            return None
        batch = self._batches[split].slice(self._counts[split], max_rows)
        self._splits.read(split_id(split))
        self._passed(split, batch.num_rows)
        return batch


def split_id(split: int) -> str:
    return f"split-{split}"


def next_split(turns: Sequence[int], splits: Splits) -> int | None:
    """Return the first split, or if event time is followed, the one with the lowest watermark; None if that is ahead."""
    if not splits.is_followed:
        return turns[0]
    lowest = min(turns, key=lambda split: splits.watermark_ms(split_id(split)))
    return None if splits.is_ahead(split_id(lowest)) else lowest


def restored_counts(context: SourceContext, *, split_count: int) -> dict[int, int]:
    """Return how many records were read of each split that this subtask owns. Split s belongs to subtask s % parallelism."""
    if context.restored and set(context.restored) != {split_id(split) for split in range(split_count)}:
        raise RestoreError(
            f"the snapshot was taken with {len(context.restored)} splits ({_some(context.restored)}), but the source has "
            f"{split_count} now: records would be read twice or never. Build the source with the splits it had"
        )
    owned = range(context.subtask, split_count, context.parallelism)
    return {split: int(context.restored.get(split_id(split), 0)) for split in owned}


def _some(names: Mapping[str, Offset]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return shown if len(names) <= 3 else shown + ", …"


def fitted(column: Any, field: pa.Field, *, where: str) -> pa.Array:
    """Return a column (an Arrow array, chunked or not) in the declared type, if that preserves every value."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    check_fits(array.type, field, where=where)
    if array.type != field.type:
        try:
            array = array.cast(field.type)
        except pa.ArrowInvalid as error:
            raise SchemaError(f"{where}: column {field.name!r} doesn't fit {ddl_of(field.type)}: {error}") from error
    if not field.nullable and array.null_count:
        raise SchemaError(f"{where}: column {field.name!r} is declared as not null, but has {array.null_count} nulls")
    return array


def check_fits(got: pa.DataType, field: pa.Field, *, where: str) -> None:
    if not _preserves_values(got, field.type):
        raise SchemaError(
            f"{where}: column {field.name!r} is {ddl_of(got)}, but is declared as {ddl_of(field.type)}: change the declared "
            "schema or the data"
        )


def _preserves_values(got: pa.DataType, want: pa.DataType) -> bool:
    """Whether a safe cast between the types changes no value. A cast may still fail for a value out of range."""
    if got == want or kinds.is_null(got):
        return True
    if kinds.is_dictionary(got):
        return _preserves_values(got.value_type, want)
    if kinds.is_integer(want):
        room = want.bit_width - kinds.is_unsigned_integer(got)
        return bool(kinds.is_integer(got) and got.bit_width <= room and not kinds.is_unsigned_integer(want))
    if kinds.is_floating(want):
        return bool((kinds.is_floating(got) and got.bit_width <= want.bit_width) or kinds.is_integer(got))
    if kinds.is_decimal(want):
        return bool(kinds.is_decimal(got) and got.scale <= want.scale)
    if kinds.is_timestamp(want):
        return bool(kinds.is_timestamp(got) and (got.tz is None or want.tz is not None))
    for is_alike in (kinds.is_date, _is_text, _is_bytes):
        if is_alike(want):
            return bool(is_alike(got))
    if _is_list(want):
        return _is_list(got) and _preserves_values(got.value_type, want.value_type)
    if kinds.is_map(want):
        return (
            kinds.is_map(got)
            and _preserves_values(got.key_type, want.key_type)
            and _preserves_values(got.item_type, want.item_type)
        )
    if kinds.is_struct(want):
        return (
            kinds.is_struct(got)
            and [child.name for child in got] == [child.name for child in want]
            and all(_preserves_values(a.type, b.type) for a, b in zip(got, want, strict=True))
        )
    return False


def _is_text(kind: pa.DataType) -> bool:
    return bool(kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_string_view(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(
        kinds.is_binary(kind)
        or kinds.is_large_binary(kind)
        or kinds.is_fixed_size_binary(kind)
        or kinds.is_binary_view(kind)
    )


def _is_list(kind: pa.DataType) -> bool:
    return bool(kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind))
