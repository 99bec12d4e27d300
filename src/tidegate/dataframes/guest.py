"""The slot in a Spark task: it is driven as the generator that the task's output comes from.

A task offers itself to the driver (`gathering.py`), becomes the slot that it is told to be, and yields what the slot's
sinks write until the verdict comes. After a micro-batch the process keeps the slot for the next one, with all its state.
While the slot's loop runs, Spark waits for output; while Spark takes output, the slot waits. Neither waits for long: what
Spark hands in doesn't depend on any slot.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import selectors
import time
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from tidegate.channels.handshake import Identity, serve
from tidegate.channels.links import Link
from tidegate.connectors.handover import Handover, handover_of
from tidegate.control.clock import BatchTime
from tidegate.control.launch import reach_driver, unpacked
from tidegate.control.messages import (
    Assign,
    Counted,
    InputRead,
    Left,
    Message,
    MoveTime,
    Offer,
    Probe,
    Verdict,
    from_wire,
    to_wire,
)
from tidegate.dataframes.gathering import NAME
from tidegate.errors import JobError, JobFailed, TidegateError
from tidegate.slot.hosting import SlotHost, interpreter_for_a_slot
from tidegate.slot.process_title import process_title

_OVER = object()
VERDICT_TIMEOUT_S = 10.0

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Invitation:
    """What a task needs to take part, through Spark's own closure path: a packed `SlotLaunch`, and where to offer itself."""

    payload: bytes = field(repr=False)
    gathering: tuple[str, int]
    secret: bytes = field(repr=False)


class _Driver:
    """A task's link to the driver."""

    def __init__(self, invitation: Invitation, selector: selectors.BaseSelector) -> None:
        self.verdict: Verdict | None = None
        self.asked: deque[Probe | MoveTime] = deque()
        self._assigned: Assign | None = None
        self._lost: str | None = None
        self._selector = selector
        identity = Identity(NAME, 0, invitation.secret)
        self._link = reach_driver(invitation.gathering, identity, {})
        self._link.attach(selector, on_message=self._said, on_lost=self._on_lost)

    def tell(self, message: Message) -> None:
        self._link.send(to_wire(message))

    def offer(self, offer: Offer) -> Assign:
        """Waits until the other tasks are there, too."""
        self.tell(offer)
        while self._assigned is None:
            serve(self._selector, None)
            self.check()
        return self._assigned

    def wait(self, timeout_s: float | None = None) -> None:
        """For the verdict, no longer than that."""
        give_up_s = None if timeout_s is None else time.monotonic() + timeout_s
        while self.verdict is None and (give_up_s is None or time.monotonic() < give_up_s):
            serve(self._selector, None if give_up_s is None else max(give_up_s - time.monotonic(), 0.0))
            self.check()

    def check(self) -> None:
        """Raises where the task must fail."""
        if self.verdict is not None and self.verdict.error is not None:
            raise JobFailed(self.verdict.error)
        if self._lost is not None and self.verdict is None:
            raise TidegateError(f"the driver is gone: {self._lost}")

    def close(self) -> None:
        self._link.close()

    def _said(self, link: Link, wire: dict[str, Any]) -> None:
        message = from_wire(wire)
        if isinstance(message, Assign):
            self._assigned = message
        elif isinstance(message, Probe | MoveTime):
            self.asked.append(message)
        elif isinstance(message, Verdict):
            self.verdict = message

    def _on_lost(self, link: Link, reason: str) -> None:
        self._lost = reason


@dataclass(slots=True, eq=False)
class _HeldSlot:
    """A slot and its loop, from one micro-batch to the next."""

    attempt: int
    index: int
    job: str
    host: SlotHost
    rounds: Generator[None]
    handover: Handover
    time: BatchTime | None

    @classmethod
    def made(cls, invitation: Invitation, assigned: Assign, selector: selectors.BaseSelector) -> _HeldSlot:
        coordinator = (assigned.host, assigned.port)
        launch, identity = unpacked(invitation.payload, assigned.slot, assigned.attempt, coordinator)
        time = None if assigned.now_ms is None else BatchTime(assigned.now_ms, assigned.watermark_ms)
        host = SlotHost(
            assigned.slot, replace(launch, store=assigned.store), identity, coordinator, selector=selector, batch_time=time
        )
        return cls(assigned.attempt, assigned.slot, identity.job, host, host.rounds(), handover_of(launch.plan), time)


