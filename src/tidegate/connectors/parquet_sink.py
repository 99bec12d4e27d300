"""Parquet files with two-phase commit: a reader of the folder sees only the output of complete snapshots.

    <path>/part-<sink>-<epoch>-<subtask>-<attempt>-<token>.parquet          committed
    <path>/_tidegate/<owner>-<attempt>-<subtask>-<number>-<token>.parquet   pending; Spark and Arrow skip `_` names
    <path>/_tidegate/<owner>-<attempt>-<subtask>-<token>-<number>.receipt   their commit was begun (receipts.py)

The records of an epoch are in a pending file. `pre_commit` closes it and makes it durable; its committable has the names,
the size and the folder; `commit` renames it in the folder where it was written, even if the sink has another folder by
then. `<owner>` is a hash of job, sink and the address of the job's snapshots. `<token>` is random, one for each writer:
a job that starts without its snapshots counts attempts from one again, and its old output must stay.

Invariants:
- Committed files are never changed or removed, so `spark.read.parquet(path)` is correct at every moment. A file without
  rows is created first, so that it is correct before the first commit, too.
- `commit` is idempotent, also after consumers have moved or deleted committed files: a pending file that is gone was
  committed if a receipt shows that its commit was begun, or if the final file exists with the expected size. If neither
  holds, or a rename fails, that is a `CommitError`.
- Leftovers are pending files of this owner from older attempts, and receipts that are no longer needed. Two jobs with one
  name and different snapshot folders count their attempts separately, so neither may delete the other's files as
  leftovers. If the snapshot folder is moved, earlier leftovers stay.

A rename is one step on local disks and HDFS. On object stores it is a copy and a deletion: if the process dies between
the two, the repeated commit copies the file once more, to the same name.

Not here: columns in folder names, compaction of small files, deletion of old output.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.fs as arrow_fs
import pyarrow.parquet as pq

from tidegate import arguments
from tidegate.connectors.folders import locate
from tidegate.connectors.receipts import (
    PENDING_FOLDER,
    Promise,
    Writer,
    highest,
    parse_pending,
    parse_receipt,
    superseded,
)
from tidegate.dataflow.contracts import Committable, Sink, SinkContext, SinkWriter
from tidegate.errors import CommitError, JobError, SchemaError
from tidegate.store.layout import shown
from tidegate.system_errors import lasts, user_here, what_to_do

MAX_BUFFERED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetSink(Sink):
    address: str
    row_group_rows: int
    compression: str

    def __post_init__(self) -> None:
        arguments.whole_number("sinks.parquet", "row_group_rows", self.row_group_rows, at_least=1)
        arguments.text("sinks.parquet", "compression", self.compression, "'zstd', 'snappy' or another codec of Arrow's")
        try:
            pq.write_table(pa.table({"n": [1]}), pa.BufferOutputStream(), compression=self.compression)
        except (ValueError, OSError, pa.ArrowException) as error:
            raise JobError(
                f"sinks.parquet(compression={self.compression!r}): Arrow can't write it. Give 'zstd' or 'snappy'"
            ) from error

    def check(self, schema: pa.Schema) -> None:
        try:
            pq.write_table(schema.empty_table(), pa.BufferOutputStream())
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
            raise SchemaError(f"Parquet can't hold these columns: {error}") from error

    def open(self, context: SinkContext) -> SinkWriter:
        return ParquetSinkWriter(self, OutputFolder(self.address), context)


class OutputFolder:
    """The folder that readers see, with the pending files in it. Names are relative to the folder."""

    def __init__(self, address: str, *, make: bool = True) -> None:
        self.address = address
        self._files, self._root = locate(address)
        self._local = isinstance(self._files, arrow_fs.LocalFileSystem)
        self._receipts: dict[Writer, int] = {}  # the highest that was created here
        if make:
            self._make()

    def _make(self) -> None:
        try:
            self._files.create_dir(self._path(PENDING_FOLDER), recursive=True)
        except OSError as error:
            if lasts(error) or isinstance(error, FileNotFoundError):
                raise JobError(
                    f"output can't be written to {self.shown}: user {user_here()} on host {socket.gethostname()} "
                    f"can't create a folder there ({error}). {what_to_do(error, made=True)}, "
                    f"tg.sinks.parquet(…)"
                ) from error
            raise

    @property
    def shown(self) -> str:
        """The address without secrets."""
        return shown(self.address)

    def create(self, name: str) -> pa.NativeFile:
        return self._files.open_output_stream(self._path(name))

    def make_durable(self, name: str) -> int:
        """Make a closed file durable, and return its size."""
        if self._local:
            _sync(self._path(name))
            _sync(os.path.dirname(self._path(name)))
        size = self._size_of(name)
        if size is None:
            raise CommitError(
                f"{name} in {self.shown} vanished while it was written: a newer attempt of the job, or someone else, has "
                "deleted it"
            )
        return size

    def publish(self, promises: Sequence[Promise]) -> None:
        """Rename the pending files. This is idempotent, and two processes may do it at the same time."""
        try:
            waiting = [promise for promise in promises if self._waits(promise)]
            receipts = highest(parse_pending(_last(promise.pending)) for promise in waiting)
            self._create_receipts(receipts)
            for promise in waiting:
                self.rename(promise)
            self.make_published_durable()
            self._replace_receipts(receipts)
        except OSError as error:
            raise CommitError(f"can't commit output in {self.shown}: {error}") from error

    def rename(self, promise: Promise) -> None:
        """Rename a pending file whose receipt exists, or whose commit will not be repeated."""
        try:
            if self._local:
                os.replace(self._path(promise.pending), self._path(promise.final))
            else:
                self._files.move(self._path(promise.pending), self._path(promise.final))
        except OSError as error:
            if self._size_of(promise.pending) is None and self._was_committed(promise):
                return  # Another attempt was faster.
            raise CommitError(f"can't rename {promise.pending} to {promise.final} in {self.shown}: {error}") from error

    def _waits(self, promise: Promise) -> bool:
        """Whether the pending file is still to be renamed; `CommitError` if it is lost."""
        there = self._size_of(promise.pending)
        if there is None and self._was_committed(promise):
            return False
        if there != promise.size:
            raise CommitError(
                f"can't commit {promise.final} in {self.shown}: its pending file {promise.pending} is "
                f"{'gone' if there is None else f'{there} bytes long instead of {promise.size}'}, and nothing shows that it "
                f"was committed before. If its folder was emptied, moved or is on another machine, restore the folder; "
                f"otherwise start from a later snapshot",
                final=True,
            )
        return True

    def _was_committed(self, promise: Promise) -> bool:
        """Whether a file was committed whose pending file is gone."""
        if self._size_of(promise.final) == promise.size:
            return True
        pending = parse_pending(_last(promise.pending))
        if pending is None:
            return False
        writer, number = pending
        return highest(map(parse_receipt, self.names(PENDING_FOLDER))).get(writer, -1) >= number

    def _create_receipts(self, receipts: dict[Writer, int]) -> None:
        for writer, number in receipts.items():
            self._files.open_output_stream(self._path(f"{PENDING_FOLDER}/{writer.receipt_name(number)}")).close()
        if receipts and self._local:
            _sync(self._path(PENDING_FOLDER))

    def _replace_receipts(self, receipts: dict[Writer, int]) -> None:
        """Delete the receipts of this process that these newer ones replace."""
        for writer, number in receipts.items():
            before = self._receipts.get(writer, number)
            if before < number:
                self.delete(f"{PENDING_FOLDER}/{writer.receipt_name(before)}")
            self._receipts[writer] = max(before, number)

    def make_published_durable(self) -> None:
        if self._local:
            _sync(self._root)

    def names(self, folder: str = "") -> list[str]:
        selector = arrow_fs.FileSelector(self._path(folder), allow_not_found=True)
        return [info.base_name for info in self._files.get_file_info(selector) if info.type == arrow_fs.FileType.File]

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.delete_file(self._path(name))

    def _size_of(self, name: str) -> int | None:
        info = self._files.get_file_info(self._path(name))
        return info.size if info.type == arrow_fs.FileType.File else None

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}" if name else self._root


def _last(path: str) -> str:
    return path.rpartition("/")[2]


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class PendingFile:
    """A Parquet file that is being written: first by the slot's loop, then by a background thread, never by both at once."""

    def __init__(self, name: str, folder: OutputFolder, schema: pa.Schema, compression: str) -> None:
        self.name = name
        self._folder = folder
        self._stream = folder.create(name)
        self._parquet = pq.ParquetWriter(self._stream, schema, compression=compression)

    def write(self, rows: pa.Table, *, row_group_rows: int) -> None:
        self._parquet.write_table(rows, row_group_size=row_group_rows)

    def finish(self) -> int:
        """Close the file, make it durable, and return its size."""
        self._parquet.close()
        self._stream.close()
        return self._folder.make_durable(self.name)

    def abandon(self) -> None:
        self._stream.close()


