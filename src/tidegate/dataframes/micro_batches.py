"""The micro-batches of a streaming query: each of them is one epoch.

    batch n: tasks are gathered ─► an attempt that resumes from the snapshot of n−1 ─► the coordinator runs the batch
    (driver/batches.py): all input is read, no record is in a loop any more, time has moved, an epoch is triggered, its
    snapshot is complete, the manifest names batch n ─► the tasks may end ─► Spark commits n

So the state of n is complete before Spark commits n. If Spark runs n again, the run begins a new attempt, which resumes
from the snapshot of n−1 even if there is one of n (`attempts.batch_before`). The snapshot of n stays valid until the new run
has completed n (docs/adr/012). All runs of a batch see the same time, which Spark has logged (queries.py).

Between two batches the slots stay in the Python processes that Spark keeps for the next tasks, with their state and the
connections between them. The coordinator is parked. The tasks of the next batch report what their processes hold. If that
is all slots of the attempt that completed the batch before, the attempt continues, and nothing is claimed or restored.
Otherwise the attempt is given up, and a new one restores the snapshot. The results are the same; only the time differs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from tidegate.control.failing import is_final
from tidegate.control.messages import Offer
from tidegate.dataframes.gathering import Run, RunEnd
from tidegate.dataframes.queries import BatchTimes, Queries, StoreHolders
from tidegate.dataframes.task_slots import TaskSlots
from tidegate.dataframes.transforming import TransformJob, told
from tidegate.driver.attempts import Restore, left_out
from tidegate.driver.job_log import batch_failed
from tidegate.errors import JobError, RestoreError, TidegateError
from tidegate.snapshots.catalog import SnapshotCatalog
from tidegate.snapshots.manifest import MicroBatch
from tidegate.store.opening import open_store


class MicroBatches:
    """The runs of one streaming transform, one after the other. `transform` is its id, and `store` is where its snapshots
    are. `observed_as` is how the name of what it observes begins in a query's plan. Before a batch ends, `set_alarm` is
    called with the time when the next one is wanted though there may be no data."""

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
        self._lock = threading.Lock()
        self._slots: TaskSlots | None = None  # of the attempt that completed `done`
        self.done: MicroBatch | None = None  # what this transform completed last
        self.has_begun = False  # whether any task of it ever came
        self.query: str | None = None  # the query that the batches are of; the last one, if there were several
        self.is_settled = False  # whether the last batch was completed by the slots that the one before had left

    def begin(self) -> None:
        self.has_begun = True

    def move_out(self) -> bool:
        """End the slots of a query that is over; another transform gets their processes. If the query is started again, it
        restores its snapshot. Return False if it has been started again already and runs a batch, which may take hours."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._give_up()
        finally:
            self._lock.release()
        return True

    def conduct(self, run: Run) -> RunEnd:
        """Run a micro-batch, and return how it ended. Nothing is raised, because the tasks wait for their verdict."""
        with self._lock:
            try:
                self._conduct(run)
            except Exception as error:  # noqa: BLE001
                final = is_final(error) or (self._slots is not None and self._slots.failed_finally)
                self._give_up()
                batch_failed(self._job.name, run.offers[0], told(error))
                return RunEnd(told(error), final)
        return RunEnd()

    def _conduct(self, run: Run) -> None:
        self.is_settled = False
        batch = _batch_of(run.offers)
        times = self._queries.batch_times(batch)
        self.query = batch.query
        is_held = self._is_next(batch) and self._slots is not None and self._slots.are_back(run.offers)
        if self._slots is not None and is_held:
            self._slots.resume(run, batch, times)
        else:
            self._give_up()
            self._holders.take(
                self._store,
                name=self._job.name,
                transform=self._transform,
                query=batch.query,
                queries=self._queries,
                observed_as=self._observed_as,
            )
            self._check_none_was_left_out(batch)
            self._begin(run, batch, times)
        assert self._slots is not None
        end = self._slots.wait()
        if end is None:
            raise TidegateError(f"the job {self._job.name!r} ended before the micro-batch was complete; it has to run again")
        if end.error is not None:
            raise TidegateError(
                f"the micro-batch has to run again, since its snapshot can't be completed: {end.error}. A batch that takes "
                f"long needs a longer Snapshots(timeout=…), or fewer records"
            )
        self._set_alarm(end.alarm_ms)
        self.done = batch
        self.is_settled = is_held

    def _is_next(self, batch: MicroBatch) -> bool:
        """Whether it follows what this transform completed last."""
        done = self.done
        return done is not None and (done.query, done.number + 1) == (batch.query, batch.number)

    def _check_none_was_left_out(self, batch: MicroBatch) -> None:
        """Raise `RestoreError` if Spark has committed batches without running the transform: what the transform completed
        last is still the newest snapshot, and isn't that of the batch before."""
        done = self.done
        if done is None or done.query != batch.query or batch.number <= done.number + 1:
            return
        found = [each.micro_batch for each in SnapshotCatalog(open_store(self._store)).intact_manifests()[0]]
        if found and found[-1] == done:
            raise RestoreError(left_out(batch, done, name=self._job.name, store=self._store))

    def _begin(self, run: Run, batch: MicroBatch, times: BatchTimes) -> None:
        self._slots = TaskSlots(run, store=self._store, times=times)
        self._slots.start(lambda slots: self._job.host(slots, store=self._store, restore=self._restore, micro_batch=batch))

    def _give_up(self) -> None:
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.give_up()


def _batch_of(offers: list[Offer]) -> MicroBatch:
    named = {(offer.query, offer.batch) for offer in offers}
    query, number = next(iter(named))
    if len(named) > 1 or query is None or number is None:
        raise JobError(
            f"tasks of one stage belong to {sorted(map(str, named))}: a transform of a streaming DataFrame runs in one "
            f"streaming query, started with writeStream"
        )
    return MicroBatch(query, number)
