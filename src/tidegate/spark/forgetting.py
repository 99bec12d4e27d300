"""Release what the driver holds for a transform when no query and no action can run the transform any more.

A program may build transforms for months. Python isn't notified when Spark no longer refers to a DataFrame, so building a
transform checks all earlier ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

# What tells that something is out of use, and what is to be called then.
_remembered: list[tuple[Callable[[], bool], tuple[Callable[[], None], ...]]] = []
_lock = threading.Lock()


def forget_when(is_out_of_use: Callable[[], bool], *forget: Callable[[], None]) -> None:
    """Call every function of `forget` some time after `is_out_of_use` has become true."""
    with _lock:
        unused = [each for each in _remembered if each[0]()]
        _remembered[:] = [*(each for each in _remembered if each not in unused), (is_out_of_use, forget)]
    for _, calls in unused:
        for call in calls:
            call()
