"""Jobs whose snapshots are in S3, behind a network and a server that fail: killed, restored, and with zombies."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator

import pyarrow.parquet as pq
import pytest
from pyarrow import fs as pafs

import tidegate as tg
from tests.jobs import alive, build_ledger, check_clean, check_ledger, committed, completed, until
from tests.servers.s3 import Fault, FaultyProxy, S3Server
from tests.unit.jobs.conftest import Bench
from tests.unit.jobs.test_killed_slots import QUICK, UnreachableJob
from tidegate.connectors.folders import locate
from tidegate.driver import coordinator
from tidegate.snapshots.catalog import SnapshotCatalog
from tidegate.store.layout import job_address
from tidegate.store.opening import open_store
from tidegate.testing.processes import ProcessJob

FAULTS = (Fault.SLOW_DOWN, Fault.ERROR, Fault.RESET, Fault.LOSE_ANSWER, Fault.TEAR_REQUEST, Fault.TEAR_ANSWER, Fault.STALL)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


def ledger(bench: Bench, address: str, *, rows: int, make: type[ProcessJob] = ProcessJob) -> tg.Handle:
    job = make(
        "job",
        slots=2,
        restart=tg.FixedDelay(attempts=20, delay=0),
        tuning=QUICK,
        snapshots=tg.Snapshots(to=address, every="100 ms", tolerable_failures=20),
    )
    return bench.start(build_ledger(job, tg.sinks.parquet(bench.out), rows=rows, rate=rows / 4, gate=bench.folder / "gate"))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 10))])
def test_slots_that_are_killed_while_requests_fail_change_nothing(bench: Bench, server: S3Server, seed: int) -> None:
    rows, chance = 8_000, random.Random(seed)
    direct = server.address(f"bucket/killed-{seed}")
    with FaultyProxy(
        server.port, lambda request: chance.choice(FAULTS) if chance.random() < 0.05 else None, stall_s=0.2
    ) as proxy:
        handle = ledger(bench, proxy.address(f"bucket/killed-{seed}"), rows=rows)
        for kill in range(2):
            until(
                lambda kill=kill: (
                    len(handle.attempts) > kill
                    and handle.status is tg.Status.RUNNING
                    and any(each.attempt == handle.attempts[-1].attempt and each.completed_ms for each in handle.epochs)
                ),
                "a snapshot of the new attempt",
                handle=handle,
            )
            failures = len(handle.failures)
            os.kill(handle.attempts[-1].slots[chance.randrange(2)], signal.SIGKILL)
            until(lambda failures=failures: len(handle.failures) > failures, "the loss to be noticed", handle=handle)
        bench.open_gate()
        assert handle.wait("1 minute") is tg.Status.FINISHED, f"seed {seed}"
    check_ledger(committed(bench.out), rows)
    check_clean(direct, "job", bench.out)


def test_a_zombie_that_goes_on_writing_to_s3_changes_nothing(
    bench: Bench, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "GONE_TIMEOUT_MS", 200)
    rows, address = 8_000, server.address("bucket/zombies")
    handle = ledger(bench, address, rows=rows, make=UnreachableJob)
    until(lambda: completed(handle), "a snapshot", handle=handle)
    zombies = list(handle.attempts[-1].slots.values())
    until(lambda: handle.epochs[-1].completed_ms is None, "an epoch under way", handle=handle)
    for pid in zombies:
        os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: [e for e in handle.epochs if e.attempt == 2 and e.completed_ms], "a new snapshot", handle=handle)
        assert all(map(alive, zombies))
    finally:
        for pid in zombies:
            os.kill(pid, signal.SIGCONT)
    until(lambda: not any(map(alive, zombies)), "the zombies to end themselves")
    bench.open_gate()
    assert handle.wait("1 minute") is tg.Status.FINISHED
    check_ledger(committed(bench.out), rows)
    SnapshotCatalog(open_store(job_address(address, "job"))).manifests()


def test_a_driver_that_takes_over_fences_the_old_one_off(bench: Bench, server: S3Server) -> None:
    address = server.address("bucket/two-drivers")
    old = ledger(bench, address, rows=4_000)
    until(lambda: completed(old), "a snapshot", handle=old)
    new = ledger(bench, address, rows=4_000)
    with pytest.raises(tg.JobFailed, match="taken over"):
        old.wait("1 minute")
    bench.open_gate()
    assert new.wait("1 minute") is tg.Status.FINISHED
    check_ledger(committed(bench.out), 4_000)


def test_parquet_output_in_s3_is_that_of_a_run_without_faults(bench: Bench, server: S3Server) -> None:
    rows, out = 4_000, server.address("bucket/out")
    snapshots = tg.Snapshots(to=server.address("bucket/with-output"), every="100 ms")
    job = ProcessJob("job", slots=2, restart=tg.FixedDelay(attempts=5, delay=0), tuning=QUICK, snapshots=snapshots)
    handle = bench.start(build_ledger(job, tg.sinks.parquet(out), rows=rows, rate=rows / 4, gate=bench.folder / "gate"))
    until(lambda: len(completed(handle)) > 1, "output of complete snapshots", handle=handle)
    os.kill(handle.attempts[-1].slots[0], signal.SIGKILL)
    until(lambda: handle.failures, "the loss to be noticed", handle=handle)
    bench.open_gate()
    assert handle.wait("1 minute") is tg.Status.FINISHED
    files, folder = locate(out)
    check_ledger([tuple(row.values()) for row in pq.read_table(folder, filesystem=files).to_pylist()], rows)
    names = [info.base_name for info in files.get_file_info(pafs.FileSelector(f"{folder}/_tidegate")) if info.is_file]
    assert all(name.endswith(".receipt") for name in names)


def test_a_bucket_that_isnt_there_is_an_error_before_anything_is_started(bench: Bench, server: S3Server) -> None:
    with pytest.raises(tg.StoreError, match="NoSuchBucket") as failed:
        ledger(bench, server.address("bucket/x").replace("@bucket", "@nobodys-bucket"), rows=10)
    assert "tests-secret" not in str(failed.value)
