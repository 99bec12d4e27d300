"""The messages between slots and the coordinator, and their form on the wire.

Every message is a frozen dataclass that types/json_form.py can encode. `from_wire` checks the kind, the names and the types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, get_args

from tidegate.errors import ProtocolError
from tidegate.protocol.time_groups import Least, Reached
from tidegate.snapshots.manifest import OperatorEntry
from tidegate.snapshots.stats import SubtaskStats
from tidegate.types.json_form import from_json, to_json

# From a slot to the coordinator.


@dataclass(frozen=True, slots=True)
class Register:
    """A slot has started and listens for channels at host and port. `machine` is the host's own name for itself."""

    slot: int
    host: str
    port: int
    pid: int
    machine: str = ""


@dataclass(frozen=True, slots=True)
class RestoreStats:
    """What a slot read to restore its state, and how long that took."""

    bytes: int
    ms: float


@dataclass(frozen=True, slots=True)
class Restoring:
    """The slot is restoring its state and has read this much of it so far. It is sent only when the restore has advanced."""

    slot: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Writing:
    """The slot has written this much of its part of a snapshot so far. It is sent only when the writing has advanced."""

    slot: int
    epoch: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The slot's state is restored and its channels are connected. `restored` is None if there was nothing to restore."""

    slot: int
    restored: RestoreStats | None = None


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """A subtask's part of a snapshot is durable. `operators` has an entry for each stateful operator of its chain, with only
    this subtask's piece. `stats` is what the subtask measured, for the epoch's report."""

    vertex: int
    subtask: int
    epoch: int
    operators: Mapping[str, OperatorEntry]
    stats: SubtaskStats = field(default_factory=SubtaskStats)


@dataclass(frozen=True, slots=True)
class Decline:
    """A subtask couldn't write its part to the store. The epoch is to be aborted; the job continues."""

    vertex: int
    subtask: int
    epoch: int
    message: str


@dataclass(frozen=True, slots=True)
class InputEnded:
    """A source subtask has come to the end of its input, or a loop without any more input is empty."""

    vertex: int
    subtask: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The slot has failed. If the failure is `permanent`, any other attempt would end in the same way. `signature` is that
    of a `UserFunctionError` or of a damaged file. `is_outside`: the error is of the world outside, not of the program."""

    slot: int
    message: str
    operator: str | None = None
    user_traceback: str | None = None
    record: str | None = None
    permanent: bool = False
    signature: str | None = None
    is_outside: bool = False


@dataclass(frozen=True, slots=True)
class Noticed:
    """Something that the user should know, though the slot continues."""

    slot: int
    text: str


@dataclass(frozen=True, slots=True)
class SubtaskMetrics:
    """What a subtask has read so far, its longest freeze, how long it has waited for the event time of other sources, and
    how many late records it has dropped."""

    records_in: int = 0
    pause_ms: float = 0.0
    waited_ms: int = 0
    late_dropped: int = 0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The slot lives. `memory_bytes` is what its process takes, 0 if it isn't known."""

    slot: int
    metrics: Mapping[str, SubtaskMetrics]
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TimeReached:
    """How far event time has come in the slot, by time group. It may be lost: it is repeated with the heartbeats."""

    slot: int
    reached: Mapping[str, Reached]


@dataclass(frozen=True, slots=True)
class Delivered:
    """Committed output of a sink that ends on the driver."""

    sink: str
    committable: str


@dataclass(frozen=True, slots=True)
class Committed:
    """All sinks of the slot have committed the output of this epoch and of the epochs before."""

    slot: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Done:
    """The final epoch is committed on this slot."""

    slot: int


# From the coordinator to slots.


@dataclass(frozen=True, slots=True)
class Deploy:
    """Connect to these addresses (by slot) and restore this epoch's snapshot (None: start empty).

    The snapshot is in the job's own store, or at `restore_from`, a path as `find_snapshot` takes it.
    """

    addresses: tuple[tuple[str, int], ...]
    epoch: int | None
    restore_from: str | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """All slots are ready: process records."""


