"""Benchmarks run, and say what they have measured. How fast anything is, is not asked here."""

from __future__ import annotations

import pytest

from benchmarks import first_batch


@pytest.mark.long
def test_first_batch_measures_both_engines_in_a_new_session_and_in_a_warm_one() -> None:
    lines = list(first_batch.run(0.1))
    assert [(line["processor"], line["session"]) for line in lines] == [
        (case, session) for case in ("sum", "downtime") for session in first_batch.SESSIONS]
    for line in lines:
        for engine in (line["tidegate"], line["peer"]):
            assert 0 < engine["build_s"] < engine["to_first_batch_s"] < engine["to_end_s"]
        ours, theirs = (line[engine]["to_first_batch_s"] for engine in ("tidegate", "peer"))
        assert line["ratio"] == pytest.approx(ours / theirs, abs=0.01)
