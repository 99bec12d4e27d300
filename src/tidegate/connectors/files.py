"""Folders of files that grow, as sources: Parquet, JSON lines and CSV.

A split is a file, named by its path relative to the folder. Its owner is `crc32(name) % parallelism`, so every reader
lists the folder by itself and no two read one file. A Parquet file is taken once, when its footer is there. JSON lines
and CSV files may be appended to at any time: complete lines are read, an unfinished last line waits for its end.

The offset of a file is one integer: `n` says that n rows (Parquet) or bytes (lines) were read and that more is there;
`~n`, which is negative, that n was all there was. Files that were read to their end stay in the offsets for good: that
is what keeps them from being read twice.

Invariants:
- An offset is right behind the last record that `poll` returned, whatever was read ahead.
- Memory is bounded by a block of a file or a batch of a row group, not by the file.
- What was read never changes: a file that shrank, or that vanished before its end was reached, is an error.
- A line that can't be read is an error that names file, line and text, raised once the lines before it were returned.

Not here: compressed lines, values with line breaks in CSV, columns in folder names (`day=1/`), deletion of files that
were read. Listing and reading happen in the slot's loop: object stores work, at the price of their latency.
"""

from __future__ import annotations

import csv as text_csv
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.fs as arrow_fs
import pyarrow.json as arrow_json
import pyarrow.parquet as pq

from tidegate.connectors.rows import check_fits, fitted
from tidegate.dataflow.contracts import Offset, Source, SourceContext, SourceReader
from tidegate.errors import CorruptFile, JobError, RestoreError, SchemaError
from tidegate.types import parse_schema

BLOCK_BYTES = 256 << 10
MAX_LINE_BYTES = 64 << 20
PARQUET_BATCH_ROWS = 16_384

Positions = np.ndarray[Any, np.dtype[np.int64]]

# Complete lines to a batch and the byte position behind each record; a `ValueError` says what is wrong.
LinesParser = Callable[[bytes], tuple[pa.RecordBatch, Positions]]


# ---------------------------------------------------------------------------------------------- folders

def address_of(path: str | os.PathLike[str]) -> str:
    """A URI as it is, a local path made absolute: the slots' working folder isn't the driver's."""
    text = os.fspath(path)
    return text if "://" in text else os.path.abspath(text)


def locate(address: str) -> tuple[arrow_fs.FileSystem, str]:
    """The file system behind an address, and the path within it."""
    if "://" not in address:
        return arrow_fs.LocalFileSystem(), address
    try:
        file_system, path = arrow_fs.FileSystem.from_uri(address)
    except pa.ArrowInvalid as error:
        raise JobError(f"no file system for {address!r}: {error}") from error
    return file_system, path.rstrip("/") or "/"


@dataclass(frozen=True, slots=True)
class Found:
    """A file as it was when the folder was listed."""

    name: str
    size: int
    mtime_ns: int


class InputFolder:
    """Lists and opens the files under an address, which may also be that of a single file."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._files, self._root = locate(address)
        self._is_file = False

    def exists(self) -> bool:
        return bool(self._files.get_file_info(self._root).type != arrow_fs.FileType.NotFound)

    def list(self, wanted: Callable[[str], bool]) -> list[Found]:
        """The wanted files. Only those are asked for their size, which is what makes listing a large folder slow."""
        root = self._files.get_file_info(self._root)
        self._is_file = root.is_file
        if root.is_file:
            return [Found(root.base_name, root.size, root.mtime_ns or 0)] if wanted(root.base_name) else []
        if isinstance(self._files, arrow_fs.LocalFileSystem):
            return list(_list_local(self._root, "", wanted))
        selector = arrow_fs.FileSelector(self._root, recursive=True, allow_not_found=True)
        infos = [(info.path[len(self._root):].lstrip("/"), info) for info in self._files.get_file_info(selector)]
        return [Found(name, info.size, info.mtime_ns or 0) for name, info in infos
                if info.is_file and not any(map(_is_hidden, name.split("/"))) and wanted(name)]

    def open(self, name: str) -> pa.NativeFile:
        return self._files.open_input_file(self._root if self._is_file else f"{self._root.rstrip('/')}/{name}")


def _is_hidden(name: str) -> bool:
    return name.startswith(("_", ".")) or name.endswith(".tmp")


def _list_local(folder: str, prefix: str, wanted: Callable[[str], bool]) -> Iterator[Found]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                name = prefix + entry.name
                if _is_hidden(entry.name):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    yield from _list_local(entry.path, name + "/", wanted)
                elif wanted(name) and entry.is_file():
                    status = entry.stat()
                    yield Found(name, status.st_size, status.st_mtime_ns)
    except FileNotFoundError:
        return    # Not created yet, or gone since it was listed. Files that must not vanish are missed by the reader.


# ---------------------------------------------------------------------------------------------- formats

class OpenFile(ABC):
    """A file that is being read. `position` is behind the last record returned; `size` is the position of its end."""

    found: Found
    position: int
    size: int

    @abstractmethod
    def read(self, max_rows: int) -> pa.RecordBatch | None:
        """The next records, or None where there is no complete one."""

    @abstractmethod
    def close(self) -> None: ...


class FileFormat(ABC):
    schema: pa.Schema
    grows: bool

    @abstractmethod
    def open(self, folder: InputFolder, found: Found, *, position: int, final: bool) -> OpenFile | None:
        """None where the file isn't complete enough to be read. `final`: nothing will be added to it."""


