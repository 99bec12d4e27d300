"""The handshake of a connection: both sides prove that they know the job's secret and belong to the same attempt.

The connector sends first; each message is a length (u32) and a body, the last three followed by a MAC:

    connector → acceptor   hello      protocol, job, attempt, nonce
    acceptor → connector   challenge  job, attempt, nonce                 MAC: the acceptor knows the secret
    connector → acceptor   proof      purpose and details                 MAC: the connector knows it too
    acceptor → connector   verdict    attempt, and the reason if refused  MAC: the verdict is the acceptor's

Every MAC is HMAC-SHA256 under the secret over the message's name and all bodies so far. So it covers job, attempts,
both nonces and the purpose (which channel, which schema): no message of an earlier or another handshake can be used again,
and a message can't be sent back to its author. MACs are compared in constant time.

Fencing: the attempts must be equal. A slot of an older attempt knows the secret, proves it, and is then refused with
`WrongAttempt`.

`connecting` and `accepting` are the two sides without I/O: generators that yield what to send and how much to receive.
`Negotiation` drives one of them over a non-blocking socket on a selector, so that a listener goes through any number of
handshakes at once and a silent peer holds up no other. Everything registered on a selector has a handler as its data,
called with the ready events; `serve` is one round of that. Channels, links and the loop's wake-up pipe are registered on
it as well.

Invariants:
- Before the peer has proved anything, at most `MAX_PROOF_BYTES` are held for it.
- Whatever the peer sends, the outcome is a result or a `HandshakeError`.
- The steps ask for exact byte counts, so nothing that follows the handshake is read.

What this does not do: encrypt or sign what follows. It refuses strangers and slots of older attempts. To
exclude an attacker who can rewrite packets, use TLS or a private network. The owner of a `Negotiation` enforces time-outs.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar

from tidegate.errors import HandshakeError

PROTOCOL = "tidegate/1"
MIN_SECRET_BYTES = 16
MAX_JOB_BYTES = 256
MAX_HELLO_BYTES = 4 << 10
MAX_PROOF_BYTES = 64 << 10
MAX_REFUSAL_CHARACTERS = 2_000

_LENGTH = struct.Struct("<I")
_MAC_BYTES = 32
_NONCE_BYTES = 32

SOCKET_BUFFER_BYTES = 1 << 20
LISTEN_BACKLOG = 4_096
MAX_IN_LOBBY = 256
HANDSHAKE_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 60.0
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

Address: TypeAlias = "tuple[str, int]"
Handler: TypeAlias = Callable[[int], None]
Result = TypeVar("Result")
Steps: TypeAlias = Generator["int | bytes", bytes, Result]
"""A handshake as a generator. It yields bytes to be sent, or the number of bytes it wants to receive next."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a process must know to take part in an attempt of a job. The secret is required."""

    job: str
    attempt: int
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) < MIN_SECRET_BYTES:
            raise ValueError(f"the job's secret has {len(self.secret)} bytes; {MIN_SECRET_BYTES} is the least")
        if not 1 <= len(self.job.encode()) <= MAX_JOB_BYTES:
            raise ValueError(f"the job's id must have 1 to {MAX_JOB_BYTES} bytes: {self.job!r}")


class WrongAttempt(HandshakeError):
    """The peer belongs to another attempt of this job. If `theirs` is newer, this process must end itself."""

    def __init__(self, ours: int, theirs: int) -> None:
        super().__init__(ours, theirs)
        self.ours = ours
        self.theirs = theirs

    def __str__(self) -> str:
        return f"this is attempt {self.ours} of the job, the peer's is attempt {self.theirs}"


