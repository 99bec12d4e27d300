"""Session windows, against sessions that are merged record by record (window_oracle.py)."""

from __future__ import annotations

import pytest

from tests.unit.operators.harness import Bench
from tests.unit.operators.windowing import RECORDS, RESULTS, check_random_run, spec_of
from tidegate.dataflow.operators import session_windows, window
from tidegate.dataflow.windows import sessions
from tidegate.errors import JobError
from tidegate.protocol.watermarks import MAX_WATERMARK_MS


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


def test_times_may_be_as_far_apart_as_times_can_be() -> None:
    bench = Bench(spec_of(sessions("ts", 10)), RECORDS, returns=RESULTS)
    first, last = -(2**61) + 1, 2**61 - 1
    bench.feed((1, last, 5), (2, first, 6), (1, first, 7), (2, last - 3, 8), (1, first + 10, 9), (2, last, 10))
    bench.operator.on_watermark(MAX_WATERMARK_MS)
    assert sorted(bench.out.rows) == [
        (1, first, first + 20, 2, 16),
        (1, last, last + 10, 1, 5),
        (2, first, first + 10, 1, 6),
        (2, last - 3, last + 10, 2, 18),
    ]


def test_a_time_that_windows_cannot_have_is_refused() -> None:
    bench = Bench(spec_of(sessions("ts", 10)), RECORDS, returns=RESULTS)
    with pytest.raises(JobError, match=r"a record has the time 9223372036854775807 ms, and windows can have times up to"):
        bench.feed((1, 2**63 - 1, 5))
