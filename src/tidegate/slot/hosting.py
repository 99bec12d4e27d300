"""A slot's environment outside the simulation: sockets, a thread, the system's clock. `run_slot` is the body of a slot's
process.

The loop here only delivers messages and time. All decisions are made in slot.py and below.
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
from collections.abc import Generator, Iterator

from tidegate import logs
from tidegate.channels.handshake import Identity, WrongAttempt
from tidegate.channels.links import Link, LinkLost
from tidegate.channels.tcp import TcpNetwork
from tidegate.channels.tcp_ends import ChannelLost
from tidegate.control.background import BackgroundThread
from tidegate.control.clock import BatchTime, SystemClock
from tidegate.control.launch import SlotLaunch, identity_of, reach_driver, unpacked
from tidegate.control.messages import Failed, Message, Register, Restoring, from_wire, to_wire
from tidegate.control.waker import Waker
from tidegate.errors import JobError
from tidegate.slot.memory import MemoryWatch
from tidegate.slot.process_title import process_title
from tidegate.slot.slot import Slot
from tidegate.slot.slot_log import LOGGER
from tidegate.slot.world import SlotWorld
from tidegate.store.base import Store
from tidegate.store.local_copy import LocalCopyStore
from tidegate.store.opening import open_store

# With Python's default, the hot loop would wait 5 ms for a busy background thread each time.
SWITCH_INTERVAL_S = 0.0005
# The hot loop makes many short-lived tuples and no cycles; the collector would traverse the whole state in vain.
GC_THRESHOLDS = (200_000, 50, 1000)
# Parameters of glibc's mallopt.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
REUSED_BYTES = 256 << 20


def run_slot(index: int, payload: bytes, attempt: int, coordinator: tuple[str, int]) -> None:
    """Run a slot until the coordinator ends it or can't be reached any more."""
    identity = identity_of(payload, attempt)
    try:
        with (
            selectors.DefaultSelector() as selector,
            contextlib.closing(reach_driver(coordinator, identity, {"slot": index})) as link,
        ):
            try:
                launch = unpacked(payload, index, link)
            except JobError as error:
                fields = {"event": "failed", "attempt": attempt, "slot": index}
                LOGGER.error("Attempt %d, slot %d: %s", attempt, index, error, extra=fields)
                return  # the coordinator knows
            with interpreter_for_a_slot(), process_title(index, launch.settings.name, attempt):
                host = SlotHost(index, launch, identity, link, selector)
                link.attach(
                    selector,
                    on_message=lambda _, wire: host.on_message(from_wire(wire)),
                    on_lost=lambda _, reason: host.on_link_lost(reason),
                )
                for _ in host.rounds():
                    pass
    except (WrongAttempt, LinkLost) as error:  # a newer attempt has started, or the job is over
        fields = {"event": "superseded", "job": identity.job, "attempt": attempt, "slot": index}
        LOGGER.info("Job %r, attempt %d, slot %d ends: %s", identity.job, attempt, index, error, extra=fields)


@contextlib.contextmanager
def interpreter_for_a_slot(*, fresh: bool = True) -> Iterator[None]:
    """Set the interpreter up for a slot, and restore its settings at the end, since Spark may reuse the process. `fresh`:
    collect garbage first, which is cheap while there is no state."""
    _hold_freed_memory()
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
        gc.freeze()  # resets the count of new objects: with the lower thresholds it would start a collection at once
        gc.set_threshold(*thresholds)
        gc.unfreeze()


@functools.cache
def _hold_freed_memory() -> None:
    """Ask glibc to reuse freed memory instead of returning it to the system, since each new batch would be paged in again
    (8 % of the keyed sum's time, measured). Does nothing without glibc. Cached, since `ctypes` allocates memory for each
    library that is opened."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            mallopt(option, REUSED_BYTES)


def _trim() -> None:
    """Give memory that was freed back to the system. Does nothing without glibc."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _slot_store(launch: SlotLaunch) -> Store:
    store, snapshots = open_store(launch.store), launch.settings.snapshots
    if snapshots.local_copies is None:
        return store
    return LocalCopyStore(store, snapshots.local_copies, limit_bytes=snapshots.local_copies_bytes)


class SlotHost:
    """One slot with its channels. The caller serves `link`, the link to the coordinator, on the same selector, and may
    replace it, since the link of a task lasts as long as the task. Users' functions see `batch_time` instead of the clock;
    the caller moves it."""

    def __init__(
        self,
        index: int,
        launch: SlotLaunch,
        identity: Identity,
        link: Link,
        selector: selectors.BaseSelector,
        *,
        batch_time: BatchTime | None = None,
    ) -> None:
        logs.set_up(launch.settings.tuning.log_format, launch.settings.tuning.log_level)
        self.link = link
        listening = launch.settings.tuning.slot_listening(index, own_end=link.own_host)
        try:
            with listening.explained():
                self._network = TcpNetwork(
                    identity=identity, bind_host=listening.bind_host, ports=listening.ports, selector=selector
                )
        except JobError as error:
            link.send(to_wire(Failed(index, str(error))))
            raise
        self._waker = Waker(selector)
        self._background = BackgroundThread(f"tidegate-slot-{index}-store", self._waker.wake)
        self._orphaned = False
        world = SlotWorld(
            network=self._network,
            store=_slot_store(launch),
            clock=SystemClock(),
            background=self._background,
            tell=self._tell,
            speak=LOGGER.log,
            memory=MemoryWatch(getattr(launch.settings.backend, "memory_limit_bytes", None), trim=_trim),
            batch_time=batch_time,
        )
        self._slot = Slot(index, plan=launch.plan, settings=launch.settings, attempt=identity.attempt, world=world)
        host, port = listening.found_at(self._network.address)
        world.tell(Register(index, host, port, os.getpid(), socket.gethostname()))

    def _tell(self, message: Message) -> None:
        self.link.send(to_wire(message))
        if isinstance(message, Restoring) and not self.link.up:
            # The loop, which would find that out, doesn't run before the end of the restore.
            raise LinkLost("the coordinator is gone, or has begun another attempt, while this slot restored its state")

    @property
    def alive(self) -> bool:
        """Whether the loop would continue."""
        return not self._slot.ended and not self._orphaned

    def on_message(self, message: Message) -> None:
        self._slot.on_message(message)

    def on_link_lost(self, reason: str) -> None:
        """The coordinator is gone, or has fenced the slot off."""
        self._slot.on_link_lost(reason)
        self._orphaned = True

    def rounds(self) -> Generator[None]:
        """Run the loop. Yield after every round, so that the caller can do something in between."""
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
            self.link.flush(timeout_s=5.0)
        finally:
            try:
                slot.close()  # calls users' functions
            finally:
                background.close()
                network.close()
                self._waker.close()
