from __future__ import annotations

import os
import pickle
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.channels.handshake import (
    MAX_HELLO_BYTES,
    MAX_PROOF_BYTES,
    Identity,
    Lobby,
    Steps,
    WrongAttempt,
    accepting,
    connecting,
    serve,
)
from tidegate.errors import HandshakeError

SECRET = b"a secret of the job, 32 bytes xx"
OURS = Identity("bid counts", 3, SECRET)
ABOUT = {"channel": [0, 1, 2], "schema": "ab" * 32}


class Side:
    """Runs the steps of one side by hand: bytes in, bytes out."""

    def __init__(self, steps: Steps[Any]) -> None:
        self._steps = steps
        self._inbox = b""
        self._wanted: int | None = None
        self.outbox = b""
        self.done = False
        self.result: Any = None
        self.error: HandshakeError | None = None
        self._advance(None)

    def hear(self, data: bytes) -> None:
        self._inbox += data
        while self._wanted is not None and len(self._inbox) >= self._wanted:
            value, self._inbox = self._inbox[: self._wanted], self._inbox[self._wanted :]
            self._advance(value)

    def _advance(self, value: bytes | None) -> None:
        self._wanted = None
        try:
            step = next(self._steps) if value is None else self._steps.send(value)
            while not isinstance(step, int):
                self.outbox += step
                step = self._steps.send(b"")
            self._wanted = step
        except StopIteration as over:
            self.done, self.result = True, over.value
        except HandshakeError as error:
            self.done, self.error = True, error


def converse(connector: Side, acceptor: Side, alter: Callable[[int, bytes], bytes] = lambda turn, data: data) -> list[bytes]:
    """Both sides talk until neither has anything to say. Gives what was said, the connector first, then in turns."""
    said: list[bytes] = []
    speaker, listener = connector, acceptor
    while speaker.outbox:
        data, speaker.outbox = alter(len(said), speaker.outbox), b""
        said.append(data)
        listener.hear(data)
        speaker, listener = listener, speaker
    return said


def connector(identity: Identity = OURS, about: Mapping[str, Any] = ABOUT, purpose: str = "channel") -> Side:
    return Side(connecting(identity, purpose=purpose, about=about))


def acceptor(identity: Identity = OURS, refuse: str | None = None) -> Side:
    return Side(accepting(lambda: identity, purpose="channel", admit=lambda about: refuse))


# --- the two sides, without sockets ----------------------------------------------------------------------------------


def test_two_who_know_the_secret_agree_on_what_the_connection_is_about() -> None:
    one, other = connector(), acceptor()
    assert len(converse(one, other)) == 4
    assert one.done
    assert one.error is None
    assert other.done
    assert other.result == ABOUT


@pytest.mark.parametrize("wrong_side", ["connector", "acceptor"])
def test_a_wrong_secret_is_refused_by_both(wrong_side: str) -> None:
    wrong = Identity(OURS.job, OURS.attempt, b"another secret of 32 bytes xxxxx")
    one, other = (connector(wrong), acceptor()) if wrong_side == "connector" else (connector(), acceptor(wrong))
    converse(one, other)
    assert "doesn't know the secret of job 'bid counts'" in str(one.error)
    assert other.result is None


def test_a_connector_that_ignores_its_doubts_is_refused_for_its_wrong_secret() -> None:
    other = acceptor()
    wrong = Identity(OURS.job, OURS.attempt, b"another secret of 32 bytes xxxxx")
    accomplice = acceptor(wrong)
    one = connector(wrong)
    hello, one.outbox = one.outbox, b""
    other.hear(hello)
    accomplice.hear(hello)
    one.hear(accomplice.outbox)
    other.hear(one.outbox)
    assert "doesn't know the secret" in str(other.error)


def test_a_wrong_job_is_refused_by_both_even_with_the_same_secret() -> None:
    one, other = connector(Identity("other job", 3, SECRET)), acceptor()
    converse(one, other)
    assert "the peer runs job 'bid counts', not 'other job'" in str(one.error)
    assert other.result is None


@pytest.mark.parametrize(("theirs", "ours"), [(2, 3), (3, 2)])
def test_a_wrong_attempt_is_refused_by_both_and_both_are_named(theirs: int, ours: int) -> None:
    one, other = connector(Identity(OURS.job, theirs, SECRET)), acceptor(Identity(OURS.job, ours, SECRET))
    converse(one, other)
    assert isinstance(one.error, WrongAttempt)
    assert (one.error.ours, one.error.theirs) == (theirs, ours)
    assert str(one.error) == f"this is attempt {theirs} of the job, the peer's is attempt {ours}"
    assert isinstance(other.error, WrongAttempt)
    assert (other.error.ours, other.error.theirs) == (ours, theirs)


