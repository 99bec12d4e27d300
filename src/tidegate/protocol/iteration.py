"""Iteration: when a loop has ended, counted and not guessed by a time-out.

Theory of operation
-------------------
(Carbone et al. 2017 snapshot loops but leave open when they end; this is a termination detection on FIFO channels.) A
loop has ended when its input has ended and no record of it is in flight or can come to be. Nobody sees that alone, so
a control element, the *lap*, goes round behind the records, again and again, and asks. It travels on the channels
inside the loop, also over the feedback of loops within it; not on those from outside. Laps are numbered and carry one
bit.

- A head of the loop (`LapOrigin`), once its regular inputs have ended, sends lap 1, and lap n+1 when lap n returns.
- Another subtask of the loop (`LapRelay`) forwards lap n when it came on all its regular channels inside. If it is the
  head of an inner loop it also waits until lap n-1 has returned over its own feedback channel, for lap n can't have.

So what was sent on a channel before lap n is pushed out of it before lap n is forwarded, or lap n+1 where the channel
is feedback. Laps from 2 on come in turns of `depth + 1`, where `depth` counts the loops within one another (1: no other
inside). The first of a turn, lap m, *asks*: its bit is true where a subtask has been *stirred* since it forwarded
lap m-1: records came over its own feedback channel, or an outside channel had not ended when it forwarded lap m-1, or
it made records of its own accord (a timer of processing time). The others *tell*: they carry the bit on, over feedback
channels too. If at the last of the turn the bit is false the loop is quiet, for all heads alike.

A loop ends when it is quiet for the second time. At the first the heads pass the end of event time on, which they have
held back until then: what is behind the loop must not take its windows for complete while records may still leave it.
Timers may fire of it, in the loop, and their records go round; so the next turn counts as stirred, and laps go on.

Why this is right. Suppose no bit was true. Let e be the first record that any subtask x of the loop sent after its own
lap m-1. It was caused by a record r that x took after it had forwarded lap m-1:

- from outside: that channel had not ended, x was stirred;
- over a regular channel inside: x had taken lap m-1 from it, so r was sent after the sender's lap m-1, before e;
- over a feedback channel, before x sent lap m: x was stirred. After that: lap m-1 had returned, so r was sent after
  the sender's lap m-1, before e.

Each is a contradiction, so nothing was sent after laps m-1, and everything before them has been pushed out: nothing is
in flight, and since the input has ended nothing will be.

Why it takes laps that tell. A branch of the body may lead to one tail only (edges join all subtasks of two vertices, or
equal ones), so lap m may bring one head another bit than the rest, and a head that ended alone would be waited for in
vain. A tail is reached from all heads or from its own only (then these are loops apart), so one more lap brings what
any head was told to all. A bit set on a branch that leads only to the tail of an inner loop first has to get over that
loop's feedback: one lap for each level. So all heads know after `depth` laps that tell, and know the same.

It does end: when no record is left and all outside channels have ended, nobody is stirred in the turn after.

Laps are no part of a snapshot: after a restore the heads begin with lap 1. Records of one's own accord are no longer
to be made when the input has ended and a turn has asked; laps can't tell of what does not exist yet. Not here: which
channels are inside (dataflow/plan.py), sending, and the End that heads forward at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from tidegate.protocol.ids import ChannelId


@dataclass(frozen=True, slots=True)
class SendLap:
    """Send this lap on every output channel inside the loop, behind all records made so far."""

    number: int
    active: bool


@dataclass(frozen=True, slots=True)
class LoopQuiet:
    """No record is on the loop. Pass the end of event time on, then send this lap."""

    lap: SendLap


@dataclass(frozen=True, slots=True)
class LoopEnded:
    """No record is on the loop, nor will be."""


def _asks(number: int, depth: int) -> bool:
    """Whether this lap is the first of its turn. Lap 1 belongs to none: it is what lap 2 counts from."""
    return number > 1 and (number - 2) % (depth + 1) == 0


def _decides(number: int, depth: int) -> bool:
    """Whether this lap is the last of its turn."""
    return _asks(number + 1, depth) and number > 1


class LapOrigin:
    """The laps of a loop at one of its heads."""

    def __init__(self, *, depth: int = 1) -> None:
        assert depth >= 1
        self._depth = depth
        self._sent = 0  # the newest lap, under way; 0: the regular inputs have not ended
        self._stirred = False  # since it was sent
        self._was_quiet = False
        self._ended = False

    @property
    def ended(self) -> bool:
        return self._ended

    def on_input_ended(self) -> SendLap:
        """All regular inputs have ended."""
        assert self._sent == 0, "the input ends once"
        return self._send(active=True)

    def on_feedback_records(self) -> None:
        assert not self._ended, f"records came back after lap {self._sent} had said that there were none"
        self._stirred = True

    def on_lap(self, number: int, active: bool) -> SendLap | LoopQuiet | LoopEnded:
        """It came over the feedback channel."""
        assert not self._ended and number == self._sent, f"lap {number} returned, lap {self._sent} was sent last"
        if _decides(number, self._depth) and not active:
            if self._was_quiet:
                self._ended = True
                return LoopEnded()
            self._was_quiet = True
            return LoopQuiet(self._send(active=True))
        return self._send(active=self._stirred if _asks(number + 1, self._depth) else active)

    def _send(self, *, active: bool) -> SendLap:
        self._sent += 1
        self._stirred = False
        return SendLap(self._sent, active)


class LapRelay:
    """The laps of a loop at a subtask inside it that is no head of it.

    `inside` are its regular channels from inside the loop, `feedback` is its own if it is the head of an inner loop;
    `has_outside`: it has channels from outside the loop as well.
    """

    def __init__(
        self, inside: Iterable[ChannelId], *, has_outside: bool, feedback: ChannelId | None = None, depth: int = 1
    ) -> None:
        self._came: dict[ChannelId, deque[bool]] = {channel: deque() for channel in inside}  # and not forwarded
        assert self._came, "inside a loop is what has a channel from inside"
        assert feedback not in self._came, "feedback is no regular channel"
        assert depth > 1 or feedback is None, "with a loop inside the depth is at least 2"
        self._feedback = feedback
        self._returned: deque[bool] = deque()
        self._depth = depth
        self._outside_open = has_outside
        self._forwarded = 0
        self._stirred = False  # since that lap was forwarded, or bound to be

    def on_outside_ended(self) -> None:
        """All channels from outside have ended."""
        self._outside_open = False

    def on_feedback_records(self) -> None:
        """Records came over the feedback channel of the inner loop whose head this is."""
        assert self._feedback is not None, "only heads have feedback"
        self._stirred = True

    def on_own_records(self) -> None:
        """The subtask made records that no record, watermark or end that it took was the cause of."""
        self._stirred = True

    def on_lap(self, channel: ChannelId, number: int, active: bool) -> SendLap | None:
        queue = self._returned if channel == self._feedback else self._came[channel]
        # What waits on a regular channel is the next lap and those behind it; on feedback, the one before the next.
        expected = self._forwarded + len(queue) + (0 if channel == self._feedback and self._forwarded else 1)
        assert number == expected, f"lap {number} came on {channel}, lap {expected} was due"
        queue.append(active)
        return self._forward_if_complete()

    def _forward_if_complete(self) -> SendLap | None:
        number = self._forwarded + 1
        waits_for_feedback = self._feedback is not None and number > 1
        if not all(self._came.values()) or (waits_for_feedback and not self._returned):
            return None
        bits = [queue.popleft() for queue in self._came.values()]
        returned = self._returned.popleft() if waits_for_feedback else False
        # What returned belongs to the lap before: of the same turn, unless this one asks anew.
        bits.append(self._stirred if _asks(number, self._depth) else returned)
        self._forwarded = number
        self._stirred = self._outside_open
        return SendLap(number, any(bits))
