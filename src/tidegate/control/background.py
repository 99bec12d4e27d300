"""Work off the hot loop: snapshot files, manifests, deletions.

One thread does the work in order. A callback in the loop's own thread gets the result, so that only the loop touches state.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

Outcome = Callable[[Any, BaseException | None], None]


def ignored(result: Any, error: BaseException | None) -> None:
    """An outcome for work whose failure does no harm."""


class Background(Protocol):
    def submit(self, work: Callable[[], Any], then: Outcome) -> None:
        """Run `work` later in another thread, and then `then(result, error)` in the loop."""

    def deliver(self) -> bool:
        """Call the callbacks of finished work. Return whether there were any."""


class BackgroundThread:
    """A background with one thread, which calls `wake` when work is finished, to end the loop's wait."""

    def __init__(self, name: str, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._waiting: queue.SimpleQueue[tuple[Callable[[], Any], Outcome] | None] = queue.SimpleQueue()
        self._finished: deque[tuple[Outcome, Any, BaseException | None]] = deque()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Any], then: Outcome) -> None:
        self._waiting.put((work, then))

    def deliver(self) -> bool:
        found = bool(self._finished)
        while self._finished:
            then, result, error = self._finished.popleft()
            then(result, error)
        return found

    def close(self, *, finish: bool = False, timeout_s: float = 5.0) -> None:
        """Wait for the current work to finish. With `finish`, do the work that is waiting as well; otherwise drop it."""
        with contextlib.suppress(queue.Empty):
            while not finish:
                self._waiting.get_nowait()
        self._waiting.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            work, then = item
            try:
                self._finished.append((then, work(), None))
            except BaseException as error:  # noqa: BLE001  (handed to the loop, which decides)
                self._finished.append((then, None, error))
            self._wake()
