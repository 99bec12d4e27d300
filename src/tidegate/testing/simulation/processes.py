"""The simulated processes: a slot's, and the driver's with the coordinator in it.

They replace `driver/hosting.py` and `slot/hosting.py` around the same `Slot` and `Coordinator`. In each turn a process does
one of the things that wait for it: a message, an outcome of background work, a step. A process can be stopped for a while
(as by SIGSTOP), can end, and can die at any moment; its files, and what it sent before, remain.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tidegate.control.messages import Deploy, Failed, Message, Register
from tidegate.dataflow.plan import Plan
from tidegate.driver.coordinator import Coordinator
from tidegate.errors import ProtocolError
from tidegate.slot.slot import Slot
from tidegate.slot.world import SlotWorld
from tidegate.snapshots.catalog import SnapshotCatalog
from tidegate.testing.simulation.background import Coroutine, SimulatedBackground
from tidegate.testing.simulation.network import ControlLink, CoordinatorLinks, SlotNetwork, Wiring, decoded
from tidegate.testing.simulation.world import ProcessCrashed

if TYPE_CHECKING:
    from tidegate.testing.simulation.simulation import Simulation

TURN_US = 120
IDLE_TURN_US = 400
TICK_US = 2_000
BOOT_US = 3_000
STAGE_ABORTED_US = 60_000  # how long Spark takes to notice that one of the tasks is gone
CANCELLED_US = 20_000

# Messages that may be lost without harm (row 6): the epoch isn't completed, or the next one makes up for it. When any other
# message is lost, its link is lost, too.
MISSED = frozenset(
    {"Trigger", "Acknowledge", "Decline", "Abort", "Complete", "Committed", "Heartbeat", "TimeReached", "LeastTimes"}
)
# Messages that may come twice. A link doesn't repeat messages, but a peer that doesn't know whether one arrived may.
REPEATABLE = frozenset(
    {
        "Trigger",
        "EndInput",
        "Acknowledge",
        "Decline",
        "Abort",
        "Complete",
        "InputEnded",
        "Heartbeat",
        "TimeReached",
        "LeastTimes",
        "Committed",
        "Done",
    }
)

# Errors that may be the cause of a failure. Any other error is a bug, above all a failed assertion.
KNOWN_FAILURES = (
    "ProtocolError",
    "StoreError",
    "NotFound",
    "AlreadyExists",
    "CorruptFile",
    "CommitError",
    "HandshakeError",
    "FencedOff",
)


class Process:
    """What both kinds of process have in common: a loop that is woken, can be stopped, and ends."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.name = name
        self.alive = True
        self.crashed = False
        self.frozen_until_us = 0
        self.astray: str | None = None  # what happens to the next message: it is "lost" or "doubled"
        self._simulation = simulation
        self._world = simulation.world
        self._wake_us: int | None = None
        self.background = SimulatedBackground(self._world, simulation.coroutines, self)

    def wake(self) -> None:
        self._wake_at(self._world.now_us)

    def wake_soon(self) -> None:
        self._wake_at(self._world.now_us + self._world.delay_us("cpu", TURN_US))

    def _wake_at(self, at_us: int) -> None:
        if self.alive and (self._wake_us is None or at_us < self._wake_us):
            self._wake_us = at_us
            self._world.at(at_us, lambda: self._woken(at_us))

    def _woken(self, at_us: int) -> None:
        if not self.alive or self._wake_us != at_us:
            return
        self._wake_us = None
        if self._world.now_us < self.frozen_until_us:
            self._wake_at(self.frozen_until_us)
            return
        self._world.acting = self
        try:
            self._turn()
        except ProcessCrashed:
            assert self.crashed

    def _astray(self, message: Message) -> str | None:
        """Return what happens to a message: "lost", "doubled", or "cut" if its loss must break the link, since no time-out
        would notice it. Mostly None: it is delivered."""
        how, self.astray = self.astray, None
        kind = type(message).__name__
        if how == "lost" and (kind not in MISSED or getattr(message, "ending", None) is not None):
            how = "cut"
        elif how == "doubled" and kind not in REPEATABLE:
            how = None
        if how is not None:
            self._world.tell(f"{self.name}: {kind} is {how}")
        return how

    def _turn(self) -> None:
        raise AssertionError("a process is a slot's or a coordinator's")