@dataclass(frozen=True, slots=True)
class ParquetFormat(FileFormat):
    schema: pa.Schema
    grows = False

    def open(self, folder: InputFolder, found: Found, *, position: int, final: bool) -> OpenFile | None:
        file = _parquet_file(folder, found.name)
        if file is not None:
            return ParquetInput(file, found, position, self.schema, where=f"{found.name} in {folder.address}")
        if final:
            raise CorruptFile(f"{found.name} in {folder.address} has no valid Parquet footer: it is being written, or "
                              "was left unfinished. Run again once it is complete, or remove it")
        return None


def _parquet_file(folder: InputFolder, name: str) -> pq.ParquetFile | None:
    """None where there is no valid footer (yet)."""
    file = folder.open(name)
    try:
        return pq.ParquetFile(file, coerce_int96_timestamp_unit="us")
    except (pa.ArrowInvalid, OSError):
        file.close()
        return None


def schema_in(address: str) -> pa.Schema:
    """The schema of the oldest Parquet file at the address."""
    folder = InputFolder(address)
    for found in sorted(folder.list(lambda _: True), key=lambda found: (found.mtime_ns, found.name)):
        file = _parquet_file(folder, found.name)
        if file is not None:
            # INT96 is how Spark and Hive write instants; Arrow doesn't know that their zone is UTC.
            instants = {column.path for column in map(file.schema.column, range(len(file.schema)))
                        if column.physical_type == "INT96"}
            fields = [pa.field(field.name, pa.timestamp("us", "UTC") if field.name in instants else _plain(field.type),
                               field.nullable) for field in file.schema_arrow]
            file.close()
            return parse_schema(pa.schema(fields))
    raise SchemaError(f"no Parquet file in {address} to take the schema from: give the source a schema, such as "
                      "schema=\"id long, name string\"")


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type that Spark's name for this one stands for: one of several widths, zones or units."""
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    return {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}.get(kind, kind)


class ParquetInput(OpenFile):
    """Positions are rows. Row groups before the position aren't read again."""

    def __init__(self, file: pq.ParquetFile, found: Found, position: int, schema: pa.Schema, *, where: str) -> None:
        self.found = found
        self.position = position
        self.size = file.metadata.num_rows
        self._file = file
        self._schema = schema
        self._where = where
        self._batch: pa.RecordBatch | None = None
        if position > self.size:
            raise _shrunk(where, read=position, now=self.size, unit="rows")
        for field in schema:
            if field.name not in file.schema_arrow.names:
                raise SchemaError(f"{where} has no column {field.name!r}; it has {', '.join(file.schema_arrow.names)}")
            check_fits(file.schema_arrow.field(field.name).type, field, where=where)
        group, start = 0, 0
        while group < file.num_row_groups and start + file.metadata.row_group(group).num_rows <= position:
            start += file.metadata.row_group(group).num_rows
            group += 1
        self._skip = position - start
        self._batches: Iterator[pa.RecordBatch] = iter(file.iter_batches(
            PARQUET_BATCH_ROWS, row_groups=range(group, file.num_row_groups), columns=schema.names, use_threads=False))

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
            raise CorruptFile(f"{self._where} can't be read behind row {self.position}: {error!r}. Replace it by an "
                              "intact copy with the same rows") from error
        skipped = min(self._skip, read.num_rows)
        self._skip -= skipped
        columns = [fitted(read.column(field.name), field, where=self._where) for field in self._schema]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema).slice(skipped)

    def close(self) -> None:
        self._file.close(force=True)


