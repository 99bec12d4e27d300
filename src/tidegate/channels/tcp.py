"""Channels between slots: one TCP connection each, non-blocking, served by the slot's single-threaded loop.

- Sending writes at once what the socket takes and queues the rest. An outlet is `full` above a bound of queued bytes;
  it asks for writability only while something is queued.
- An inlet that is blocked, or holds more than its bound, isn't registered for reading. The kernel's buffers fill, then
  the sender's queue, and the sender finds its outlet full. Nothing is lost and no other channel waits.
- A hurried inlet has a bound that is larger than all that can be under way when a marker is sent, so the marker comes.
  It is a bound all the same: a sender whose marker is late would otherwise fill this slot's memory meanwhile.
- Each side says farewell (a CLOSE frame) when it closes. A connection that ends otherwise is lost, which each end
  reports once; `TcpNetwork.poll`, and nothing else, raises it. Elements received before stay available.

Kernel buffers are 1 MB each way: measured best on loopback, and what lies before a marker stays bounded. There is no
TCP_USER_TIMEOUT on channels, on purpose: Linux counts the time during which a live receiver keeps its window shut, so a
channel that is blocked for long would be cut (tried on 6.18). A dead host shows by the heartbeats on the control link,
and here by keepalive.

What this does not do: reconnect (a lost channel ends the attempt), TLS (a non-blocking `ssl` socket can neither gather
nor scatter, and its reads may want writes: that is another transport, behind the same ports).
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from enum import Enum
from functools import partial
from typing import Any

import pyarrow as pa

from tidegate.channels import frames
from tidegate.channels.elements import Element, End, Marker, overtaken
from tidegate.channels.frames import FrameAssembler, Kind, SendQueue
from tidegate.channels.handshake import (
    READ,
    WRITE,
    Address,
    Identity,
    Lobby,
    Negotiation,
    Registration,
    accept,
    accepting,
    connecting,
    listen,
    serve,
    start_connecting,
)
from tidegate.errors import HandshakeError, ProtocolError
from tidegate.protocol.ids import ChannelId

MAX_QUEUED_BYTES = 4 << 20
MAX_QUEUED_ELEMENTS = 1_024
MAX_HURRIED_BYTES = 64 << 20
MAX_HURRIED_ELEMENTS = 64 << 10
HANDSHAKE_TIMEOUT_S = 10.0
_LOBBY_ROUND_S = 0.1

_PURPOSE = "channel"
_log = logging.getLogger(__name__)


class ChannelLost(ProtocolError):
    """The connection of a channel ended without a farewell, or carried what it must not. The attempt can't go on."""

    def __init__(self, channel: ChannelId, reason: str) -> None:
        super().__init__(channel, reason)
        self.channel = channel
        self.reason = reason

    def __str__(self) -> str:
        return f"channel {self.channel} is lost: {self.reason}"


def receive(sock: socket.socket, assembler: FrameAssembler) -> list[frames.Frame] | None:
    """What one read brings; None at the end of the stream."""
    buffers = assembler.buffers()
    try:
        count = sock.recv_into(buffers[0]) if len(buffers) == 1 else sock.recvmsg_into(buffers)[0]
    except BlockingIOError:
        return []
    return assembler.advance(count) if count else None


def transmit(sock: socket.socket, queue: SendQueue) -> None:
    """Write what the socket takes."""
    try:
        while queue:
            queue.advance(sock.sendmsg(queue.head()))
    except BlockingIOError:
        return


class _End(Enum):
    """What became of a connection, as one of its ends knows."""

    OPEN = "open"
    CLOSED_HERE = "closed here"
    CLOSED_THERE = "closed by the other side"
    LOST = "lost"


# --- the two ends of a channel ---------------------------------------------------------------------------------------


