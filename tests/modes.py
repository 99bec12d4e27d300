"""Every mode of taking snapshots, and a job under pressure that shows their difference.

No pytest in here: slots import this module.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tidegate as tg
from tests.jobs import LEDGER, RECORD, SPLITS, GatedSource, Ledger, records
from tidegate.connectors.generator import GeneratorSource
from tidegate.runtime.job import Job
from tidegate.testing import ExperimentalSnapshots

# By a name for tests: what is given to `snapshots_of`.
MODES: dict[str, dict[str, Any]] = {
    "exactly once": {},
    "unaligned": {"mode": "unaligned"},
    "with a time-out": {"alignment_timeout": "30 ms"},
    "Chandy and Lamport": {"protocol": "chandy_lamport"},
    "stop the world": {"protocol": "stop_the_world"},
    "at least once": {"mode": "at_least_once"},
}
EXACT = [mode for mode in MODES if mode != "at least once"]
KEEPING_NOTHING = ("exactly once", "stop the world", "at least once")  # of what is under way where there is no loop


def snapshots_of(**settings: Any) -> tg.Snapshots:
    return ExperimentalSnapshots(**settings) if "protocol" in settings else tg.Snapshots(**settings)


class SlowLedger(Ledger):
    """A ledger that takes its time for every record until the gate is open."""

    def __init__(self, gate: str, pause_s: float) -> None:
        self._gate = gate
        self._pause_s = pause_s

    def process(self, record: Any, ctx: Any) -> Iterator[tuple[int, int, int]]:
        if not os.path.exists(self._gate):
            time.sleep(self._pause_s)
        return super().process(record, ctx)


def build_slow_ledger(job: Job, sink: tg.Sink, *, rows: int | None, rate: float, gate: Path, pause_s: float) -> Job:
    """Where the rate is more than the ledger can do, records queue up before it. The gate opens both."""
    source = tg.sources.generator(records, schema=RECORD, rows=rows, rate=rate, splits=SPLITS)
    assert isinstance(source, GeneratorSource)
    job.source("records", GatedSource(generator=source, gate=str(gate))).key_by("key").process(
        "ledger", SlowLedger(str(gate), pause_s), returns=LEDGER
    ).to("out", sink)
    return job
