"""The real world around a master and a slot: sockets, threads, the system's clock.

`MasterHost` runs a master in a thread of the driver process; `run_slot` is the body of a slot's process. Everything of
interest is decided elsewhere: these two loops only move bytes and time to where they are waited for.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import selectors
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import cloudpickle
import pyarrow as pa

from tidegate.channels.handshake import Identity, WrongAttempt, serve
from tidegate.channels.links import Link, LinkLost, LinkServer, connect_link
from tidegate.channels.ports import Inlet, Outlet
from tidegate.channels.tcp import ChannelLost, TcpNetwork
from tidegate.connectors.printing import DeliveryPrinter, PrintSink
from tidegate.dataflow.operators.sink import SinkSpec
from tidegate.dataflow.operators.user_code import missing_module_advice
from tidegate.dataflow.plan import Plan
from tidegate.errors import JobError, ProtocolError, TidegateError
from tidegate.protocol.ids import ChannelId
from tidegate.runtime.attempts import Restore
from tidegate.runtime.background import BackgroundThread
from tidegate.runtime.clock import BatchTime, SystemClock
from tidegate.runtime.deployment import Deployer, Layout
from tidegate.runtime.exchange import Traffic
from tidegate.runtime.failing import failed, log
from tidegate.runtime.handle import Handle
from tidegate.runtime.master import Master
from tidegate.runtime.messages import Failed, Message, MoveTime, Register, from_wire, to_wire
from tidegate.runtime.process_title import process_title
from tidegate.runtime.settings import JobSettings
from tidegate.runtime.slot import Slot, SlotWorld
from tidegate.store.base import Store
from tidegate.store.catalog import SnapshotCatalog
from tidegate.store.claims import Program
from tidegate.store.local_copy import LocalCopyStore
from tidegate.store.manifest import MicroBatch
from tidegate.store.opening import open_store

MASTER_TICK_S = 0.01
CONNECT_TIMEOUT_S = 60.0

# A background thread that computes must not keep the hot loop waiting for the default 5 ms at every turn.
SWITCH_INTERVAL_S = 0.0005
# The hot loop makes many short-lived tuples and no cycles; the collector would walk the whole state for nothing.
GC_THRESHOLDS = (200_000, 50, 1000)
# glibc's names for what mallopt sets.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class SlotLaunch:
    """What every slot of a job gets, through Spark's own closure path."""

    plan: Plan
    settings: JobSettings
    store: str
    secret: bytes = field(repr=False)

    def packed(self) -> bytes:
        """As `run_slot` takes it; `JobError` where a user's function can't travel."""
        try:
            contents: bytes = cloudpickle.dumps(self)
        except Exception as error:
            culprits = [node.name for node in self.plan.nodes if not _travels(node.spec)]
            raise JobError(
                f"the job can't be sent to its slots: {error}. Functions travel pickled, with all they refer to"
                f"{f' (look at {culprits})' if culprits else ''}: make connections, locks and sessions in `open`, or "
                f"where they are used") from error
        # Whoever can't unpack the users' functions still has to be able to report that.
        payload: bytes = cloudpickle.dumps((self.settings.name, self.secret, contents))
        return payload


def unpacked(payload: bytes, index: int, attempt: int, master: tuple[str, int]) -> tuple[SlotLaunch, Identity]:
    """The launch, in the process of the slot that it is for. Where it can't be unpacked, because a module isn't there or is
    another one, the master is told, and then it is a `JobError`."""
    name, secret, contents = cloudpickle.loads(payload)
    identity = Identity(name, attempt, secret)
    try:
        return cloudpickle.loads(contents), identity
    except Exception as error:
        advice = missing_module_advice(error) if isinstance(error, ImportError) else (
            "The modules here may be of another version than the driver's: send the same ones.")
        explained = JobError(f"slot {index} can't unpack the job: {error}. {advice.rstrip()}")
        with contextlib.closing(reach_driver(master, identity, {"slot": index})) as link:
            link.send(to_wire(failed(index, explained)))
            link.flush(timeout_s=5.0)
        raise explained from error


