"""How time moves in a micro-batch of a plan with loops: before the marker, so that what timers put into a loop is of it.

Without loops time moves with the marker: each operator moves it in `before_snapshot`, and what its timers emit travels
ahead of the marker. The head of a loop passes the marker on when its other inputs are marked, so a record that a timer puts
into the loop would come back behind the marker. Hence

    all input is read ─► nothing is under way ─► a watermark operator moves time ─► nothing is under way ─► the next one …
    ─► timers that are due fire ─► nothing is under way ─► … until they put nothing on a channel any more ─► marker

Invariants:
- Watermark operators move time one after the other, in the order of the plan, once in each micro-batch. So one below a loop
  has seen the records that left the loop, and a loop whose timers set timers for later comes to rest.
- A watermark operator in a loop first holds, in all subtasks, what it will move time to. Records that its own time sends
  round the loop move time in the next micro-batch, whichever subtask they come to.
- At the marker no timer is due. What acts when an epoch ends acts once, at the marker.

Not here: how it is found out that nothing is under way (micro_batches.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from tidegate.control.messages import MoveTime, Traffic
from tidegate.dataflow.plan import Plan

FIRE_DUE = MoveTime()


class Slots(Protocol):
    """All slots of a run."""

    def move_time(self, order: MoveTime) -> None: ...


class Stillness(Protocol):
    """Whether nothing is under way between them."""

    @property
    def counted(self) -> Traffic | None: ...

    def look(self) -> bool: ...

    def look_again(self) -> None: ...


class Rest:
    """Whether a micro-batch is at rest: nothing is under way, time has moved, and no timer is due."""

    def __init__(self, slots: Slots, stillness: Stillness, moves: Iterable[MoveTime]) -> None:
        self._slots = slots
        self._stillness = stillness
        self._moves = list(moves)
        self._fired_at: Traffic | None = None  # what had been counted when timers that were due fired last

    def look(self) -> bool:
        """To be called again until it says so."""
        if not self._stillness.look():
            return False
        counted = self._stillness.counted
        if counted == self._fired_at:
            return True
        if self._moves:
            self._slots.move_time(self._moves.pop(0))
        else:
            self._fired_at = counted
            self._slots.move_time(FIRE_DUE)
        self._stillness.look_again()
        return False


def moves_of_time(plan: Plan) -> tuple[MoveTime, ...]:
    """The orders to the watermark operators of a plan with loops, in the order in which they are given."""
    return tuple(_moves(plan))


def _moves(plan: Plan) -> Iterator[MoveTime]:
    for vertex in plan.vertices:
        for node in vertex.nodes:
            if node.assigns_time:
                if plan.loops_of(vertex.id):
                    yield MoveTime(node.name, hold=True)
                yield MoveTime(node.name)
