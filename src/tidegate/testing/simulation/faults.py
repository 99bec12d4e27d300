"""What goes wrong, and when.

A run has a handful of faults. Each waits for the n-th occurrence of an *occasion* (a step, a marker, an upload, an
acknowledgement, a manifest, a commit…), so that the faults are spread over the phases of an epoch and not over idle time.
Then it strikes, usually in the process of the occasion. In addition, the store or the outside of some runs fails now and
then. After the last fault, or after a time, everything is healed, and from then on the job must come to its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from tidegate.store.memory import Fail, Flip, LoseReply, Operation, Tear
from tidegate.testing.simulation.external import Transaction
from tidegate.testing.simulation.processes import CoordinatorProcess, SlotProcess
from tidegate.testing.simulation.store import Mishap
from tidegate.testing.simulation.world import ProcessCrashed

if TYPE_CHECKING:
    from tidegate.testing.simulation.simulation import Simulation

# Occasions, and the highest number of occurrences before a fault strikes.
OCCASIONS: dict[str, int] = {
    "step": 400,
    "marker": 40,
    "upload": 30,
    "manifest": 6,
    "read": 30,
    "claim": 2,
    "prepare": 10,
    "commit": 10,
    "Deploy": 4,
    "Ready": 4,
    "Start": 4,
    "Trigger": 12,
    "Acknowledge": 30,
    "Complete": 12,
    "Abort": 2,
    "InputEnded": 3,
    "EndInput": 1,
    "Done": 1,
    "delete": 15,
}
MOST_MISHAPS = 3  # caused by one fault of the store
HOUR_MS = 3_600_000
HEALED_AFTER_US = 5_000_000


class SimulatedFailure(ConnectionError):
    """Raised in a user's function as if by a service that is briefly unavailable: it may come twice at the same record."""


class Trip:
    """Lets a fault crash users' functions: they call `at` for every record, and it raises once the fault has armed it."""

    def __init__(self) -> None:
        self.armed = False

    def at(self, record: object) -> None:
        if self.armed:
            self.armed = False
            raise SimulatedFailure(f"at {record}")


@dataclass(frozen=True, slots=True)
class FaultRates:
    """How much goes wrong in a run.

    There are at most `most_faults` faults, evenly of these `kinds` (None: of all kinds, some of them more often). In some
    runs a share of the accesses to the store (`store_error`), or of prepares and commits outside (`outage`), fails too.
    `flip` is the share of reads of state with a wrong bit. The job is stopped or cancelled, and resumed with another number
    of slots, at most `most_interruptions` times.
    """

    most_faults: int = 9
    most_interruptions: int = 2
    store_error: float = 0.01
    outage: float = 0.01
    flip: float = 0.0
    kinds: tuple[str, ...] | None = None


DEFAULT_RATES = FaultRates()
NO_FAULTS = FaultRates(most_faults=0, most_interruptions=0, store_error=0.0, outage=0.0)


@dataclass(slots=True)
class _Armed:
    kind: str
    occasion: str
    countdown: int


