"""Refused connections are logged, a line a minute at most, and no line holds a secret."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time

import pytest

from tidegate.channels.handshake import Identity, serve
from tidegate.channels.links import LinkLost, LinkServer, connect_link
from tidegate.channels.refusals import Refusals
from tidegate.errors import HandshakeError

SECRET = b"a secret of the job, 32 bytes xx"

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")


def listening(selector: selectors.BaseSelector) -> LinkServer:
    return LinkServer(
        selector,
        Identity("job", 2, SECRET),
        on_connect=lambda link, hello: None,
        on_message=lambda link, message: None,
        on_lost=lambda link, reason: None,
    )


def test_a_scan_of_the_port_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    selector = selectors.DefaultSelector()
    server = listening(selector)
    for _ in range(20):
        with socket.create_connection(server.address) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            until = time.monotonic() + 0.05
            while time.monotonic() < until:
                serve(selector, 0.01)
    server.close()
    selector.close()
    (record,) = caplog.records
    assert record.name == "tidegate.channels" and record.levelno == logging.WARNING
    assert record.getMessage().startswith("Job 'job', attempt 2: a connection from ('127.0.0.1', ")
    assert vars(record)["event"] == "refused" and vars(record)["attempt"] == 2


@pytest.mark.parametrize("theirs", [Identity("job", 2, b"another secret of 32 bytes xxxxx"), Identity("job", 1, SECRET)])
def test_the_reason_is_in_the_line_and_no_secret(theirs: Identity, caplog: pytest.LogCaptureFixture) -> None:
    selector = selectors.DefaultSelector()
    server = listening(selector)

    def connect() -> None:
        with contextlib.suppress(HandshakeError, LinkLost):
            connect_link(server.address, theirs, {}, timeout_s=5.0)

    slot = threading.Thread(target=connect)
    slot.start()
    while slot.is_alive():
        serve(selector, 0.01)
    slot.join()
    for _ in range(10):
        serve(selector, 0.01)
    server.close()
    selector.close()
    (record,) = caplog.records
    line = record.getMessage()
    assert "refused" in line
    for secret in (SECRET, theirs.secret):
        assert secret.decode() not in line and secret.hex() not in line


def test_a_line_counts_those_since_the_last(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    refusals, now_s = Refusals(), [1.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    for _ in range(5):
        refusals.add("job", 1, ("h", 1), "the secret is another one")
    now_s[0] = 62.0
    refusals.add("job", 1, None, "too many open files")
    first, second = [record.getMessage() for record in caplog.records]
    assert "from ('h', 1) was refused: the secret is another one; 0 others" in first
    assert "from an unknown host was refused: too many open files; 4 others" in second
