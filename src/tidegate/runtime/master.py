"""The master: deploys attempts, drives the coordinator, and rolls back.

It is the shell around protocol/coordinator.py on the Spark driver. Like the slot it does no I/O of its own: links to
slots, the deployer, the store's catalogue, the clock and a background are given. All its methods run in one thread.

The life of an attempt: claim a number in the store (which fences every older one) and choose the newest complete
snapshot → deploy → all slots register → `Deploy` → all are ready → `Start` → epochs … → it fails, or ends. After a
failure the restart strategy decides; the next attempt begins only when the old deployment is gone and every store
operation before it is done (the background is first in, first out), so that it sees whether the last manifest was
created.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from tidegate.dataflow.operators.source import SourceSpec
from tidegate.dataflow.plan import Plan
from tidegate.errors import CorruptFile, FencedOff, StoreError
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
    SourceEnded,
    StopRequested,
    TimePassed,
    TriggerEpoch,
)
from tidegate.protocol.ids import SubtaskId
from tidegate.protocol.recovery import newest_complete
from tidegate.protocol.restart import GiveUp, decide
from tidegate.runtime.background import Background
from tidegate.runtime.clock import Clock
from tidegate.runtime.messages import (
    Abort,
    Acknowledge,
    Complete,
    Decline,
    Delivered,
    Deploy,
    Done,
    Failed,
    Heartbeat,
    Message,
    Ready,
    Register,
    Shutdown,
    SourceDone,
    Start,
    Trigger,
)
from tidegate.runtime.reports import AttemptReport, EpochReport, Failure, Status
from tidegate.runtime.restoring import check_restorable
from tidegate.runtime.settings import JobSettings
from tidegate.store.catalog import SnapshotCatalog
from tidegate.store.manifest import Manifest, OperatorEntry, PieceEntry, StateEntry

# How long a cancelled deployment may take to end before the next attempt starts without waiting for it.
GONE_TIMEOUT_MS = 60_000


class Deployment(Protocol):
    """Slots that were asked for. They connect by themselves."""

    def ended(self) -> str | None:
        """None while it runs; a text that says how it ended once all its slots are gone."""

    def cancel(self) -> None:
        """Ends it soon, without waiting."""


class Deployer(Protocol):
    def deploy(self, attempt: int) -> Deployment: ...


class Links(Protocol):
    """Connections to the slots of the present attempt; those of older ones are refused."""

    def expect(self, attempt: int) -> None:
        """From now on only this attempt's slots are let in; links of others are dropped."""

    def send(self, slot: int, message: Message) -> None:
        """To a slot that has registered. A lost link swallows it; `Master.on_lost` follows."""


