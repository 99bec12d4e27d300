"""What every kind of channel promises to the loop (`channels/ports.py`): one suite over all of them."""

from __future__ import annotations

import random
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from tidegate.channels.elements import MAX_WATERMARK_MS, Element, End, Held, Idle, Lap, Marker, Watermark
from tidegate.channels.feedback import FeedbackChannel
from tidegate.channels.handshake import Identity
from tidegate.channels.memory import MemoryChannel
from tidegate.channels.ports import Inlet, Outlet
from tidegate.channels.tcp import TcpNetwork
from tidegate.protocol.ids import ChannelId
from tidegate.testing.simulation.network import Channel
from tidegate.testing.simulation.world import World

CHANNEL = ChannelId(0, 0, 1)
SCHEMA = pa.schema([("key", pa.int64()), ("text", pa.string())])
IDENTITY = Identity("contract", 1, b"sixteen bytes or more")
BOUND_BYTES = 200_000
# What may be under way on a TCP channel beyond the two bounds: the kernel's buffers, which it doubles, on both sides.
SLACK_BYTES = 8 << 20
PATIENCE_S = 20.0


class Ends:
    """Both ends of one channel, and whatever moves elements between them."""

    def __init__(self, outlet: Outlet, inlet: Inlet, turn: Callable[[], None]) -> None:
        self.outlet = outlet
        self.inlet = inlet
        self.turn = turn

    def take(self, count: int) -> list[Element]:
        """The next `count` elements, as soon as they are there."""
        taken: list[Element] = []
        give_up_s = time.monotonic() + PATIENCE_S
        while len(taken) < count:
            assert time.monotonic() < give_up_s, f"{len(taken)} of {count} elements came"
            if len(self.inlet):
                taken.append(self.inlet.take())
            else:
                self.turn()
        return taken

    def until(self, condition: Callable[[], bool]) -> None:
        give_up_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < give_up_s
            self.turn()


def _in_memory() -> Iterator[Ends]:
    channel = MemoryChannel(CHANNEL, max_queued_bytes=BOUND_BYTES)
    yield Ends(channel, channel, lambda: None)
    channel.close()


def _over_tcp() -> Iterator[Ends]:
    with selectors.DefaultSelector() as ours, selectors.DefaultSelector() as theirs:
        sender = TcpNetwork(identity=IDENTITY, selector=ours, max_queued_bytes=BOUND_BYTES)
        receiver = TcpNetwork(identity=IDENTITY, selector=theirs, max_queued_bytes=BOUND_BYTES)
        thread = threading.Thread(target=lambda: receiver.connect({}, {CHANNEL: SCHEMA}, deadline_s=PATIENCE_S))
        thread.start()
        sender.connect({CHANNEL: (receiver.address, SCHEMA)}, {}, deadline_s=PATIENCE_S)
        thread.join()

        def turn() -> None:
            sender.poll(0.0005)
            receiver.poll(0.0005)

        yield Ends(sender.outlet(CHANNEL), receiver.inlet(CHANNEL), turn)
        sender.close()
        receiver.close()


def _feedback() -> Iterator[Ends]:
    channel = FeedbackChannel(CHANNEL, SCHEMA, memory_bytes=BOUND_BYTES)
    yield Ends(channel, channel, lambda: None)
    channel.close()


class _Awake:
    """What a simulated channel wants of the processes at its ends."""

    name = "someone"
    alive = True

    def wake_soon(self) -> None:
        """It looks again anyway."""


def _simulated() -> Iterator[Ends]:
    world = World(seed=1)
    channel = Channel(world, CHANNEL, max_elements=40, on_marker=lambda slot: None)
    awake: Any = _Awake()
    channel.schema, channel.upstream, channel.downstream = SCHEMA, awake, awake

    def turn() -> None:
        world.happen()

    yield Ends(channel, channel, turn)


BOUNDED = [
    pytest.param(_in_memory, id="memory"),
    pytest.param(_over_tcp, id="tcp"),
    pytest.param(_simulated, id="simulated"),
]
REMOTE = BOUNDED[1:]


@pytest.fixture(params=[*BOUNDED, pytest.param(_feedback, id="feedback")])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    yield from request.param()


def batch(first: int, rows: int = 3) -> pa.RecordBatch:
    return pa.record_batch(
        [pa.array(range(first, first + rows)), pa.array([f"row {i}" for i in range(rows)])], schema=SCHEMA
    )


