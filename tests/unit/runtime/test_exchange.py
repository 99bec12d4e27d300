"""The exchange: a keyed record always goes to the owner of its key-group, in order within its key (docs/promises.md,
row 15)."""

from __future__ import annotations

from collections import defaultdict

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.channels.elements import End, Idle, Marker, Watermark
from tidegate.channels.memory import MemoryChannel
from tidegate.dataflow.graph import Partitioning
from tidegate.hashing import hash_value
from tidegate.keygroups import key_groups_of
from tidegate.protocol.ids import ChannelId
from tidegate.runtime.exchange import EdgeWriter

SCHEMA = pa.schema([("key", pa.int64()), ("text", pa.string()), ("n", pa.int64())])


def outlets(count: int) -> list[MemoryChannel]:
    return [MemoryChannel(ChannelId(0, 0, index), max_elements=10_000, max_queued_bytes=1 << 40) for index in range(count)]


def writer(
    channels: list[MemoryChannel],
    partitioning: Partitioning,
    *,
    key: tuple[str, ...] = (),
    groups: int = 128,
    first: int = 0,
) -> EdgeWriter:
    return EdgeWriter(channels, partitioning=partitioning, key=key, key_group_count=groups, first=first)


def batch(rows: list[tuple[int | None, str | None]], start: int = 0) -> pa.RecordBatch:
    return pa.record_batch(
        [[key for key, _ in rows], [text for _, text in rows], list(range(start, start + len(rows)))], schema=SCHEMA
    )


def received(channel: MemoryChannel) -> list[tuple[int | None, str | None, int]]:
    rows = []
    while len(channel):
        element = channel.take()
        assert isinstance(element, pa.RecordBatch)
        assert element.num_rows, "empty batches cost and say nothing"
        rows += [tuple(row.values()) for row in element.to_pylist()]
    return rows


KEYS = st.none() | st.integers(-3, 3) | st.integers(-(2**63), 2**63 - 1)
ROWS = st.lists(st.tuples(KEYS, st.sampled_from([None, "", "a", "b", "ä"])), min_size=1, max_size=60)


@given(
    st.lists(ROWS, min_size=1, max_size=4),
    st.integers(1, 9),
    st.sampled_from([9, 16, 128, 32_768]),
    st.sampled_from([("key",), ("text",), ("key", "text")]),
)
def test_a_record_goes_to_the_owner_of_its_key_group_and_keys_keep_their_order(
    batches: list[list[tuple[int | None, str | None]]], parallelism: int, groups: int, key: tuple[str, ...]
) -> None:
    channels = outlets(parallelism)
    subject = writer(channels, Partitioning.HASH, key=key, groups=groups)
    sent = []
    for rows in batches:
        subject.on_batch(batch(rows, start=len(sent)), 0)
        sent += rows
    key_type = SCHEMA.field(key[0]).type if len(key) == 1 else pa.struct([SCHEMA.field(name) for name in key])
    positions = [SCHEMA.get_field_index(name) for name in key]
    seen: list[int] = []
    for owner, channel in enumerate(channels):
        owned = key_groups_of(owner, parallelism=parallelism, key_group_count=groups)
        by_key = defaultdict(list)
        for row in received(channel):
            value = row[positions[0]] if len(key) == 1 else dict(zip(key, (row[at] for at in positions), strict=True))
            assert hash_value(value, key_type) % groups in owned
            by_key[tuple(row[at] for at in positions)].append(row[2])
            seen.append(row[2])
        assert all(numbers == sorted(numbers) for numbers in by_key.values())
    assert sorted(seen) == list(range(len(sent)))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_rebalance_deals_whole_batches_in_turn_from_its_own_subtask_on(count: int) -> None:
    channels = outlets(count)
    subject = writer(channels, Partitioning.REBALANCE, first=3)
    for number in range(2 * count):
        subject.on_batch(batch([(number, "")]), 0)
    taken = [[row[0] for row in received(channel)] for channel in channels]
    assert [len(numbers) for numbers in taken] == [2] * count
    assert taken[3 % count][0] == 0


def test_broadcast_sends_every_record_to_everyone() -> None:
    channels = outlets(3)
    subject = writer(channels, Partitioning.BROADCAST)
    subject.on_batch(batch([(1, "a"), (2, "b")]), 0)
    assert [received(channel) for channel in channels] == [[(1, "a", 0), (2, "b", 1)]] * 3


@pytest.mark.parametrize("partitioning", [Partitioning.HASH, Partitioning.REBALANCE, Partitioning.BROADCAST])
def test_control_elements_go_to_everyone_in_order(partitioning: Partitioning) -> None:
    channels = outlets(3)
    subject = writer(channels, partitioning, key=("key",))
    subject.on_watermark(5)
    subject.send(Marker(1))
    subject.on_idle()
    subject.on_end()
    subject.send(Marker(2))
    for channel in channels:
        assert [channel.take() for _ in range(len(channel))] == [Watermark(5), Marker(1), Idle(), End(), Marker(2)]


def test_one_full_channel_makes_the_writer_full() -> None:
    channels = [MemoryChannel(ChannelId(0, 0, index), max_elements=1) for index in range(2)]
    subject = writer(channels, Partitioning.REBALANCE)
    for number in range(3):
        assert not subject.full
        subject.on_batch(batch([(number, "")]), 0)
    subject.on_batch(batch([(3, "")]), 0)
    assert subject.full
    received(channels[0])
    assert subject.full
    received(channels[1])
    assert not subject.full