class _Held:
    """What this process holds of a transform: a selector, and a slot where one is waiting for the next micro-batch."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.slot: _HeldSlot | None = None

    def take(self) -> _HeldSlot | None:
        """The slot, if its coordinator hasn't given it up meanwhile."""
        while self.slot is not None and serve(self.selector, 0):
            pass
        slot, self.slot = self.slot, None
        if slot is not None and not slot.host.alive:
            slot.rounds.close()
            return None
        return slot


# By transform. A streaming transform has its processes to itself, until its query is over (spark/processes.py).
_held: dict[str, _Held] = {}


def run_task(invitation: Invitation, offer: Offer, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The body of a task."""
    _drop_what_has_ended()
    if offer.transform not in _held:
        _held[offer.transform] = _Held()  # which has a file of its own open
    held = _held[offer.transform]
    slot = held.take()
    try:
        with interpreter_for_a_slot(fresh=slot is None):
            with contextlib.closing(_Driver(invitation, held.selector)) as driver:
                if slot is not None:
                    offer = replace(offer, attempt=slot.attempt, slot=slot.index)
                assigned = driver.offer(offer)
                if not assigned.goes_on:
                    if slot is not None:
                        slot.rounds.close()
                    slot = _made(invitation, assigned, held.selector, driver)
                assert slot is not None, "only who holds a slot is told to go on with it"
                if slot.time is not None and assigned.now_ms is not None:
                    slot.time.set(assigned.now_ms, assigned.watermark_ms)
                with process_title(slot.index, slot.job, slot.attempt):
                    yield from _drive(slot, driver, batches)
                if offer.batch is not None and slot.host.alive:
                    held.slot, slot = slot, None
            if held.slot is not None:
                # Garbage that refers to itself has to go before it is frozen with the state. The state of earlier batches
                # is frozen here, so only what this task made is walked.
                del driver
                gc.collect()
    finally:
        if slot is not None:
            slot.rounds.close()
        if held.slot is None:
            del _held[offer.transform]
            held.selector.close()
        else:
            gc.freeze()  # Spark collects garbage after every task, and would walk all of the state


def _made(invitation: Invitation, assigned: Assign, selector: selectors.BaseSelector, driver: _Driver) -> _HeldSlot:
    """Where it can't be, the coordinator knows, and its verdict is what the task fails with. Where another slot has told it
    so before, the coordinator may be gone already, and the verdict is on its way."""
    try:
        return _HeldSlot.made(invitation, assigned, selector)
    except TidegateError as error:
        driver.tell(Left())
        driver.wait(None if isinstance(error, JobError) else VERDICT_TIMEOUT_S)
        driver.check()
        raise


def _drop_what_has_ended() -> None:
    """The slots in this process that nobody waits for any more, with their state."""
    for transform, held in list(_held.items()):
        try:
            held.slot = held.take()
        except Exception:
            _logger.exception("A slot of a query that is over failed when it was closed; nothing depends on it any more")
        if held.slot is None:
            del _held[transform]
            held.selector.close()
            gc.unfreeze()


def _drive(slot: _HeldSlot, driver: _Driver, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Runs the slot until the verdict."""
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
        while driver.asked:
            _answer(driver.asked.popleft(), slot.host, driver)
        yield from handover.take()


def _answer(asked: Probe | MoveTime, host: SlotHost, driver: _Driver) -> None:
    if isinstance(asked, MoveTime):
        host.move_time(asked)
        return
    traffic = host.traffic()
    driver.tell(Counted(asked.number, traffic.sent, traffic.taken, traffic.replays))
