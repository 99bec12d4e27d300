"""The driver's listener for tasks of Spark, which gathers the tasks of one stage into a run.

In the DataFrame form nobody deploys slots. An action or a micro-batch makes Spark start a stage, whose tasks connect here
and offer themselves (`Offer`). The tasks of one stage at one try are a `Run`. When all of them are there, the run is
conducted in a thread of its own: the tasks become the slots of a coordinator (task_slots.py), and the link of each task is
the control link of its slot. However the run ends, every task gets a `Verdict`.

    task                      gathering                                          run
    Offer       ──────────►   until all tasks of the stage are there ─────────►  conduct(run), which attaches a coordinator
                ◄── Assign, Deploy, Start, Trigger … ──────────────────────────  send
    Register, Ready, InputRead, Acknowledge … ─────────────────────────────────► on_event
                ◄── Verdict ───────────────────────────────────────────────────  close, when conduct has returned

Invariants:
- A run has every task of its stage exactly once. Spark numbers the tasks that it starts; if a task comes again, the higher
  number counts, and the run that has the lower one loses all its tasks: Spark has given that try up.
- A task is of one run, and is assigned once. So whatever arrives on its link is of that run, and of its attempt.
- What failed for a reason that is in the program fails at once when Spark tries it again.
- A task always gets a verdict, unless its link is lost. Then the task fails by itself.

One gathering serves all transforms of a driver, from one thread. It doesn't know what a run is for.
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
from functools import partial
from typing import Any, TypeAlias

from tidegate.channels.handshake import Identity, serve
from tidegate.channels.links import Link, LinkServer
from tidegate.control.listening import Listening
from tidegate.control.messages import Message, Offer, Verdict, from_wire, to_wire
from tidegate.control.waker import Waker
from tidegate.errors import ProtocolError

NAME = "tidegate-gathering"
SECRET_BYTES = 32
TICK_S = 1.0
REMEMBERED_FAILURES = 64

# What a task has sent, or why it is lost.
OnEvent: TypeAlias = Callable[[int, Message | str], None]


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run ended: well, or with an error. After a `final` error another try would end in the same way."""

    error: str | None = None
    final: bool = False


@dataclass(slots=True, eq=False)
class _Member:
    """A task, and the run that it is of once all tasks of its stage are there."""

    link: Link
    offer: Offer
    came_s: float = field(default_factory=time.monotonic)
    run: Run | None = None
    lost: str | None = None


class Run:
    """The tasks of one stage at one try, all there. `attach`, `send` and `close` may be called from any thread."""

    def __init__(self, members: Mapping[int, _Member], post: Callable[[Callable[[], None]], None]) -> None:
        self.members = dict(members)
        self._post = post
        self._on_event: OnEvent | None = None
        self.is_closed = False  # whether its conductor is done with it

    @property
    def offers(self) -> list[Offer]:
        """The offers of the tasks, in the order of their numbers in the stage."""
        return [self.members[task].offer for task in sorted(self.members)]

    def attach(self, on_event: OnEvent) -> None:
        """Call it in the gathering's thread with what tasks send, and once for each task that is or was lost."""
        self._post(partial(self._attach, on_event))

    def send(self, task: int, message: Message) -> None:
        """Send a message to a task, unless the task is lost or was refused."""
        self._post(partial(self._send, self.members[task], message))

    def close(self, error: str | None) -> None:
        """Send every task its verdict. What tasks send afterwards reaches nobody, and nobody is kept for it."""
        for task in self.members:
            self.send(task, Verdict(error))
        self.attach(lambda task, event: None)
        self.is_closed = True

    def on_event(self, task: int, event: Message | str) -> None:
        """Called in the gathering's thread. Before somebody is attached a task can only be lost, which is remembered."""
        if self._on_event is not None:
            self._on_event(task, event)

    def _send(self, member: _Member, message: Message) -> None:
        if member.lost is None:
            member.link.send(to_wire(message))

    def _attach(self, on_event: OnEvent) -> None:
        self._on_event = on_event
        for task, member in self.members.items():
            if member.lost is not None:
                on_event(task, member.lost)


@dataclass(slots=True)
class _Stage:
    """One stage of Spark: who waits for the other tasks of the present try, the run of the last try, and why it failed if
    another try would fail in the same way."""

    waiting: dict[int, _Member] = field(default_factory=dict)
    run: Run | None = None
    failure: str | None = None

    @property
    def is_settled(self) -> bool:
        """Whether no task waits, and the conductor and all tasks of the last run are done."""
        run = self.run
        return not self.waiting and (
            run is None or (run.is_closed and all(member.lost is not None for member in run.members.values()))
        )


@dataclass(frozen=True, slots=True)
class _Transform:
    slots: int
    conduct: Callable[[Run], RunEnd]
    patience_s: float
    abandon: Callable[[int, str], None]
    begun: Callable[[], None]


