"""Iteration: find out when a loop has ended, without a time-out.

Theory of operation
-------------------
(Carbone et al. 2017 snapshot loops but leave open when they end; this is a termination detection on FIFO channels.) A
loop has ended when its input has ended and no record of it is in flight or can still be made. No subtask sees that alone,
so a control element, the *lap*, goes round behind the records repeatedly. It travels on the channels inside the loop,
including the feedback of inner loops, but not on channels from outside. Laps are numbered and carry one bit.

- A head of the loop (`LapOrigin`), once its regular inputs have ended, sends lap 1, and lap n+1 when lap n returns.
- Another subtask of the loop (`LapRelay`) forwards lap n when it came on all its regular channels inside. If it is the
  head of an inner loop it also waits until lap n-1 has returned over its own feedback channel; lap n can't have.

So what was sent on a channel before lap n is pushed out of it before lap n is forwarded, or lap n+1 where the channel
is feedback. Laps from 2 on come in turns of `depth + 1`, where `depth` counts nested loops (1: none inside).
The first of a turn, lap m, *asks*: its bit is true if a subtask has been *stirred* since it forwarded lap m-1: records
came over its own feedback channel, or an outside channel had not ended when it forwarded lap m-1, or it made records of
its own accord (a timer of processing time). The others *tell*: they carry the bit on, over feedback channels too. If the
bit is false at the last lap of the turn, the loop is quiet, for all heads alike.

A loop ends when it is quiet for the second time. When it is quiet for the first time, the heads pass on the end of event
time, which they have held back until then: operators behind the loop must not take windows for complete while records may
still leave it. This may fire timers in the loop, whose records go round; so the next turn counts as stirred, and laps
continue.

Why this is right. Suppose no bit was true. Let e be the first record that any subtask x of the loop sent after its own
lap m-1. It was caused by a record r that x took after it had forwarded lap m-1:

- from outside: that channel had not ended, x was stirred;
- over a regular channel inside: x had taken lap m-1 from it, so r was sent after the sender's lap m-1, before e;
- over a feedback channel, before x sent lap m: x was stirred. After that: lap m-1 had returned, so r was sent after
  the sender's lap m-1, before e.

Each is a contradiction, so nothing was sent after laps m-1, and everything before them has been pushed out: nothing is
in flight, and since the input has ended nothing will be.

Why it takes laps that tell. A branch of the body may lead to one tail only (edges join all subtasks of two vertices, or
equal ones), so lap m may bring one head another bit than the rest, and the other heads would wait in vain for a head
that ended alone. A tail is reached from all heads or from its own only (then these are separate loops), so one more lap
brings the bit of any head to all of them. A bit set on a branch that leads only to the tail of an inner loop first has to
pass that loop's feedback: one lap for each level. So after `depth` laps that tell, all heads know the same bit.

It does end: when no record is left and all outside channels have ended, nobody is stirred in the turn after.

Laps are not part of a snapshot: after a restore the heads begin with lap 1. A subtask must not make records of its own
accord once the input has ended and a turn has asked, since laps can't count records that don't exist yet. Not here: which
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
    """No record is in the loop. Pass on the end of event time, then send this lap."""

    lap: SendLap


@dataclass(frozen=True, slots=True)
class LoopEnded:
    """No record is in the loop, and none will be."""


def _asks(number: int, depth: int) -> bool:
    """Return whether this lap is the first of its turn. Lap 1 belongs to none: lap 2 counts from it."""
    return number > 1 and (number - 2) % (depth + 1) == 0


def _decides(number: int, depth: int) -> bool:
    """Return whether this lap is the last of its turn."""
    return _asks(number + 1, depth) and number > 1


class LapOrigin:
    """The laps of a loop at one of its heads."""

    def __init__(self, *, depth: int = 1) -> None:
        assert depth >= 1
        self._depth = depth
        self._sent = 0  # the newest lap; 0: the regular inputs have not ended
        self._stirred = False  # since it was sent
        self._was_quiet = False
        self.ended = False

    def on_input_ended(self) -> SendLap:
        """All regular inputs have ended."""
        assert self._sent == 0, "the input ends once"
        return self._send(active=True)

    def on_feedback_records(self) -> None:
        assert not self.ended, f"records came back after lap {self._sent} had found none"
        self._stirred = True

    def on_lap(self, number: int, active: bool) -> SendLap | LoopQuiet | LoopEnded:
        """A lap came over the feedback channel."""
        assert not self.ended and number == self._sent, f"lap {number} returned, lap {self._sent} was sent last"
        if _decides(number, self._depth) and not active:
            if self._was_quiet:
                self.ended = True
                return LoopEnded()
            self._was_quiet = True
            return LoopQuiet(self._send(active=True))
        return self._send(active=self._stirred if _asks(number + 1, self._depth) else active)

    def _send(self, *, active: bool) -> SendLap:
        self._sent += 1
        self._stirred = False
        return SendLap(self._sent, active)


class LapRelay:
    """The laps of a loop at a subtask in it that is not its head.

    `inside` are its regular channels from inside the loop, `feedback` is its own if it is the head of an inner loop;
    `has_outside`: it has channels from outside the loop as well.
    """

    def __init__(
        self, inside: Iterable[ChannelId], *, has_outside: bool, feedback: ChannelId | None = None, depth: int = 1
    ) -> None:
        self._came: dict[ChannelId, deque[bool]] = {channel: deque() for channel in inside}  # and not forwarded
        assert self._came, "a subtask in a loop has a channel from inside"
        assert feedback not in self._came, "feedback is not a regular channel"
        assert depth > 1 or feedback is None, "with a loop inside the depth is at least 2"
        self._feedback = feedback
        self._returned: deque[bool] = deque()
        self._depth = depth
        self._outside_open = has_outside
        self._forwarded = 0
        self._stirred = False  # since that lap was forwarded, or known in advance

    def on_outside_ended(self) -> None:
        """All channels from outside have ended."""
        self._outside_open = False

    def on_feedback_records(self) -> None:
        """Records came over the feedback channel of the inner loop of which this subtask is the head."""
        assert self._feedback is not None, "only heads have feedback"
        self._stirred = True

    def on_own_records(self) -> None:
        """The subtask made records that were not caused by a record, a watermark or an end."""
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
        # What returned belongs to the previous lap, which is of the same turn unless this one asks.
        bits.append(self._stirred if _asks(number, self._depth) else returned)
        self._forwarded = number
        self._stirred = self._outside_open
        return SendLap(number, any(bits))
