"""Runs a coordinator in a thread of the driver's process, with sockets, threads and the system's clock.

Nothing is decided here: the loop passes messages, results and the time to the coordinator.
"""

from __future__ import annotations

import selectors
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from tidegate import logs
from tidegate.channels.handshake import Identity, serve
from tidegate.channels.links import Link, LinkServer
from tidegate.channels.refusals import Refusals
from tidegate.connectors.printing import DeliveryPrinter, PrintSink
from tidegate.control.background import BackgroundThread
from tidegate.control.clock import SystemClock
from tidegate.control.launch import SlotLaunch
from tidegate.control.messages import Message, from_wire, to_wire
from tidegate.control.waker import Waker
from tidegate.dataflow.plan import Plan
from tidegate.driver.attempts import Restore
from tidegate.driver.batches import BatchEnd
from tidegate.driver.coordinator import Coordinator
from tidegate.driver.deployment import Deployer, Layout, Links
from tidegate.driver.handle import Handle
from tidegate.driver.job_log import LOGGER
from tidegate.errors import ProtocolError
from tidegate.snapshots.catalog import SnapshotCatalog
from tidegate.snapshots.claims import Program
from tidegate.snapshots.manifest import MicroBatch
from tidegate.store.opening import open_store

COORDINATOR_TICK_S = 0.01

MakeDeployer = Callable[[SlotLaunch, tuple[str, int]], Deployer]
Replan = Callable[[int, Mapping[str, int]], Plan]


class Slots(Links, Protocol):
    """How the slots of a job are brought up and reached: each of them connects to a coordinator of its own (`SlotLinks`), or
    they are tasks of Spark that have come to the driver already (dataframes/task_slots.py)."""

    def open(self, host: CoordinatorHost) -> None:
        """Called once, before anything else."""

    def deployer(self, launch: SlotLaunch) -> Deployer:
        """What deploys them at this launch's plan."""

    def batch_ended(self, end: BatchEnd) -> None:
        """Called in the coordinator's thread when a micro-batch has ended, or has to run again."""

    def close(self) -> None:
        """Called in the coordinator's thread when it ends, whatever the reason."""


class CoordinatorHost:
    """Runs the coordinator of one job until the job has ended. `replan(slots, parallelism by operator)` returns another plan
    of the job, and `explain` the description of a plan for savepoints."""

    def __init__(
        self,
        launch: SlotLaunch,
        slots: Slots,
        *,
        replan: Replan,
        explain: Callable[[Plan], str],
        versions: Mapping[str, str],
        restore: Restore,
        micro_batch: MicroBatch | None = None,
        noticed: set[str] | None = None,
    ) -> None:
        logs.set_up(launch.settings.tuning.log_format, launch.settings.tuning.log_level)
        self._launch = launch
        self._slots = slots
        self._replan = replan
        self._explain = explain
        self._parallelism: dict[str, int] = {}  # by operator, from all calls of `rescale` so far
        self.selector = selectors.DefaultSelector()
        slots.open(self)
        self._waker = Waker(self.selector)
        self._requests: deque[Callable[[], None]] = deque()
        self._background = BackgroundThread("tidegate-coordinator-store", self._waker.wake)
        self._copies = BackgroundThread("tidegate-savepoints", self._waker.wake)
        try:
            self.coordinator = Coordinator(
                plan=launch.plan,
                settings=launch.settings,
                catalog=SnapshotCatalog(open_store(launch.store), program=Program.this(launch.settings.name)),
                deployer=slots.deployer(launch),
                links=slots,
                clock=SystemClock(),
                background=self._background,
                copies=self._copies,
                restore=restore,
                graph=explain(launch.plan),
                versions=versions,
                micro_batch=micro_batch,
                speak=LOGGER.log,
                noticed=noticed,
                batch_ended=slots.batch_ended,
            )
        except BaseException:
            self._close()
            raise
        printing = [node.name for node in launch.plan.nodes if isinstance(node.sink, PrintSink)]
        self.coordinator.takers = {name: DeliveryPrinter().take for name in printing}
        self._thread = threading.Thread(target=self._run, name=f"tidegate-coordinator {launch.settings.name}", daemon=True)

    def start(self) -> Handle:
        self.coordinator.start()
        self._thread.start()
        return Handle(self._launch.settings.name, self.coordinator, self._post, self._thread.join, self._relayout)

    def ask(self, request: Callable[[Coordinator], None]) -> None:
        """Call this with the coordinator, in the coordinator's own thread."""
        self._post(lambda: request(self.coordinator))

    def _relayout(self, slots: int | None, parallelism: Mapping[str, int]) -> Layout:
        """Plan the job again, in the caller's thread. If this raises, nothing has changed."""
        wanted = {**self._parallelism, **parallelism}
        plan = self._replan(self.coordinator.plan.slots if slots is None else slots, wanted)
        deployer = self._slots.deployer(replace(self._launch, plan=plan))
        self._parallelism = wanted
        return Layout(plan, deployer, self._explain(plan))

    def _post(self, request: Callable[[], None]) -> None:
        self._requests.append(request)
        self._waker.wake()

    def _run(self) -> None:
        coordinator = self.coordinator
        try:
            while not coordinator.status.terminal:
                serve(self.selector, COORDINATOR_TICK_S)
                self._background.deliver()
                self._copies.deliver()
                while self._requests:
                    self._requests.popleft()()
                coordinator.tick()
        except BaseException as error:  # noqa: BLE001  (whoever waits for the job gets it)
            coordinator.crashed(error)
        finally:
            self._close()

    def _close(self) -> None:
        self._slots.close()
        self._background.close(finish=True)  # mostly deletions
        self._copies.close(finish=True)  # answers to requests for savepoints
        self._waker.close()
        self.selector.close()