def connecting(identity: Identity, *, purpose: str, about: Mapping[str, Any]) -> Steps[None]:
    """The steps of the side that opened the connection. `about` is JSON with details of its purpose."""
    hello = _json_bytes(
        {
            "protocol": PROTOCOL,
            "job": identity.job,
            "attempt": identity.attempt,
            "nonce": _nonce(),
        }
    )
    yield _message(hello)

    challenge, mac = yield from _receive_signed(MAX_HELLO_BYTES)
    said = _parse(challenge)
    their_job = _field(said, "job", str)
    if their_job != identity.job:
        raise HandshakeError(f"the peer runs job {their_job[:MAX_JOB_BYTES]!r}, not {identity.job!r}")
    _check_nonce(said)
    _check_mac(mac, identity, "challenge", hello, challenge)

    proof = _json_bytes({"purpose": purpose, "about": dict(about)})
    if len(proof) > MAX_PROOF_BYTES:
        raise HandshakeError(f"what a connection is about takes {len(proof)} bytes; {MAX_PROOF_BYTES} is the most")
    yield _message(proof, _mac(identity, "proof", hello, challenge, proof))

    verdict, mac = yield from _receive_signed(MAX_PROOF_BYTES)
    _check_mac(mac, identity, "verdict", hello, challenge, proof, verdict)
    said = _parse(verdict)
    attempt = _field(said, "attempt", int)
    if attempt != identity.attempt:
        raise WrongAttempt(identity.attempt, attempt)
    if said.get("refused") is not None:
        raise HandshakeError(f"the peer refused: {said['refused']}")


def accepting(
    identity_of: Callable[[], Identity], *, purpose: str, admit: Callable[[Mapping[str, Any]], str | None]
) -> Steps[Mapping[str, Any]]:
    """The steps of the listening side. Returns `about`, unless `admit(about)` returns a reason to refuse it.

    `identity_of` is called again at the end, since the attempt may have changed meanwhile.
    """
    hello = yield from _receive(MAX_HELLO_BYTES)
    said = _parse(hello)
    protocol = _field(said, "protocol", str)
    if protocol != PROTOCOL:
        raise HandshakeError(f"the peer speaks {protocol[:MAX_JOB_BYTES]!r}, not {PROTOCOL!r}")
    their_job, their_attempt = _field(said, "job", str), _field(said, "attempt", int)
    _check_nonce(said)

    identity = identity_of()
    challenge = _json_bytes({"job": identity.job, "attempt": identity.attempt, "nonce": _nonce()})
    yield _message(challenge, _mac(identity, "challenge", hello, challenge))

    proof, mac = yield from _receive_signed(MAX_PROOF_BYTES)
    _check_mac(mac, identity, "proof", hello, challenge, proof)
    said = _parse(proof)
    their_purpose = _field(said, "purpose", str)
    about: dict[str, Any] = _field(said, "about", dict)

    attempt = identity_of().attempt
    refused: str | None
    if their_job != identity.job:
        refused = f"this is job {identity.job!r}, not {their_job!r}"
    elif their_attempt != attempt:
        refused = f"this is attempt {attempt}, not {their_attempt}"
    elif their_purpose != purpose:
        refused = f"this port is for purpose {purpose!r}, not {their_purpose!r}"
    else:
        refused = admit(about)
    verdict = _json_bytes({"attempt": attempt, "refused": refused and refused[:MAX_REFUSAL_CHARACTERS]})
    yield _message(verdict, _mac(identity, "verdict", hello, challenge, proof, verdict))

    if their_job == identity.job and their_attempt != attempt:
        raise WrongAttempt(attempt, their_attempt)
    if refused is not None:
        raise HandshakeError(f"refused the peer: {refused}")
    return about


# --- messages --------------------------------------------------------------------------------------------------------


def _message(body: bytes, mac: bytes = b"") -> bytes:
    return _LENGTH.pack(len(body) + len(mac)) + body + mac


def _receive(max_bytes: int) -> Steps[bytes]:
    (length,) = _LENGTH.unpack((yield _LENGTH.size))
    if not 0 < length <= max_bytes:
        raise HandshakeError(f"a handshake message of {length} bytes; 1 to {max_bytes} are allowed")
    return (yield length)


