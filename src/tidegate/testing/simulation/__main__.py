"""`python -m tidegate.testing.simulation`: runs the simulation over many seeds, or one again.

    --seeds 2000            seeds 0 … 1999 (with --from 500: 500 … 2499)
    --seed 17 --trace       one seed, with all that happened
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

from tidegate.testing.simulation.jobs import JOBS
from tidegate.testing.simulation.mutants import MUTANTS
from tidegate.testing.simulation.simulation import Outcome, Simulation, SimulationFailed

SEEDS_PER_TURN = 10
STORIES_SHOWN = 3
PROGRESS_EVERY_S = 2.0

Finding = tuple[int, Outcome | str]      # a seed, and what came of it or its story


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.seed is not None:
        return _run_one(options)
    seeds = range(options.first, options.first + options.seeds)
    turns = [(list(seeds[start:start + SEEDS_PER_TURN]), options.job, options.mutant)
             for start in range(0, len(seeds), SEEDS_PER_TURN)]
    if options.processes == 1:
        return _report(map(_run_some, turns), len(seeds), options.mutant)
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        return _report(pool.imap_unordered(_run_some, turns), len(seeds), options.mutant)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tidegate.testing.simulation", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=300, metavar="N", help="how many seeds to run")
    parser.add_argument("--from", type=int, default=0, metavar="K", dest="first", help="the first of them")
    parser.add_argument("--seed", type=int, metavar="K", help="run this one only")
    parser.add_argument("--trace", action="store_true", help="with --seed: print everything that happens")
    parser.add_argument("--job", choices=sorted(JOBS), help="always this job, not one that is drawn")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="break the engine in this way")
    parser.add_argument("--processes", type=int, default=1, metavar="P", help="run so many seeds at the same time")
    return parser


def _run_one(options: argparse.Namespace) -> int:
    with _broken(options.mutant):
        simulation = _simulation(options.seed, options.job, options.mutant)
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


def _run_some(turn: tuple[list[int], str | None, str | None]) -> list[Finding]:
    seeds, job, mutant = turn
    found: list[Finding] = []
    with _broken(mutant):
        for seed in seeds:
            try:
                found.append((seed, _simulation(seed, job, mutant).run()))
            except SimulationFailed as failure:
                found.append((seed, str(failure)))
    return found


def _simulation(seed: int, job: str | None, mutant: str | None) -> Simulation:
    return Simulation(seed, job=job) if mutant is None else MUTANTS[mutant].simulation(seed)


def _broken(mutant: str | None) -> AbstractContextManager[None]:
    return nullcontext() if mutant is None else MUTANTS[mutant].applied()


def _report(turns: Iterable[list[Finding]], total: int, mutant: str | None) -> int:
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
        print(f"in the mean: {sum(run.attempts for run in runs) / len(runs):.1f} attempts, "
              f"{sum(run.epochs for run in runs) / len(runs):.1f} complete epochs, "
              f"{sum(len(run.faults) for run in runs) / len(runs):.1f} faults")
    if failed:
        print(f"failed: {' '.join(map(str, sorted(failed)))}\n"
              f"again:  python -m tidegate.testing.simulation --seed {min(failed)} --trace"
              + ("" if mutant is None else f" --mutant {mutant!r}"))
    return 1 if failed else 0


def _flat(turns: Iterable[list[Finding]]) -> Iterator[Finding]:
    for turn in turns:
        yield from turn


def _told(outcome: Outcome) -> str:
    return (f"{outcome.attempts} attempts, {outcome.epochs} complete epochs, {len(outcome.faults)} faults, "
            f"{outcome.simulated_ms} ms simulated in {outcome.event_count} events")


if __name__ == "__main__":
    sys.exit(main())
