"""The background thread: in order, callbacks in the loop's own thread, errors handed over and not lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tidegate.control.background import BackgroundThread

PATIENCE_S = 10.0


class Loop:
    """A loop that waits for the background's wake-up calls, as the hosts' loops do."""

    def __init__(self) -> None:
        self.awake = threading.Event()
        self.background = BackgroundThread("test", self.awake.set)
        self.told: list[tuple[Any, BaseException | None]] = []

    def submit(self, work: Any) -> None:
        self.background.submit(work, lambda result, error: self.told.append((result, error)))

    def until(self, count: int) -> list[tuple[Any, BaseException | None]]:
        give_up_s = time.monotonic() + PATIENCE_S
        while len(self.told) < count:
            assert self.awake.wait(max(0.0, give_up_s - time.monotonic())), f"only {self.told} came"
            self.awake.clear()
            self.background.deliver()
        return self.told


@pytest.fixture
def loop(no_leaked_threads: None) -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.background.close()


def test_work_is_done_in_order_and_elsewhere(loop: Loop) -> None:
    threads: set[str] = set()

    def work(number: int) -> int:
        threads.add(threading.current_thread().name)
        return number

    for number in range(100):
        loop.submit(lambda number=number: work(number))
    assert [result for result, _ in loop.until(100)] == list(range(100))
    assert threads == {"test"}


def test_callbacks_run_in_the_thread_that_delivers(loop: Loop) -> None:
    callers: list[threading.Thread] = []
    loop.background.submit(lambda: None, lambda result, error: callers.append(threading.current_thread()))
    loop.submit(lambda: None)
    loop.until(1)
    assert callers == [threading.current_thread()]


def test_an_error_reaches_the_callback_and_work_goes_on(loop: Loop) -> None:
    def fail() -> None:
        raise OSError("disk full")

    loop.submit(fail)
    loop.submit(lambda: "after")
    (_, error), after = loop.until(2)
    assert isinstance(error, OSError) and str(error) == "disk full"
    assert after == ("after", None)


def test_nothing_is_delivered_twice_or_without_being_asked(loop: Loop) -> None:
    loop.submit(lambda: 1)
    assert loop.awake.wait(PATIENCE_S)
    assert loop.told == []
    assert loop.background.deliver() is True
    assert loop.background.deliver() is False
    assert loop.told == [(1, None)]


def test_closing_lets_the_work_at_hand_finish_and_drops_the_rest(no_leaked_threads: None) -> None:
    loop, started, go_on, done = Loop(), threading.Event(), threading.Event(), []

    def slow() -> None:
        started.set()
        assert go_on.wait(PATIENCE_S)
        done.append("slow")

    loop.submit(slow)
    loop.submit(lambda: done.append("behind it"))
    assert started.wait(PATIENCE_S)
    closing = threading.Thread(target=loop.background.close)
    closing.start()
    while loop.background._waiting.qsize() != 1:  # the one order to end is all that waits now
        time.sleep(0.001)
    go_on.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert done == ["slow"]


def test_closing_can_also_finish_what_waits(no_leaked_threads: None) -> None:
    loop, done = Loop(), []
    for number in range(50):
        loop.submit(lambda number=number: done.append(number))
    loop.background.close(finish=True)
    assert done == list(range(50))
