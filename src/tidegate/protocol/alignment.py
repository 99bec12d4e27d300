"""Alignment: when a subtask takes its part of a snapshot, and which records in flight belong to it.

Theory of operation (Carbone et al. 2017, §3.2 and §3.3: "Pipelined Consistent Snapshots", "Snapshot Alignment")
---------------------------------------------------------------------------------------------------------------
Markers cut every channel into epochs. A snapshot of epoch N is consistent if each subtask's part of it accounts, on
every input channel, for all records before marker N and for none after it. The part is the state, frozen at one moment,
and for some channels a *log*: the records before the marker that were not yet processed at that moment. After a
rollback the state is loaded and the logs are processed before anything else. The protocols differ only in when the state
is frozen and which channels have a log:

    protocol                                the state is frozen                    logged
    aligned, acyclic                        when all channels are marked           nothing
    aligned, a loop's head                  when all but feedback are marked       feedback
    unaligned (hurried from the start)      at the first marker                    the others, and what is overtaken
    aligned with time-out (hurried later)   when all are marked, or when hurried   those missing, and what is overtaken
    Chandy-Lamport (`LOGGING`)              at the first marker, in its turn       the others
    at-least-once                           when all but feedback are marked       feedback

*Aligned.* Marker N comes at different moments on different channels:

1. Marker N arrives on a channel: *block* the channel. Its next records belong to epoch N + 1 and have to wait.
2. It arrived on the last channel: every record of epoch N has been processed and none of a later one. *Take the
   snapshot*, *forward the marker* to all outputs, *unblock* all channels. No record of the epoch is in flight: the
   snapshot is *finished*.

A source has no input channels: the coordinator's trigger stands for "the last marker arrived". So the marker passes
through the graph once, each subtask blocks only the channels that are ahead, and no record in flight has to be stored.

*Cyclic graphs.* The head of a loop (the paper's IterationHead) would wait forever for a marker on its feedback
channel, where the marker comes only after the head has sent it. So the head does not wait for feedback: it freezes when
its other channels are marked. Records that come back before the marker were in flight on the loop: they are logged as
well as processed. Without feedback channels the graph is acyclic, so every subtask gets its markers, and finally they
return to the heads. A marker may return early, before the head has its other markers (if a subtask of the body was
hurried and the head was not): then feedback is blocked like any channel. It is never full, so it holds up no sender.

*Unaligned.* From the moment at which an epoch is *hurried*, nothing is waited for: the state is frozen, the marker is
sent, the blocked channels continue, and channels without the marker are logged until it comes. The shell may also take a
marker out of an input queue ahead of the records before it: the marker has *overtaken* them, and they are logged and later
processed in their turn. So the time that a snapshot takes does not depend on how fast records are processed. Each
subtask may hurry independently: the markers and records that it sends are in the right order in any case.

*Chandy-Lamport* is the protocol that the paper argues against. It is here for benchmarks: freeze at the first marker, log
what the other channels still bring. Full epochs (`full`) are aligned nevertheless, as they are never hurried: the last epoch
of a job would not commit what is processed after the freeze.

*At-least-once* is the paper's relaxed mode: markers are counted, no channel is ever blocked, and the snapshot may also
hold effects of records behind the marker, which are then seen again after a rollback.

The paper assumes FIFO channels that lose nothing and can be blocked; so do we, and markers whose epochs do not grow on
a channel are a bug here.

Aborts, which the paper leaves out
----------------------------------
The coordinator may give up epoch N (time-out, a subtask that couldn't write). The epoch's records are simply taken
to belong to the next epoch that completes. Four things have to be right:

- The notice may overtake markers. `on_abort(N)` releases what was blocked for N, and markers of epochs up to N that
  come late are ignored: no block, no log, nothing forwarded.
- It may come after this subtask has forwarded marker N. Then there is nothing to undo here, only logs to be stopped.
  Downstream, some channels bring marker N and others (whose upstream ignored it) never do; the notice, or the next
  marker, releases them there.
- It may be overtaken by marker N + 1. At most one epoch is active, and it can't have completed without this subtask,
  which acknowledges when it has finished; so a newer marker proves that N was aborted: abandon N and continue with N + 1.
- The state may be frozen when the epoch is given up, with logs still open. What was frozen has to reach the writer,
  since later increments are counted from it. So the snapshot is *finished* all the same, without the rest of its logs,
  and the coordinator, which knows that the epoch is over, discards the acknowledgement.

Invariants: an epoch is snapshotted at most once, in growing order; the marker is forwarded exactly when the snapshot is
taken; each snapshot that is taken is finished, before the next is taken; a channel is blocked at most once per epoch,
and only until the snapshot is taken; it is logged only from there until its marker, or the end of the epoch here.

Not here: what blocking, freezing state, logging or sending means, and when to hurry (runtime), who decides to trigger
and abort (coordinator). End of input needs nothing: markers still flow on a channel that has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from tidegate.protocol.ids import ChannelId

STORY_LENGTH = 32


class AlignmentMode(Enum):
    EXACTLY_ONCE = "exactly-once"  # block marked channels until all are marked, or until hurried
    AT_LEAST_ONCE = "at-least-once"  # never block, count markers
    LOGGING = "logging"  # Chandy and Lamport: never block, log what the other channels still bring


@dataclass(frozen=True, slots=True)
class MarkerArrived:
    channel: ChannelId
    epoch: int
    overtook: bool = False
    full: bool = False


@dataclass(frozen=True, slots=True)
class EpochTriggered:
    epoch: int


@dataclass(frozen=True, slots=True)
class EpochHurried:
    epoch: int


@dataclass(frozen=True, slots=True)
class EpochAborted:
    epoch: int


Event: TypeAlias = MarkerArrived | EpochTriggered | EpochHurried | EpochAborted


@dataclass(frozen=True, slots=True)
class Block:
    """Process nothing more from this channel until it is unblocked."""

    channel: ChannelId


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Freeze the state as it is now. Output made so far belongs to the epoch: flush it before the marker follows."""

    epoch: int


