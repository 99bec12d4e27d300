"""The epochs of the attempt that runs: the shell around protocol/epoch_coordinator.py.

This module carries out what the epoch coordinator decides: it sends messages to slots, creates manifests and releases
snapshots that aren't needed any more. Store operations go to the background, which is first in, first out. Not here: when an
attempt begins and ends (coordinator.py), and savepoints (savepoints.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tidegate.control.background import Background
from tidegate.control.clock import Clock
from tidegate.control.failing import described, is_final
from tidegate.control.messages import Abort, Complete, EndInput, Trigger
from tidegate.control.settings import JobSettings
from tidegate.dataflow.plan import Plan
from tidegate.driver.attempts import NO_ORIGIN, Opened
from tidegate.driver.batches import Batches
from tidegate.driver.committing import Commits
from tidegate.driver.job_log import JobLog
from tidegate.driver.reports import EpochReport, EpochReports, Failure
from tidegate.driver.savepoints import SavepointRequests
from tidegate.errors import FencedOff
from tidegate.protocol import epoch_coordinator
from tidegate.protocol.epoch_coordinator import (
    CreateManifest,
    Discard,
    Effect,
    EpochCoordinator,
    Event,
    FailJob,
    ManifestCreated,
    ManifestFailed,
    NotifyAborted,
    NotifyComplete,
    ReleaseSnapshots,
    SnapshotAcknowledged,
    SnapshotAdvanced,
    SnapshotRequested,
    StopRequested,
    TimePassed,
    TriggerEpoch,
)
from tidegate.protocol.ids import SubtaskId
from tidegate.snapshots.catalog import SnapshotCatalog
from tidegate.snapshots.manifest import Manifest, OperatorEntry
from tidegate.snapshots.stats import EpochStats, SubtaskStats
from tidegate.store.layout import parse_state_file_name

if TYPE_CHECKING:
    from tidegate.driver.coordinator import Coordinator


class Epochs:
    """The epochs of one job. `reports` has the newest ones; `newest` is the newest complete epoch, None if there is none.
    `attempt` sends their messages, and is told what they mean for it."""

    def __init__(
        self,
        *,
        attempt: Coordinator,
        settings: JobSettings,
        catalog: SnapshotCatalog,
        background: Background,
        copies: Background,
        clock: Clock,
        want_full: Callable[[], None],
        versions: Mapping[str, str],
        batches: Batches,
        log: JobLog,
    ) -> None:
        self.reports = EpochReports()
        self.newest: int | None = None
        self.next_epoch = 1  # the lowest number that no epoch has had
        self.batches = batches
        self.savepoints = SavepointRequests(
            catalog=catalog, background=copies, clock=clock, want=want_full, release=self._release, log=log
        )
        self.commits = Commits(catalog, background, self.savepoints.on_committed)
        self._attempt = attempt
        self._settings = settings
        self._catalog = catalog
        self._background = background
        self._clock = clock
        self._log = log
        self._versions = dict(versions)
        self._opened = Opened(0, [], NO_ORIGIN, 1)  # none yet
        self._key_group_count = 0
        self._graph = ""
        self._unreleased: set[int] = set()  # epochs whose release has failed; they are released with the next ones
        self._superseded: list[int] = []  # epochs of a micro-batch that runs again; released when it is complete
        self._swept_for = 0  # the last attempt that has swept a second time
        self._coordinator: EpochCoordinator | None = None
        self._sources: frozenset[SubtaskId] = frozenset()

    @property
    def running(self) -> bool:
        return self._coordinator is not None

    def open(self, opened: Opened) -> None:
        """Begin an attempt that was claimed."""
        self._opened, self._coordinator = opened, None
        self._unreleased = set()  # they are among those of the attempt
        self._superseded = opened.superseded
        self.next_epoch = max(self.next_epoch, opened.next_epoch)
        self.newest = opened.origin.epoch

    def run(self, plan: Plan, graph: str) -> None:
        """Begin epochs: all slots of the attempt are ready. `graph` is the description of the plan for savepoints."""
        subtasks = frozenset(SubtaskId(vertex.id, index) for vertex in plan.vertices for index in range(vertex.parallelism))
        heads = {loop.head_vertex for loop in plan.loops}
        self._sources = frozenset(each for each in subtasks if plan.vertices[each.vertex].first.source is not None)
        self._key_group_count, self._graph = plan.key_group_count, graph
        self._coordinator = EpochCoordinator(
            subtasks=subtasks,
            sources=self._sources,
            enders=self._sources | {each for each in subtasks if each.vertex in heads},  # those that report the end of input
            settings=self._settings.snapshots.coordinator_settings(),
            next_epoch=self.next_epoch,
            retained=self._opened.epochs,
            now_ms=self._clock.monotonic_ms(),
        )
        self.commits.begin(plan.slots, self._opened.attempt)

    def stop(self) -> None:
        """End the epochs of the attempt."""
        self.reports.attempt_over()
        self._coordinator = None
        self.savepoints.on_attempt_over()

    def tick(self, now_ms: int) -> None:
        """Look at the clock. Called while the attempt runs."""
        self.feed(TimePassed(now_ms))
        self.batches.tick(now_ms)
        if self.running and self.batches.wants_end():
            is_job = self.batches.current is None
            self.feed(StopRequested(self._settings.drains) if is_job else SnapshotRequested())

    def on_writing(self, slot: int, epoch: int, count: int) -> None:
        """Take a slot's report of how much of an epoch's snapshot it has written."""
        if self.reports and self.reports[-1].epoch == epoch:
            self.feed(SnapshotAdvanced(epoch))
            self.reports[-1].written[slot] = count
            self._log.writing(self.reports[-1], self._clock.monotonic_ms())

    def want_full(self) -> None:
        """Ask for a full epoch, for a savepoint. The attempt runs."""
        assert self._coordinator is not None
        if self._coordinator.active_epoch is not None and self.reports[-1].ending is not None:
            self.savepoints.on_triggered(self.reports[-1].epoch)  # the final epoch, which is a full one
        else:
            self.feed(SnapshotRequested(full=True))

    def acknowledge(
        self, subtask: SubtaskId, epoch: int, operators: Mapping[str, OperatorEntry], stats: SubtaskStats
    ) -> None:
        self.reports.acknowledged(epoch, str(subtask), stats)
        self.feed(SnapshotAcknowledged(subtask, epoch, operators))

    def feed(self, event: Event) -> None:
        """Give an event to the epoch coordinator, and carry out its effects. Do nothing if the attempt doesn't run."""
        if self._coordinator is None:
            return
        for effect in self._coordinator.handle(event):
            self._execute(effect)
        if self._coordinator is not None:
            self.next_epoch = self._coordinator.next_epoch

    def _execute(self, effect: Effect) -> None:
        match effect:
            case TriggerEpoch(epoch, ending, full, base):
                name = None if ending is None else ending.value
                self.reports.triggered(EpochReport(epoch, self._opened.attempt, self._clock.now_ms(), name, full))
                if full:
                    self.savepoints.on_triggered(epoch)
                self._attempt.tell_all(Trigger(epoch, name, full, base))
            case epoch_coordinator.EndInput():
                self._attempt.tell_all(EndInput())
            case CreateManifest(epoch, payloads):
                manifest = self._manifest(epoch, payloads)
                self._background.submit(
                    partial(self._catalog.commit, manifest), partial(self._manifest_created, self._opened.attempt, manifest)
                )
            case NotifyComplete(epoch, ending):
                self.reports.of(epoch).completed_ms = self._clock.now_ms()
                self._log.completed(self.reports.of(epoch), self._clock.monotonic_ms())
                self.newest = epoch
                self._attempt.tell_all(Complete(epoch, None if ending is None else ending.value))
                self._release(self._superseded)
                self._superseded = []
                self.batches.on_complete(self.reports.of(epoch))
                self._attempt.completed(epoch, final=ending is not None)
                if self._swept_for < self._opened.attempt:
                    # Slots of older attempts may have written files after the sweep that this attempt began with.
                    self._swept_for = self._opened.attempt
                    self._background.submit(partial(self._catalog.sweep, self._opened.attempt), self._deleted)
            case NotifyAborted(epoch, reason, message):
                self.reports.of(epoch).aborted = f"{reason.value}: {message}"
                self._log.aborted(self.reports.of(epoch), self._clock.now_ms())
                self.savepoints.on_aborted(epoch)
                self.batches.on_aborted(f"{reason.value}: {message}")
                self._attempt.tell_all(Abort(epoch))
                self._attempt.aborted(epoch)
            case ReleaseSnapshots(epochs):
                self._release(epochs)
            case Discard(payloads):
                names = [
                    file.name
                    for operators in payloads
                    for entry in operators.values()
                    for piece in entry.pieces
                    for file in piece.files
                ]
                self._background.submit(partial(self._catalog.discard, names, attempt=self._opened.attempt), self._deleted)
            case FailJob(_, message):
                self._attempt.failed(Failure(f"too many snapshots failed in a row: {message}"))

    def _release(self, epochs: Collection[int]) -> None:
        """Release all but those that a savepoint is being copied from, which are released later."""
        free = self.savepoints.releasable({*epochs, *self._unreleased})
        if free:
            self._unreleased.difference_update(free)
            retire = partial(self._catalog.retire, free, attempt=self._opened.attempt)
            self._background.submit(retire, partial(self._released, self._opened.attempt, free))

    def _released(self, attempt: int, epochs: Collection[int], _: Any, error: BaseException | None) -> None:
        if error is not None and attempt == self._opened.attempt:
            self._unreleased.update(epochs)
        self._deleted(_, error)

    def _deleted(self, _: Any, error: BaseException | None) -> None:
        """Log an error. The next attempt's sweep deletes what is left."""
        self._log.not_deleted(error, self._clock.monotonic_ms())

    def _manifest(self, epoch: int, payloads: Mapping[SubtaskId, Mapping[str, OperatorEntry]]) -> Manifest:
        operators, origin = operators_in(payloads), self._opened.origin
        report = self.reports.of(epoch)
        report.bytes = sum(file.bytes for entry in operators.values() for piece in entry.pieces for file in piece.files)
        assert origin.is_own or written_by(self._opened.attempt, operators), "what the job began with may be deleted"
        return Manifest(
            job=self._settings.name,
            epoch=epoch,
            attempt=self._opened.attempt,
            created_ms=self._clock.now_ms(),
            key_group_count=self._key_group_count,
            ending=report.ending,
            operators=operators,
            restored_from=origin.restored_from,
            micro_batch=self.batches.current,
            stats=EpochStats.over(
                report.stats.values(), triggered_ms=report.triggered_ms, bytes=report.bytes, subtasks=report.stats
            ),
        )

    def _manifest_created(self, attempt: int, manifest: Manifest, _: None, error: BaseException | None) -> None:
        if attempt != self._opened.attempt or self._attempt.over:
            return
        if error is None:
            self.commits.on_complete(manifest)
            self.savepoints.on_complete(manifest, graph=self._graph, versions=self._versions)
            self.feed(ManifestCreated(manifest.epoch))
        elif isinstance(error, FencedOff):
            # Another driver runs this job now. A restart would fence that one off, which would fence off this one.
            self._attempt.failed_for_good(f"{type(error).__name__}: {error}", permanent=True)
        elif is_final(error):
            self._attempt.failed_for_good(described(error), permanent=True)
        else:
            self.feed(ManifestFailed(manifest.epoch, f"{type(error).__name__}: {error}"))


def operators_in(acknowledged: Mapping[SubtaskId, Mapping[str, OperatorEntry]]) -> dict[str, OperatorEntry]:
    """Return what the manifest lists: all subtasks' pieces, operator by operator."""
    operators: dict[str, OperatorEntry] = {}
    for _, entries in sorted(acknowledged.items()):
        for name, entry in entries.items():
            earlier = operators[name].pieces if name in operators else ()
            operators[name] = replace(entry, pieces=(*earlier, *entry.pieces))
    return operators


def written_by(attempt: int, operators: Mapping[str, OperatorEntry]) -> bool:
    """Whether no file's name is of another attempt."""
    parsed = (
        parse_state_file_name(file.name) for entry in operators.values() for piece in entry.pieces for file in piece.files
    )
    return all(name is None or name.attempt == attempt for name in parsed)
