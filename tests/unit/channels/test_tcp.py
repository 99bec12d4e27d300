"""TCP channels beyond the contract of all channels: setting up, losing, leaking."""

from __future__ import annotations

import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest

from tidegate.channels import frames, tcp_ends
from tidegate.channels.elements import Element, End, Marker
from tidegate.channels.handshake import Identity, WrongAttempt
from tidegate.channels.tcp import TcpNetwork
from tidegate.channels.tcp_ends import ChannelLost, TcpInlet, TcpOutlet
from tidegate.errors import HandshakeError, ProtocolError, SchemaError
from tidegate.protocol.ids import ChannelId

SECRET = b"a secret of the job, 32 bytes xx"
IDENTITY = Identity("job", 5, SECRET)
SCHEMA = pa.schema([("n", pa.int64())])
CHANNEL = ChannelId(2, 0, 1)
PATIENCE_S = 20.0

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")


class Slot:
    """A network with its selector; `connect` runs in a thread, so that several can connect to each other."""

    def __init__(self, identity: Identity = IDENTITY, **options: float) -> None:
        self.selector = selectors.DefaultSelector()
        self.network = TcpNetwork(identity=identity, selector=self.selector, **options)  # type: ignore[arg-type]
        self.error: Exception | None = None
        self._thread: threading.Thread | None = None

    def connect(
        self,
        outgoing: dict[ChannelId, Slot],
        incoming: list[ChannelId],
        *,
        schema: pa.Schema = SCHEMA,
        deadline_s: float = PATIENCE_S,
    ) -> Slot:
        to_others = {channel: (slot.network.address, schema) for channel, slot in outgoing.items()}
        self._thread = threading.Thread(
            target=self._connect,
            args=(to_others, dict.fromkeys(incoming, schema), deadline_s),
        )
        self._thread.start()
        return self

    def _connect(
        self,
        outgoing: dict[ChannelId, tuple[tuple[str, int], pa.Schema]],
        incoming: dict[ChannelId, pa.Schema],
        deadline_s: float,
    ) -> None:
        try:
            self.network.connect(outgoing, incoming, deadline_s=deadline_s)
        except Exception as error:
            self.error = error

    def join(self) -> None:
        assert self._thread is not None
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.network.close()
        self.selector.close()


@pytest.fixture
def slots() -> Iterator[Callable[..., Slot]]:
    made: list[Slot] = []

    def make(identity: Identity = IDENTITY, **options: float) -> Slot:
        made.append(Slot(identity, **options))
        return made[-1]

    yield make
    for slot in made:
        slot.close()


@pytest.fixture
def pair(slots: Callable[..., Slot]) -> tuple[Slot, Slot, TcpOutlet, TcpInlet]:
    sender, receiver = slots(), slots()
    receiver.connect({}, [CHANNEL])
    sender.connect({CHANNEL: receiver}, [])
    for slot in (sender, receiver):
        slot.join()
        assert slot.error is None
    return sender, receiver, sender.network.outlet(CHANNEL), receiver.network.inlet(CHANNEL)


def batch(*numbers: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array(numbers, type=pa.int64())], schema=SCHEMA)


def poll_until(condition: Callable[[], object], *slots: Slot) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_s
        for slot in slots:
            slot.network.poll(0.001)


def finish(receiver: Slot, sender: Slot) -> None:
    """The receiver has gone on waiting for the right one, and here it comes."""
    sender.connect({CHANNEL: receiver}, [])
    for slot in (sender, receiver):
        slot.join()
        assert slot.error is None


def lost_by(slot: Slot) -> ChannelLost:
    """The loss that `poll` reports; and it does so once."""
    with pytest.raises(ChannelLost) as caught:
        poll_until(lambda: False, slot)
    for _ in range(3):
        slot.network.poll(0)
    return caught.value


# --- setting up ------------------------------------------------------------------------------------------------------


