"""The slot in a Spark task: its loop is the generator that the task's output comes from.

A task offers itself to the driver (gathering.py), becomes the slot that it is told to be, and yields what the slot's sinks
write until the verdict comes. Its link to the driver is the control link of the slot as well. After a micro-batch the
process keeps the slot, with all its state and without a link, for the next task of the same transform.

While the slot's loop runs, Spark waits for output; while Spark takes output, the slot waits. Neither waits for long: what
Spark hands in doesn't depend on any slot.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import selectors
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from tidegate.channels.handshake import Identity, serve
from tidegate.channels.links import Link
from tidegate.connectors.handover import Handover, handover_of
from tidegate.control.clock import BatchTime
from tidegate.control.launch import STORE_OF_A_RUN, identity_of, reach_driver, unpacked
from tidegate.control.messages import Assign, InputRead, Left, Message, Offer, Verdict, from_wire, to_wire
from tidegate.dataframes.gathering import NAME
from tidegate.errors import JobError, JobFailed, TidegateError
from tidegate.slot.hosting import SlotHost, interpreter_for_a_slot
from tidegate.slot.process_title import process_title
from tidegate.store.opening import forget_memory_store

_OVER = object()

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Invitation:
    """What Spark ships to each task: a packed `SlotLaunch`, and the address and secret of the gathering."""

    payload: bytes = field(repr=False)
    gathering: tuple[str, int]
    secret: bytes = field(repr=False)


class _Driver:
    """A task's link to the driver. What comes for the slot is passed on to it."""

    def __init__(self, invitation: Invitation, selector: selectors.BaseSelector) -> None:
        self.verdict: Verdict | None = None
        self.slot: SlotHost | None = None
        self._assigned: Assign | None = None
        self._lost: str | None = None
        self._selector = selector
        self.link = reach_driver(invitation.gathering, Identity(NAME, 0, invitation.secret), {})
        self.link.attach(selector, on_message=self._said, on_lost=self._on_lost)

    def tell(self, message: Message) -> None:
        self.link.send(to_wire(message))

    def offer(self, offer: Offer) -> Assign:
        """Offer the task, and wait for the other tasks of its stage."""
        self.tell(offer)
        while self._assigned is None:
            serve(self._selector, None)
            self.check()
        return self._assigned

    def wait(self) -> None:
        """Wait for the verdict."""
        self.check()
        while self.verdict is None:
            serve(self._selector, None)
            self.check()

    def check(self) -> None:
        """Raises if the task must fail."""
        if self.verdict is not None and self.verdict.error is not None:
            raise JobFailed(self.verdict.error)
        if not self.link.up and self.verdict is None:
            raise TidegateError(f"the driver is gone: {self._lost or 'the link to it was lost'}")

    def close(self) -> None:
        self.link.close()

    def _said(self, link: Link, wire: dict[str, Any]) -> None:
        message = from_wire(wire)
        if isinstance(message, Assign):
            self._assigned = message
        elif isinstance(message, Verdict):
            self.verdict = message
        elif self.slot is not None:  # else it is to shut down before it is there, and a verdict follows
            self.slot.on_message(message)

    def _on_lost(self, link: Link, reason: str) -> None:
        self._lost = reason
        if self.slot is not None and self.verdict is None:
            self.slot.on_link_lost(reason)


@dataclass(slots=True, eq=False)
class _HeldSlot:
    """A slot and its loop, which a process holds from one micro-batch to the next, with a selector."""

    attempt: int
    index: int
    job: str
    host: SlotHost
    rounds: Generator[None]
    handover: Handover
    time: BatchTime | None
    selector: selectors.BaseSelector
    store: str

    def close(self) -> None:
        """End the loop."""
        try:
            self.rounds.close()
        finally:
            if self.store.startswith(STORE_OF_A_RUN):
                forget_memory_store(self.store.removeprefix("memory://"))

    @classmethod
    def made(cls, invitation: Invitation, assigned: Assign, selector: selectors.BaseSelector, driver: _Driver) -> _HeldSlot:
        """Make the slot. If that fails, the coordinator is told why, and the task fails with its verdict."""
        identity = identity_of(invitation.payload, assigned.attempt)
        time = None if assigned.now_ms is None else BatchTime(assigned.now_ms, assigned.watermark_ms)
        try:
            launch = replace(unpacked(invitation.payload, assigned.slot, driver.link), store=assigned.store)
            host = SlotHost(assigned.slot, launch, identity, driver.link, selector, batch_time=time)
        except JobError:
            driver.tell(Left())
            driver.wait()
            raise
        handover = handover_of(launch.plan)
        return cls(
            assigned.attempt, assigned.slot, identity.job, host, host.rounds(), handover, time, selector, assigned.store
        )


# What this process holds, by transform: one slot at most. A streaming transform has its processes to itself, until its query
# is over (spark/processes.py).
_held: dict[str, _HeldSlot] = {}


def run_task(invitation: Invitation, offer: Offer, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The body of a task."""
    _drop_others(offer.transform)
    slot = _held.pop(offer.transform, None)
    selector = selectors.DefaultSelector() if slot is None else slot.selector
    try:
        with interpreter_for_a_slot(fresh=slot is None):
            with contextlib.closing(_Driver(invitation, selector)) as driver:
                if slot is not None:
                    offer = replace(offer, attempt=slot.attempt, slot=slot.index)
                assigned = driver.offer(offer)
                if not assigned.goes_on:
                    if slot is not None:
                        slot.close()
                        slot = None
                        gc.unfreeze()  # it refers to itself, and it was frozen after its last task
                        gc.collect()
                        gc.freeze()
                    slot = _HeldSlot.made(invitation, assigned, selector, driver)
                assert slot is not None, "only who holds a slot is told to go on with it"
                driver.slot, slot.host.link = slot.host, driver.link
                if slot.time is not None and assigned.now_ms is not None:
                    slot.time.set(assigned.now_ms, assigned.watermark_ms)
                with process_title(slot.index, slot.job, slot.attempt):
                    yield from _drive(slot, driver, batches)
                if offer.batch is not None and slot.host.alive:
                    _held[offer.transform], slot = slot, None
            if _held:
                # Garbage that refers to itself has to go before it is frozen with the state. The state of earlier batches
                # is frozen here, so only what this task made is walked.
                del driver
                gc.collect()
    finally:
        if slot is not None:
            slot.close()
        if _held:
            gc.freeze()  # Spark collects garbage after every task, and would walk all of the state
        else:
            selector.close()


def _drop_others(transform: str) -> None:
    """Drop the slot of another transform in this process, with its state. That transform's query is over; if it is not, the
    query's next micro-batch restores the state."""
    for other in [other for other in _held if other != transform]:
        held = _held.pop(other)
        try:
            held.close()
        except Exception:
            _logger.exception("A slot of a query that is over failed when it was closed; nothing depends on it any more")
        held.selector.close()
        gc.unfreeze()


def _drive(slot: _HeldSlot, driver: _Driver, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Run the slot until the verdict, and yield its output."""
    handover = slot.handover
    handover.begin(batches)
    is_told = False
    while driver.verdict is None:
        if next(slot.rounds, _OVER) is _OVER:
            driver.tell(Left())
            driver.wait()
        driver.check()
        if handover.read and not is_told:
            is_told = True
            driver.tell(InputRead())
        yield from handover.take()