def fill(ends: Ends, *, rows: int = 2_000) -> list[Element]:
    """Send until the outlet is full and stays so though everything that can move has moved."""
    sent: list[Element] = []
    sent_bytes = 0
    while True:
        turns = 0
        while ends.outlet.full:
            ends.turn()
            turns += 1
            if turns == 50:
                return sent
        next_batch = batch(len(sent), rows)
        sent.append(next_batch)
        sent_bytes += next_batch.nbytes
        ends.outlet.send(next_batch)
        assert sent_bytes < 2 * BOUND_BYTES + SLACK_BYTES, "the channel has no bound"


def test_elements_come_out_as_and_in_the_order_they_went_in(ends: Ends) -> None:
    sent: list[Element] = [
        batch(0),
        Watermark(-5),
        batch(1, rows=0),
        Idle(),
        Marker(1),
        batch(2, rows=20_000),
        Watermark(MAX_WATERMARK_MS),
        Held(3),
        Lap(2, 7, True),
        Marker(2**40),
        Lap(2, 8, False),
        batch(3).slice(1, 1),
        End(),
    ]
    for element in sent:
        ends.outlet.send(element)
    assert ends.take(len(sent)) == sent
    assert len(ends.inlet) == 0
    assert ends.inlet.peek() is None


def test_both_ends_know_their_channel(ends: Ends) -> None:
    assert ends.outlet.channel == ends.inlet.channel == CHANNEL


def test_nulls_and_empty_texts_survive(ends: Ends) -> None:
    odd = pa.record_batch([pa.array([None, 1, None]), pa.array(["", None, "ü\0"])], schema=SCHEMA)
    ends.outlet.send(odd)
    (arrived,) = ends.take(1)
    assert isinstance(arrived, pa.RecordBatch)
    arrived.validate(full=True)
    assert arrived == odd


def test_peek_shows_the_oldest_element_and_leaves_it(ends: Ends) -> None:
    for epoch in (1, 2):
        ends.outlet.send(Marker(epoch))
    ends.until(lambda: len(ends.inlet) == 2)
    assert ends.inlet.peek() == ends.inlet.peek() == Marker(1)
    assert len(ends.inlet) == 2
    assert ends.inlet.take() == Marker(1)
    assert ends.inlet.peek() == Marker(2)


def test_an_empty_channel_is_not_full(ends: Ends) -> None:
    assert not ends.outlet.full
    assert len(ends.inlet) == 0


def test_a_blocked_inlet_gives_nothing_and_keeps_everything(ends: Ends) -> None:
    ends.outlet.send(Marker(1))
    ends.outlet.send(batch(1))
    ends.until(lambda: len(ends.inlet) == 2)
    assert ends.inlet.take() == Marker(1)
    ends.inlet.block()
    assert ends.inlet.blocked
    ends.outlet.send(batch(2))
    for _ in range(20):
        ends.turn()
        assert len(ends.inlet) == 0
        assert ends.inlet.peek() is None
    ends.inlet.unblock()
    assert not ends.inlet.blocked
    assert ends.take(2) == [batch(1), batch(2)]


@pytest.mark.parametrize("ends", BOUNDED, indirect=True)
def test_a_blocked_inlet_makes_the_outlet_full_and_nothing_is_lost(ends: Ends) -> None:
    ends.inlet.block()
    sent = fill(ends)
    assert len(sent) > 1
    ends.inlet.unblock()
    assert ends.take(len(sent)) == sent
    ends.until(lambda: not ends.outlet.full)


@pytest.mark.parametrize("ends", BOUNDED, indirect=True)
def test_an_inlet_that_nobody_takes_from_makes_the_outlet_full(ends: Ends) -> None:
    sent = fill(ends)
    assert ends.take(len(sent)) == sent


@pytest.mark.parametrize("ends", BOUNDED, indirect=True)
def test_markers_pass_a_full_outlet_behind_what_was_sent_before(ends: Ends) -> None:
    ends.inlet.block()
    sent = fill(ends)
    control: list[Element] = [Marker(7), Watermark(12), Idle(), End(), Marker(8)]
    for element in control:
        ends.outlet.send(element)
    ends.inlet.unblock()
    assert ends.take(len(sent) + len(control)) == sent + control


def test_markers_follow_the_end(ends: Ends) -> None:
    sent: list[Element] = [batch(0), End(), Marker(1), Marker(2), Marker(3)]
    for element in sent:
        ends.outlet.send(element)
    assert ends.take(len(sent)) == sent


@pytest.mark.parametrize("ends", BOUNDED, indirect=True)
def test_what_was_sent_before_the_outlet_closed_can_be_taken(ends: Ends) -> None:
    ends.outlet.send(batch(0))
    ends.outlet.send(Marker(1))
    ends.outlet.close()
    assert ends.take(2) == [batch(0), Marker(1)]
    ends.turn()
    assert len(ends.inlet) == 0