def test_four_slots_connect_all_to_all_on_several_edges_and_every_channel_leads_to_its_end(
    slots: Callable[..., Slot],
) -> None:
    count, edges = 4, 3
    all_slots = [slots() for _ in range(count)]
    channels = [ChannelId(edge, i, j) for edge in range(edges) for i in range(count) for j in range(count) if i != j]
    for index, slot in enumerate(all_slots):
        slot.connect(
            {c: all_slots[c.downstream] for c in channels if c.upstream == index},
            [c for c in channels if c.downstream == index],
        )
    for slot in all_slots:
        slot.join()
        assert slot.error is None
    for number, channel in enumerate(channels):
        all_slots[channel.upstream].network.outlet(channel).send(batch(number))
    for number, channel in enumerate(channels):
        inlet = all_slots[channel.downstream].network.inlet(channel)
        poll_until(lambda inlet=inlet: len(inlet), all_slots[channel.downstream])  # type: ignore[misc]
        assert inlet.take() == batch(number)


def test_strangers_don_t_keep_slots_from_connecting(slots: Callable[..., Slot]) -> None:
    sender, receiver = slots(), slots(handshake_timeout_s=0.1)
    silent = [socket.create_connection(receiver.network.address) for _ in range(20)]
    noisy = [socket.create_connection(receiver.network.address) for _ in range(20)]
    for stranger in noisy:
        stranger.sendall(os.urandom(500))
    receiver.connect({}, [CHANNEL])
    sender.connect({CHANNEL: receiver}, [])
    for slot in (sender, receiver):
        slot.join()
        assert slot.error is None
    for stranger in silent + noisy:
        stranger.close()


def test_a_stranger_alone_does_not_make_a_slot_wait_beyond_its_deadline(slots: Callable[..., Slot]) -> None:
    receiver = slots()
    with socket.create_connection(receiver.network.address):
        receiver.connect({}, [CHANNEL, ChannelId(2, 3, 1)], deadline_s=0.2).join()
    assert isinstance(receiver.error, ChannelLost)
    assert receiver.error.reason == "not connected in time: outgoing none; incoming e2:0>1, e2:3>1"


def test_a_slot_of_another_attempt_is_refused_and_told_which(slots: Callable[..., Slot]) -> None:
    zombie, receiver = slots(Identity("job", 4, SECRET)), slots()
    receiver.connect({}, [CHANNEL])
    zombie.connect({CHANNEL: receiver}, []).join()
    assert isinstance(zombie.error, WrongAttempt)
    assert str(zombie.error) == "this is attempt 4 of the job, the peer's is attempt 5"
    finish(receiver, slots())


def test_a_slot_with_another_secret_is_refused(slots: Callable[..., Slot]) -> None:
    stranger, receiver = slots(Identity("job", 5, b"another secret of 32 bytes xxxxx")), slots()
    receiver.connect({}, [CHANNEL])
    stranger.connect({CHANNEL: receiver}, []).join()
    assert "doesn't know the secret of job 'job'" in str(stranger.error)
    finish(receiver, slots())


def test_schemas_that_differ_are_an_error_on_both_sides(slots: Callable[..., Slot]) -> None:
    sender, receiver = slots(), slots()
    receiver.connect({}, [CHANNEL], schema=pa.schema([("m", pa.string())]))
    sender.connect({CHANNEL: receiver}, [])
    for slot in (sender, receiver):
        slot.join()
        assert isinstance(slot.error, HandshakeError)
        assert "channel e2:0>1 has another schema at the receiver:\nm: string" in str(slot.error)


def test_a_channel_that_the_receiver_doesn_t_know_is_refused(slots: Callable[..., Slot]) -> None:
    sender, receiver = slots(), slots()
    receiver.connect({}, [CHANNEL])
    sender.connect({ChannelId(9, 9, 9): receiver}, []).join()
    assert "[9, 9, 9] is not a channel into this slot" in str(sender.error)
    finish(receiver, slots())


def test_a_slot_that_is_gone_is_a_lost_channel(slots: Callable[..., Slot]) -> None:
    sender, gone = slots(), slots()
    gone.network.close()
    sender.connect({CHANNEL: gone}, []).join()
    assert isinstance(sender.error, ChannelLost)
    assert "can't reach" in str(sender.error)


def test_a_slot_that_never_answers_is_given_up_at_the_deadline(slots: Callable[..., Slot]) -> None:
    sender, asleep = slots(), slots()
    sender.connect({CHANNEL: asleep}, [], deadline_s=0.2).join()
    assert "not connected in time: outgoing e2:0>1; incoming none" in str(sender.error)


