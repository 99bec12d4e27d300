"""EpochCoordinator: when epochs end, and when a snapshot is complete.

Theory of operation (Carbone et al. 2017, §3.3 "Pipelined Consistent Snapshots"; §4.2 on notifications)
------------------------------------------------------------------------------------------------------
The paper's JobManager starts a snapshot at the sources, waits until every subtask has acknowledged its part, and then
declares it complete. The life of an epoch:

    TriggerEpoch ──► acknowledgements ──all──► CreateManifest ──ManifestCreated──► NotifyComplete, ReleaseSnapshots
                          │                          │
                          │ declined, timed out      │ ManifestFailed
                          ▼                          ▼
                     NotifyAborted, Discard     NotifyAborted          … and FailJob after too many in a row

The manifest is the point of no return: a snapshot is complete if and only if its manifest exists. Hence

- once the manifest is asked for, neither a time-out nor a decline can abort the epoch: it may already exist. The shell
  answers every `CreateManifest` with `ManifestCreated` or `ManifestFailed`;
- after `ManifestFailed` it may exist nevertheless (an answer got lost), so nothing it lists is discarded, until a
  later snapshot is complete: then the doubtful one is released like any old one, manifest first;
- only what was certainly never put into a manifest is discarded: the pieces of an epoch that was aborted while it
  collected acknowledgements, including pieces that come late. A repeated acknowledgement is ignored, since its files
  may belong to a complete snapshot, and so is one of an unknown epoch: it is better to leave a file behind than to delete
  one that is needed. (Backends build only on files of epochs that are known to be complete.)

An aborted epoch rolls nothing back. Its records count as part of the next epoch that completes.

Final epochs: when the input has ended, or a stop was asked for, a last epoch is triggered as soon as none is active,
and again under a new number if it is aborted. After it has completed nothing follows. The input has ended when all
`enders` have reported it: the sources, and the heads of loops, in which records may go round long after the sources have
ended (protocol/iteration.py). A stop with drain ends it: sources get `EndInput` once, epochs continue, and the final one
comes when all enders have ended. A stop that is asked for after that changes nothing; none undoes a drain.

Full epochs: their snapshots build on no earlier one. Final epochs are full, and epochs that are requested for a
savepoint. Such a request outlives an aborted epoch: the next epoch is full instead. Every other epoch names the newest
complete one (`base`), on which increments build; it is retained as long as an epoch that names it is active.

Invariants: epochs grow strictly and are never used twice, even if aborted; at most one is active; no notice
that an epoch is complete is sent before its manifest was created; the newest `retain` complete snapshots are never released.

Time is that of the last `TimePassed`, and never goes backward. Between events the shell looks at `deadline_ms()`.
Not here: sending, storing, restarting, and slots that are lost (they end the attempt, and this object with it).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias, assert_never

from tidegate.protocol.ids import SubtaskId

STORY_LENGTH = 48
REMEMBERED_ABORTS = 64


class Ending(Enum):
    """Why an epoch is the last one."""

    INPUT_ENDED = "input-ended"  # all sources have reached the end of their input, and all loops theirs
    STOP = "stop"  # sources emit nothing after the marker; the job can be resumed from there
    DRAIN = "drain"  # as INPUT_ENDED, but sources were told to end there


class AbortReason(Enum):
    TIMED_OUT = "timed-out"  # acknowledgements were missing
    DECLINED = "declined"  # a subtask could not write its part of the snapshot
    STORE_FAILED = "store-failed"  # the manifest could not be written


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSettings:
    """`interval_ms` counts from trigger to trigger; None: only final epochs and those that are asked for.

    `min_pause_ms` counts from the end of one epoch to the trigger of the next; it does not hold up final epochs and
    those that are asked for. `tolerable_failures` epochs in a row may be aborted; one more fails the job.
    """

    interval_ms: int | None
    min_pause_ms: int = 0
    timeout_ms: int = 600_000
    tolerable_failures: int = 0
    retain: int = 1

    def __post_init__(self) -> None:
        assert self.interval_ms is None or self.interval_ms > 0, self
        assert self.min_pause_ms >= 0 and self.timeout_ms > 0, self
        assert self.tolerable_failures >= 0 and self.retain >= 1, self


@dataclass(frozen=True, slots=True)
class TimePassed:
    now_ms: int


@dataclass(frozen=True, slots=True)
class SnapshotAcknowledged:
    """The subtask's part of the snapshot is durable. `payload` describes it, and is opaque here."""

    subtask: SubtaskId
    epoch: int
    payload: Any = field(repr=False)