# ---------------------------------------------------------------------------------------------- lines

@dataclass(frozen=True, slots=True)
class JsonLines(FileFormat):
    schema: pa.Schema
    grows = True

    def __post_init__(self) -> None:
        try:
            self._read(b"{}\n")
        except pa.ArrowNotImplementedError as error:
            raise SchemaError(f"JSON lines can't hold this schema: {error}. Use Parquet") from error
        except ValueError:
            pass    # A column that must not be null; that its type can be read is what counts.

    def open(self, folder: InputFolder, found: Found, *, position: int, final: bool) -> OpenFile | None:
        return LinesInput(folder, found, position, self.parse, final=final)

    def parse(self, data: bytes) -> tuple[pa.RecordBatch, Positions]:
        starts, ends = _lines(data)
        content = np.frombuffer(data, np.uint8)
        lasts = np.maximum(ends - 2, starts)
        whole = (content[starts] == ord("{")) & (content[lasts] == ord("}"))
        if not whole.all():
            # Arrow would read an object that spans lines, and crashes on a line that is `null`.
            doubtful = {index: data[starts[index]:ends[index]].strip() for index in np.flatnonzero(~whole)}
            if any(line and not (line.startswith(b"{") and line.endswith(b"}")) for line in doubtful.values()):
                raise ValueError("no JSON object on a line of its own")
            ends = np.delete(ends, [index for index, line in doubtful.items() if not line])
        return self._read(data), ends

    def _read(self, data: bytes) -> pa.RecordBatch:
        # Arrow reads timestamps from text, but dates only from numbers.
        fields = [field.with_type(pa.string()) if pa.types.is_date32(field.type) else field for field in self.schema]
        table = arrow_json.read_json(
            pa.BufferReader(data), arrow_json.ReadOptions(use_threads=False, block_size=len(data) + 1),
            arrow_json.ParseOptions(explicit_schema=pa.schema(fields), unexpected_field_behavior="ignore"))
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

    def __post_init__(self) -> None:
        if len(self.delimiter) != 1 or self.delimiter in '"\r\n\0' or not self.delimiter.isascii():
            raise JobError(f"a CSV delimiter is one ASCII character, no quote and no line break: not {self.delimiter!r}")
        try:
            self.parse(self.schema.names, self.delimiter.join(['""'] * len(self.schema)).encode() + b"\n")
        except pa.ArrowNotImplementedError as error:
            raise SchemaError(f"CSV can't hold this schema: {error}. Use JSON lines or Parquet") from error
        except ValueError:
            pass    # A type that has no empty value; that it can be read is what counts.

    def open(self, folder: InputFolder, found: Found, *, position: int, final: bool) -> OpenFile | None:
        if not self.header:
            return LinesInput(folder, found, position, partial(self.parse, self.schema.names), final=final)
        first = b""
        with folder.open(found.name) as file:
            while b"\n" not in first and len(first) < MAX_LINE_BYTES and (more := file.read(BLOCK_BYTES)):
                first += more
        first = first[:first.find(b"\n") + 1] or (first if final else b"")
        if not first:
            return None
        names = next(text_csv.reader([first.decode("utf-8-sig", errors="replace")], delimiter=self.delimiter))
        for name in self.schema.names:
            if names.count(name) != 1:
                raise SchemaError(f"{found.name} in {folder.address}: the header {names} must name {name!r}, once")
        return LinesInput(folder, found, max(position, len(first)), partial(self.parse, names), final=final)

    def parse(self, names: list[str], data: bytes) -> tuple[pa.RecordBatch, Positions]:
        if data.count(b"\r") != data.count(b"\r\n") or b"\0" in data:
            raise ValueError("a carriage return or a zero byte within a line")
        # Arrow closes a quote that is open at the end. One more line, of nulls, is swallowed by it, and then missing.
        last = self.delimiter.join(["\0"] * len(names)).encode() + b"\n"
        table = arrow_csv.read_csv(
            pa.BufferReader(data + last),
            arrow_csv.ReadOptions(use_threads=False, block_size=len(data) + len(last) + 1, column_names=names),
            arrow_csv.ParseOptions(delimiter=self.delimiter),
            arrow_csv.ConvertOptions(column_types=self.schema, include_columns=self.schema.names, strings_can_be_null=True,
                                     quoted_strings_can_be_null=False, null_values=["", "\0"]))
        table = table.slice(0, table.num_rows - 1)
        starts, ends = _lines(data)
        lengths = ends - starts - 1
        blank = (lengths == 0) | ((lengths == 1) & (np.frombuffer(data, np.uint8)[starts] == ord("\r")))
        return _batch_of(table, self.schema), ends[~blank]


