"""A simulated run of a job, from its first deployment to its end, with everything that happens under a seed.

    simulation = Simulation(build, seed=17)
    outcome = simulation.run()                  # raises SimulationFailed, with the story, if something is wrong
    assert sorted(outcome.committed["out"]) == expected, simulation.story()

`build` is a function that builds your job on the pipeline it is given (own_job.py describes what becomes of its sources and
sinks). The seed decides the job's layout, what goes wrong, and whether the job is stopped or cancelled half-way and started
again with another number of slots. The run ends when the job has finished and every process, zombies included, is gone; then
all checks are made (checks.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from tidegate.control.settings import JobSettings, Snapshots, Tuning
from tidegate.dataflow.operators.sink import SinkSpec
from tidegate.dataflow.optimiser import make_plan
from tidegate.dataflow.pipeline import Pipeline
from tidegate.dataflow.plan import Plan
from tidegate.driver.reports import Status
from tidegate.driver.savepoints import SavepointOrder
from tidegate.errors import JobError
from tidegate.protocol.restart import FixedDelay
from tidegate.store.base import Store
from tidegate.store.opening import forget_memory_store
from tidegate.testing.experimental import ExperimentalSnapshots
from tidegate.testing.simulation.background import Coroutines, heap_that_pauses
from tidegate.testing.simulation.checks import FinalState, Witness, check_outside, check_savepoint, check_store
from tidegate.testing.simulation.external import External, TransactionalSink
from tidegate.testing.simulation.faults import DEFAULT_RATES, MOST_MISHAPS, FaultRates, Faults, Trip
from tidegate.testing.simulation.network import Wiring
from tidegate.testing.simulation.own_job import OwnJob
from tidegate.testing.simulation.processes import CoordinatorProcess, SlotProcess
from tidegate.testing.simulation.site import Row, SimulatedJob, Site
from tidegate.testing.simulation.store import ProcessStore, SharedMemory
from tidegate.testing.simulation.world import MONOTONIC_START_US, StepClock, Violation, World

LONGEST_US = 200_000_000
MOST_EVENTS = 100_000
SNAPSHOT_AFTER_HEALING_US = 20_000_000  # the promise is 60 s, but time-outs here are shorter than by default
DRIVER_RESTART_US = 10_000
QUIET, BUSY = 0.7, 0.3  # the share of a source's polls that find nothing; BUSY in modes that log records in flight
SLOW_CHANNELS = 10.0  # so that many records are in flight, and many alignments time out
MOST_SLOTS = 4


# The settings of each mode. All modes except at_least_once count every record once.
MODES: dict[str, Callable[[Random], dict[str, Any]]] = {
    "exactly_once": lambda rng: {},
    "at_least_once": lambda rng: {"mode": "at_least_once"},
    "unaligned": lambda rng: {"mode": "unaligned"},
    "alignment_timeout": lambda rng: {"alignment_timeout": rng.choice(("1 ms", "1 ms", "3 ms"))},
    "chandy_lamport": lambda rng: {"protocol": "chandy_lamport"},
    # With longer intervals than the others, or the job would do nothing else.
    "stop_the_world": lambda rng: {"protocol": "stop_the_world", "every": rng.choice(("6 ms", "15 ms", "30 ms"))},
}
# Drawn for a user's job: the modes that aren't experiments and count every record once.
DRAWN_MODES = ("alignment_timeout", "exactly_once", "unaligned")


class SimulationFailed(AssertionError):
    """Something happened that must not; the message is the story of how."""


@dataclass(frozen=True, slots=True)
class Interruption:
    """The user ends the job after a while, and starts it again with another number of slots."""

    after_us: int
    how: str  # "stop", "drain" or "cancel"
    then_slots: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run has done, for comparisons and statistics."""

    digest: str
    event_count: int
    simulated_ms: int
    attempts: int
    epochs: int
    faults: tuple[str, ...]
    committed: Mapping[str, list[Row]] = field(repr=False)  # by sink: what a reader sees, in the order of commits


