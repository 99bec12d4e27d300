"""The simulation can fail: each way in which the engine is broken here is noticed within a few seeds."""

from __future__ import annotations

import pytest

from tidegate.testing.simulation import SimulationFailed
from tidegate.testing.simulation.mutants import MUTANTS

MOST_SEEDS = 60


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_broken_engine_is_noticed(name: str) -> None:
    mutant = MUTANTS[name]
    with mutant.applied():
        for seed in range(MOST_SEEDS):
            try:
                mutant.simulation(seed).run()
            except SimulationFailed:
                return
    pytest.fail(f"{MOST_SEEDS} seeds did not notice that {mutant.why}")


def test_the_rows_of_faults_that_must_have_a_mutant_have_one() -> None:
    assert {1, 2, 3, 4, 7, 11, 13, 14, 15, 16} <= {mutant.row for mutant in MUTANTS.values()}


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_mutant_leaves_nothing_behind(name: str) -> None:
    mutant = MUTANTS[name]
    before = [owner.__dict__[attribute] for owner, attribute, _ in mutant.patches]
    with mutant.applied():
        assert all(owner.__dict__[attribute] is not was
                   for (owner, attribute, _), was in zip(mutant.patches, before, strict=True))
    assert [owner.__dict__[attribute] for owner, attribute, _ in mutant.patches] == before
