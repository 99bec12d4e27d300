"""`first-batch`: how long a tiny streaming query takes to start and to run through, Tidegate over Spark's own engine.

A few hundred rows in three files, one file for each micro-batch, and the two processors of drop-in. A user waits until the
query is built (`tg.transform_with_state(…)` or `transformWithState(…)`), until its first batch is committed, and until it
has run through. Each round starts a new process for each engine in turn; it runs the query in a new session, and another one
in the same session, with new folders. The figures are medians over the rounds. `ratio` is that of the time until the first
batch is committed, with building; `ratio_whole` is that of the time until the query has run through, with building.

Both engines are run by this interpreter, which needs the packages of the extra `bench`, with the settings of drop-in.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.peers_scripts.drop_in import CASES
from benchmarks.workloads import here

ROUNDS = 7
FILES = 3
KEYS = 100
GOAL = 1.0
ENGINES = ("tidegate", "spark")
SESSIONS = ("new session", "second query of a session")


def run(scale: float) -> Iterator[dict[str, Any]]:
    rounds = max(1, int(ROUNDS * scale))
    with tempfile.TemporaryDirectory(prefix="tidegate-first-batch-") as folder:
        write_files(Path(folder) / "in")
        for case in CASES:
            runs = [
                {engine: measure(engine, case, f"{folder}/in", f"{folder}/{case}-{number}-{engine}") for engine in ENGINES}
                for number in range(rounds)
            ]
            for index, session in enumerate(SESSIONS):
                ours, theirs = (_medians([each[engine][index] for each in runs]) for engine in ENGINES)
                yield {
                    "name": "first-batch",
                    "against": "pyspark transformWithState (rows)",
                    "processor": case,
                    "session": session,
                    "ratio": round(ours["to_first_batch_s"] / theirs["to_first_batch_s"], 3),
                    "ratio_whole": round(ours["to_end_s"] / theirs["to_end_s"], 3),
                    "goal": f"at most {GOAL}",
                    "what": f"time until a tiny streaming query is built and its first micro-batch committed; {FILES} "
                    f"files of {KEYS} rows, one for each micro-batch, 2 cores, median of {rounds}",
                    "tidegate": ours,
                    "peer": theirs,
                }


def measure(engine: str, case: str, files: str, folder: str) -> list[dict[str, float]]:
    """Return what the queries of one process took, in their order, in seconds."""
    scripts = str(here() / "peers_scripts")
    paths = os.pathsep.join([scripts, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, f"{scripts}/first_batch.py", engine, case, files, folder],
        check=False,
        text=True,
        capture_output=True,
        env=os.environ | {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": paths},
    )
    if done.returncode:
        raise RuntimeError(f"the tiny query on {engine} failed:\n{done.stderr[-4000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _medians(runs: list[dict[str, float]]) -> dict[str, float]:
    given = {name: [each[name] for each in runs] for name in runs[0]}
    given["to_first_batch_s"] = [each["build_s"] + each["first_batch_s"] for each in runs]
    given["to_end_s"] = [each["build_s"] + each["whole_s"] for each in runs]
    return {name: round(statistics.median(values), 3) for name, values in given.items()}


def write_files(folder: Path) -> None:
    """Write the input. Spark takes the files in the order of their times."""
    folder.mkdir()
    keys = np.arange(KEYS)
    for number in range(FILES):
        path = folder / f"{number:05}.parquet"
        pq.write_table(pa.table({"key": keys, "amount": keys % 64, "at_ms": np.full(KEYS, 1000 * (number + 1))}), path)
        os.utime(path, (1e9 + number, 1e9 + number))
