"""Parquet as an input format. Positions are rows.

A file is complete when it has its footer, and never changes from then on. One that stays without footer is reported
(files.py).

Invariants:
- Memory is bounded by a batch of a row group, not by the file; row groups before the position aren't read.
- A column changes its representation to fit the schema, never a value (`fitted`): a conversion that would is a
  `SourceError`.
- A damaged file is a `SourceError`. A disk or an object store that is unavailable for a moment isn't.

Not here: columns in folder names (`day=1/`), and reading parts of nested columns.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import pyarrow as pa
import pyarrow.parquet as pq

from tidegate.connectors.folders import FileFormat, Found, InputFolder, OpenFile, shrunk
from tidegate.connectors.rows import check_fits, fitted
from tidegate.errors import SchemaError, SourceError
from tidegate.types import parse_schema

PARQUET_BATCH_ROWS = 16_384
MOST_OPEN = 8  # The columns of a row group of each file may be in memory.


@dataclass(frozen=True, slots=True)
class ParquetFormat(FileFormat):
    schema: pa.Schema
    grows = False
    most_open = MOST_OPEN

    def open(self, folder: InputFolder, found: Found, *, position: int, final: bool) -> OpenFile | None:
        file = _parquet_file(folder, found.name)
        if file is not None:
            return ParquetInput(file, folder, found, position, self.schema)
        if final:
            raise SourceError(
                f"{found.name} in {folder.address} has no valid Parquet footer: it is being written, or "
                "was left unfinished. Start again when it is complete, or remove it"
            )
        return None


def _parquet_file(folder: InputFolder, name: str) -> pq.ParquetFile | None:
    """Open a file; None if it has no valid footer (yet)."""
    file = folder.open(name)
    try:
        return pq.ParquetFile(file, coerce_int96_timestamp_unit="us")
    except (pa.ArrowInvalid, OSError) as error:
        file.close()
        if _is_damage(error, folder):
            return None
        raise


def _is_damage(error: Exception, folder: InputFolder) -> bool:
    """Whether the error shows that the file's content is wrong. For that, Arrow mostly raises an `OSError` without a number,
    but so do remote file systems that can't be reached."""
    return not isinstance(error, OSError) or (error.errno is None and folder.is_local)


def schema_in(address: str) -> pa.Schema:
    """Return the schema of the oldest Parquet file at the address."""
    folder = InputFolder(address)
    for found in sorted(folder.list(lambda names: [True] * len(names)), key=lambda found: (found.mtime_ns, found.name)):
        file = _parquet_file(folder, found.name)
        if file is not None:
            # Spark and Hive write instants as INT96; Arrow doesn't know that their zone is UTC.
            instants = {
                column.path for column in map(file.schema.column, range(len(file.schema))) if column.physical_type == "INT96"
            }
            fields = [
                pa.field(
                    field.name, pa.timestamp("us", "UTC") if field.name in instants else _plain(field.type), field.nullable
                )
                for field in file.schema_arrow
            ]
            file.close()
            return parse_schema(pa.schema(fields))
    missing = f"there is no Parquet file in {address}" if folder.exists() else f"there is no {address}"
    raise SchemaError(
        f"{missing} to take the schema from: give another path, or give the source a schema, such as "
        'schema="id long, name string", if the files come later'
    )


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return the type in the one width, zone and unit that Spark's types have."""
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    return {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}.get(kind, kind)


@contextmanager
def _input_is_to_blame() -> Iterator[None]:
    """Raise a `SourceError` for a `SchemaError`: here the input is wrong, and not the program as with a generator."""
    try:
        yield
    except SchemaError as error:
        raise SourceError(str(error)) from error


class ParquetInput(OpenFile):
    """A Parquet file that is being read, from the row group of the position on."""

    def __init__(self, file: pq.ParquetFile, folder: InputFolder, found: Found, position: int, schema: pa.Schema) -> None:
        self.found = found
        self.position = position
        self.size = file.metadata.num_rows
        self._file = file
        self._schema = schema
        self._folder = folder
        self._where = f"{found.name} in {folder.address}"
        self._batch: pa.RecordBatch | None = None
        if position > self.size:
            raise shrunk(self._where, read=position, now=self.size, unit="rows")
        self._check_columns(file.schema_arrow)
        ends = list(accumulate(file.metadata.row_group(each).num_rows for each in range(file.num_row_groups)))
        self._group_ends = set(ends)
        group = bisect_right(ends, position)
        self._skip = position - (ends[group - 1] if group else 0)
        self._batches: Iterator[pa.RecordBatch] = iter(
            file.iter_batches(
                PARQUET_BATCH_ROWS, row_groups=range(group, file.num_row_groups), columns=schema.names, use_threads=False
            )
        )

    def _check_columns(self, columns: pa.Schema) -> None:
        for field in self._schema:
            if field.name not in columns.names:
                raise SourceError(f"{self._where} has no column {field.name!r}; it has {', '.join(columns.names)}")
            with _input_is_to_blame():
                check_fits(columns.field(field.name).type, field, where=self._where)

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        while self._batch is None or self._batch.num_rows == 0:
            if self.position == self.size:
                return None
            self._batch = self._next()
        taken = self._batch.slice(0, max_rows)
        self._batch = self._batch.slice(taken.num_rows)
        self.position += taken.num_rows
        return taken

    def _next(self) -> pa.RecordBatch:
        try:
            read = next(self._batches)
        except (pa.ArrowException, OSError, StopIteration) as error:
            if not _is_damage(error, self._folder):
                raise
            raise SourceError(
                f"{self._where} can't be read after row {self.position}: {error!r}. Replace it by an intact copy with the "
                "same rows"
            ) from error
        skipped = min(self._skip, read.num_rows)
        self._skip -= skipped
        with _input_is_to_blame():
            columns = [fitted(read.column(field.name), field, where=self._where) for field in self._schema]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema).slice(skipped)

    @property
    def at_rest(self) -> bool:
        return self.position in self._group_ends

    def close(self) -> None:
        self._file.close(force=True)