class TcpOutlet:
    """The sending end. It listens too: that is how the other side's farewell, or its end, shows."""

    def __init__(
        self,
        channel: ChannelId,
        schema: pa.Schema,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        *,
        on_lost: Callable[[ChannelLost], None],
        max_queued_bytes: int = MAX_QUEUED_BYTES,
        max_batch_bytes: int = frames.MAX_BATCH_BYTES,
    ) -> None:
        self.channel = channel
        self._schema = schema
        self._sock = sock
        self._on_lost = on_lost
        self._max_queued_bytes = max_queued_bytes
        self._max_batch_bytes = max_batch_bytes
        self._queue = SendQueue()
        self._heard = b""
        self._end = _End.OPEN
        self._registration = Registration(selector, sock, self._handle)
        self._registration.watch(READ)

    @property
    def full(self) -> bool:
        """Also once the channel is lost: whatever is sent then goes nowhere, and the loop is about to find out."""
        return self._queue.byte_count > self._max_queued_bytes or self._end is not _End.OPEN

    @property
    def queued_bytes(self) -> int:
        return self._queue.byte_count

    def send(self, element: Element) -> None:
        assert self._end is not _End.CLOSED_HERE, f"channel {self.channel} is closed"
        if self._end is _End.CLOSED_THERE:
            self._lose(f"{type(element).__name__} was sent after the receiver had closed it")
        if self._end is _End.LOST:
            return
        waiting = bool(self._queue)
        self._queue.extend(frames.encode(element, self._schema, max_batch_bytes=self._max_batch_bytes))
        if not waiting:
            self._transmit()

    def close(self) -> None:
        """With a farewell, if the socket takes all that is queued; else the other side will find the channel lost."""
        if self._end is _End.OPEN:
            self._queue.extend([frames.CLOSE_FRAME])
            with contextlib.suppress(OSError):
                transmit(self._sock, self._queue)
            self._let_go()
        self._end = _End.CLOSED_HERE

    def _handle(self, events: int) -> None:
        if self._end is _End.OPEN and events & READ:
            self._hear()
        if self._end is _End.OPEN and events & WRITE:
            self._transmit()

    def _transmit(self) -> None:
        try:
            transmit(self._sock, self._queue)
        except OSError as error:
            self._lose(str(error))
        else:
            self._registration.watch(READ | WRITE if self._queue else READ)

    def _hear(self) -> None:
        try:
            arrived = self._sock.recv(len(frames.CLOSE_FRAME))
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(str(error))
            return
        self._heard += arrived
        if not arrived:
            self._lose("the receiver's connection ended without a farewell")
        elif not frames.CLOSE_FRAME.startswith(self._heard):
            self._lose("the receiver said something else than farewell")
        elif self._heard == frames.CLOSE_FRAME and self._queue:
            self._lose(f"the receiver closed it before taking {self._queue.byte_count} queued bytes")
        elif self._heard == frames.CLOSE_FRAME:
            self._let_go()
            self._end = _End.CLOSED_THERE

    def _lose(self, reason: str) -> None:
        self._let_go()
        self._end = _End.LOST
        self._on_lost(ChannelLost(self.channel, reason))

    def _let_go(self) -> None:
        self._registration.watch(0)
        self._sock.close()
        self._queue.clear()


