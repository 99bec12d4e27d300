"""The time that one step of a subtask may take, and how often operators look at the clock.

A slot is one thread. During a step it sends no heartbeat, answers no message and serves no other subtask. So a step has a
budget, which all operators of the chain share. When the budget is spent, an operator keeps the rest of its work for the next
step.

Looking at the clock costs as much as a tenth of a record. So `Pace` looks at it only after some records: after one at first,
and then after more and more, as long as the budget isn't spent.
"""

from __future__ import annotations

from collections.abc import Callable

STEP_MS = 100
MOST_BETWEEN_LOOKS = 256
# A step ends when it has this many rows of output, however fast: they take memory, and an output may be full.
MOST_ROWS = 65_536


class Budget:
    """The time of one step. Without a clock, only `end` spends it."""

    __slots__ = ("_clock_ms", "_is_over", "_until_ms", "most_between_looks")

    def __init__(self, clock_ms: Callable[[], int] | None = None, *, most_between_looks: int = MOST_BETWEEN_LOOKS) -> None:
        self.most_between_looks = most_between_looks
        self._clock_ms = clock_ms
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._is_over = False
        if self._clock_ms is not None:
            self._until_ms = self._clock_ms() + STEP_MS

    def end(self) -> None:
        """End the step, however long it took."""
        self._is_over = True

    @property
    def is_spent(self) -> bool:
        if not self._is_over and self._clock_ms is not None:
            self._is_over = self._clock_ms() >= self._until_ms
        return self._is_over


class Pace:
    """How many calls of a function to make between two looks at the clock: `portion`."""

    __slots__ = ("_budget", "portion")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.portion = 1

    def is_over(self) -> bool:
        """Return whether the budget is spent. Called after every portion."""
        if self._budget.is_spent:
            self.portion = max(1, self.portion // 8)
            return True
        if self.portion < self._budget.most_between_looks:
            self.portion = min(2 * self.portion, self._budget.most_between_looks)
        return False
