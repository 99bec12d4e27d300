"""`python -m benchmarks compare REV NAME`: one benchmark on two revisions in turns, this checkout and REV.

A machine differs from day to day, and within a day, by more than most changes do. So both revisions run here and now, in
turns (ours, theirs, theirs, ours, …), each with its own `benchmarks/` and its own `src/`, by this interpreter and its
packages. Compared are the figures of Tidegate itself that a line of the benchmark has: whatever ends in `_per_s`, `_s` or
`_ms`, by the median over the rounds. `ratio` is the speed of this checkout over REV's: over 1, this checkout is faster.
Where the files in `benchmarks/` differ between the two, the line says so.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
_PEERS = ".venv-peers"
_LESS_IS_BETTER = ("_ms", "_s", "_s_per_gb")
_THE_SAME_IN_ALL = ("name", "what", "unit", "goal")
_OF_OTHERS = ("peer", "plain", "capacity")

Line = dict[str, Any]


def run(revision: str, name: str, *, scale: float, rounds: int) -> Iterator[Line]:
    with worktree(revision) as theirs:
        runs: dict[Path, list[list[Line]]] = {CHECKOUT: [], theirs: []}
        for number in range(rounds):
            for tree in (CHECKOUT, theirs) if number % 2 == 0 else (theirs, CHECKOUT):
                print(
                    f"round {number + 1} of {rounds}: {'this checkout' if tree == CHECKOUT else revision} …",
                    file=sys.stderr,
                    flush=True,
                )
                runs[tree].append(_measured(tree, name, scale))
        commit = _git("rev-parse", "--short", revision)
        same = not _git("diff", "--name-only", revision, "--", "benchmarks")
        for line in compared(runs[CHECKOUT], runs[theirs]):
            yield (
                {"name": "compare", "against": f"{revision} ({commit})", "benchmark": name}
                | line
                | {"rounds": rounds, "definition": "the same" if same else "files in benchmarks/ differ"}
            )


def compared(ours: list[list[Line]], theirs: list[list[Line]]) -> Iterator[Line]:
    """Compare the rounds of both, each of which is the lines that a benchmark printed."""
    if len({len(lines) for lines in (*ours, *theirs)}) != 1:
        raise SystemExit("the two revisions print different lines for this benchmark; they can't be compared")
    for now, then in zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True):
        for figure in figures(now[0]):
            if all(figure in figures(line) for line in then):
                new, old = ([figures(line)[figure] for line in lines] for lines in (now, then))
                yield {"of": _label(now[0]), "figure": figure, "ratio": _speed(figure, new, old), "ours": new, "theirs": old}


def figures(line: Line, prefix: str = "") -> dict[str, float]:
    """Return the speeds and times in a line that are Tidegate's own, by their names; nested ones with their path."""
    found: dict[str, float] = {}
    for name, value in line.items():
        path = f"{prefix}{name}"
        if name.startswith(_OF_OTHERS):
            continue
        if isinstance(value, dict):
            found |= figures(value, f"{path}.")
        elif isinstance(value, int | float) and value > 0 and _has_unit(path):
            found[path] = value
    return found


def _has_unit(path: str) -> bool:
    """Whether one of the names of a path ends in a unit: "records_per_s", "pause_ms.10,000"."""
    return any(name.endswith(_LESS_IS_BETTER) for name in path.split("."))


def _speed(figure: str, ours: list[float], theirs: list[float]) -> float:
    new, old = statistics.median(ours), statistics.median(theirs)
    return round(new / old if figure.endswith("_per_s") else old / new, 4)


def _label(line: Line) -> str:
    telling = [value for name, value in line.items() if isinstance(value, str) and name not in _THE_SAME_IN_ALL]
    return ", ".join([*telling, *([f"{line['keys']:,} keys"] if isinstance(line.get("keys"), int) else [])])


@contextmanager
def worktree(revision: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tidegate-compare-") as folder:
        tree = Path(folder) / "theirs"
        _git("worktree", "add", "--quiet", "--detach", str(tree), revision)
        try:
            if (CHECKOUT / _PEERS).exists():
                (tree / _PEERS).symlink_to(CHECKOUT / _PEERS)
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _measured(tree: Path, name: str, scale: float) -> list[Line]:
    command = [sys.executable, "-m", "benchmarks", name, "--json", "--scale", str(scale)]
    environment = os.environ | {"PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}"}
    done = subprocess.run(command, cwd=tree, env=environment, check=False, text=True, capture_output=True)
    if done.returncode:
        raise SystemExit(f"the benchmark {name} failed in {tree}:\n{done.stderr[-4000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(CHECKOUT), *arguments], check=False, text=True, capture_output=True)
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()
