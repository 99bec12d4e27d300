"""One simulated life of a job: from its first deployment to its end, with everything that a seed lets happen.

    Simulation(seed=17).run()           raises SimulationFailed, with the story, where something is wrong

The seed decides the job, its layout, what goes wrong, and whether it is stopped or cancelled half-way to go on with
another number of slots. The run ends when the job has finished and every process, zombies included, is gone; then all
checks are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from types import TracebackType

from tidegate.dataflow.optimiser import make_plan
from tidegate.dataflow.plan import Plan
from tidegate.dataflow.stream import Pipeline
from tidegate.protocol.restart import FixedDelay
from tidegate.runtime.master import Master
from tidegate.runtime.messages import Message
from tidegate.runtime.reports import Status
from tidegate.runtime.settings import JobSettings, Snapshots, Tuning
from tidegate.store.base import Store
from tidegate.testing.simulation.background import Coroutines, heap_that_gives_way
from tidegate.testing.simulation.checks import FinalState, Witness, check_outside, check_store
from tidegate.testing.simulation.external import External
from tidegate.testing.simulation.faults import FaultRates, Faults, Trip
from tidegate.testing.simulation.jobs import JOBS, SimulatedJob, Site
from tidegate.testing.simulation.network import Wiring
from tidegate.testing.simulation.processes import MasterProcess, SlotProcess
from tidegate.testing.simulation.store import ProcessStore, SharedMemory
from tidegate.testing.simulation.world import Violation, World

LONGEST_US = 400_000_000
MOST_EVENTS = 400_000
SNAPSHOT_AFTER_HEALING_US = 60_000_000
DRIVER_RESTART_US = 20_000
MOST_DRIVERS = 60


class SimulationFailed(AssertionError):
    """Something that must not happen did; the message is the story of how."""


@dataclass(frozen=True, slots=True)
class Interruption:
    """The user ends the job after a while, and starts it again with other slots."""

    after_us: int
    how: str                # "stop", "drain" or "cancel"
    then_slots: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run has come to, for those who compare or count."""

    digest: str
    event_count: int
    simulated_ms: int
    attempts: int
    epochs: int
    faults: tuple[str, ...]


class Simulation:
    """`job` and `rates` are drawn from the seed or the default unless given."""

    def __init__(self, seed: int, *, job: str | None = None, rates: FaultRates | None = None) -> None:
        self.seed = seed
        self.world = World(seed)
        self.coroutines = Coroutines()
        self.trip = Trip()
        rng = self._rng = Random(f"scenario {seed}")
        self.shared = SharedMemory()
        self.witness = Witness(self.world, self.shared.memory)
        self.job: SimulatedJob = JOBS[job or rng.choice(sorted(JOBS))](rng)
        self.settings = _settings(rng)
        self.chaining = rng.random() < 0.7
        self.channel_elements = rng.choice((1, 3, 16))
        self.interruptions = _interruptions(rng, can_drain=self.job.can_drain)
        self.masters: list[MasterProcess] = []
        self._site_number = 0
        self.faults = Faults(self, self.world.rng, rates or FaultRates())
        self.external = External(self.world, outage=self.faults.outage, before_commit=self.witness.before_commit)
        self.site = self._new_site(rng.randint(1, 4))
        self._interrupting: Interruption | None = None

    # The run.

    def run(self) -> Outcome:
        with self, heap_that_gives_way(self.world, self.coroutines):
            try:
                self._start_master()
                self._until(lambda: self._over())
                self._until(lambda: not self.living_slots() and not any(master.alive for master in self.masters))
                self._check_end()
            except Violation:
                raise SimulationFailed(self.story(str(self.world.violation))) from None
            except AssertionError as error:
                raise SimulationFailed(self.story(f"{error}")) from error
        announced = self.witness.announced
        return Outcome(
            digest=self.world.trace.digest, event_count=self.world.event_count, faults=tuple(self.faults.struck),
            simulated_ms=self.world.clock.monotonic_ms(), epochs=len(announced),
            attempts=max((master.master.attempt for master in self.masters), default=0))

    def _until(self, reached: object) -> None:
        raise AssertionError

    def story(self, what: str) -> str:
        return what
