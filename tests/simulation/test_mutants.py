"""The simulation can fail: each way in which the engine is broken here is noticed within a few seeds, in every mode.

The seed that noticed it when this was written is tried first. With TIDEGATE_MUTANTS=all, as `make simulate` does, all are
tried from the first on.
"""

from __future__ import annotations

import os

import pytest

from tests.simulation.mutants import MUTANTS
from tidegate.testing.simulation import SimulationFailed
from tidegate.testing.simulation.simulation import MODES

MOST_SEEDS = 80
MOST_EVENTS = 40_000  # of a run that doesn't come to its end; others have far less
# `make test` tries each mutant in one mode, another one for each mutant in turn, and `make long` in the rest of its modes.
TRIED = [
    (name, mode) if index == number % len(MUTANTS[name].modes) else pytest.param(name, mode, marks=pytest.mark.long)
    for number, name in enumerate(sorted(MUTANTS))
    for index, mode in enumerate(MUTANTS[name].modes)
]

# In the order of the mutant's modes, where it isn't the first seed in all of them.
NOTICED_BY: dict[str, tuple[int, ...]] = {
    "acknowledged in any epoch": (66,),
    "another hash in the exchange": (3,),
    "build on the last one written": (59,),
    "commit this one only": (6, 6, 6, 16, 26, 9),
    "discard when opened": (44,),
    "feedback dropped": (0, 5, 3, 3, 3, 0),
    "feedback not replayed": (0, 0, 3, 1, 3, 5),
    "feedback replayed in part": (0, 0, 3, 1, 3, 5),
    "feedback replayed twice": (0, 3, 1, 3, 5),
    "final without loops": (0, 5, 0, 0, 0, 1),
    "forget aborted output": (7,),
    "forget changes": (6,),
    "forward at the first": (0, 9, 0, 10),
    "forward before the freeze": (10, 4, 10),
    "freeze behind the marker": (0, 0, 11, 4, 9, 5),
    "frozen in name only": (10,),
    "greatest watermark of the groups": (13,),
    "held records forgotten": (11, 5, 5, 11, 4),
    "inner laps don't count": (38, 38, 38, 76, 38, 76),
    "items rounded down": (8,),
    "least watermark of the groups": (13,),
    "log all": (0, 10, 0),
    "log begins late": (5, 0, 3, 0, 3, 5),
    "log dropped": (0, 23, 0),
    "log not replayed": (0, 10, 0),
    "log replayed twice": (0, 10, 0),
    "log what is behind": (60, 6, 1, 23),
    "loop ends a lap too early": (6, 6, 17, 27, 6, 1),
    "marker too early": (3, 0, 0, 1, 4, 1),
    "marker too late": (4, 10, 1, 10, 18),
    "names without attempt": (11,),
    "no alignment": (10,),
    "no checksums": (5,),
    "no fencing": (9,),
    "offsets of before": (8, 13, 10, 24, 9),
    "old links are heard": (18,),
    "one watermark for all splits": (6,),
    "overtaken not logged": (0, 25),
    "quiet relays": (16, 49, 8),
    "restore an older snapshot": (5,),
    "restored state is known": (2,),
    "savepoints supersede": (1,),
    "shifted ranges": (1,),
    "skip what is unreadable": (30,),
    "swallow commit errors": (35,),
    "triggered again": (10, 16, 16, 16, 12, 12),
    "union state grows": (7,),
}


def _seeds(name: str, mode: str) -> list[int]:
    modes = MUTANTS[name].modes
    known = dict(zip(modes, NOTICED_BY.get(name, (0,) * len(modes)), strict=True))[mode]
    first = 0 if os.environ.get("TIDEGATE_MUTANTS") == "all" else known
    return [first, *(seed for seed in range(MOST_SEEDS) if seed != first)]


@pytest.mark.parametrize(("name", "mode"), TRIED)
def test_a_broken_engine_is_noticed(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.testing.simulation.simulation.MOST_EVENTS", MOST_EVENTS)
    mutant = MUTANTS[name]
    with mutant.applied():
        for seed in _seeds(name, mode):
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


def test_what_is_known_of_mutants_is_of_mutants_there_are() -> None:
    assert set(NOTICED_BY) <= set(MUTANTS)


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_mutant_leaves_nothing_behind(name: str) -> None:
    mutant = MUTANTS[name]
    before = [owner.__dict__[attribute] for owner, attribute, _ in mutant.patches]
    with mutant.applied():
        assert all(
            owner.__dict__[attribute] is not was for (owner, attribute, _), was in zip(mutant.patches, before, strict=True)
        )
    assert [owner.__dict__[attribute] for owner, attribute, _ in mutant.patches] == before
