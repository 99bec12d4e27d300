"""What a mutant is: an engine that breaks one rule, as somebody did before (docs/promises.md). The simulation must notice.

with MUTANTS["no alignment"].applied():
    scenario(seed).run()          # raises SimulationFailed, for one of the first seeds
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from tests.simulation.scenarios import scenario
from tidegate.testing.simulation.faults import DEFAULT_RATES, FaultRates
from tidegate.testing.simulation.simulation import MODES, Interruption, Simulation

ALL = tuple(MODES)

# For mutants that only show after a restore: more of what leads to one.
RESTORES = FaultRates(kinds=("slot dies", "function raises", "dies at the store", "coordinator dies"), most_faults=12)

# For those that only show when a snapshot is restored at another parallelism: that, again and again.
RESCALES = tuple(Interruption(90_000, "cancel", slots) for slots in 2 * (3, 2, 4))


@dataclass(frozen=True, slots=True)
class Mutant:
    """`patches` are (owner, attribute, what to put there, given what was there). `row` is that of docs/promises.md.

    `modes` are those in which it must be noticed. In the others it breaks nothing that they promise.
    """

    name: str
    why: str
    patches: tuple[tuple[Any, str, Callable[[Any], Any]], ...]
    row: int | None = None
    rates: FaultRates = DEFAULT_RATES
    job: str | None = None
    modes: tuple[str, ...] = ("exactly_once",)
    interruptions: tuple[Interruption, ...] = ()  # in place of those that are drawn
    ends_steps: bool = False  # whether steps may end before their work is done, which changes the course of a seed

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, attribute, mutate in self.patches:
                original = owner.__dict__[attribute]
                stack.callback(setattr, owner, attribute, original)
                setattr(owner, attribute, mutate(original))
            yield

    def simulation(self, seed: int, mode: str | None = None) -> Simulation:
        """One that may show it. To be run while the mutant is applied."""
        simulation = scenario(seed, job=self.job, mode=mode or self.modes[0], rates=self.rates)
        if not self.ends_steps:
            simulation.step_clock.stop()
        simulation.interruptions = list(self.interruptions) or simulation.interruptions
        return simulation
