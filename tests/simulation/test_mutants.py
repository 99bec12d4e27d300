"""The simulation can fail: each way in which the engine is broken here is noticed within a few seeds.

A mutant that several modes notice is run in every third of them, so that each mode has some of each row; in all of them
with TIDEGATE_MUTANTS=all, as `make simulate` does.
"""

from __future__ import annotations

import os

import pytest

from tidegate.testing.simulation import SimulationFailed
from tidegate.testing.simulation.mutants import MUTANTS
from tidegate.testing.simulation.simulation import MODES

MOST_SEEDS = 60
EVERY = 1 if os.environ.get("TIDEGATE_MUTANTS") == "all" else 3
TRIED = [(name, mode) for number, name in enumerate(sorted(MUTANTS)) for turn, mode in enumerate(MUTANTS[name].modes)
         if MUTANTS[name].row == 6 or len(MUTANTS[name].modes) <= 2 or (number + turn) % EVERY == 0]


@pytest.mark.parametrize(("name", "mode"), TRIED)
def test_a_broken_engine_is_noticed(name: str, mode: str) -> None:
    mutant = MUTANTS[name]
    with mutant.applied():
        for seed in range(MOST_SEEDS):
            try:
                mutant.simulation(seed, mode).run()
            except SimulationFailed:
                return
    pytest.fail(f"{MOST_SEEDS} seeds did not notice that {mutant.why}")


def test_the_rows_of_faults_that_must_have_a_mutant_have_one() -> None:
    assert {1, 2, 3, 4, 6, 7, 11, 13, 14, 15, 16} <= {mutant.row for mutant in MUTANTS.values()}


@pytest.mark.parametrize("row", [6, 7])
@pytest.mark.parametrize("mode", sorted(MODES))
def test_control_messages_and_markers_have_mutants_in_every_mode(row: int, mode: str) -> None:
    assert sum(mutant.row == row and mode in mutant.modes for mutant in MUTANTS.values()) >= 3
    assert any(MUTANTS[name].row == row and mode == tried for name, tried in TRIED)


def test_every_mutant_is_tried() -> None:
    assert {name for name, _ in TRIED} == set(MUTANTS)


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_mutant_leaves_nothing_behind(name: str) -> None:
    mutant = MUTANTS[name]
    before = [owner.__dict__[attribute] for owner, attribute, _ in mutant.patches]
    with mutant.applied():
        assert all(owner.__dict__[attribute] is not was
                   for (owner, attribute, _), was in zip(mutant.patches, before, strict=True))
    assert [owner.__dict__[attribute] for owner, attribute, _ in mutant.patches] == before