def test_both_ends_can_be_closed_twice(ends: Ends) -> None:
    for _ in range(2):
        ends.outlet.close()
        ends.inlet.close()


# --- overtaking ------------------------------------------------------------------------------------------------------


def test_the_first_marker_is_seen_wherever_it_is_in_the_queue(ends: Ends) -> None:
    assert ends.inlet.marker() is None
    for element in (batch(0), Watermark(1), Marker(1, base=1), batch(1), Marker(2)):
        ends.outlet.send(element)
    ends.until(lambda: len(ends.inlet) == 5)
    assert ends.inlet.marker() == ends.inlet.marker() == Marker(1, base=1)
    ends.inlet.block()
    assert ends.inlet.marker() == Marker(1, base=1)
    ends.inlet.unblock()
    assert ends.take(3)[-1] == Marker(1, base=1)
    assert ends.inlet.marker() == Marker(2)
    assert ends.take(2) == [batch(1), Marker(2)]
    assert ends.inlet.marker() is None


def test_a_marker_overtakes_what_is_queued_and_tells_which_batches(ends: Ends) -> None:
    ahead: list[Element] = [batch(0), Watermark(1), batch(1), Lap(0, 1, True), Idle()]
    behind: list[Element] = [batch(2), Marker(2), End()]
    for element in (*ahead, Marker(1), *behind):
        ends.outlet.send(element)
    ends.until(lambda: len(ends.inlet) == 9)
    assert ends.inlet.overtake() == [batch(0), batch(1)]
    assert ends.inlet.marker() == Marker(2)
    assert len(ends.inlet) == 8
    assert ends.take(8) == ahead + behind
    assert ends.inlet.marker() is None


def test_a_marker_at_the_head_overtakes_nothing(ends: Ends) -> None:
    ends.outlet.send(Marker(1))
    ends.outlet.send(batch(0))
    ends.until(lambda: len(ends.inlet) == 2)
    assert ends.inlet.overtake() == []
    assert ends.take(1) == [batch(0)]


def test_several_markers_overtake_one_after_the_other(ends: Ends) -> None:
    for element in (batch(0), Marker(1), batch(1), Marker(2)):
        ends.outlet.send(element)
    ends.until(lambda: len(ends.inlet) == 4)
    assert ends.inlet.overtake() == [batch(0)]
    assert ends.inlet.overtake() == [batch(0), batch(1)]
    assert ends.take(2) == [batch(0), batch(1)]


def test_a_marker_overtakes_on_a_blocked_channel(ends: Ends) -> None:
    ends.outlet.send(batch(0))
    ends.outlet.send(Marker(1))
    ends.until(lambda: len(ends.inlet) == 2)
    ends.inlet.block()
    assert ends.inlet.overtake() == [batch(0)]
    assert len(ends.inlet) == 0
    ends.inlet.unblock()
    assert ends.take(1) == [batch(0)]


@pytest.mark.parametrize("ends", BOUNDED, indirect=True)
def test_a_hurried_inlet_sees_a_marker_behind_all_that_is_under_way(ends: Ends) -> None:
    sent = fill(ends)
    ends.outlet.send(Marker(1))
    ends.inlet.hurry(True)
    ends.until(lambda: ends.inlet.marker() is not None)
    assert ends.inlet.overtake() == sent
    ends.inlet.hurry(False)
    assert ends.take(len(sent)) == sent
    ends.until(lambda: not ends.outlet.full)
    assert fill(ends), "it takes more"


@pytest.mark.parametrize("ends", REMOTE, indirect=True)
def test_an_inlet_that_is_not_hurried_does_not_see_what_is_beyond_its_bound(ends: Ends) -> None:
    for hurry in ([], [True, False]):
        for on in hurry:
            ends.inlet.hurry(on)
        sent = fill(ends)
        ends.outlet.send(Marker(1))
        for _ in range(50):
            ends.turn()
        assert ends.inlet.marker() is None
        assert ends.take(len(sent) + 1) == [*sent, Marker(1)]


@pytest.mark.parametrize("ends", REMOTE, indirect=True)
def test_a_blocked_inlet_does_not_hurry(ends: Ends) -> None:
    ends.inlet.block()
    ends.inlet.hurry(True)
    sent = fill(ends)
    ends.outlet.send(Marker(1))
    for _ in range(50):
        ends.turn()
    assert ends.inlet.marker() is None
    ends.inlet.unblock()
    ends.until(lambda: ends.inlet.marker() is not None)
    assert ends.inlet.overtake() == sent


