"""What a channel in memory does beyond the contract of all channels (tests/contract/test_channels.py)."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tidegate.channels.elements import End, Marker
from tidegate.channels.memory import MemoryChannel
from tidegate.protocol.ids import ChannelId

CHANNEL = ChannelId(3, 1, 1)
BATCH = pa.record_batch([pa.array(range(1_000))], names=["n"])


def test_it_is_full_once_its_bound_of_elements_is_passed() -> None:
    channel = MemoryChannel(CHANNEL, max_elements=2)
    for epoch in (1, 2):
        channel.send(Marker(epoch))
    assert not channel.full
    channel.send(Marker(3))
    assert channel.full
    channel.take()
    assert not channel.full


def test_it_is_full_once_its_bound_of_bytes_is_passed() -> None:
    channel = MemoryChannel(CHANNEL, max_queued_bytes=10_000)
    channel.send(BATCH)
    assert not channel.full
    channel.send(BATCH)
    assert channel.full
    channel.take()
    assert not channel.full


def test_a_slice_counts_as_what_it_keeps_in_memory() -> None:
    channel = MemoryChannel(CHANNEL, max_queued_bytes=10_000)
    channel.send(BATCH.slice(0, 1))
    channel.send(BATCH.slice(1, 1))
    assert channel.full


def test_batches_are_passed_without_a_copy() -> None:
    channel = MemoryChannel(CHANNEL)
    channel.send(BATCH)
    assert channel.take() is BATCH


def test_what_a_marker_has_overtaken_still_counts_towards_the_bound() -> None:
    channel = MemoryChannel(CHANNEL, max_elements=2)
    for element in (BATCH, BATCH, Marker(1)):
        channel.send(element)
    assert channel.full
    assert channel.overtake() == [BATCH, BATCH]
    assert not channel.full
    assert len(channel) == 2


def test_there_is_nothing_to_overtake_without_a_marker() -> None:
    channel = MemoryChannel(CHANNEL)
    channel.send(BATCH)
    with pytest.raises(AssertionError, match="no marker"):
        channel.overtake()


def test_a_batch_after_the_end_is_a_bug() -> None:
    channel = MemoryChannel(CHANNEL)
    channel.send(End())
    channel.send(Marker(1))
    with pytest.raises(AssertionError, match="a batch after End on channel e3:1>1"):
        channel.send(BATCH)


def test_to_take_from_a_blocked_channel_or_send_on_a_closed_one_is_a_bug() -> None:
    channel = MemoryChannel(CHANNEL)
    channel.send(Marker(1))
    channel.block()
    with pytest.raises(AssertionError, match="blocked"):
        channel.take()
    channel.close()
    with pytest.raises(AssertionError, match="closed"):
        channel.send(Marker(2))