def test_what_a_zombie_wants_is_not_even_considered() -> None:
    asked: list[Mapping[str, Any]] = []
    other = Side(accepting(lambda: OURS, purpose="channel", admit=lambda about: asked.append(about)))
    converse(connector(Identity(OURS.job, 2, SECRET)), other)
    assert isinstance(other.error, WrongAttempt)
    assert asked == []


def test_an_attempt_that_begins_during_a_handshake_fences_the_old_one() -> None:
    now = [OURS]
    one, other = connector(), Side(accepting(lambda: now[0], purpose="channel", admit=lambda about: None))

    def advance(turn: int, data: bytes) -> bytes:
        if turn == 2:
            now[0] = Identity(OURS.job, OURS.attempt + 1, SECRET)
        return data

    converse(one, other, advance)
    assert isinstance(one.error, WrongAttempt)
    assert one.error.theirs == OURS.attempt + 1
    assert isinstance(other.error, WrongAttempt)


def test_a_refusal_carries_its_reason_to_the_other_side() -> None:
    one, other = connector(), acceptor(refuse="no channel of that number \U0001f30a" + "ü" * 100_000)
    converse(one, other)
    assert "the peer refused: no channel of that number" in str(one.error)
    assert "no channel of that number" in str(other.error)


def test_another_purpose_is_refused() -> None:
    one, other = connector(purpose="link"), acceptor()
    converse(one, other)
    assert "this port is for purpose 'channel', not 'link'" in str(one.error)
    assert other.error is not None


def test_a_recorded_connector_convinces_no_second_acceptor() -> None:
    hello, _, proof, _ = converse(connector(), acceptor())
    replayed = acceptor()
    replayed.hear(hello)
    replayed.hear(proof)
    assert "doesn't know the secret" in str(replayed.error)


def test_a_recorded_acceptor_convinces_no_second_connector() -> None:
    _, challenge, _, _ = converse(connector(), acceptor())
    one = connector()
    one.hear(challenge)
    assert "doesn't know the secret" in str(one.error)


def test_a_verdict_of_another_handshake_is_refused() -> None:
    _, _, _, verdict = converse(connector(), acceptor())
    one = connector()
    converse(one, acceptor(refuse="no"), lambda turn, data: verdict if turn == 3 else data)
    assert "verdict shows that it doesn't know the secret" in str(one.error)


def test_a_challenge_sent_back_to_its_author_is_no_proof() -> None:
    other = acceptor()
    hello = connector().outbox
    other.hear(hello)
    other.hear(other.outbox)
    assert "doesn't know the secret" in str(other.error)


@given(st.integers(0, 3), st.data())
@settings(max_examples=200)
def test_a_changed_bit_anywhere_is_noticed(message: int, data: st.DataObject) -> None:
    def flip(turn: int, said: bytes) -> bytes:
        if turn != message:
            return said
        bit = data.draw(st.integers(0, 8 * len(said) - 1))
        changed = bytearray(said)
        changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)

    one, other = connector(), acceptor()
    converse(one, other, flip)
    # A longer length leaves the listener waiting, which is the time-out's affair; nobody is convinced.
    assert not (one.done and one.error is None)
    assert message == 3 or other.result is None


@given(st.binary(max_size=200), st.booleans())
def test_garbage_ends_in_a_handshake_error_or_in_waiting(garbage: bytes, framed: bool) -> None:
    for side in (connector(), acceptor()):
        side.hear(struct.pack("<I", len(garbage)) + garbage if framed else garbage)
        assert side.result is None
        assert not side.done or side.error is not None


@pytest.mark.parametrize(
    "hello",
    [
        b"null",
        b"[" * 4_000,
        b"{}",
        b'{"protocol":"tidegate/9"}',
        b'{"protocol":"tidegate/1","job":7}',
        b'{"protocol":"tidegate/1","job":"bid counts","attempt":true,"nonce":"00"}',
        b'{"protocol":"tidegate/1","job":"bid counts","attempt":3,"nonce":"00"}',
    ],
)
def test_a_hello_that_is_none_is_refused_without_an_answer(hello: bytes) -> None:
    other = acceptor()
    other.hear(struct.pack("<I", len(hello)) + hello)
    assert other.error is not None
    assert other.outbox == b""


