"""Control links: JSON messages between the slots and the coordinator, over one TCP connection for each slot.

A slot opens its link with `connect_link`; the driver's `LinkServer` accepts. Both then have a `Link`: non-blocking,
served by the loop that owns the selector (`handshake.serve` is one round), FIFO; no message is lost unless the link is.

Invariants:
- `on_lost` is called at most once, after every message that arrived. It is called from the loop, never within `send`, and
  never after this end's own `close`.
- Messages are handled one after the other, even if the handler of one runs the loop itself (to connect channels, for
  example). If the link is lost meanwhile, that inner loop raises `LinkLost`, so that it doesn't wait in vain.
- A peer that sends invalid data, or reads nothing until the bound of queued bytes is exceeded, loses its link. The loop
  raises nothing then: one bad slot doesn't end the driver.
- `LinkServer.identity` may be replaced when a new attempt begins. A process of an older one is refused
  with `WrongAttempt` and must end itself. Links that are up already stay; to fence their processes, close them.

What this does not do: heartbeats (which detect a stopped process or a lost host), checking what messages mean.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from tidegate.channels import frames
from tidegate.channels.frames import FrameAssembler, Kind, SendQueue
from tidegate.channels.handshake import (
    HANDSHAKE_TIMEOUT_S,
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
from tidegate.channels.refusals import Refusals
from tidegate.channels.tcp_ends import receive, transmit
from tidegate.errors import HandshakeError, ProtocolError

MAX_QUEUED_BYTES = 2 * frames.MAX_MESSAGE_BYTES
USER_TIMEOUT_MS = 60_000

_MAX_FINAL_READS = 64
_PURPOSE = "link"

Message: TypeAlias = "dict[str, Any]"


class LinkLost(ProtocolError):
    """The coordinator can't be reached, or did not answer in time."""


class Link:
    """One end of a control connection. No message arrives before `attach`; `send` works at once."""

    def __init__(
        self, sock: socket.socket, *, attempt: int, peer: Address, max_queued_bytes: int = MAX_QUEUED_BYTES
    ) -> None:
        self.attempt = attempt
        self.peer = peer
        self._sock = sock
        self._max_queued_bytes = max_queued_bytes
        self._queue = SendQueue()
        self._assembler: FrameAssembler | None = FrameAssembler(frames.link_lengths())
        self._registration: Registration | None = None
        self._on_message: Callable[[Link, Message], None] | None = None
        self._on_lost: Callable[[Link, str], None] | None = None
        self._inbox: deque[Message] = deque()
        self._handling = False
        self._failure: str | None = None
        self._closed = False
        # Unlike a channel, a link is always read. Data that isn't acknowledged within this time never will be.
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)

    def __repr__(self) -> str:
        return f"Link(peer={self.peer}, attempt={self.attempt}, {'up' if self.up else 'down'})"

    @property
    def up(self) -> bool:
        """False once it is closed or known to be lost. `send` then does nothing."""
        return not self._closed and self._failure is None

    @property
    def queued_bytes(self) -> int:
        return self._queue.byte_count

    @property
    def own_host(self) -> str:
        """The address of this end."""
        return str(self._sock.getsockname()[0])

    def attach(
        self,
        selector: selectors.BaseSelector,
        *,
        on_message: Callable[[Link, Message], None],
        on_lost: Callable[[Link, str], None],
    ) -> None:
        """Have the loop of this selector serve the link."""
        assert self._registration is None, "attached already"
        self._on_message = on_message
        self._on_lost = on_lost
        self._registration = Registration(selector, self._sock, self._handle)
        self._watch()

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue the message, and write what the socket takes. If the link is lost, the loop calls `on_lost` later."""
        buffers = frames.encode_message(message)
        if not self.up:
            return
        waiting = bool(self._queue)
        self._queue.extend(buffers)
        if not waiting:
            self._transmit()
        if self._queue.byte_count > self._max_queued_bytes:
            self._fail(f"the peer left {self._queue.byte_count} bytes of messages untaken")
        self._watch()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything is written, before `close`. Return False if that wasn't possible in time."""
        if not self.up:
            return False
        give_up_s = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._sock, WRITE)
            while self._queue:  # a loss clears it
                left_s = give_up_s - time.monotonic()
                if left_s <= 0 or not selector.select(left_s):
                    return False
                self._transmit()
        self._watch()
        return self.up

    def close(self) -> None:
        """Close the link, with a CLOSE frame if the socket takes all that is queued. No callback follows. Idempotent."""
        if self._closed:
            return
        if self._failure is None:
            self._queue.extend([frames.CLOSE_FRAME])
            with contextlib.suppress(OSError):
                transmit(self._sock, self._queue)
                self._sock.shutdown(socket.SHUT_WR)
                # To close a socket with unread bytes resets the connection, and the peer may lose the last messages.
                for _ in range(_MAX_FINAL_READS):
                    if not self._sock.recv(frames.CHUNK_BYTES):
                        break
        self._let_go()

    def _let_go(self) -> None:
        """Drop the buffer, and the callbacks and the registration, whose owners refer to the link. So a closed link holds
        little memory and isn't part of a reference cycle."""
        self._closed = True
        if self._registration is not None:
            self._registration.watch(0)
        self._sock.close()
        self._queue.clear()
        self._inbox.clear()
        self._registration = self._on_message = self._on_lost = self._assembler = None

    def _watch(self) -> None:
        if self._registration is not None and not self._closed:
            self._registration.watch(READ | WRITE if self._queue else READ)

    def _transmit(self) -> None:
        try:
            transmit(self._sock, self._queue)
        except OSError as error:
            self._fail(str(error))

    def _fail(self, reason: str) -> None:
        """Note the reason, and shut the socket down, so that the selector reports it and the loop handles the loss."""
        if self._failure is None:
            self._failure = reason
            self._queue.clear()
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def _handle(self, events: int) -> None:
        if self.up and events & WRITE:
            self._transmit()
        if not self._closed and events & READ:
            self._receive()
        self._watch()

    def _receive(self) -> None:
        ended = self._read()
        if ended is not None:
            self._failure = ended = self._failure or ended
        if self._handling:
            if ended is not None:
                self._let_go()
                raise LinkLost(f"the link to {self.peer} was lost: {ended}")
            return
        self._deliver()
        if ended is not None and not self._closed:
            on_lost = self._on_lost
            self._let_go()
            if on_lost is not None:
                on_lost(self, ended)

    def _deliver(self) -> None:
        self._handling = True
        try:
            while self._inbox and self._on_message is not None:  # `close` removes it
                self._on_message(self, self._inbox.popleft())
        finally:
            self._handling = False

    def _read(self) -> str | None:
        """Read once, and put the messages into the inbox. Return why the link has ended, if it has."""
        assert self._assembler is not None, "a closed link isn't read"
        try:
            arrived = receive(self._sock, self._assembler)
            if arrived is None:
                return "the peer's connection ended without a farewell"
            for kind, payload in arrived:
                if kind == Kind.CLOSE:
                    return "closed by the peer"
                self._inbox.append(frames.decode_message(payload))
        except (ProtocolError, OSError) as error:
            return str(error)
        return None


