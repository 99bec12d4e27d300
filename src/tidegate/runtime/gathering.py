"""Tasks that Spark starts when it likes, gathered to runs on the driver.

In the DataFrame form nobody deploys slots: an action of the user's makes Spark start a stage, whose tasks come here, offer
themselves (`Offer`) and are told which slot of which attempt to be. The tasks of one stage at one try are a `Run`. To the
master a run is a deployment like any other.

    task                      gathering                         conductor of the transform, one thread for each run
    Offer       ──────────►   all of the stage are there  ───►  begins an attempt, or goes on with one
                ◄── Assign ──────────────────────────────────   (the master's deployer)
    InputRead   ──────────►   all have said so            ───►  asks what is on its way, where there are loops
                ◄── Probe ───────────────────────────────────
    Counted     ──────────►   all have answered           ───►  has time moved, and asks again
                ◄── MoveTime ────────────────────────────────   (none of these without loops)
                                                                ends the epoch
    Left        ──────────►   (where the slot ended)
                ◄── Verdict ─────────────────────────────────   the task may end

Invariants:
- A run has every task of its stage exactly once. Spark numbers the tasks that it starts; where a task comes again, the
  higher number counts, and the run that has the lower one is over.
- A run whose task is lost is over. So is one whose task comes again: Spark has given that try up.
- What failed for a reason that is in the program fails at once when Spark tries it again.
- A task always gets a verdict, unless its link is lost; then it must fail by itself.

One gathering serves all transforms of a driver, from one thread. Not here: what a run is for.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tidegate.channels.handshake import Identity, serve
from tidegate.channels.links import Link, LinkServer
from tidegate.errors import ProtocolError
from tidegate.runtime.exchange import Traffic
from tidegate.runtime.hosting import Waker
from tidegate.runtime.listening import Listening
from tidegate.runtime.messages import (
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
from tidegate.runtime.queries import BatchTimes

NAME = "tidegate-gathering"
SECRET_BYTES = 32
TICK_S = 1.0
REMEMBERED_FAILURES = 64


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run ended: well, or with an error. `final`: another try would end in the same way."""

    error: str | None = None
    final: bool = False


@dataclass(slots=True, eq=False)
class _Member:
    """A task and what it has said."""

    link: Link
    offer: Offer
    came_s: float = field(default_factory=time.monotonic)
    read: bool = False
    counted: Counted | None = None
    left: bool = False
    lost: str | None = None


class Run:
    """The tasks of one stage, all there. A `Deployment` to the master; its methods may be called from any thread."""

    def __init__(self, members: Mapping[int, _Member], post: Callable[[Callable[[], None]], None]) -> None:
        self._members = dict(members)
        self._post = post
        self._over: str | None = None
        self.is_closed = False              # whether its conductor is done with it
        self.moved = threading.Event()      # something was said or lost since this was cleared

    @property
    def offers(self) -> list[Offer]:
        """By task."""
        return [self._members[task].offer for task in sorted(self._members)]

    @property
    def read(self) -> bool:
        """Whether every slot has taken in what its task was given."""
        return all(member.read for member in self._members.values())

    def assign(self, attempt: int, slots: Mapping[int, int], *, master: tuple[str, int], store: str,
               goes_on: bool = False, times: BatchTimes | None = None) -> None:
        """`slots`: by task. `times`: of the micro-batch, if it is one."""
        now_ms, watermark_ms = (None, 0) if times is None else times
        for task, slot in slots.items():
            self._send(self._members[task], Assign(attempt, slot, *master, store, goes_on, now_ms, watermark_ms))

    def probe(self, number: int) -> None:
        """Asks all slots what they have put on channels and taken from them."""
        for member in self._members.values():
            self._send(member, Probe(number))

    def move_time(self, order: MoveTime) -> None:
        """Behind it, slots answer questions."""
        for member in self._members.values():
            self._send(member, order)

    def traffic(self, number: int) -> Traffic | None:
        """The answers to that question together, when all are there."""
        answers = [member.counted for member in self._members.values()]
        given = [Traffic(each.sent, each.taken, each.replays) for each in answers if each and each.number == number]
        return sum(given, Traffic()) if len(given) == len(answers) else None

    def close(self, error: str | None) -> None:
        """Every task may end."""
        for member in self._members.values():
            self._send(member, Verdict(error))
        self.is_closed = True

    def ended(self) -> str | None:
        lost = next((member.lost for member in self._members.values() if member.lost is not None), None)
        if self._over is not None or lost is not None:
            return self._over or lost
        return "all tasks have left" if all(member.left for member in self._members.values()) else None

    def cancel(self) -> None:
        """The slots were told to end. A task that is stuck in a user's function is Spark's to end."""
        self.give_up("it was cancelled")

    def give_up(self, why: str) -> None:
        self._over = self._over or why
        self.moved.set()

    def _send(self, member: _Member, message: Message) -> None:
        self._post(lambda: member.link.send(to_wire(message)))