class SlotProcess(Process):
    def __init__(
        self,
        simulation: Simulation,
        *,
        index: int,
        attempt: int,
        wiring: Wiring,
        coordinator: CoordinatorProcess,
        on_end: Callable[[], None],
    ) -> None:
        super().__init__(simulation, f"slot {index} of attempt {attempt}")
        self.index = index
        self.attempt = attempt
        self.wiring = wiring
        self.link = ControlLink(self._world, self, coordinator)
        self._coordinator = coordinator
        self._on_end = on_end
        self._inbox: deque[str | None] = deque()
        self._lost_channels: deque[str] = deque()
        self._restoring: Coroutine | None = None
        world = SlotWorld(
            network=SlotNetwork(wiring, self),
            store=simulation.store_for(self),
            clock=self._world.clock,
            background=self.background,
            tell=self._tell,
            make_budget=simulation.step_clock.make_budget,
        )
        self.slot = Slot(index, plan=coordinator.plan, settings=simulation.settings, attempt=attempt, world=world)
        self._world.after(self._world.delay_us("boot", BOOT_US), self._boot)

    def _boot(self) -> None:
        if not self.alive:
            return
        if not self._coordinator.admits(self.link):
            self._world.tell(f"{self.name}: refused by {self._coordinator.name}")
            self.end()
            return
        self._tell(Register(self.index, "simulation", self.index, 1000 * self.attempt + self.index))
        self.wake_soon()

    # What the slot receives.

    def arrived(self, wire: str | None) -> None:
        self._inbox.append(wire)
        self.wake_soon()

    def channel_lost(self, reason: str) -> None:
        self._lost_channels.append(reason)
        self.wake_soon()

    # Its loop.

    def _turn(self) -> None:
        if self._restoring is not None:
            return
        waiting: list[Callable[[], object]] = [self._step]
        if self._inbox:
            waiting.append(self._take_message)
        if self.background.has_outcomes:
            waiting.append(self.background.deliver)
        if self._lost_channels:
            waiting.append(self._take_loss)
        busy = (waiting[0] if len(waiting) == 1 else self._world.rng.choice(waiting))() or len(waiting) > 1
        if not self.alive or self._restoring is not None:
            return
        if self.slot.ended:
            self.end()
        elif busy:
            self._wake_at(self._world.now_us + self._world.delay_us("cpu", TURN_US))
        else:
            self._wake_at(self._world.now_us + max(1000 * self.slot.wait_ms(), IDLE_TURN_US))

    def _step(self) -> bool:
        self._simulation.faults.note("step", self)
        return self.alive and self.slot.step()

    def _take_message(self) -> None:
        wire = self._inbox.popleft()
        if wire is None:
            self._world.tell(f"{self.name}: its link is gone")
            self.end()
            return
        message = decoded(wire)
        kind = type(message).__name__
        self._world.tell(f"{self.name}: gets {kind} {getattr(message, 'epoch', '')}")
        self._simulation.faults.note(kind, self)
        if not self.alive:
            return
        match self._astray(message):
            case "lost":
                return
            case "cut":
                self.end()
                return
            case "doubled":
                self._inbox.appendleft(wire)
        if isinstance(message, Deploy):
            self._restoring = Coroutine(self._simulation.coroutines, lambda: self.slot.on_message(message))
            self._restore(self._restoring)
        else:
            self.slot.on_message(message)

    def _take_loss(self) -> None:
        reason = self._lost_channels.popleft()
        self._world.tell(f"{self.name}: {reason}")
        self.slot.on_channel_lost(reason)

    def _restore(self, coroutine: Coroutine) -> None:
        """Read the state of a slot that is being deployed. The slot does nothing else meanwhile."""
        if self._restoring is not coroutine:
            return
        if self._world.now_us < self.frozen_until_us:
            self._world.at(self.frozen_until_us, lambda: self._restore(coroutine))
            return
        self._world.acting = self
        coroutine.resume()
        if not coroutine.done:
            self._world.after(coroutine.pause_us, lambda: self._restore(coroutine))
        elif self.alive:
            self._restoring = None
            self.wake_soon()

    def _tell(self, message: Message) -> None:
        if isinstance(message, Failed):
            self._world.tell(f"{self.name}: failed: {message.message.splitlines()[0]}")
            if not message.message.startswith(KNOWN_FAILURES) and not any(
                theirs in message.message for theirs in ("SimulatedFailure", "ScriptedCrash", "CommitError")
            ):
                self._world.violate(
                    f"{self.name} failed with something that isn't a failure of the world: {message.message}"
                )
        self.link.up.send(message)

    # Its end.

    def end(self) -> None:
        """End in order: what the process sent arrives, and its current background work is finished."""
        if self.alive:
            self.alive = False
            self._world.tell(f"{self.name}: ends")
            self.slot.close()
            self.background.close()
            self._gone(died=False)

    def crash(self, reason: str) -> None:
        if self.alive:
            self.alive, self.crashed = False, True
            self._world.tell(f"{self.name}: dies {reason}")
            self.background.kill()
            restoring, self._restoring = self._restoring, None
            if restoring is not None and restoring is not self._simulation.coroutines.running and not restoring.done:
                restoring.kill()
            self._gone(died=True)
        else:
            self.crashed = True
            self.background.kill()

    def _gone(self, *, died: bool) -> None:
        self.link.up.close(keeps=self._world.rng.randrange(6) if died else None)
        self.wiring.process_ended(self, died=died)
        self._on_end()


