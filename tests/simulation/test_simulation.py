"""The real protocol, runtime, state and sink code in a simulated world where much goes wrong.

`python -m tests.simulation --seed N --trace` runs a seed again and tells all that happened.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.__main__ import main
from tests.simulation.jobs import COLUMNAR, CYCLIC, JOBS
from tests.simulation.random_graphs import RandomGraph, RandomLoops
from tests.simulation.scenarios import scenario
from tidegate.testing.simulation import NO_FAULTS, FaultRates, SimulationFailed
from tidegate.testing.simulation.simulation import MODES

ROOT = Path(__file__).resolve().parents[2]
SEEDS_PER_TEST = 15
SEEDS_PER_MODE = 300
QUICK_SEEDS = 30  # the rest of them are for `make long`
FIRST_SEEDS = [
    pytest.param(first, marks=pytest.mark.long) if first >= QUICK_SEEDS else first
    for first in range(0, SEEDS_PER_MODE, SEEDS_PER_TEST)
]


@pytest.mark.parametrize("first", FIRST_SEEDS)
@pytest.mark.parametrize("mode", sorted(MODES))
def test_faults_do_not_change_what_is_committed(mode: str, first: int) -> None:
    """Or, with at_least_once, lose nothing of it."""
    for seed in range(first, first + SEEDS_PER_TEST):
        scenario(seed, mode=mode).run()  # the story of a failure tells its seed


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.long) for first in (15, 30, 45))])
@pytest.mark.parametrize("job", [job.name for job in COLUMNAR])
def test_faults_do_not_change_what_operators_on_columns_commit(job: str, first: int) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        scenario(seed, job=job).run()


def test_many_of_these_seeds_have_loops_and_many_have_random_graphs() -> None:
    jobs = [type(scenario(seed).job) for seed in range(SEEDS_PER_MODE)]
    assert sum(job in CYCLIC for job in jobs) >= 100
    assert sum(job is RandomGraph for job in jobs) >= 40 and sum(job is RandomLoops for job in jobs) >= 40


@pytest.mark.parametrize("job", sorted(JOBS))
@pytest.mark.parametrize("mode", sorted(MODES))
def test_without_faults_every_job_finishes_and_every_record_counts_once(job: str, mode: str) -> None:
    # Delays and time-outs are drawn, too: with this seed no snapshot takes longer than it may.
    simulation = scenario(4, job=job, mode=mode, rates=NO_FAULTS)
    simulation.exact = True
    outcome = simulation.run()
    assert not outcome.faults and outcome.epochs > 0 and outcome.attempts == 1


def test_most_runs_have_several_faults_and_snapshots_to_go_back_to() -> None:
    outcomes = [scenario(seed).run() for seed in range(30)]
    assert sum(len(outcome.faults) >= 2 for outcome in outcomes) > 12
    assert sum(outcome.epochs >= 2 for outcome in outcomes) > 20
    assert sum(outcome.attempts >= 2 for outcome in outcomes) > 15


def test_one_seed_gives_one_trace() -> None:
    assert [scenario(seed).run() for seed in range(5)] == [scenario(seed).run() for seed in range(5)]


def test_one_seed_gives_one_trace_in_another_process() -> None:
    """Where hashes of strings differ."""
    script = "from tests.simulation.scenarios import scenario\nprint(*(scenario(seed).run().digest for seed in range(3)))"
    there = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    ).stdout.split()
    assert there == [scenario(seed).run().digest for seed in range(3)]


def test_two_seeds_give_two_traces() -> None:
    assert scenario(1).run().digest != scenario(2).run().digest


def test_a_job_whose_state_can_not_be_read_does_not_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read of state has a wrong bit, for as long as it takes: no output is better than a wrong one."""
    monkeypatch.setattr("tidegate.testing.simulation.simulation.MOST_EVENTS", 20_000)
    monkeypatch.setattr("tidegate.testing.simulation.faults.Faults._heal", lambda faults: None)
    simulation = scenario(3, job="running sums", rates=FaultRates(kinds=("slot dies",), flip=1.0))
    with pytest.raises(SimulationFailed, match="doesn't come to its end"):
        simulation.run()
    # A job ends when a file was damaged at a second reading, and another driver starts it again.
    failures = [failure for each in simulation.coordinators for failure in each.coordinator.failures]
    assert "CorruptFile" in {failure.message.split(":")[0] for failure in failures}


def test_a_failure_tells_its_story() -> None:
    def refuse(rows: object, state_of: object, *, exact: bool) -> None:
        raise AssertionError("as the test asked")

    simulation = scenario(4, job="running sums")
    simulation.job.check = refuse  # type: ignore[method-assign]
    with pytest.raises(SimulationFailed) as failure:
        simulation.run()
    story = str(failure.value)
    assert "as the test asked" in story and "seed 4" in story and "--seed 4" in story
    assert len(story.splitlines()) > 60


def test_the_command_runs_seeds_and_one_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "3", "--from", "5"]) == 0
    assert "3 of 3 seeds, 0 failed" in capsys.readouterr().out
    assert main(["--seed", "5", "--trace"]) == 0
    assert "coordinator 1 starts" in capsys.readouterr().out


def test_the_command_tells_what_failed_and_how_to_run_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "2", "--mutant", "commit at once"]) == 1
    told = capsys.readouterr().out
    assert "no snapshot that has it is complete" in told and "--seed 0" in told and "--mutant 'commit at once'" in told
