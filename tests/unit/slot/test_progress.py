"""What a slot reports while it restores much state, or writes it."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from tidegate.channels.links import Link, LinkLost
from tidegate.control.messages import Message, Restoring, Writing
from tidegate.slot.hosting import SlotHost
from tidegate.slot.progress import RestoreProgress, WriteProgress
from tidegate.store.memory import MemoryStore


class Clock:
    def __init__(self) -> None:
        self.at_ms = 0

    def now_ms(self) -> int:
        return self.at_ms

    def monotonic_ms(self) -> int:
        return self.at_ms


def restoring() -> tuple[RestoreProgress, Clock, list[Message]]:
    store, clock, told = MemoryStore(), Clock(), list[Message]()
    store.write("state/a", [b"x" * 100])
    return RestoreProgress(3, store, tell=told.append, clock=clock, every_ms=1_000), clock, told


def test_a_restore_is_reported_at_most_once_a_heartbeat() -> None:
    progress, clock, told = restoring()
    for clock.at_ms in range(0, 3_000, 100):
        progress.store.read("state/a", 0, 10)
    assert told == [Restoring(3, 110), Restoring(3, 210)]


def test_a_restore_that_reads_nothing_reports_nothing() -> None:
    progress, clock, told = restoring()
    progress.store.read("state/a", 0, 10)
    clock.at_ms = 60_000
    assert told == []


def test_rows_that_take_long_to_load_are_signs_of_life_too() -> None:
    progress, clock, told = restoring()
    batch = pa.RecordBatch.from_pydict({"n": [1]})
    for _ in progress.rows([batch] * 3):
        clock.at_ms += 1_000
    assert told == [Restoring(3, 0)] * 3


def test_a_snapshot_is_reported_by_its_own_bytes_and_only_if_they_have_moved() -> None:
    store, told = MemoryStore(), list[Message]()
    progress = WriteProgress(3, store, tell=told.append)
    progress.begin(1)
    progress.store.write("state/a", [b"x" * 100])
    progress.report()
    progress.report()
    progress.begin(2)
    progress.begin(2)  # another subtask's part
    progress.store.write("state/b", [b"x", b"y" * 6])
    progress.report()
    assert told == [Writing(3, 1, 100), Writing(3, 2, 7)]


def test_bytes_are_counted_while_a_file_is_written() -> None:
    store, told = MemoryStore(), list[Message]()
    progress = WriteProgress(0, store, tell=told.append)
    progress.begin(1)

    def chunks() -> list[bytes]:
        return [b"x" * 100, b"y" * 100]

    for _ in progress.store._counted(chunks()):
        progress.report()
    progress.report()
    assert told == [Writing(0, 1, 100), Writing(0, 1, 200)]


def test_a_slot_whose_coordinator_is_gone_ends_its_restore() -> None:
    """Otherwise it would hold memory and disk for as long as the restore takes, beside its successor."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    link = Link(near, attempt=1, peer=("127.0.0.1", 0))
    host: Any = SimpleNamespace(link=link)
    SlotHost._tell(host, Restoring(0, 1))
    link._fail("the peer is gone")
    with pytest.raises(LinkLost, match="while this slot restored its state"):
        SlotHost._tell(host, Restoring(0, 2))
    link.close()
    far.close()
