"""The laps that a subtask in loops sends, passes on and counts, so that every loop ends when it is empty.

protocol/iteration.py decides when. This module decides on which channels, and makes a pause between two laps of a loop that
waits for something else to end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tidegate.channels.elements import Held, Lap
from tidegate.dataflow.plan import Plan, Vertex
from tidegate.protocol.ids import ChannelId
from tidegate.protocol.iteration import LapOrigin, LapRelay, LoopEnded, LoopQuiet, SendLap
from tidegate.slot.exchange import EdgeWriter

LAP_PAUSE_MS = 5


class Laps:
    """The laps of one subtask. `loop` and `origin` are those of the loop that it is the head of, if any; `outside` has its
    channels from outside each loop."""

    def __init__(
        self,
        *,
        loop: int | None,
        origin: LapOrigin | None,
        relays: Mapping[int, LapRelay],
        outside: Mapping[int, frozenset[ChannelId]],
        regular: frozenset[ChannelId],
    ) -> None:
        self._loop = loop
        self._origin = origin
        self._relays = relays
        self._open = {each: set(channels) for each, channels in outside.items()}
        self._regular = set(regular)
        self._next: tuple[int, SendLap] | None = None  # the next lap, and when it is due

    @classmethod
    def of(cls, plan: Plan, vertex: Vertex, index: int) -> Laps | None:
        """Return the laps of a subtask, or None if its vertex isn't in a loop."""
        loops = plan.loops_of(vertex.id)
        if not loops:
            return None
        own = next((loop for loop in loops if loop.head_vertex == vertex.id), None)
        inputs = [(edge, channel) for edge in plan.inputs_of(vertex) for channel in plan.origins(edge, index)]
        feedback = next((channel for edge, channel in inputs if edge.feedback), None)
        relays, outside = {}, {}
        for loop in loops:
            if loop is not own:
                inside = frozenset(channel for edge, channel in inputs if plan.edge_inside(loop, edge) and not edge.feedback)
                outside[loop.id] = frozenset(channel for edge, channel in inputs if not plan.edge_inside(loop, edge))
                relays[loop.id] = LapRelay(
                    inside, has_outside=bool(outside[loop.id]), feedback=feedback, depth=plan.depth_of(loop)
                )
        return cls(
            loop=None if own is None else own.id,
            origin=None if own is None else LapOrigin(depth=plan.depth_of(own)),
            relays=relays,
            outside=outside,
            regular=frozenset(channel for edge, channel in inputs if not edge.feedback),
        )

    @property
    def is_head(self) -> bool:
        return self._origin is not None

    @property
    def holds_time(self) -> bool:
        """Whether the end of event time waits here until the loop is quiet. In an inner loop it doesn't wait: it comes from
        the head of the outer loop, when everything is quiet."""
        return self._origin is not None and not self._relays

    @property
    def ended(self) -> bool:
        """Whether the loop that this subtask is the head of has ended."""
        return self._origin is not None and self._origin.ended

    @property
    def due_ms(self) -> int | None:
        return None if self._next is None else self._next[0]

    def send_due(self, now_ms: int, writers: Iterable[EdgeWriter]) -> bool:
        if self._next is None or now_ms < self._next[0]:
            return False
        assert self._loop is not None
        _send(self._loop, self._next[1], writers)
        self._next = None
        return True

    def hold_time(self, writers: Iterable[EdgeWriter], loop: int | None = None) -> None:
        """Send downstream that event time is held in `loop`, or in this subtask's own loop if that is None."""
        loop = self._loop if loop is None else loop
        assert loop is not None
        for writer in writers:
            writer.send(Held(loop))

    def inside(self, loop: int) -> bool:
        """Return whether this subtask is in that loop."""
        return loop == self._loop or loop in self._relays

    def on_feedback_records(self) -> None:
        if self._origin is not None:
            self._origin.on_feedback_records()
        for relay in self._relays.values():
            relay.on_feedback_records()

    def on_own_records(self) -> None:
        """A timer of processing time has made records, which no lap could count on its way here."""
        if self._origin is not None and not self._origin.ended:
            self._origin.on_feedback_records()
        for relay in self._relays.values():
            relay.on_own_records()

    def on_end(self, channel: ChannelId, writers: Iterable[EdgeWriter]) -> None:
        """No record follows on this channel, which isn't a feedback channel."""
        for loop, still_open in self._open.items():
            if channel in still_open:
                still_open.remove(channel)
                if not still_open:
                    self._relays[loop].on_outside_ended()
        self._regular.remove(channel)
        if self._origin is not None and self._loop is not None and not self._regular:
            _send(self._loop, self._origin.on_input_ended(), writers)

    def on_lap(
        self, channel: ChannelId, lap: Lap, now_ms: int, writers: Iterable[EdgeWriter]
    ) -> LoopQuiet | LoopEnded | None:
        """Return whether the subtask's own loop has become quiet or has ended. If it hasn't ended, the next lap is sent
        later."""
        if lap.loop != self._loop:
            passed_on = self._relays[lap.loop].on_lap(channel, lap.number, lap.active)
            if passed_on is not None:
                _send(lap.loop, passed_on, writers)
            return None
        assert self._origin is not None
        outcome = self._origin.on_lap(lap.number, lap.active)
        if not isinstance(outcome, LoopEnded):
            self._next = now_ms + LAP_PAUSE_MS, outcome.lap if isinstance(outcome, LoopQuiet) else outcome
        return None if isinstance(outcome, SendLap) else outcome


def _send(loop: int, lap: SendLap, writers: Iterable[EdgeWriter]) -> None:
    for writer in writers:
        if loop in writer.loops:
            writer.send(Lap(loop, lap.number, lap.active))
