"""The small examples, as a reader of the README runs them."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import ROOT

FIRST_JOB = ROOT / "examples/first_job.py"
LINES_AT_MOST = 20


def test_the_first_job_counts_words() -> None:
    done = subprocess.run([sys.executable, str(FIRST_JOB)], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    counted = [line for line in done.stdout.splitlines() if line.startswith("counts> ")]
    assert sorted(counted) == sorted(f"counts> word={word!r}, n={n}" for word, n in [
        ("the", 1), ("the", 2), ("tide", 1), ("tide", 2), ("comes", 1), ("in", 1), ("goes", 1), ("out", 1)])
    for word in ("the", "tide"):
        assert counted.index(f"counts> word={word!r}, n=1") < counted.index(f"counts> word={word!r}, n=2")


def test_the_first_job_is_as_short_as_the_readme_says() -> None:
    assert len(FIRST_JOB.read_text("utf-8").splitlines()) <= LINES_AT_MOST