@dataclass(frozen=True, slots=True)
class SnapshotAdvanced:
    """A slot has written more of this epoch's snapshot: the time-out counts from here."""

    epoch: int


@dataclass(frozen=True, slots=True)
class SnapshotDeclined:
    subtask: SubtaskId
    epoch: int
    reason: AbortReason
    message: str


@dataclass(frozen=True, slots=True)
class InputEnded:
    """From a source: no record follows. From the head of a loop: no record is left in the loop either."""

    subtask: SubtaskId


@dataclass(frozen=True, slots=True)
class StopRequested:
    drain: bool


@dataclass(frozen=True, slots=True)
class SnapshotRequested:
    """A snapshot is wanted now. Met by the next epoch to be triggered; not repeated if that one is aborted.

    A `full` one is repeated with the next epoch, until one is complete or a final one takes its place.
    """

    full: bool = False


@dataclass(frozen=True, slots=True)
class ManifestCreated:
    epoch: int


@dataclass(frozen=True, slots=True)
class ManifestFailed:
    """Creating the manifest failed. It may exist nevertheless."""

    epoch: int
    message: str


Event: TypeAlias = (
    TimePassed
    | SnapshotAcknowledged
    | SnapshotAdvanced
    | SnapshotDeclined
    | InputEnded
    | StopRequested
    | SnapshotRequested
    | ManifestCreated
    | ManifestFailed
)


@dataclass(frozen=True, slots=True)
class TriggerEpoch:
    """To all source subtasks. `base` is the newest complete epoch (0: none), on which the snapshot may build unless it
    is `full`."""

    epoch: int
    ending: Ending | None
    full: bool
    base: int


@dataclass(frozen=True, slots=True)
class EndInput:
    """To all source subtasks: emit the maximal watermark and End now, then report `InputEnded`."""


