"""Frames: the encoding of elements and control messages on a socket, without I/O.

A frame is a header (u32 length of the payload, u8 kind, little-endian) and the payload. Batches are Arrow IPC messages
under a schema that both sides know from the handshake; control messages are JSON objects; the rest are a few bytes of
an exact length. There is no pickle.

Invariants:
- A length is compared with what its kind may have before anything is allocated for it.
- A `FrameAssembler` returns the same frames however the stream is cut into chunks.
- A large payload is received into a buffer of its own, so a decoded batch shares that memory and is not copied again.
  A small payload is copied out of its chunk, so that it doesn't hold the chunk in memory.
- Payloads begin at an address that is a multiple of 16, as Arrow recommends.

What this does not do: I/O (`tcp_ends.py`, `links.py`), checking every offset and character of a batch (peers have proved
that they belong to the job, and the cost of the check that is done doesn't grow with the rows), dictionary-encoded
columns (Arrow sends dictionaries as separate messages: decode these columns before an exchange).
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import deque
from collections.abc import Iterable, Mapping
from enum import IntEnum
from itertools import islice
from typing import Any, TypeAlias

import pyarrow as pa

from tidegate.channels.elements import ControlElement, Element, End, Held, Idle, Lap, Marker, Watermark
from tidegate.errors import ProtocolError, SchemaError

MAX_BATCH_BYTES = 256 << 20
MAX_MESSAGE_BYTES = 64 << 20
CHUNK_BYTES = 64 << 10
LARGE_PAYLOAD_BYTES = CHUNK_BYTES // 4
# Linux takes up to 1024 buffers in one call; beyond a few dozen the system call is no longer the main cost.
MAX_BUFFERS_PER_WRITE = 64

_HEADER = struct.Struct("<IB")


class Kind(IntEnum):
    BATCH = 1
    MARKER = 2
    WATERMARK = 3
    IDLE = 4
    END = 5
    MESSAGE = 6
    CLOSE = 7
    """Sent by either side before it closes. A connection that ends without it was lost."""
    LAP = 8
    HELD = 9


Buffer: TypeAlias = "bytes | memoryview"
Frame: TypeAlias = "tuple[int, bytes | pa.Buffer]"
Lengths: TypeAlias = Mapping[int, tuple[int, int]]
"""The kinds that a stream may carry, with the least and the greatest length of their payloads."""

CLOSE_FRAME = _HEADER.pack(0, Kind.CLOSE)

# The control elements: how the fields of each, in their order, are packed into a payload.
_CONTROL: dict[int, tuple[type[ControlElement], struct.Struct]] = {
    Kind.MARKER: (Marker, struct.Struct("<QQ?")),
    Kind.WATERMARK: (Watermark, struct.Struct("<q")),
    Kind.IDLE: (Idle, struct.Struct("<")),
    Kind.END: (End, struct.Struct("<")),
    Kind.LAP: (Lap, struct.Struct("<IQ?")),
    Kind.HELD: (Held, struct.Struct("<I")),
}
_HEADERS = {element: (_HEADER.pack(layout.size, kind), layout) for kind, (element, layout) in _CONTROL.items()}


def channel_lengths(max_batch_bytes: int = MAX_BATCH_BYTES) -> Lengths:
    """Return the kinds of frames that a channel may carry."""
    return {
        Kind.BATCH: (1, max_batch_bytes),
        Kind.CLOSE: (0, 0),
        **{kind: (layout.size, layout.size) for kind, (_, layout) in _CONTROL.items()},
    }


def link_lengths(max_message_bytes: int = MAX_MESSAGE_BYTES) -> Lengths:
    """Return the kinds of frames that a control link may carry."""
    return {Kind.MESSAGE: (2, max_message_bytes), Kind.CLOSE: (0, 0)}


# --- schemas -------------------------------------------------------------------------------------------------------


def fingerprint(schema: pa.Schema) -> str:
    """Return a text that is equal for two schemas if they have the same columns (names, types, nullability, order)."""
    columns = [[field.name, str(field.type), field.nullable] for field in schema]
    return hashlib.sha256(json.dumps(columns).encode()).hexdigest()


def check_schema(schema: pa.Schema) -> None:
    """Raise `SchemaError` if a column can't be sent as a single record batch message."""
    for field in schema:
        if _holds_dictionary(field.type):
            raise SchemaError(
                f"column {field.name!r} is dictionary-encoded ({field.type}), which can't travel on a channel: "
                f"decode it first, for instance with `column.dictionary_decode()`"
            )