def test_a_slot_that_ends_during_the_handshake_is_a_lost_channel(slots: Callable[..., Slot]) -> None:
    sender = slots()
    with socket.create_server(("127.0.0.1", 0)) as dying:
        thread = threading.Thread(target=lambda: sender._connect({CHANNEL: (dying.getsockname(), SCHEMA)}, {}, 9))
        thread.start()
        connection, _ = dying.accept()
        assert connection.recv(10)
        connection.close()
        thread.join()
    assert isinstance(sender.error, ChannelLost)


def test_a_silent_stranger_is_turned_away_while_a_slot_waits_for_its_peers(slots: Callable[..., Slot]) -> None:
    receiver = slots(handshake_timeout_s=0.05).connect({}, [CHANNEL])
    with socket.create_connection(receiver.network.address, timeout=PATIENCE_S) as stranger:
        assert stranger.recv(1) == b""
    finish(receiver, slots())


def test_columns_that_can_t_travel_are_refused_before_anyone_connects(slots: Callable[..., Slot]) -> None:
    encoded = pa.schema([("d", pa.dictionary(pa.int32(), pa.string()))])
    with pytest.raises(SchemaError, match="dictionary-encoded"):
        slots().network.connect({}, {CHANNEL: encoded}, deadline_s=1.0)


def test_what_else_is_on_the_selector_is_served_while_connecting(slots: Callable[..., Slot]) -> None:
    slot = slots()
    read, write = os.pipe()
    seen: list[bytes] = []
    slot.network.register(read, lambda: seen.append(os.read(read, 100)))
    os.write(write, b"stop!")
    slot.connect({}, [CHANNEL], deadline_s=0.1).join()
    assert seen == [b"stop!"]
    for end in (read, write):
        os.close(end)


def test_a_slot_without_channels_is_connected_at_once(slots: Callable[..., Slot]) -> None:
    slots().network.connect({}, {}, deadline_s=0.0)


# --- living ----------------------------------------------------------------------------------------------------------


def test_poll_waits_no_longer_than_told_and_says_whether_anything_happened(
    pair: tuple[Slot, Slot, TcpOutlet, TcpInlet],
) -> None:
    _, receiver, outlet, inlet = pair
    assert not receiver.network.poll(0)
    outlet.send(Marker(1))
    assert receiver.network.poll(PATIENCE_S)
    assert inlet.take() == Marker(1)
    for slot in pair[:2]:
        assert not slot.network.poll(0), "an idle channel must not keep the loop busy"


def test_a_wake_up_pipe_ends_a_poll(pair: tuple[Slot, Slot, TcpOutlet, TcpInlet]) -> None:
    sender, *_ = pair
    read, write = os.pipe()
    woken: list[bytes] = []
    sender.network.register(read, lambda: woken.append(os.read(read, 1)))
    os.write(write, b"!")
    assert sender.network.poll(PATIENCE_S)
    assert woken == [b"!"]
    sender.network.unregister(read)
    os.write(write, b"!")
    assert not sender.network.poll(0)
    for end in (read, write):
        os.close(end)


def test_a_batch_of_many_megabytes_passes(pair: tuple[Slot, Slot, TcpOutlet, TcpInlet]) -> None:
    sender, receiver, outlet, inlet = pair
    sent = batch(*range(5_000_000))
    outlet.send(sent)
    assert outlet.full
    poll_until(lambda: len(inlet), sender, receiver)
    assert inlet.take() == sent
    assert not outlet.full


def test_many_small_frames_cost_few_reads(pair: tuple[Slot, Slot, TcpOutlet, TcpInlet]) -> None:
    _, receiver, outlet, inlet = pair
    for epoch in range(1_000):
        outlet.send(Marker(epoch))
    rounds = 0
    taken: list[Element] = []
    while len(taken) < 1_000:
        receiver.network.poll(PATIENCE_S)
        rounds += 1
        while len(inlet):
            taken.append(inlet.take())
    assert taken == [Marker(epoch) for epoch in range(1_000)]
    assert rounds <= 10