@dataclass(frozen=True, slots=True)
class ForwardMarker:
    """Send the marker on every output channel."""

    epoch: int


@dataclass(frozen=True, slots=True)
class StartLog:
    """From now on, records that are taken from these channels go into the snapshot's log as well as being processed."""

    channels: frozenset[ChannelId]


@dataclass(frozen=True, slots=True)
class LogOvertaken:
    """Append the records that the marker has just overtaken on this channel to its log."""

    channel: ChannelId


@dataclass(frozen=True, slots=True)
class StopLog:
    """End the logs of these channels."""

    channels: frozenset[ChannelId]


@dataclass(frozen=True, slots=True)
class Unblock:
    channels: frozenset[ChannelId]


@dataclass(frozen=True, slots=True)
class FinishSnapshot:
    """No record of the epoch is in flight to this subtask any more: write what was frozen and the logs, then acknowledge."""

    epoch: int


Effect: TypeAlias = Block | TakeSnapshot | ForwardMarker | StartLog | LogOvertaken | StopLog | Unblock | FinishSnapshot


class Alignment:
    """The alignment of one subtask. Effects are to be executed in the order given, before the next event.

    `feedback` are its channels from the tail of a loop, if the subtask is the loop's head.
    """

    def __init__(
        self,
        channels: Iterable[ChannelId],
        *,
        mode: AlignmentMode = AlignmentMode.EXACTLY_ONCE,
        feedback: Iterable[ChannelId] = (),
    ) -> None:
        self._channels, returning = frozenset(channels), frozenset(feedback)
        self._awaited = self._channels - returning
        assert returning <= self._channels, "feedback channels are inputs, too"
        assert self._awaited or not self._channels, "no marker enters a loop that has no other input"
        self._mode = mode
        self.epoch_in_progress: int | None = None  # its marker came on a channel, and it isn't finished
        self._at_once = False  # its snapshot waits for no further marker
        self._taken = False  # its state has been frozen
        self._marked: set[ChannelId] = set()  # the channels on which its marker came
        self._blocked: set[ChannelId] = set()
        self._closed = -1  # every epoch up to this one is over here: finished, aborted or passed
        self._hurried = -1  # the newest epoch that was hurried
        self._last_marker: dict[ChannelId, int] = {}
        self._story: deque[tuple[Event, tuple[Effect, ...]]] = deque(maxlen=STORY_LENGTH)

    @property
    def missing(self) -> frozenset[ChannelId]:
        """The channels whose marker the snapshot in progress waits for."""
        return frozenset() if self.epoch_in_progress is None or self._taken else self._awaited - self._marked

    @property
    def blocked(self) -> frozenset[ChannelId]:
        return frozenset(self._blocked)

    @property
    def logged(self) -> frozenset[ChannelId]:
        """The channels whose records go into the log now."""
        return self._channels - self._marked if self._taken else frozenset()

    def is_hurried(self, epoch: int) -> bool:
        """Return whether the epoch was hurried and isn't over here. Under `LOGGING` no epoch is hurried."""
        return epoch == self._hurried and epoch > self._closed

    def may_overtake(self, epoch: int) -> bool:
        """Return whether this marker may be taken out of its turn: it is hurried, or void and maybe ahead of one that is."""
        return self.is_hurried(epoch) or epoch <= self._closed

    def on_marker(self, channel: ChannelId, epoch: int, *, overtook: bool = False, full: bool = False) -> list[Effect]:
        """`overtook`: the marker was taken out of the queue ahead of records. `full`: the epoch is aligned in any case."""
        event = MarkerArrived(channel, epoch, overtook, full)
        hurried = self.is_hurried(epoch)
        assert channel in self._channels, self._tell(event, "the channel is not an input of this subtask")
        # A hurried marker may come from a queue that is blocked, when the notice of an older epoch's abort is late.
        assert channel not in self._blocked or hurried, self._tell(event, "the channel is blocked and must not be read")
        assert epoch > self._last_marker.get(channel, -1), self._tell(event, "markers must grow on a channel")
        assert self.may_overtake(epoch) or not overtook, self._tell(event, "only hurried markers overtake")
        assert not (hurried and full), self._tell(event, "full epochs are never hurried")
        self._last_marker[channel] = epoch
        effects: list[Effect] = []
        if epoch > self._closed:
            effects += self._begin(epoch, full)
            effects += self._mark(channel, overtook)
        return self._told(event, effects)

    def on_trigger(self, epoch: int) -> list[Effect]:
        """For sources only. A trigger that is repeated, or comes after the abort of its epoch, changes nothing."""
        event = EpochTriggered(epoch)
        assert not self._channels, self._tell(event, "a subtask with inputs is triggered by markers only")
        effects: list[Effect] = []
        if epoch > self._closed:
            self._closed = epoch
            effects = [TakeSnapshot(epoch), ForwardMarker(epoch), FinishSnapshot(epoch)]
        return self._told(event, effects)

    def on_hurry(self, epoch: int) -> list[Effect]:
        """From now on this epoch waits for nothing. This is remembered until its marker comes, and ignored if it is over."""
        event = EpochHurried(epoch)
        assert self._mode is AlignmentMode.EXACTLY_ONCE, self._tell(event, "there is nothing to hurry in this mode")
        self._hurried = max(self._hurried, epoch)
        effects: list[Effect] = []
        if self.epoch_in_progress == epoch and self.is_hurried(epoch) and not self._taken:
            effects = [*self._take(epoch), *self._unblock()]
        return self._told(event, effects)

    def on_abort(self, epoch: int) -> list[Effect]:
        """The coordinator gave up `epoch`; whatever was triggered before it is over as well."""
        effects = self._end() if self.epoch_in_progress is not None and self.epoch_in_progress <= epoch else []
        self._closed = max(self._closed, epoch)
        return self._told(EpochAborted(epoch), effects)

    def _begin(self, epoch: int, full: bool) -> list[Effect]:
        if self.epoch_in_progress == epoch:
            return []
        # A newer marker: the notice that the epoch in progress was aborted has not arrived yet.
        effects = self._end()
        self._closed = epoch - 1
        self.epoch_in_progress = epoch
        self._at_once = self.is_hurried(epoch) or (self._mode is AlignmentMode.LOGGING and not full)
        return effects

    def _mark(self, channel: ChannelId, overtook: bool) -> list[Effect]:
        assert self.epoch_in_progress is not None
        self._marked.add(channel)
        overtaken: list[Effect] = [LogOvertaken(channel)] if overtook else []
        effects: list[Effect] = []
        if self._taken:
            effects = [*overtaken, StopLog(frozenset({channel}))]
        else:
            if not self._at_once and self._mode is not AlignmentMode.AT_LEAST_ONCE:
                self._blocked.add(channel)
                effects.append(Block(channel))
            if self._at_once or self._marked >= self._awaited:
                # The order is the theorem. The state is frozen before anything of the next epoch is processed, so the
                # snapshot holds this epoch and nothing else. Downstream sees this epoch end before any record of the
                # next one, so unblocking, which lets such records be processed and their results be sent, comes last.
                effects += [*self._take(self.epoch_in_progress), *overtaken, *self._unblock()]
        return effects + self._end() if self._marked == self._channels else effects

    def _take(self, epoch: int) -> list[Effect]:
        self._taken = True
        start: list[Effect] = [StartLog(self.logged)] if self.logged else []
        return [TakeSnapshot(epoch), ForwardMarker(epoch), *start]

    def _unblock(self) -> list[Effect]:
        released = self.blocked
        self._blocked.clear()
        return [Unblock(released)] if released else []

    def _end(self) -> list[Effect]:
        """Whatever is in progress is over, because it is done or because it will never be."""
        effects = self._unblock()
        if self.epoch_in_progress is not None:
            self._closed = self.epoch_in_progress
        if self.logged:
            effects.append(StopLog(self.logged))
        if self._taken and self.epoch_in_progress is not None:
            effects.append(FinishSnapshot(self.epoch_in_progress))
        self.epoch_in_progress = None
        self._taken = self._at_once = False
        self._marked.clear()
        return effects

    def _told(self, event: Event, effects: list[Effect]) -> list[Effect]:
        self._story.append((event, tuple(effects)))
        return effects

    def _tell(self, event: Event, complaint: str) -> str:
        lines = [f"  {past} -> {', '.join(map(str, effects)) or 'nothing'}" for past, effects in self._story]
        state = (
            f"in progress {self.epoch_in_progress}, marked {sorted(map(str, self._marked))}, frozen {self._taken}, "
            f"hurried {self._hurried}, closed up to {self._closed}"
        )
        return "\n".join([f"{event}: {complaint} ({self._mode.value}; {state}). What happened before:", *lines])
