"""Ranks, first records and a user's function on columns, through faults. The first seeds are for `make test`."""

from __future__ import annotations

import pytest

from tests.simulation.scenarios import scenario

SEEDS_PER_TEST = 5


@pytest.mark.parametrize(
    "first", [0, 5, *(pytest.param(each, marks=pytest.mark.long) for each in range(10, 200, SEEDS_PER_TEST))]
)
def test_faults_change_neither_ranks_nor_state_of_columns(first: int) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        scenario(seed, job="ranks").run()
