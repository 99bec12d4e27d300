"""Benchmarks run, and say what they have measured. How fast anything is, is not asked here."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from benchmarks import compare, first_batch, machine


@pytest.mark.long
def test_first_batch_measures_both_engines_in_a_new_session_and_in_a_warm_one() -> None:
    lines = list(first_batch.run(0.1))
    assert [(line["processor"], line["session"]) for line in lines] == [
        (case, session) for case in ("sum", "downtime") for session in first_batch.SESSIONS
    ]
    for line in lines:
        for engine in (line["tidegate"], line["peer"]):
            assert 0 < engine["build_s"] < engine["to_first_batch_s"] < engine["to_end_s"]
        ours, theirs = (line[engine]["to_first_batch_s"] for engine in ("tidegate", "peer"))
        assert line["ratio"] == pytest.approx(ours / theirs, abs=0.01)


def test_compare_runs_a_benchmark_on_two_revisions_and_tells_how_much_faster_this_one_is() -> None:
    lines = list(compare.run("HEAD", "restore", scale=0.001, rounds=1))
    assert {(line["of"], line["figure"]) for line in lines} >= {
        (f"{backend}, plain reads of the same files", "keys_per_s") for backend in ("heap", "rocksdb")
    }
    for line in lines:
        faster = line["ours"][0] / line["theirs"][0]
        assert line["ratio"] == pytest.approx(faster if line["figure"] == "keys_per_s" else 1 / faster, rel=0.01)


def test_what_compare_compares_is_of_tidegate_only() -> None:
    line = {
        "ratio": 2.0,
        "keys": 7,
        "records_per_s": 10,
        "peer_records_per_s": 5,
        "pause_ms": {"10": 0.5},
        "peer": {"first_s": 1.0},
        "tidegate": {"first_s": 2.0, "batches": 3},
    }
    assert compare.figures(line) == {"records_per_s": 10, "pause_ms.10": 0.5, "tidegate.first_s": 2.0}


def test_what_this_process_and_its_children_use_is_told_from_what_others_use() -> None:
    spin = "import time\nwhile time.process_time() < 0.3: pass"
    everybody, own = machine.used()
    subprocess.run([sys.executable, "-c", spin], check=True)
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    everybody_later, own_later = machine.used()
    spent = (own_later - own) / os.sysconf("SC_CLK_TCK")
    assert spent > 0.45
    assert everybody_later - everybody >= own_later - own
    with machine.Others() as others:
        time.sleep(0.7)
    assert others.cores is not None and 0 <= others.cores["mean"] <= others.cores["most"]