class SlotLinks:
    """The links of slots that connect to the coordinator, by slot."""

    def __init__(self, launch: SlotLaunch, make_deployer: MakeDeployer) -> None:
        self._launch = launch
        self._make_deployer = make_deployer
        self._by_slot: dict[int, Link] = {}
        self._slots: dict[Link, int] = {}
        self._refusals = Refusals()
        self._listening = launch.settings.tuning.coordinator_listening

    def open(self, host: CoordinatorHost) -> None:
        self._host = host
        with self._listening.explained():
            self._server = LinkServer(
                host.selector,
                self._identity(0),
                bind_host=self._listening.bind_host,
                ports=self._listening.ports,
                on_connect=self._connected,
                on_message=self._said,
                on_lost=self._lost,
            )

    def deployer(self, launch: SlotLaunch) -> Deployer:
        return self._make_deployer(launch, self._listening.found_at(self._server.address))

    def batch_ended(self, end: BatchEnd) -> None:
        raise AssertionError("micro-batches are of tasks")

    def expect(self, attempt: int) -> None:
        self._server.identity = self._identity(attempt)
        for link in list(self._slots):
            link.close()
        self._by_slot, self._slots = {}, {}

    def send(self, slot: int, message: Message) -> None:
        if slot in self._by_slot:
            self._by_slot[slot].send(to_wire(message))

    def close(self) -> None:
        self._server.close()

    def _identity(self, attempt: int) -> Identity:
        return Identity(self._launch.settings.name, attempt, self._launch.secret)

    def _connected(self, link: Link, hello: Mapping[str, Any]) -> None:
        slot = hello.get("slot")
        if not isinstance(slot, int) or not 0 <= slot < self._host.coordinator.plan.slots or slot in self._by_slot:
            self._refusals.add(self._launch.settings.name, link.attempt, link.peer, f"slot {slot!r} isn't expected now")
            link.close()
            return
        self._by_slot[slot] = link
        self._slots[link] = slot

    def _said(self, link: Link, wire: dict[str, Any]) -> None:
        slot = self._slots.get(link)
        if slot is None:
            return
        try:
            message = from_wire(wire)
        except ProtocolError as error:
            self._host.coordinator.on_lost(slot, str(error))
        else:
            self._host.coordinator.on_message(slot, message)

    def _lost(self, link: Link, reason: str) -> None:
        slot = self._slots.pop(link, None)
        if slot is not None:
            del self._by_slot[slot]
            self._host.coordinator.on_lost(slot, reason)