def _lines(data: bytes) -> tuple[Positions, Positions]:
    """Where each line starts, and the position behind its line break."""
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")) + 1
    return np.concatenate(([0], ends[:-1])), ends


def _batch_of(table: pa.Table, schema: pa.Schema) -> pa.RecordBatch:
    for field in schema:
        if not field.nullable and table.column(field.name).null_count:
            raise ValueError(f"column {field.name!r} is declared as not null, but has no value")
    columns = [table.column(name).combine_chunks() for name in schema.names]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


class LinesInput(OpenFile):
    """Positions are bytes, always at the start of a line."""

    def __init__(self, folder: InputFolder, found: Found, position: int, parse: LinesParser, *, final: bool) -> None:
        self.found = found
        self.position = position
        self.size = found.size
        self._file = folder.open(found.name)
        self._where = f"{found.name} in {folder.address}"
        self._parse = parse
        self._final = final
        self._batch: pa.RecordBatch | None = None
        self._ends: Positions = np.empty(0, np.int64)
        self._row = 0
        around = self._file.read_at(2, position - 1) if position else b"\n"
        if b"\n" not in around and position < self.size:
            raise RestoreError(f"{self._where}: byte {position}, up to which it was read, isn't the start of a line: "
                               "it was replaced. Bring back the file that was there, and give new content a new name")

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
        """A block of lines from the position on; empty where no line is complete."""
        length = BLOCK_BYTES
        while self.position < self.size:
            wanted = min(length, self.size - self.position)
            data: bytes = self._file.read_at(wanted, self.position)
            if len(data) < wanted:
                raise _shrunk(self._where, read=self.position + wanted, now=self.position + len(data))
            complete = data.rfind(b"\n") + 1
            if complete:
                return data[:complete]
            if self.position + wanted == self.size:
                return data + b"\n" if self._final else b""
            if length >= MAX_LINE_BYTES:
                raise SchemaError(f"{self._where} has a line of more than {MAX_LINE_BYTES} bytes, at {self.position}")
            length *= 4
        return b""

    def _parse_good(self, data: bytes) -> tuple[pa.RecordBatch, Positions, int]:
        """The records of these lines, or of those before the first bad one, and how many bytes the lines take."""
        try:
            return (*self._parse_all(data), len(data))
        except ValueError:
            _, ends = _lines(data)
        good, bad = 0, len(ends)    # As many lines can be parsed; as many can't.
        while bad - good > 1:
            middle = (good + bad) // 2
            try:
                self._parse_all(data[:ends[middle - 1]])
                good = middle
            except ValueError:
                bad = middle
        if good == 0:
            self._complain(data[:ends[0]])
        prefix = data[:ends[good - 1]]
        return (*self._parse_all(prefix), len(prefix))

    def _parse_all(self, data: bytes) -> tuple[pa.RecordBatch, Positions]:
        data.decode()
        batch, ends = self._parse(data)
        if batch.num_rows != len(ends):
            raise ValueError("not one record on each line; values with line breaks can't be read")
        return batch, ends

    def _complain(self, line: bytes) -> None:
        try:
            self._parse_all(line)
        except ValueError as error:
            before = sum(self._file.read_at(min(BLOCK_BYTES, self.position - at), at).count(b"\n")
                         for at in range(0, self.position, BLOCK_BYTES))
            text = line[:200].decode(errors="replace").rstrip("\r\n") + ("…" if len(line) > 200 else "")
            raise SchemaError(f"{self._where}, line {before + 1} (byte {self.position}): {error}\n    {text}\n"
                              "Correct the line in the file, or the schema, and start the job again: it goes on from "
                              "here, nothing was lost") from error

    def close(self) -> None:
        self._file.close()


def _shrunk(where: str, *, read: int, now: int, unit: str = "bytes") -> RestoreError:
    return RestoreError(f"{where} has {now} {unit}, but had {read} of them before: it was truncated or replaced. Bring "
                        "back what was there, and give new content a new name: files may only grow")


# ---------------------------------------------------------------------------------------------- the source

