from __future__ import annotations

import gc
import os
import random
import selectors
import socket
import string
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from tidegate.channels.handshake import Identity, WrongAttempt, serve
from tidegate.channels.links import Link, LinkLost, LinkServer, connect_link
from tidegate.errors import HandshakeError, ProtocolError

SECRET = b"a secret of the job, 32 bytes xx"
PATIENCE_S = 20.0

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")


def identity(attempt: int = 1) -> Identity:
    return Identity("job", attempt, SECRET)


class Driver:
    """A link server whose loop is run by the test, and all that it was told."""

    def __init__(self, **options: Any) -> None:
        self.selector = selectors.DefaultSelector()
        self.connected: list[tuple[Link, Mapping[str, Any]]] = []
        self.messages: list[tuple[Link, dict[str, Any]]] = []
        self.lost: list[tuple[Link, str]] = []
        self.server = LinkServer(
            self.selector,
            identity(),
            on_connect=lambda link, hello: self.connected.append((link, hello)),
            on_message=lambda link, message: self.messages.append((link, message)),
            on_lost=lambda link, reason: self.lost.append((link, reason)),
            **options,
        )

    def until(self, condition: Callable[[], object]) -> None:
        give_up_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < give_up_s
            serve(self.selector, 0.01)

    def connect(self, who: Identity | None = None, hello: Mapping[str, Any] | None = None) -> Link | Exception:
        """What a slot gets that connects now. It blocks, so it does so in a thread while the driver's loop runs."""
        outcome: list[Link | Exception] = []

        def run() -> None:
            try:
                outcome.append(connect_link(self.server.address, who or identity(), hello or {}, timeout_s=PATIENCE_S))
            except ProtocolError as error:
                outcome.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        self.until(lambda: outcome)
        thread.join()
        return outcome[0]


class SlotEnd:
    """A slot's link, attached to the driver's selector, and all that it was told."""

    def __init__(self, driver: Driver, hello: Mapping[str, Any] | None = None) -> None:
        already = len(driver.connected)
        link = driver.connect(hello=hello)
        assert isinstance(link, Link), link
        self.link = link
        driver.until(lambda: len(driver.connected) > already)
        self.peer = driver.connected[-1][0]
        self.messages: list[dict[str, Any]] = []
        self.lost: list[str] = []
        link.attach(
            driver.selector,
            on_message=lambda _, message: self.messages.append(message),
            on_lost=lambda _, reason: self.lost.append(reason),
        )


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.server.close()
    driver.selector.close()


@pytest.fixture
def slot(driver: Driver) -> Iterator[SlotEnd]:
    slot = SlotEnd(driver)
    yield slot
    slot.link.close()


def test_a_slot_that_connects_is_announced_with_its_hello(driver: Driver) -> None:
    hello = {"slot": 3, "address": ["127.0.0.1", 4711], "labels": {"ü": None}}
    link = driver.connect(hello=hello)
    assert isinstance(link, Link)
    driver.until(lambda: driver.connected)
    ((peer, said),) = driver.connected
    assert said == hello
    assert peer.attempt == link.attempt == 1
    assert driver.server.links == {peer}
    link.close()


@pytest.mark.parametrize("ended", ["closed", "lost"])
def test_a_link_that_has_ended_keeps_nobody_alive(driver: Driver, ended: str) -> None:
    """Not even until garbage is collected: a slot that holds state puts that off."""
    slot = SlotEnd(driver)
    owner, peer, lost = weakref.ref(slot), slot.peer, slot.lost
    if ended == "lost":
        peer.close()
        driver.until(lambda: lost)
    slot.link.close()
    link, known = slot.link, weakref.ref(slot.link)
    gc.collect()  # of what isn't the link's own
    gc.disable()
    try:
        del slot
        assert owner() is None, "whom the callbacks refer to"
        del link
        assert known() is None
    finally:
        gc.enable()
    peer.close()


