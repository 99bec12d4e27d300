"""Alignment: when a subtask takes its part of a snapshot.

Theory of operation (Carbone et al. 2017, §3.3 "Pipelined Consistent Snapshots", the procedure "Snapshot Alignment")
------------------------------------------------------------------------------------------------------------------
Markers cut every channel into epochs. A snapshot of epoch N is consistent if each subtask's part of it reflects, on
every input channel, all records before marker N and none after it. Since marker N comes at different moments on
different channels, a subtask aligns them:

1. Marker N arrives on a channel: *block* the channel. Its next records belong to epoch N + 1 and have to wait.
2. It arrived on the last channel: every record of epoch N has been processed and none of a later one. *Take the
   snapshot*, *forward the marker* to all outputs, *unblock* all channels.

A source has no input channels: the coordinator's trigger stands for "the last marker arrived". So the marker passes
through the graph once, each subtask stops only the channels that are ahead, and no record in transit has to be stored.
The paper assumes FIFO channels that lose nothing and can be blocked; so do we, and markers whose epochs do not grow on
a channel are a bug here.

`AT_LEAST_ONCE` is the paper's relaxed mode: markers are counted, no channel is ever blocked, and the snapshot may also
hold effects of records behind the marker, which are then seen again after a rollback.

Aborts, which the paper leaves out
----------------------------------
The coordinator may give up epoch N (time-out, a subtask that couldn't write). The epoch's records are simply taken
to belong to the next epoch that completes. Three things have to be right:

- The notice may overtake markers. `on_abort(N)` releases what was blocked for N, and markers of epochs up to N that
  come late are swallowed: no block, nothing forwarded.
- It may come after this subtask has forwarded marker N. Then nothing is to be done here. Downstream, some channels
  bring marker N and others (whose upstream swallowed it) never do; the notice, or the next marker, releases them there.
- It may be overtaken by marker N + 1. At most one epoch is active, and it can't have completed without this
  subtask, so a newer marker proves that N was aborted: abandon N and align N + 1.

Invariants: an epoch is snapshotted at most once, in growing order; a channel is blocked at most once per epoch, and
only while an epoch is in progress; the marker is forwarded exactly when the snapshot is taken.

Not here: what blocking, freezing state or sending means (runtime), who decides to trigger and abort (coordinator). End
of input needs nothing: markers still flow on a channel that has ended.
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
    EXACTLY_ONCE = "exactly-once"      # block marked channels until all are marked
    AT_LEAST_ONCE = "at-least-once"    # never block, count markers


@dataclass(frozen=True, slots=True)
class MarkerArrived:
    channel: ChannelId
    epoch: int


@dataclass(frozen=True, slots=True)
class EpochTriggered:
    epoch: int


@dataclass(frozen=True, slots=True)
class EpochAborted:
    epoch: int


Event: TypeAlias = MarkerArrived | EpochTriggered | EpochAborted


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
class Unblock:
    channels: frozenset[ChannelId]


Effect: TypeAlias = Block | TakeSnapshot | ForwardMarker | Unblock


class Alignment:
    """The alignment of one subtask. Effects are to be executed in the order given, before the next event."""

    def __init__(self, channels: Iterable[ChannelId], *, mode: AlignmentMode = AlignmentMode.EXACTLY_ONCE) -> None:
        self._channels = frozenset(channels)
        self._mode = mode
        self._epoch: int | None = None             # in progress: its marker came on some channels, not yet on all
        self._marked: set[ChannelId] = set()       # the channels on which it came
        self._closed = -1                          # every epoch up to this one is over here: done, aborted or passed
        self._last_marker: dict[ChannelId, int] = {}
        self._story: deque[tuple[Event, tuple[Effect, ...]]] = deque(maxlen=STORY_LENGTH)

    @property
    def epoch_in_progress(self) -> int | None:
        return self._epoch

    @property
    def blocked(self) -> frozenset[ChannelId]:
        return frozenset(self._marked) if self._mode is AlignmentMode.EXACTLY_ONCE else frozenset()

    def on_marker(self, channel: ChannelId, epoch: int) -> list[Effect]:
        event = MarkerArrived(channel, epoch)
        assert channel in self._channels, self._tell(event, "the channel is no input of this subtask")
        assert channel not in self.blocked, self._tell(event, "the channel is blocked and must not be read")
        assert epoch > self._last_marker.get(channel, -1), self._tell(event, "markers must grow on a channel")
        self._last_marker[channel] = epoch
        effects: list[Effect] = []
        if epoch > self._closed:
            effects += self._begin(epoch)
            effects += self._mark(channel)
            effects += self._complete_if_aligned()
        return self._told(event, effects)

    def on_trigger(self, epoch: int) -> list[Effect]:
        """For sources only. A trigger that is repeated, or comes after the abort of its epoch, changes nothing."""
        event = EpochTriggered(epoch)
        assert not self._channels, self._tell(event, "a subtask with inputs is triggered by markers only")
        effects: list[Effect] = []
        if epoch > self._closed:
            self._closed = epoch
            effects = [TakeSnapshot(epoch), ForwardMarker(epoch)]
        return self._told(event, effects)

    def on_abort(self, epoch: int) -> list[Effect]:
        """The coordinator gave up `epoch`; whatever was triggered before it is over as well."""
        effects = self._release() if self._epoch is not None and self._epoch <= epoch else []
        self._closed = max(self._closed, epoch)
        return self._told(EpochAborted(epoch), effects)

    def _begin(self, epoch: int) -> list[Effect]:
        if self._epoch == epoch:
            return []
        # A newer marker: the notice that the epoch in progress was aborted is still under way to us.
        effects = self._release()
        self._epoch = epoch
        self._closed = epoch - 1
        return effects

    def _mark(self, channel: ChannelId) -> list[Effect]:
        self._marked.add(channel)
        return [Block(channel)] if self._mode is AlignmentMode.EXACTLY_ONCE else []

    def _complete_if_aligned(self) -> list[Effect]:
        if self._epoch is None or self._marked != self._channels:
            return []
        epoch = self._epoch
        self._closed = epoch
        # The order is the theorem. The state is frozen before anything of the next epoch is processed, so the snapshot
        # holds this epoch and nothing else. Downstream sees this epoch end before any record of the next one, so
        # unblocking, which lets such records be processed and their results be sent, comes last.
        return [TakeSnapshot(epoch), ForwardMarker(epoch), *self._release()]

    def _release(self) -> list[Effect]:
        """Stop aligning whatever is being aligned, because it is done or because it will never be."""
        released = self.blocked
        self._epoch = None
        self._marked.clear()
        return [Unblock(released)] if released else []

    def _told(self, event: Event, effects: list[Effect]) -> list[Effect]:
        self._story.append((event, tuple(effects)))
        return effects

    def _tell(self, event: Event, complaint: str) -> str:
        lines = [f"  {past} -> {', '.join(map(str, effects)) or 'nothing'}" for past, effects in self._story]
        state = f"in progress {self._epoch}, marked {sorted(map(str, self._marked))}, closed up to {self._closed}"
        return "\n".join([f"{event}: {complaint} ({self._mode.value}; {state}). What happened before:", *lines])