class Simulation:
    """A run of `job`: a function that builds it on the pipeline it is given.

    `mode` is one of `MODES`, by default drawn from the seed; all except "at_least_once" count every record once. `rates`
    define how much goes wrong; a run with `NO_FAULTS` gives the output to compare others with. The job's layout is drawn
    from `rng`.
    """

    def __init__(
        self,
        job: SimulatedJob | Callable[[Pipeline], object],
        *,
        seed: int,
        mode: str | None = None,
        rates: FaultRates = DEFAULT_RATES,
        rng: Random | None = None,
    ) -> None:
        self.seed = seed
        self.world = World(seed)
        self.coroutines = Coroutines()
        self.step_clock = StepClock(seed)
        self.trip = Trip()
        self.shared = SharedMemory()
        rng = self._rng = rng or Random(f"layout {seed}")
        self.mode = rng.choice(DRAWN_MODES) if mode is None else mode
        if self.mode not in MODES:
            raise JobError(f"mode={mode!r}: give one of {', '.join(MODES)}")
        self.exact = self.mode != "at_least_once"
        self.job = job if isinstance(job, SimulatedJob) else OwnJob(job)
        self.settings = _settings(rng, self.mode)
        self.witness = Witness(self.world, self.shared.memory, logs_in_flight=self.settings.snapshots.logs_in_flight)
        self.channel_elements = rng.choice((1, 3, 16))
        self.interruptions = _interruptions(rng, self.job)[: rates.most_interruptions]
        self.coordinators: list[CoordinatorProcess] = []
        self.savepoints: list[SavepointOrder] = []
        self.finished = False
        self.faults = Faults(self, self.world.rng, rates, span=self.job.span)
        if self.settings.snapshots.logs_in_flight:
            self.world.slowness["channel"] = SLOW_CHANNELS
        self.external = External(self.world, outage=self.faults.outage, before_commit=self.witness.before_commit)
        self.witness.external = self.external
        self._slots = rng.randint(1, self.job.most_slots)
        self._site = self._new_site(self._slots)
        self._interruption: Interruption | None = None  # requested, and not done yet
        self._starting = 0  # coordinators that are about to start
        self.again = f"Simulation({self.job.name}, seed={seed}, mode={self.mode!r}, rates={rates})"
        self._plan(self._site)  # an error in the job is raised here, not in `run`

    # The run.

    def run(self) -> Outcome:
        with heap_that_pauses(self.world, self.coroutines):
            try:
                self._begin()
                self._until(lambda: self.finished)
                self._until(
                    lambda: not (self._starting or self.living_slots() or any(each.alive for each in self.coordinators))
                )
                self._check_end()
            except Violation:
                raise SimulationFailed(self.story(str(self.world.violation))) from None
            except Exception as error:
                raise SimulationFailed(self.story(f"{type(error).__name__}: {error}")) from error
            finally:
                self._tear_down()
        return Outcome(
            digest=self.world.trace.digest,
            event_count=self.world.event_count,
            faults=tuple(self.faults.struck),
            simulated_ms=(self.world.now_us - MONOTONIC_START_US) // 1000,
            epochs=len(self.witness.announced),
            attempts=self._attempts(),
            committed={sink: self.external.rows(sink) for sink in self._sinks()},
        )

    def story(self, what: str = "the output is wrong") -> str:
        """Return what went wrong, in which run, and after which events: for the message of an assertion."""
        return "\n".join(
            (
                what,
                f"seed {self.seed}, job {self.job.name!r}, mode {self.mode}, {self._slots} slots, {self.settings}",
                f"interruptions: {self.interruptions}",
                "faults:",
                *(f"  {fault}" for fault in self.faults.struck),
                f"the last of {self.world.trace.count} lines:",
                *(f"  {line}" for line in self.world.trace.last_lines),
                f"again: {self.again}",
            )
        )

    def _begin(self) -> None:
        self._start_coordinator()
        if self.interruptions:
            self.world.after(self.interruptions[0].after_us, self._interrupt)
        for _ in range(self._rng.randrange(3)):
            self.world.after(self._rng.randrange(int(150_000 * self.job.span)), self._ask_snapshot)
        for number in range(self._rng.randrange(3)):
            self.world.after(self._rng.randrange(int(150_000 * self.job.span)), partial(self._ask_savepoint, number))

    def _until(self, reached: Callable[[], bool]) -> None:
        world = self.world
        while not reached():
            if not world.happen():
                world.violate("nothing happens any more")
            if world.violation is not None:
                raise Violation
            if world.event_count > MOST_EVENTS or world.now_us > MONOTONIC_START_US + LONGEST_US:
                world.violate("the job doesn't come to its end")
            healed_us = self.faults.healed_us
            if (
                healed_us is not None
                and not self.finished
                and world.now_us > healed_us + SNAPSHOT_AFTER_HEALING_US
                and (not self.witness.announced_us or self.witness.announced_us[-1] < healed_us)
            ):
                world.violate("no snapshot was completed for long after everything was healed")

    def _check_end(self) -> None:
        # A driver that ends, even if it is cancelled, may leave behind one snapshot that it was about to release.
        most = self.settings.snapshots.retain + len(self.coordinators) + MOST_MISHAPS * len(self.faults.struck)
        manifest = check_store(self.shared.memory, retain=most)
        assert not self.witness.announced or manifest.epoch >= max(self.witness.announced)[0]
        for order in self.savepoints:
            check_savepoint(order)
        check_outside(self.external, attempts=self._attempts())
        self.job.check(self.external.rows, FinalState(manifest, self.shared.memory, self._rng), exact=self.exact)
        if len(self.coordinators) == 1:
            self.job.check_delivered(self.coordinators[0].coordinator.delivered, exact=self.exact)

    def _tear_down(self) -> None:
        processes: list[SlotProcess | CoordinatorProcess] = list(self.coordinators)
        processes[:0] = [slot for each in self.coordinators for deployment in each.deployments for slot in deployment.slots]
        for process in processes:
            process.crash("at the end of the simulation")
        self.coroutines.close()

    # Drivers come and go.

    def _start_coordinator(self) -> None:
        number, site = len(self.coordinators) + 1, self._site
        self.world.tell(f"coordinator {number} starts with {site.slots} slots")
        coordinator = CoordinatorProcess(
            self,
            number=number,
            plan=self._plan(site),
            on_end=lambda: self._coordinator_ended(coordinator),
        )
        self.coordinators.append(coordinator)
        self._ask_interruption()

    def start_coordinator_later(self) -> None:
        """Start another driver soon, even if the present one is alive."""
        self._starting += 1

        def start() -> None:
            self._starting -= 1
            self._start_coordinator()

        self.world.after(self.world.delay_us("boot", DRIVER_RESTART_US), start)

    def _coordinator_ended(self, coordinator: CoordinatorProcess) -> None:
        status = coordinator.coordinator.status
        if status is Status.FAILED:
            self._check_failure(coordinator)
        if coordinator is not self.coordinators[-1] or self._starting:
            return  # a zombie
        if coordinator.crashed or status is Status.FAILED:
            self.start_coordinator_later()
        elif status is Status.FINISHED:
            self.finished = True
        else:
            done = self._interruption
            if done is None or (status is Status.CANCELLED) != (done.how == "cancel"):
                self.world.violate(f"{coordinator.name} ends as {status.value}, which nobody asked for")
            self._interruption = None
            self.interruptions = self.interruptions[1:]
            if self.interruptions:
                self.world.after(self.interruptions[0].after_us, self._interrupt)
            self._slots = done.then_slots
            self._site = self._new_site(done.then_slots)
            self.start_coordinator_later()

    def _check_failure(self, coordinator: CoordinatorProcess) -> None:
        """Check that a job which gave up had a reason to."""
        why = coordinator.coordinator.failures[-1].message
        if coordinator.coordinator.failures[-1].stopped and self._interruption is not None:
            return  # it was restarting: the request goes to the next driver
        fenced = why.startswith("FencedOff") and (len(self.coordinators) > 1 or self.faults.flipped)
        corrupt = why.startswith("CorruptFile") and self.faults.flipped
        # If the store fails at the first access, the address may be wrong, and the job reports that to the user at once.
        unreachable = not coordinator.coordinator.attempts and why.startswith(("StoreError", "NotFound"))
        if not (fenced or corrupt or (unreachable and self.faults.struck)):
            self.world.violate(f"{coordinator.name} gave up: {why}")

    def _interrupt(self) -> None:
        if not self.finished:
            self._interruption = self.interruptions[0]
            self._ask_interruption()

    def _ask_interruption(self) -> None:
        """Ask the present driver for the interruption. Called again when another driver has taken its place."""
        asked = self._interruption
        if asked is not None and self.coordinators and self.coordinators[-1].alive:
            self.world.tell(f"the user asks {self.coordinators[-1].name} for {asked.how}")
            if asked.how == "cancel":
                self.coordinators[-1].request(lambda coordinator: coordinator.cancel())
            else:
                self.coordinators[-1].request(lambda coordinator: coordinator.stop(drain=asked.how == "drain"))

    def _ask_snapshot(self) -> None:
        self.coordinators[-1].request(lambda coordinator: coordinator.snapshot())

    def _ask_savepoint(self, number: int) -> None:
        name = f"simulation-savepoint-{number}"
        forget_memory_store(name)
        order = SavepointOrder(f"memory://{name}")
        self.savepoints.append(order)
        self.coordinators[-1].request(lambda coordinator: coordinator.savepoints.take(order))

    def _new_site(self, slots: int) -> Site:
        return Site(
            world=self.world,
            external=self.external,
            trip=self.trip,
            slots=slots,
            exact=self.exact,
            idle=BUSY if self.settings.snapshots.logs_in_flight else QUIET,
            rng=self._rng,
        )

    def _sinks(self) -> list[str]:
        """Return the names of the sinks that write to the outside."""
        nodes = self._plan(self._site).nodes
        return sorted(
            node.name for node in nodes if isinstance(node.spec, SinkSpec) and isinstance(node.spec.sink, TransactionalSink)
        )

    def _plan(self, site: Site) -> Plan:
        if site.plan is None:
            pipeline = Pipeline()
            self.job.build(pipeline, site)
            tuning = self.settings.tuning
            site.plan = make_plan(
                self.job.placed(pipeline.build(), site),
                slots=site.slots,
                key_group_count=tuning.key_group_count,
                chaining=tuning.chaining,
                combine=self.job.combine(site),
            )
        return site.plan

    def _attempts(self) -> int:
        return max((coordinator.coordinator.attempt for coordinator in self.coordinators), default=0)

    # What processes and faults use.

    def store_for(self, process: SlotProcess | CoordinatorProcess) -> Store:
        return ProcessStore(
            self.shared,
            process,
            world=self.world,
            coroutines=self.coroutines,
            witness=self.witness,
            mishap=self.faults.mishap,
        )

    def living_slots(self) -> list[SlotProcess]:
        return [
            slot
            for coordinator in self.coordinators
            for deployment in coordinator.deployments
            for slot in deployment.slots
            if slot.alive
        ]

    def living_wirings(self) -> list[Wiring]:
        return [deployment.wiring for coordinator in self.coordinators for deployment in coordinator.deployments[-1:]]

    def current_coordinator(self) -> CoordinatorProcess | None:
        return self.coordinators[-1] if self.coordinators and self.coordinators[-1].alive and not self._starting else None