class Master:
    def __init__(self, *, plan: Plan, settings: JobSettings, catalog: SnapshotCatalog, deployer: Deployer, links: Links,
                 clock: Clock, background: Background) -> None:
        self.status = Status.STARTING
        self.attempt = 0
        self.epochs: list[EpochReport] = []
        self.attempts: list[AttemptReport] = []
        self.failures: list[Failure] = []
        self.metrics: dict[str, dict[str, Any]] = {}
        self.delivered: dict[str, list[str]] = {}
        self.on_delivered: Callable[[str, str], bool] = lambda sink, committable: False    # whether it took it
        self._plan = plan
        self._settings = settings
        self._catalog = catalog
        self._deployer = deployer
        self._links = links
        self._clock = clock
        self._background = background
        self._subtasks = frozenset(SubtaskId(vertex.id, index) for vertex in plan.vertices
                                   for index in range(vertex.parallelism))
        self._sources = frozenset(subtask for subtask in self._subtasks
                                  if isinstance(plan.vertices[subtask.vertex].head.spec, SourceSpec))
        self._deployment: Deployment | None = None
        self._coordinator: Coordinator | None = None
        self._addresses: dict[int, tuple[str, int]] = {}
        self._heard_ms: dict[int, int] = {}
        self._ready: set[int] = set()
        self._done: set[int] = set()
        self._restored: Manifest | None = None
        self._retained: list[int] = []
        self._swept_for = 0                             # the attempt that has swept a second time
        self._next_epoch = 1
        self._deadline_ms: int | None = None            # of the deployment, or of the pause before the next attempt
        self._gone_by_ms: int | None = None
        self._opening = False                           # an attempt is being opened; what links still say is of the last
        self._final: Status | None = None               # what the job becomes once the deployment is gone
        self._stop_asked: bool | None = None            # the drain flag of a stop that came before the job ran
        self._failed_at_ms: list[int] = []

    # What the user asks for.

    def start(self) -> None:
        self._opening = True
        self._background.submit(self._open_attempt, self._attempt_opened)

    def stop(self, *, drain: bool) -> None:
        self._stop_asked = drain
        if self._coordinator is not None:
            self._feed(StopRequested(drain))

    def snapshot(self) -> None:
        if self._coordinator is not None:
            self._feed(SnapshotRequested())

    def cancel(self) -> None:
        if not self.status.terminal and self._final is None:
            self._wind_down(Status.CANCELLED)

    # What the world tells.

    def on_message(self, slot: int, message: Message) -> None:
        if not self._listens:
            return
        self._heard_ms[slot] = self._clock.monotonic_ms()
        match message:
            case Register(_, host, port, pid):
                self._on_register(slot, (host, port), pid)
            case Ready():
                self._on_ready(slot)
            case Acknowledge(vertex, subtask, epoch, operators, stats):
                self._on_acknowledge(SubtaskId(vertex, subtask), epoch, operators, stats)
            case Decline(vertex, subtask, epoch, text):
                self._feed(SnapshotDeclined(SubtaskId(vertex, subtask), epoch, AbortReason.DECLINED, text))
            case SourceDone(vertex, subtask):
                self._feed(SourceEnded(SubtaskId(vertex, subtask)))
            case Heartbeat(_, metrics):
                self.metrics.update(metrics)
            case Delivered(sink, committable):
                if not self.on_delivered(sink, committable):
                    self.delivered.setdefault(sink, []).append(committable)
            case Done():
                self._done.add(slot)
                if len(self._done) == self._plan.slots:
                    report = self.epochs[-1]
                    self._wind_down(Status.FINISHED if report.ending == "input-ended" else Status.STOPPED)
            case Failed(_, text, operator, user_traceback, record, permanent):
                self._attempt_failed(Failure(text, slot, operator, user_traceback, record, permanent))
            case _:
                self._attempt_failed(Failure(f"slot {slot} sent {type(message).__name__}, which only the master may", slot))

    def on_lost(self, slot: int, reason: str) -> None:
        """The link to a slot of the present attempt is gone."""
        if self._listens:
            self._attempt_failed(Failure(f"slot {slot} was lost: {reason}", slot))

    @property
    def _listens(self) -> bool:
        """Whether what slots say, and their loss, is of the present attempt."""
        return self._final is None and self._gone_by_ms is None and not self._opening and not self.status.terminal

    def crashed(self, error: BaseException) -> None:
        """The loop around this master can't go on, because of a bug as a rule."""
        self.failures.append(Failure("".join(traceback.format_exception(error)), attempt=self.attempt,
                                     at_ms=self._clock.now_ms()))
        try:
            if self._deployment is not None:
                self._deployment.cancel()
        finally:
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
            self._attempt_failed(Failure(f"the slots ended: {ended}"))
        elif self.status is Status.RUNNING:
            self._check_heartbeats(now_ms)
            if self._coordinator is not None:
                self._feed(TimePassed(now_ms))
        elif self._deadline_ms is not None and now_ms >= self._deadline_ms:
            missing = sorted(set(range(self._plan.slots)) - self._ready)
            self._attempt_failed(Failure(
                f"slots {missing} were not ready within {self._settings.tuning.deploy_timeout_ms} ms. A job needs "
                f"{self._plan.slots} task slots of Spark at the same time: are they there and free?"))

    # An attempt begins.

    def _open_attempt(self) -> tuple[int, list[int], Manifest | None, int]:
        """In the background: fences older attempts and finds where to go on."""
        if self._catalog.is_superseded():
            # To claim the next number would be to fence the other driver in turn, and so on.
            raise FencedOff(f"attempt {self.attempt} is over: another driver runs this job now")
        attempt = self._catalog.claim_attempt()
        epochs = self._catalog.epochs()
        newest = newest_complete(epochs)
        manifest = None if newest is None else self._catalog.load(newest)
        if manifest is not None:
            states = {node.name: [(info.name, info.kind.value, info.schema) for info in node.spec.states(node)]
                      for vertex in self._plan.vertices for node in vertex.nodes if node.spec.states(node)}
            check_restorable(manifest, operators=states, key_group_count=self._plan.key_group_count)
        highest = max([self._catalog.highest_epoch_seen(), *epochs], default=0)
        self._catalog.sweep(attempt)
        return attempt, epochs, manifest, highest + 1

    def _attempt_opened(self, opened: tuple[int, list[int], Manifest | None, int] | None,
                        error: BaseException | None) -> None:
        self._opening = False
        if self._final is not None or self.status.terminal:
            return
        if opened is None:
            failure = Failure(f"{type(error).__name__}: {error}", at_ms=self._clock.now_ms())
            if self.attempts and isinstance(error, StoreError) and not isinstance(error, CorruptFile):
                self._attempt_failed(failure)       # it worked before: the store may come back
                return
            self.failures.append(failure)
            self.status = Status.FAILED
            return
        self.attempt, self._retained, self._restored, next_epoch = opened
        self._next_epoch = max(self._next_epoch, next_epoch)
        self._addresses, self._ready, self._done, self._heard_ms = {}, set(), set(), {}
        self._coordinator = None
        self._links.expect(self.attempt)
        now_ms = self._clock.monotonic_ms()
        self._deadline_ms = now_ms + self._settings.tuning.deploy_timeout_ms
        self.attempts.append(AttemptReport(self.attempt, self._clock.now_ms(),
                                           None if self._restored is None else self._restored.epoch))
        self._deployment = self._deployer.deploy(self.attempt)

    def _on_register(self, slot: int, address: tuple[str, int], pid: int) -> None:
        self._addresses[slot] = address
        self.attempts[-1].slots[slot] = pid
        if len(self._addresses) == self._plan.slots:
            addresses = [list(self._addresses[index]) for index in range(self._plan.slots)]
            self._tell_all(Deploy(addresses, None if self._restored is None else self._restored.epoch))

    def _on_ready(self, slot: int) -> None:
        self._ready.add(slot)
        if len(self._ready) < self._plan.slots:
            return
        self._coordinator = Coordinator(
            subtasks=self._subtasks, sources=self._sources, settings=self._settings.snapshots.coordinator_settings(),
            next_epoch=self._next_epoch, retained=self._retained, now_ms=self._clock.monotonic_ms())
        self._deadline_ms = None
        self.status = Status.RUNNING
        self.attempts[-1] = replace(self.attempts[-1], running_ms=self._clock.now_ms())
        self._heard_ms = dict.fromkeys(range(self._plan.slots), self._clock.monotonic_ms())
        self._tell_all(Start())
        if self._stop_asked is not None:
            self._feed(StopRequested(self._stop_asked))

    # Epochs.

    def _on_acknowledge(self, subtask: SubtaskId, epoch: int, operators: dict[str, Any], stats: dict[str, Any]) -> None:
        for report in reversed(self.epochs):
            if report.epoch == epoch:
                report.subtasks[str(subtask)] = stats
                break
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
            case TriggerEpoch(epoch, ending):
                name = None if ending is None else ending.value
                self.epochs.append(EpochReport(epoch, self.attempt, now_ms, name))
                self._tell_all(Trigger(epoch, name))
            case CreateManifest(epoch, payloads):
                manifest = self._manifest(epoch, payloads)
                self._background.submit(partial(self._catalog.commit, manifest),
                                        partial(self._manifest_created, self.attempt, manifest))
            case NotifyComplete(epoch, ending):
                self._report(epoch).completed_ms = now_ms
                self._tell_all(Complete(epoch, None if ending is None else ending.value))
                if self._swept_for < self.attempt:
                    # Slots of older attempts may have written files after the sweep that this attempt began with.
                    self._swept_for = self.attempt
                    self._background.submit(partial(self._catalog.sweep, self.attempt), _forget)
            case NotifyAborted(epoch, reason, message):
                self._report(epoch).aborted = f"{reason.value}: {message}"
                self._tell_all(Abort(epoch))
            case ReleaseSnapshots(epochs):
                self._background.submit(partial(self._catalog.release, epochs, attempt=self.attempt), _forget)
            case Discard(payloads):
                names = [file["name"] for payload in payloads for operator in payload.values()
                         for file in operator["piece"]["files"]]
                self._background.submit(partial(self._catalog.discard, names, attempt=self.attempt), _forget)
            case FailJob(_, message):
                self._attempt_failed(Failure(f"too many snapshots failed in a row: {message}"))

    def _manifest(self, epoch: int, payloads: Mapping[SubtaskId, Any]) -> Manifest:
        operators: dict[str, OperatorEntry] = {}
        for _, operators_of in sorted(payloads.items()):
            for name, part in operators_of.items():
                piece = PieceEntry.from_json(part["piece"])
                earlier = operators[name].pieces if name in operators else ()
                operators[name] = OperatorEntry(
                    parallelism=part["parallelism"], pieces=(*earlier, piece),
                    states=tuple(StateEntry.from_json(state) for state in part["states"]))
        report = self._report(epoch)
        report.bytes = sum(file.bytes for entry in operators.values() for piece in entry.pieces for file in piece.files)
        return Manifest(job=self._settings.name, epoch=epoch, attempt=self.attempt, created_ms=self._clock.now_ms(),
                        key_group_count=self._plan.key_group_count, ending=report.ending, operators=operators,
                        stats={"triggered_ms": report.triggered_ms, "bytes": report.bytes, "subtasks": report.subtasks})

    def _manifest_created(self, attempt: int, manifest: Manifest, _: None, error: BaseException | None) -> None:
        if attempt != self.attempt or self._gone_by_ms is not None or self.status.terminal:
            return      # the next attempt finds out from the store
        if error is None:
            self._feed(ManifestCreated(manifest.epoch))
        elif isinstance(error, FencedOff):
            # Another driver runs this job now. To restart would be to fence it in turn, and so on.
            self.failures.append(Failure(f"{type(error).__name__}: {error}", attempt=self.attempt,
                                         at_ms=self._clock.now_ms()))
            self._wind_down(Status.FAILED)
        else:
            self._feed(ManifestFailed(manifest.epoch, f"{type(error).__name__}: {error}"))

    def _report(self, epoch: int) -> EpochReport:
        return next(report for report in reversed(self.epochs) if report.epoch == epoch)

    # An attempt ends.

    def _attempt_failed(self, failure: Failure) -> None:
        now_ms = self._clock.monotonic_ms()
        self.failures.append(replace(failure, attempt=self.attempt, at_ms=self._clock.now_ms()))
        self._failed_at_ms.append(now_ms)
        decision = GiveUp() if failure.permanent else decide(self._settings.restart, self._failed_at_ms, now_ms)
        if isinstance(decision, GiveUp):
            self._wind_down(Status.FAILED)
        else:
            self.status = Status.RESTARTING
            self._deadline_ms = now_ms + decision.delay_ms
            self._let_go(now_ms)

    def _wind_down(self, final: Status) -> None:
        self._final = final
        self._let_go(self._clock.monotonic_ms())

    def _let_go(self, now_ms: int) -> None:
        if self.epochs and self.epochs[-1].completed_ms is None and self.epochs[-1].aborted is None:
            self.epochs[-1].aborted = "the attempt ended"      # whether its manifest exists, the next attempt finds out
        self._coordinator = None
        self._gone_by_ms = now_ms + GONE_TIMEOUT_MS
        self._tell_all(Shutdown("the attempt is over"))
        if self._deployment is not None and self._final not in (Status.FINISHED, Status.STOPPED):
            self._deployment.cancel()

    def _wait_until_gone(self, now_ms: int, gone: bool) -> None:
        assert self._gone_by_ms is not None
        if not gone and now_ms < self._gone_by_ms:
            return
        if self._final is not None:
            self.status = self._final
            self._gone_by_ms = None
        elif self._deadline_ms is not None and now_ms >= self._deadline_ms:
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


def _forget(_: Any, error: BaseException | None) -> None:
    """Deleting failed, or this attempt was fenced off meanwhile: the next attempt's sweep finds what is left."""