class SimulatedDeployment:
    """A `driver.coordinator.Deployment`. As on Spark, processes may outlive their stage."""

    def __init__(self, simulation: Simulation, coordinator: CoordinatorProcess, *, attempt: int) -> None:
        self.wiring = Wiring(
            simulation.world, max_elements=simulation.channel_elements, on_marker=partial(simulation.faults.note, "marker")
        )
        self.slots = self.wiring.slots
        self._world = simulation.world
        self._over_us: int | None = None
        self.slots.extend(
            SlotProcess(
                simulation,
                index=index,
                attempt=attempt,
                wiring=self.wiring,
                coordinator=coordinator,
                on_end=self._one_ended,
            )
            for index in range(coordinator.plan.slots)
        )

    def ended(self) -> str | None:
        if not any(slot.alive for slot in self.slots):
            return "all slots are gone"
        if self._over_us is not None and self._world.now_us >= self._over_us:
            return "the stage is over"
        return None

    def cancel(self) -> None:
        self._over_within(self._world.delay_us("boot", CANCELLED_US))

    def _one_ended(self) -> None:
        self._over_within(self._world.delay_us("boot", STAGE_ABORTED_US))

    def _over_within(self, delay_us: int) -> None:
        over_us = self._world.now_us + delay_us
        self._over_us = over_us if self._over_us is None else min(self._over_us, over_us)