@dataclass(slots=True)
class Faults:
    """The faults of one run."""

    simulation: Simulation
    rng: Random
    rates: FaultRates
    span: float = 1.0  # the length of a run in comparison with others
    struck: list[str] = field(default_factory=list)
    healed_us: int | None = None
    flipped: bool = False
    _armed: list[_Armed] = field(default_factory=list)
    _mishaps: list[tuple[Operation | None, str, Mishap]] = field(default_factory=list)  # with their operation and folder
    _store_error: float = 0.0
    _outage: float = 0.0
    _flip: float = 0.0

    def __post_init__(self) -> None:
        rng, world = self.rng, self.simulation.world
        if self.rates.most_faults:
            kinds = sorted(_KINDS) if self.rates.kinds is None else sorted(self.rates.kinds)
            weights = [_KINDS[kind][2] if self.rates.kinds is None else 1 for kind in kinds]
            drawn = rng.choices(kinds, weights, k=max(0, rng.randint(-1, math.ceil(self.rates.most_faults * self.span))))
            self._armed = [self._arm(kind) for kind in drawn]
            self._store_error = rng.choice((0.0, 0.0, self.rates.store_error))
            self._outage = rng.choice((0.0, 0.0, self.rates.outage))
            self._flip = self.rates.flip
            for kind in ("store", "channel", "link", "cpu", "boot"):
                world.slowness[kind] = rng.choice((1.0, 1.0, 1.0, 3.0, 8.0))
        world.after(HEALED_AFTER_US if self._armed else rng.randrange(1, 200_000), self._heal)

    # Occasions.

    def note(self, occasion: str, process: Any) -> None:
        for armed in self._armed:
            if armed.occasion == occasion:
                armed.countdown -= 1
                if armed.countdown == 0:
                    self._armed.remove(armed)
                    self._strike(armed.kind, process)
                    if not self._armed:
                        self.simulation.world.after(self.rng.randrange(1, 200_000), self._heal)
                    return

    def mishap(self, process: str, operation: Operation, name: str) -> Mishap | None:
        """Return what goes wrong with this access to the store."""
        self.note(_store_occasion(operation, name), self.simulation.world.acting)
        for position, (wanted, folder, mishap) in enumerate(self._mishaps):
            if wanted in (None, operation) and name.startswith(folder):
                del self._mishaps[position]
                return mishap
        if self._flip and name.startswith("state/") and operation is Operation.READ and self.rng.random() < self._flip:
            self.flipped = True
            self.struck.append(f"a bit of {name}, read by {process}")
            return Mishap(fault=Flip, position=self.rng.random())
        if self._store_error and self.rng.random() < self._store_error:
            self.struck.append(f"{operation.value} {name} of {process}")
            return Mishap(fault=self.rng.choice((Fail, LoseReply, Tear)), position=self.rng.random())
        return None

    def outage(self, deed: str, transaction: Transaction) -> str | None:
        """Return what goes wrong with this prepare or commit outside."""
        acting = self.simulation.world.acting
        self.note(deed, acting)
        if acting is not None and acting.crashed:
            raise ProcessCrashed
        if self._outage and self.rng.random() < self._outage:
            self.struck.append(f"{deed} {transaction.name}")
            return self.rng.choice(("refused", "answer lost"))
        return None

    # Striking and healing.

    def _arm(self, kind: str) -> _Armed:
        occasion = self.rng.choice(sorted(OCCASIONS))
        return _Armed(kind, occasion, self.rng.randint(1, max(1, int(OCCASIONS[occasion] * self.span))))

    def _heal(self) -> None:
        if self.healed_us is None:
            self.healed_us = self.simulation.world.now_us
            self._armed, self._mishaps = [], []
            self._store_error = self._outage = self._flip = 0.0
            self.simulation.trip.armed = False
            self.simulation.world.slowness.clear()
            self.simulation.world.tell("everything is healed")

    def _strike(self, kind: str, process: Any) -> None:
        whom, act, _ = _KINDS[kind]
        victim = whom(self, process)
        struck = None if victim is None else act(self, victim)
        if struck is not None:
            self.struck.append(f"{kind}: {struck}")
            self.simulation.world.tell(f"FAULT {kind}: {struck}")

    def _victim(self, process: Any) -> SlotProcess | None:
        """Return the slot of the occasion, or else any living slot."""
        if isinstance(process, SlotProcess) and process.alive and self.rng.random() < 0.6:
            return process
        slots = self.simulation.living_slots()
        return self.rng.choice(slots) if slots else None

    def _for_a_while_us(self) -> int:
        return int(self.rng.choice((3_000, 30_000, 300_000)) * (0.5 + self.rng.random()))

    def _in_background(self, process: Any) -> SlotProcess | CoordinatorProcess | None:
        return process if isinstance(process, CoordinatorProcess) else self._victim(process)

    def _receiver(self, process: Any) -> SlotProcess | CoordinatorProcess | None:
        receiver = process if isinstance(process, SlotProcess | CoordinatorProcess) else self._victim(process)
        return receiver if receiver is not None and receiver.alive else None

    def _coordinator(self, _: Any) -> CoordinatorProcess | None:
        return self.simulation.current_coordinator()

    def _nobody(self, _: Any) -> str:
        return "nobody"

    # What the kinds do to their victims. Each returns what it did, or None if there was nothing to do.

    def _dies(self, victim: SlotProcess | CoordinatorProcess) -> str:
        victim.crash("by a fault")
        return victim.name

    def _stops(self, victim: SlotProcess | CoordinatorProcess) -> str:
        for_us = self._for_a_while_us()
        victim.frozen_until_us = self.simulation.world.now_us + for_us
        return f"{victim.name} for {for_us // 1000} ms"

    def _background_stalls(self, victim: SlotProcess | CoordinatorProcess) -> str:
        for_us = self._for_a_while_us()
        victim.background.stalled_until_us = self.simulation.world.now_us + for_us
        return f"{victim.name} for {for_us // 1000} ms"

    def _link_hangs(self, victim: SlotProcess) -> str:
        for_us = self._for_a_while_us()
        until_us = self.simulation.world.now_us + for_us
        way = self.rng.choice(("up", "down", "both"))
        if way != "down":
            victim.link.up.held_until_us = until_us
        if way != "up":
            victim.link.down.held_until_us = until_us
        return f"{victim.name}, {way}, for {for_us // 1000} ms"

    def _message_is(self, how: str, receiver: SlotProcess | CoordinatorProcess) -> str:
        """Lose or double the message of the occasion, or the next one that arrives."""
        receiver.astray = how
        return f"{how} on its way to {receiver.name}"

    def _channel_is_cut(self, _: Any) -> str | None:
        found = [(wiring, channel) for wiring in self.simulation.living_wirings() for channel in wiring.between_slots()]
        if not found:
            return None
        wiring, channel = self.rng.choice(found)
        wiring.cut(channel, "by a fault")
        return str(channel.channel)

    def _function_raises(self, _: Any) -> str:
        self.simulation.trip.armed = True
        return "at the next record"

    def _coordinator_is_taken_over(self, coordinator: CoordinatorProcess) -> str:
        self.simulation.start_coordinator_later()
        return f"{coordinator.name} lives on"

    def _store_fails(self, _: Any) -> str:
        operation = self.rng.choice((None, Operation.WRITE, Operation.WRITE, *Operation))
        fault = self.rng.choice((Fail, LoseReply, Tear))
        count = self.rng.randint(1, MOST_MISHAPS)
        self._mishaps += [(operation, "", Mishap(fault=fault, position=self.rng.random())) for _ in range(count)]
        return f"{fault.__name__}, {'any' if operation is None else operation.value}"

    def _dies_at_the_store(self, _: Any) -> str:
        operation = self.rng.choice((Operation.WRITE, Operation.CREATE, Operation.CREATE, Operation.DELETE, Operation.READ))
        crash = self.rng.choice(("before", "after"))
        torn = operation is Operation.WRITE and crash == "after" and self.rng.random() < 0.7
        self._mishaps.append((operation, "", Mishap(fault=Tear if torn else None, position=self.rng.random(), crash=crash)))
        return f"{'torn ' if torn else ''}{operation.value}, {crash}"

    def _bit_flips(self, _: Any) -> str:
        self.flipped = True
        folder = self.rng.choice(("state/", "state/", "manifests/", ""))
        self._mishaps.append((Operation.READ, folder, Mishap(fault=Flip, position=self.rng.random())))
        return f"in the next read of {folder or 'anything'}"

    def _clock_jumps(self, _: Any) -> str:
        by_ms = self.rng.choice((-HOUR_MS, HOUR_MS))
        self.simulation.world.clock.jumped_ms += by_ms
        return f"{by_ms} ms"


