"""The log of a job that was killed twice, as an operator reads it: what ran, why it failed, what followed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.story import check_story, lines_of

PROGRAM = """
import os, signal, sys
import tidegate as tg
from tests.jobs import build_ledger, until
from tidegate.testing.processes import ProcessJob

def complete(attempt):
    return [each for each in handle.epochs if each.attempt == attempt and each.completed_ms is not None]

job = ProcessJob(
    "story",
    slots=2,
    restart=tg.FixedDelay(attempts=5, delay="50 ms"),
    tuning=tg.Tuning(log_format="json"),
    snapshots=tg.Snapshots(to=sys.argv[1] + "/snapshots", every="100 ms"),
)
handle = build_ledger(job, tg.sinks.parquet(sys.argv[1] + "/out"), rows=None, rate=2_000).start()
for attempt in (1, 2):
    until(lambda: complete(attempt), "a snapshot", handle=handle)
    os.kill(handle.attempts[-1].slots[1], signal.SIGKILL)
    until(lambda: len(handle.failures) == attempt, "the loss to be noticed", handle=handle)
until(lambda: complete(3), "a snapshot", handle=handle)
handle.stop()
"""


def test_the_log_of_a_job_that_was_killed_twice_tells_its_story(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], stderr=subprocess.PIPE, text=True, check=True)
    lines = lines_of(ran.stderr, "story")
    assert len(lines) == len(ran.stderr.splitlines()), "every line is JSON"
    assert check_story(lines, slots=2) == "stopped"
    assert [line["delay_ms"] for line in lines if line["event"] == "restarting"] == [50, 50]