@pytest.mark.parametrize("length", [0, MAX_HELLO_BYTES + 1, 2**32 - 1])
def test_a_length_out_of_bounds_is_refused_at_once(length: int) -> None:
    other = acceptor()
    other.hear(struct.pack("<I", length))
    assert f"a handshake message of {length} bytes" in str(other.error)


def test_what_a_connection_is_about_has_a_bound() -> None:
    one = connector(about={"text": "x" * MAX_PROOF_BYTES})
    converse(one, acceptor())
    assert "is the most" in str(one.error)


def test_the_secret_is_shown_nowhere() -> None:
    assert "secret" not in repr(OURS)
    assert SECRET.decode() not in repr(OURS)
    one, other = connector(), acceptor()
    assert SECRET not in b"".join(converse(one, other))


def test_an_identity_travels_in_sparks_closure() -> None:
    assert pickle.loads(pickle.dumps(OURS)) == OURS


@pytest.mark.parametrize("secret", [b"", b"fifteen bytes!!"])
def test_there_is_no_identity_without_a_secret(secret: bytes) -> None:
    with pytest.raises(ValueError, match="16 is the least"):
        Identity("job", 1, secret)


# --- over sockets ----------------------------------------------------------------------------------------------------


@pytest.fixture
def selector() -> Iterator[selectors.BaseSelector]:
    before = set(os.listdir("/proc/self/fd"))
    with selectors.DefaultSelector() as selector:
        yield selector
    assert set(os.listdir("/proc/self/fd")) <= before


class Door:
    """A lobby with sockets that knock at it."""

    def __init__(self, selector: selectors.BaseSelector, *, timeout_s: float = 30.0, max_count: int = 8) -> None:
        self.lobby = Lobby(selector, timeout_s=timeout_s, max_count=max_count)
        self.failures: list[str] = []
        self.results: list[Any] = []

    def knock(self) -> socket.socket:
        here, there = socket.socketpair()
        here.setblocking(False)
        there.settimeout(10)
        self.lobby.admit(
            here,
            accepting(lambda: OURS, purpose="channel", admit=lambda about: None),
            on_done=self._done,
            on_failed=lambda error: self.failures.append(str(error)),
        )
        return there

    def _done(self, sock: socket.socket, about: Mapping[str, Any]) -> None:
        self.results.append(about)
        sock.close()


def test_a_silent_peer_is_turned_away_after_the_time_out_and_holds_up_nobody(selector: selectors.BaseSelector) -> None:
    door = Door(selector, timeout_s=0.05)
    silent = door.knock()
    with door.knock() as polite:
        one = connector()
        while not door.results:
            if one.outbox:
                polite.sendall(one.outbox)
                one.outbox = b""
            serve(selector, 1.0)
            if not one.done:
                one.hear(polite.recv(4096))
    assert door.results == [ABOUT]
    while not door.failures:
        serve(selector, 0.01)
        door.lobby.expire()
    assert door.failures == ["the handshake took longer than 0.05 s"]
    assert silent.recv(1) == b""
    silent.close()


def test_the_oldest_in_a_crowd_of_silent_peers_has_to_leave(selector: selectors.BaseSelector) -> None:
    door = Door(selector, max_count=3)
    crowd = [door.knock() for _ in range(5)]
    assert [peer.recv(1) for peer in crowd[:2]] == [b"", b""]
    assert len(door.failures) == 2
    door.lobby.close()
    for peer in crowd:
        assert peer.recv(1) == b""
        peer.close()
    assert len(door.failures) == 2


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100, b"\xff" * 5_000])
def test_a_stranger_is_turned_away_at_once(selector: selectors.BaseSelector, said: bytes) -> None:
    door = Door(selector)
    with door.knock() as stranger:
        stranger.sendall(said)
        give_up_s = time.monotonic() + 10
        while not door.failures:
            assert time.monotonic() < give_up_s
            serve(selector, 0.1)
    assert "bytes; 1 to 4096 are allowed" in door.failures[0]


def test_a_peer_that_leaves_in_the_middle_is_forgotten(selector: selectors.BaseSelector) -> None:
    door = Door(selector)
    peer = door.knock()
    peer.sendall(connector().outbox[:20])
    peer.close()
    while not door.failures:
        serve(selector, 0.1)
    assert door.failures == ["the peer left before the handshake ended"]
    assert door.results == []
