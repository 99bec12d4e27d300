"""What a slot logs, on the logger `tidegate.slot`: in Spark, into the log of its executor.

A line when it is deployed, with what it has restored, and one when an error ends it, with the traceback. In between nothing,
unless an alignment or the writing of a snapshot is slow, a source waits for another one whose event time doesn't move, or an
operator drops late records, or the memory is nearly full: then a line a minute at most of each. Late records that were
dropped after the last such line are logged when the slot's work is done.

`speak` is given (`logs.Speak`), so that nothing here does I/O. Nothing is called by record or by batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from tidegate.control.messages import RestoreStats
from tidegate.control.settings import JobSettings
from tidegate.dataflow.plan import Plan
from tidegate.errors import ProtocolError, UserFunctionError
from tidegate.logs import OncePer, Speak
from tidegate.protocol.ids import ChannelId, SubtaskId
from tidegate.slot.memory import MemoryWatch
from tidegate.slot.subtask import Subtask
from tidegate.slot.time_group_members import Member

LOGGER = logging.getLogger("tidegate.slot")
SLOW_ALIGNMENT_MS = 10_000
SLOW_WRITE_MS = 10_000
STUCK_TIME_MS = 30_000


class SlotLog:
    """The log of one slot in one attempt."""

    def __init__(self, index: int, *, plan: Plan, settings: JobSettings, attempt: int, speak: Speak) -> None:
        self._where = settings.name, attempt, index
        self._plan = plan
        self._speak = speak
        self._routine = logging.INFO if settings.writes_state else logging.DEBUG
        self._slow = OncePer()
        self._stuck = OncePer()
        self._slow_write = OncePer()
        self._late = OncePer()
        self._full = OncePer()
        self._late_reported: dict[str, int] = {}  # records, by operator
        self._since_ms: dict[tuple[SubtaskId, int], int] = {}  # by the alignments that are under way

    def deployed(self, epoch: int | None, cost: RestoreStats | None) -> None:
        """Its subtasks are built, and `cost` is what restoring the snapshot of the epoch took."""
        names = ", ".join(vertex.name for vertex in self._plan.subtasks_in(self._where[2]))
        if cost is None:
            self._say(self._routine, "deployed", "is ready, with no snapshot: %s.", names)
        else:
            self._say(
                self._routine,
                "deployed",
                "is ready, with %d bytes of snapshot %d restored in %d ms: %s.",
                cost.bytes,
                epoch,
                cost.ms,
                names,
                epoch=epoch,
                bytes=cost.bytes,
                duration_ms=cost.ms,
            )

    def failed(self, error: BaseException) -> None:
        """An error ends it. The traceback is logged here only; the driver is sent what users need. A connection that breaks
        has a cause at its other end, and no traceback says more. An error of a user's function is logged by the driver."""
        if isinstance(error, UserFunctionError):
            self._say(
                logging.INFO,
                "failed",
                "ends, because operator %r raised an error: the driver logs it.",
                error.operator,
                operator=error.operator,
            )
            return
        cause = None if isinstance(error, ProtocolError) else error
        self._say(logging.ERROR, "failed", "fails: %s: %s", type(error).__name__, error, exc_info=cause)

    def orphaned(self, reason: str) -> None:
        """The coordinator is gone, or has begun another attempt."""
        self._say(logging.WARNING, "orphaned", "ends, since its link to the coordinator was lost: %s", reason)

    def look_at_alignments(self, subtasks: Iterable[Subtask], now_ms: int) -> None:
        """Called now and then, to find those that take long."""
        waiting = {(each.id, epoch): missing for each in subtasks for epoch, missing in [each.aligning] if missing}
        self._since_ms = {alignment: self._since_ms.get(alignment, now_ms) for alignment in waiting}
        for (subtask, epoch), since_ms in self._since_ms.items():
            took_ms = now_ms - since_ms
            if took_ms >= SLOW_ALIGNMENT_MS and self._slow.take(now_ms) is not None:
                missing = ", ".join(self._sender(channel) for channel in sorted(waiting[subtask, epoch]))
                self._say(
                    logging.WARNING,
                    "slow-alignment",
                    "has slow alignment: %s[%d] has waited %d s for the marker of epoch %d from %s.",
                    self._plan.vertices[subtask.vertex].name,
                    subtask.subtask,
                    took_ms // 1000,
                    epoch,
                    missing,
                    epoch=epoch,
                    subtask=str(subtask),
                    duration_ms=took_ms,
                )

    def look_at_writes(self, writing: Mapping[tuple[SubtaskId, int], int], now_ms: int) -> None:
        """Called now and then, to find snapshots that are slow to write. `writing`: by subtask and epoch, since when."""
        for (subtask, epoch), since_ms in writing.items():
            took_ms = now_ms - since_ms
            if took_ms >= SLOW_WRITE_MS and self._slow_write.take(now_ms) is not None:
                self._say(
                    logging.WARNING,
                    "slow-write",
                    "has slow writes: %s[%d] has written its part of snapshot %d for %d s, and isn't done. The snapshot "
                    "folder or the network to it is slow.",
                    self._plan.vertices[subtask.vertex].name,
                    subtask.subtask,
                    epoch,
                    took_ms // 1000,
                    epoch=epoch,
                    subtask=str(subtask),
                    duration_ms=took_ms,
                )

    def nearly_full(self, memory: MemoryWatch, now_ms: int) -> None:
        """Called while the slot takes more than `WARNING_SHARE` of its memory."""
        assert memory.limit_bytes is not None
        if self._full.take(now_ms) is not None:
            self._say(
                logging.WARNING,
                "nearly-full",
                "takes %d bytes of memory, %d %% of what tg.Heap(memory=…) allows. Above that the job fails. More slots, "
                "backend=tg.RocksDB() or a ttl for its state would make room.",
                memory.used_bytes,
                100 * memory.used_bytes // memory.limit_bytes,
                bytes=memory.used_bytes,
            )

    def look_at_waits(self, stuck: Iterable[tuple[Member, int]], now_ms: int) -> None:
        """Called now and then, to find sources that wait for others (protocol/time_groups.py) whose event time doesn't move.
        `stuck` has for how long it hasn't."""
        for member, took_ms in stuck:
            if took_ms >= STUCK_TIME_MS and self._stuck.take(now_ms) is not None:
                self._say(
                    logging.WARNING,
                    "waits-for-time",
                    "doesn't read source %s: for %d s it has waited for %s, which is more than max_ahead behind in event "
                    "time. If that source may be without records for long, give its with_watermark an idle_after.",
                    member.name,
                    took_ms // 1000,
                    f"{member.least.who} of time group {member.group!r}"
                    if member.least.who
                    else f"all slots of time group {member.group!r} to report",
                    subtask=str(member.subtask.id),
                    duration_ms=took_ms,
                )

    def look_at_late(self, subtasks: Iterable[Subtask], now_ms: int, *, is_last: bool = False) -> None:
        """Called now and then, and at the end, to find operators that have dropped late records since the last line."""
        dropped = {operator.name: operator.late_dropped for each in subtasks for operator in each.operators}
        new = {name: count for name, count in dropped.items() if count > self._late_reported.get(name, 0)}
        if not new or (self._late.take(now_ms) is None and not is_last):
            return
        counts = ", ".join(f"{count} in operator {name!r}" for name, count in new.items())
        self._late_reported.update(new)
        self._say(
            logging.WARNING,
            "late-records",
            "has dropped late records: %s since the attempt began. Give the window late='…' to get them as a side output, "
            "or give with_watermark a larger delay.",
            counts,
        )

    def _sender(self, channel: ChannelId) -> str:
        return f"{self._plan.vertices[self._plan.edges[channel.edge].source_vertex].name}[{channel.upstream}]"

    def _say(
        self, level: int, event: str, text: str, *args: object, exc_info: BaseException | None = None, **fields: object
    ) -> None:
        job, attempt, slot = self._where
        extra = {"event": event, "job": job, "attempt": attempt, "slot": slot, **fields}
        self._speak(level, "Job %r, attempt %d, slot %d " + text, *self._where, *args, exc_info=exc_info, extra=extra)
