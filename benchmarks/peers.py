"""Peers, each in a virtual environment of its own, in its best sensible configuration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
_ENVIRONMENT = _HERE.parent / ".venv-peers"


def transform_with_state(*, rows_per_batch: int, batches: int, keys: int) -> dict[str, Any]:
    """The same running sum as a PySpark `transformWithState` (rows) query."""
    return _run("transform_with_state.py", str(rows_per_batch), str(batches), str(keys))


def drop_in(case: str, *, folder: str, warm_up_batches: int, batches: int) -> dict[str, Any]:
    """A processor of `drop-in` over the files in a folder, as a PySpark `transformWithState` (rows) query."""
    return _run("drop_in.py", case, folder, str(warm_up_batches), str(batches))


def sql_aggregate(*, rows_per_batch: int, batches: int, keys: int, text: bool) -> dict[str, Any]:
    """The keyed sum as a streaming aggregate of Spark SQL: the better result of its two state stores."""
    tried = [
        _run("sql_aggregate.py", str(rows_per_batch), str(batches), str(keys), "text" if text else "integers", store)
        for store in ("memory", "rocksdb")
    ]
    return max(tried, key=lambda result: result["records_per_s"])


def statestore(*, keys: int, runs: int) -> dict[str, Any]:
    """The best of several readings of a streaming sum's state with Spark's `statestore` source."""
    return _run("statestore.py", str(keys), str(runs))


def _run(script: str, *arguments: str) -> dict[str, Any]:
    python = _environment()
    done = subprocess.run(
        [python, str(_HERE / "peers_scripts" / script), *arguments],
        check=False,
        text=True,
        capture_output=True,
        env=os.environ | {"PYSPARK_PYTHON": str(python)},
    )
    if done.returncode:
        raise RuntimeError(f"the peer {script} failed:\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _environment() -> Path:
    """The peers' interpreter; made once, and again when the list of packages changes."""
    python, wanted = _ENVIRONMENT / "bin" / "python", _HERE / "peers_scripts" / "requirements.txt"
    stamp = _ENVIRONMENT / "installed.txt"
    if not stamp.exists() or stamp.read_text() != wanted.read_text():
        print("setting up the peers' environment …", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(_ENVIRONMENT)], check=True)
        constraints = str(_HERE.parent / "constraints.txt")
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", str(wanted), "-c", constraints], check=True)
        stamp.write_text(wanted.read_text())
    return python
