"""`kill -9` of Python slots and of executor JVMs on a real cluster, in every phase of an epoch's life.

Each job is bounded, its committed output is compared with a sequential computation, and its snapshots are verified.
There are 20 kills unless TIDEGATE_FAULT_KILLS says otherwise; a failure prints its seed (TIDEGATE_FAULT_SEED repeats
it) and the story of the job. Every job gets one more kill, at its final epoch, which isn't counted because the job may
be quicker.
"""

from __future__ import annotations

import json
import os
import random
import secrets
from pathlib import Path

import pytest

from tests.faults.cluster import Cluster
from tests.faults.conftest import Driver
from tests.faults.driver import PHASES
from tests.jobs import check_clean, check_ledger, committed

KILLS = int(os.environ.get("TIDEGATE_FAULT_KILLS", "20"))
SEED = int(os.environ.get("TIDEGATE_FAULT_SEED", secrets.randbelow(1_000_000)))
KILLS_PER_JOB = 4
ROWS = 30_000


def plan_kills() -> list[list[tuple[str, str]]]:
    """The kills by job: every kind of victim in every phase equally often, in random order."""
    chance, kills = random.Random(SEED), []
    while len(kills) < KILLS:
        combinations = [(victim, phase) for victim in ("slot", "executor") for phase in PHASES]
        kills += chance.sample(combinations, len(combinations))
    return [kills[start:min(start + KILLS_PER_JOB, KILLS)] for start in range(0, KILLS, KILLS_PER_JOB)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(len(plan_kills())))
def test_kills_dont_change_the_committed_output(driver: Driver, cluster: Cluster, tmp_path: Path, number: int,
                                                record_property: pytest.RecordProperty) -> None:
    kills = plan_kills()[number]
    print(f"TIDEGATE_FAULT_SEED={SEED} TIDEGATE_FAULT_KILLS={KILLS}, job {number}: {kills}")
    began = len(driver.story)
    driver.ask(job=f"job {number}", folder=str(tmp_path), rows=ROWS, rate=2_000, kills=kills, seed=SEED + number)
    ended = driver.until("ended")
    story = driver.story[began:]
    for event in story:
        print(json.dumps(event))
    assert ended["trouble"] is None and ended["status"] == "finished", cluster.log()
    made = [(event["victim"], event["phase"]) for event in story if event["event"] == "killed" and event["phase"] != "final"]
    assert made == kills
    epochs = [epoch for _, epoch, _ in ended["epochs"]]
    assert epochs == sorted(set(epochs)), "epochs must grow strictly, across attempts too"
    assert [attempt for attempt, _ in ended["attempts"]] == list(range(1, len(ended["attempts"]) + 1))
    check_ledger(committed(tmp_path / "out"), ROWS)
    check_clean(tmp_path / "snapshots", f"job {number}", tmp_path / "out")
    record_property("recoveries", ended["recoveries"])