def _settings(rng: Random, mode: str) -> JobSettings:
    snapshots: dict[str, Any] = dict(
        every=rng.choice(("3 ms", "6 ms", "15 ms")),
        min_pause=rng.choice((0, 0, "4 ms")),
        timeout=rng.choice(("30 ms", "100 ms", "1 s")),
        tolerable_failures=rng.choice((0, 2, 5, 9)),
        retain=rng.randint(1, 3),
    )
    snapshots |= MODES[mode](rng)
    kind = ExperimentalSnapshots if "protocol" in snapshots else Snapshots
    return JobSettings(
        name="simulated",
        snapshots=kind(to="memory://simulation", **snapshots),
        restart=FixedDelay(attempts=1000, delay=rng.choice(("0 ms", "5 ms", "40 ms"))),
        tuning=Tuning(
            max_batch_rows=rng.randint(1, 7),
            linger=f"{rng.randrange(3)} ms",
            key_group_count=rng.randint(MOST_SLOTS, 16),
            chaining=rng.random() < 0.7,
            heartbeat="20 ms",
            heartbeat_timeout="150 ms",
            deploy_timeout="1 s",
            loop_memory=rng.choice((0, 200, 1 << 20)),
        ),
    )


def _interruptions(rng: Random, job: SimulatedJob) -> list[Interruption]:
    count = rng.choice((0, 0, 0, 1, 1, 2))
    ways = ("stop", "stop", "drain", "cancel") if job.can_drain else ("stop", "stop", "cancel")
    return [
        Interruption(int(rng.randrange(10_000, 150_000) * job.span), rng.choice(ways), rng.randint(1, job.most_slots))
        for _ in range(count)
    ]