def test_an_inlet_reads_no_more_than_its_bound_of_elements(pair: tuple[Slot, Slot, TcpOutlet, TcpInlet]) -> None:
    sender, receiver, outlet, inlet = pair
    for epoch in range(30_000):
        outlet.send(Marker(epoch))
    for _ in range(200):
        sender.network.poll(0)
        receiver.network.poll(0)
    held = len(inlet)
    assert 1_024 < held < 20_000
    for epoch in range(30_000):
        poll_until(lambda: len(inlet), sender, receiver)
        assert inlet.take() == Marker(epoch)


def test_a_hurried_inlet_has_a_bound_too(
    pair: tuple[Slot, Slot, TcpOutlet, TcpInlet], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver, outlet, inlet = pair
    monkeypatch.setattr(tcp_ends, "MAX_HURRIED_ELEMENTS", 8_000)
    for epoch in range(60_000):
        outlet.send(Marker(epoch))
    held = []
    for on in (False, True, False):
        inlet.hurry(on)
        for _ in range(300):
            sender.network.poll(0)
            receiver.network.poll(0)
        held.append(len(inlet))
    assert 1_024 < held[0] < 8_000 < held[1] < 30_000
    assert held[2] == held[1], "it obeys its bound again"
    for epoch in range(60_000):
        poll_until(lambda: len(inlet), sender, receiver)
        assert inlet.marker() == Marker(epoch)
        assert inlet.take() == Marker(epoch)


def test_to_hurry_a_closed_inlet_changes_nothing(pair: tuple[Slot, Slot, TcpOutlet, TcpInlet]) -> None:
    _, receiver, outlet, inlet = pair
    outlet.send(Marker(1))
    poll_until(lambda: len(inlet), receiver)
    inlet.close()
    inlet.hurry(True)
    assert inlet.marker() is None
    assert not receiver.network.poll(0)


# --- losing ----------------------------------------------------------------------------------------------------------


def test_a_sender_that_ends_without_a_farewell_is_a_lost_channel_and_what_came_before_can_be_taken(
    pair: tuple[Slot, Slot, TcpOutlet, TcpInlet],
) -> None:
    _, receiver, outlet, inlet = pair
    outlet.send(batch(1))
    outlet._sock.shutdown(socket.SHUT_WR)  # what the kernel does when a process is killed
    loss = lost_by(receiver)
    assert loss.channel == CHANNEL
    assert str(loss) == "channel e2:0>1 is lost: the sender's connection ended without a farewell"
    assert isinstance(loss, ProtocolError)
    assert inlet.take() == batch(1)


def test_a_sender_that_ends_within_a_frame_is_a_lost_channel(pair: tuple[Slot, Slot, TcpOutlet, TcpInlet]) -> None:
    _, receiver, outlet, inlet = pair
    outlet._sock.send(bytes(frames.encode(Marker(1), SCHEMA)[0])[:6])
    outlet._sock.shutdown(socket.SHUT_WR)
    assert "in the middle of a frame" in lost_by(receiver).reason
    assert len(inlet) == 0


def test_a_receiver_that_ends_without_a_farewell_is_a_lost_channel(pair: tuple[Slot, Slot, TcpOutlet, TcpInlet]) -> None:
    sender, _, outlet, inlet = pair
    inlet._sock.shutdown(socket.SHUT_RDWR)
    assert lost_by(sender).channel == CHANNEL
    assert outlet.full
    outlet.send(Marker(1))
    sender.network.poll(0)


def test_a_loss_found_while_sending_is_reported_by_poll(pair: tuple[Slot, Slot, TcpOutlet, TcpInlet]) -> None:
    sender, _, outlet, inlet = pair
    outlet.send(batch(*range(100)))
    # To close with unread bytes resets the connection.
    inlet._registration.watch(0)
    inlet._sock.close()
    inlet._sock = socket.socket()
    while not outlet.full:
        outlet.send(batch(*range(1_000)))
    lost_by(sender)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (struct.pack("<IB", 2**31, 1), "a BATCH frame of 2147483648 bytes"),
        (struct.pack("<IB", 3, 77) + b"abc", "unknown kind 77"),
        (struct.pack("<IB", 2, 6) + b"{}", "unknown kind 6"),
        (struct.pack("<IB", 100, 1) + b"x" * 100, "holds no batch of the agreed schema"),
    ],
)
def test_a_sender_that_speaks_nonsense_is_a_lost_channel(
    pair: tuple[Slot, Slot, TcpOutlet, TcpInlet], said: bytes, reason: str
) -> None:
    _, receiver, outlet, _ = pair
    outlet._sock.sendall(said)
    assert reason in lost_by(receiver).reason


