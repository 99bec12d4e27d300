"""A pipe that ends a selector's wait from another thread."""

from __future__ import annotations

import contextlib
import os
import selectors
import threading


class Waker:
    """A pipe that ends a selector's wait from another thread. `wake` does nothing once the pipe is closed."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._lock = threading.Lock()  # a late wake must not write into a file that has got the pipe's number
        self._closed = False
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        selector.register(self._read, selectors.EVENT_READ, self._drain)

    def wake(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):  # the pipe is full, so the selector is awake
            if not self._closed:
                os.write(self._write, b"!")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._selector.unregister(self._read)
            os.close(self._read)
            os.close(self._write)

    def _drain(self, events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._read, 4096)) == 4096:
                pass
