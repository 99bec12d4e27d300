"""Compares what a simulated job committed with what it must have committed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from tidegate.testing.simulation.site import Row


def expect_rows(what: str, got: Iterable[Any], expected: Iterable[Any], *, exact: bool = True) -> None:
    """As multisets. Where not `exact`, there may be more than expected."""
    found, wanted = Counter(got), Counter(expected)
    lost, surplus = wanted - found, found - wanted if exact else Counter()
    assert not lost and not surplus, (
        f"{what}: {lost.total()} lost ({_some(lost)}), {surplus.total()} too many ({_some(surplus)}), of {wanted.total()}"
    )


def expect_order(what: str, rows: Iterable[Row], expected: Iterable[Row], key: Callable[[Row], Any]) -> None:
    """The rows of each key, in order."""
    found, wanted = _by_key(rows, key), _by_key(expected, key)
    wrong = [each for each in wanted if found.get(each) != wanted[each]]
    assert not wrong, f"{what}: key {wrong[0]!r} has {found.get(wrong[0])}, not {wanted[wrong[0]]}"


def _by_key(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    grouped: defaultdict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        grouped[key(row)].append(row)
    return grouped


def _some(counter: Counter[Any]) -> str:
    return ", ".join(map(str, list(counter)[:6]))
