"""The modes of snapshots, in real processes: what is under way is kept or waited for, and slots may be killed meanwhile."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import pytest

import tidegate as tg
from tests.jobs import check_clean, check_ledger, check_ledger_kept, committed, until
from tests.modes import KEEPING_NOTHING, MODES, build_slow_ledger
from tests.unit.runtime.conftest import Bench

SMALL = tg.Tuning(max_batch_rows=64, heartbeat="50 ms")


def slow_ledger(bench: Bench, *, rows: int | None, every: str = "100 ms", slots: int = 2, **snapshots: Any) -> tg.Handle:
    """Some 4,000 records a second can be done in each slot, and some more than two slots can do come in."""
    return bench.start(
        build_slow_ledger(
            bench.job(every=every, tuning=SMALL, slots=slots, **snapshots),
            tg.sinks.parquet(bench.out),
            rows=rows,
            rate=12_000,
            gate=bench.folder / "gate",
            pause_s=0.0002,
        )
    )


def reports(handle: tg.Handle) -> list[Any]:
    """Of the epochs that are complete."""
    return [report for report in handle.epochs if report.completed_ms is not None]


def in_flight_bytes(handle: tg.Handle) -> int:
    return max((of.get("in_flight_bytes", 0) for report in reports(handle) for of in report.subtasks.values()), default=0)


@pytest.mark.parametrize("mode", ["exactly once", "unaligned", "with a time-out"])  # the experimental ones: tests/faults
def test_under_pressure_and_a_kill_the_output_is_that_of_a_run_without_faults(bench: Bench, mode: str) -> None:
    rows, chance = 20_000, random.Random(mode)
    handle = slow_ledger(bench, rows=rows, **MODES[mode])
    until(lambda: reports(handle), "a snapshot", handle=handle)
    if mode in ("unaligned", "with a time-out"):
        until(lambda: in_flight_bytes(handle) > 0, "a snapshot with records under way", handle=handle)
    time.sleep(chance.uniform(0, 0.2))
    os.kill(handle.attempts[-1].slots[chance.randrange(2)], signal.SIGKILL)
    until(lambda: handle.failures, "the loss to be noticed", handle=handle)
    bench.open_gate()
    assert handle.wait("1 minute") is tg.Status.FINISHED
    check_ledger(committed(bench.out), rows)
    check_clean(bench.snapshots, "job", bench.out)
    if mode in KEEPING_NOTHING:
        assert in_flight_bytes(handle) == 0, "nothing that is under way is stored"


def test_at_least_once_nothing_is_lost(bench: Bench) -> None:
    """The ledger's numbers may be higher than there are records, never lower."""
    rows = 20_000
    handle = slow_ledger(bench, rows=rows, every="50 ms", **MODES["at least once"])
    until(lambda: len(reports(handle)) >= 2, "snapshots", handle=handle)
    os.kill(handle.attempts[-1].slots[0], signal.SIGKILL)
    until(lambda: handle.failures, "the loss to be noticed", handle=handle)
    bench.open_gate()
    assert handle.wait("1 minute") is tg.Status.FINISHED
    check_ledger_kept(committed(bench.out), rows)
    assert in_flight_bytes(handle) == 0, "nothing that is under way is stored"


def test_records_under_way_follow_their_keys_to_other_slots(bench: Bench) -> None:
    """Cancelled right behind an unaligned snapshot, and started again with other slots from just that one."""
    rows = 20_000
    handle = slow_ledger(bench, rows=rows, mode="unaligned")
    until(lambda: in_flight_bytes(handle) > 0, "a snapshot with records under way", handle=handle)
    handle.cancel()
    bench.open_gate()
    again = slow_ledger(bench, rows=rows, slots=3)
    assert again.wait("1 minute") is tg.Status.FINISHED
    assert again.attempts[0].restored_epoch is not None
    check_ledger(committed(bench.out), rows)


def test_a_savepoint_has_no_records_under_way(bench: Bench) -> None:
    handle = slow_ledger(bench, rows=None, mode="unaligned")
    until(lambda: in_flight_bytes(handle) > 0, "a snapshot with records under way", handle=handle)
    bench.open_gate()
    handle.savepoint(str(bench.folder / "savepoint"))
    full = [report for report in reports(handle) if report.full]
    assert full and all(of["in_flight_bytes"] == 0 for report in full for of in report.subtasks.values())
    handle.cancel()
