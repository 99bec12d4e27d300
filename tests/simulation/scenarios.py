"""A simulation whose job and mode are drawn from the seed too: what the project tests itself with.

scenario(17).run()        raises SimulationFailed, with the story, if something is wrong

jobs         dataflows that are written down: what must come out      loops    those of them that have loops
random_graphs, steps   dataflows that are drawn, with an interpreter  expected how rows are compared
mutants      broken engines, which the simulation must catch
"""

from __future__ import annotations

from random import Random

from tests.simulation.jobs import DRAWN, JOBS
from tidegate.testing.simulation import FaultRates, Simulation
from tidegate.testing.simulation.faults import DEFAULT_RATES
from tidegate.testing.simulation.simulation import MODES

# A third of the seeds have a job that is written down, a third a random graph, a third a random graph with loops.
# Crowds of timers take the place of another job in some of them, so that all other seeds kept their job when it was added.
DRAWN_JOBS = (*sorted(DRAWN), *["random graph", "random loops"] * 4)
CROWDS = 1 / 15


def scenario(seed: int, *, job: str | None = None, mode: str | None = None, rates: FaultRates = DEFAULT_RATES) -> Simulation:
    """`job` and `mode` are drawn unless given."""
    rng = Random(f"scenario {seed}")
    drawn, drawn_mode = rng.choice(DRAWN_JOBS), rng.choice(sorted(MODES))
    if Random(f"many windows {seed}").random() < CROWDS:
        drawn = "crowds"
    simulation = Simulation(JOBS[job or drawn](rng), seed=seed, mode=mode or drawn_mode, rates=rates, rng=rng)
    simulation.again = f"python -m tests.simulation --seed {seed} --job {simulation.job.name!r} --mode {simulation.mode}"
    return simulation
