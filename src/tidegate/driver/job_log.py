"""What the coordinator logs of a job, on the logger `tidegate.job`.

There is a line when an attempt begins, runs and fails, with the cause and what follows; when an epoch is aborted; when the
job is rescaled, takes a savepoint, or ends. While all is well there is a line a minute at most, about a complete snapshot.
A transform over bounded input begins at every action of Spark's, so its lines without trouble are at level debug. So are
those of a streaming query, but for the beginning of its attempts, of which there may be one for each micro-batch.

`speak` is given (`logs.Speak`), so that nothing here does I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from tidegate.control.messages import Offer
from tidegate.control.settings import JobSettings
from tidegate.driver.reports import AttemptReport, EpochReport, Failure, SlotReport, Status
from tidegate.errors import FencedOff
from tidegate.logs import OncePer, Speak
from tidegate.snapshots.manifest import MicroBatch
from tidegate.snapshots.savepoints import SavepointInfo
from tidegate.store.layout import shown

LOGGER = logging.getLogger("tidegate.job")


class JobLog:
    """The log of one job. `attempt` is the present one, 0 before the first."""

    def __init__(self, settings: JobSettings, speak: Speak) -> None:
        self.attempt = 0
        self._job = settings.name
        self._speak = speak
        self._routine = logging.INFO if settings.writes_state else logging.DEBUG
        self._snapshots, self._deletions = OncePer(), OncePer()
        self._restores, self._writes, self._copies = OncePer(), OncePer(), OncePer()
        self._written_epoch = 0
        self._copying = ""

    def begun(self, attempt: AttemptReport, losses: Sequence[str], batch: MicroBatch | None, now_ms: int = 0) -> None:
        """An attempt was claimed, and its slots are being deployed."""
        self.attempt = attempt.attempt
        self._restores = OncePer()
        self._restores.take(now_ms)  # no line of a restore that takes less than a minute
        if losses:
            self._say(
                logging.WARNING,
                "dropped",
                " does not take in from its snapshot: %s.",
                ", ".join(losses),
                epoch=attempt.restored_epoch,
            )
        work = "" if batch is None else f" with micro-batch {batch.number} of the query {batch.query}"
        origin = "no snapshot" if attempt.restored_epoch is None else f"snapshot {attempt.restored_epoch}"
        of = "" if attempt.restored_from is None else f" of {attempt.restored_from}"
        self._say(self._routine, "begun", " begins%s, from %s%s.", work, origin, of, epoch=attempt.restored_epoch)
        if batch is not None:
            self._routine = logging.DEBUG

    def runs(self, attempt: AttemptReport, slots: Sequence[SlotReport]) -> None:
        """All slots are ready."""
        assert attempt.running_ms is not None
        took_ms = attempt.running_ms - attempt.claimed_ms
        restored = sum(each.bytes for each in attempt.restored.values())
        self._say(
            self._routine,
            "running",
            " runs after %.1f s, with %d bytes restored: %s.",
            took_ms / 1000,
            restored,
            ", ".join(map(str, slots)),
            duration_ms=took_ms,
            bytes=restored,
        )

    def restoring(self, attempt: AttemptReport, now_ms: int) -> None:
        """Slots restore their state, and report how far they are."""
        if self._restores.take(now_ms) is not None:
            restored = sum(each.bytes for each in attempt.restored.values())
            self._say(
                logging.INFO, "restoring", " is restoring its state: %d bytes were read so far.", restored, bytes=restored
            )

    def writing(self, report: EpochReport, now_ms: int) -> None:
        """Slots write a snapshot that takes long, and report how far they are."""
        if report.epoch != self._written_epoch:
            self._written_epoch, self._writes = report.epoch, OncePer()
            self._writes.take(now_ms)
        elif self._writes.take(now_ms) is not None:
            written = sum(report.written.values())
            self._say(
                self._routine,
                "writing",
                ": %d bytes of snapshot %d are written so far.",
                written,
                report.epoch,
                epoch=report.epoch,
                bytes=written,
            )

    def failed(self, failure: Failure, *, epoch: int | None, delay_ms: int | None) -> None:
        """Why an attempt ended, and what follows. Without a delay it is not restarted."""
        slot = "" if failure.where is None or failure.where in failure.message else f", {failure.where}"
        self._say(
            logging.ERROR if delay_ms is None else logging.WARNING,
            "failed" if delay_ms is None else "restarting",
            "%s: %s\n%s.",
            slot,
            failure.message.rstrip(),
            failure.then,
            slot=failure.slot,
            operator=failure.operator,
            epoch=epoch,
            delay_ms=delay_ms,
        )

    def noticed(self, text: str) -> None:
        """What a slot has noticed about the program."""
        self._say(logging.WARNING, "noticed", ": %s", text)

    def completed(self, report: EpochReport, now_ms: int) -> None:
        if (held_back := self._snapshots.take(now_ms)) is not None:
            self._say(
                self._routine,
                "snapshot",
                ": snapshot %d is complete after %d ms, %d bytes; %d others since the last line.",
                report.epoch,
                report.duration_ms,
                report.bytes,
                held_back,
                epoch=report.epoch,
                duration_ms=report.duration_ms,
                bytes=report.bytes,
            )

    def aborted(self, report: EpochReport, now_ms: int) -> None:
        took_ms = now_ms - report.triggered_ms
        self._say(
            logging.WARNING,
            "aborted",
            ": epoch %d was aborted after %.1f s: %s",
            report.epoch,
            took_ms / 1000,
            report.aborted,
            epoch=report.epoch,
            duration_ms=took_ms,
        )

    def not_deleted(self, error: BaseException | None, now_ms: int) -> None:
        """Snapshots or files that nobody needs any more stay where they are. Not of a driver that was fenced off."""
        if error is not None and not isinstance(error, FencedOff) and self._deletions.take(now_ms) is not None:
            self._say(
                logging.WARNING,
                "not-deleted",
                ": what snapshots don't need any more can't be deleted now: %s: %s. The next attempt deletes it.",
                type(error).__name__,
                error,
            )

    def stopped(self, then: str) -> None:
        """The user has stopped the job while it was restarting."""
        self._say(logging.INFO, "stopped", ": %s.", then)

    def rescaling(self, before: int, after: int) -> None:
        self._say(logging.INFO, "rescaling", " is rescaled from %d slots to %d.", before, after)

    def savepoint_asked(self, to: str) -> None:
        self._say(logging.INFO, "savepoint-asked", ": a savepoint to %s was asked for.", shown(to))

    def copying(self, to: str, copied: int, now_ms: int) -> None:
        """A savepoint is being copied. The first line comes after a minute."""
        if self._copying != to:
            self._copying, self._copies = to, OncePer()
            self._copies.take(now_ms)
        elif self._copies.take(now_ms) is not None:
            self._say(
                logging.INFO,
                "savepoint-copying",
                ": %d bytes of the savepoint to %s are copied so far.",
                copied,
                shown(to),
                bytes=copied,
            )

    def savepoint_settled(self, to: str, info: SavepointInfo | None, error: BaseException | None) -> None:
        if info is not None:
            self._say(
                logging.INFO,
                "savepoint",
                ": the savepoint of epoch %d, %d bytes, is complete in %s.",
                info.epoch,
                info.bytes,
                shown(to),
                epoch=info.epoch,
                bytes=info.bytes,
            )
        else:
            self._say(
                logging.WARNING,
                "savepoint-failed",
                ": the savepoint to %s was not taken: %s: %s",
                shown(to),
                type(error).__name__,
                error,
            )

    def ended(self, status: Status, epoch: int | None) -> None:
        """The job is over. A failure is a line of its own."""
        if status is not Status.FAILED:
            snapshot = "no snapshot" if epoch is None else f"snapshot {epoch}"
            self._say(self._routine, status.value, " has ended: %s, with %s.", status.value, snapshot, epoch=epoch)

    def _say(self, level: int, event: str, text: str, *args: object, **fields: Any) -> None:
        attempt = f", attempt {self.attempt}" if self.attempt else ""
        extra = {"event": event, "job": self._job, "attempt": self.attempt or None, **fields}
        self._speak(level, "Job %r%s" + text, self._job, attempt, *args, extra=extra)


def batch_failed(job: str, offer: Offer, error: str) -> None:
    """Log that a micro-batch, whose tasks offered themselves like this one, has failed."""
    LOGGER.warning(
        "Job %r: micro-batch %s of the query %s failed: %s",
        job,
        offer.batch,
        offer.query,
        error,
        extra={"event": "batch-failed", "job": job},
    )
