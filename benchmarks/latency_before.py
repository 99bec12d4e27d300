"""`python -m benchmarks.latency_before REV`: the record-wise job of `latency` on revision REV and on this checkout.

Both run this checkout's benchmark at one rate, on `src/` of the one and of the other, since REV may not have it. Prints
a JSON line for each, and with `--pictures FOLDER` draws both in one picture.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.compare import CHECKOUT, worktree

SECONDS = 15


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.latency_before", description=__doc__)
    parser.add_argument("revision")
    parser.add_argument("--rate", type=float, default=1_000_000, help="records per second")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--pictures", type=Path, metavar="FOLDER")
    chosen = parser.parse_args()
    with worktree(chosen.revision) as theirs:
        lines = [
            _measured(tree, label, chosen.rate, chosen.seconds)
            for tree, label in ((theirs, f"before, at {chosen.revision}"), (CHECKOUT, "now"))
        ]
    for line in lines:
        print(json.dumps(line), flush=True)
    if chosen.pictures is not None:
        from benchmarks import pictures  # matplotlib is needed for these only

        pictures.draw("latency-before", lines, chosen.pictures)


def _measured(tree: Path, label: str, rate: float, seconds: float) -> dict[str, Any]:
    environment = os.environ | {"PYTHONPATH": f"{tree / 'src'}{os.pathsep}{CHECKOUT}"}
    code = f"import json; from benchmarks import latency; print(json.dumps(latency.at_rate({rate}, {seconds})))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, env=environment, check=False, text=True, capture_output=True
    )
    if done.returncode:
        raise SystemExit(f"the benchmark failed on {tree}:\n{done.stderr[-4000:]}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"name": "latency-before", "path": label} | figures


if __name__ == "__main__":
    main()
