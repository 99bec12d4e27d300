"""What a snapshot cost: measured by subtasks, sent with acknowledgements, reported for the epoch, kept in the manifest."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from tidegate.types.json_form import formerly, lenient


@lenient
@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Times and sizes of one subtask's part of a snapshot; of several subtasks, the longest times and the sums of sizes.

    The channels were blocked during the alignment, and the loop stood still during the pause (the synchronous part).
    Afterwards records were logged, and files were written (the asynchronous part).
    """

    alignment_ms: float = 0.0
    pause_ms: float = 0.0
    logging_ms: float = 0.0
    write_ms: float = 0.0
    state_bytes: int = 0
    in_flight_bytes: int = 0
    feedback_bytes: int = 0

    @classmethod
    def over(cls, parts: Collection[Measured], **rest: Any) -> Self:
        """Return the longest times and the sums of sizes, with `rest` for the other fields of a subclass."""
        of_all: dict[str, Any] = {
            each.name: (sum if each.name.endswith("_bytes") else max)(getattr(part, each.name) for part in parts)
            for each in fields(Measured)
            if parts
        }
        return cls(**of_all, **rest)


@lenient
@dataclass(frozen=True, slots=True, kw_only=True)
class SubtaskStats(Measured):
    """What one subtask measured. `longest_step_ms` is of its slot's loop while the snapshot was written, `quiet_step_ms` of
    just as long a time before. `alarm_ms` is when it needs the next epoch to end though no record may come."""

    longest_step_ms: float = 0.0
    quiet_step_ms: float = 0.0
    alarm_ms: int | None = field(default=None, metadata=formerly("wake_ms"))


@lenient
@dataclass(frozen=True, slots=True, kw_only=True)
class EpochStats(Measured):
    """What all subtasks measured, and each of them ("v0[1]"). `bytes` is the size of the manifest's files."""

    triggered_ms: int = 0
    bytes: int = 0
    subtasks: Mapping[str, SubtaskStats] = field(default_factory=dict)

    @property
    def alarm_ms(self) -> int | None:
        """When the first subtask needs the next epoch to end."""
        return first_alarm_ms(self.subtasks.values())


def first_alarm_ms(subtasks: Collection[SubtaskStats]) -> int | None:
    return min((each.alarm_ms for each in subtasks if each.alarm_ms is not None), default=None)
