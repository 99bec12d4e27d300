"""`kill -9` of Python slots and of executor JVMs on a real cluster, in every phase of an epoch's life, in every mode.

Each job is bounded, with or without a loop; its committed output is compared with a sequential computation, and its
snapshots are verified. There are 24 kills unless TIDEGATE_FAULT_KILLS says otherwise, spread over all modes and both
graphs; a failure prints its seed (TIDEGATE_FAULT_SEED repeats it) and the story of the job. Every second job gets one more
kill, at its final epoch, which isn't counted because the job may be quicker. `make test` makes the first twelve, among which
are each mode, and a slot and an executor in each phase; `make long` makes the rest.
"""

from __future__ import annotations

import json
import os
import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.collatz import check_collatz, check_collatz_kept
from tests.faults.cluster import Cluster
from tests.faults.conftest import Driver
from tests.faults.driver import PHASES
from tests.jobs import check_clean, check_ledger, check_ledger_kept, committed
from tests.modes import KEEPING_NOTHING, MODES

KILLS = int(os.environ.get("TIDEGATE_FAULT_KILLS", "24"))
SEED = int(os.environ.get("TIDEGATE_FAULT_SEED", secrets.randbelow(1_000_000)))
KILLS_PER_JOB = 2 if KILLS < 48 else 4  # few of them are spread, so that every mode gets some
QUICK_JOBS = len(MODES)
ROWS = {"ledger": 30_000, "loop": 8_000}
RATE = {"ledger": 2_000, "loop": 500}
CHECKS = {
    ("ledger", True): check_ledger,
    ("ledger", False): check_ledger_kept,
    ("loop", True): check_collatz,
    ("loop", False): check_collatz_kept,
}


@dataclass(frozen=True, slots=True)
class Victim:
    """One job and what is done to it."""

    graph: str
    mode: str
    kills: list[tuple[str, str]]
    at_the_end: bool

    def check(self, ended: dict[str, Any], rows_written: list[tuple[Any, ...]]) -> None:
        CHECKS[self.graph, self.mode != "at least once"](rows_written, ROWS[self.graph])
        if self.mode in KEEPING_NOTHING:
            assert ended["in_flight_bytes"] == 0, "nothing that is under way is stored"


def plan_victims() -> list[Victim]:
    """Every mode with every graph, and every phase, equally often, in random order; an executor, which takes long to come
    back, half as often as a slot. Each mode comes with one graph before any comes with the other, and so do a slot and an
    executor in each phase before another slot does."""
    chance = random.Random(SEED)
    kills: list[tuple[str, str]] = []
    jobs: list[tuple[str, str]] = []
    while len(kills) < KILLS:
        for victims in (("slot", "executor"), ("slot",)):
            combinations = [(victim, phase) for victim in victims for phase in PHASES]
            kills += chance.sample(combinations, len(combinations))
    starts = range(0, KILLS, KILLS_PER_JOB)
    while len(jobs) < len(starts):
        modes, graphs = chance.sample(list(MODES), len(MODES)), [*ROWS]
        jobs += [(graphs[number % 2], mode) for number, mode in enumerate(modes)]
        jobs += [(graphs[(number + 1) % 2], mode) for number, mode in enumerate(modes)]
    return [
        Victim(graph, mode, kills[start : min(start + KILLS_PER_JOB, KILLS)], at_the_end=number % 2 == 0)
        for number, (start, (graph, mode)) in enumerate(zip(starts, jobs, strict=False))
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "number",
    [
        number if number < QUICK_JOBS else pytest.param(number, marks=pytest.mark.long)
        for number in range(len(plan_victims()))
    ],
)
def test_kills_dont_change_the_committed_output(
    driver: Driver, cluster: Cluster, tmp_path: Path, number: int, record_property: Callable[[str, object], None]
) -> None:
    victim = plan_victims()[number]
    print(f"TIDEGATE_FAULT_SEED={SEED} TIDEGATE_FAULT_KILLS={KILLS}, job {number}: {victim}")
    began = len(driver.story)
    driver.ask(
        job=f"job {number}",
        graph=victim.graph,
        mode=victim.mode,
        folder=str(tmp_path),
        rows=ROWS[victim.graph],
        rate=RATE[victim.graph],
        kills=victim.kills,
        at_the_end=victim.at_the_end,
        seed=SEED + number,
    )
    ended = driver.until("ended")
    story = driver.story[began:]
    for event in story:
        print(json.dumps(event))
    assert ended["trouble"] is None and ended["status"] == "finished", cluster.log()
    made = [(event["victim"], event["phase"]) for event in story if event["event"] == "killed" and event["phase"] != "final"]
    assert made == victim.kills
    epochs = [epoch for _, epoch, _ in ended["epochs"]]
    assert epochs == sorted(set(epochs)), "epochs must grow strictly, across attempts too"
    assert [attempt for attempt, _ in ended["attempts"]] == list(range(1, len(ended["attempts"]) + 1))
    victim.check(ended, committed(tmp_path / "out"))
    check_clean(tmp_path / "snapshots", f"job {number}", tmp_path / "out")
    record_property("recoveries", ended["recoveries"])
