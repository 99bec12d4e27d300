"""Sources of one time group under faults: none reads further ahead than it may, no run hangs, and the output is right."""

from __future__ import annotations

import pytest

from tests.simulation.scenarios import scenario
from tests.simulation.time_groups import nobody_reads_ahead
from tidegate.dataflow.operators.source import WatermarkOperator
from tidegate.driver.time_keeping import TimeKeeping
from tidegate.testing.simulation import NO_FAULTS, FaultRates, SimulationFailed
from tidegate.testing.simulation.simulation import MODES

JOB = "time group"
SEEDS_PER_TEST = 2
FIRST_SEEDS = [0, *(pytest.param(first, marks=pytest.mark.long) for first in range(SEEDS_PER_TEST, 60, SEEDS_PER_TEST))]
ASTRAY = FaultRates(kinds=("message is doubled", "message is lost", "link hangs", "slot dies"), most_faults=20)


@pytest.mark.parametrize("mode", sorted(MODES))
@pytest.mark.parametrize("first", FIRST_SEEDS)
@pytest.mark.parametrize("rates", [FaultRates(), ASTRAY], ids=["any fault", "messages astray"])
def test_no_source_reads_further_ahead_than_it_may_and_the_output_is_right(mode: str, rates: FaultRates, first: int) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        with nobody_reads_ahead():
            scenario(seed, job=JOB, mode=mode, rates=rates).run()


def test_the_runs_go_back_and_read_near_the_limit() -> None:
    """Or they would prove little."""
    attempts, distances = [], list[int]()
    for seed in range(2 * SEEDS_PER_TEST):
        with nobody_reads_ahead() as seen:
            attempts.append(scenario(seed, job=JOB, mode="exactly_once").run().attempts)
        distances += seen
    assert sum(count >= 2 for count in attempts) > SEEDS_PER_TEST // 2
    assert sum(distance > 0 for distance in distances) > 30


def test_without_the_group_the_fast_source_is_far_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the watch would notice an engine that doesn't hold it back."""
    monkeypatch.setattr(WatermarkOperator, "is_ahead", lambda self, split: False)
    monkeypatch.setattr(WatermarkOperator, "waits", property(lambda self: False))
    with nobody_reads_ahead(), pytest.raises(SimulationFailed, match="reads at"):
        scenario(0, job=JOB, mode="exactly_once", rates=NO_FAULTS).run()


def test_a_coordinator_that_does_not_answer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TimeKeeping, "on_reached", lambda self, slot, reached: None)
    monkeypatch.setattr("tidegate.testing.simulation.simulation.MOST_EVENTS", 20_000)
    with pytest.raises(SimulationFailed, match="doesn't come to its end"):
        scenario(0, job=JOB, mode="exactly_once", rates=NO_FAULTS).run()