@dataclass(slots=True)
class _Stage:
    """One stage of Spark: who waits for the others of the present try, the run of the last try, and why it failed where
    another try would fail in the same way."""

    waiting: dict[int, _Member] = field(default_factory=dict)
    run: Run | None = None
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class _Transform:
    slots: int
    conduct: Callable[[Run], RunEnd]
    patience_s: float
    abandon: Callable[[int, str], None]
    begun: Callable[[], None] | None


class Gathering:
    """Listens for tasks. `conduct(run)` is called in a thread of its own for every run, until it is over; then the tasks get
    their verdict."""

    def __init__(self, listening: Listening) -> None:
        self._selector = selectors.DefaultSelector()
        self.identity = Identity(NAME, 0, secrets.token_bytes(SECRET_BYTES))
        self._listening = listening
        with listening.explained():
            self._server = LinkServer(self._selector, self.identity, bind_host=listening.bind_host, ports=listening.ports,
                                      on_connect=lambda link, hello: None, on_message=self._said, on_lost=self._lost)
        self._waker = Waker(self._selector)
        self._requests: deque[Callable[[], None]] = deque()
        self._transforms: dict[str, _Transform] = {}
        self._stages: OrderedDict[tuple[str, int], _Stage] = OrderedDict()
        self._members: dict[Link, _Member] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name=NAME, daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """Where tasks find it."""
        return self._listening.found_at(self._server.address)

    def add(self, transform: str, slots: int, conduct: Callable[[Run], RunEnd], *, patience_s: float,
            abandon: Callable[[int, str], None] = lambda stage, why: None,
            begun: Callable[[], None] | None = None) -> None:
        """A task waits for the others no longer than `patience_s`. `abandon(stage, why)` asks Spark not to try a stage
        again; it is called before the tasks get the verdict. `begun()` is called whenever a task comes."""
        self._transforms[transform] = _Transform(slots, conduct, patience_s, abandon, begun)

    def remove(self, transform: str) -> None:
        """No task of it will ever come."""
        self._transforms.pop(transform, None)
        self._post(lambda: self._forget_stages_of(transform))

    def close(self) -> None:
        """Tasks that are still there lose their links."""
        self._closed = True
        self._waker.wake()
        self._thread.join()

    def _loop(self) -> None:
        try:
            while not self._closed:
                serve(self._selector, TICK_S)
                while self._requests:
                    self._requests.popleft()()
                self._send_away()
        finally:
            self._server.close()
            self._waker.close()
            self._selector.close()

    def _post(self, request: Callable[[], None]) -> None:
        self._requests.append(request)
        self._waker.wake()

    # What tasks say.

    def _said(self, link: Link, wire: dict[str, Any]) -> None:
        try:
            message = from_wire(wire)
        except ProtocolError as error:
            self._refuse(link, str(error))
            return
        member = self._members.get(link)
        if isinstance(message, Offer) and member is None:
            self._offered(_Member(link, message))
        elif isinstance(message, Counted) and member is not None:
            member.counted = message
            self._tell_run(member)
        elif isinstance(message, InputRead | Left) and member is not None:
            member.read |= isinstance(message, InputRead)
            member.left |= isinstance(message, Left)
            self._tell_run(member)
        else:
            self._refuse(link, f"a task doesn't say {type(message).__name__} here")

    def _lost(self, link: Link, reason: str) -> None:
        member = self._members.pop(link, None)
        if member is None:
            return
        member.lost = f"task {member.offer.task} was lost: {reason}"
        stage = self._stages.get((member.offer.transform, member.offer.stage))
        if stage is not None and stage.waiting.get(member.offer.task) is member:
            del stage.waiting[member.offer.task]
        self._tell_run(member)
        self._forget_one((member.offer.transform, member.offer.stage))

    def _offered(self, member: _Member) -> None:
        offer = member.offer
        transform = self._transforms.get(offer.transform)
        if transform is None or not 0 <= offer.task < transform.slots:
            self._refuse(member.link, "this driver doesn't know the transform that the task is of")
            return
        if transform.begun is not None:
            transform.begun()
        stage = self._stages.setdefault((offer.transform, offer.stage), _Stage())
        if stage.failure is not None:
            self._refuse(member.link, stage.failure)
            return
        of_run = () if stage.run is None else [known for known in stage.run.offers if known.task == offer.task]
        waiting = stage.waiting.get(offer.task)
        if any(known.number > offer.number for known in (*of_run, *([waiting.offer] if waiting else ()))):
            self._refuse(member.link, "Spark has started this task again")
            return
        if waiting is not None:
            self._refuse(waiting.link, "Spark has started this task again")
        if stage.run is not None:
            stage.run.give_up("Spark has started its tasks again")
            stage.run = None
        self._members[member.link] = member
        stage.waiting[offer.task] = member
        if len(stage.waiting) == transform.slots:
            run = stage.run = Run(stage.waiting, self._post)
            stage.waiting = {}
            threading.Thread(target=self._conduct, args=(transform, stage, run), name=f"{NAME} run", daemon=True).start()

    def _send_away(self) -> None:
        """Those whose others don't come."""
        now_s = time.monotonic()
        for key, stage in list(self._stages.items()):
            transform = self._transforms.get(key[0])
            if transform is None:
                continue
            for task, member in list(stage.waiting.items()):
                if now_s - member.came_s > transform.patience_s:
                    del stage.waiting[task]
                    self._refuse(member.link, f"{len(stage.waiting) + 1} of {transform.slots} tasks were there after "
                                              f"{transform.patience_s:.0f} s, and they work only together: are there task "
                                              f"slots for all of them, and are they free?")
                    self._forget_one(key)

    def _conduct(self, transform: _Transform, stage: _Stage, run: Run) -> None:
        end = transform.conduct(run)
        if end.error is not None and end.final:
            stage.failure = end.error
            with contextlib.suppress(Exception):        # then Spark tries again, and the tasks fail for the same reason
                transform.abandon(run.offers[0].stage, end.error)
        run.close(end.error)
        self._post(self._forget_stages)

    def _forget_stages(self) -> None:
        """A stage's number is used once. What is in order is forgotten; of failures the last ones are kept."""
        settled = [key for key, stage in self._stages.items() if self._is_settled(stage)]
        failed = [key for key in settled if self._stages[key].failure is not None]
        for key in settled:
            if key not in failed[-REMEMBERED_FAILURES:]:
                del self._stages[key]

    def _forget_one(self, key: tuple[str, int]) -> None:
        """The stage, unless Spark may try it again and the reason why it failed has to be known."""
        stage = self._stages.get(key)
        if stage is not None and self._is_settled(stage) and (stage.failure is None or key[0] not in self._transforms):
            del self._stages[key]

    def _forget_stages_of(self, transform: str) -> None:
        for key in [key for key in self._stages if key[0] == transform]:
            self._forget_one(key)

    def _is_settled(self, stage: _Stage) -> bool:
        """Whether nobody is there of it: no task waits, and the conductor and all tasks of the last run are done."""
        run = stage.run
        return not stage.waiting and (run is None or (
            run.is_closed and all(link not in self._members for link in self._links_of(run))))

    def _links_of(self, run: Run) -> list[Link]:
        return [member.link for member in run._members.values()]

    def _tell_run(self, member: _Member) -> None:
        stage = self._stages.get((member.offer.transform, member.offer.stage))
        if stage is not None and stage.run is not None:
            stage.run.moved.set()

    def _refuse(self, link: Link, why: str) -> None:
        self._members.pop(link, None)
        link.send(to_wire(Verdict(why)))