def _first_marker(elements: Iterable[Element]) -> Marker | None:
    return next((element for element in elements if isinstance(element, Marker)), None)


@pytest.mark.parametrize("seed", range(5))
def test_no_order_of_overtaking_hurrying_and_taking_loses_or_reorders(ends: Ends, seed: int) -> None:
    chance = random.Random(seed)
    under_way: list[Element] = []
    for number in range(1_500):
        match chance.randrange(8):
            case 0 | 1 if not ends.outlet.full:
                under_way.append(batch(number, rows=chance.choice([1, 10, 3_000])))
                ends.outlet.send(under_way[-1])
            case 2:
                under_way.append(chance.choice([Marker(number), Lap(0, number, True), Watermark(number)]))
                ends.outlet.send(under_way[-1])
            case 3:
                (ends.inlet.block if chance.random() < 0.3 else ends.inlet.unblock)()
            case 4:
                ends.inlet.hurry(chance.random() < 0.5)
            case 5 if (marker := ends.inlet.marker()) is not None:
                assert marker == _first_marker(under_way), f"seed {seed}"
                position = under_way.index(marker)
                assert ends.inlet.overtake() == [
                    element for element in under_way[:position] if isinstance(element, pa.RecordBatch)
                ], f"seed {seed}"
                del under_way[position]
            case 6:
                for _ in range(min(chance.randrange(8), len(ends.inlet))):
                    assert ends.inlet.take() == under_way.pop(0), f"seed {seed}"
            case _:
                ends.turn()
    ends.inlet.unblock()
    assert ends.take(len(under_way)) == under_way, f"seed {seed}"
    assert ends.inlet.marker() is None


# --- all together ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_no_order_of_sending_blocking_and_taking_loses_or_reorders(ends: Ends, seed: int) -> None:
    chance = random.Random(seed)
    under_way: deque[Element] = deque()
    number = 0
    for _ in range(1_500):
        match chance.randrange(6):
            case 0 | 1 if not ends.outlet.full:
                number += 1
                under_way.append(batch(number, rows=chance.choice([1, 10, 3_000])))
                ends.outlet.send(under_way[-1])
            case 2:
                number += 1
                under_way.append(Marker(number))
                ends.outlet.send(under_way[-1])
            case 3:
                (ends.inlet.block if chance.random() < 0.5 else ends.inlet.unblock)()
            case 4:
                ends.turn()
            case _:
                while len(ends.inlet):
                    assert ends.inlet.take() == under_way.popleft(), f"seed {seed}"
    ends.inlet.unblock()
    assert ends.take(len(under_way)) == list(under_way), f"seed {seed}"


def test_other_channels_flow_while_one_is_blocked() -> None:
    """No head-of-line blocking between channels of the same two slots: it would deadlock alignment."""
    channels = [ChannelId(edge, 0, 1) for edge in range(3)]
    with selectors.DefaultSelector() as ours, selectors.DefaultSelector() as theirs:
        sender = TcpNetwork(identity=IDENTITY, selector=ours, max_queued_bytes=BOUND_BYTES)
        receiver = TcpNetwork(identity=IDENTITY, selector=theirs, max_queued_bytes=BOUND_BYTES)
        incoming = dict.fromkeys(channels, SCHEMA)
        thread = threading.Thread(target=lambda: receiver.connect({}, incoming, deadline_s=PATIENCE_S))
        thread.start()
        sender.connect({each: (receiver.address, incoming[each]) for each in channels}, {}, deadline_s=PATIENCE_S)
        thread.join()

        def turn() -> None:
            sender.poll(0.0005)
            receiver.poll(0.0005)

        blocked, *others = [Ends(sender.outlet(channel), receiver.inlet(channel), turn) for channel in channels]
        blocked.inlet.block()
        kept = fill(blocked)
        for other in others:
            for number in range(100):
                other.outlet.send(batch(number))
                assert other.take(1) == [batch(number)]
        blocked.inlet.unblock()
        assert blocked.take(len(kept)) == kept
        sender.close()
        receiver.close()


def test_the_loopback_interface_is_where_a_slot_listens_by_default() -> None:
    with selectors.DefaultSelector() as selector:
        network = TcpNetwork(identity=IDENTITY, selector=selector)
        assert network.address[0] == "127.0.0.1"
        network.close()
        with pytest.raises(ConnectionRefusedError), socket.create_connection(network.address, timeout=1):
            pass
