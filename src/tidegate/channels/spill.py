"""A queue of record batches that writes batches beyond its memory bound to disk.

The oldest batches are in memory, up to the bound. Batches behind them are in unlinked temporary files, as Arrow IPC
messages under the queue's schema, and are read one at a time. Offsets are in memory.

Invariants:
- First in, first out: while anything is on disk, whatever is appended goes there.
- Disk space is reused: a file that has been read to its end is truncated and written again, or closed if there is a
  newer one. So the disk holds the backlog and at most two files of batches that were taken.
- An append that fails leaves the queue as it was.
- Nothing on disk outlives the process: the files have no name.

A queue belongs to one thread at a time. What this does not do: flush to disk (a crash loses the process's state anyway,
and only snapshots survive it), checksums (no other process can open the files).
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Iterator

import pyarrow as pa

from tidegate.channels.frames import check_schema
from tidegate.errors import SchemaError, TidegateError

SEGMENT_BYTES = 256 << 20


class SpillError(TidegateError):
    """Records that don't fit into memory could not be written to disk or read back. The attempt can't continue."""


class Spill:
    def __init__(self, schema: pa.Schema, *, memory_bytes: int, segment_bytes: int = SEGMENT_BYTES) -> None:
        check_schema(schema)
        self._schema = schema
        self._max_memory_bytes = memory_bytes
        self._segment_bytes = segment_bytes
        self._memory: deque[tuple[pa.RecordBatch, int]] = deque()
        self._memory_bytes = 0
        self._segments: deque[_Segment] = deque()  # all but the last hold something
        self._spilled_count = 0
        self.spilled_bytes = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._memory) + self._spilled_count

    @property
    def byte_count(self) -> int:
        """The bytes of the batches, in memory and on disk."""
        return self._memory_bytes + self.spilled_bytes

    def append(self, batch: pa.RecordBatch) -> None:
        assert not self._closed, "the queue is closed"
        if not batch.schema.equals(self._schema):
            raise SchemaError(f"a batch with columns\n{batch.schema}\nwas queued among batches with\n{self._schema}")
        # What the batch keeps alive, which for a slice is more than its rows (and more than a file would take).
        memory_bytes = batch.get_total_buffer_size()
        if not self._spilled_count and self._memory_bytes + memory_bytes <= self._max_memory_bytes:
            self._memory.append((batch, memory_bytes))
            self._memory_bytes += memory_bytes
        else:
            self._write(memoryview(batch.serialize()))

    def peekleft(self) -> pa.RecordBatch:
        """Return the oldest batch, which stays in the queue. There is one."""
        if not self._memory:
            self._load()
        return self._memory[0][0]

    def popleft(self) -> pa.RecordBatch:
        """Take the oldest batch. There is one."""
        batch = self.peekleft()
        self._memory_bytes -= self._memory.popleft()[1]
        return batch

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield all batches, oldest first; they stay in the queue. At most one at a time is read from disk.

        Any thread may iterate, as long as no other thread uses the queue meanwhile.
        """
        for batch, _ in self._memory:
            yield batch
        for segment in self._segments:
            for offset, length in segment.spans:
                yield self._decoded(segment.read(offset, length))

    def close(self) -> None:
        """Drop what is left. Idempotent."""
        self._closed = True
        self._memory.clear()
        self._memory_bytes = 0
        for segment in self._segments:
            segment.close()
        self._segments.clear()
        self._spilled_count = self.spilled_bytes = 0

    def _write(self, message: memoryview) -> None:
        try:
            if not self._segments or self._segments[-1].end >= self._segment_bytes:
                self._segments.append(_Segment())
            self._segments[-1].append(message)
        except OSError as error:
            raise SpillError(
                f"{len(message)} bytes of records (and {self.spilled_bytes} before them) don't fit into memory and can't "
                f"be written to a temporary file in {_folder()}: {error}. Make room there, or set TMPDIR to a folder "
                f"with more, and start again"
            ) from error
        self._spilled_count += 1
        self.spilled_bytes += len(message)

    def _load(self) -> None:
        """Read the oldest batch on disk into memory."""
        segment = self._segments[0]
        offset, length = segment.spans[0]
        batch = self._decoded(segment.read(offset, length))
        memory_bytes = batch.get_total_buffer_size()
        self._memory.append((batch, memory_bytes))
        self._memory_bytes += memory_bytes
        segment.spans.popleft()
        self._spilled_count -= 1
        self.spilled_bytes -= length
        if not segment.spans:
            if len(self._segments) > 1:
                self._segments.popleft().close()
            else:
                segment.empty()

    def _decoded(self, message: pa.Buffer) -> pa.RecordBatch:
        return pa.ipc.read_record_batch(message, self._schema)


class _Segment:
    """A temporary file. `spans` are the messages in it that were not taken yet, as (offset, length)."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="tidegate-spill-", buffering=0)  # noqa: SIM115
        self.spans: deque[tuple[int, int]] = deque()
        self.end = 0

    def append(self, message: memoryview) -> None:
        # A write may write less than all, for example if the disk is nearly full; the next one then fails.
        written = 0
        while written < len(message):
            written += os.pwrite(self._file.fileno(), message[written:], self.end + written)
        self.spans.append((self.end, len(message)))
        self.end += len(message)

    def read(self, offset: int, length: int) -> pa.Buffer:
        message = pa.allocate_buffer(length)
        unread = memoryview(message).cast("B")
        try:
            while unread:
                count = os.preadv(self._file.fileno(), [unread], offset + length - len(unread))
                if not count:
                    raise OSError(f"the file ends {len(unread)} bytes too soon")
                unread = unread[count:]
        except OSError as error:
            raise SpillError(
                f"records that were written to a temporary file in {_folder()} can't be read: {error}. "
                f"The disk may be failing"
            ) from error
        return message

    def empty(self) -> None:
        assert not self.spans
        # If truncating fails, the file stays as long as it was, and is still written from the beginning.
        self.end = 0
        try:
            self._file.truncate(0)
        except OSError as error:
            raise SpillError(f"a temporary file in {_folder()} can't be truncated: {error}") from error

    def close(self) -> None:
        self._file.close()


def _folder() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:
        return "any of the usual folders"
