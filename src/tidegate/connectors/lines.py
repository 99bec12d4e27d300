"""JSON lines and CSV as input formats. Positions are bytes, always at the start of a line.

Files may grow at any time: complete lines are read, an unfinished last line is read when it is complete.

Invariants:
- Memory is bounded by a block of a file, or by its longest line, not by the file.
- A line that can't be read is a `SourceError` that names file, line and text, raised after the lines before it were
  returned.

Not here: compressed lines, values with line breaks in CSV.
"""

from __future__ import annotations

import csv as text_csv
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.json as arrow_json

from tidegate import arguments
from tidegate.connectors.arrow_errors import in_spark_types
from tidegate.connectors.folders import FileFormat, Found, InputFolder, OpenFile, shrunk
from tidegate.errors import JobError, SchemaError, SourceError

BLOCK_BYTES = 256 << 10
MAX_LINE_BYTES = 64 << 20
MOST_OPEN = 64

Positions = np.ndarray[Any, np.dtype[np.int64]]

# Converts complete lines to a batch and the byte position behind each record. A `ValueError` says what is wrong.
LinesParser = Callable[[bytes], tuple[pa.RecordBatch, Positions]]


@dataclass(frozen=True, slots=True)
class JsonLines(FileFormat):
    schema: pa.Schema
    grows = True
    most_open = MOST_OPEN

    def __post_init__(self) -> None:
        try:
            self._read(b"{}\n")
        except pa.ArrowNotImplementedError as error:
            raise SchemaError(f"JSON lines can't hold this schema: {error}. Use Parquet") from error
        except ValueError:
            pass  # A column must not be null. This call checks only that its type can be read.

    def open(self, folder: InputFolder, found: Found, *, position: int, final: bool) -> OpenFile | None:
        return LinesInput(folder, found, position, self.parse, schema=self.schema, final=final)

    def parse(self, data: bytes) -> tuple[pa.RecordBatch, Positions]:
        starts, ends = _lines(data)
        content = np.frombuffer(data, np.uint8)
        lasts = np.maximum(ends - 2, starts)
        whole = (content[starts] == ord("{")) & (content[lasts] == ord("}"))
        if not whole.all():
            # Arrow would read an object that spans lines, and crashes on a line that is `null`.
            doubtful = {index: data[starts[index] : ends[index]].strip() for index in np.flatnonzero(~whole)}
            if any(line and not (line.startswith(b"{") and line.endswith(b"}")) for line in doubtful.values()):
                raise ValueError("not one JSON object on one line")
            ends = np.delete(ends, [index for index, line in doubtful.items() if not line])
        return self._read(data), ends

    def _read(self, data: bytes) -> pa.RecordBatch:
        # Arrow reads timestamps from text, but dates only from numbers.
        fields = [field.with_type(pa.string()) if pa.types.is_date32(field.type) else field for field in self.schema]
        table = arrow_json.read_json(
            pa.BufferReader(data),
            arrow_json.ReadOptions(use_threads=False, block_size=len(data) + 1),
            arrow_json.ParseOptions(explicit_schema=pa.schema(fields), unexpected_field_behavior="ignore"),
        )
        for index, field in enumerate(self.schema):
            if pa.types.is_date32(field.type):
                table = table.set_column(index, field, table.column(index).cast(field.type))
        return _batch_of(table, self.schema)


@dataclass(frozen=True, slots=True)
class CsvLines(FileFormat):
    schema: pa.Schema
    header: bool
    delimiter: str
    grows = True
    most_open = MOST_OPEN

    def __post_init__(self) -> None:
        arguments.flag("sources.csv", "header", self.header)
        arguments.text("sources.csv", "delimiter", self.delimiter, "one ASCII character")
        if len(self.delimiter) != 1 or self.delimiter in '"\r\n\0' or not self.delimiter.isascii():
            raise JobError(
                f"{self.delimiter!r} can't be a CSV delimiter: give one ASCII character, not a quote or line break"
            )
        try:
            self.parse(self.schema.names, self.delimiter.join(['""'] * len(self.schema)).encode() + b"\n")
        except pa.ArrowNotImplementedError as error:
            raise SchemaError(f"CSV can't hold this schema: {error}. Use JSON lines or Parquet") from error
        except ValueError:
            pass  # A type has no empty value. This call checks only that it can be read.

    def open(self, folder: InputFolder, found: Found, *, position: int, final: bool) -> OpenFile | None:
        if not self.header:
            return LinesInput(
                folder, found, position, partial(self.parse, self.schema.names), schema=self.schema, final=final
            )
        first = b""
        with folder.open(found.name) as file:
            while b"\n" not in first and len(first) < MAX_LINE_BYTES and (more := file.read(BLOCK_BYTES)):
                first += more
        first = first[: first.find(b"\n") + 1] or (first if final else b"")
        if not first:
            return None
        names = next(text_csv.reader([first.decode("utf-8-sig", errors="replace")], delimiter=self.delimiter))
        for name in self.schema.names:
            if names.count(name) != 1:
                raise SourceError(
                    f"{found.name} in {folder.address}: the header {names} doesn't have {name!r} exactly once. "
                    "Correct the header, or the schema"
                )
        return LinesInput(
            folder, found, max(position, len(first)), partial(self.parse, names), schema=self.schema, final=final
        )

    def parse(self, names: list[str], data: bytes) -> tuple[pa.RecordBatch, Positions]:
        if data.count(b"\r") != data.count(b"\r\n") or b"\0" in data:
            raise ValueError("a carriage return or a zero byte within a line")
        # Arrow closes a quote that is open at the end. One more line, of nulls, shows this: it is then part of the quote.
        last = self.delimiter.join(["\0"] * len(names)).encode() + b"\n"
        table = arrow_csv.read_csv(
            pa.BufferReader(data + last),
            arrow_csv.ReadOptions(use_threads=False, block_size=len(data) + len(last) + 1, column_names=names),
            arrow_csv.ParseOptions(delimiter=self.delimiter),
            arrow_csv.ConvertOptions(
                column_types=self.schema,
                include_columns=self.schema.names,
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
                null_values=["", "\0"],
            ),
        )
        table = table.slice(0, table.num_rows - 1)
        starts, ends = _lines(data)
        lengths = ends - starts - 1
        blank = (lengths == 0) | ((lengths == 1) & (np.frombuffer(data, np.uint8)[starts] == ord("\r")))
        return _batch_of(table, self.schema), ends[~blank]


