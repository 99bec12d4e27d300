"""How the micro-batches of a streaming query are conducted: each of them is one epoch.

    batch n: tasks are gathered ─► an attempt that goes on from the snapshot of n−1 ─► all input is read, no record is in a
    loop any more, and time has moved (moving_time.py) ─► the coordinator ends the batch (driver/batches.py): an epoch is
    triggered, its snapshot is complete, the manifest names batch n ─► the tasks may end ─► Spark commits n

So the state of n is complete before Spark commits n. Where Spark runs n again, the run begins a new attempt that resumes
from the snapshot of n−1, whatever there is of n (`attempts.batch_before`). A snapshot that there is of n stays valid until
the new run has completed n (docs/adr/012). All runs of a batch see the same time, which Spark has logged (queries.py).

Between two batches the slots stay where they are, in Python processes that Spark keeps for the next tasks, with their
state and their connections; the coordinator is parked. The tasks of the next batch say what their processes hold. Where
these are all slots of the attempt that completed the batch before, it goes on: nothing is claimed, connected or restored.
Otherwise the attempt is given up, and a new one restores from the snapshot. Which of the two happens makes no difference
but in time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tidegate.control.failing import is_final
from tidegate.control.messages import Offer, Traffic
from tidegate.dataframes.gathering import Run, RunEnd
from tidegate.dataframes.moving_time import Rest, moves_of_time
from tidegate.dataframes.queries import BatchTimes, Queries, StoreHolders
from tidegate.dataframes.transforming import POLL_S, TransformJob, told
from tidegate.driver.attempts import Restore, left_out
from tidegate.driver.batches import BatchEnd
from tidegate.driver.coordinator import Coordinator
from tidegate.driver.handle import Handle
from tidegate.driver.hosting import CoordinatorHost
from tidegate.driver.job_log import batch_failed
from tidegate.errors import JobError, JobFailed, RestoreError, TidegateError
from tidegate.snapshots.catalog import SnapshotCatalog
from tidegate.snapshots.manifest import MicroBatch
from tidegate.store.opening import open_store

LOOK_PAUSE_S = 0.002  # slots that are busy with a loop have better things to do than to answer


class Slots:
    """The deployment of an attempt that outlives the runs that it is made of: none is lost while nobody is at work."""

    def __init__(self, run: Run, *, times: BatchTimes) -> None:
        self.run: Run | None = run
        self.times = times
        self._cancelled = False

    def ended(self) -> str | None:
        run = self.run
        if self._cancelled:
            return "it was given up"
        return None if run is None else run.ended()

    def cancel(self) -> None:
        """Nobody waits for them: those that are not at work find out when Spark gives their processes the next task."""
        self._cancelled = True


@dataclass(frozen=True, slots=True)
class _SlotsDeployer:
    slots: Slots
    coordinator: tuple[str, int]
    store: str

    def deploy(self, attempt: int) -> Slots:
        run = self.slots.run
        assert run is not None
        run.assign(
            attempt,
            {offer.task: offer.task for offer in run.offers},
            coordinator=self.coordinator,
            store=self.store,
            times=self.slots.times,
        )
        return self.slots


@dataclass(slots=True, eq=False)
class _Live:
    """An attempt, and the micro-batch that it completed last."""

    host: CoordinatorHost
    handle: Handle
    slots: Slots
    done: MicroBatch | None = None

    @property
    def attempt(self) -> int:
        return self.handle.attempts[-1].attempt

    def holds(self, offers: list[Offer], batch: MicroBatch) -> bool:
        """Whether the tasks are in the processes of all its slots, as the batch before left them."""
        return (
            not self.handle.status.terminal
            and self.done is not None
            and (self.done.query, self.done.number) == (batch.query, batch.number - 1)
            and all(offer.attempt == self.attempt for offer in offers)
            and sorted(offer.slot for offer in offers if offer.slot is not None) == list(range(len(offers)))
        )


class Stillness:
    """Whether nothing is on its way between the subtasks of a run any more, so that no record is in a loop.

    Slots count what they put on channels and what they take from them, and are asked for it in turns. The answers of one
    turn are of different moments: a slot may have taken what its sender hadn't counted when it answered. Two turns in which
    the sums were the same, and as much taken as sent, can't both be wrong (Mattern 1987, four counters).
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._turn = 0
        self._before: Traffic | None = None

    @property
    def counted(self) -> Traffic | None:
        """What the last turn has shown."""
        return self._before

    def look_again(self) -> None:
        """Something may have begun to move."""
        self._turn += 1
        self._run.probe(self._turn)

    def look(self) -> bool:
        """To be called again until it says so; the run's `moved` tells when there is something new."""
        if self._turn > 0:
            counted = self._run.traffic(self._turn)
            if counted is None:
                return False
            if counted == self._before and counted.sent == counted.taken and not counted.replays:
                return True
            self._before = counted
        self.look_again()
        return False


