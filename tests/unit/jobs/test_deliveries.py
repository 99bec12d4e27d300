"""What sinks bring to the driver: printed at once, or kept for the handle's results, never both."""

from __future__ import annotations

import pytest

import tidegate as tg
from tests.unit.jobs.conftest import Bench
from tidegate.testing.processes import ProcessJob

ROWS = [(number,) for number in range(5)]


def test_what_was_printed_isnt_kept(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    def build(job: ProcessJob) -> None:
        stream = job.source("in", tg.sources.rows(ROWS, "number long"))
        stream.to("shown", tg.sinks.print())
        stream.to("kept", tg.sinks.collect())

    handle = bench.finish(build)
    assert handle.results("kept") == ROWS
    assert handle.results("shown") == []
    assert capsys.readouterr().out.splitlines() == [f"shown> number={number}" for (number,) in ROWS]