def _travels(spec: Any) -> bool:
    try:
        cloudpickle.dumps(spec)
    except Exception:  # noqa: BLE001  (whatever a user's object raises)
        return False
    return True


MakeDeployer = Callable[[SlotLaunch, tuple[str, int]], Deployer]
Replan = Callable[[int, Mapping[str, int]], Plan]


class MasterHost:
    """Runs the master of one job until it has ended. `replan(slots, parallelism by operator)` gives another plan of it,
    and `explain` what savepoints say of one."""

    def __init__(self, launch: SlotLaunch, make_deployer: MakeDeployer, *, replan: Replan,
                 explain: Callable[[Plan], str], versions: Mapping[str, str], restore: Restore,
                 micro_batch: MicroBatch | None = None, noticed: set[str] | None = None) -> None:
        self._launch = launch
        self._make_deployer = make_deployer
        self._replan = replan
        self._explain = explain
        self._parallelism: dict[str, int] = {}          # by operator, as `rescale` was told so far
        self._selector = selectors.DefaultSelector()
        self._links = SlotLinks(self._selector, launch)
        self._waker = Waker(self._selector)
        self._requests: deque[Callable[[], None]] = deque()
        self._background = BackgroundThread("tidegate-master-store", self._waker.wake)
        self._copies = BackgroundThread("tidegate-savepoints", self._waker.wake)
        try:
            self._master = Master(
                plan=launch.plan, settings=launch.settings,
                catalog=SnapshotCatalog(open_store(launch.store), program=Program.this(launch.settings.name)),
                deployer=make_deployer(launch, self._links.address), links=self._links, clock=SystemClock(),
                background=self._background, copies=self._copies, restore=restore, graph=explain(launch.plan),
                versions=versions, micro_batch=micro_batch, speak=log, noticed=noticed)
        except BaseException:
            self._close()
            raise
        self._links.master = self._master
        self._master.on_delivered = _printing(launch.plan)
        self._thread = threading.Thread(target=self._run, name=f"tidegate-master {launch.settings.name}", daemon=True)

    def start(self) -> Handle:
        self._master.start()
        self._thread.start()
        return Handle(self._launch.settings.name, self._master, self._post, self._thread.join, self._relayout)

    @property
    def address(self) -> tuple[str, int]:
        """Where slots find the master."""
        return self._links.address

    def on_completed(self, call: Callable[[int], None]) -> None:
        """Called in the master's thread with every epoch whose snapshot is complete."""
        self._master.on_completed = call

    def ask(self, request: Callable[[Master], None]) -> None:
        """Has the master's own thread do it."""
        self._post(lambda: request(self._master))

    def _relayout(self, slots: int | None, parallelism: Mapping[str, int]) -> Layout:
        """In the thread of whoever asks. Nothing has changed where this raises."""
        wanted = {**self._parallelism, **parallelism}
        plan = self._replan(self._master.plan.slots if slots is None else slots, wanted)
        deployer = self._make_deployer(replace(self._launch, plan=plan), self._links.address)
        self._parallelism = wanted
        return Layout(plan, deployer, self._explain(plan))

    def _post(self, request: Callable[[], None]) -> None:
        self._requests.append(request)
        self._waker.wake()

    def _run(self) -> None:
        master = self._master
        try:
            while not master.status.terminal:
                serve(self._selector, MASTER_TICK_S)
                self._background.deliver()
                self._copies.deliver()
                while self._requests:
                    self._requests.popleft()()
                master.tick()
        except BaseException as error:  # noqa: BLE001  (whoever waits for the job must hear of it)
            master.crashed(error)
        finally:
            self._close()

    def _close(self) -> None:
        self._links.close()
        self._background.close(finish=True)     # deletions, as a rule
        self._copies.close(finish=True)         # answers to those who asked for savepoints
        self._waker.close()
        self._selector.close()


def _printing(plan: Plan) -> Callable[[str, str], bool]:
    """Prints what print sinks deliver, as it is committed, and leaves the rest to the handle's results."""
    printers = {node.name: DeliveryPrinter() for node in plan.nodes
                if isinstance(node.spec, SinkSpec) and isinstance(node.spec.sink, PrintSink)}

    def on_delivered(sink: str, committable: str) -> bool:
        if sink not in printers:
            return False
        printers[sink].take(committable)
        return True

    return on_delivered


