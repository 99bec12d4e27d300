"""The coordinator: deploys attempts, receives their slots' messages, and rolls back.

Like the slot it does no I/O of its own: links to slots, the deployer, the store's catalogue, the clock and a background are
given. All its methods run in one thread. epochs.py drives the epochs.

The life of an attempt: claim a number in the store, which fences every older attempt, and choose the newest complete
snapshot → deploy → all slots register → `Deploy` → all are ready → `Start` → epochs … → the attempt fails or ends. After a
failure the restart strategy decides what follows. The next attempt begins only when the old deployment is gone and all
earlier store operations are done (the background is first in, first out), so it sees whether the last manifest was created.

`rescale` changes the plan: the running attempt is stopped with a final snapshot, and the next one resumes from it with the
new plan. If the attempt fails first, the next one has the new plan as well.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from tidegate.control.background import Background
from tidegate.control.clock import Clock
from tidegate.control.failing import described, is_final
from tidegate.control.messages import (
    Acknowledge,
    Committed,
    Counted,
    Decline,
    Delivered,
    Deploy,
    Done,
    Failed,
    Heartbeat,
    InputEnded,
    InputRead,
    Message,
    Noticed,
    Ready,
    Register,
    RestoreStats,
    Restoring,
    Shutdown,
    Start,
    SubtaskMetrics,
    TimeReached,
    Writing,
)
from tidegate.control.settings import JobSettings
from tidegate.dataflow.plan import Plan
from tidegate.driver.attempts import NO_ORIGIN, Opened, Restore, named_snapshot, open_attempt
from tidegate.driver.batches import BatchEnd, Batches
from tidegate.driver.claiming import Claim
from tidegate.driver.deployment import Deployer, Deployment, Layout, Links, Rescaling
from tidegate.driver.epochs import Epochs
from tidegate.driver.failures import FailureLog
from tidegate.driver.job_log import JobLog
from tidegate.driver.reports import KEPT_ATTEMPTS, AttemptReport, Failure, SlotReport, Status, failure_of, slots_of
from tidegate.driver.rescaling import Rescales
from tidegate.driver.roster import Roster
from tidegate.driver.savepoints import SavepointOrder
from tidegate.driver.time_keeping import TimeKeeping
from tidegate.errors import CorruptFile, JobError, NotFound, StoreError
from tidegate.logs import Speak, keep_silent
from tidegate.protocol import epoch_coordinator
from tidegate.protocol.epoch_coordinator import AbortReason, SnapshotDeclined, SnapshotRequested, StopRequested
from tidegate.protocol.ids import SubtaskId
from tidegate.protocol.restart import GiveUp, RestartAfter
from tidegate.snapshots.catalog import SnapshotCatalog
from tidegate.snapshots.manifest import MicroBatch

# How long a cancelled deployment may take to end before the next attempt starts without waiting for it.
GONE_TIMEOUT_MS = 60_000


class Coordinator:
    """Runs one job. `copies` is the background that copies savepoints, which may take long; by default it is `background`.
    `speak` logs. `noticed` has the slots' notices that were logged before."""

    def __init__(
        self,
        *,
        plan: Plan,
        settings: JobSettings,
        catalog: SnapshotCatalog,
        deployer: Deployer,
        links: Links,
        clock: Clock,
        background: Background,
        copies: Background | None = None,
        restore: Restore | None = None,
        graph: str = "",
        versions: Mapping[str, str] | None = None,
        micro_batch: MicroBatch | None = None,
        batch_ended: Callable[[BatchEnd], None] = lambda end: None,
        speak: Speak = keep_silent,
        noticed: set[str] | None = None,
    ) -> None:
        self.status = Status.STARTING
        self.attempt = 0
        self.attempts: list[AttemptReport] = []
        self.advances = 0  # how often slots have reported that a restore or a snapshot gets further
        self.metrics: dict[str, SubtaskMetrics] = {}
        self.delivered: dict[str, list[str]] = {}
        self.takers: Mapping[str, Callable[[str], None]] = {}  # of sinks whose output isn't for `delivered`
        self._noticed = set() if noticed is None else noticed  # logged before
        self._log = JobLog(settings, speak)
        self._failures = FailureLog(settings.restart, at_the_end=settings.at_the_end, log=self._log)
        self.failures = self._failures.failures
        self._layout = Layout(plan, deployer, graph)
        self._settings = settings
        self._catalog = catalog
        self._links = links
        self._clock = clock
        self._background = background
        self._copies = copies or background
        self._restore = restore or Restore()
        self._epochs = Epochs(
            attempt=self,
            settings=settings,
            catalog=catalog,
            background=background,
            copies=self._copies,
            clock=clock,
            want_full=self._want_full_epoch,
            versions=versions or {},
            batches=Batches(micro_batch, plan=plan, tell_all=self.tell_all, ended=batch_ended),
            log=self._log,
        )
        self.epochs = self._epochs.reports
        self.savepoints = self._epochs.savepoints
        self._rescales = Rescales()
        self._times = TimeKeeping(links)
        self._has_own = False  # snapshots of its own, so that what it began with doesn't matter any more
        self._claim = Claim(self._restore, catalog=catalog, background=self._copies)
        self._deployment: Deployment | None = None
        self._roster = Roster(0)
        self._origin = NO_ORIGIN
        self._deadline_ms: int | None = None  # the end of the pause before the next attempt
        self._gone_by_ms: int | None = None
        self._opening = False  # an attempt is being opened; messages that still arrive are from the one before
        self._final: Status | None = None  # what the job becomes once the deployment is gone
        self._snapshot_asked = False  # before the job ran
        self._stop_asked: bool | None = None  # the drain flag of a stop that came before the job ran

    @property
    def plan(self) -> Plan:
        """The plan of the present attempt, or of the one that is being opened."""
        return self._layout.plan

    @property
    def slots(self) -> list[SlotReport]:
        """The slots of the present attempt that have registered; none once it has ended."""
        is_over = self.status.terminal or not self.attempts or self.attempts[-1].ended_ms is not None
        return [] if is_over else slots_of(self.attempts[-1], self.plan)

    # Requests of the user.

    def start(self) -> None:
        layout = self._rescales.begin(self._layout)
        if layout is not self._layout:
            self._layout, self.metrics = layout, {}
        self._opening, self._roster = True, Roster(self.plan.slots)
        self._background.submit(self._open_attempt, self._attempt_opened)

    def stop(self, *, drain: bool, savepoint: SavepointOrder | None = None) -> None:
        """End the job with a final snapshot, and a savepoint of it if one is ordered. A job that is restarting has nothing
        that could take a final snapshot, so it ends at once, at its newest complete snapshot."""
        if savepoint is not None:
            self.savepoints.take(savepoint, partial(self._stop_with_savepoint, drain, savepoint))
            return
        if self.status is Status.RESTARTING and self._final is None and not drain:
            self._failures.stopped(self._epochs.newest)
            self._end_job(Status.FAILED)
            return
        self._stop_asked = drain
        self._epochs.feed(StopRequested(drain))

    def snapshot(self) -> None:
        """Take a snapshot, as soon as the job runs."""
        self._snapshot_asked = not self._epochs.running
        self._epochs.feed(SnapshotRequested())

    def begin_batch(self, batch: MicroBatch) -> None:
        """Begin a micro-batch: the slots are back."""
        self._epochs.batches.begin(batch)
        self._roster.all_heard(self._clock.monotonic_ms())

    def rescale(self, rescaling: Rescaling) -> None:
        if self._rescales.ask(rescaling, at_its_end=self._final is not None or self.status.terminal):
            self._log.rescaling(self.plan.slots, rescaling.layout.plan.slots)
            self._epochs.feed(StopRequested(drain=False))

    def cancel(self) -> None:
        if not self.status.terminal and self._final is None:
            self._end_job(Status.CANCELLED)

    def _stop_with_savepoint(self, drain: bool, order: SavepointOrder) -> None:
        if self.status is Status.RESTARTING:  # it failed after the request
            self.savepoints.withdraw(
                order,
                JobError(
                    f"job {self._settings.name!r} was not stopped: it failed before it could take the "
                    f"savepoint, and is restarting. Stop it again when it is running"
                ),
            )
            return
        self.stop(drain=drain)
        if self.savepoints.wanted:
            self._want_full_epoch()

    def _want_full_epoch(self) -> None:
        """Ask for a full epoch, for a savepoint. If the job isn't running, this is called again when it is."""
        if self._epochs.running and not self._stop_asked:  # a drain ends with a full epoch anyway
            self._epochs.want_full()

    # Messages of slots, lost links, time.

    def on_message(self, slot: int, message: Message) -> None:
        if not self._listens:
            return
        self._roster.heard_ms[slot] = self._clock.monotonic_ms()
        match message:
            case Register(_, host, port, pid, machine):
                self.attempts[-1].hosts[slot] = machine or host
                self._on_register(slot, (host, port), pid)
            case Restoring(_, count):
                self.advances += 1
                self.attempts[-1].restored[slot] = RestoreStats(count, self._clock.now_ms() - self.attempts[-1].claimed_ms)
                self._log.restoring(self.attempts[-1], self._clock.monotonic_ms())
            case Writing(_, epoch, count):
                self.advances += 1
                self._epochs.on_writing(slot, epoch, count)
            case Ready(_, restored):
                if restored is not None:
                    self.attempts[-1].restored[slot] = restored
                self._on_ready(slot)
            case Acknowledge(vertex, subtask, epoch, operators, stats):
                self._epochs.acknowledge(SubtaskId(vertex, subtask), epoch, operators, stats)
            case Decline(vertex, subtask, epoch, text):
                self._epochs.feed(SnapshotDeclined(SubtaskId(vertex, subtask), epoch, AbortReason.DECLINED, text))
            case InputEnded(vertex, subtask):
                self._epochs.feed(epoch_coordinator.InputEnded(SubtaskId(vertex, subtask)))
            case InputRead():
                self._epochs.batches.on_input_read(slot)
            case Counted():
                self._epochs.batches.on_counted(slot, message, self._clock.monotonic_ms())
            case Heartbeat(_, metrics, memory_bytes):
                self.metrics.update(metrics)
                self.attempts[-1].memory[slot] = memory_bytes
                if self.attempts[-1].first_record_ms is None and any(of.records_in for of in metrics.values()):
                    self.attempts[-1] = replace(self.attempts[-1], first_record_ms=self._clock.now_ms())
            case Noticed(_, text):
                if text not in self._noticed:
                    self._noticed.add(text)
                    self._log.noticed(text)
            case TimeReached(_, reached):
                self._times.on_reached(slot, reached)
            case Delivered(sink, committable):
                take = self.takers.get(sink) or self.delivered.setdefault(sink, []).append
                take(committable)
            case Committed(_, epoch):
                self._epochs.commits.on_committed(slot, epoch)
            case Done():
                self._epochs.commits.on_committed(slot, self.epochs[-1].epoch)
                self._roster.done.add(slot)
                if self._roster.is_full(self._roster.done):
                    self._all_done(self.epochs[-1].ending)
            case Failed():
                self.failed(failure_of(message, where=self._name_of(slot)))
            case _:
                self.failed(Failure(f"slot {slot} sent {type(message).__name__}, which only the coordinator sends", slot))

    def on_lost(self, slot: int, reason: str) -> None:
        """Fail the attempt: the link to a slot is gone."""
        if self._listens:
            self.failed(Failure(f"{self._name_of(slot)} was lost: {reason}", slot))

    def _name_of(self, slot: int) -> str:
        """Return the slot's name with its host and process."""
        return next((str(each) for each in self.slots if each.slot == slot), f"slot {slot}")

    @property
    def _listens(self) -> bool:
        """Whether messages and lost links are of the present attempt."""
        return self._final is None and self._gone_by_ms is None and not self._opening and not self.status.terminal

    def crashed(self, error: BaseException) -> None:
        """Fail the job: the loop around this coordinator raised an error, usually because of a bug."""
        try:
            self._failed_for_good("".join(traceback.format_exception(error)))
            if self._deployment is not None:
                self._deployment.cancel()
        finally:
            self.status = Status.FAILED
            self._answer_requests(Status.FAILED, cancel=True)

    def tick(self) -> None:
        """Look at the clock and at the deployment."""
        if self.status.terminal:
            return
        now_ms = self._clock.monotonic_ms()
        ended = None if self._deployment is None else self._deployment.ended()
        if self._gone_by_ms is not None:
            self._wait_until_gone(now_ms, ended is not None or self._deployment is None)
        elif ended is not None:
            self.failed(ended if isinstance(ended, Failure) else Failure(f"the slots ended: {ended}"))
        elif self.status is Status.RUNNING:
            if not self._epochs.batches.parked:
                self._check_heartbeats(now_ms)
            if self._epochs.running:
                wanted = self._rescales.wants_snapshot(now_ms, next_epoch=self._epochs.next_epoch)
                self._epochs.tick(now_ms)
                if wanted:
                    self._epochs.feed(SnapshotRequested())
                if self._epochs.batches.current is None:  # in a query, an epoch ends only where a micro-batch does
                    self.savepoints.look_for_requests(self.attempt)
        elif not self._opening and self.attempts:
            timeout_ms = self._settings.tuning.deploy_timeout_ms
            if (why := self._roster.late(now_ms, timeout_ms, self.attempts[-1].restored)) is not None:
                self.failed(Failure(why))

    # An attempt begins.

    def _open_attempt(self) -> Opened:
        """Claim an attempt. Runs in the background."""
        if self._catalog.is_superseded():
            # Claiming the next number would fence the other driver, which would fence this one, and so on.
            raise self._catalog.taken_over(self.attempt)
        named = None if self._has_own else named_snapshot(self._restore)
        return open_attempt(
            self._catalog,
            named,
            self._restore,
            plan=self.plan,
            drop=self._settings.drop_state,
            micro_batch=self._epochs.batches.current,
        )

    def _attempt_opened(self, opened: Opened | None, error: BaseException | None) -> None:
        self._opening = False
        if self._final is not None or self.status.terminal:
            return
        if opened is None:
            why = "" if error is None else described(error)
            may_come_back = isinstance(error, StoreError) and not isinstance(error, CorruptFile) and not is_final(error)
            if self.attempts and (may_come_back or self._rescales.begun):
                self.failed(Failure(why))  # the store worked before, or the former slots can restore the snapshot
                return
            self._failed_for_good(
                why, permanent=error is not None and (is_final(error) or isinstance(error, CorruptFile | NotFound))
            )
            self._answer_requests(Status.FAILED, cancel=True)
            self.status = Status.FAILED
            return
        self.attempt, self._origin = opened.attempt, opened.origin
        self._epochs.open(opened)
        now_ms = self._clock.monotonic_ms()
        self._roster = Roster(self.plan.slots, now_ms)
        self._links.expect(self.attempt)
        named = None if self._origin.is_own or self._origin.restored_from is None else self._origin.restored_from.path
        self.attempts.append(AttemptReport(self.attempt, self._clock.now_ms(), self._origin.epoch, restored_from=named))
        del self.attempts[:-KEPT_ATTEMPTS]
        self._log.begun(self.attempts[-1], opened.losses, self._epochs.batches.current, now_ms)
        if self._origin.snapshot is not None and self._origin.is_own:
            self._has_own = True
            self._claim.settle(self._origin, self.attempt)
        self._deployment = self._layout.deployer.deploy(self.attempt)

    def _on_register(self, slot: int, address: tuple[str, int], pid: int) -> None:
        self._roster.addresses[slot] = address
        self.attempts[-1].slots[slot] = pid
        if self._roster.is_full(self._roster.addresses):
            addresses = tuple(address for _, address in sorted(self._roster.addresses.items()))
            named = self._origin.named
            self._roster.all_heard(self._clock.monotonic_ms())
            self.tell_all(Deploy(addresses, self._origin.epoch, None if named is None else named.address))

    def _on_ready(self, slot: int) -> None:
        self._roster.ready.add(slot)
        if not self._roster.is_full(self._roster.ready):
            return
        self._epochs.run(self.plan, self._layout.graph)
        self._times.begin(self.plan)
        self.status = Status.RUNNING
        self.attempts[-1] = replace(self.attempts[-1], running_ms=self._clock.now_ms())
        self._roster.begin_to_run(self._clock.monotonic_ms())
        self._log.runs(self.attempts[-1], self.slots)
        self.tell_all(Start())
        self._rescales.on_ready(self._layout, self._clock.monotonic_ms())
        if self._stop_asked is not None or self._rescales.wanted is not None:
            self._epochs.feed(StopRequested(bool(self._stop_asked)))
        if self.savepoints.wanted:
            self._want_full_epoch()
        if self._snapshot_asked:
            self.snapshot()

    # Called by the epochs.

    @property
    def over(self) -> bool:
        """Whether the attempt has ended. The next one finds out from the store whether the last manifest was created."""
        return self._gone_by_ms is not None or self.status.terminal

    def tell_all(self, message: Message) -> None:
        for slot in self._roster.addresses:
            self._links.send(slot, message)

    def completed(self, epoch: int, *, final: bool) -> None:
        """Called when a snapshot is complete and the slots were notified."""
        self._rescales.on_complete(epoch, final=final)
        self._has_own = True
        self._claim.settle(self._origin, self.attempt)

    def aborted(self, epoch: int) -> None:
        self._rescales.on_aborted(epoch, self._clock.monotonic_ms())

    def failed_for_good(self, why: str, *, permanent: bool = False) -> None:
        """End the job: another attempt would fail in the same way."""
        self._failed_for_good(why, permanent=permanent)
        self._end_job(Status.FAILED)

    # An attempt ends.

    def failed(self, failure: Failure) -> None:
        now_ms, epoch = self._clock.monotonic_ms(), self._epochs.newest
        failure = replace(failure, attempt=self.attempt, at_ms=self._clock.now_ms())
        back = self._rescales.on_failed(failure.message)
        if back is not None:
            decision: RestartAfter | GiveUp = self._failures.go_back(failure, slots=back.plan.slots, epoch=epoch)
            self._layout, self.metrics = back, {}
        else:
            decision = self._failures.take(failure, now_ms=now_ms, ran_ms=self._roster.ran_ms(now_ms), epoch=epoch)
        if isinstance(decision, GiveUp):
            self._end_job(Status.FAILED)
        else:
            self.status = Status.RESTARTING
            self._deadline_ms = now_ms + decision.delay_ms
            self._end_attempt(now_ms)

    def _failed_for_good(self, why: str, *, permanent: bool = False) -> None:
        self._failures.end(Failure(why, permanent=permanent, attempt=self.attempt, at_ms=self._clock.now_ms()))

    def _all_done(self, ending: str | None) -> None:
        """End the attempt: the final epoch is committed everywhere."""
        if ending == "input-ended":
            self._end_job(Status.FINISHED)
        elif self._rescales.wanted is not None and (self._stop_asked is None or (self._stop_asked and ending == "stop")):
            # If the job is to be drained as well, that happens when it runs again.
            self.status = Status.RESCALING
            self._deadline_ms = self._clock.monotonic_ms()
            self._end_attempt(self._deadline_ms, cancel=False)
        else:
            self._end_job(Status.STOPPED)

    def _end_job(self, final: Status) -> None:
        self._final = final
        self._answer_requests(final, cancel=final is Status.CANCELLED)
        self._end_attempt(self._clock.monotonic_ms(), cancel=final not in (Status.FINISHED, Status.STOPPED))

    def _answer_requests(self, final: Status, *, cancel: bool) -> None:
        """Answer the requests that can't be met any more. `cancel` ends copies of savepoints, too."""
        how = "been cancelled" if final is Status.CANCELLED else final.value
        self.savepoints.on_job_over(f"the job {self._settings.name!r} has {how}", cancel=cancel)
        self._rescales.give_up(f"it has {how}")

    def _end_attempt(self, now_ms: int, *, cancel: bool = True) -> None:
        if self.attempts and self.attempts[-1].ended_ms is None:
            self.attempts[-1] = replace(self.attempts[-1], ended_ms=self._clock.now_ms())
        self._epochs.stop()
        self._gone_by_ms = now_ms + GONE_TIMEOUT_MS
        self.tell_all(Shutdown("the attempt is over"))
        if self._deployment is not None and cancel:
            self._deployment.cancel()

    def _wait_until_gone(self, now_ms: int, gone: bool) -> None:
        assert self._gone_by_ms is not None
        if not gone and now_ms < self._gone_by_ms:
            return
        if self.attempts and self.attempts[-1].gone_ms is None:
            self.attempts[-1] = replace(self.attempts[-1], gone_ms=self._clock.now_ms())
        if self._final is not None:
            if self.savepoints.copying and self._final is not Status.CANCELLED:
                return  # the job is over when its savepoints are
            self.status = self._final
            self._gone_by_ms = None
            self._log.ended(self.status, self._epochs.newest)
        elif self._deadline_ms is not None and now_ms >= self._deadline_ms:
            if not gone and self._deployment is not None:
                self._deployment.cancel()
            self._gone_by_ms = self._deployment = self._deadline_ms = None
            self.start()

    def _check_heartbeats(self, now_ms: int) -> None:
        timeout_ms = self._settings.tuning.heartbeat_timeout_ms
        if silent := self._roster.silent(now_ms, timeout_ms):
            advice = "if one call of a function takes so long, set Tuning(heartbeat_timeout=…)"
            self.failed(Failure(f"slots {silent} sent nothing for {timeout_ms} ms: {advice}", silent[0]))