@dataclass(frozen=True, slots=True)
class CreateManifest:
    """Answer with `ManifestCreated` or `ManifestFailed`, in any case."""

    epoch: int
    payloads: Mapping[SubtaskId, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class NotifyComplete:
    """To all subtasks. Sinks commit now; if `ending` is given, nothing follows and slots end."""

    epoch: int
    ending: Ending | None


@dataclass(frozen=True, slots=True)
class NotifyAborted:
    """To all subtasks."""

    epoch: int
    reason: AbortReason
    message: str


@dataclass(frozen=True, slots=True)
class Discard:
    """No manifest lists these pieces, and none will. Delete the files that they alone refer to."""

    payloads: tuple[Any, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class ReleaseSnapshots:
    """Delete these snapshots, manifest first. One of them may turn out not to exist."""

    epochs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FailJob:
    """The attempt is over. The restart strategy decides whether there is another one."""

    reason: AbortReason
    message: str


Effect: TypeAlias = (
    TriggerEpoch | EndInput | CreateManifest | NotifyComplete | NotifyAborted | Discard | ReleaseSnapshots | FailJob
)


@dataclass(slots=True)
class _ActiveEpoch:
    epoch: int
    ending: Ending | None
    alive_ms: int  # when it was triggered, or when the writing of its snapshot has last advanced
    asked_full: bool  # requested to be full, not only because it is the last
    payloads: dict[SubtaskId, Any] = field(default_factory=dict, repr=False)
    storing: bool = False  # the manifest has been asked for


class EpochCoordinator:
    """The snapshots of one attempt. Effects are to be executed in the order given.

    `sources` are triggered; `enders`, the sources and the heads of loops, report when the input has ended.
    """

    def __init__(
        self,
        *,
        subtasks: frozenset[SubtaskId],
        sources: frozenset[SubtaskId],
        enders: frozenset[SubtaskId],
        settings: CoordinatorSettings,
        next_epoch: int,
        retained: Sequence[int],
        now_ms: int,
    ) -> None:
        assert sources, "there is at least one source"
        assert sources <= enders <= subtasks, "sources are enders, and enders are subtasks"
        assert list(retained) == sorted(set(retained)), f"retained epochs must grow: {retained}"
        assert not retained or retained[-1] < next_epoch, f"epoch {next_epoch} would not be newer than {retained}"
        self._subtasks = subtasks
        self._enders = enders
        self._settings = settings
        self.next_epoch = next_epoch  # its number, which no epoch has had
        self._retained = list(retained)
        self._now_ms = now_ms
        self._triggered_ms = now_ms  # the first interval starts with the attempt
        self._paused_until_ms = now_ms
        self._active: _ActiveEpoch | None = None
        self._failures = 0  # aborted in a row
        self._ended: set[SubtaskId] = set()
        self._stop: Ending | None = None
        self._requested = False
        self._full_wanted = False
        self._over = False  # a final epoch completed, or the job failed
        self._unanswered: dict[int, set[SubtaskId]] = {}  # by aborted epoch: the subtasks whose pieces may still come
        self._doubtful: list[_ActiveEpoch] = []  # their manifests may exist although creating them failed
        self._story: deque[tuple[Event, tuple[Effect, ...]]] = deque(maxlen=STORY_LENGTH)

    @property
    def active_epoch(self) -> int | None:
        return self._active.epoch if self._active else None

    @property
    def waiting_for(self) -> frozenset[SubtaskId]:
        """The subtasks that have not yet acknowledged the active epoch."""
        return self._subtasks - self._active.payloads.keys() if self._active else frozenset()

    def deadline_ms(self) -> int | None:
        """Return when `TimePassed` is needed next, if nothing else happens before."""
        if self._over:
            return None
        if self._active:
            return None if self._active.storing else self._active.alive_ms + self._settings.timeout_ms
        if self._settings.interval_ms is None:
            return None
        return max(self._triggered_ms + self._settings.interval_ms, self._paused_until_ms)

    def handle(self, event: Event) -> list[Effect]:
        effects = self._apply(event)
        effects += self._trigger_if_due()
        if effects or not isinstance(event, TimePassed | SnapshotAdvanced):
            self._story.append((event, tuple(effects)))
        return effects

    def _apply(self, event: Event) -> list[Effect]:
        match event:
            case TimePassed():
                return self._on_time(event)
            case SnapshotAcknowledged():
                return self._on_acknowledged(event)
            case SnapshotAdvanced():
                if self._active is not None and self._active.epoch == event.epoch:
                    self._active.alive_ms = self._now_ms
                return []
            case SnapshotDeclined():
                return self._on_declined(event)
            case InputEnded():
                assert event.subtask in self._enders, self._tell(event, "this subtask is neither a source nor a loop's head")
                self._ended.add(event.subtask)
                return []
            case StopRequested():
                return self._on_stop(event)
            case SnapshotRequested():
                self._requested = True
                self._full_wanted |= event.full
                return []
            case ManifestCreated():
                return self._on_manifest_created(event)
            case ManifestFailed():
                active = self._storing(event)
                self._doubtful.append(active)
                return self._abort(active, AbortReason.STORE_FAILED, event.message)
            case _:
                assert_never(event)

    def _on_time(self, event: TimePassed) -> list[Effect]:
        self._now_ms = max(self._now_ms, event.now_ms)
        active, timeout_ms = self._active, self._settings.timeout_ms
        if active is None or active.storing or self._now_ms < active.alive_ms + timeout_ms:
            return []
        missing = sorted(self.waiting_for)
        named = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        message = f"epoch {active.epoch}: no acknowledgement from {named} within {timeout_ms} ms"
        return self._give_up(active, AbortReason.TIMED_OUT, message)

    def _on_acknowledged(self, event: SnapshotAcknowledged) -> list[Effect]:
        assert event.subtask in self._subtasks, self._tell(event, "there is no such subtask")
        active = self._active
        if active is None or event.epoch != active.epoch:
            return [Discard((event.payload,))] if self._answers_aborted(event) else []
        if event.subtask in active.payloads:
            return []
        active.payloads[event.subtask] = event.payload
        if self.waiting_for:
            return []
        active.storing = True
        return [CreateManifest(active.epoch, dict(active.payloads))]

    def _on_declined(self, event: SnapshotDeclined) -> list[Effect]:
        assert event.subtask in self._subtasks, self._tell(event, "there is no such subtask")
        active = self._active
        if active is None or event.epoch != active.epoch:
            self._answers_aborted(event)
            return []
        if active.storing:
            return []
        effects = self._give_up(active, event.reason, f"epoch {active.epoch}: {event.subtask}: {event.message}")
        self._answers_aborted(event)
        return effects

    def _on_stop(self, event: StopRequested) -> list[Effect]:
        if self._over or self._ended == self._enders or self._stop is Ending.DRAIN:
            return []
        self._stop = Ending.DRAIN if event.drain else Ending.STOP
        return [EndInput()] if event.drain else []

    def _on_manifest_created(self, event: ManifestCreated) -> list[Effect]:
        active = self._storing(event)
        self._end(active)
        self._failures = 0
        self._over = active.ending is not None
        effects: list[Effect] = [NotifyComplete(active.epoch, active.ending)]
        self._retained.append(active.epoch)
        released = self._retained[: -self._settings.retain]
        self._retained = self._retained[-self._settings.retain :]
        released += [doubtful.epoch for doubtful in self._doubtful]
        if released:
            effects.append(ReleaseSnapshots(tuple(sorted(released))))
        # Delete these files after the manifests, since an existing manifest must never list missing files.
        leftovers = tuple(payload for doubtful in self._doubtful for payload in doubtful.payloads.values())
        self._doubtful.clear()
        if leftovers:
            effects.append(Discard(leftovers))
        return effects

    def _storing(self, event: ManifestCreated | ManifestFailed) -> _ActiveEpoch:
        active = self._active
        assert active is not None and active.storing and active.epoch == event.epoch, self._tell(
            event, "no manifest of this epoch was asked for, or it was answered before"
        )
        return active

    def _give_up(self, active: _ActiveEpoch, reason: AbortReason, message: str) -> list[Effect]:
        """Abort an epoch that is still collecting acknowledgements: its pieces, early and late, are in no manifest."""
        self._unanswered[active.epoch] = set(self.waiting_for)
        while len(self._unanswered) > REMEMBERED_ABORTS:
            del self._unanswered[min(self._unanswered)]
        effects = self._abort(active, reason, message)
        if active.payloads:
            effects.insert(1, Discard(tuple(active.payloads.values())))
        return effects

    def _abort(self, active: _ActiveEpoch, reason: AbortReason, message: str) -> list[Effect]:
        self._end(active)
        self._failures += 1
        if active.asked_full:
            self._full_wanted = True
            self._requested |= self._settings.interval_ms is None  # otherwise no epoch would follow
        effects: list[Effect] = [NotifyAborted(active.epoch, reason, message)]
        if self._failures > self._settings.tolerable_failures:
            self._over = True
            effects.append(FailJob(reason, message))
        return effects

    def _end(self, active: _ActiveEpoch) -> None:
        assert active is self._active
        self._active = None
        self._paused_until_ms = self._now_ms + self._settings.min_pause_ms

    def _answers_aborted(self, event: SnapshotAcknowledged | SnapshotDeclined) -> bool:
        """Return whether this is the first answer of the subtask to an epoch that was aborted without it."""
        unanswered = self._unanswered.get(event.epoch, set())
        if event.subtask not in unanswered:
            return False
        unanswered.remove(event.subtask)
        if not unanswered:
            del self._unanswered[event.epoch]
        return True

    def _trigger_if_due(self) -> list[Effect]:
        if self._over or self._active:
            return []
        may_end = self._stop is Ending.STOP or self._ended == self._enders
        ending = (self._stop or Ending.INPUT_ENDED) if may_end else None
        deadline_ms = self.deadline_ms()
        if ending is None and not self._requested and (deadline_ms is None or self._now_ms < deadline_ms):
            return []
        self._active = _ActiveEpoch(self.next_epoch, ending, self._now_ms, asked_full=self._full_wanted)
        self.next_epoch += 1
        self._triggered_ms = self._now_ms
        full = self._full_wanted or ending is not None
        self._requested = self._full_wanted = False
        return [TriggerEpoch(self._active.epoch, ending, full, self._retained[-1] if self._retained else 0)]

    def _tell(self, event: Event, complaint: str) -> str:
        lines = [f"  {past} -> {', '.join(map(str, effects)) or 'nothing'}" for past, effects in self._story]
        state = (
            f"active {self._active}, waiting for {sorted(map(str, self.waiting_for))}, next {self.next_epoch}, "
            f"retained {self._retained}, {self._failures} aborted in a row, over {self._over}"
        )
        return "\n".join([f"{event}: {complaint} ({state}). What happened before:", *lines])
