"""The channels of a slot: a TCP connection to each subtask of another slot that it sends to or receives from.

`TcpNetwork` connects them, and serves their ends (`tcp_ends.py`) on the slot's selector. Only `TcpNetwork.poll` raises
that a channel was lost.

Kernel buffers are 1 MB each way, which was the fastest on loopback and bounds what is queued before a marker. There is no
TCP_USER_TIMEOUT on channels, on purpose: Linux counts the time during which a live receiver keeps its window shut, so a
channel that is blocked for long would be cut (tried on 6.18). A dead host is detected by the heartbeats on the control
link, and here by keepalive.

What this does not do: reconnect (a lost channel ends the attempt), TLS (a non-blocking `ssl` socket can neither gather
nor scatter, and its reads may need writes: that would be another transport with the same ports).
"""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from functools import partial
from typing import Any

import pyarrow as pa

from tidegate.channels import frames
from tidegate.channels.handshake import (
    CONNECT_TIMEOUT_S,
    HANDSHAKE_TIMEOUT_S,
    READ,
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
from tidegate.channels.refusals import Refusals
from tidegate.channels.tcp_ends import MAX_QUEUED_BYTES, ChannelLost, TcpInlet, TcpOutlet
from tidegate.errors import HandshakeError
from tidegate.protocol.ids import ChannelId

_LOBBY_ROUND_S = 0.1
_PURPOSE = "channel"


class TcpNetwork:
    """The channels of one slot in one attempt. It listens from the beginning, so that other slots can get its address.

    The selector is that of the slot's loop: `poll` and `connect` serve the control links and wake-up pipes on it, too.
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
        self._refusals = Refusals()
        self._departures: list[Negotiation[None]] = []
        self._failures: deque[Exception] = deque()
        self._registered: set[Any] = set()

    def connect(
        self,
        outgoing: Mapping[ChannelId, tuple[Address, pa.Schema]],
        incoming: Mapping[ChannelId, pa.Schema],
        *,
        deadline_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        """Set all channels up, within `deadline_s` seconds from now, or raise and close everything.

        Raises `WrongAttempt` if this slot has been superseded, `HandshakeError` if a peer refuses it for another reason,
        `ChannelLost` if a peer can't be reached. Everything else on the selector is served meanwhile. Afterwards this
        slot doesn't listen any more.
        """
        assert not outgoing.keys() & incoming.keys(), "a channel within a slot is a `MemoryChannel`"
        for schema in (*incoming.values(), *(schema for _, schema in outgoing.values())):
            frames.check_schema(schema)
        give_up_s = time.monotonic() + deadline_s
        self._expected = incoming
        try:
            self._listening.watch(READ)
            for channel, (address, schema) in outgoing.items():
                self._start_connecting(channel, address, schema)
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
        """Serve what is ready, waiting at most `timeout_s` for it. Return whether anything was.

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
        """Close everything but the selector, which belongs to the caller. Idempotent."""
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
        # The error of a failed handshake is raised as it is (WrongAttempt, for example). Others are about the connection.
        known = isinstance(error, HandshakeError)
        self._failures.append(error if known else ChannelLost(channel, f"can't reach {address}: {error}"))

    def _accept(self, events: int) -> None:
        accepted = accept(self._listener, partial(self._refused, None))
        if accepted is not None:
            sock, peer = accepted
            self._lobby.admit(
                sock,
                accepting(lambda: self._identity, purpose=_PURPOSE, admit=self._reason_to_refuse),
                on_done=self._accepted,
                on_failed=partial(self._refused, peer),
            )

    def _refused(self, peer: Address | None, error: Exception) -> None:
        self._refusals.add(self._identity.job, self._identity.attempt, peer, error)

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
            return f"{about.get('channel')} is not a channel into this slot"
        if channel in self._inlets:
            return f"channel {channel} is connected already"
        if about.get("schema") != frames.fingerprint(schema):
            reason = f"channel {channel} has another schema at the receiver:\n{schema.to_string()}"
            # The sender belongs to the attempt, so waiting for another one would be in vain.
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