class ParquetSinkWriter(SinkWriter):
    """Writes whole row groups as they fill up; the rest of an epoch is encoded in the background of `pre_commit`."""

    def __init__(self, sink: ParquetSink, folder: OutputFolder, context: SinkContext) -> None:
        self._row_group_rows = sink.row_group_rows
        self._compression = sink.compression
        self._folder = folder
        self._context = context
        owner = hashlib.sha256("\0".join((context.job, context.sink, context.snapshots)).encode()).hexdigest()[:12]
        self._writer = Writer(owner, context.attempt, context.subtask, uuid.uuid4().hex[:8])
        self._file_count = 0
        self._file: PendingFile | None = None
        self._buffer: list[pa.RecordBatch] = []
        self._buffered_rows = 0
        self._buffered_bytes = 0
        if context.subtask == 0:
            self._make_readable()

    def _make_readable(self) -> None:
        if any(name.endswith(".parquet") and not name.startswith(("_", ".")) for name in self._folder.names()):
            return
        for committable in self._finish(0, self._new_name(), []):
            self._folder.rename(Promise.from_committable(committable))
        self._folder.make_published_durable()

    def write(self, batch: pa.RecordBatch) -> None:
        self._buffer.append(batch)
        self._buffered_rows += batch.num_rows
        self._buffered_bytes += batch.nbytes
        if self._buffered_rows >= self._row_group_rows or self._buffered_bytes >= MAX_BUFFERED_BYTES:
            self._write_row_groups()

    def _write_row_groups(self) -> None:
        rows = pa.Table.from_batches(self._buffer, self._context.schema)
        full = rows.num_rows - rows.num_rows % self._row_group_rows or rows.num_rows
        if self._file is None:
            self._file = self._open(self._new_name())
        self._file.write(rows.slice(0, full), row_group_rows=self._row_group_rows)
        self._buffer = rows.slice(full).to_batches()
        self._buffered_rows = rows.num_rows - full
        self._buffered_bytes = sum(batch.nbytes for batch in self._buffer)

    def _new_name(self) -> str:
        self._file_count += 1
        return f"{PENDING_FOLDER}/{self._writer.pending_name(self._file_count)}"

    def _open(self, name: str) -> PendingFile:
        return PendingFile(name, self._folder, self._context.schema, self._compression)

    def pre_commit(self, epoch: int) -> Callable[[], Sequence[Committable]]:
        file, rest = self._file, self._buffer
        self._file, self._buffer, self._buffered_rows, self._buffered_bytes = None, [], 0, 0
        if file is None and not any(batch.num_rows for batch in rest):
            return lambda: ()
        return partial(self._finish, epoch, file or self._new_name(), rest)

    def _finish(self, epoch: int, file: PendingFile | str, rest: Sequence[pa.RecordBatch]) -> Sequence[Committable]:
        """Finish the file, in the background, with what never changes in the writer. `file` may be a name to open."""
        file = self._open(file) if isinstance(file, str) else file
        if rest:
            file.write(pa.Table.from_batches(rest, self._context.schema), row_group_rows=self._row_group_rows)
        size = file.finish()
        sink = re.sub(r"[^A-Za-z0-9]+", "_", self._context.sink)
        final = f"part-{sink}-{epoch}-{self._context.subtask}-{self._context.attempt}-{self._writer.token}.parquet"
        return (Promise(pending=file.name, final=final, size=size, folder=self._folder.shown).to_committable(),)

    def commit(self, committables: Sequence[Committable]) -> None:
        for folder, promises in groupby(map(Promise.from_committable, committables), key=lambda promise: promise.folder):
            self._folder_at(folder).publish(list(promises))

    def _folder_at(self, folder: str | None) -> OutputFolder:
        """Return the folder of a committable: the sink's own, unless the sink was restored with another one."""
        if folder in (None, self._folder.shown):
            return self._folder
        try:
            return OutputFolder(with_secrets_of(self._folder.address, folder), make=False)
        except OSError as error:
            raise CommitError(f"can't reach {folder}, where output is to be committed: {error}") from error

    def discard_leftovers(self) -> None:
        names, attempt = self._folder.names(PENDING_FOLDER), self._context.attempt
        pending = ((name, *parsed) for name in names if (parsed := parse_pending(name)) is not None)
        begun = highest(map(parse_receipt, names))  # to delete a file with a receipt would make it count as committed
        left = [
            name
            for name, writer, number in pending
            if writer.owner == self._writer.owner and writer.attempt < attempt and number > begun.get(writer, -1)
        ]
        for name in [*left, *superseded(names, owner=self._writer.owner, attempt=attempt)]:
            self._folder.delete(f"{PENDING_FOLDER}/{name}")

    def close(self) -> None:
        if self._file is not None:
            self._file.abandon()


def with_secrets_of(own: str, folder: str) -> str:
    """Return the address of a folder with the user, password and query of the sink's own address, if both are on the same
    host or in the same bucket."""
    mine, there = urlsplit(own), urlsplit(folder)
    if "://" not in own or (mine.scheme, mine.netloc.rpartition("@")[2]) != (there.scheme, there.netloc):
        return folder
    return there._replace(netloc=mine.netloc, query=mine.query).geturl()
