"""The user's handle of a running job.

The coordinator runs in a thread of its own. A handle posts requests to it and reads its reports, so it may be used from any
thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from tidegate import arguments
from tidegate.arguments import ClockDuration
from tidegate.connectors.collecting import delivered_rows
from tidegate.driver.coordinator import Coordinator
from tidegate.driver.deployment import Layout, Rescaling
from tidegate.driver.reports import AttemptReport, EpochReport, Failure, SlotReport, Status
from tidegate.driver.savepoints import SavepointOrder
from tidegate.errors import JobError, JobFailed, RescaleFailed, TidegateError, place
from tidegate.snapshots.finding import resolved
from tidegate.snapshots.savepoints import SavepointInfo
from tidegate.types.json_form import to_json

_POLL_S = 0.02


# Plans the job again for other slots and another parallelism of some operators. Raises `JobError` if there is no such plan.
Relayout = Callable[[int | None, Mapping[str, int]], Layout]


class Handle:
    """A running job: what it does, and what it can be asked to do. `job.start()` returns one.

    A call that waits takes a `timeout` such as "30 s" and raises `TimeoutError` after that; the job keeps running. In
    `snapshot`, `savepoint`, `stop` and `rescale` this is how long nothing may move: as long as slots report that a snapshot
    is being written or restored, or a savepoint copied, they wait.
    """

    def __init__(
        self,
        name: str,
        coordinator: Coordinator,
        post: Callable[[Callable[[], None]], None],
        close: Callable[[], None],
        relayout: Relayout,
    ) -> None:
        self.name = name
        self._coordinator = coordinator
        self._post = post
        self._close = close
        self._relayout = relayout

    @property
    def status(self) -> Status:
        """What the job is doing now, or how it ended."""
        return self._coordinator.status

    @property
    def epochs(self) -> list[EpochReport]:
        """The newest 500 epochs since the start, oldest first: when each was triggered and completed, its size and
        times."""
        return list(self._coordinator.epochs)

    @property
    def attempts(self) -> list[AttemptReport]:
        """The newest 1,000 attempts since the start, oldest first: each is one deployment of the job."""
        return list(self._coordinator.attempts)

    @property
    def failures(self) -> list[Failure]:
        """Why attempts ended, the newest 1,000, oldest first."""
        return list(self._coordinator.failures)

    @property
    def slots(self) -> list[SlotReport]:
        """The slots of the present attempt: host, process id and what runs in each. `ps` shows their names. There are none
        when the job has ended, and between two attempts."""
        return list(self._coordinator.slots)

    @property
    def metrics(self) -> dict[str, dict[str, Any]]:
        """The latest counters of every subtask."""
        return {subtask: to_json(metrics) for subtask, metrics in self._coordinator.metrics.items()}

    def results(self, sink: str) -> list[tuple[Any, ...]]:
        """Return the committed rows of a `collect` sink, in the order of epochs."""
        return delivered_rows(list(self._coordinator.delivered.get(sink, ())))

    def snapshot(self, timeout: ClockDuration = "1 minute") -> EpochReport:
        """Take a snapshot now and wait until it is complete. Raises `JobFailed` if the job has failed."""
        timeout_s = _seconds("snapshot", timeout)
        before = max((report.epoch for report in self.epochs), default=0)

        def taken() -> EpochReport | None:
            return next((each for each in self.epochs if each.epoch > before and each.completed_ms is not None), None)

        self._post(self._coordinator.snapshot)
        self._until(lambda: taken() is not None or self.status.terminal, timeout_s, self._advances)
        if (report := taken()) is not None:
            return report
        if self.status.terminal:
            self.wait()
            raise JobError(f"job {self.name!r} is {self.status.value}, so there is nothing to take a snapshot of")
        raise TimeoutError(
            f"job {self.name!r} ({self.status.value}) completed no snapshot within {timeout_s:g} s. "
            f"{self._trouble()}".rstrip()
        )

    def savepoint(self, to: str, timeout: ClockDuration = "10 minutes") -> SavepointInfo:
        """Take a savepoint into the folder `to`, which must be empty or missing, and wait for it. The job keeps running.

        A savepoint is a complete snapshot that needs no other file: the folder can be moved and copied, nothing deletes it,
        and any job can begin with it (`Job(…, restore_from=…)`), on any backend and any number of slots.
        """
        timeout_s = _seconds("savepoint", timeout)
        order = SavepointOrder(_folder("savepoint", "to", to))
        self._post(lambda: self._coordinator.savepoints.take(order))
        if not self._until(lambda: self._settled(order), timeout_s, lambda: (self._advances(), order.copied_bytes)):
            error = TimeoutError(f"job {self.name!r} ({self.status.value}) took no savepoint within {timeout_s:g} s")
            self._post(lambda: self._coordinator.savepoints.withdraw(order, error))
            raise error
        return self._outcome(order)

    def stop(
        self, *, drain: bool = False, savepoint: str | None = None, timeout: ClockDuration | None = "2 minutes"
    ) -> Status:
        """End the job with a final snapshot, from which it resumes when it is started again, and wait for that.

        `drain=True` also ends event time: all event-time timers fire first. `savepoint` is a folder, as for `savepoint()`,
        for a copy of that final snapshot. If the copy can't be made, the error is raised and the job keeps running.

        A job that is restarting has nothing that could take a final snapshot. It ends at once, as failed; when it is started
        again, it resumes from its last complete snapshot. `JobFailed` says why it was restarting. With `drain` or
        `savepoint` the job is not stopped, and `JobError` says why.
        """
        timeout_s = None if timeout is None else _seconds("stop", timeout)
        arguments.flag("stop", "drain", drain)
        folder = None if savepoint is None else _folder("stop", "savepoint", savepoint)
        if (drain or savepoint is not None) and self.status is Status.RESTARTING:
            what = "drained" if drain else "stopped with a savepoint"
            raise JobError(
                f"job {self.name!r} can't be {what} while it is restarting. Wait until it runs, or stop it without "
                f"{'drain' if drain else 'savepoint'}: it then ends at its last complete snapshot. {self._trouble()}"
            ) from _failed(self.name, self.failures)
        if folder is None:
            self._post(lambda: self._coordinator.stop(drain=drain))
            return self._wait(timeout_s, self._advances)
        order = SavepointOrder(folder)
        self._post(lambda: self._coordinator.stop(drain=drain, savepoint=order))
        self._until(lambda: self._settled(order), timeout_s, lambda: (self._advances(), order.copied_bytes))
        if order.error is None:
            self._wait(timeout_s, self._advances)
        self._outcome(order)
        return self.status

    def rescale(
        self, slots: int | None = None, *, operators: Mapping[str, int] | None = None, timeout: ClockDuration = "5 minutes"
    ) -> None:
        """Stop with a final snapshot, resume from it with another number of slots, and wait until the job runs.

        `operators` gives the parallelism of single operators by name. If there is no such plan, `JobError` is raised and
        nothing is stopped. If the new slots can't come up, because there are too few or one fails before all are ready, the
        job goes back to the slots that it had; when it runs again, `RescaleFailed` says why. If the job fails before it has
        stopped, it is restarted at the new parallelism. After such a failure, and for a job that was restarting, the call
        waits for a complete snapshot at the new parallelism, because the slots may fail again at the same record. Raises
        `JobFailed` if the job gives up.
        """
        timeout_s = _seconds("rescale", timeout)
        rescaling = Rescaling(self._relayout(slots, operators or {}))
        self._post(lambda: self._coordinator.rescale(rescaling))
        if not self._until(
            lambda: (rescaling.done and not rescaling.job_ends) or self.status.terminal, timeout_s, self._advances
        ):
            raise TimeoutError(
                f"job {self.name!r} is {self.status.value}, not yet rescaled, after {timeout_s:g} s. "
                f"{self._trouble()}".rstrip()
            )
        if rescaling.done and rescaling.error is None:
            return
        if self.status is Status.FAILED:
            self.wait()
        if rescaling.went_back and not rescaling.job_ends:
            raise RescaleFailed(
                f"job {self.name!r} couldn't run on {rescaling.layout.plan.slots} slots, and has gone back to "
                f"{self._coordinator.plan.slots}: {rescaling.error}"
            )
        raise JobError(f"job {self.name!r} was not rescaled: {rescaling.error or f'it is {self.status.value}'}")

    def cancel(self, timeout: ClockDuration | None = "1 minute") -> Status:
        """End the job at once. When it is started again, it resumes from its last complete snapshot."""
        timeout_s = None if timeout is None else _seconds("cancel", timeout)
        self._post(self._coordinator.cancel)
        return self._wait(timeout_s)

    def wait(self, timeout: ClockDuration | None = None) -> Status:
        """Block until the job has ended. Raises `JobFailed` with the user's own traceback if it failed."""
        return self._wait(None if timeout is None else _seconds("wait", timeout))

    def _wait(self, timeout_s: float | None, alive: Callable[[], object] = lambda: None) -> Status:
        if not self._until(lambda: self.status.terminal, timeout_s, alive):
            raise TimeoutError(
                f"job {self.name!r} is still {self.status.value} after {timeout_s:g} s. {self._trouble()}".rstrip()
            )
        self._close()
        if self.status is Status.FAILED:
            raise _failed(self.name, self._coordinator.failures)
        return self.status

    def _advances(self) -> int:
        """Return a number that grows as long as slots report that they restore or write state."""
        return self._coordinator.advances

    def _until(
        self, condition: Callable[[], bool], timeout_s: float | None, alive: Callable[[], object] = lambda: None
    ) -> bool:
        """Wait for the condition, and return whether it became true in time. The time begins again whenever `alive` returns
        something else."""
        moved_s, seen = time.monotonic(), alive()
        while not condition():
            if (now := alive()) != seen:
                moved_s, seen = time.monotonic(), now
            if timeout_s is not None and time.monotonic() > moved_s + timeout_s:
                return False
            time.sleep(_POLL_S)
        return True

    def _trouble(self) -> str:
        """Return the last failure as a sentence for other errors, or an empty text."""
        last = self.failures[-1:]
        return "".join(f"Its last failure (attempt {each.attempt}): {each.message.rstrip()}" for each in last)

    def _settled(self, order: SavepointOrder) -> bool:
        if self.status.terminal and not order.done:
            self._close()  # the coordinator's thread may still settle it, until it has ended
            return True
        return order.done

    def _outcome(self, order: SavepointOrder) -> SavepointInfo:
        if type(order.error) is TidegateError and self.status is Status.FAILED:
            raise _failed(self.name, self._coordinator.failures) from order.error
        if order.error is not None:
            raise order.error
        if order.info is None:
            raise TidegateError(f"job {self.name!r} is {self.status.value}: no savepoint was taken")
        return order.info


def _seconds(method: str, timeout: ClockDuration) -> float:
    return arguments.clock_ms(f"Handle.{method}", "timeout", timeout) / 1000


def _folder(method: str, name: str, folder: str) -> str:
    return resolved(arguments.text(f"Handle.{method}", name, folder, "a folder, such as 'savepoints/tuesday'"))


def _failed(name: str, failures: list[Failure]) -> JobFailed:
    last = failures[-1]
    theirs = (
        last
        if last.permanent
        else next((failure for failure in reversed(failures) if failure.user_traceback is not None), last)
    )
    attempts = f" after {len(failures)} failures" if len(failures) > 1 else ""
    where = f" in operator {theirs.operator!r}" if theirs.operator else ""
    record = f", {place(theirs.record)}" if theirs.record else ""
    told = theirs.user_traceback or theirs.message
    if last.stopped or (last.permanent and last.user_traceback):
        told = f"{told.rstrip()}\n{last.then}."
    return JobFailed(
        f"job {name!r} failed{attempts}{where}{record}:\n{told}",
        operator=theirs.operator,
        record=theirs.record,
        user_traceback=theirs.user_traceback,
    )
