"""A stateful processor of Spark's in a streaming query on a cluster, while Python processes, executors and drivers are
killed within micro-batches and between them: output and state are those of an undisturbed computation.

Slots, executors and drivers die at records, timers and batches that are chosen beforehand (accounts.py).
"""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from tests.faults.accounts import POISON
from tests.faults.cluster import Cluster
from tests.faults.queries import OneProcess, run_driver


def run(
    cluster: Cluster | OneProcess,
    folder: Path,
    *,
    files: int,
    strikes: dict[str, str],
    slots: tuple[int, ...] = (2,),
    backend: str = "heap",
) -> str:
    """Until a driver comes to the end, and has checked what came of it. What they told."""
    plan = json.dumps({"files": files, "strikes": strikes, "slots": slots, "backend": backend})
    story = []
    for _ in range(1 + [*strikes.values()].count("driver")):
        driver = run_driver(cluster, "tests.faults.accounts", folder, plan)
        story.append(driver.stdout)
        if driver.returncode == 0:
            break
        assert driver.returncode == -signal.SIGKILL, f"{''.join(story)}\n{driver.stderr[-9000:]}"
    told = "".join(story)
    print(told)
    assert driver.returncode == 0, told
    return told


def starts(told: str) -> list[int]:
    """How many slots each start of the query had."""
    return [int(slots) for slots in re.findall(r"start \d+ with (\d+) slots", told)]


@pytest.mark.long
def test_a_process_an_executor_and_a_driver_are_killed(cluster: Cluster, tmp_path: Path) -> None:
    """The driver's successor has another number of slots."""
    strikes = {"rows 25": "process", "rows 80": "executor", "behind 130": "driver"}
    told = run(cluster, tmp_path, files=4, strikes=strikes, slots=(2, 1))
    assert starts(told) == [2, 1]
    assert not list((tmp_path / "snapshots").glob("*/initial/*/*.arrow")), "nobody needs the initial state any more"


PLANS: dict[str, dict[str, str]] = {
    "in the first batch": {
        "initial 1000": "process",
        "rows 10": "executor",
        "initial 2000": "driver",
        "rows 40": "driver",
        "behind 20": "driver",
    },
    "within batches": {
        "rows 100": "process",
        "timer 116": "process",
        "rows 200": "executor",
        "behind 250": "executor",
        "timer 134": "executor",
        "rows 400": "driver",
        "behind 455": "driver",
    },
    "between batches": {
        "between 0": "process",
        "between 1": "executor",
        "between 2": "driver",
        "between 4": "process",
        "between 5": "driver",
    },
}


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
@pytest.mark.parametrize("plan", PLANS)
def test_kills_change_nothing(cluster: Cluster, tmp_path: Path, plan: str, backend: str) -> None:
    strikes = PLANS[plan]
    files = {"in the first batch": 3}.get(plan, 9)
    told = run(cluster, tmp_path, files=files, strikes=strikes, slots=(2, 3, 1), backend=backend)
    assert starts(told) == [2, 3, 1, 2][: 1 + [*strikes.values()].count("driver")], "no other query had to be started again"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_kills_change_nothing_where_driver_and_executor_are_one(tmp_path: Path) -> None:
    strikes = {
        "initial 1000": "process",
        "rows 40": "driver",
        "behind 100": "process",
        "between 2": "process",
        "timer 116": "process",
        "between 3": "driver",
        "behind 250": "driver",
    }
    told = run(OneProcess(tmp_path), tmp_path, files=6, strikes=strikes, slots=(2, 3, 1))
    assert starts(told) == [2, 3, 1, 2], "no other query had to be started again"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_poisonous_record_stops_the_query_until_the_processor_is_mended(cluster: Cluster, tmp_path: Path) -> None:
    """In the middle of a batch, of which keys were processed already, after a batch in which an executor died."""
    strikes = {"rows 100": "executor", "poison 200": "nobody"}
    told = run(cluster, tmp_path, files=5, strikes=strikes, slots=(2, 3))
    assert starts(told) == [2, 3]
    assert re.search(rf"(?s)the query failed.*in operator 'accounts'.*records of key \('k6',\).*{POISON}", told)