def test_messages_go_both_ways_in_order(driver: Driver, slot: SlotEnd) -> None:
    for number in range(5_000):
        slot.link.send({"up": number})
        slot.peer.send({"down": number})
    driver.until(lambda: len(driver.messages) == len(slot.messages) == 5_000)
    assert [message for _, message in driver.messages] == [{"up": number} for number in range(5_000)]
    assert slot.messages == [{"down": number} for number in range(5_000)]


def test_messages_sent_before_the_slot_listens_wait_for_it(driver: Driver) -> None:
    link = driver.connect()
    assert isinstance(link, Link)
    driver.until(lambda: driver.connected)
    driver.connected[0][0].send({"deploy": 1})
    link.send({"early": True})
    driver.until(lambda: driver.messages)
    assert driver.messages[0][1] == {"early": True}
    arrived: list[dict[str, Any]] = []
    link.attach(driver.selector, on_message=lambda _, message: arrived.append(message), on_lost=lambda _, reason: None)
    driver.until(lambda: arrived)
    assert arrived == [{"deploy": 1}]
    link.close()


def test_a_message_of_many_megabytes_passes_with_small_ones_around_it(driver: Driver, slot: SlotEnd) -> None:
    big = {"text": "".join(random.Random(7).choices(string.printable, k=10_000)) * 2_000}
    sent: list[dict[str, Any]] = [{"n": 1}, big, {"n": 2}, big, {"n": 3}]
    for message in sent:
        slot.peer.send(message)
    assert slot.peer.queued_bytes > 0
    driver.until(lambda: len(slot.messages) == len(sent))
    assert slot.messages == sent
    assert slot.peer.queued_bytes == 0


def test_many_slots_are_told_apart(driver: Driver) -> None:
    slots = [SlotEnd(driver, {"slot": index}) for index in range(8)]
    for index, slot in enumerate(slots):
        slot.link.send({"from": index})
        slot.peer.send({"to": index})
    driver.until(lambda: len(driver.messages) == 8 and all(slot.messages for slot in slots))
    index_of = {link: hello["slot"] for link, hello in driver.connected}
    assert all(index_of[link] == message["from"] for link, message in driver.messages)
    assert [slot.messages for slot in slots] == [[{"to": index}] for index in range(8)]
    for slot in slots:
        slot.link.close()


# --- who is let in ---------------------------------------------------------------------------------------------------


def test_a_slot_of_an_older_attempt_is_refused_once_a_new_one_has_begun(driver: Driver, slot: SlotEnd) -> None:
    driver.server.identity = identity(attempt=2)
    refused = driver.connect(identity(attempt=1))
    assert isinstance(refused, WrongAttempt)
    assert (refused.ours, refused.theirs) == (1, 2)
    newer = driver.connect(identity(attempt=2))
    assert isinstance(newer, Link)
    driver.until(lambda: len(driver.connected) == 2)
    assert [link.attempt for link, _ in driver.connected] == [1, 2]
    assert slot.link.up
    newer.close()


def test_a_wrong_secret_and_a_wrong_job_are_refused(driver: Driver) -> None:
    for wrong in (Identity("job", 1, b"another secret of 32 bytes xxxxx"), Identity("other", 1, SECRET)):
        assert isinstance(driver.connect(wrong), HandshakeError)
    assert driver.connected == []


def test_silent_and_noisy_strangers_neither_block_nor_break_the_loop() -> None:
    driver = Driver(handshake_timeout_s=0.05)
    strangers = [socket.create_connection(driver.server.address) for _ in range(30)]
    for stranger in strangers[::2]:
        stranger.sendall(os.urandom(200))
    slot = SlotEnd(driver)
    slot.link.send({"still": "here"})
    driver.until(lambda: driver.messages)

    def all_turned_away() -> bool:
        slot.link.send({"still": "here"})  # whatever arrives has the lobby look at the clock
        for stranger in strangers:
            stranger.setblocking(False)
            try:
                if stranger.recv(1):
                    return False
            except BlockingIOError:
                return False
            except ConnectionResetError:
                continue
        return True

    driver.until(all_turned_away)
    slot.link.close()
    for stranger in strangers:
        stranger.close()
    driver.server.close()
    driver.selector.close()


