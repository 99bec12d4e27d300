"""`python -m benchmarks NAME --json`: one JSON object per line, with `name`, `against`, `ratio` and what was run.

With `--pictures FOLDER` those benchmarks that have a picture draw it there, as NAME.png.

`python -m benchmarks compare REV NAME` runs one on two revisions in turns, this checkout and REV, and prints the ratios.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import (
    alignment,
    backend_throughput,
    compare,
    drop_in,
    first_batch,
    incremental,
    keyed_sum,
    latency,
    micro_batch,
    recovery,
    rescale,
    restore,
    snapshot_overhead,
    snapshot_pause,
    snapshot_protocols,
    state_memory,
    state_read,
    steady,
    vectorised,
)
from benchmarks.nexmark import run as nexmark
from benchmarks.nexmark.suite import QUERIES

BENCHMARKS: dict[str, Callable[..., Iterator[dict[str, Any]]]] = {
    "keyed-sum": keyed_sum.run,
    "snapshot-overhead": snapshot_overhead.run,
    "snapshot-pause": snapshot_pause.run,
    "latency": latency.run,
    "incremental": incremental.run,
    "backend-throughput": backend_throughput.run,
    "rescale": rescale.run,
    "drop-in": drop_in.run,
    "first-batch": first_batch.run,
    "micro-batch-overhead": micro_batch.run,
    "restore": restore.run,
    "recovery": recovery.run,
    "state-read": state_read.run,
    "state-memory": state_memory.run,
    "steady": steady.run,
    "alignment-vs-state": alignment.against_state,
    "alignment-vs-parallelism": alignment.against_parallelism,
    "alignment-vs-shuffles": alignment.against_shuffles,
    "snapshot-protocols": snapshot_protocols.run,
    "vectorised": vectorised.run,
    "nexmark": nexmark.run,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=[*BENCHMARKS, "all", "compare"])
    parser.add_argument("compared", nargs="*", metavar="REV NAME", help="for compare: the revision and the benchmark")
    parser.add_argument("--rounds", type=int, default=3, help="for compare: how often each revision is run")
    parser.add_argument("--query", nargs="+", choices=QUERIES, help="for nexmark: only these queries")
    parser.add_argument("--json", action="store_true", help="one JSON object per line (default: a readable line)")
    parser.add_argument("--scale", type=float, default=1.0, help="how much work, as a multiple of the usual")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="where to draw what there is a picture of")
    chosen = parser.parse_args()
    if chosen.name == "compare":
        if len(chosen.compared) != 2 or chosen.compared[1] not in BENCHMARKS:
            parser.error("compare takes a revision and the name of a benchmark: compare HEAD~1 keyed-sum")
        for line in compare.run(*chosen.compared, scale=chosen.scale, rounds=chosen.rounds):
            print(json.dumps(line) if chosen.json else _readable(line), flush=True)
        return
    for name in BENCHMARKS if chosen.name == "all" else [chosen.name]:
        print(f"running {name} …", file=sys.stderr, flush=True)
        lines = []
        queries = {"queries": chosen.query} if name == "nexmark" and chosen.query else {}
        for line in BENCHMARKS[name](chosen.scale, **queries):
            lines.append(line)
            print(json.dumps(line) if chosen.json else _readable(line), flush=True)
        if chosen.pictures is not None:
            _draw(name, lines, chosen.pictures)


def _draw(name: str, lines: list[dict[str, Any]], folder: Path) -> None:
    from benchmarks import pictures  # matplotlib is needed for these only

    drawn = pictures.draw(name, lines, folder)
    if drawn is not None:
        print(f"drew {drawn}", file=sys.stderr, flush=True)


def _readable(line: dict[str, Any]) -> str:
    rest = ", ".join(f"{key}={value}" for key, value in line.items() if key not in ("name", "ratio", "against"))
    return f"{line['name']:>18}  {line['ratio']:10.3f} × {line['against']}  ({rest})"


if __name__ == "__main__":
    main()
