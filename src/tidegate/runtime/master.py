"""The master: deploys attempts, drives the coordinator, and rolls back.

It is the shell around protocol/coordinator.py on the Spark driver. Like the slot it does no I/O of its own: links to
slots, the deployer, the store's catalogue, the clock and a background are given. All its methods run in one thread.

The life of an attempt: claim a number in the store (which fences every older one) and choose the newest complete
snapshot → deploy → all slots register → `Deploy` → all are ready → `Start` → epochs … → it fails, or ends. After a
failure the restart strategy decides; the next attempt begins only when the old deployment is gone and every store
operation before it is done (the background is first in, first out), so that it sees whether the last manifest was
created.

The plan may change in between (`rescale`): the attempt that runs is stopped with a final snapshot, and the next one goes on
from it with the new plan. An attempt that fails meanwhile is followed by one with the new plan as well.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from tidegate.dataflow.operators.source import SourceSpec
from tidegate.dataflow.plan import Plan
from tidegate.errors import CorruptFile, FencedOff, JobError, NotFound, StoreError
from tidegate.protocol import coordinator as coordination
from tidegate.protocol.coordinator import (
    AbortReason,
    Coordinator,
    CreateManifest,
    Discard,
    Effect,
    Event,
    FailJob,
    ManifestCreated,
    ManifestFailed,
    NotifyAborted,
    NotifyComplete,
    ReleaseSnapshots,
    SnapshotAcknowledged,
    SnapshotDeclined,
    SnapshotRequested,
    StopRequested,
    TimePassed,
    TriggerEpoch,
)
from tidegate.protocol.ids import SubtaskId
from tidegate.protocol.restart import GiveUp
from tidegate.runtime.attempts import (
    Beginning,
    Opened,
    Restore,
    named_point,
    open_attempt,
    operators_in,
    written_by,
)
from tidegate.runtime.background import Background
from tidegate.runtime.claiming import Claim
from tidegate.runtime.clock import Clock
from tidegate.runtime.committing import Commits
from tidegate.runtime.deployment import Deployer, Deployment, Layout, Links, Rescaling
from tidegate.runtime.failing import FailureLog, Speak, described, is_final, keep_silent
from tidegate.runtime.messages import (
    Abort,
    Acknowledge,
    Committed,
    Complete,
    Decline,
    Delivered,
    Deploy,
    Done,
    EndInput,
    Failed,
    Heartbeat,
    InputEnded,
    Message,
    Noticed,
    Ready,
    Register,
    Shutdown,
    Start,
    Trigger,
)
from tidegate.runtime.reports import AttemptReport, EpochReport, EpochReports, Failure, SlotReport, Status, slots_of
from tidegate.runtime.rescaling import Rescales
from tidegate.runtime.savepoints import SavepointDesk, SavepointOrder
from tidegate.runtime.settings import JobSettings
from tidegate.store.catalog import SnapshotCatalog
from tidegate.store.manifest import Manifest, MicroBatch

# How long a cancelled deployment may take to end before the next attempt starts without waiting for it.
GONE_TIMEOUT_MS = 60_000


class Master:
    """`copies` is where savepoints are copied, which may take long; by default, in the background with everything else.
    `speak` is given what is to be logged; `noticed` are notices of slots that were logged before, by whoever shares it."""

    def __init__(self, *, plan: Plan, settings: JobSettings, catalog: SnapshotCatalog, deployer: Deployer, links: Links,
                 clock: Clock, background: Background, copies: Background | None = None, restore: Restore | None = None,
                 graph: str = "", versions: Mapping[str, str] | None = None, micro_batch: MicroBatch | None = None,
                 speak: Speak = keep_silent, noticed: set[str] | None = None) -> None:
        self.status = Status.STARTING
        self.attempt = 0
        self.epochs = EpochReports()
        self.attempts: list[AttemptReport] = []
        self.metrics: dict[str, dict[str, Any]] = {}
        self.delivered: dict[str, list[str]] = {}
        self.on_delivered: Callable[[str, str], bool] = lambda sink, committable: False    # whether it took it
        self.on_completed: Callable[[int], None] = lambda epoch: None
        self._micro_batch = micro_batch
        self._parked = False
        self._speak = speak
        self._noticed = set() if noticed is None else noticed      # what was said before
        self._failures = FailureLog(settings.name, settings.restart, at_the_end=settings.at_the_end, speak=speak)
        self._layout = Layout(plan, deployer, graph)
        self._plan = plan
        self._settings = settings
        self._catalog = catalog
        self._links = links
        self._clock = clock
        self._background = background
        self._copies = copies or background
        self._restore = restore or Restore()
        self._versions = dict(versions or {})
        self._desk = SavepointDesk(catalog=catalog, background=self._copies, clock=clock, want=self._want_full_epoch,
                                   release=self._release)
        self._rescales = Rescales()
        self._has_own = False                           # a snapshot, so that it doesn't matter what it began with
        self._claim = Claim(self._restore, catalog=catalog, background=self._copies)
        self._subtasks: frozenset[SubtaskId] = frozenset()
        self._sources: frozenset[SubtaskId] = frozenset()
        self._enders: frozenset[SubtaskId] = frozenset()       # who says that there is nothing more to come
        self._deployment: Deployment | None = None
        self._coordinator: Coordinator | None = None
        self._addresses: dict[int, tuple[str, int]] = {}
        self._heard_ms: dict[int, int] = {}
        self._commits = Commits(catalog, background, self._desk.on_committed)
        self._ready: set[int] = set()
        self._done: set[int] = set()
        self._begun = Beginning(None, None, None)
        self._retained: list[int] = []
        self._superseded: list[int] = []                # of a micro-batch that runs again; let go when it is complete
        self._swept_for = 0                             # the attempt that has swept a second time
        self._next_epoch = 1
        self._deadline_ms: int | None = None            # of the deployment, or of the pause before the next attempt
        self._gone_by_ms: int | None = None
        self._opening = False                           # an attempt is being opened; what links still say is of the last
        self._final: Status | None = None               # what the job becomes once the deployment is gone
        self._newest_epoch: int | None = None           # of the complete snapshots; what the next attempt begins with
        self._stop_asked: bool | None = None            # the drain flag of a stop that came before the job ran

    @property
    def plan(self) -> Plan:
        """That of the present attempt, or of the one that is being opened."""
        return self._plan

    @property
    def failures(self) -> list[Failure]:
        """Why attempts ended, oldest first."""
        return self._failures.failures

    @property
    def slots(self) -> list[SlotReport]:
        """Those of the present attempt that have registered; none once it has ended."""
        is_over = self.status.terminal or not self.attempts or self.attempts[-1].ended_ms is not None
        return [] if is_over else slots_of(self.attempts[-1], self._plan)

    # What the user asks for.

    def start(self) -> None:
        if self._rescales.wanted is not None:
            self._layout = self._rescales.wanted.layout
            self._plan = self._layout.plan
            self.metrics = {}
        self._opening = True
        self._background.submit(self._open_attempt, self._attempt_opened)

    def stop(self, *, drain: bool, savepoint: SavepointOrder | None = None) -> None:
        """With a savepoint only if there can be one. A job that is restarting has nothing that could end with a final
        snapshot: it ends at once, where it would have been restarted from."""
        if savepoint is not None:
            self._desk.take(savepoint, partial(self._stop_with_savepoint, drain, savepoint))
            return
        if self.status is Status.RESTARTING and self._final is None and not drain:
            self._failures.stopped(self._newest_epoch)
            self._wind_down(Status.FAILED)
            return
        self._stop_asked = drain
        if self._coordinator is not None:
            self._feed(StopRequested(drain))

    def snapshot(self) -> None:
        if self._coordinator is not None:
            self._feed(SnapshotRequested())

    def park(self) -> None:
        """A micro-batch is over. Until the next one the slots' processes belong to Spark, and say nothing."""
        self._parked = True

    def go_on(self, micro_batch: MicroBatch) -> None:
        """The slots are back, for this micro-batch."""
        self._parked, self._micro_batch = False, micro_batch
        self._heard_ms = dict.fromkeys(self._heard_ms, self._clock.monotonic_ms())

    def savepoint(self, order: SavepointOrder) -> None:
        self._desk.take(order)

    def withdraw(self, order: SavepointOrder, error: BaseException) -> None:
        self._desk.withdraw(order, error)

    def rescale(self, rescaling: Rescaling) -> None:
        if self._rescales.ask(rescaling, at_its_end=self._final is not None or self.status.terminal) and (
                self._coordinator is not None):
            self._feed(StopRequested(drain=False))

    def cancel(self) -> None:
        if not self.status.terminal and self._final is None:
            self._wind_down(Status.CANCELLED)

    def _stop_with_savepoint(self, drain: bool, order: SavepointOrder) -> None:
        if self.status is Status.RESTARTING:        # it failed since it was asked to
            self.withdraw(order, JobError(f"job {self._settings.name!r} was not stopped: it failed before it could take the "
                                          f"savepoint, and is restarting. Stop it again when it runs"))
            return
        self.stop(drain=drain)
        if self._desk.wanted:
            self._want_full_epoch()

    def _want_full_epoch(self) -> None:
        """For a savepoint. Where the job doesn't run, it is asked for again when it does."""
        if self._coordinator is None or self._stop_asked:
            return      # what is being drained ends with a full epoch, which takes the order along
        if self._coordinator.active_epoch is not None and self.epochs[-1].ending is not None:
            self._desk.on_triggered(self.epochs[-1].epoch)      # nothing follows it: it holds all that there will be
        else:
            self._feed(SnapshotRequested(full=True))

    # What the world tells.

    def on_message(self, slot: int, message: Message) -> None:
        if not self._listens:
            return
        self._heard_ms[slot] = self._clock.monotonic_ms()
        match message:
            case Register(_, host, port, pid, machine):
                self.attempts[-1].hosts[slot] = machine or host
                self._on_register(slot, (host, port), pid)
            case Ready(_, restored):
                self.attempts[-1].restored[slot] = restored
                self._on_ready(slot)
            case Acknowledge(vertex, subtask, epoch, operators, stats):
                self._on_acknowledge(SubtaskId(vertex, subtask), epoch, operators, stats)
            case Decline(vertex, subtask, epoch, text):
                self._feed(SnapshotDeclined(SubtaskId(vertex, subtask), epoch, AbortReason.DECLINED, text))
            case InputEnded(vertex, subtask):
                self._feed(coordination.InputEnded(SubtaskId(vertex, subtask)))
            case Heartbeat(_, metrics):
                self.metrics.update(metrics)
                if self.attempts[-1].first_record_ms is None and any(of.get("records_in") for of in metrics.values()):
                    self.attempts[-1] = replace(self.attempts[-1], first_record_ms=self._clock.now_ms())
            case Noticed(_, text):
                if text not in self._noticed:
                    self._noticed.add(text)
                    self._speak(logging.WARNING, f"Job {self._settings.name!r}: {text}")
            case Delivered(sink, committable):
                if not self.on_delivered(sink, committable):
                    self.delivered.setdefault(sink, []).append(committable)
            case Committed(_, epoch):
                self._commits.on_committed(slot, epoch)
            case Done():
                self._commits.on_committed(slot, self.epochs[-1].epoch)
                self._done.add(slot)
                if len(self._done) == self._plan.slots:
                    self._all_done(self.epochs[-1].ending)
            case Failed(_, text, operator, user_traceback, record, permanent, signature):
                self._attempt_failed(Failure(text, slot, operator, user_traceback, record, permanent, signature,
                                             where=self._called(slot)))
            case _:
                self._attempt_failed(Failure(f"slot {slot} sent {type(message).__name__}, which only the master may", slot))

    def on_lost(self, slot: int, reason: str) -> None:
        """The link to a slot of the present attempt is gone."""
        if self._listens:
            self._attempt_failed(Failure(f"{self._called(slot)} was lost: {reason}", slot))

    def _called(self, slot: int) -> str:
        """With its host and process, so that it can be found there."""
        return next((str(each) for each in self.slots if each.slot == slot), f"slot {slot}")

    @property
    def _listens(self) -> bool:
        """Whether what slots say, and their loss, is of the present attempt."""
        return self._final is None and self._gone_by_ms is None and not self._opening and not self.status.terminal

    def crashed(self, error: BaseException) -> None:
        """The loop around this master can't go on, because of a bug as a rule."""
        self._failed_for_good("".join(traceback.format_exception(error)))
        try:
            if self._deployment is not None:
                self._deployment.cancel()
        finally:
            self._job_over("failed", cancel=True)
            self.status = Status.FAILED

    def tick(self) -> None:
        """Looks at the clock and at the deployment."""
        if self.status.terminal:
            return
        now_ms = self._clock.monotonic_ms()
        ended = None if self._deployment is None else self._deployment.ended()
        if self._gone_by_ms is not None:
            self._wait_until_gone(now_ms, ended is not None or self._deployment is None)
        elif ended is not None:
            self._attempt_failed(ended if isinstance(ended, Failure) else Failure(f"the slots ended: {ended}"))
        elif self.status is Status.RUNNING:
            if not self._parked:
                self._check_heartbeats(now_ms)
            if self._coordinator is not None:
                self._feed(TimePassed(now_ms))
                if self._rescales.wants_snapshot(now_ms):
                    self._feed(SnapshotRequested())
                if self._micro_batch is None:       # else an epoch ends where a micro-batch does, and nowhere else
                    self._desk.look_for_requests(self.attempt)
        elif self._deadline_ms is not None and now_ms >= self._deadline_ms:
            missing = sorted(set(range(self._plan.slots)) - self._ready)
            self._attempt_failed(Failure(
                f"slots {missing} were not ready within {self._settings.tuning.deploy_timeout_ms} ms. A job needs "
                f"{self._plan.slots} task slots of Spark at the same time: are they there and free?"))

    # An attempt begins.

    def _open_attempt(self) -> Opened:
        """In the background."""
        if self._catalog.is_superseded():
            # To claim the next number would be to fence the other driver in turn, and so on.
            raise self._catalog.taken_over(self.attempt)
        named = None if self._has_own else named_point(self._restore)
        return open_attempt(self._catalog, named, self._restore, plan=self._plan, drop=self._settings.drop_state,
                            micro_batch=self._micro_batch)

    def _attempt_opened(self, opened: Opened | None, error: BaseException | None) -> None:
        self._opening = False
        if self._final is not None or self.status.terminal:
            return
        if opened is None:
            why = "" if error is None else described(error)
            may_come_back = isinstance(error, StoreError) and not isinstance(error, CorruptFile) and not is_final(error)
            if self.attempts and may_come_back:
                self._attempt_failed(Failure(why))       # it worked before
                return
            self._failed_for_good(why, permanent=error is not None and (
                is_final(error) or isinstance(error, CorruptFile | NotFound)))
            self._job_over("failed", cancel=True)
            self.status = Status.FAILED
            return
        self.attempt, self._retained, self._begun = opened.attempt, opened.epochs, opened.beginning
        self._superseded = opened.superseded
        self._next_epoch = max(self._next_epoch, opened.next_epoch)
        self._subtasks = frozenset(SubtaskId(vertex.id, index) for vertex in self._plan.vertices
                                   for index in range(vertex.parallelism))
        self._sources = frozenset(subtask for subtask in self._subtasks
                                  if isinstance(self._plan.vertices[subtask.vertex].head.spec, SourceSpec))
        heads = {loop.head_vertex for loop in self._plan.loops}
        self._enders = self._sources | {subtask for subtask in self._subtasks if subtask.vertex in heads}
        self._addresses, self._ready, self._done, self._heard_ms = {}, set(), set(), {}
        self._coordinator = None
        self._links.expect(self.attempt)
        now_ms = self._clock.monotonic_ms()
        self._deadline_ms = now_ms + self._settings.tuning.deploy_timeout_ms
        if opened.losses:
            self._speak(logging.WARNING, f"Job {self._settings.name!r}, attempt {self.attempt} does not take in from its "
                                         f"snapshot: {', '.join(opened.losses)}.")
        manifest, point = self._begun.manifest, self._begun.point
        self._newest_epoch = None if manifest is None else manifest.epoch
        self.attempts.append(AttemptReport(
            self.attempt, self._clock.now_ms(), None if manifest is None else manifest.epoch,
            restored_from=None if point is None else point.origin.path))
        self._claim.renew()
        if manifest is not None and point is None:
            self._has_own = True
            self._claim.settle(self._begun, self.attempt)
        self._deployment = self._layout.deployer.deploy(self.attempt)

    def _on_register(self, slot: int, address: tuple[str, int], pid: int) -> None:
        self._addresses[slot] = address
        self.attempts[-1].slots[slot] = pid
        if len(self._addresses) == self._plan.slots:
            addresses = [list(self._addresses[index]) for index in range(self._plan.slots)]
            manifest, point = self._begun.manifest, self._begun.point
            self._tell_all(Deploy(addresses, None if manifest is None else manifest.epoch,
                                  None if point is None else point.address))

    def _on_ready(self, slot: int) -> None:
        self._ready.add(slot)
        if len(self._ready) < self._plan.slots:
            return
        self._coordinator = Coordinator(
            subtasks=self._subtasks, sources=self._sources, enders=self._enders,
            settings=self._settings.snapshots.coordinator_settings(), next_epoch=self._next_epoch,
            retained=self._retained, now_ms=self._clock.monotonic_ms())
        self._commits.begin(self._plan.slots, self.attempt)
        self._deadline_ms = None
        self.status = Status.RUNNING
        self.attempts[-1] = replace(self.attempts[-1], running_ms=self._clock.now_ms())
        self._heard_ms = dict.fromkeys(range(self._plan.slots), self._clock.monotonic_ms())
        self._speak(logging.INFO, f"Job {self._settings.name!r}, attempt {self.attempt} runs: "
                                  f"{', '.join(map(str, self.slots))}.")
        self._tell_all(Start())
        self._rescales.on_ready(self._layout, self._clock.monotonic_ms())
        if self._stop_asked is not None or self._rescales.wanted is not None:
            self._feed(StopRequested(bool(self._stop_asked)))
        if self._desk.wanted:
            self._want_full_epoch()

    # Epochs.

    def _on_acknowledge(self, subtask: SubtaskId, epoch: int, operators: dict[str, Any], stats: dict[str, Any]) -> None:
        self.epochs.acknowledged(epoch, str(subtask), stats)
        self._feed(SnapshotAcknowledged(subtask, epoch, operators))

    def _feed(self, event: Event) -> None:
        if self._coordinator is None:
            return
        for effect in self._coordinator.handle(event):
            self._execute(effect)
        if self._coordinator is not None:
            self._next_epoch = self._coordinator.next_epoch

    def _execute(self, effect: Effect) -> None:
        now_ms = self._clock.now_ms()
        match effect:
            case TriggerEpoch(epoch, ending, full, base):
                name = None if ending is None else ending.value
                self.epochs.triggered(EpochReport(epoch, self.attempt, now_ms, name, full))
                if full:
                    self._desk.on_triggered(epoch)
                self._tell_all(Trigger(epoch, name, full, base))
            case coordination.EndInput():
                self._tell_all(EndInput())
            case CreateManifest(epoch, payloads):
                manifest = self._manifest(epoch, payloads)
                self._background.submit(partial(self._catalog.commit, manifest),
                                        partial(self._manifest_created, self.attempt, manifest))
            case NotifyComplete(epoch, ending):
                self.epochs.of(epoch).completed_ms = now_ms
                self._newest_epoch = epoch
                self._rescales.on_complete(final=ending is not None)
                self._tell_all(Complete(epoch, None if ending is None else ending.value))
                self._has_own = True
                self._claim.settle(self._begun, self.attempt)
                self._release(self._superseded)
                self._superseded = []
                self.on_completed(epoch)
                if self._swept_for < self.attempt:
                    # Slots of older attempts may have written files after the sweep that this attempt began with.
                    self._swept_for = self.attempt
                    self._background.submit(partial(self._catalog.sweep, self.attempt), _forget)
            case NotifyAborted(epoch, reason, message):
                self.epochs.of(epoch).aborted = f"{reason.value}: {message}"
                self._desk.on_aborted(epoch)
                self._rescales.on_aborted(self._clock.monotonic_ms())
                self._tell_all(Abort(epoch))
            case ReleaseSnapshots(epochs):
                self._release(epochs)
            case Discard(payloads):
                names = [file["name"] for payload in payloads for operator in payload.values()
                         for file in operator["piece"]["files"]]
                self._background.submit(partial(self._catalog.discard, names, attempt=self.attempt), _forget)
            case FailJob(_, message):
                self._attempt_failed(Failure(f"too many snapshots failed in a row: {message}"))

    def _release(self, epochs: Collection[int]) -> None:
        """All but those that a savepoint is being copied from; they come here again."""
        free = self._desk.releasable(epochs)
        if free:
            self._background.submit(partial(self._catalog.release, free, attempt=self.attempt), _forget)

    def _manifest(self, epoch: int, payloads: Mapping[SubtaskId, Any]) -> Manifest:
        operators = operators_in(payloads)
        report = self.epochs.of(epoch)
        report.bytes = sum(file.bytes for entry in operators.values() for piece in entry.pieces for file in piece.files)
        assert self._begun.point is None or written_by(self.attempt, operators), "what the job began with may be deleted"
        return Manifest(job=self._settings.name, epoch=epoch, attempt=self.attempt, created_ms=self._clock.now_ms(),
                        key_group_count=self._plan.key_group_count, ending=report.ending, operators=operators,
                        restored_from=self._begun.origin, micro_batch=self._micro_batch,
                        stats={"triggered_ms": report.triggered_ms, "bytes": report.bytes, **report.measured,
                               "subtasks": report.subtasks})

    def _manifest_created(self, attempt: int, manifest: Manifest, _: None, error: BaseException | None) -> None:
        if attempt != self.attempt or self._gone_by_ms is not None or self.status.terminal:
            return      # the next attempt finds out from the store
        if error is None:
            self._commits.on_complete(manifest)
            self._desk.on_complete(manifest, graph=self._layout.graph, versions=self._versions)
            self._feed(ManifestCreated(manifest.epoch))
        elif isinstance(error, FencedOff):
            # Another driver runs this job now. To restart would be to fence it in turn, and so on.
            self._failed_for_good(f"{type(error).__name__}: {error}", permanent=True)
            self._wind_down(Status.FAILED)
        elif is_final(error):
            self._failed_for_good(described(error), permanent=True)
            self._wind_down(Status.FAILED)
        else:
            self._feed(ManifestFailed(manifest.epoch, f"{type(error).__name__}: {error}"))

    # An attempt ends.

    def _attempt_failed(self, failure: Failure) -> None:
        self._rescales.on_failed()
        now_ms = self._clock.monotonic_ms()
        decision = self._failures.take(replace(failure, attempt=self.attempt, at_ms=self._clock.now_ms()), now_ms=now_ms,
                                       epoch=self._newest_epoch, expected=self._parked)
        if isinstance(decision, GiveUp):
            self._wind_down(Status.FAILED)
        else:
            self.status = Status.RESTARTING
            self._deadline_ms = now_ms + decision.delay_ms
            self._let_go(now_ms)

    def _failed_for_good(self, why: str, *, permanent: bool = False) -> None:
        self._failures.end(Failure(why, permanent=permanent, attempt=self.attempt, at_ms=self._clock.now_ms()))

    def _all_done(self, ending: str | None) -> None:
        """The final epoch is committed everywhere."""
        if ending == "input-ended":
            self._wind_down(Status.FINISHED)
        elif self._rescales.wanted is not None and (self._stop_asked is None or (self._stop_asked and ending == "stop")):
            # A job that is to be drained as well is drained when it runs again.
            self.status = Status.RESCALING
            self._deadline_ms = self._clock.monotonic_ms()
            self._let_go(self._deadline_ms, cancel=False)
        else:
            self._wind_down(Status.STOPPED)

    def _wind_down(self, final: Status) -> None:
        self._final = final
        self._job_over(final.value, cancel=final is Status.CANCELLED)
        self._let_go(self._clock.monotonic_ms(), cancel=final not in (Status.FINISHED, Status.STOPPED))

    def _job_over(self, how: str, *, cancel: bool) -> None:
        """What was asked for and never will be is told so."""
        self._desk.on_job_over(f"the job {self._settings.name!r} has {_PAST[how]}", cancel=cancel)
        self._rescales.give_up(f"it has {_PAST[how]} before")

    def _let_go(self, now_ms: int, *, cancel: bool = True) -> None:
        self.epochs.attempt_over()
        if self.attempts and self.attempts[-1].ended_ms is None:
            self.attempts[-1] = replace(self.attempts[-1], ended_ms=self._clock.now_ms())
        self._coordinator = None
        self._desk.on_attempt_over()
        self._gone_by_ms = now_ms + GONE_TIMEOUT_MS
        self._tell_all(Shutdown("the attempt is over"))
        if self._deployment is not None and cancel:
            self._deployment.cancel()

    def _wait_until_gone(self, now_ms: int, gone: bool) -> None:
        assert self._gone_by_ms is not None
        if not gone and now_ms < self._gone_by_ms:
            return
        if self.attempts and self.attempts[-1].gone_ms is None:
            self.attempts[-1] = replace(self.attempts[-1], gone_ms=self._clock.now_ms())
        if self._final is not None:
            if self._desk.copying and self._final is not Status.CANCELLED:
                return      # the job is over when its savepoints are
            self.status = self._final
            self._gone_by_ms = None
        elif self._deadline_ms is not None and now_ms >= self._deadline_ms:
            if not gone and self._deployment is not None:
                self._deployment.cancel()
            self._gone_by_ms = None
            self._deployment = None
            self._deadline_ms = None
            self.start()

    def _check_heartbeats(self, now_ms: int) -> None:
        timeout_ms = self._settings.tuning.heartbeat_timeout_ms
        silent = [slot for slot, heard_ms in self._heard_ms.items() if now_ms - heard_ms > timeout_ms]
        if silent:
            self._attempt_failed(Failure(f"slots {silent} said nothing for {timeout_ms} ms", silent[0]))

    def _tell_all(self, message: Message) -> None:
        for slot in self._addresses:
            self._links.send(slot, message)


_PAST = {"finished": "finished", "stopped": "stopped", "cancelled": "been cancelled", "failed": "failed"}


def _forget(_: Any, error: BaseException | None) -> None:
    """Deleting failed, or this attempt was fenced off meanwhile: the next attempt's sweep finds what is left."""