def _lines(data: bytes) -> tuple[Positions, Positions]:
    """Return where each line starts, and the position behind its line break."""
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")) + 1
    return np.concatenate(([0], ends[:-1])), ends


def _batch_of(table: pa.Table, schema: pa.Schema) -> pa.RecordBatch:
    for field in schema:
        if not field.nullable and table.column(field.name).null_count:
            raise ValueError(f"column {field.name!r} is declared as not null, but has no value in this line")
    columns = [table.column(name).combine_chunks() for name in schema.names]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


class LinesInput(OpenFile):
    """A file that is read line by line, through the parser of its format."""

    def __init__(
        self, folder: InputFolder, found: Found, position: int, parse: LinesParser, *, schema: pa.Schema, final: bool
    ) -> None:
        self.found = found
        self.position = position
        self.size = found.size
        self._file = folder.open(found.name)
        self._where = f"{found.name} in {folder.address}"
        self._parse = parse
        self._schema = schema
        self._final = final
        self._batch: pa.RecordBatch | None = None
        self._ends: Positions = np.empty(0, np.int64)
        self._row = 0
        around = self._file.read_at(2, position - 1) if position else b"\n"
        if b"\n" not in around and position < self.size:
            raise SourceError(
                f"{self._where}: byte {position}, up to which it was read, isn't the start of a line: "
                "it was replaced. Restore the old file, and give new content a new name"
            )

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        while self._row == len(self._ends):
            data = self._complete_lines()
            if not data:
                return None
            self._batch, ends, length = self._parse_good(data)
            behind = min(self.position + length, self.size)
            if len(ends):
                self._ends, self._row = ends + self.position, 0
                self._ends[-1] = behind
            else:
                self.position = behind
        assert self._batch is not None
        taken = self._batch.slice(self._row, max_rows)
        self._row += taken.num_rows
        self.position = int(self._ends[self._row - 1])
        return taken

    def _complete_lines(self) -> bytes:
        """Return a block of lines, starting at the position; empty if no line is complete."""
        length = BLOCK_BYTES
        while self.position < self.size:
            wanted = min(length, self.size - self.position)
            data: bytes = self._file.read_at(wanted, self.position)
            if len(data) < wanted:
                raise shrunk(self._where, read=self.position + wanted, now=self.position + len(data))
            complete = data.rfind(b"\n") + 1
            if complete:
                return data[:complete]
            if self.position + wanted == self.size:
                return data + b"\n" if self._final else b""
            if length >= MAX_LINE_BYTES:
                raise SourceError(f"{self._where} has a line of more than {MAX_LINE_BYTES} bytes, at {self.position}")
            length *= 4
        return b""

    def _parse_good(self, data: bytes) -> tuple[pa.RecordBatch, Positions, int]:
        """Return the records of these lines, or of those before the first bad line, and how many bytes the lines have."""
        try:
            return (*self._parse_all(data), len(data))
        except ValueError:
            _, ends = _lines(data)
        good, bad = 0, len(ends)  # The first `good` lines can be parsed, the first `bad` can't.
        while bad - good > 1:
            middle = (good + bad) // 2
            try:
                self._parse_all(data[: ends[middle - 1]])
                good = middle
            except ValueError:
                bad = middle
        if good == 0:
            self._complain(data[: ends[0]])
        prefix = data[: ends[good - 1]]
        return (*self._parse_all(prefix), len(prefix))

    def _parse_all(self, data: bytes) -> tuple[pa.RecordBatch, Positions]:
        data.decode()
        batch, ends = self._parse(data)
        if batch.num_rows != len(ends):
            raise ValueError("not one record on each line: values with line breaks can't be read")
        return batch, ends

    def _complain(self, line: bytes) -> None:
        try:
            self._parse_all(line)
        except ValueError as error:
            before = sum(
                self._file.read_at(min(BLOCK_BYTES, self.position - at), at).count(b"\n")
                for at in range(0, self.position, BLOCK_BYTES)
            )
            text = line[:200].decode(errors="replace").rstrip("\r\n") + ("…" if len(line) > 200 else "")
            why = in_spark_types(str(error), self._schema)
            raise SourceError(
                f"{self._where}, line {before + 1} (byte {self.position}): {why}\n    {text}\n"
                "Correct the line in the file, or the schema, and start the job again: it resumes here, nothing was lost"
            ) from error

    @property
    def at_rest(self) -> bool:
        return self._row == len(self._ends)

    def close(self) -> None:
        self._file.close()