class TcpInlet:
    """The receiving end. Reads while it is neither blocked nor over its bound, and again below half the bound."""

    def __init__(
        self,
        channel: ChannelId,
        schema: pa.Schema,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        *,
        on_lost: Callable[[ChannelLost], None],
        max_queued_bytes: int = MAX_QUEUED_BYTES,
        max_queued_elements: int = MAX_QUEUED_ELEMENTS,
        max_batch_bytes: int = frames.MAX_BATCH_BYTES,
    ) -> None:
        self.channel = channel
        self.blocked = False
        self._schema = schema
        self._sock = sock
        self._on_lost = on_lost
        self._bounds = (max_queued_bytes, max_queued_elements)
        self._max_bytes, self._max_elements = self._bounds  # now: larger while hurried
        self._assembler = FrameAssembler(frames.channel_lengths(max_batch_bytes))
        self._queue: deque[tuple[Element, int]] = deque()
        self._queued_bytes = 0
        self._markers: deque[Marker] = deque()  # those in the queue
        self._over_bound = False
        self._hurried = False
        self._ended = False
        self._end = _End.OPEN
        self._registration = Registration(selector, sock, self._handle)
        self._registration.watch(READ)

    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes

    def __len__(self) -> int:
        return 0 if self.blocked else len(self._queue)

    def peek(self) -> Element | None:
        return self._queue[0][0] if self._queue and not self.blocked else None

    def take(self) -> Element:
        assert not self.blocked, f"channel {self.channel} is blocked"
        element, element_bytes = self._queue.popleft()
        self._queued_bytes -= element_bytes
        if self._markers and element is self._markers[0]:
            self._markers.popleft()
        if self._over_bound:
            self._read_on_below_half()
        return element

    def marker(self) -> Marker | None:
        return self._markers[0] if self._markers else None

    def overtake(self) -> list[pa.RecordBatch]:
        position, batches = overtaken(element for element, _ in self._queue)
        self._queued_bytes -= self._queue[position][1]
        del self._queue[position]
        self._markers.popleft()
        if self._over_bound:
            self._read_on_below_half()
        return batches

    def hurry(self, on: bool) -> None:
        self._hurried = on
        max_bytes, max_elements = self._bounds
        self._max_bytes = max(max_bytes, MAX_HURRIED_BYTES) if on else max_bytes
        self._max_elements = max(max_elements, MAX_HURRIED_ELEMENTS) if on else max_elements
        self._over_bound = self._is_over_bound()
        self._watch()

    def block(self) -> None:
        self.blocked = True
        self._watch()

    def unblock(self) -> None:
        self.blocked = False
        self._watch()

    def close(self) -> None:
        """Drops what was not taken, and says farewell."""
        if self._end is _End.OPEN:
            with contextlib.suppress(OSError):
                self._sock.send(frames.CLOSE_FRAME)
            self._let_go()
        self._end = _End.CLOSED_HERE
        self._queue.clear()
        self._markers.clear()
        self._queued_bytes = 0

    def _is_over_bound(self) -> bool:
        return self._queued_bytes > self._max_bytes or len(self._queue) > self._max_elements

    def _read_on_below_half(self) -> None:
        if self._queued_bytes <= self._max_bytes // 2 and len(self._queue) <= self._max_elements // 2:
            self._over_bound = False
            self._watch()

    def _watch(self) -> None:
        if self._end is _End.OPEN:
            self._registration.watch(0 if self.blocked or self._over_bound else READ)

    def _handle(self, events: int) -> None:
        # Events of a round may be stale: a handler before this one may have blocked or closed this channel.
        if self._end is not _End.OPEN or self.blocked:
            return
        # A hurried channel is read until its marker is there, or nothing more: a busy loop comes by here seldom.
        while self._read() and self._hurried and not self._markers and not self._is_over_bound():
            pass
        if self._is_over_bound():
            self._over_bound = True
            self._watch()

    def _read(self) -> bool:
        """One piece; whether there was any."""
        before = self._assembler.byte_count
        try:
            arrived = receive(self._sock, self._assembler)
            if arrived is None:
                where = "in the middle of a frame" if self._assembler.partial else "without a farewell"
                raise ProtocolError(f"the sender's connection ended {where}")
            for kind, payload in arrived:
                if kind == Kind.CLOSE:
                    self._let_go()
                    self._end = _End.CLOSED_THERE
                    return False
                self._append(frames.decode(kind, payload, self._schema), len(payload))
        except (ProtocolError, OSError) as error:
            self._let_go()
            self._end = _End.LOST
            self._on_lost(ChannelLost(self.channel, str(error)))
            return False
        return self._assembler.byte_count > before

    def _append(self, element: Element, element_bytes: int) -> None:
        if isinstance(element, pa.RecordBatch):
            if self._ended:
                raise ProtocolError("a batch came after End")
        elif isinstance(element, Marker):
            self._markers.append(element)
        elif isinstance(element, End):
            self._ended = True
        self._queue.append((element, element_bytes))
        self._queued_bytes += element_bytes

    def _let_go(self) -> None:
        self._registration.watch(0)
        self._sock.close()


