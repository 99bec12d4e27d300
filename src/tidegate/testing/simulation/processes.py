"""The simulated processes: a slot's, and the driver's with the coordinator in it.

They replace `driver/hosting.py` and `slot/hosting.py` around the same `Slot` and `Coordinator`. In each turn a process does
one of the things that wait for it: a message, an outcome of background work, a step. A process can be stopped for a while
(as by SIGSTOP), can end, and can die at any moment; its files, and what it sent before, remain.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tidegate.control.messages import Deploy, Failed, Message, Register
from tidegate.control.settings import JobSettings
from tidegate.dataflow.plan import Plan
from tidegate.driver.coordinator import Coordinator
from tidegate.errors import ProtocolError
from tidegate.slot.slot import Slot
from tidegate.slot.world import SlotWorld
from tidegate.snapshots.catalog import SnapshotCatalog
from tidegate.store.base import Store
from tidegate.testing.simulation.background import Coroutine, Coroutines, SimulatedBackground
from tidegate.testing.simulation.network import ControlLink, CoordinatorLinks, SlotNetwork, Wiring, decoded
from tidegate.testing.simulation.world import ProcessCrashed, World

TURN_US = 120
IDLE_TURN_US = 400
TICK_US = 2_000
BOOT_US = 3_000
STAGE_ABORTED_US = 60_000  # how long Spark takes to notice that one of the tasks is gone
CANCELLED_US = 20_000

# Messages that may be lost without harm (row 6): the epoch isn't completed, or the next one makes up for it. When any other
# message is lost, its link is lost, too.
MISSED = frozenset({"Trigger", "Acknowledge", "Decline", "Abort", "Complete", "Committed", "Heartbeat"})
# Messages that may come twice. A link doesn't repeat messages, but a peer that doesn't know whether one arrived may.
REPEATABLE = frozenset(
    {"Trigger", "EndInput", "Acknowledge", "Decline", "Abort", "Complete", "InputEnded", "Heartbeat", "Committed", "Done"}
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


class Surroundings(Protocol):
    """What the processes need from the simulation."""

    world: World
    coroutines: Coroutines

    def store_for(self, process: SlotProcess | CoordinatorProcess) -> Store: ...

    def note(self, occasion: str, process: SlotProcess | CoordinatorProcess) -> None: ...

    def announced(self, attempt: int, message: Message) -> None: ...

    def new_wiring(self) -> Wiring: ...


class _Process:
    """What both kinds of process have in common: a loop that is woken, can be stopped, and ends."""

    def __init__(self, surroundings: Surroundings, name: str) -> None:
        self.name = name
        self.alive = True
        self.crashed = False
        self.frozen_until_us = 0
        self.astray: str | None = None  # what happens to the next message: it is "lost" or "doubled"
        self._surroundings = surroundings
        self._world = surroundings.world
        self._wake_us: int | None = None
        self.background = SimulatedBackground(self._world, surroundings.coroutines, self)

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


class SlotProcess(_Process):
    def __init__(
        self,
        surroundings: Surroundings,
        *,
        index: int,
        attempt: int,
        settings: JobSettings,
        wiring: Wiring,
        coordinator: CoordinatorProcess,
        on_end: Callable[[], None],
    ) -> None:
        super().__init__(surroundings, f"slot {index} of attempt {attempt}")
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
            store=surroundings.store_for(self),
            clock=self._world.clock,
            background=self.background,
            tell=self._tell,
        )
        self.slot = Slot(index, plan=coordinator.plan, settings=settings, attempt=attempt, world=world)
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
        waiting: list[Callable[[], bool]] = [self._step]
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
        self._surroundings.note("step", self)
        return self.alive and self.slot.step()

    def _take_message(self) -> bool:
        wire = self._inbox.popleft()
        if wire is None:
            self._world.tell(f"{self.name}: its link is gone")
            self.end()
            return False
        message = decoded(wire)
        kind = type(message).__name__
        self._world.tell(f"{self.name}: gets {kind} {getattr(message, 'epoch', '')}")
        self._surroundings.note(kind, self)
        if not self.alive:
            return False
        astray = self._astray(message)
        if astray == "lost":
            return True
        if astray == "cut":
            self.end()
            return False
        if astray == "doubled":
            self._inbox.appendleft(wire)
        if isinstance(message, Deploy):
            self._restoring = Coroutine(self._surroundings.coroutines, lambda: self.slot.on_message(message))
            self._restore(self._restoring)
        else:
            self.slot.on_message(message)
        return True

    def _take_loss(self) -> bool:
        reason = self._lost_channels.popleft()
        self._world.tell(f"{self.name}: {reason}")
        self.slot.on_channel_lost(reason)
        return True

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
            if restoring is not None and restoring is not self._surroundings.coroutines.running and not restoring.done:
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

    def __init__(
        self, surroundings: Surroundings, *, attempt: int, settings: JobSettings, slots: int, coordinator: CoordinatorProcess
    ) -> None:
        self.wiring = surroundings.new_wiring()
        self._world = surroundings.world
        self._over_us: int | None = None
        self.wiring.slots.extend(
            SlotProcess(
                surroundings,
                index=index,
                attempt=attempt,
                settings=settings,
                wiring=self.wiring,
                coordinator=coordinator,
                on_end=self._one_ended,
            )
            for index in range(slots)
        )

    @property
    def slots(self) -> list[SlotProcess]:
        return self.wiring.slots

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


@dataclass(frozen=True, slots=True)
class _Deployer:
    surroundings: Surroundings
    settings: JobSettings
    slots: int
    coordinator: CoordinatorProcess

    def deploy(self, attempt: int) -> SimulatedDeployment:
        deployment = SimulatedDeployment(
            self.surroundings, attempt=attempt, settings=self.settings, slots=self.slots, coordinator=self.coordinator
        )
        self.coordinator.deployments.append(deployment)
        return deployment


class CoordinatorProcess(_Process):
    """A driver. It ends when its coordinator has a terminal status."""

    def __init__(
        self, surroundings: Surroundings, *, number: int, settings: JobSettings, plan: Plan, on_end: Callable[[], None]
    ) -> None:
        super().__init__(surroundings, f"coordinator {number}")
        self.plan = plan  # the slots share it: an operator has its own copy of what it changes
        self.copies = SimulatedBackground(self._world, surroundings.coroutines, self)
        self.deployments: list[SimulatedDeployment] = []
        self.links = CoordinatorLinks(self._world, surroundings.announced)
        catalog = SnapshotCatalog(surroundings.store_for(self), claimant=self.name)
        self.coordinator = Coordinator(
            plan=plan,
            settings=settings,
            catalog=catalog,
            links=self.links,
            clock=self._world.clock,
            background=self.background,
            copies=self.copies,
            deployer=_Deployer(surroundings, settings, plan.slots, self),
        )
        self._on_end = on_end
        self._inbox: deque[tuple[ControlLink, str | None]] = deque()
        self._requests: deque[Callable[[Coordinator], None]] = deque()
        self.coordinator.start()
        self._tick_later()

    def admits(self, link: ControlLink) -> bool:
        return self.alive and self.links.admit(link)

    def request(self, request: Callable[[Coordinator], None]) -> None:
        """Pass a user's request to the coordinator in one of its turns."""
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
        if kind != "Heartbeat":
            self._world.tell(f"{self.name}: gets {kind} {getattr(message, 'epoch', '')} from {link.slot.name}")
        self._surroundings.note(kind, self)
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
