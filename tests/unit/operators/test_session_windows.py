"""Session windows, against sessions that are merged record by record (window_oracle.py)."""

from __future__ import annotations

import pytest

from tests.unit.operators.windowing import check_random_run
from tidegate.dataflow.operators import session_windows, window
from tidegate.dataflow.windows import sessions


@pytest.mark.parametrize("lateness_ms", [0, 17])
@pytest.mark.parametrize("gap_ms", [3, 10, 25])
def test_results_are_those_of_sessions_that_are_merged_record_by_record(gap_ms: int, lateness_ms: int) -> None:
    for seed in range(40):
        check_random_run(sessions("ts", gap_ms), seed, lateness_ms=lateness_ms)


@pytest.mark.parametrize("lateness_ms", [0, 17])
@pytest.mark.parametrize("gap_ms", [3, 10])
def test_a_snapshot_may_come_while_sessions_fire(gap_ms: int, lateness_ms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (window, session_windows):
        monkeypatch.setattr(module, "MAX_ROWS", 2)
    for seed in range(20):
        check_random_run(sessions("ts", gap_ms), seed, lateness_ms=lateness_ms, stops_in_the_middle=True)
