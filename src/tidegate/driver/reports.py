"""What a handle reports about a job: its status, epochs, attempts, slots and failures."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tidegate.control.messages import Failed, RestoreStats
from tidegate.dataflow.plan import Plan
from tidegate.snapshots.stats import Measured, SubtaskStats
from tidegate.types.json_form import to_json

# How many epochs are reported; older ones are dropped.
KEPT_REPORTS = 500
# How many attempts and failures are.
KEPT_ATTEMPTS = 1_000


class Status(Enum):
    STARTING = "starting"  # slots are being deployed
    RUNNING = "running"
    RESTARTING = "restarting"  # rolling back after a failure
    RESCALING = "rescaling"  # between the final snapshot at the old parallelism and the first record at the new one
    FINISHED = "finished"  # the input is at its end and everything is committed
    STOPPED = "stopped"  # by the user, with a final snapshot
    CANCELLED = "cancelled"  # by the user, at once
    FAILED = "failed"

    @property
    def terminal(self) -> bool:
        """Whether the job has ended."""
        return self in (Status.FINISHED, Status.STOPPED, Status.CANCELLED, Status.FAILED)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt ended, in the user's terms if their function failed. A `permanent` failure ended the job: another
    attempt would have failed in the same way. `where` is the slot's host and process, `then` says what followed."""

    message: str
    slot: int | None = None
    operator: str | None = None
    user_traceback: str | None = None
    record: str | None = None
    permanent: bool = False
    signature: str | None = None  # the exception and the line, or the damaged file, if a repetition ends the job
    where: str | None = None
    attempt: int = 0
    at_ms: int = 0
    then: str = ""
    stopped: bool = False  # by the user, while the job was restarting
    is_outside: bool = True  # of a host, the store or a service, and not of the program


def failure_of(failed: Failed, *, where: str) -> Failure:
    """Return the failure that a slot has reported. `where` names the slot."""
    return Failure(
        failed.message,
        failed.slot,
        failed.operator,
        failed.user_traceback,
        failed.record,
        failed.permanent,
        failed.signature,
        where=where,
        is_outside=failed.is_outside,
    )


@dataclass(frozen=True, slots=True)
class SlotReport:
    """A slot of the present attempt: the process to look for, and what runs in it ("vertex[subtask]")."""

    slot: int
    host: str
    pid: int
    attempt: int
    subtasks: tuple[str, ...]

    def __str__(self) -> str:
        return f"slot {self.slot} (host {self.host}, pid {self.pid})"


@dataclass(slots=True)
class EpochReport:
    """One epoch. `completed_ms` is None while it is under way, and if it was aborted. `written` has the bytes that slots
    have reported while they wrote the snapshot; slots that wrote for less than a heartbeat have reported none."""

    epoch: int
    attempt: int
    triggered_ms: int
    ending: str | None = None
    full: bool = False  # its snapshot doesn't build on an earlier one
    completed_ms: int | None = None
    aborted: str | None = None
    bytes: int = 0
    stats: dict[str, SubtaskStats] = field(default_factory=dict)  # by subtask
    written: dict[int, int] = field(default_factory=dict)  # by slot

    @property
    def duration_ms(self) -> int | None:
        """From the trigger at the sources to the manifest."""
        return None if self.completed_ms is None else self.completed_ms - self.triggered_ms

    @property
    def measured(self) -> dict[str, Any]:
        """The longest times, and the sums of bytes, of all subtasks."""
        found: dict[str, Any] = to_json(Measured.over(self.stats.values()))
        return found

    @property
    def subtasks(self) -> dict[str, dict[str, Any]]:
        """What each subtask measured."""
        return {subtask: to_json(stats) for subtask, stats in self.stats.items()}


class EpochReports(list[EpochReport]):
    """The reports of the newest epochs, oldest first."""

    def triggered(self, report: EpochReport) -> None:
        self.append(report)
        del self[:-KEPT_REPORTS]

    def of(self, epoch: int) -> EpochReport:
        return next(report for report in reversed(self) if report.epoch == epoch)

    def acknowledged(self, epoch: int, subtask: str, stats: SubtaskStats) -> None:
        """Add what a subtask measured. An epoch that was dropped is ignored."""
        for report in reversed(self):
            if report.epoch == epoch:
                report.stats[subtask] = stats
                return

    def attempt_over(self) -> None:
        """Mark the epoch under way as aborted. The next attempt finds out whether its manifest exists."""
        if self and self[-1].completed_ms is None and self[-1].aborted is None:
            self[-1].aborted = "the attempt ended"


@dataclass(frozen=True, slots=True)
class AttemptReport:
    """One deployment: when it was claimed, from which epoch it was restored and when it ran.

    `running_ms` is when all slots were ready and were told to start, `first_record_ms` when a heartbeat first reported a
    record, `ended_ms` when the attempt failed or ended, and `gone_ms` when its slots were gone. If the job is rescaled, it
    stopped at the final epoch's `triggered_ms`.
    """

    attempt: int
    claimed_ms: int
    restored_epoch: int | None
    running_ms: int | None = None
    slots: dict[int, int] = field(default_factory=dict)  # process id by slot
    hosts: dict[int, str] = field(default_factory=dict)  # the name of its host, by slot
    restored: dict[int, RestoreStats] = field(default_factory=dict)  # by slot; so far, while it is being restored
    memory: dict[int, int] = field(default_factory=dict)  # bytes of its process at the last heartbeat, by slot
    restored_from: str | None = None  # a path, if not the job's own snapshots
    first_record_ms: int | None = None
    ended_ms: int | None = None
    gone_ms: int | None = None


def slots_of(attempt: AttemptReport, plan: Plan) -> list[SlotReport]:
    """Return the slots that have registered in an attempt with this plan."""
    return [
        SlotReport(
            slot,
            attempt.hosts[slot],
            pid,
            attempt.attempt,
            tuple(f"{'+'.join(node.name for node in vertex.nodes)}[{slot}]" for vertex in plan.subtasks_in(slot)),
        )
        for slot, pid in sorted(attempt.slots.items())
    ]
