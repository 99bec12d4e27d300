"""The modes of snapshots, in real processes: what is under way is kept or waited for, and slots may be killed meanwhile."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import tidegate as tg
from tests.jobs import LEDGER, RECORD, SPLITS, Ledger, check_clean, check_ledger, committed, records, until
from tests.unit.runtime.conftest import Bench
from tidegate.testing.processes import ProcessJob

MODES: dict[str, dict[str, Any]] = {
    "exactly once": {},
    "unaligned": {"mode": "unaligned"},
    "with a time-out": {"alignment_timeout": "30 ms"},
    "at least once": {"mode": "at_least_once"},
    "Chandy and Lamport": {"experimental_protocol": "chandy_lamport"},
    "stop the world": {"experimental_protocol": "stop_the_world"},
}
EXACT = [mode for mode in MODES if mode != "at least once"]
SMALL = tg.Tuning(max_batch_rows=64, heartbeat_ms=50)


class SlowLedger(Ledger):
    """Some 10,000 records a second in each slot, until the gate is open."""

    def __init__(self, gate: Path) -> None:
        self._gate = str(gate)

    def process(self, record: Any, ctx: Any) -> Any:
        if not os.path.exists(self._gate):
            time.sleep(0.0001)
        return super().process(record, ctx)


def slow_ledger(bench: Bench, job: ProcessJob, *, rows: int) -> ProcessJob:
    """The source is much faster than the ledger, so that all queues between them are full."""
    source = tg.sources.generator(records, schema=RECORD, rows=rows, splits=SPLITS)
    job.source("records", source).key_by("key").process("ledger", SlowLedger(bench.folder / "gate"), returns=LEDGER).to(
        "out", tg.sinks.parquet(bench.out))
    return job


def reports(handle: tg.Handle) -> list[Any]:
    """Of the epochs that are complete."""
    return [report for report in handle.epochs if report.completed_ms is not None]


def in_flight_bytes(handle: tg.Handle) -> int:
    return max((of.get("in_flight_bytes", 0) for report in reports(handle) for of in report.subtasks.values()), default=0)


@pytest.mark.parametrize("mode", EXACT)
def test_under_pressure_and_kills_the_output_is_that_of_a_run_without_faults(bench: Bench, mode: str) -> None:
    rows, chance = 120_000, random.Random(mode)
    handle = bench.start(slow_ledger(bench, bench.job(every="100 ms", tuning=SMALL, **MODES[mode]), rows=rows))
    for kill in range(2):
        until(lambda kill=kill: any(report.attempt == kill + 1 for report in reports(handle)), "a snapshot of the attempt",
              handle=handle)
        time.sleep(chance.uniform(0, 0.2))
        os.kill(handle.attempts[-1].slots[chance.randrange(2)], signal.SIGKILL)
        until(lambda kill=kill: len(handle.failures) == kill + 1, "the loss to be noticed", handle=handle)
    bench.open_gate()
    assert handle.wait(60) is tg.Status.FINISHED
    check_ledger(committed(bench.out), rows)
    check_clean(bench.snapshots, "job", bench.out)
    if mode in ("unaligned", "with a time-out"):
        assert in_flight_bytes(handle) > 0, "records were under way, and kept"
    if mode in ("exactly once", "stop the world"):
        assert in_flight_bytes(handle) == 0, "nothing that is under way is stored"


def test_at_least_once_nothing_is_lost(bench: Bench) -> None:
    """The ledger's numbers may be higher than there are records, never lower."""
    rows = 60_000
    handle = bench.start(slow_ledger(bench, bench.job(every="50 ms", tuning=SMALL, **MODES["at least once"]), rows=rows))
    until(lambda: len(reports(handle)) >= 2, "snapshots", handle=handle)
    os.kill(handle.attempts[-1].slots[0], signal.SIGKILL)
    until(lambda: len(handle.failures) == 1, "the loss to be noticed", handle=handle)
    bench.open_gate()
    assert handle.wait(60) is tg.Status.FINISHED
    expected: dict[int, int] = {}
    for split in range(SPLITS):
        for key in records(split, 0, (rows - split + SPLITS - 1) // SPLITS)["key"].tolist():
            expected[key] = expected.get(key, 0) + 1
    counted: dict[int, int] = {}
    for key, number, _ in committed(bench.out):
        counted[key] = max(number, counted.get(key, 0))
    assert {key: count for key, count in expected.items() if counted.get(key, 0) < count} == {}


@pytest.mark.parametrize("slots", [1, 3])
def test_records_under_way_follow_their_keys_to_other_slots(bench: Bench, slots: int) -> None:
    """Killed right behind an unaligned snapshot, and started again with other slots from just that one."""
    rows = 60_000
    handle = bench.start(slow_ledger(bench, bench.job(every="100 ms", tuning=SMALL, mode="unaligned"), rows=rows))
    until(lambda: in_flight_bytes(handle) > 0, "a snapshot with records under way", handle=handle)
    handle.cancel()
    bench.open_gate()
    again = bench.start(slow_ledger(bench, bench.job(every="100 ms", tuning=SMALL, slots=slots), rows=rows))
    assert again.wait(60) is tg.Status.FINISHED
    assert again.attempts[0].restored_epoch is not None
    check_ledger(committed(bench.out), rows)


def test_a_savepoint_has_no_records_under_way(bench: Bench) -> None:
    handle = bench.start(slow_ledger(bench, bench.job(every="100 ms", tuning=SMALL, mode="unaligned"), rows=None))
    until(lambda: in_flight_bytes(handle) > 0, "a snapshot with records under way", handle=handle)
    bench.open_gate()
    handle.savepoint(str(bench.folder / "savepoint"))
    full = [report for report in reports(handle) if report.full]
    assert full and all(of["in_flight_bytes"] == 0 for report in full for of in report.subtasks.values())
    handle.cancel()
