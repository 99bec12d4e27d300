"""When a micro-batch of a plan with loops is at rest, and how time moves in it: before the marker, so that what timers put
into a loop is of the batch.

Without loops time moves with the marker: each operator moves it in `before_snapshot`, and what its timers emit travels
ahead of the marker. The head of a loop passes the marker on when its other inputs are marked, so a record that a timer puts
into the loop would come back behind the marker. Hence

    all input is read ─► nothing is under way ─► a watermark operator moves time ─► nothing is under way ─► the next one …
    ─► timers that are due fire ─► nothing is under way ─► … until they put nothing on a channel any more ─► marker

Whether anything is under way is found out by counting. Slots count what they put on channels and what they take from them,
and are asked for the counts in turns. The answers of one turn are of different moments: a slot may have taken what its
sender hadn't counted when it answered. Two turns in which the sums were the same, and as much taken as sent, can't both be
wrong (Mattern 1987, four counters).

Invariants:
- Watermark operators move time one after the other, in the order of the plan, once in each micro-batch. So one below a loop
  has seen the records that left the loop, and a loop whose timers set timers for later comes to rest.
- A watermark operator in a loop first holds, in all subtasks, what it will move time to. Records that its own time sends
  round the loop move time in the next micro-batch, whichever subtask they come to.
- At the marker no timer is due. What acts when an epoch ends acts once, at the marker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from tidegate.control.messages import Counted, Message, MoveTime, Probe, Traffic
from tidegate.dataflow.plan import Plan

FIRE_DUE = MoveTime()
LOOK_PAUSE_MS = 2  # slots that are busy with a loop have better things to do than to answer


class Rest:
    """Whether a micro-batch is at rest: nothing is under way, time has moved, and no timer is due. `tell_all` sends a
    message to all slots, whose answers go to `on_counted`. The input of all slots is read."""

    def __init__(self, slot_count: int, moves: Iterable[MoveTime], tell_all: Callable[[Message], None]) -> None:
        self._slot_count = slot_count
        self._moves = list(moves)
        self._tell_all = tell_all
        self._turn = 0
        self._answers: dict[int, Traffic] = {}  # of this turn
        self._before: Traffic | None = None  # the sum of the turn before
        self._fired_at: Traffic | None = None  # the sum when timers that were due fired last
        self._look_again_ms: int | None = None
        self._ask()

    def on_counted(self, slot: int, counted: Counted, now_ms: int) -> bool:
        """Take a slot's answer. Return whether the batch is at rest."""
        if counted.number == self._turn:
            self._answers[slot] = Traffic(counted.sent, counted.taken, counted.replays)
            if len(self._answers) == self._slot_count:
                return self._look(now_ms)
        return False

    def tick(self, now_ms: int) -> None:
        if self._look_again_ms is not None and now_ms >= self._look_again_ms:
            self._ask()

    def _look(self, now_ms: int) -> bool:
        before, self._before = self._before, sum(self._answers.values(), Traffic())
        if self._before.sent != self._before.taken or self._before.replays:
            self._look_again_ms = now_ms + LOOK_PAUSE_MS
            return False
        if self._before == before:
            if before == self._fired_at:
                return True
            if not self._moves:
                self._fired_at = before
            self._tell_all(self._moves.pop(0) if self._moves else FIRE_DUE)
        self._ask()
        return False

    def _ask(self) -> None:
        self._turn, self._answers, self._look_again_ms = self._turn + 1, {}, None
        self._tell_all(Probe(self._turn))


def moves_of_time(plan: Plan) -> Iterator[MoveTime]:
    """Yield the orders to the watermark operators of a plan with loops, in the order in which they are given."""
    for vertex in plan.vertices:
        for node in vertex.nodes:
            if node.assigns_time:
                if plan.loops_of(vertex.id):
                    yield MoveTime(node.name, hold=True)
                yield MoveTime(node.name)
