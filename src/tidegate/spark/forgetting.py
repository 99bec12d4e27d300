"""What the driver keeps of a transform goes when no query and no action can run the transform any more.

A program may build transforms for months. Nobody is told when a DataFrame is gone, so whoever builds the next transform
looks through the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    is_out_of_use: Callable[[], bool]
    forget: tuple[Callable[[], None], ...]


_kept: list[_Kept] = []
_lock = threading.Lock()


def forget_when(is_out_of_use: Callable[[], bool], *forget: Callable[[], None]) -> None:
    """Call `forget`, at some time after `is_out_of_use` has become true."""
    with _lock:
        gone = [each for each in _kept if each.is_out_of_use()]
        _kept[:] = [each for each in _kept if each not in gone]
        _kept.append(_Kept(is_out_of_use, forget))
    for each in gone:
        for call in each.forget:
            call()