# Whom a fault of each kind strikes (None: nobody is there), what it does, and how often it is drawn.
_KINDS: dict[str, tuple[Callable[[Faults, Any], Any], Callable[[Faults, Any], str | None], int]] = {
    "slot dies": (Faults._victim, Faults._dies, 5),
    "slot stops": (Faults._victim, Faults._stops, 3),
    "background stalls": (Faults._in_background, Faults._background_stalls, 3),
    "link hangs": (Faults._victim, Faults._link_hangs, 3),
    "channel is cut": (Faults._nobody, Faults._channel_is_cut, 1),
    "message is lost": (Faults._receiver, lambda faults, receiver: faults._message_is("lost", receiver), 2),
    "message is doubled": (Faults._receiver, lambda faults, receiver: faults._message_is("doubled", receiver), 2),
    "function raises": (Faults._nobody, Faults._function_raises, 2),
    "coordinator dies": (Faults._coordinator, Faults._dies, 2),
    "coordinator is taken over": (Faults._coordinator, Faults._coordinator_is_taken_over, 2),
    "coordinator stops": (Faults._coordinator, Faults._stops, 1),
    "store fails": (Faults._nobody, Faults._store_fails, 4),
    "dies at the store": (Faults._nobody, Faults._dies_at_the_store, 4),
    "bit flips": (Faults._nobody, Faults._bit_flips, 1),
    "clock jumps": (Faults._nobody, Faults._clock_jumps, 1),
}


def _store_occasion(operation: Operation, name: str) -> str:
    if operation is Operation.CREATE:
        return "manifest" if name.startswith("manifests/") else "claim"
    return {Operation.WRITE: "upload", Operation.READ: "read", Operation.DELETE: "delete"}.get(operation, "look")
