"""Time groups: sources that wait for one another, so that none of them runs far ahead in event time.

Theory of operation
-------------------
(Flink calls this watermark alignment: FLIP-182 and FLIP-217.) An operator that reads two streams keeps the records of the
fast one until the watermark of the slow one has passed them. If one source reads a backlog of a day and the other one is
live, that state is a day of records. So a source whose watermark is more than `max_ahead` ahead of the *least* of its group
stops reading until the group has caught up.

Every slot reports how far its sources of a group have come (`Reached`), the coordinator answers with the least of the whole
group (`Least`). A slot reports at once when it begins to wait, and otherwise when its event time has moved (`TimeReports`);
the coordinator answers each report, and sends every change of the least to the slots that wait (`TimeGroups`).

Invariants:

- A source reads only while it isn't ahead: `at <= least + max_ahead`. The least of a group rises as long as no source joins
  that is further behind, so a `Least` that comes late is too low, and makes a source wait longer than it has to.
- Nobody waits forever for a message. A slot that waits is sent every change, and repeats its report until it gets an answer,
  so a lost message costs one repetition.
- Nobody waits forever for one another: the source that is at the least is never ahead, since `max_ahead >= 0`.
- Until all slots of the group have reported, the least is unknown. A source may then read until it has a watermark.
- Whoever has nothing to wait for reports None and is left out: a source that has ended, is idle, or has had no record for
  `FIRST_RECORD_MS`. Until then it doesn't report, since its first records may be under way. A watermark that was restored
  counts from the beginning.

Both machines live as long as an attempt. Not here: what a source does while it waits (dataflow/operators/source.py), and
which splits count (`SplitWatermarks.reached_ms`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# How long the others wait for the first record of a source, unless its idle_after is given.
FIRST_RECORD_MS = 2_000

# A report that isn't urgent: because time has passed, or because event time has moved by a share of `max_ahead`.
REPORT_EVERY_MS = 100
URGENT_EVERY_MS = 5
SHARE_OF_MAX_AHEAD = 4


@dataclass(frozen=True, slots=True)
class Reached:
    """How far event time has come in one slot, for one group: the least of its sources, which is that of `who`. `at_ms` is
    None if nobody needs to wait for the slot. `waits`: one of its sources waits for the group."""

    at_ms: int | None
    waits: bool = False
    who: str = ""


@dataclass(frozen=True, slots=True)
class Least:
    """The least of a whole group, which is that of `who`. `at_ms` is None if there is nobody to wait for."""

    at_ms: int | None
    who: str = ""


@dataclass(frozen=True, slots=True)
class SendLeast:
    """Send the least of these groups to a slot."""

    slot: int
    least: Mapping[str, Least]


class TimeGroups:
    """The coordinator's side. `slots` names for each group the slots that have sources of it."""

    def __init__(self, slots: Mapping[str, Iterable[int]]) -> None:
        self._reached: dict[str, dict[int, Reached | None]] = {group: dict.fromkeys(each) for group, each in slots.items()}
        self._least: dict[str, Least] = {}  # of the groups of which all slots have reported

    def on_reached(self, slot: int, reached: Mapping[str, Reached]) -> list[SendLeast]:
        """Take a report. Answer it, and send what has changed to the slots that wait for it."""
        messages: dict[int, dict[str, Least]] = {}
        for group, at in reached.items():
            slots = self._reached[group]
            assert slot in slots, f"slot {slot} has no source of group {group!r}"
            slots[slot] = at
            least = self._least_of(slots)
            if least is None:
                continue
            has_changed = least != self._least.get(group)
            self._least[group] = least
            for other, theirs in slots.items():
                if other == slot or (has_changed and theirs is not None and theirs.waits):
                    messages.setdefault(other, {})[group] = least
        return [SendLeast(other, least) for other, least in messages.items()]

    @staticmethod
    def _least_of(slots: Mapping[int, Reached | None]) -> Least | None:
        """Return None if a slot hasn't reported yet."""
        least = Least(None)
        for reached in slots.values():
            if reached is None:
                return None
            if reached.at_ms is not None and (least.at_ms is None or reached.at_ms < least.at_ms):
                least = Least(reached.at_ms, reached.who)
        return least


class TimeReports:
    """A slot's side: decides when to report. `max_ahead_ms` is the shortest of each group. A report is repeated every
    `repeat_ms`."""

    def __init__(self, max_ahead_ms: Mapping[str, int], *, repeat_ms: int) -> None:
        self._step_ms = {group: each // SHARE_OF_MAX_AHEAD for group, each in max_ahead_ms.items()}
        self._repeat_ms = repeat_ms
        self._sent: Mapping[str, Reached] = {}
        self._sent_ms = 0

    def on_reached(self, reached: Mapping[str, Reached], now_ms: int) -> bool:
        """Return whether to send this now. `reached` has the groups of which all of the slot's sources are known."""
        if not reached:
            return False
        since_ms = now_ms - self._sent_ms
        send = since_ms >= self._repeat_ms or any(self._is_due(group, at, since_ms) for group, at in reached.items())
        if send:
            self._sent, self._sent_ms = dict(reached), now_ms
        return send

    def _is_due(self, group: str, now: Reached, since_ms: int) -> bool:
        before = self._sent.get(group)
        if before is None or (now.waits and not before.waits) or (now.at_ms is None) != (before.at_ms is None):
            return True
        if now.at_ms is None or before.at_ms is None or now.at_ms == before.at_ms:
            return False
        moved_ms = abs(now.at_ms - before.at_ms)
        return since_ms >= REPORT_EVERY_MS or (since_ms >= URGENT_EVERY_MS and moved_ms >= self._step_ms[group])