@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSource(Source):
    address: str
    form: FileFormat
    stop_at_end: bool
    discover_every_ms: int

    @property
    def schema(self) -> pa.Schema:
        return self.form.schema

    @property
    def bounded(self) -> bool:
        return self.stop_at_end

    def open(self, context: SourceContext) -> SourceReader:
        return FolderReader(self, InputFolder(self.address), context)


class FolderReader(SourceReader):
    """Reads one file at a time: those already started first, then by (modification time, name).

    Files with something new wait in a queue. A file is read up to the size it had when its turn came; what was added
    meanwhile waits for another turn, so that a file which is written all the time doesn't keep the others waiting.
    """

    def __init__(self, source: FolderSource, folder: InputFolder, context: SourceContext) -> None:
        if source.stop_at_end and not folder.exists():
            raise JobError(f"there is no {source.address} to read to its end")
        self._source = source
        self._folder = folder
        self._context = context
        self._offsets: dict[str, int] = {name: int(offset) for name, offset in context.restored.items()
                                         if self._owns(name)}
        self._queue: dict[str, Found] = {}
        self._waiting: dict[str, Found] = {}    # Read as far as possible when they looked like this.
        self._current: OpenFile | None = None
        self._discover()

    def poll(self, max_rows: int) -> pa.RecordBatch | None:
        # A clock that was set back must not stop discovery for as long.
        if not (self._source.stop_at_end
                or 0 <= self._context.now_ms() - self._discovered_ms < self._source.discover_every_ms):
            self._discover()
        while self._current is not None or self._queue:
            file = self._current or self._open(self._queue.pop(next(iter(self._queue))))
            if file is None:
                continue
            self._current = file
            batch = file.read(max_rows)
            if batch is None or file.position == file.size:
                self._close_current()
            elif file.position:
                self._offsets[file.found.name] = file.position
            if batch is not None:
                return batch
        return None

    def _open(self, found: Found) -> OpenFile | None:
        position, _ = self._position(found.name)
        try:
            file = self._source.form.open(self._folder, found, position=position, final=self._source.stop_at_end)
        except FileNotFoundError as error:
            if position == 0:
                return None    # Taken away before anything of it was read.
            raise self._vanished(found.name) from error
        if file is None:
            self._waiting[found.name] = found
        return file

    def _close_current(self) -> None:
        file = self._current
        assert file is not None
        name = file.found.name
        if file.position == file.size:
            self._offsets[name] = file.position if name in self._queue else ~file.position
        else:
            self._waiting[name] = file.found
        file.close()
        self._current = None

    def _discover(self) -> None:
        self._discovered_ms = self._context.now_ms()
        found_files = {found.name: found for found in self._folder.list(self._may_have_more)}
        for name, offset in self._offsets.items():
            if offset >= 0 and name not in found_files:
                raise self._vanished(name)
        fresh = [found for found in found_files.values() if self._has_more(found)]
        for found in sorted(fresh, key=lambda found: (found.name not in self._offsets, found.mtime_ns, found.name)):
            self._queue[found.name] = found

    def _may_have_more(self, name: str) -> bool:
        return self._owns(name) and (self._source.form.grows or self._offsets.get(name, 0) >= 0)

    def _has_more(self, found: Found) -> bool:
        if self._source.form.grows:
            position, was_at_end = self._position(found.name)
            if found.size < position:
                raise _shrunk(f"{found.name} in {self._folder.address}", read=position, now=found.size)
            if found.size == position:
                return False
            if was_at_end:
                self._offsets[found.name] = position
        if self._current is not None and self._current.found.name == found.name:
            return self._source.form.grows and found.size > self._current.size
        return self._waiting.get(found.name) != found

    def _owns(self, name: str) -> bool:
        return zlib.crc32(name.encode()) % self._context.parallelism == self._context.subtask

    def _position(self, name: str) -> tuple[int, bool]:
        """How much of the file was read, and whether that was all of it."""
        offset = self._offsets.get(name, 0)
        return (~offset, True) if offset < 0 else (offset, False)

    def _vanished(self, name: str) -> RestoreError:
        return RestoreError(
            f"{name} in {self._folder.address} is gone, and only {self._offsets[name]} bytes or rows of it were read. "
            "Bring it back, and remove files only when they were read to their end")

    def offsets(self) -> Mapping[str, Offset]:
        return dict(self._offsets)

    @property
    def finished(self) -> bool:
        return self._source.stop_at_end and self._current is None and not self._queue

    def close(self) -> None:
        if self._current is not None:
            self._current.close()
