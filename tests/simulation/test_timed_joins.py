"""Joins by event time under faults: every pair comes once, and every record without a match."""

from __future__ import annotations

import pytest

from tests.simulation.scenarios import scenario
from tidegate.testing.simulation.simulation import MODES

JOB = "timed joins"
SEEDS_PER_TEST = 4
FIRST_SEEDS = [0, *(pytest.param(first, marks=pytest.mark.long) for first in range(SEEDS_PER_TEST, 60, SEEDS_PER_TEST))]


@pytest.mark.parametrize("mode", sorted(MODES))
@pytest.mark.parametrize("first", FIRST_SEEDS)
def test_joins_are_right_under_faults(mode: str, first: int) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        scenario(seed, job=JOB, mode=mode).run()


def test_the_runs_go_back() -> None:
    """Or they would prove little."""
    attempts = [scenario(seed, job=JOB, mode="exactly_once").run().attempts for seed in range(2 * SEEDS_PER_TEST)]
    assert sum(count >= 2 for count in attempts) > SEEDS_PER_TEST