def _receive_signed(max_bytes: int) -> Steps[tuple[bytes, bytes]]:
    signed = yield from _receive(max_bytes + _MAC_BYTES)
    return signed[:-_MAC_BYTES], signed[-_MAC_BYTES:]


def _json_bytes(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def _parse(body: bytes) -> dict[str, Any]:
    try:
        said = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HandshakeError(f"a handshake message of {len(body)} bytes isn't JSON") from error
    if not isinstance(said, dict):
        raise HandshakeError(f"a handshake message is a JSON {type(said).__name__}, not an object")
    return said


def _field(said: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    value = said.get(name)
    if type(value) is not kind:
        raise HandshakeError(f"a handshake message has no {name!r} of type {kind.__name__}")
    return value


def _nonce() -> str:
    return secrets.token_hex(_NONCE_BYTES)


def _check_nonce(said: Mapping[str, Any]) -> None:
    if len(_field(said, "nonce", str)) != 2 * _NONCE_BYTES:
        raise HandshakeError(f"a handshake message has a nonce that isn't one of {_NONCE_BYTES} bytes")


def _mac(identity: Identity, label: str, *bodies: bytes) -> bytes:
    mac = hmac.new(identity.secret, f"{PROTOCOL} {label}\0".encode(), "sha256")
    for body in bodies:
        mac.update(_LENGTH.pack(len(body)))
        mac.update(body)
    return mac.digest()


def _check_mac(given: bytes, identity: Identity, label: str, *bodies: bytes) -> None:
    if not hmac.compare_digest(given, _mac(identity, label, *bodies)):
        raise HandshakeError(f"the peer's {label} shows that it doesn't know the secret of job {identity.job!r}")


# --- over sockets ----------------------------------------------------------------------------------------------------


def serve(selector: selectors.BaseSelector, timeout_s: float | None) -> bool:
    """Wait for events, call their handlers, and return whether there were any. If a handler raises, the remaining events
    come again in the next round."""
    ready = selector.select(timeout_s)
    for key, events in ready:
        key.data(events)
    return bool(ready)


def tune(sock: socket.socket) -> None:
    """Set the socket's options. Do this before connecting or listening, which fix the window's scale; accepted sockets
    inherit the options."""
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def listen(host: str, ports: Sequence[int] = (0,)) -> socket.socket:
    """Return a listening socket on the first of the ports that is free; 0 stands for any. Every connection must pass the
    handshake, even on loopback."""
    for port in ports[:-1]:
        try:
            return _listen(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return _listen(host, ports[-1])


def _listen(host: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        tune(sock)
        if port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(LISTEN_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def accept(listener: socket.socket, on_full: Callable[[OSError], None]) -> tuple[socket.socket, Address] | None:
    """Return the next connection, if there is one. Never raise, so that no peer can end the loop. `on_full` is called if
    this process or its host can't take another connection."""
    try:
        sock, address = listener.accept()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            on_full(error)
        return None
    sock.setblocking(False)
    return sock, address[:2]


def start_connecting(address: Address) -> socket.socket:
    """Return a socket that becomes writable once it is connected or connecting has failed."""
    # A name may have several addresses. Prefer IPv4, which `listen` uses.
    found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    family, kind, protocol, _, resolved = min(found, key=lambda each: each[0] != socket.AF_INET)
    sock = socket.socket(family, kind, protocol)
    try:
        tune(sock)
        code = sock.connect_ex(resolved)
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, os.strerror(code))
    except BaseException:
        sock.close()
        raise
    return sock


class Registration:
    """The events of one socket that a selector watches."""

    def __init__(self, selector: selectors.BaseSelector, sock: socket.socket, handler: Handler) -> None:
        self._selector = selector
        self._sock = sock
        self._handler = handler
        self._events = 0

    def watch(self, events: int) -> None:
        if events == self._events:
            return
        if not events:
            with contextlib.suppress(KeyError):  # the selector may have been closed before
                self._selector.unregister(self._sock)
        elif not self._events:
            self._selector.register(self._sock, events, self._handler)
        else:
            self._selector.modify(self._sock, events, self._handler)
        self._events = events


class Negotiation(Generic[Result]):
    """Drives the steps of a handshake over a non-blocking socket on a selector.

    Ends with exactly one call of `on_done` (which then owns the socket) or `on_failed` (the socket is closed), or with
    `abandon`. The owner enforces time-outs, with `fail`.
    """

    def __init__(
        self,
        sock: socket.socket,
        steps: Steps[Result],
        selector: selectors.BaseSelector,
        *,
        connects: bool,
        on_done: Callable[[socket.socket, Result], None],
        on_failed: Callable[[Exception], None],
    ) -> None:
        self._sock = sock
        self._steps = steps
        self._on_done = on_done
        self._on_failed = on_failed
        self._unsent = b""
        self._wanted_bytes = 0
        self._received = bytearray()
        self._started = False
        self.over = False
        self.began_s = time.monotonic()
        self._registration = Registration(selector, sock, self._handle)
        self._registration.watch(WRITE if connects else READ)

    def fail(self, error: Exception) -> None:
        if not self.over:
            self.abandon()
            self._on_failed(error)

    def abandon(self) -> None:
        if not self.over:
            self._let_go()
            self._sock.close()

    def _let_go(self) -> None:
        self.over = True
        self._registration.watch(0)
        self._steps.close()

    def _handle(self, events: int) -> None:
        if self.over:
            return
        try:
            self._run()
        except BlockingIOError:
            self._registration.watch(WRITE if self._unsent else READ)
            return
        except (HandshakeError, OSError) as error:
            self.fail(error)
            return
        except StopIteration as done:
            result = done.value
        self._let_go()
        self._on_done(self._sock, result)

    def _run(self) -> NoReturn:
        """Run until the socket would block, or the steps end."""
        if not self._started:
            code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            self._started = True
            self._take(next(self._steps))
        while True:
            while self._unsent:
                self._unsent = self._unsent[self._sock.send(self._unsent) :]
            while len(self._received) < self._wanted_bytes:
                arrived = self._sock.recv(self._wanted_bytes - len(self._received))
                if not arrived:
                    raise ConnectionResetError("the peer left before the handshake ended")
                self._received += arrived
            value, self._received, self._wanted_bytes = bytes(self._received), bytearray(), 0
            self._take(self._steps.send(value))

    def _take(self, step: int | bytes) -> None:
        if isinstance(step, int):
            self._wanted_bytes = step
        else:
            self._unsent = step


class Lobby:
    """The handshakes with peers that have connected to a listener: bounded in number and in time.

    A silent peer occupies a socket until the next `expire`, and never holds up another.
    """

    def __init__(self, selector: selectors.BaseSelector, *, timeout_s: float, max_count: int = MAX_IN_LOBBY) -> None:
        self._selector = selector
        self._timeout_s = timeout_s
        self._max_count = max_count
        self._waiting: list[Negotiation[Any]] = []  # oldest first

    def admit(
        self,
        sock: socket.socket,
        steps: Steps[Result],
        *,
        on_done: Callable[[socket.socket, Result], None],
        on_failed: Callable[[Exception], None],
    ) -> None:
        self.expire()
        if len(self._waiting) >= self._max_count:
            self._waiting.pop(0).fail(HandshakeError(f"more than {self._max_count} handshakes were under way"))
        negotiation = Negotiation(sock, steps, self._selector, connects=False, on_done=on_done, on_failed=on_failed)
        self._waiting.append(negotiation)

    def expire(self) -> None:
        """Refuse peers that have taken too long."""
        for negotiation in self._waiting:
            if not negotiation.over and time.monotonic() >= negotiation.began_s + self._timeout_s:
                negotiation.fail(HandshakeError(f"the handshake took longer than {self._timeout_s} s"))
        self._waiting = [negotiation for negotiation in self._waiting if not negotiation.over]

    def close(self) -> None:
        for negotiation in self._waiting:
            negotiation.abandon()
        self._waiting = []
