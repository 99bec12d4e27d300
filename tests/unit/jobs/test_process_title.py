"""Which process is which slot: in the handle, in a failure and in `ps`."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import tidegate as tg
from tests.jobs import until
from tests.unit.jobs.conftest import Bench
from tidegate.slot.process_title import process_title


def test_slots_are_found_by_the_handle_and_by_ps(bench: Bench) -> None:
    handle = bench.ledger(rows=None, rate=1_000, name="bid counts")
    until(lambda: handle.status is tg.Status.RUNNING, "the job to run", handle=handle)
    assert [(each.slot, each.attempt, each.host) for each in handle.slots] == [
        (0, 1, socket.gethostname()),
        (1, 1, socket.gethostname()),
    ]
    assert {each.subtasks for each in handle.slots} == {("records[0]", "ledger+out[0]"), ("records[1]", "ledger+out[1]")}
    shown = subprocess.run(
        ["ps", "-o", "args=", *(f"-p{each.pid}" for each in handle.slots)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert sorted(line.rstrip() for line in shown) == [
        "tidegate slot 0 of bid counts, attempt 1",
        "tidegate slot 1 of bid counts, attempt 1",
    ]
    assert Path(f"/proc/{handle.slots[1].pid}/comm").read_text() == "tidegate slot 1\n"
    os.kill(handle.slots[1].pid, signal.SIGKILL)
    failure = until(lambda: handle.failures, "the loss", handle=handle)[0]
    assert re.match(rf"slot 1 \(host {re.escape(socket.gethostname())}, pid \d+\) was lost: ", failure.message)
    until(lambda: [each.attempt for each in handle.slots] == [2, 2], "the next attempt", handle=handle)


def test_a_title_is_put_back_and_fits_where_there_is_room() -> None:
    before = Path("/proc/self/cmdline").read_bytes(), Path("/proc/self/comm").read_text()
    with process_title(12, "a name that is far too long " * 100, 3):
        assert Path("/proc/self/cmdline").read_bytes().startswith(b"tidegate slot 12 of a name")
        assert Path("/proc/self/comm").read_text() == "tidegate slot 1\n", "15 characters"
        assert os.environ["PATH"], "the environment, which follows in memory, is as it was"
    assert (Path("/proc/self/cmdline").read_bytes(), Path("/proc/self/comm").read_text()) == before
