"""The sources of a slot that are in a time group: the shell around protocol/time_groups.py.

Once in each round of the slot's loop it looks how far their event time has come, and reports that if it is due. What the
group has reached is passed to their watermark operators, which hold back the source (dataflow/operators/source.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from tidegate.control.messages import Message, TimeReached
from tidegate.dataflow.operators.source import WatermarkOperator
from tidegate.protocol.time_groups import Least, Reached, TimeReports
from tidegate.slot.subtask import SourceSubtask, Subtask


@dataclass(slots=True)
class Member:
    """A source's subtask. `since_ms`: since when it has waited for the present least of its group. `known_ms`: when it
    reports at the latest."""

    subtask: SourceSubtask
    operator: WatermarkOperator
    group: str
    name: str
    least: Least = field(default_factory=lambda: Least(None))
    looked_ms: int | None = None  # when it was seen to wait
    since_ms: int | None = None
    known_ms: int | None = None

    def look(self, now_ms: int) -> Reached | None:
        """Return how far it has come; None if its first record may still come."""
        at_ms, waits = self.operator.reached_ms(), self.operator.waits
        self.subtask.counters.waited_ms += 0 if self.looked_ms is None else now_ms - self.looked_ms
        self.looked_ms = now_ms if waits else None
        self.since_ms = (now_ms if self.since_ms is None else self.since_ms) if waits else None
        if at_ms is not None or self.operator.is_over:
            self.known_ms = now_ms
        elif self.known_ms is None:
            self.known_ms = now_ms + self.operator.first_record_ms
        return Reached(at_ms, waits, self.name) if now_ms >= self.known_ms else None

    def on_least(self, least: Least) -> None:
        if least != self.least:
            self.least, self.since_ms = least, None
        self.operator.on_least(least.at_ms)


class TimeGroupMembers:
    """All of one slot."""

    def __init__(self, slot: int, subtasks: Iterable[Subtask], tell: Callable[[Message], None], *, repeat_ms: int) -> None:
        self._slot = slot
        self._tell = tell
        self._members = [
            Member(subtask, operator, operator.group, f"{subtask.vertex.first.name}[{slot}]")
            for subtask in subtasks
            if isinstance(subtask, SourceSubtask)
            for operator in subtask.operators
            if isinstance(operator, WatermarkOperator) and operator.group is not None
        ]
        shortest: dict[str, int] = {}
        for each in self._members:
            shortest[each.group] = min(each.operator.max_ahead_ms, shortest.get(each.group, each.operator.max_ahead_ms))
        self._reports = TimeReports(shortest, repeat_ms=repeat_ms)

    def step(self, now_ms: int) -> None:
        """Report what is due."""
        if not self._members:
            return
        reached: dict[str, Reached | None] = {}
        for each in self._members:
            at = each.look(now_ms)
            reached[each.group] = _both(reached[each.group], at) if each.group in reached else at
        known = {group: at for group, at in reached.items() if at is not None}
        if self._reports.on_reached(known, now_ms):
            self._tell(TimeReached(self._slot, known))

    def on_least(self, least: Mapping[str, Least]) -> None:
        for each in self._members:
            if each.group in least:
                each.on_least(least[each.group])

    def stuck(self, now_ms: int) -> Iterable[tuple[Member, int]]:
        """Yield the members that wait, and for how long the event time that each of them waits for hasn't moved."""
        for each in self._members:
            if each.since_ms is not None:
                yield each, now_ms - each.since_ms


def _both(one: Reached | None, other: Reached | None) -> Reached | None:
    """Return the least of two members; None if one of them isn't known yet."""
    if one is None or other is None:
        return None
    behind, ahead = (
        (one, other) if other.at_ms is None or (one.at_ms is not None and one.at_ms <= other.at_ms) else (other, one)
    )
    return Reached(behind.at_ms, behind.waits or ahead.waits, behind.who)