class Gathering:
    """Listens for tasks. `conduct(run)` is called in a thread of its own for every run, until it is over; then the tasks get
    their verdict."""

    def __init__(self, listening: Listening) -> None:
        self._selector = selectors.DefaultSelector()
        self.identity = Identity(NAME, 0, secrets.token_bytes(SECRET_BYTES))
        self._listening = listening
        with listening.explained():
            self._server = LinkServer(
                self._selector,
                self.identity,
                bind_host=listening.bind_host,
                ports=listening.ports,
                on_connect=lambda link, hello: None,
                on_message=self._said,
                on_lost=self._drop,
            )
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
        """The address that tasks connect to."""
        return self._listening.found_at(self._server.address)

    def add(
        self,
        transform: str,
        slots: int,
        conduct: Callable[[Run], RunEnd],
        *,
        patience_s: float,
        abandon: Callable[[int, str], None] = lambda stage, why: None,
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        """A task waits for the other tasks no longer than `patience_s`. `abandon(stage, why)` asks Spark not to try a stage
        again; it is called before the tasks get the verdict. `begun()` is called whenever a task comes."""
        self._transforms[transform] = _Transform(slots, conduct, patience_s, abandon, begun)

    def remove(self, transform: str) -> None:
        """Forget a transform of which no task will come any more."""
        self._transforms.pop(transform, None)
        self._post(self._forget_stages)

    def close(self) -> None:
        """Stop listening. Tasks that are still there lose their links."""
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

    # What tasks send.

    def _said(self, link: Link, wire: dict[str, Any]) -> None:
        member = self._members.get(link)
        try:
            message = from_wire(wire)
        except ProtocolError as error:
            self._refuse(link, str(error))
            return
        if member is None:
            if isinstance(message, Offer):  # anything else is of a task that was refused
                self._offered(_Member(link, message))
        elif member.run is not None:
            member.run.on_event(member.offer.task, message)
        else:
            self._refuse(link, f"a task that waits for others doesn't send {type(message).__name__}")

    def _offered(self, member: _Member) -> None:
        offer = member.offer
        transform = self._transforms.get(offer.transform)
        if transform is None or not 0 <= offer.task < transform.slots:
            self._refuse(member.link, "this driver doesn't know the transform that the task is of")
            return
        transform.begun()
        stage = self._stages.setdefault((offer.transform, offer.stage), _Stage())
        if stage.failure is not None:
            self._refuse(member.link, stage.failure)
            return
        run, waiting = stage.run, stage.waiting.get(offer.task)
        known = ([] if run is None else [run.members[offer.task]]) + ([] if waiting is None else [waiting])
        if any(each.offer.number > offer.number for each in known):
            self._refuse(member.link, "Spark has started this task again")
            return
        self._members[member.link] = stage.waiting[offer.task] = member
        stage.run = None
        if waiting is not None:
            self._refuse(waiting.link, "Spark has started this task again")
        for each in () if run is None else run.members.values():
            self._refuse(each.link, "Spark has started its tasks again")
        if len(stage.waiting) == transform.slots:
            run = stage.run = Run(stage.waiting, self._post)
            for each in stage.waiting.values():
                each.run = run
            stage.waiting = {}
            threading.Thread(target=self._conduct, args=(transform, stage, run), name=f"{NAME} run", daemon=True).start()

    def _send_away(self) -> None:
        """Refuse the tasks that have waited too long for the other tasks of their stage."""
        now_s = time.monotonic()
        for key, stage in list(self._stages.items()):
            transform = self._transforms.get(key[0])
            for member in list(stage.waiting.values()):
                if transform is not None and now_s - member.came_s > transform.patience_s:
                    self._refuse(
                        member.link,
                        f"{len(stage.waiting)} of {transform.slots} tasks were there after "
                        f"{transform.patience_s:.0f} s, and they work only together: are there task "
                        f"slots for all of them, and are they free?",
                    )

    def _refuse(self, link: Link, why: str) -> None:
        link.send(to_wire(Verdict(why)))
        self._drop(link, why)

    def _drop(self, link: Link, why: str) -> None:
        """Forget the task at the other end, which is lost or was refused."""
        member = self._members.pop(link, None)
        if member is None:
            return
        member.lost = why
        stage = self._stages.get((member.offer.transform, member.offer.stage))
        if stage is not None and stage.waiting.get(member.offer.task) is member:
            del stage.waiting[member.offer.task]
        if member.run is not None:
            member.run.on_event(member.offer.task, why)
        self._forget_stages()

    def _conduct(self, transform: _Transform, stage: _Stage, run: Run) -> None:
        try:
            end = transform.conduct(run)
        except Exception as error:  # noqa: BLE001  (tasks wait for a verdict)
            end = RunEnd(f"{type(error).__name__}: {error}")
        if end.error is not None and end.final:
            stage.failure = end.error
            with contextlib.suppress(Exception):  # then Spark tries again, and the tasks fail for the same reason
                transform.abandon(run.offers[0].stage, end.error)
        run.close(end.error)
        self._post(self._forget_stages)

    def _forget_stages(self) -> None:
        """Forget the settled stages, whose numbers Spark doesn't use again. Those that failed last are kept, in case Spark
        tries them again and must get the same error."""
        settled = [key for key, stage in self._stages.items() if stage.is_settled]
        failed = [key for key in settled if self._stages[key].failure is not None and key[0] in self._transforms]
        for key in settled:
            if key not in failed[-REMEMBERED_FAILURES:]:
                del self._stages[key]
