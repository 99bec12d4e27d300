"""What the coordinator of a transform does when the slots have read their input: it ends the micro-batch, with one epoch, or
the job, if the DataFrames are batch ones.

    begin(batch) ─► all slots have read their input ─► the loops are at rest, if there are any (moving_time.py) ─► an epoch
    is asked for ─► its snapshot is complete (the manifest names the batch) ─► `ended` is called, and the slots' processes
    belong to Spark until the next batch begins

An epoch that is aborted while the attempt lives is tried again; after too many the job fails, which ends the waiting in
another way. All methods are called in the coordinator's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tidegate.control.messages import Counted, Message
from tidegate.dataflow.plan import Plan
from tidegate.driver.moving_time import Rest, moves_of_time
from tidegate.driver.reports import EpochReport
from tidegate.snapshots.manifest import MicroBatch
from tidegate.snapshots.stats import first_alarm_ms


@dataclass(frozen=True, slots=True)
class BatchEnd:
    """How a micro-batch ended: its snapshot is complete, or `error` says why the batch has to run again. `alarm_ms` is when
    the next batch is wanted though there may be no data."""

    alarm_ms: int | None = None
    error: str | None = None


class Batches:
    """`current` is the batch that runs or ran last, None if epochs don't end micro-batches. `parked`: it is over, and the
    slots report nothing until the next one begins."""

    def __init__(
        self,
        first: MicroBatch | None,
        *,
        plan: Plan,
        tell_all: Callable[[Message], None],
        ended: Callable[[BatchEnd], None],
    ) -> None:
        self.current = first
        self.parked = False
        self._plan = plan
        self._tell_all = tell_all
        self._ended = ended
        # Operators that do their work when an epoch ends (grouped.py) would take a second end for a second batch, so an
        # aborted epoch isn't tried again.
        self._ends_once = any(node.gathers for node in plan.nodes)
        self._read: set[int] = set()  # slots
        self._rest: Rest | None = None
        self._can_end = False
        self._is_asked = False  # an epoch is under way for it
        self._aborted: str | None = None

    def begin(self, batch: MicroBatch) -> None:
        self.current, self.parked, self._read = batch, False, set()

    def on_input_read(self, slot: int) -> None:
        """The slot has taken in what its task was given."""
        self._read.add(slot)
        if len(self._read) < self._plan.slots:
            return
        if self._plan.loops and self.current is not None:
            self._rest = Rest(self._plan.slots, moves_of_time(self._plan), self._tell_all)
        else:  # a job that ends empties its loops by laps (protocol/iteration.py)
            self._can_end = True

    def on_counted(self, slot: int, counted: Counted, now_ms: int) -> None:
        if self._rest is not None and self._rest.on_counted(slot, counted, now_ms):
            self._rest, self._can_end = None, True

    def tick(self, now_ms: int) -> None:
        if self._rest is not None:
            self._rest.tick(now_ms)

    def wants_end(self) -> bool:
        """Return whether to ask for the epoch that ends the micro-batch, or the job, now. Called while the attempt runs."""
        if not self._can_end or self._is_asked:
            return False
        if self._aborted is not None and self._ends_once:
            self._end(BatchEnd(error=self._aborted))
            return False
        self._is_asked = True
        return True

    def on_complete(self, report: EpochReport) -> None:
        if self._can_end and self.current is not None:
            self.parked = True
            self._end(BatchEnd(first_alarm_ms(report.stats.values())))

    def on_aborted(self, why: str) -> None:
        """Note why. If the attempt fails because of it, `wants_end` isn't called any more. The end of a job is tried again
        without being asked for."""
        self._is_asked, self._aborted = self.current is None, why

    def _end(self, end: BatchEnd) -> None:
        self._can_end, self._is_asked, self._aborted = False, False, None
        self._ended(end)
