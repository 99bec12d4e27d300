"""A deterministic simulation of the real protocol, runtime, state and sink code.

    outcome = Simulation(build, seed=17).run()      # `build` builds your job on the pipeline it is given

Slots and coordinators do no I/O themselves. Here they get a simulated clock, network, store and background, under a seeded
scheduler that makes processes crash, stop and outlive their attempt, messages late or lost, and writes torn. Whatever
happens under a seed, the committed output must be that of a run without faults (with at_least_once: nothing may be missing),
and a list of invariants must hold (checks.py). The same seed gives the same run. docs/testing.md shows how to simulate a job
of yours; the project's own scenarios are in tests/simulation.

    world        time, chance, the trace            site         where a job is built
    network      channels and control links         own_job      how a user's job is placed in the simulated world
    background   coroutines for background work     faults       what goes wrong, and when
    store        the store, as each process sees it checks       what must hold, during a run and after it
    external     the system that a two-phase sink   simulation   one run from beginning to end
                 writes to
    processes    slots and drivers
"""

from __future__ import annotations

from tidegate.testing.simulation.faults import NO_FAULTS, FaultRates
from tidegate.testing.simulation.simulation import Outcome, Simulation, SimulationFailed

__all__ = ["NO_FAULTS", "FaultRates", "Outcome", "Simulation", "SimulationFailed"]
