"""Tumbling, sliding and cumulating windows, against every window that could be (window_oracle.py)."""

from __future__ import annotations

import pytest

from tests.unit.operators.windowing import check_random_run
from tidegate.dataflow.operators import paned_windows, window
from tidegate.dataflow.windows import Paned, cumulating, sliding, tumbling

ASSIGNERS = {
    "tumbling": tumbling("ts", 10),
    "tumbling with an offset": tumbling("ts", 10, offset=3),
    "sliding": sliding("ts", 20, 5),
    "sliding, panes shorter than the slide": sliding("ts", 10, 4, offset=1),
    "sliding with gaps": sliding("ts", 5, 8),
    "cumulating": cumulating("ts", 30, 10),
}


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that windows fire in many steps."""
    monkeypatch.setattr(paned_windows, "MAX_ROWS", 3)
    monkeypatch.setattr(window, "MAX_ROWS", 3)
    monkeypatch.setattr(paned_windows, "_OVERHEAD_ROWS", 1)


@pytest.mark.parametrize("lateness_ms", [0, 17])
@pytest.mark.parametrize("assigner", ASSIGNERS.values(), ids=ASSIGNERS)
def test_results_are_those_of_all_windows_that_could_be(assigner: Paned, lateness_ms: int) -> None:
    for seed in range(12):
        check_random_run(assigner, seed, lateness_ms=lateness_ms, rescales=False)


@pytest.mark.parametrize("lateness_ms", [0, 17])
@pytest.mark.parametrize("assigner", ASSIGNERS.values(), ids=ASSIGNERS)
def test_results_are_the_same_with_restores_and_rescales(assigner: Paned, lateness_ms: int) -> None:
    for seed in range(12):
        check_random_run(assigner, seed, lateness_ms=lateness_ms)


@pytest.mark.parametrize("lateness_ms", [0, 17])
@pytest.mark.parametrize("assigner", ASSIGNERS.values(), ids=ASSIGNERS)
def test_a_snapshot_may_come_while_windows_fire(assigner: Paned, lateness_ms: int, small_steps: None) -> None:
    for seed in range(12):
        check_random_run(assigner, seed, lateness_ms=lateness_ms, stops_in_the_middle=True)
