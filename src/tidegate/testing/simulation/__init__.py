"""A deterministic simulation of the real protocol, runtime, state and sink code.

    python -m tidegate.testing.simulation --seeds 300

Slots and masters do no I/O of their own; here they are given a simulated clock, network, store and background, under
a seeded scheduler that lets processes crash, stop and linger, messages be late, writes be torn. Whatever a seed lets
happen, the committed output must be that of a sequential computation, and a list of invariants must hold (checks.py).
The same seed gives the same run.

    world        time, chance, the trace            jobs         the dataflows and what must come out
    network      channels and control links         faults       what goes wrong, and when
    background   coroutines for background work     checks       what must hold, during a run and after it
    store        the store, as each process sees it mutants      broken engines, which the simulation must catch
    external     the world behind a two-phase sink  site         where a job is built and compared
    processes    slots and drivers                  simulation   one run from beginning to end
"""

from __future__ import annotations

from tidegate.testing.simulation.faults import NO_FAULTS, FaultRates
from tidegate.testing.simulation.simulation import Outcome, Simulation, SimulationFailed

__all__ = ["NO_FAULTS", "FaultRates", "Outcome", "Simulation", "SimulationFailed"]