class CoordinatorProcess(Process):
    """A driver. It ends when its coordinator has a terminal status. It is its coordinator's `Deployer`, too."""

    def __init__(self, simulation: Simulation, *, number: int, plan: Plan, on_end: Callable[[], None]) -> None:
        super().__init__(simulation, f"coordinator {number}")
        self.plan = plan  # the slots share it: an operator has its own copy of what it changes
        self.copies = SimulatedBackground(self._world, simulation.coroutines, self)
        self.deployments: list[SimulatedDeployment] = []
        self.links = CoordinatorLinks(self._world, simulation.witness.on_announced)
        catalog = SnapshotCatalog(simulation.store_for(self), claimant=self.name)
        self.coordinator = Coordinator(
            plan=plan,
            settings=simulation.settings,
            catalog=catalog,
            links=self.links,
            clock=self._world.clock,
            background=self.background,
            copies=self.copies,
            deployer=self,
        )
        self._on_end = on_end
        self._inbox: deque[tuple[ControlLink, str | None]] = deque()
        self._requests: deque[Callable[[Coordinator], None]] = deque()
        self.coordinator.start()
        self._tick_later()

    def deploy(self, attempt: int) -> SimulatedDeployment:
        self.deployments.append(SimulatedDeployment(self._simulation, self, attempt=attempt))
        return self.deployments[-1]

    def admits(self, link: ControlLink) -> bool:
        return self.alive and self.links.admit(link)

    def request(self, request: Callable[[Coordinator], None]) -> None:
        """Pass a user's request to the coordinator in one of its turns, if it is alive."""
        if self.alive:
            self._requests.append(request)
            self.wake_soon()

    def arrived(self, link: ControlLink, wire: str | None) -> None:
        self._inbox.append((link, wire))
        self.wake_soon()

    def _turn(self) -> None:
        waiting: list[Callable[[], object]] = []
        if self._inbox:
            waiting.append(self._take_message)
        waiting += [background.deliver for background in (self.background, self.copies) if background.has_outcomes]
        if self._requests:
            waiting.append(lambda: self._requests.popleft()(self.coordinator))
        if waiting:
            self._world.rng.choice(waiting)()
            if not self.alive:
                return
        if self.coordinator.status.terminal:
            self.end()
        elif self._inbox or self.background.has_outcomes or self.copies.has_outcomes or self._requests:
            self.wake_soon()

    def _take_message(self) -> None:
        link, wire = self._inbox.popleft()
        if not self.links.knows(link):
            return  # the link of an attempt that is over
        if wire is None:
            self.links.forget(link)
            self._world.tell(f"{self.name}: {link.slot.name} is lost")
            self.coordinator.on_lost(link.slot.index, "the link is gone")
            return
        try:
            message = decoded(wire)
        except ProtocolError as error:
            self._world.violate(f"{link.slot.name} sent what can't be understood: {error}")
        kind = type(message).__name__
        if kind not in ("Heartbeat", "TimeReached"):
            self._world.tell(f"{self.name}: gets {kind} {getattr(message, 'epoch', '')} from {link.slot.name}")
        self._simulation.faults.note(kind, self)
        if not self.alive:
            return
        match self._astray(message):
            case "lost":
                return
            case "cut":
                link.down.close()
                self._inbox.appendleft((link, None))
                return
            case "doubled":
                self._inbox.appendleft((link, wire))
        self.coordinator.on_message(link.slot.index, message)

    def _tick_later(self) -> None:
        self._world.after(self._world.delay_us("cpu", TICK_US), self._tick)

    def _tick(self) -> None:
        if not self.alive:
            return
        if self._world.now_us >= self.frozen_until_us:
            self._world.acting = self
            self.coordinator.tick()
            if self.coordinator.status.terminal:
                self.end()
                return
        self._tick_later()

    def end(self) -> None:
        if self.alive:
            self.alive = False
            self._world.tell(f"{self.name}: ends, {self.coordinator.status.value}")
            self.links.close(died=False)
            self.background.close()
            self.copies.close()
            self._on_end()

    def crash(self, reason: str) -> None:
        if self.alive:
            self.alive, self.crashed = False, True
            self._world.tell(f"{self.name}: dies {reason}")
            self.links.close(died=True)
            self.background.kill()
            self.copies.kill()
            self._on_end()
        else:
            self.crashed = True
            self.background.kill()
            self.copies.kill()