def connect_link(address: Address, identity: Identity, hello: Mapping[str, Any], *, timeout_s: float) -> Link:
    """Connect to a `LinkServer` and get through its handshake. Blocks for `timeout_s` at most.

    Raises `LinkLost` if there is no answer, `WrongAttempt` if this process has been superseded, `HandshakeError` if it is
    refused for another reason.
    """
    give_up_s = time.monotonic() + timeout_s
    opened: list[socket.socket] = []
    failures: list[Exception] = []
    with selectors.DefaultSelector() as selector:
        try:
            negotiation = Negotiation(
                start_connecting(address),
                connecting(identity, purpose=_PURPOSE, about=hello),
                selector,
                connects=True,
                on_done=lambda sock, _: opened.append(sock),
                on_failed=failures.append,
            )
        except OSError as error:
            raise LinkLost(f"can't reach the coordinator at {address}: {error}") from error
        while not negotiation.over:
            left_s = give_up_s - time.monotonic()
            if left_s <= 0:
                negotiation.abandon()
                raise LinkLost(f"the coordinator at {address} didn't answer within {timeout_s} s")
            serve(selector, left_s)
    for failure in failures:
        if isinstance(failure, HandshakeError):
            raise failure
        raise LinkLost(f"can't reach the coordinator at {address}: {failure}") from failure
    return Link(opened[0], attempt=identity.attempt, peer=address)


class LinkServer:
    """The coordinator's side: accepts links, each after a handshake, without ever blocking the loop."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        identity: Identity,
        *,
        bind_host: str = "127.0.0.1",
        ports: Sequence[int] = (0,),
        on_connect: Callable[[Link, Mapping[str, Any]], None],
        on_message: Callable[[Link, Message], None],
        on_lost: Callable[[Link, str], None],
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        self.identity = identity
        self._selector = selector
        self._on_connect = on_connect
        self._on_message = on_message
        self._on_lost = on_lost
        self._max_queued_bytes = max_queued_bytes
        self._links: set[Link] = set()
        self._refusals = Refusals()
        self._lobby = Lobby(selector, timeout_s=handshake_timeout_s)
        self._listener = listen(bind_host, ports)
        self.address: Address = self._listener.getsockname()[:2]
        self._listening = Registration(selector, self._listener, self._accept)
        self._listening.watch(READ)

    @property
    def links(self) -> frozenset[Link]:
        """The links that are up."""
        return frozenset(link for link in self._links if link.up)

    def close(self) -> None:
        self._listening.watch(0)
        self._listener.close()
        self._lobby.close()
        for link in self._links:
            link.close()
        self._links.clear()

    def _accept(self, events: int) -> None:
        self._lobby.expire()
        accepted = accept(self._listener, partial(self._refused, None))
        if accepted is not None:
            sock, peer = accepted
            self._lobby.admit(
                sock,
                accepting(lambda: self.identity, purpose=_PURPOSE, admit=lambda hello: None),
                on_done=partial(self._accepted, peer),
                on_failed=partial(self._refused, peer),
            )

    def _refused(self, peer: Address | None, error: Exception) -> None:
        self._refusals.add(self.identity.job, self.identity.attempt, peer, error)

    def _accepted(self, peer: Address, sock: socket.socket, hello: Mapping[str, Any]) -> None:
        link = Link(sock, attempt=self.identity.attempt, peer=peer, max_queued_bytes=self._max_queued_bytes)
        self._links = {known for known in self._links if known.up} | {link}
        link.attach(self._selector, on_message=self._received, on_lost=self._lost)
        self._on_connect(link, hello)

    def _received(self, link: Link, message: Message) -> None:
        self._lobby.expire()
        self._on_message(link, message)

    def _lost(self, link: Link, reason: str) -> None:
        self._links.discard(link)
        self._on_lost(link, reason)
