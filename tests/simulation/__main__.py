"""`python -m tests.simulation`: runs the simulation of our scenarios over many seeds, or one again.

    --seeds 2000            seeds 0 … 1999 (with --from 500: 500 … 2499)
    --seed 17 --trace       one seed, with all that happened
    --mode unaligned        always this alignment; --job "random loops" always this job
    --mutant "no alignment" with an engine that is broken in this way: shows that it is noticed

A failing seed's story is printed with the command that runs it again; the exit code says whether there was one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from tests.simulation.jobs import JOBS
from tests.simulation.mutants import MUTANTS
from tests.simulation.scenarios import scenario
from tidegate.testing.simulation.simulation import MODES, Outcome, Simulation, SimulationFailed

SEEDS_PER_TURN = 10
STORIES_SHOWN = 3
PROGRESS_EVERY_S = 2.0

Finding = tuple[int, Outcome | str]  # a seed, and what came of it or its story


@dataclass(frozen=True, slots=True)
class Scene:
    """What is the same for all seeds, where it was given."""

    job: str | None
    mode: str | None
    mutant: str | None

    def simulation(self, seed: int) -> Simulation:
        if self.mutant is not None:
            return MUTANTS[self.mutant].simulation(seed, self.mode)
        return scenario(seed, job=self.job, mode=self.mode)

    def broken(self) -> AbstractContextManager[None]:
        return nullcontext() if self.mutant is None else MUTANTS[self.mutant].applied()

    def options(self) -> str:
        given = {"job": self.job, "mode": self.mode, "mutant": self.mutant}
        return "".join(f" --{name} {value!r}" for name, value in given.items() if value is not None)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.seed is not None:
        return _run_one(options)
    seeds = range(options.first, options.first + options.seeds)
    scene = Scene(options.job, options.mode, options.mutant)
    turns = [(list(seeds[start : start + SEEDS_PER_TURN]), scene) for start in range(0, len(seeds), SEEDS_PER_TURN)]
    if options.processes == 1:
        return _report(map(_run_some, turns), len(seeds), scene)
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        return _report(pool.imap_unordered(_run_some, turns), len(seeds), scene)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=300, metavar="N", help="how many seeds to run")
    parser.add_argument("--from", type=int, default=0, metavar="K", dest="first", help="the first of them")
    parser.add_argument("--seed", type=int, metavar="K", help="run this one only")
    parser.add_argument("--trace", action="store_true", help="with --seed: print everything that happens")
    parser.add_argument("--job", choices=sorted(JOBS), help="always this job, not one that is drawn")
    parser.add_argument("--mode", choices=sorted(MODES), help="always this alignment, not one that is drawn")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="break the engine in this way")
    parser.add_argument("--processes", type=int, default=1, metavar="P", help="run so many seeds at the same time")
    return parser


def _run_one(options: argparse.Namespace) -> int:
    scene = Scene(options.job, options.mode, options.mutant)
    with scene.broken():
        simulation = scene.simulation(options.seed)
        if options.trace:
            simulation.world.trace.listener = print
        try:
            outcome = simulation.run()
        except SimulationFailed as failure:
            print(failure)
            return 1
    print(f"seed {options.seed}: {_told(outcome)}\ndigest {outcome.digest}")
    for fault in outcome.faults:
        print(f"  {fault}")
    return 0


def _run_some(turn: tuple[list[int], Scene]) -> list[Finding]:
    seeds, scene = turn
    found: list[Finding] = []
    with scene.broken():
        for seed in seeds:
            try:
                found.append((seed, scene.simulation(seed).run()))
            except SimulationFailed as failure:
                found.append((seed, str(failure)))
    return found


def _report(turns: Iterable[list[Finding]], total: int, scene: Scene) -> int:
    started, told = time.monotonic(), 0.0
    failed: list[int] = []
    runs: list[Outcome] = []
    for seed, outcome in _flat(turns):
        if isinstance(outcome, Outcome):
            runs.append(outcome)
        else:
            failed.append(seed)
            if len(failed) <= STORIES_SHOWN:
                print(f"\n{outcome}\n", flush=True)
        done, spent = len(runs) + len(failed), time.monotonic() - started
        if spent - told >= PROGRESS_EVERY_S or done == total:
            told = spent
            print(f"{done} of {total} seeds, {len(failed)} failed, {spent / done * 1000:.0f} ms each", flush=True)
    if runs:
        print(
            f"in the mean: {sum(run.attempts for run in runs) / len(runs):.1f} attempts, "
            f"{sum(run.epochs for run in runs) / len(runs):.1f} complete epochs, "
            f"{sum(len(run.faults) for run in runs) / len(runs):.1f} faults"
        )
    if failed:
        print(
            f"failed: {' '.join(map(str, sorted(failed)))}\n"
            f"again:  python -m tests.simulation --seed {min(failed)} --trace{scene.options()}"
        )
    return 1 if failed else 0


def _flat(turns: Iterable[list[Finding]]) -> Iterator[Finding]:
    for turn in turns:
        yield from turn


def _told(outcome: Outcome) -> str:
    return (
        f"{outcome.attempts} attempts, {outcome.epochs} complete epochs, {len(outcome.faults)} faults, "
        f"{outcome.simulated_ms} ms simulated in {outcome.event_count} events"
    )


if __name__ == "__main__":
    sys.exit(main())
