"""Background work in the simulation: coroutines that pause wherever another thread could run in the real engine.

A real background thread runs beside the slot's loop, and a slot that is being restored reads the store beside everything
else. Here such work runs in a coroutine: it pauses at every access to the store, and where the heap's writer yields to other
threads, until the scheduler resumes it. Meanwhile anything may happen: steps of its own slot, a crash, another coordinator.

Python's coroutines can't pause inside a plain call, so each coroutine here is a thread that runs only while another thread
waits for it in `resume`. Exactly one thread runs at any time, and the scheduler decides which, so a run is in effect
single-threaded and can be repeated exactly.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tidegate.control.background import Outcome
from tidegate.errors import FencedOff, TidegateError
from tidegate.state import cutting, heap
from tidegate.testing.simulation.world import ProcessCrashed, Violation, World

if TYPE_CHECKING:
    from tidegate.testing.simulation.processes import Process

STORE_STEP_US = 250
OUTCOME_US = 100
HEAP_CHUNK_ENTRIES = 2
HEAP_PAUSE_US = 60


class _Thread:
    """A real thread that coroutines use, one after the other."""

    def __init__(self) -> None:
        self.go = threading.Lock()  # always held, except while control passes from one thread to the other
        self.back = threading.Lock()
        self.go.acquire()
        self.back.acquire()
        self.body: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._run, name="tidegate-simulation", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self.go.acquire()
            if self.body is None:
                return
            self.body()
            self.back.release()

    def close(self) -> None:
        self.body = None
        self.go.release()
        self._thread.join()


class Coroutines:
    """The coroutines of one world, and which of them is running (None if it is the scheduler)."""

    def __init__(self) -> None:
        self.running: Coroutine | None = None
        self.idle: list[_Thread] = []

    def close(self) -> None:
        for thread in self.idle:
            thread.close()
        self.idle.clear()


class Coroutine:
    """Work that stops in `pause` and continues at `resume`."""

    def __init__(self, coroutines: Coroutines, work: Callable[[], Any]) -> None:
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.pause_us = 0
        self._work = work
        self._coroutines = coroutines
        self._thread: _Thread | None = None
        self._thrown: BaseException | None = None

    def resume(self) -> None:
        """Run the work until it pauses or is done."""
        assert not self.done
        if self._thread is None:
            self._thread = self._coroutines.idle.pop() if self._coroutines.idle else _Thread()
            self._thread.body = self._body
        outer, self._coroutines.running = self._coroutines.running, self
        self._thread.go.release()
        self._thread.back.acquire()
        self._coroutines.running = outer
        if self.done:
            self._coroutines.idle.append(self._thread)

    def pause(self, pause_us: int) -> None:
        """Let the scheduler run for that long. Called by the work itself."""
        assert self._coroutines.running is self and self._thread is not None
        self.pause_us = pause_us
        self._thread.back.release()
        self._thread.go.acquire()
        if self._thrown is not None:
            raise self._thrown

    def kill(self) -> None:
        """Raise `ProcessCrashed` where the work paused. Work that has not begun never will."""
        if self._thread is None:
            self.done = True
            return
        self._thrown = ProcessCrashed()
        while not self.done:
            self.resume()

    def _body(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:  # noqa: BLE001  (the caller of `resume` decides)
            self.error = error
        self.done = True


class SimulatedBackground:
    """`control.background.Background` of one process: it does work in order, one at a time, and takes its time."""

    def __init__(self, world: World, coroutines: Coroutines, worker: Process) -> None:
        self.stalled_until_us = 0
        self._world = world
        self._coroutines = coroutines
        self._worker = worker
        self._waiting: deque[tuple[Callable[[], Any], Outcome]] = deque()
        self._current: tuple[Coroutine, Outcome] | None = None
        self._outcomes: deque[tuple[Outcome, Any, BaseException | None]] = deque()
        self._closed = False

    def submit(self, work: Callable[[], Any], then: Outcome) -> None:
        if self._closed:
            return
        self._waiting.append((work, then))
        if self._current is None:
            self._begin()

    def deliver(self) -> bool:
        """Deliver one outcome. Return False if there is none."""
        if not self._outcomes or self._closed:
            return False
        then, result, error = self._outcomes.popleft()
        then(result, error)
        return True

    @property
    def has_outcomes(self) -> bool:
        return bool(self._outcomes) and not self._closed

    def close(self) -> None:
        """End with the process: the current work runs to its end, waiting work is dropped, and no outcome is delivered."""
        self._closed = True
        self._waiting.clear()

    def kill(self) -> None:
        """Die with the process: the current work stops where it is."""
        self.close()
        current, self._current = self._current, None
        if current is not None and current[0] is not self._coroutines.running and not current[0].done:
            current[0].kill()

    def _begin(self) -> None:
        work, then = self._waiting.popleft()
        coroutine = Coroutine(self._coroutines, work)
        self._current = coroutine, then
        self._world.after(self._world.delay_us("store", STORE_STEP_US), lambda: self._resume(coroutine))

    def _resume(self, coroutine: Coroutine) -> None:
        if self._current is None or self._current[0] is not coroutine:
            return
        until_us = max(self._worker.frozen_until_us, self.stalled_until_us)
        if self._world.now_us < until_us:
            self._world.at(until_us, lambda: self._resume(coroutine))
            return
        self._world.acting = self._worker
        coroutine.resume()
        if not coroutine.done:
            self._world.after(coroutine.pause_us, lambda: self._resume(coroutine))
        elif self._current is not None:
            self._finished(coroutine, self._current[1])

    def _finished(self, coroutine: Coroutine, then: Outcome) -> None:
        self._current = None
        error = coroutine.error
        if isinstance(error, ProcessCrashed | Violation):
            return
        if error is not None:
            self._world.tell(f"{self._worker.name}: background work failed: {type(error).__name__}")
            if not isinstance(error, TidegateError | FencedOff):
                self._world.violate(f"background work of {self._worker.name} failed with {type(error).__name__}: {error}")
        self._outcomes.append((then, coroutine.result, error))
        self._world.after(self._world.delay_us("cpu", OUTCOME_US), self._worker.wake)
        if self._waiting:
            self._begin()


@contextmanager
def heap_that_pauses(world: World, coroutines: Coroutines) -> Iterator[None]:
    """Make the heap's writer pause after every few entries, so that the slot's loop can run in between. The real writer
    pauses only after thousands."""

    class SimulatedPace(cutting.Pace):
        """A pace by the simulated clock; the real one reads a real clock."""

        def __init__(self, *, rest_factor: float) -> None:
            self.entries = HEAP_CHUNK_ENTRIES

        def rest_if_due(self) -> None:
            if coroutines.running is not None:
                coroutines.running.pause(world.delay_us("store", HEAP_PAUSE_US))

    class NoPace(SimulatedPace):
        """No pauses outside of the heap: what was read belongs to the writer alone, and the next pause is at the store."""

        def rest_if_due(self) -> None: ...

    modules: dict[Any, type[cutting.Pace]] = {heap: SimulatedPace, cutting: NoPace}
    kept = [module.Pace for module in modules]
    for module, pace in modules.items():
        module.Pace = pace
    try:
        yield
    finally:
        for module, pace in zip(modules, kept, strict=True):
            module.Pace = pace
