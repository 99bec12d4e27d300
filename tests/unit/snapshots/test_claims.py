"""Claims: what they say of who made them, and that nothing depends on it."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from tidegate.snapshots.catalog import SnapshotCatalog
from tidegate.snapshots.claims import Claim, Program
from tidegate.store import layout
from tidegate.store.memory import MemoryStore


@pytest.mark.parametrize("job", ["shop", "ein\0 Name/mit \ud800 „allem“\n", ""])
def test_a_claim_is_read_as_it_was_written(job: str) -> None:
    claim = Claim.now(3, "me", Program.this(job))
    assert Claim.from_bytes(claim.to_bytes()) == claim
    assert claim.program is not None and claim.program.process == os.getpid()
    assert claim.at is not None and claim.at.endswith("Z")


def test_who_has_no_name_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Any:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr("tidegate.system_errors.getpass.getuser", nobody)
    assert Program.this("job").user == str(os.getuid())


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b'{"attempt": 1, "claimant": "x", "host": "h"}'])
def test_what_is_no_claim_counts_all_the_same(content: bytes) -> None:
    store = MemoryStore()
    first = SnapshotCatalog(store, program=Program.this("job"))
    first.claim_attempt()
    store.create(layout.attempt_name(2), content)
    assert Claim.from_bytes(content) is None
    error = first.taken_over(1)
    assert "same name and folder (attempt 2 in" in str(error)


def test_a_claim_of_an_older_version_is_one() -> None:
    store = MemoryStore()
    first = SnapshotCatalog(store, program=Program.this("job"))
    first.claim_attempt()
    store.create(layout.attempt_name(2), b'{"attempt": 2, "claimant": "somebody"}')
    assert "job 'job' was taken over by another program of the same name and folder: a program of an older version" in str(
        first.taken_over(1)
    )
    assert SnapshotCatalog(store, program=Program.this("job")).claim_attempt() == 3


def test_a_program_appears_alive_if_it_is_another_process_of_this_host(caplog: pytest.LogCaptureFixture) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    other = Program(job="job", host=socket.gethostname(), process=process.pid, user="ann")
    store = MemoryStore()
    SnapshotCatalog(store, program=other).claim_attempt()
    with caplog.at_level(logging.WARNING):
        SnapshotCatalog(store, program=Program.this("job")).claim_attempt()
        assert f"takes over from a program that is still running: host {socket.gethostname()}, process {process.pid}" in (
            caplog.text
        )
        caplog.clear()
        process.communicate(b"\n")
        assert not other.appears_alive()
        SnapshotCatalog(store, program=other).claim_attempt()
        SnapshotCatalog(store, program=Program.this("job")).claim_attempt()
        elsewhere = Program(job="job", host="elsewhere.example", process=1, user="ann")
        SnapshotCatalog(store, program=elsewhere).claim_attempt()
        SnapshotCatalog(store, program=Program.this("job")).claim_attempt()
        assert not Program.this("job").appears_alive()
    assert caplog.text == ""