def test_nobody_at_the_address_is_a_lost_link(driver: Driver) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()
    with pytest.raises(LinkLost, match="can't reach the coordinator"):
        connect_link(address, identity(), {}, timeout_s=PATIENCE_S)


def test_a_coordinator_that_never_answers_is_a_lost_link() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(LinkLost, match=r"didn't answer within 0\.1 s"):
        connect_link(silent.getsockname(), identity(), {}, timeout_s=0.1)


# --- losing ----------------------------------------------------------------------------------------------------------


def test_a_slot_that_is_killed_is_lost_after_what_it_said(driver: Driver, slot: SlotEnd) -> None:
    slot.link.send({"last": "words"})
    slot.link._sock.shutdown(socket.SHUT_RDWR)
    driver.until(lambda: driver.lost and slot.lost)
    assert [message for _, message in driver.messages] == [{"last": "words"}]
    assert driver.lost == [(slot.peer, "the peer's connection ended without a farewell")]
    assert driver.server.links == frozenset()
    assert not slot.peer.up


def test_a_farewell_is_told_as_such_and_only_to_the_other_side(driver: Driver, slot: SlotEnd) -> None:
    slot.link.send({"last": "words"})
    slot.link.close()
    slot.link.close()
    driver.until(lambda: driver.lost)
    assert [message for _, message in driver.messages] == [{"last": "words"}]
    assert driver.lost == [(slot.peer, "closed by the peer")]
    assert slot.lost == []


def test_a_server_that_closes_takes_leave_of_every_slot(driver: Driver, slot: SlotEnd) -> None:
    driver.server.close()
    driver.until(lambda: slot.lost)
    assert slot.lost == ["closed by the peer"]
    assert driver.lost == []


def test_last_words_arrive_though_the_peer_s_were_never_read(driver: Driver, slot: SlotEnd) -> None:
    """The kernel forgets what it hasn't delivered yet when a socket with unread bytes is closed."""
    other = SlotEnd(driver)
    words = {"words": "x" * 10_000}
    capacity = 0
    while not other.link.queued_bytes:
        other.link.send(words)
        capacity += 1
    other.link.close()
    driver.until(lambda: driver.lost)
    driver.messages.clear()

    slot.peer.send({"never": "read"})
    for _ in range(capacity * 9 // 10):
        slot.link.send(words)
    assert slot.link.queued_bytes == 0
    slot.link.close()
    driver.until(lambda: len(driver.lost) == 2)
    assert [message for _, message in driver.messages] == [words] * (capacity * 9 // 10)
    assert driver.lost[-1] == (slot.peer, "closed by the peer")


def test_flush_waits_for_a_slow_reader_and_says_if_it_was_in_vain(driver: Driver, slot: SlotEnd) -> None:
    big = {"text": "x" * 20_000_000}
    slot.link.send(big)
    assert not slot.link.flush(timeout_s=0.05)
    flushed: list[bool] = []
    thread = threading.Thread(target=lambda: flushed.append(slot.link.flush(timeout_s=PATIENCE_S)))
    # The slot's end is left to the other thread alone.
    assert slot.link._registration is not None
    slot.link._registration.watch(0)
    slot.link._registration = None
    thread.start()
    driver.until(lambda: driver.messages and flushed)
    thread.join()
    assert flushed == [True]
    assert driver.messages[0][1] == big


def test_flush_of_a_link_that_is_down_is_in_vain_but_no_error(driver: Driver, slot: SlotEnd) -> None:
    slot.peer.close()
    driver.until(lambda: slot.lost)
    slot.link.send({"too": "late"})
    assert not slot.link.flush(timeout_s=PATIENCE_S)
    assert not slot.peer.flush(timeout_s=PATIENCE_S)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (struct.pack("<IB", 2**31, 6), "a MESSAGE frame of 2147483648 bytes"),
        (struct.pack("<IB", 8, 2) + bytes(8), "unknown kind 2"),
        (struct.pack("<IB", 2, 6) + b"[]", "not an object"),
        (struct.pack("<IB", 5, 6) + b"{bad}", "isn't JSON"),
    ],
)
def test_a_slot_that_speaks_nonsense_loses_its_link_and_no_other_does(
    driver: Driver, slot: SlotEnd, said: bytes, reason: str
) -> None:
    other = SlotEnd(driver)
    slot.link._sock.sendall(said)
    driver.until(lambda: driver.lost)
    assert [link for link, _ in driver.lost] == [slot.peer]
    assert reason in driver.lost[0][1]
    other.link.send({"fine": True})
    driver.until(lambda: driver.messages)
    other.link.close()


