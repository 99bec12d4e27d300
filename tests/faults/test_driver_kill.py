"""`kill -9` of the driver: another one, started on the same folder, goes on and ends with the right output."""

from __future__ import annotations

import random
import secrets
from pathlib import Path

import pytest

from tests.faults.cluster import Cluster, await_end, executor_of
from tests.faults.conftest import Driver
from tests.jobs import check_clean, check_ledger, check_order, committed
from tests.modes import EXACT

ROWS = 20_000


@pytest.mark.timeout(300)
def test_a_job_whose_driver_was_killed_goes_on_under_another_one(driver: Driver, cluster: Cluster, tmp_path: Path) -> None:
    seed = secrets.randbelow(1_000_000)
    chance = random.Random(seed)
    mode = chance.choice(EXACT)
    print(f"seed {seed}, {mode}")
    doomed = Driver(cluster, "doomed")
    try:
        request = dict(
            job="orphan", graph="ledger", mode=mode, folder=str(tmp_path), rows=ROWS, rate=2_000, kills=[], seed=seed
        )
        doomed.ask(**request)
        slots = doomed.until("running")["slots"]
        executors = [executor_of(slot) for slot in slots]
        completed = doomed.until("completed", count=chance.randint(1, 4))["epoch"]
        doomed.kill()
        await_end(slots)
        await_end(executors)
    finally:
        doomed.close()
    check_order(committed(tmp_path / "out"))

    (tmp_path / "gate").touch()
    driver.ask(**request)
    ended = driver.until("ended")
    assert ended["trouble"] is None and ended["status"] == "finished", f"{doomed.told()}\n{driver.told()}\n{cluster.log()}"
    ((attempt, restored),) = ended["attempts"]
    assert attempt == 2 and restored >= completed
    assert ended["epochs"][0][1] > restored
    check_ledger(committed(tmp_path / "out"), ROWS)
    check_clean(tmp_path / "snapshots", "orphan", tmp_path / "out")
