"""Records are aggregated before the exchange, under faults: what is held is never lost, and none comes twice."""

from __future__ import annotations

import pytest

from tests.simulation.scenarios import scenario
from tidegate.testing.simulation.simulation import MODES

JOB = "combined aggregates"
SEEDS_PER_TEST = 5
FIRST_SEEDS = [0, *(pytest.param(first, marks=pytest.mark.long) for first in range(SEEDS_PER_TEST, 60, SEEDS_PER_TEST))]


@pytest.mark.parametrize("mode", sorted(MODES))
@pytest.mark.parametrize("first", FIRST_SEEDS)
def test_combined_aggregates_are_right_under_faults(mode: str, first: int) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        scenario(seed, job=JOB, mode=mode).run()
