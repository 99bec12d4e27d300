"""A deterministic simulation of the real protocol, runtime, state and sink code.

    python -m tidegate.testing.simulation --seeds 300

Slots and coordinators do no I/O of their own; here they are given a simulated clock, network, store and background, under
a seeded scheduler that lets processes crash, stop and linger, messages be late or lost, writes be torn. The seed draws
the dataflow, among them random graphs with and without loops, and the mode of alignment. Whatever it lets happen, the
committed output must be that of a sequential computation (where records may be processed twice: none of it may be
missing), and a list of invariants must hold (checks.py). The same seed gives the same run.

    world        time, chance, the trace            jobs         dataflows that are written down: what must come out
    network      channels and control links         loops        those of them that have loops
    background   coroutines for background work     random_graphs, steps   those that are drawn, with an interpreter
    store        the store, as each process sees it site         where a job is built and compared
    external     the world behind a two-phase sink  faults       what goes wrong, and when
    processes    slots and drivers                  checks       what must hold, during a run and after it
    simulation   one run from beginning to end      mutants      broken engines, which the simulation must catch
"""

from __future__ import annotations

from tidegate.testing.simulation.faults import NO_FAULTS, FaultRates
from tidegate.testing.simulation.simulation import Outcome, Simulation, SimulationFailed

__all__ = ["NO_FAULTS", "FaultRates", "Outcome", "Simulation", "SimulationFailed"]
