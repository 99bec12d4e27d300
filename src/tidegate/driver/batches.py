"""Micro-batches, as the coordinator knows them: each is ended by one epoch, and somebody waits for that.

    begin(batch) ─► … ─► end(order): an epoch is asked for ─► its snapshot is complete (the manifest names the batch) ─► the
    order is done, and the slots' processes belong to Spark until the next batch begins

An epoch that is aborted while the attempt lives is tried again; after too many the job fails, which ends the waiting in
another way. All methods are called in the coordinator's thread. Not here: when a batch can end
(dataframes/micro_batches.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tidegate.driver.reports import EpochReport
from tidegate.snapshots.manifest import MicroBatch
from tidegate.snapshots.stats import first_alarm_ms


@dataclass(slots=True, eq=False)
class BatchEnd:
    """The order to end a micro-batch. When `done`, its snapshot is complete, or `error` says why it has to run again; other
    threads may look, and `then` is called. `alarm_ms` is when the next batch is wanted though there may be no data.

    `once`: operators do their work when an epoch ends (grouped.py). A second end would be a second batch to those that saw
    the first, so an aborted epoch isn't tried again."""

    once: bool
    then: Callable[[], None]
    alarm_ms: int | None = None
    error: str | None = None
    done: bool = False


class Batches:
    """`current` is the batch that runs or ran last, None if epochs don't end micro-batches. `parked`: it is over, and the
    slots report nothing until the next one begins."""

    def __init__(self, first: MicroBatch | None) -> None:
        self.current = first
        self.parked = False
        self._end: BatchEnd | None = None
        self._is_asked = False  # an epoch is under way for it
        self._aborted: str | None = None

    def begin(self, batch: MicroBatch) -> None:
        self.parked, self.current = False, batch

    def end(self, order: BatchEnd) -> None:
        self._end, self._is_asked, self._aborted = order, False, None

    def wants_epoch(self) -> bool:
        """Return whether to ask for an epoch now. Called while the attempt runs."""
        if self._end is None or self._is_asked:
            return False
        if self._aborted is not None and self._end.once:
            self._settle(self._end, error=self._aborted)
            return False
        self._is_asked = True
        return True

    def on_complete(self, report: EpochReport) -> None:
        if self._end is not None:
            self.parked, self._end.alarm_ms = True, first_alarm_ms(report.stats.values())
            self._settle(self._end)

    def on_aborted(self, why: str) -> None:
        """Note why. If the attempt fails because of it, `wants_epoch` isn't called any more."""
        self._is_asked, self._aborted = False, why

    def on_attempt_over(self) -> None:
        self._is_asked, self._aborted = False, None

    def _settle(self, order: BatchEnd, *, error: str | None = None) -> None:
        self._end = None
        order.error, order.done = error, True
        order.then()