class SlotLinks:
    """The master's links, by slot."""

    def __init__(self, selector: selectors.BaseSelector, launch: SlotLaunch) -> None:
        self.master: Master | None = None
        self._launch = launch
        self._by_slot: dict[int, Link] = {}
        self._slots: dict[Link, int] = {}
        self._listening = launch.settings.tuning.master_listening
        with self._listening.explained():
            self._server = LinkServer(
                selector, self._identity(0), bind_host=self._listening.bind_host, ports=self._listening.ports,
                on_connect=self._connected, on_message=self._said, on_lost=self._lost)

    @property
    def address(self) -> tuple[str, int]:
        """Where slots find it."""
        return self._listening.found_at(self._server.address)

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
        slots = 0 if self.master is None else self.master.plan.slots
        if not isinstance(slot, int) or not 0 <= slot < slots or slot in self._by_slot:
            link.close()
            return
        self._by_slot[slot] = link
        self._slots[link] = slot

    def _said(self, link: Link, wire: dict[str, Any]) -> None:
        slot = self._slots.get(link)
        if slot is None or self.master is None:
            return
        try:
            message = from_wire(wire)
        except ProtocolError as error:
            self.master.on_lost(slot, str(error))
        else:
            self.master.on_message(slot, message)

    def _lost(self, link: Link, reason: str) -> None:
        slot = self._slots.pop(link, None)
        if slot is not None and self.master is not None:
            del self._by_slot[slot]
            self.master.on_lost(slot, reason)


def reach_driver(address: tuple[str, int], identity: Identity, hello: Mapping[str, Any]) -> Link:
    """From a slot's process. What it raises where it can't is for whoever set the cluster up."""
    try:
        return connect_link(address, identity, hello, timeout_s=CONNECT_TIMEOUT_S)
    except LinkLost as error:
        raise TidegateError(
            f"{error} (tried from {socket.gethostname()}). If the job is over, or its driver gone, that is as it should be. "
            f"Else this host can't connect to {address[0]}, port {address[1]}: let it through the firewall "
            f"(tg.Tuning(master_ports=…) gives ports to open), or say under which name the driver is found "
            f"(spark.driver.host or tg.Tuning(master_host=…)); see docs/clusters.md") from error


def run_slot(index: int, payload: bytes, attempt: int, master: tuple[str, int]) -> None:
    """The body of a slot's process. It returns when the master says so or can't be reached any more."""
    try:
        launch, identity = unpacked(payload, index, attempt, master)
    except JobError:
        return      # the master knows
    with interpreter_for_a_slot(), process_title(index, launch.settings.name, attempt):
        try:
            SlotHost(index, launch, identity, master).run()
        except (WrongAttempt, LinkLost):
            return      # a newer attempt has started, or the job is over: a zombie ends itself


@contextlib.contextmanager
def interpreter_for_a_slot(*, fresh: bool = True) -> Iterator[None]:
    """Spark may use the process for something else afterwards, so what is set is set back. `fresh`: there is no state yet
    that would be walked for garbage."""
    _keep_freed_memory()
    interval_s, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if fresh:
        gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)
        gc.freeze()         # forgets how much was made since the last collection: the lower limits would start one at once
        gc.set_threshold(*thresholds)
        gc.unfreeze()