def _holds_dictionary(of: pa.DataType) -> bool:
    if pa.types.is_dictionary(of):
        return True
    if isinstance(of, pa.BaseExtensionType):
        return _holds_dictionary(of.storage_type)
    return any(_holds_dictionary(of.field(index).type) for index in range(of.num_fields))


# --- elements and messages to buffers, and back ----------------------------------------------------------------------


def encode(element: Element, schema: pa.Schema, *, max_batch_bytes: int = MAX_BATCH_BYTES) -> list[Buffer]:
    """Return the element as buffers to write in order. Arrow's memory is not copied."""
    if isinstance(element, pa.RecordBatch):
        # A batch of another schema would decode to wrong values on the other side, so an assertion isn't enough.
        if not element.schema.equals(schema):
            raise SchemaError(f"a batch with columns\n{element.schema}\nwas sent on a channel with\n{schema}")
        return _encode_batch(element, max_batch_bytes)
    header, layout = _HEADERS[type(element)]
    return [header + layout.pack(*[getattr(element, name) for name in element.__match_args__])]


def _encode_batch(batch: pa.RecordBatch, max_batch_bytes: int) -> list[Buffer]:
    payload = memoryview(batch.serialize())
    if len(payload) <= max_batch_bytes:
        return [_HEADER.pack(len(payload), Kind.BATCH), payload]
    if batch.num_rows <= 1:
        raise ProtocolError(f"one record takes {len(payload)} bytes on the wire; {max_batch_bytes} is the most")
    # How records are batched has no meaning, so a batch that is too long is sent as two.
    half = batch.num_rows // 2
    return _encode_batch(batch.slice(0, half), max_batch_bytes) + _encode_batch(batch.slice(half), max_batch_bytes)


def decode(kind: int, payload: bytes | pa.Buffer, schema: pa.Schema) -> Element:
    """Return the element in a frame of a channel. The assembler has checked the kind and the payload's length."""
    if kind == Kind.BATCH:
        return _decode_batch(payload, schema)
    element, layout = _CONTROL[kind]
    return element(*layout.unpack(payload))


def _decode_batch(payload: bytes | pa.Buffer, schema: pa.Schema) -> pa.RecordBatch:
    try:
        batch = pa.ipc.read_record_batch(pa.py_buffer(payload), schema)
        batch.validate()
    except (pa.ArrowException, EOFError, OSError, ValueError) as error:
        raise ProtocolError(f"a frame of {len(payload)} bytes holds no batch of the agreed schema: {error}") from error
    return batch