def test_a_peer_that_takes_nothing_loses_its_link_once_the_bound_is_passed() -> None:
    driver = Driver(max_queued_bytes=1_000_000)
    link = driver.connect()
    assert isinstance(link, Link)
    driver.until(lambda: driver.connected)
    peer = driver.connected[0][0]
    for _ in range(100):
        peer.send({"text": "x" * 500_000})
    assert not peer.up
    assert driver.lost == []  # never from within `send`
    driver.until(lambda: driver.lost)
    assert len(driver.lost) == 1
    assert "bytes of messages untaken" in driver.lost[0][1]
    peer.send({"into": "the void"})
    link.close()
    driver.server.close()
    driver.selector.close()


def test_a_link_may_be_closed_by_the_handler_of_its_message(driver: Driver, slot: SlotEnd) -> None:
    seen: list[dict[str, Any]] = []

    def close_at_once(link: Link, message: dict[str, Any]) -> None:
        seen.append(message)
        link.close()

    slot.peer._on_message = close_at_once
    for number in range(3):
        slot.link.send({"n": number})
    driver.until(lambda: slot.lost)
    assert seen == [{"n": 0}]
    assert driver.lost == []


def test_what_a_handler_raises_comes_out_of_the_loop_and_is_no_loss(driver: Driver, slot: SlotEnd) -> None:
    def fail(link: Link, message: dict[str, Any]) -> None:
        raise ProtocolError("a bug of the handler's")

    slot.peer._on_message = fail
    slot.link.send({})
    with pytest.raises(ProtocolError, match="a bug of the handler's"):
        driver.until(lambda: False)
    assert slot.peer.up


# --- handlers that run the loop themselves ---------------------------------------------------------------------------


def test_messages_are_handled_one_after_the_other_though_a_handler_runs_the_loop(driver: Driver, slot: SlotEnd) -> None:
    handled: list[tuple[str, int]] = []

    def wait_for_more(link: Link, message: dict[str, Any]) -> None:
        handled.append(("begin", message["n"]))
        if message["n"] < 10:
            slot.link.send({"n": message["n"] + 10})
        for _ in range(3):
            serve(driver.selector, 0.001)
        handled.append(("end", message["n"]))

    slot.peer._on_message = wait_for_more
    for number in range(3):
        slot.link.send({"n": number})
    driver.until(lambda: len(handled) == 12)
    assert handled == [(what, n) for n in (0, 1, 2, 10, 11, 12) for what in ("begin", "end")]


def test_a_handler_that_runs_the_loop_learns_that_its_link_was_lost(driver: Driver, slot: SlotEnd) -> None:
    def wait_for_ever(link: Link, message: dict[str, Any]) -> None:
        slot.link.close()
        driver.until(lambda: False)

    slot.peer._on_message = wait_for_ever
    slot.link.send({})
    with pytest.raises(LinkLost, match="closed by the peer"):
        driver.until(lambda: False)
    assert not slot.peer.up