@functools.cache
def _keep_freed_memory() -> None:
    """Ask glibc not to give freed memory back at once: batches come and go all the time, and each would be paged in again
    (8 % of the keyed sum's time, measured). Elsewhere it does nothing. Once for a process: `ctypes` keeps memory for each
    library that is opened."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            mallopt(option, KEPT_BYTES)


def _slot_store(launch: SlotLaunch) -> Store:
    store, snapshots = open_store(launch.store), launch.settings.snapshots
    if snapshots.local_copies is None:
        return store
    return LocalCopyStore(store, snapshots.local_copies, limit_bytes=snapshots.local_copies_bytes)


class SlotHost:
    """One slot with its sockets. A selector that is given is shared, and stays open. `batch_time` is what users' functions
    see in place of the clock; whoever gives it moves it."""

    def __init__(self, index: int, launch: SlotLaunch, identity: Identity, master: tuple[str, int], *,
                 selector: selectors.BaseSelector | None = None, batch_time: BatchTime | None = None) -> None:
        self._selector = selector or selectors.DefaultSelector()
        self._owns_selector = selector is None
        self._link = reach_driver(master, identity, {"slot": index})
        listening = launch.settings.tuning.slot_listening(index, own_end=self._link.own_host)
        try:
            with listening.explained():
                self._network = TcpNetwork(identity=identity, bind_host=listening.bind_host, ports=listening.ports,
                                           selector=self._selector)
        except JobError as error:
            self._link.send(to_wire(Failed(index, str(error))))
            self._link.close()
            raise
        self._waker = Waker(self._selector)
        self._background = BackgroundThread(f"tidegate-slot-{index}-store", self._waker.wake)
        self._orphaned = False
        world = SlotWorld(network=_Connecting(self._network), store=_slot_store(launch), clock=SystemClock(),
                          background=self._background, tell=lambda message: self._link.send(to_wire(message)),
                          batch_time=batch_time)
        self._slot = Slot(index, plan=launch.plan, settings=launch.settings, attempt=identity.attempt, world=world)
        self._link.attach(self._selector, on_message=self._said, on_lost=self._lost)
        host, port = listening.found_at(self._network.address)
        world.tell(Register(index, host, port, os.getpid(), socket.gethostname()))

    def run(self) -> None:
        for _ in self.rounds():
            pass

    @property
    def alive(self) -> bool:
        """Whether the loop would go on."""
        return not self._slot.ended and not self._orphaned

    def traffic(self) -> Traffic:
        return self._slot.traffic()

    def move_time(self, order: MoveTime) -> None:
        self._slot.move_time(order)

    def rounds(self) -> Generator[None]:
        """The loop, for whoever has something to do after every round of it."""
        slot, network, background = self._slot, self._network, self._background
        try:
            while self.alive:
                progress = slot.step()
                yield
                try:
                    network.poll(0 if progress else slot.wait_ms() / 1000)
                except ChannelLost as error:
                    slot.on_channel_lost(str(error))
                background.deliver()
            self._link.flush(timeout_s=5.0)
        finally:
            try:
                slot.close()        # calls users' functions
            finally:
                background.close()
                self._link.close()
                network.close()
                self._waker.close()
                if self._owns_selector:
                    self._selector.close()

    def _said(self, link: Link, wire: dict[str, Any]) -> None:
        self._slot.on_message(from_wire(wire))

    def _lost(self, link: Link, reason: str) -> None:
        self._orphaned = True


class _Connecting:
    """The network as a slot sees it, over TCP."""

    def __init__(self, network: TcpNetwork) -> None:
        self._network = network

    def connect(self, *, outgoing: Mapping[ChannelId, tuple[tuple[str, int], pa.Schema]],
                incoming: Mapping[ChannelId, pa.Schema]) -> None:
        self._network.connect({channel: address for channel, (address, _) in outgoing.items()}, incoming,
                              {channel: schema for channel, (_, schema) in outgoing.items()}, deadline_s=CONNECT_TIMEOUT_S)

    def outlet(self, channel: ChannelId) -> Outlet:
        return self._network.outlet(channel)

    def inlet(self, channel: ChannelId) -> Inlet:
        return self._network.inlet(channel)


class Waker:
    """A pipe that ends a selector's wait from another thread. Waking what is closed does nothing."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._lock = threading.Lock()       # without it, a late wake could write into whatever got the number next
        self._closed = False
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        selector.register(self._read, selectors.EVENT_READ, self._drain)

    def wake(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):      # full: it is awake already
            if not self._closed:
                os.write(self._write, b"!")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._selector.unregister(self._read)
            os.close(self._read)
            os.close(self._write)

    def _drain(self, events: int) -> None:
        while True:
            try:
                if len(os.read(self._read, 4096)) < 4096:
                    return
            except BlockingIOError:
                return