def encode_message(message: Mapping[str, Any], *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> list[Buffer]:
    payload = json.dumps(message, separators=(",", ":")).encode()
    if len(payload) > max_message_bytes:
        raise ProtocolError(f"a control message takes {len(payload)} bytes; {max_message_bytes} is the most")
    return [_HEADER.pack(len(payload), Kind.MESSAGE), payload]


def decode_message(payload: bytes | pa.Buffer) -> dict[str, Any]:
    try:
        message = json.loads(str(payload, "utf-8"))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a control message of {len(payload)} bytes isn't JSON: {error}") from error
    if not isinstance(message, dict):
        raise ProtocolError(f"a control message is a JSON {type(message).__name__}, not an object")
    return message


# --- reading and writing a stream of them ----------------------------------------------------------------------------


class FrameAssembler:
    """Finds the frames in a byte stream. Read into `buffers()`, then call `advance` with the number of bytes read.

    `_chunk[:_end]` is the beginning of an unfinished small frame. While a large payload is being received, `_large` is
    its buffer, `_rest` the missing part of it, and the chunk is empty: it takes what follows the payload, so that one
    system call can end a large frame and read the next ones.
    """

    def __init__(self, lengths: Lengths) -> None:
        self.byte_count = 0  # received so far
        self._lengths = lengths
        self._chunk = memoryview(bytearray(CHUNK_BYTES))
        self._end = 0
        self._large: pa.Buffer | None = None
        self._large_kind = 0
        self._rest = memoryview(b"")

    @property
    def partial(self) -> bool:
        """True in the middle of a frame: a stream that ends here was cut."""
        return self._large is not None or self._end > 0

    def buffers(self) -> list[memoryview]:
        """Return where to read the next bytes to, in order. The first buffer is never empty."""
        if self._large is not None:
            return [self._rest, self._chunk]
        return [self._chunk[self._end :]]

    def advance(self, byte_count: int) -> list[Frame]:
        """Return the frames that became complete with the `byte_count` bytes just read into `buffers()`."""
        frames: list[Frame] = []
        self.byte_count += byte_count
        if self._large is not None:
            taken = min(byte_count, len(self._rest))
            self._rest = self._rest[taken:]
            if self._rest:
                return frames
            frames.append((self._large_kind, self._large))
            self._large = None
            byte_count -= taken
        self._end += byte_count
        self._parse(frames)
        return frames

    def _parse(self, frames: list[Frame]) -> None:
        chunk, start, end = self._chunk, 0, self._end
        while end - start >= _HEADER.size:
            length, kind = _HEADER.unpack_from(chunk, start)
            self._check(length, kind)
            payload = start + _HEADER.size
            if length <= end - payload:
                start = payload + length
                frames.append((kind, bytes(chunk[payload:start])))
            elif length > LARGE_PAYLOAD_BYTES:
                self._begin_large(length, kind, chunk[payload:end])
                start = end
            else:
                break
        unread = end - start
        if start and unread:
            chunk[:unread] = chunk[start:end]
        self._end = unread

    def _check(self, length: int, kind: int) -> None:
        bounds = self._lengths.get(kind)
        if bounds is None:
            raise ProtocolError(f"a frame of unknown kind {kind} ({length} bytes)")
        if not bounds[0] <= length <= bounds[1]:
            raise ProtocolError(f"a {Kind(kind).name} frame of {length} bytes; {bounds[0]} to {bounds[1]} are allowed")

    def _begin_large(self, length: int, kind: int, received: memoryview) -> None:
        self._large = pa.allocate_buffer(length)
        self._large_kind = kind
        whole = memoryview(self._large).cast("B")
        whole[: len(received)] = received
        self._rest = whole[len(received) :]


class SendQueue:
    """Buffers that the socket has not taken yet, in order."""

    def __init__(self) -> None:
        self._buffers: deque[Buffer] = deque()
        self.byte_count = 0

    def __bool__(self) -> bool:
        return bool(self._buffers)

    def extend(self, buffers: Iterable[Buffer]) -> None:
        for buffer in buffers:
            if buffer:
                self._buffers.append(buffer)
                self.byte_count += len(buffer)

    def front(self) -> list[Buffer]:
        """Return the oldest buffers, as many as one write should take."""
        return list(islice(self._buffers, MAX_BUFFERS_PER_WRITE))

    def advance(self, byte_count: int) -> None:
        """The socket took `byte_count` bytes."""
        assert 0 <= byte_count <= self.byte_count
        self.byte_count -= byte_count
        while byte_count:
            first = self._buffers.popleft()
            if byte_count < len(first):
                self._buffers.appendleft(memoryview(first)[byte_count:])
                return
            byte_count -= len(first)

    def clear(self) -> None:
        self._buffers.clear()
        self.byte_count = 0
