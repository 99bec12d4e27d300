"""A calendar: which keys are to be called at which times.

Many keys share a time: the end of a window, or the processing time of an epoch and a delay. So keys are held by time, and
the heap holds only times. The only key of a time is held without a container.

A time whose keys were all discarded stays in the heap until it is due, or until there are more such times than others.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Any

# Below this many times the heap isn't worth rebuilding.
MIN_TIMES = 1024

_NOBODY: Any = object()


class _Several(dict[Any, None]):
    """Keys, in the order in which they were added. No key is of this class."""

    __slots__ = ()


class Calendar:
    """Times and keys, each pair once."""

    def __init__(self) -> None:
        self._keys: dict[int, Any] = {}  # by time: the key, or `_Several`
        self._times: list[int] = []  # a heap of these times, and of times that have no keys any more

    def __len__(self) -> int:
        """Count the pairs."""
        return sum(len(held) if type(held) is _Several else 1 for held in self._keys.values())

    def add(self, at_ms: int, key: Any) -> None:
        """Add a pair that isn't in the calendar."""
        held = self._keys.get(at_ms, _NOBODY)
        if type(held) is _Several:
            held[key] = None
        elif held is _NOBODY:
            self._keys[at_ms] = key
            heappush(self._times, at_ms)
        else:
            self._keys[at_ms] = _Several({held: None, key: None})

    def discard(self, at_ms: int, key: Any) -> None:
        held = self._keys.get(at_ms, _NOBODY)
        if type(held) is _Several:
            held.pop(key, None)
            if held:
                return
        elif held is not key and held != key:  # NaN is a key, and not equal to itself
            return
        del self._keys[at_ms]
        if len(self._times) > max(MIN_TIMES, 2 * len(self._keys)):
            self._times = list(self._keys)
            heapify(self._times)

    def due(self, now_ms: int) -> Iterator[tuple[int, Any]]:
        """Remove and yield what is due, in order of time, including pairs that are added meanwhile. A pair that is discarded
        meanwhile may still be yielded."""
        while self._times and self._times[0] <= now_ms:
            at_ms = heappop(self._times)
            held = self._keys.pop(at_ms, _NOBODY)
            if type(held) is _Several:
                for key in held:
                    yield from self.due(at_ms - 1)  # added by the key that was called just now
                    yield at_ms, key
            elif held is not _NOBODY:
                yield at_ms, held

    def first_ms(self) -> int | None:
        """Return the first time; None if there is none."""
        while self._times and self._times[0] not in self._keys:
            heappop(self._times)
        return self._times[0] if self._times else None