# --- all channels of a slot ------------------------------------------------------------------------------------------


class TcpNetwork:
    """The channels of one slot in one attempt. Listens from the beginning, so that its address can be given to others.

    The selector is the loop's: control links and wake-up pipes on it are served by `poll`, and by `connect` as well.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        selector: selectors.BaseSelector,
        bind_host: str = "127.0.0.1",
        ports: Sequence[int] = (0,),
        max_queued_bytes: int = MAX_QUEUED_BYTES,
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
    ) -> None:
        self._identity = identity
        self._selector = selector
        self._max_queued_bytes = max_queued_bytes
        self._listener = listen(bind_host, ports)
        self._listening = Registration(selector, self._listener, self._accept)
        self.address: Address = self._listener.getsockname()[:2]
        self._outlets: dict[ChannelId, TcpOutlet] = {}
        self._inlets: dict[ChannelId, TcpInlet] = {}
        self._expected: Mapping[ChannelId, pa.Schema] = {}
        self._lobby = Lobby(selector, timeout_s=handshake_timeout_s)
        self._departures: list[Negotiation[None]] = []
        self._failures: deque[Exception] = deque()
        self._registered: set[Any] = set()

    def connect(
        self,
        outgoing: Mapping[ChannelId, Address],
        incoming: Mapping[ChannelId, pa.Schema],
        outgoing_schemas: Mapping[ChannelId, pa.Schema],
        *,
        deadline_s: float,
    ) -> None:
        """Set all channels up, within `deadline_s` seconds from now, or raise and close everything.

        Raises `WrongAttempt` where this slot has been superseded, `HandshakeError` where it doesn't fit to a peer
        otherwise, `ChannelLost` where a peer isn't there. Everything else on the selector is served meanwhile.
        Afterwards this slot listens no more.
        """
        assert outgoing.keys() == outgoing_schemas.keys()
        assert not outgoing.keys() & incoming.keys(), "a channel within a slot is a `MemoryChannel`"
        for schema in (*incoming.values(), *outgoing_schemas.values()):
            frames.check_schema(schema)
        give_up_s = time.monotonic() + deadline_s
        self._expected = incoming
        try:
            self._listening.watch(READ)
            for channel, address in outgoing.items():
                self._start_connecting(channel, address, outgoing_schemas[channel])
            self._await(wanted_outlets=outgoing.keys(), wanted_inlets=incoming.keys(), give_up_s=give_up_s)
        except BaseException:
            self.close()
            raise
        self._stop_listening()

    def outlet(self, channel: ChannelId) -> TcpOutlet:
        return self._outlets[channel]

    def inlet(self, channel: ChannelId) -> TcpInlet:
        return self._inlets[channel]

    def poll(self, timeout_s: float) -> bool:
        """Serve what is ready, waiting at most `timeout_s` for something to be. True if something was.

        Raises `ChannelLost`, one in each call, after serving everything.
        """
        happened = serve(self._selector, 0 if self._failures else timeout_s)
        if self._failures:
            raise self._failures.popleft()
        return happened

    def register(self, fileobj: Any, callback: Callable[[], None]) -> None:
        """Have `poll` call back while `fileobj` is readable, until `unregister` or `close`."""
        self._selector.register(fileobj, READ, lambda events: callback())
        self._registered.add(fileobj)

    def unregister(self, fileobj: Any) -> None:
        self._selector.unregister(fileobj)
        self._registered.remove(fileobj)

    def close(self) -> None:
        """Idempotent. The selector stays open, it isn't ours."""
        self._stop_listening()
        for outlet in self._outlets.values():
            outlet.close()
        for inlet in self._inlets.values():
            inlet.close()
        for fileobj in tuple(self._registered):
            self.unregister(fileobj)

    def _start_connecting(self, channel: ChannelId, address: Address, schema: pa.Schema) -> None:
        about = {"channel": [channel.edge, channel.upstream, channel.downstream], "schema": frames.fingerprint(schema)}
        try:
            sock = start_connecting(address)
        except OSError as error:
            raise ChannelLost(channel, f"can't reach {address}: {error}") from error
        steps = connecting(self._identity, purpose=_PURPOSE, about=about)
        self._departures.append(
            Negotiation(
                sock,
                steps,
                self._selector,
                connects=True,
                on_done=partial(self._connected, channel, schema),
                on_failed=partial(self._not_connected, channel, address),
            )
        )

    def _connected(self, channel: ChannelId, schema: pa.Schema, sock: socket.socket, _: None) -> None:
        self._outlets[channel] = TcpOutlet(
            channel, schema, sock, self._selector, on_lost=self._failures.append, max_queued_bytes=self._max_queued_bytes
        )

    def _not_connected(self, channel: ChannelId, address: Address, error: Exception) -> None:
        # A handshake that failed says what is wrong, the attempt above all; anything else is about this connection.
        known = isinstance(error, HandshakeError)
        self._failures.append(error if known else ChannelLost(channel, f"can't reach {address}: {error}"))

    def _accept(self, events: int) -> None:
        accepted = accept(self._listener)
        if accepted is not None:
            sock, peer = accepted
            self._lobby.admit(
                sock,
                accepting(lambda: self._identity, purpose=_PURPOSE, admit=self._reason_to_refuse),
                on_done=self._accepted,
                on_failed=lambda error: _log.warning("a connection from %s was turned away: %s", peer, error),
            )

    def _await(self, *, wanted_outlets: Set[ChannelId], wanted_inlets: Set[ChannelId], give_up_s: float) -> None:
        while not (wanted_outlets <= self._outlets.keys() and wanted_inlets <= self._inlets.keys()):
            if self._failures:
                raise self._failures.popleft()
            left_s = give_up_s - time.monotonic()
            if left_s <= 0:
                out, into = wanted_outlets - self._outlets.keys(), wanted_inlets - self._inlets.keys()
                raise ChannelLost(min(out | into), f"not connected in time: outgoing {_some(out)}; incoming {_some(into)}")
            serve(self._selector, min(left_s, _LOBBY_ROUND_S))
            self._lobby.expire()

    def _stop_listening(self) -> None:
        self._listening.watch(0)
        self._listener.close()
        self._lobby.close()
        for departure in self._departures:
            departure.abandon()
        self._departures = []

    def _reason_to_refuse(self, about: Mapping[str, Any]) -> str | None:
        channel = _channel_in(about)
        schema = self._expected.get(channel) if channel is not None else None
        if schema is None:
            return f"{about.get('channel')} is no channel into this slot"
        if channel in self._inlets:
            return f"channel {channel} is connected already"
        if about.get("schema") != frames.fingerprint(schema):
            reason = f"channel {channel} has another schema at the receiver:\n{schema.to_string()}"
            # The sender is one of us, so waiting for another one would be in vain.
            self._failures.append(HandshakeError(reason))
            return reason
        return None

    def _accepted(self, sock: socket.socket, about: Mapping[str, Any]) -> None:
        channel = _channel_in(about)
        assert channel is not None
        if channel in self._inlets:
            sock.close()
            return
        self._inlets[channel] = TcpInlet(
            channel,
            self._expected[channel],
            sock,
            self._selector,
            on_lost=self._failures.append,
            max_queued_bytes=self._max_queued_bytes,
        )


def _channel_in(about: Mapping[str, Any]) -> ChannelId | None:
    numbers = about.get("channel")
    if not isinstance(numbers, list) or len(numbers) != 3 or not all(type(number) is int for number in numbers):
        return None
    return ChannelId(*numbers)


def _some(channels: Collection[ChannelId]) -> str:
    shown = ", ".join(str(channel) for channel in sorted(channels)[:8])
    return f"{shown} and {len(channels) - 8} more" if len(channels) > 8 else shown or "none"