def test_a_batch_after_the_end_is_a_lost_channel(pair: tuple[Slot, Slot, TcpOutlet, TcpInlet]) -> None:
    _, receiver, outlet, inlet = pair
    for element in (End(), Marker(1), batch(1)):
        outlet.send(element)
    assert "a batch came after End" in lost_by(receiver).reason
    assert [inlet.take(), inlet.take()] == [End(), Marker(1)]


def test_a_receiver_that_speaks_is_a_lost_channel(pair: tuple[Slot, Slot, TcpOutlet, TcpInlet]) -> None:
    sender, _, _, inlet = pair
    inlet._sock.send(b"hello")
    assert "something other than a CLOSE frame" in lost_by(sender).reason


def test_every_lost_channel_is_reported(slots: Callable[..., Slot]) -> None:
    channels = [ChannelId(edge, 0, 1) for edge in range(4)]
    sender, receiver = slots(), slots()
    receiver.connect({}, channels)
    sender.connect(dict.fromkeys(channels, receiver), []).join()
    receiver.join()
    for channel in channels:
        sender.network.outlet(channel)._sock.shutdown(socket.SHUT_RDWR)
    lost = set()
    for _ in channels:
        with pytest.raises(ChannelLost) as caught:
            poll_until(lambda: False, receiver)
        lost.add(caught.value.channel)
    assert lost == set(channels)
    assert not receiver.network.poll(0)


# --- closing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["sender", "receiver"])
def test_a_farewell_is_no_loss(pair: tuple[Slot, Slot, TcpOutlet, TcpInlet], first: str) -> None:
    sender, receiver, outlet, inlet = pair
    outlet.send(Marker(1))
    poll_until(lambda: len(inlet), receiver)
    closing, other = (sender, receiver) if first == "sender" else (receiver, sender)
    closing.network.close()
    assert other.network.poll(PATIENCE_S)
    for _ in range(5):
        other.network.poll(0.001)


def test_to_send_after_the_receiver_s_farewell_is_a_lost_channel(pair: tuple[Slot, Slot, TcpOutlet, TcpInlet]) -> None:
    sender, _, outlet, inlet = pair
    inlet.close()
    poll_until(lambda: outlet.full, sender)
    outlet.send(Marker(1))
    assert "Marker was sent after the receiver had closed it" in lost_by(sender).reason
    outlet.send(Marker(2))
    sender.network.poll(0)


def test_a_sender_that_closes_before_all_was_taken_leaves_a_lost_channel(
    pair: tuple[Slot, Slot, TcpOutlet, TcpInlet],
) -> None:
    _, receiver, outlet, inlet = pair
    inlet.block()
    sent = 0
    while not outlet.full:
        outlet.send(batch(*range(20_000)))
        sent += 1
    outlet.close()
    inlet.unblock()
    taken: list[Element] = []

    def take_all() -> bool:
        while len(inlet):
            taken.append(inlet.take())
        return False

    with pytest.raises(ChannelLost, match="ended"):
        poll_until(take_all, receiver)
    take_all()
    assert all(element == batch(*range(20_000)) for element in taken)
    assert len(taken) < sent


def test_to_send_after_one_s_own_close_is_a_bug(pair: tuple[Slot, Slot, TcpOutlet, TcpInlet]) -> None:
    outlet = pair[2]
    outlet.close()
    with pytest.raises(AssertionError, match="closed"):
        outlet.send(Marker(1))


def test_a_network_can_be_closed_at_any_time_and_after_its_selector(slots: Callable[..., Slot]) -> None:
    slot = slots()
    slot.selector.close()
    slot.network.close()
    slot.network.close()


def test_a_slot_listens_only_until_it_is_connected(pair: tuple[Slot, Slot, TcpOutlet, TcpInlet]) -> None:
    _, receiver, _, _ = pair
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(receiver.network.address)


def test_channels_have_no_user_timeout_since_a_blocked_one_would_be_cut(
    pair: tuple[Slot, Slot, TcpOutlet, TcpInlet],
) -> None:
    for sock in (pair[2]._sock, pair[3]._sock):
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