class MicroBatches:
    """The runs of one streaming transform, one after the other. `transform` tells it from others, `store` is where its
    snapshots are. `observed_as` is how the name of what it observes begins in a query's plan. `set_alarm` is told, before a
    batch can end, when the next one is wanted though there may be no data."""

    def __init__(
        self,
        job: TransformJob,
        *,
        transform: str,
        store: str,
        restore: Restore,
        queries: Queries,
        holders: StoreHolders,
        observed_as: str,
        set_alarm: Callable[[int | None], None] = lambda at_ms: None,
    ) -> None:
        self._job = job
        self._transform = transform
        self._store = store
        self._restore = restore
        self._queries = queries
        self._holders = holders
        self._set_alarm = set_alarm
        self._observed_as = observed_as
        plan = job.plan()
        self._has_loops = bool(plan.loops)
        self._moves = moves_of_time(plan)
        self._ends_once = any(node.gathers for node in plan.nodes)
        self._lock = threading.Lock()
        self._live: _Live | None = None
        self._done: MicroBatch | None = None  # what was completed last, by this transform
        self.has_begun = False  # whether any task of it ever came
        self.query: str | None = None  # whose batches these are; the last one's, if there were several
        self.is_settled = False  # whether the last batch was completed by the slots that the one before had left

    @property
    def done(self) -> MicroBatch | None:
        """What this transform completed last."""
        return self._done

    def begin(self) -> None:
        self.has_begun = True

    def move_out(self) -> bool:
        """The query is over, and the processes of its slots are another transform's now. If the query is started again, it
        restores from the snapshot. False if it has been: a batch may run for hours, and nobody waits for that here."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            live, self._live = self._live, None
            if live is not None:
                _give_up(live)
        finally:
            self._lock.release()
        return True

    def conduct(self, run: Run) -> RunEnd:
        """Whatever comes of it, a task that waits must hear of it: nothing is raised."""
        with self._lock:
            try:
                self._conduct(run)
            except Exception as error:  # noqa: BLE001
                live, self._live = self._live, None
                failures = [] if live is None else live.handle.failures
                final = is_final(error) or any(
                    failure.permanent or failure.user_traceback is not None for failure in failures
                )
                if live is not None:
                    _give_up(live)
                batch_failed(self._job.name, run.offers[0], told(error))
                return RunEnd(told(error), final)
        return RunEnd()

    def _conduct(self, run: Run) -> None:
        self.is_settled = False
        batch = _batch_of(run.offers)
        times = self._queries.batch_times(batch)
        self.query = batch.query
        live = self._live
        is_held = live is not None and live.holds(run.offers, batch)
        if live is not None and is_held:
            live.slots.run, live.slots.times = run, times
            live.host.ask(lambda coordinator: coordinator.begin_batch(batch))
            run.assign(
                live.attempt,
                {offer.task: offer.slot for offer in run.offers if offer.slot is not None},
                coordinator=live.host.address,
                store=self._store,
                goes_on=True,
                times=times,
            )
        else:
            if live is not None:
                self._live = None
                _give_up(live)
            self._holders.take(
                self._store,
                name=self._job.name,
                transform=self._transform,
                query=batch.query,
                queries=self._queries,
                observed_as=self._observed_as,
            )
            self._check_none_was_left_out(batch)
            live = self._live = self._begin(run, batch, times)
        rest = Rest(run, Stillness(run), self._moves) if self._has_loops else None
        self._set_alarm(_end_batch(run, live, rest, once=self._ends_once).alarm_ms)
        live.done = self._done = batch
        live.slots.run = None
        self.is_settled = is_held

    def _check_none_was_left_out(self, batch: MicroBatch) -> None:
        """If what this transform completed last is still the newest there is, but not the batch before, then Spark has
        committed batches without running the transform."""
        done = self._done
        if done is None or done.query != batch.query or batch.number <= done.number + 1:
            return
        found = [each.micro_batch for each in SnapshotCatalog(open_store(self._store)).manifests()]
        if found and found[-1] == done:
            raise RestoreError(left_out(batch, done, name=self._job.name, store=self._store))

    def _begin(self, run: Run, batch: MicroBatch, times: BatchTimes) -> _Live:
        slots = Slots(run, times=times)
        host = self._job.host(
            lambda launch, coordinator: _SlotsDeployer(slots, coordinator, self._store),
            store=self._store,
            restore=self._restore,
            micro_batch=batch,
        )
        return _Live(host, host.start(), slots)


def _batch_of(offers: list[Offer]) -> MicroBatch:
    named = {(offer.query, offer.batch) for offer in offers}
    query, number = next(iter(named))
    if len(named) > 1 or query is None or number is None:
        raise JobError(
            f"tasks of one stage say that they are of {sorted(map(str, named))}: a transform of a streaming "
            f"DataFrame runs in a streaming query, started with writeStream"
        )
    return MicroBatch(query, number)


def _end_batch(run: Run, live: _Live, rest: Rest | None, *, once: bool) -> BatchEnd:
    """Waits until all input is read, then until the loops are at rest if there are any, then for the end of the batch."""
    handle = live.handle
    end: BatchEnd | None = None
    while end is None or not end.done:
        if handle.status.terminal:
            handle.wait()
            raise TidegateError(f"the job {handle.name!r} is {handle.status.value}, and its input wasn't read to the end")
        if rest is not None and run.read:
            if rest.look():
                rest = None
            else:
                time.sleep(LOOK_PAUSE_S)
        if end is None and run.read and rest is None:
            end = BatchEnd(once=once, then=run.moved.set)
            live.host.ask(partial(Coordinator.end_batch, order=end))
        run.moved.wait(POLL_S)
        run.moved.clear()
    if end.error is not None:
        raise TidegateError(
            f"the micro-batch has to run again, since its snapshot can't be completed: {end.error}. A batch that takes long "
            f"needs a longer Snapshots(timeout=…), or fewer records"
        )
    return end


def _give_up(live: _Live) -> None:
    """Its slots end, wherever they are, and nothing of it is written any more: what follows claims a newer attempt."""
    if not live.handle.status.terminal:
        try:
            live.handle.cancel(timeout="10 s")
        except (JobFailed, TimeoutError):
            return
