from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.channels import frames
from tidegate.channels.elements import Element, End, Idle, Lap, Marker, Watermark
from tidegate.channels.frames import FrameAssembler, Kind, SendQueue
from tidegate.errors import ProtocolError, SchemaError

SCHEMA = pa.schema(
    [
        pa.field("key", pa.int64(), nullable=False),
        ("text", pa.string()),
        ("spots", pa.list_(pa.struct([("x", pa.float64())]))),
    ]
)


def batch(rows: int, text: str = "tide") -> pa.RecordBatch:
    columns = [
        pa.array(range(rows)),
        pa.array([f"{text} {i}" for i in range(rows)]),
        pa.array([[{"x": i / 2}] * (i % 3) for i in range(rows)], type=SCHEMA.field("spots").type),
    ]
    return pa.record_batch([c.cast(f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)


def stream_of(elements: Iterable[Element]) -> bytes:
    return b"".join(bytes(buffer) for element in elements for buffer in frames.encode(element, SCHEMA))


def feed(assembler: FrameAssembler, stream: bytes, chunk_sizes: Sequence[int]) -> list[frames.Frame]:
    """What the assembler finds if the bytes arrive in chunks of these sizes, again and again."""
    found: list[frames.Frame] = []
    at = turn = 0
    while at < len(stream):
        chunk = memoryview(stream)[at : at + chunk_sizes[turn % len(chunk_sizes)]]
        turn += 1
        count = 0
        for buffer in assembler.buffers():
            part = chunk[count : count + len(buffer)]
            buffer[: len(part)] = part
            count += len(part)
        assert count > 0
        found += assembler.advance(count)
        at += count
    return found


def decoded(found: Iterable[frames.Frame]) -> list[Element]:
    return [frames.decode(kind, payload, SCHEMA) for kind, payload in found]


elements = st.one_of(
    st.builds(Marker, st.integers(0, 2**64 - 1)),
    st.builds(Watermark, st.integers(-(2**63), 2**63 - 1)),
    st.builds(Lap, st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.booleans()),
    st.just(Idle()),
    st.just(End()),
    st.integers(0, 20).map(batch),
    st.sampled_from([0, 3_000, 9_000]).map(batch),
)


@given(st.lists(elements, max_size=12), st.lists(st.integers(1, 300_000) | st.integers(1, 20), min_size=1, max_size=20))
@settings(max_examples=60, deadline=None)
def test_frames_are_the_same_however_the_stream_is_cut(sent: list[Element], chunk_sizes: list[int]) -> None:
    stream = stream_of(sent)
    # Byte by byte would take long for large batches and shows nothing more.
    sizes = chunk_sizes if len(stream) < 20_000 else [max(size, 500) for size in chunk_sizes]
    assembler = FrameAssembler(frames.channel_lengths())
    assert decoded(feed(assembler, stream, sizes)) == sent
    assert not assembler.partial


@given(st.lists(elements, min_size=1, max_size=4), st.data())
@settings(max_examples=60, deadline=None)
def test_a_stream_that_is_cut_off_shows_as_partial(sent: list[Element], data: st.DataObject) -> None:
    stream = stream_of(sent)
    ends, at = {0}, 0
    for element in sent:
        at += len(stream_of([element]))
        ends.add(at)
    length = data.draw(st.integers(0, len(stream)))
    assembler = FrameAssembler(frames.channel_lengths())
    found = decoded(feed(assembler, stream[:length], [100_000]))
    assert found == sent[: len(found)]
    assert assembler.partial == (length not in ends)


@given(st.binary(min_size=1, max_size=3_000), st.lists(st.integers(1, 400), min_size=1, max_size=5))
def test_garbage_gives_frames_or_a_protocol_error(garbage: bytes, chunk_sizes: list[int]) -> None:
    for lengths in (frames.channel_lengths(1 << 20), frames.link_lengths(1 << 20)):
        try:
            for kind, payload in feed(FrameAssembler(lengths), garbage, chunk_sizes):
                if kind == Kind.MESSAGE:
                    frames.decode_message(payload)
                elif kind != Kind.CLOSE:
                    frames.decode(kind, payload, SCHEMA)
        except ProtocolError:
            pass


@given(st.data())
def test_a_damaged_batch_is_a_batch_or_a_protocol_error(data: st.DataObject) -> None:
    payload = bytearray(batch(20).serialize())
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        assert isinstance(frames.decode(Kind.BATCH, bytes(payload), SCHEMA), pa.RecordBatch)


def test_a_batch_whose_offsets_point_outside_is_refused() -> None:
    schema = pa.schema([("text", pa.string())])
    payload = bytes(pa.record_batch([pa.array(["tide", "gate"])], schema=schema).serialize())
    damaged = payload.replace(struct.pack("<iii", 0, 4, 8), struct.pack("<iii", 0, 4, 9_000))
    assert damaged != payload
    with pytest.raises(ProtocolError, match="holds no batch"):
        frames.decode(Kind.BATCH, damaged, schema)


def test_a_large_frame_may_arrive_after_its_header() -> None:
    (header, payload), assembler = frames.encode(batch(10_000), SCHEMA), FrameAssembler(frames.channel_lengths())
    assert feed(assembler, bytes(header), [5]) == []
    assert decoded(feed(assembler, bytes(payload), [len(payload)])) == [batch(10_000)]


@pytest.mark.parametrize("kept", [0, 1, 8, 100, -8, -1])
def test_a_truncated_batch_is_refused(kept: int) -> None:
    with pytest.raises(ProtocolError, match="holds no batch"):
        frames.decode(Kind.BATCH, bytes(batch(20).serialize())[:kept], SCHEMA)


@pytest.mark.parametrize(
    ("kind", "length"),
    [
        (Kind.BATCH, 1_000_001),
        (Kind.BATCH, 2**32 - 1),
        (Kind.BATCH, 0),
        (Kind.MARKER, 7),
        (Kind.MARKER, 9),
        (Kind.WATERMARK, 0),
        (Kind.WATERMARK, 1 << 30),
        (Kind.IDLE, 1),
        (Kind.END, 8),
        (Kind.CLOSE, 1),
        (Kind.LAP, 12),
        (Kind.LAP, 14),
    ],
)
def test_a_wrong_length_is_refused_before_anything_is_allocated(kind: Kind, length: int) -> None:
    assembler = FrameAssembler(frames.channel_lengths(1_000_000))
    before = pa.total_allocated_bytes()
    with pytest.raises(ProtocolError, match=f"a {kind.name} frame of {length} bytes"):
        feed(assembler, struct.pack("<IB", length, kind), [5])
    assert pa.total_allocated_bytes() == before


@pytest.mark.parametrize("kind", [0, 6, 10, 255])
def test_a_kind_that_no_channel_carries_is_refused(kind: int) -> None:
    with pytest.raises(ProtocolError, match=f"unknown kind {kind} "):
        feed(FrameAssembler(frames.channel_lengths()), struct.pack("<IB", 2, kind) + b"{}", [100])


@pytest.mark.parametrize("kind", [Kind.BATCH, Kind.MARKER, Kind.END, Kind.LAP])
def test_a_link_carries_no_elements(kind: Kind) -> None:
    with pytest.raises(ProtocolError, match="unknown kind"):
        feed(FrameAssembler(frames.link_lengths()), struct.pack("<IB", 8, kind), [100])


@pytest.mark.parametrize("rows", [10, 100_000])
def test_a_decoded_batch_lies_in_the_memory_it_was_received_into(rows: int) -> None:
    ((kind, payload),) = feed(FrameAssembler(frames.channel_lengths()), stream_of([batch(rows)]), [60_000])
    received = pa.py_buffer(payload)
    arrived = frames.decode(kind, payload, SCHEMA)
    assert isinstance(arrived, pa.RecordBatch)
    assert arrived == batch(rows)
    for buffer in arrived.column("key").buffers()[1:]:
        assert received.address <= buffer.address < received.address + received.size
        assert buffer.address % 8 == 0


def test_sending_refers_to_the_serialized_batch_and_copies_nothing_more() -> None:
    header, payload = frames.encode(batch(1_000), SCHEMA)
    assert len(header) == 5
    assert isinstance(payload, memoryview)
    assert isinstance(payload.obj, pa.Buffer)


def test_a_slice_travels_without_the_rest_of_its_batch() -> None:
    whole = batch(50_000)
    assert len(stream_of([whole.slice(10, 5)])) < 2_000
    assert decoded(feed(FrameAssembler(frames.channel_lengths()), stream_of([whole.slice(10, 5)]), [999])) == [
        whole.slice(10, 5)
    ]


def test_a_batch_that_is_too_long_for_a_frame_goes_as_several() -> None:
    sent = batch(1_000)
    buffers = frames.encode(sent, SCHEMA, max_batch_bytes=10_000)
    found = decoded(feed(FrameAssembler(frames.channel_lengths(10_000)), b"".join(map(bytes, buffers)), [4_096]))
    assert len(found) > 1
    assert pa.Table.from_batches(found) == pa.Table.from_batches([sent])


def test_a_record_that_is_too_long_for_a_frame_is_an_error_that_says_so() -> None:
    with pytest.raises(ProtocolError, match=r"one record takes \d+ bytes"):
        frames.encode(batch(2, text="x" * 20_000), SCHEMA, max_batch_bytes=10_000)


@pytest.mark.parametrize(
    "other",
    [
        pa.schema([("key", pa.int64())]),
        pa.schema([("key", pa.int32())]),
        pa.schema([("other", pa.int64())]),
    ],
)
def test_a_batch_of_another_schema_is_never_sent(other: pa.Schema) -> None:
    sent = pa.record_batch([pa.array([1], type=other.field(0).type)], schema=other)
    with pytest.raises(SchemaError, match="was sent on a channel with"):
        frames.encode(sent, SCHEMA)


DICTIONARY = pa.dictionary(pa.int32(), pa.string())


@pytest.mark.parametrize(
    "hidden",
    [
        DICTIONARY,
        pa.list_(DICTIONARY),
        pa.struct([("a", pa.large_list(DICTIONARY))]),
        pa.map_(pa.string(), DICTIONARY),
    ],
)
def test_dictionary_encoded_columns_are_refused_wherever_they_hide(hidden: pa.DataType) -> None:
    with pytest.raises(SchemaError, match="'worst' is dictionary-encoded"):
        frames.check_schema(pa.schema([("fine", pa.string()), ("worst", hidden)]))


def test_every_type_without_a_dictionary_is_let_through() -> None:
    frames.check_schema(SCHEMA)
    frames.check_schema(pa.schema([("m", pa.map_(pa.string(), pa.list_(pa.decimal128(10, 2)))), ("t", pa.date32())]))


def test_the_fingerprint_tells_schemas_apart_by_their_columns_alone() -> None:
    schemas = [
        pa.schema([("a", pa.int64()), ("b", pa.string())]),
        pa.schema([("b", pa.string()), ("a", pa.int64())]),
        pa.schema([("a", pa.int64()), pa.field("b", pa.string(), nullable=False)]),
        pa.schema([("a", pa.int32()), ("b", pa.string())]),
        pa.schema([("a", pa.timestamp("us")), ("b", pa.string())]),
        pa.schema([("a", pa.timestamp("us", "UTC")), ("b", pa.string())]),
        pa.schema([("a", pa.struct([("b", pa.string())]))]),
    ]
    assert len({frames.fingerprint(schema) for schema in schemas}) == len(schemas)
    assert frames.fingerprint(schemas[0].with_metadata({"by": "spark"})) == frames.fingerprint(schemas[0])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.lists(st.dictionaries(st.text(), json_values, max_size=4), max_size=5), st.integers(1, 50))
def test_messages_come_out_as_they_went_in(sent: list[dict[str, Any]], chunk: int) -> None:
    stream = b"".join(bytes(buffer) for message in sent for buffer in frames.encode_message(message))
    found = feed(FrameAssembler(frames.link_lengths()), stream, [chunk])
    assert [frames.decode_message(payload) for _, payload in found] == sent


@pytest.mark.parametrize("payload", [b"[]", b"17", b"{", b"\xff\xfe", b"[" * 50_000, b'"text"'])
def test_a_message_that_is_no_json_object_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="a control message"):
        frames.decode_message(payload)


def test_a_message_that_is_too_long_is_refused_where_it_is_sent() -> None:
    with pytest.raises(ProtocolError, match="1000 is the most"):
        frames.encode_message({"text": "x" * 1_000}, max_message_bytes=1_000)


@given(st.lists(st.binary(max_size=30), max_size=150), st.lists(st.integers(1, 500), min_size=1, max_size=10))
def test_a_send_queue_gives_every_byte_once_and_in_order(buffers: list[bytes], writes: list[int]) -> None:
    queue, written, turn = SendQueue(), b"", 0
    queue.extend(buffers)
    assert queue.byte_count == sum(map(len, buffers))
    while queue:
        head = b"".join(map(bytes, queue.front()))
        count = min(writes[turn % len(writes)], len(head))
        assert len(queue.front()) <= frames.MAX_BUFFERS_PER_WRITE
        assert count > 0
        written += head[:count]
        queue.advance(count)
        turn += 1
    assert written == b"".join(buffers)
    assert queue.byte_count == 0
