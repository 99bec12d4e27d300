"""The simulated world: one clock, one queue of events, one source of chance, one trace.

Everything that happens is an event at a time in microseconds. The next event is taken from the queue, the clock jumps to its
time, and it may put further events into the queue. All durations are drawn from the seeded `rng`. So events that could
happen in any order happen in some order under each seed, and in the same order whenever that seed is run again.

Invariants: no module of the simulation reads a real clock, or uses random numbers that don't follow from the seed; only one
thread runs at a time (see `background.py` for the coroutines).
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

from tidegate.dataflow.operators.budget import STEP_MS, Budget

TRACE_LINES_KEPT = 60
MONOTONIC_START_US = 5_000_000_000
WALL_START_MS = 1_700_000_000_000


class ProcessCrashed(KeyboardInterrupt):
    """Ends whatever a simulated process is doing. It is an interrupt, so it doesn't count as an error of a user's function,
    and the engine doesn't catch it."""


class Violation(KeyboardInterrupt):
    """Something happened that must never happen. Like a crash, it isn't caught by the engine."""


class SimulatedClock:
    """The clock of every simulated process. The time of day may jump; the monotonic time does not."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.jumped_ms = 0

    def now_ms(self) -> int:
        return WALL_START_MS + self._world.now_us // 1000 + self.jumped_ms

    def monotonic_ms(self) -> int:
        return self._world.now_us // 1000


class StepClock:
    """What the steps of operators are measured by (dataflow/operators/budget.py): by chance, a step is over at any record or
    timer. In half of the runs none ever is. The chance is drawn from a source of its own, so that the course of these runs
    doesn't depend on it."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"steps {seed}")
        self._spent = self._rng.choice((0.0, 0.0, 0.0, 0.1, 0.3, 0.6))
        self._now_ms = 0

    def stop(self) -> None:
        """Let no step be over before its work is done."""
        self._spent = 0.0

    def make_budget(self) -> Budget:
        return Budget(self, most_between_looks=1) if self._spent else Budget()

    def __call__(self) -> int:
        if self._rng.random() < self._spent:
            self._now_ms += STEP_MS
        return self._now_ms


class Trace:
    """What happened: the last lines, to be read, and a digest of all lines, to compare runs. `listener` gets every line."""

    def __init__(self) -> None:
        self.count = 0
        self.listener: Callable[[str], None] | None = None
        self.last_lines: deque[str] = deque(maxlen=TRACE_LINES_KEPT)
        self._digest = hashlib.blake2b(digest_size=16)

    def add(self, line: str) -> None:
        self.count += 1
        self.last_lines.append(line)
        self._digest.update(line.encode())
        if self.listener is not None:
            self.listener(line)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()


class World:
    """Time and random numbers. `slowness` multiplies the durations of a kind of work, by the kind's name."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_us = MONOTONIC_START_US
        self.clock = SimulatedClock(self)
        self.trace = Trace()
        self.violation: str | None = None
        self.acting: Any = None  # the process whose turn it is
        self.slowness: dict[str, float] = {}
        self.event_count = 0
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._event_number = 0

    def at(self, at_us: int, action: Callable[[], None]) -> None:
        """Add an event. Events at the same time happen in the order in which they were added."""
        self._event_number += 1
        heapq.heappush(self._events, (max(at_us, self.now_us), self._event_number, action))

    def after(self, delay_us: int, action: Callable[[], None]) -> None:
        self.at(self.now_us + delay_us, action)

    def happen(self) -> bool:
        """Let the next event happen. Return False if there is none."""
        if not self._events:
            return False
        self.event_count += 1
        self.now_us, _, action = heapq.heappop(self._events)
        action()
        return True

    def delay_us(self, kind: str, typical_us: int) -> int:
        """Draw a duration: mostly near the typical one, in one of ten cases up to ten times as long, rarely forty times."""
        drawn = self.rng.random()
        if drawn < 0.9:
            factor = 0.2 + drawn
        elif drawn < 0.99:
            factor = 1.0 + (drawn - 0.9) * 100
        else:
            factor = 10.0 + (drawn - 0.99) * 3000
        return max(1, int(typical_us * factor * self.slowness.get(kind, 1.0)))

    def tell(self, line: str) -> None:
        self.trace.add(f"{(self.now_us - MONOTONIC_START_US) / 1000:10.3f} ms  {line}")

    def violate(self, what: str) -> NoReturn:
        """End the run. The first violation is the one that is reported."""
        if self.violation is None:
            self.violation = what
            self.tell(f"VIOLATION: {what}")
        raise Violation(what)