@dataclass(frozen=True, slots=True)
class Trigger:
    """End this epoch at the sources. `ending` is given if it is the last epoch, and says why.

    A `full` snapshot builds on no earlier one. Otherwise increments build on that of epoch `base` (0: there is none).
    """

    epoch: int
    ending: str | None
    full: bool = False
    base: int = 0


@dataclass(frozen=True, slots=True)
class LeastTimes:
    """How far event time has come in the slowest source of each of these time groups. The other sources wait for it."""

    least: Mapping[str, Least]


@dataclass(frozen=True, slots=True)
class EndInput:
    """Stop reading: what the sources have read so far is the whole input."""


@dataclass(frozen=True, slots=True)
class Complete:
    epoch: int
    ending: str | None


@dataclass(frozen=True, slots=True)
class Abort:
    epoch: int


@dataclass(frozen=True, slots=True)
class Shutdown:
    reason: str


# Between a Spark task of a transform and the driver, on the link that is also the control link of the task's slot: before
# there is a slot (dataframes/gathering.py), and about the micro-batch (driver/batches.py).


@dataclass(frozen=True, slots=True)
class Offer:
    """A task has started: `task` of the Spark stage `stage`. If Spark starts the task again, its `number` is higher. `query`
    and `batch` name the micro-batch that the task is part of. `attempt` and `slot` are given if the process still holds that
    slot of that attempt, as the micro-batch before left it."""

    transform: str
    stage: int
    task: int
    number: int
    query: str | None = None
    batch: int | None = None
    attempt: int | None = None
    slot: int | None = None


@dataclass(frozen=True, slots=True)
class Assign:
    """Be this slot of this attempt. Its snapshots are in `store`. With `goes_on`, continue with the slot that the process
    holds. `now_ms` is the time of the micro-batch, which users' functions see, and `watermark_ms` the query's watermark."""

    attempt: int
    slot: int
    store: str
    goes_on: bool = False
    now_ms: int | None = None
    watermark_ms: int = 0


@dataclass(frozen=True, slots=True)
class InputRead:
    """The slot has read all input of the task."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask how many elements the slot has put on channels and taken from them. Each question has a number."""

    number: int


@dataclass(frozen=True, slots=True)
class Counted:
    """The answer to the question of this number. With `replays`, more elements follow without any input: from records in
    flight that a snapshot has restored, or from a timer that is due."""

    number: int
    sent: int
    taken: int
    replays: bool


@dataclass(frozen=True, slots=True)
class MoveTime:
    """Move time by one micro-batch in the watermark operator of this name; with `hold`, only fix the time that it will move
    to. Without a name, fire the timers that are due. No record is under way."""

    operator: str | None = None
    hold: bool = False


@dataclass(frozen=True, slots=True)
class Left:
    """The slot has ended, and its task waits for the verdict."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """End the task, with this error if there is one."""

    error: str | None


@dataclass(frozen=True, slots=True)
class Traffic:
    """How many elements were put on channels and taken from them, with `replays` as in `Counted`."""

    sent: int = 0
    taken: int = 0
    replays: bool = False

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent + other.sent, self.taken + other.taken, self.replays or other.replays)


Message: TypeAlias = (
    Register
    | Restoring
    | Writing
    | Ready
    | Acknowledge
    | Decline
    | InputEnded
    | Failed
    | Noticed
    | Heartbeat
    | TimeReached
    | Delivered
    | Committed
    | Done
    | Deploy
    | Start
    | Trigger
    | LeastTimes
    | EndInput
    | Complete
    | Abort
    | Shutdown
    | Offer
    | Assign
    | InputRead
    | Probe
    | Counted
    | MoveTime
    | Left
    | Verdict
)

_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Message)}


def to_wire(message: Message) -> dict[str, Any]:
    wire: dict[str, Any] = to_json(message)
    return {"kind": type(message).__name__} | wire


def from_wire(wire: dict[str, Any]) -> Message:
    values = dict(wire)
    kind = values.pop("kind", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ProtocolError(f"a message of unknown kind {kind!r}: do both sides run the same version of Tidegate?")
    try:
        message: Message = from_json(_KINDS[kind], values, kind)
    except ValueError as error:
        raise ProtocolError(f"a malformed {kind} message: {error}") from error
    return message
