"""What the feedback channel does beyond the contract of all channels (tests/contract/test_channels.py)."""

from __future__ import annotations

import os

import pyarrow as pa
import pytest

from tidegate.channels.elements import Element, End, Lap, Marker, Watermark
from tidegate.channels.feedback import FeedbackChannel
from tidegate.errors import SchemaError
from tidegate.protocol.ids import ChannelId

CHANNEL = ChannelId(5, 1, 1)
SCHEMA = pa.schema([("n", pa.int64())])


def batch(number: int, rows: int = 1_000) -> pa.RecordBatch:
    return pa.record_batch([pa.array([number] * rows, type=pa.int64())], schema=SCHEMA)


BATCH_BYTES = batch(0).get_total_buffer_size()


def feedback(memory_bytes: int = 3 * BATCH_BYTES) -> FeedbackChannel:
    return FeedbackChannel(CHANNEL, SCHEMA, memory_bytes=memory_bytes)


def test_it_is_never_full_but_crowded_while_its_bound_is_passed() -> None:
    channel = feedback()
    for number in range(3):
        channel.send(batch(number))
        assert not channel.crowded
    channel.send(batch(3))
    assert channel.crowded
    for number in range(4, 100):
        channel.send(batch(number))
    assert not channel.full
    assert channel.queued_bytes >= 100 * BATCH_BYTES
    for number in range(98):
        assert channel.take() == batch(number)
    assert not channel.crowded
    assert [channel.take(), channel.take()] == [batch(98), batch(99)]
    assert channel.queued_bytes == 0
    channel.close()


def test_elements_of_all_kinds_keep_their_order_though_batches_are_on_disk() -> None:
    channel = feedback(memory_bytes=BATCH_BYTES)
    sent: list[Element] = []
    for number in range(20):
        sent += [batch(number), Marker(number), batch(100 + number), Lap(0, number, False), Watermark(number)]
    sent.append(End())
    for element in sent:
        channel.send(element)
    for element in sent:
        assert channel.peek() == channel.peek() == element
        assert channel.take() == element
    assert channel.peek() is None
    assert len(channel) == 0
    channel.close()


def test_batches_within_the_bound_are_passed_without_a_copy() -> None:
    channel, sent = feedback(), batch(1)
    channel.send(sent)
    assert channel.take() is sent
    channel.close()


def test_a_marker_overtakes_batches_in_memory_and_on_disk() -> None:
    channel = feedback()
    for number in range(10):
        channel.send(batch(number))
    channel.send(Marker(1))
    channel.send(batch(10))
    assert channel.marker() == Marker(1)
    assert channel.overtake() == [batch(number) for number in range(10)]
    assert channel.marker() is None
    assert [channel.take() for _ in range(11)] == [batch(number) for number in range(11)]
    channel.close()


def test_a_batch_after_the_end_is_a_bug() -> None:
    channel = feedback()
    for element in (End(), Marker(1), Lap(0, 1, True)):
        channel.send(element)
    with pytest.raises(AssertionError, match="a batch after End on channel e5:1>1"):
        channel.send(batch(1))
    channel.close()


def test_to_take_from_a_blocked_channel_or_send_on_a_closed_one_is_a_bug() -> None:
    channel = feedback()
    channel.send(batch(1))
    channel.block()
    with pytest.raises(AssertionError, match="blocked"):
        channel.take()
    channel.close()
    with pytest.raises(AssertionError, match="closed"):
        channel.send(Marker(2))


def test_a_batch_of_another_schema_is_refused_and_leaves_no_trace() -> None:
    channel = feedback()
    with pytest.raises(SchemaError):
        channel.send(pa.record_batch([pa.array(["x"])], names=["n"]))
    assert len(channel) == 0
    channel.close()


def test_to_close_it_drops_what_is_queued_and_gives_its_file_back() -> None:
    before = set(os.listdir("/proc/self/fd"))
    channel = feedback(memory_bytes=0)
    for element in (batch(1), Marker(1), batch(2)):
        channel.send(element)
    for _ in range(2):
        channel.close()
        assert len(channel) == channel.queued_bytes == 0
        assert channel.marker() is None
    assert set(os.listdir("/proc/self/fd")) <= before
