"""The slots of a transform's attempt: tasks that Spark has started, as the coordinator deploys and reaches them.

A run's tasks are there before they are deployed (gathering.py); to deploy them is to assign each of them a slot. The
attempt of a streaming query outlives the runs that it consists of: between two micro-batches nobody is at work, and none is
lost, until the tasks of the next one come to the processes that hold the slots.

Invariants:
- What a task sends, and its loss, counts only while its run is at work. That is decided in the coordinator's thread, where
  everything is handled in the order in which it arrived.
- `wait` always returns or raises: when the coordinator's thread ends, for whatever reason, it puts `None` into the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from queue import SimpleQueue

from tidegate.control.launch import SlotLaunch
from tidegate.control.messages import Assign, Left, Message, Offer
from tidegate.dataframes.gathering import Run
from tidegate.dataframes.queries import BatchTimes
from tidegate.driver.batches import BatchEnd
from tidegate.driver.coordinator import Coordinator
from tidegate.driver.handle import Handle
from tidegate.driver.hosting import CoordinatorHost
from tidegate.errors import JobFailed
from tidegate.snapshots.manifest import MicroBatch


class TaskSlots:
    """Deployer, deployment and links of one coordinator. `times` are those of the micro-batch, if the run is one."""

    def __init__(self, run: Run, *, store: str, times: BatchTimes | None = None) -> None:
        self.handle: Handle | None = None
        self._run: Run | None = run
        self._store = store
        self._times = times
        self._attempt = 0
        self._tasks: dict[int, int] = {}  # by slot
        self._gone: set[int] = set()  # slots that have left, or whose tasks are lost
        self._cancelled = False
        self._ends: SimpleQueue[BatchEnd | None] = SimpleQueue()

    # For whoever conducts the runs, in a thread of its own.

    def start(self, make_host: Callable[[TaskSlots], CoordinatorHost]) -> None:
        """Start the coordinator of these slots."""
        self.handle = make_host(self).start()

    def are_back(self, offers: list[Offer]) -> bool:
        """Return whether the tasks are in the processes of all slots, as the batch before left them."""
        return (
            self.handle is not None
            and not self.handle.status.terminal
            and all(offer.attempt == self._attempt for offer in offers)
            and sorted(offer.slot for offer in offers if offer.slot is not None) == list(range(len(offers)))
        )

    def resume(self, run: Run, batch: MicroBatch, times: BatchTimes) -> None:
        """Continue with a micro-batch in the slots, which are back."""
        self._host.ask(partial(self._resume, run, batch, times))

    def wait(self) -> BatchEnd | None:
        """Wait for the end of the micro-batch, or of the job (None). Raises `JobFailed` if the job has failed."""
        end = self._ends.get()
        if end is None and self.handle is not None:
            self.handle.wait()
        return end

    def give_up(self) -> None:
        """End the slots. What they still write is never read, because whatever follows claims a newer attempt."""
        if self.handle is not None and not self.handle.status.terminal:
            try:
                self.handle.cancel(timeout="10 s")
            except (JobFailed, TimeoutError):
                return

    @property
    def failed_finally(self) -> bool:
        """Whether the job has failed for a reason that is in the program."""
        failures = [] if self.handle is None else self.handle.failures
        return any(failure.permanent or failure.user_traceback is not None for failure in failures)

    # What the coordinator calls, in its thread.

    def open(self, host: CoordinatorHost) -> None:
        self._host = host

    def deployer(self, launch: SlotLaunch) -> TaskSlots:
        return self

    def deploy(self, attempt: int) -> TaskSlots:
        assert self._run is not None
        self._attempt = attempt
        self._assign(self._run, {task: task for task in range(len(self._run.members))}, goes_on=False)
        return self

    def expect(self, attempt: int) -> None:
        """Do nothing: a task's link belongs to one attempt."""

    def send(self, slot: int, message: Message) -> None:
        if self._run is not None:
            self._run.send(self._tasks[slot], message)

    def ended(self) -> str | None:
        if self._cancelled:
            return "they were given up"
        return "all tasks have left" if self._tasks and len(self._gone) == len(self._tasks) else None

    def cancel(self) -> None:
        """Count the slots as ended: they have been told to end. Spark ends a task that is stuck in a user's function, and a
        process that holds a slot between two batches drops it at its next task."""
        self._cancelled = True

    def batch_ended(self, end: BatchEnd) -> None:
        self._run = None
        self._ends.put(end)

    def close(self) -> None:
        self._ends.put(None)

    def _resume(self, run: Run, batch: MicroBatch, times: BatchTimes, coordinator: Coordinator) -> None:
        coordinator.begin_batch(batch)
        self._times = times
        slots = {offer.task: offer.slot for offer in run.offers if offer.slot is not None}
        self._assign(run, slots, goes_on=True)

    def _assign(self, run: Run, slots: Mapping[int, int], *, goes_on: bool) -> None:
        """Make the run's tasks the slots of the attempt. `slots` has the slot of each task."""
        self._run, self._gone = run, set()
        self._tasks = {slot: task for task, slot in slots.items()}
        run.attach(lambda task, event: self._host.ask(partial(self._on_event, run, slots[task], event)))
        now_ms, watermark_ms = (None, 0) if self._times is None else self._times
        for slot, task in self._tasks.items():
            run.send(task, Assign(self._attempt, slot, self._store, goes_on, now_ms, watermark_ms))

    def _on_event(self, run: Run, slot: int, event: Message | str, coordinator: Coordinator) -> None:
        if run is not self._run:
            return
        if isinstance(event, str | Left):
            self._gone.add(slot)
        if isinstance(event, str):
            coordinator.on_lost(slot, event)
        elif not isinstance(event, Left):
            coordinator.on_message(slot, event)
