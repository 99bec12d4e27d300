"""What slots and the coordinator say to each other, and its form on the wire.

Every message is a frozen dataclass that types/json_form.py can encode. `from_wire` checks the kind, the names and the types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tidegate.errors import ProtocolError
from tidegate.snapshots.manifest import OperatorEntry
from tidegate.snapshots.stats import SubtaskStats
from tidegate.types.json_form import from_json, to_json

# From a slot to the coordinator.


@dataclass(frozen=True, slots=True)
class Register:
    """A slot is there and listens for channels at host and port. `machine` is the host's own name for itself."""

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
    """A subtask couldn't write its part to the store; the epoch is to be aborted, the job goes on."""

    vertex: int
    subtask: int
    epoch: int
    message: str


@dataclass(frozen=True, slots=True)
class InputEnded:
    """A source subtask has come to the end of its input, or a loop that has none left is empty."""

    vertex: int
    subtask: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The slot can't go on. `permanent`: it would end the same way in any other attempt. `signature` is a
    `UserFunctionError`'s."""

    slot: int
    message: str
    operator: str | None = None
    user_traceback: str | None = None
    record: str | None = None
    permanent: bool = False
    signature: str | None = None


@dataclass(frozen=True, slots=True)
class Noticed:
    """Something that the user should know, though the slot goes on."""

    slot: int
    text: str


@dataclass(frozen=True, slots=True)
class SubtaskMetrics:
    """What a subtask has read so far, and its longest freeze."""

    records_in: int = 0
    pause_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    slot: int
    metrics: Mapping[str, SubtaskMetrics]


@dataclass(frozen=True, slots=True)
class Delivered:
    """Committed output of a sink that ends on the driver."""

    sink: str
    committable: str


@dataclass(frozen=True, slots=True)
class Committed:
    """All sinks of the slot have committed what is due with this epoch and those before."""

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

    It is in the job's own store, or where `restore_from` says: what `find_snapshot` takes.
    """

    addresses: tuple[tuple[str, int], ...]
    epoch: int | None
    restore_from: str | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """Everybody is ready."""


@dataclass(frozen=True, slots=True)
class Trigger:
    """End this epoch at the sources. `ending` says why nothing follows, where nothing does.

    `full`: its snapshot builds on no earlier one; otherwise increments build on that of epoch `base` (0: there is none).
    """

    epoch: int
    ending: str | None
    full: bool = False
    base: int = 0


@dataclass(frozen=True, slots=True)
class EndInput:
    """Sources shall take what they have read for all there is."""


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


# Between a Spark task that brings a slot along and the driver, on the link that is the slot's control link as well: before
# the slot is there (dataframes/gathering.py), and about the micro-batch (driver/batches.py).


@dataclass(frozen=True, slots=True)
class Offer:
    """A task is there. `stage` and `task` say which one of which Spark stage, `number` tells its repetitions apart: a later
    one has a higher number. `query` and `batch` name the micro-batch that it is of. `attempt` and `slot` are given where the
    process still holds that slot of that attempt, as the micro-batch before left it."""

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
    """Be this slot of this attempt; snapshots are in that store. `goes_on`: with the slot that the process holds. `now_ms`
    is the time of the micro-batch, which users' functions see, and `watermark_ms` the query's watermark."""

    attempt: int
    slot: int
    store: str
    goes_on: bool = False
    now_ms: int | None = None
    watermark_ms: int = 0


@dataclass(frozen=True, slots=True)
class InputRead:
    """The slot has taken in all that the task was given."""


@dataclass(frozen=True, slots=True)
class Probe:
    """How many elements has the slot put on channels and taken from them? The number tells one question from the next."""

    number: int


@dataclass(frozen=True, slots=True)
class Counted:
    """The answer. `replays`: there are some that a snapshot brought along and that aren't on a channel yet, or that a timer
    will make at once."""

    number: int
    sent: int
    taken: int
    replays: bool


@dataclass(frozen=True, slots=True)
class MoveTime:
    """No record is under way. The watermark operator of this name moves time by one micro-batch, or only holds what it will
    move it to. Without a name, timers that are due fire."""

    operator: str | None = None
    hold: bool = False


@dataclass(frozen=True, slots=True)
class Left:
    """The slot is no more; its task waits for the verdict."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The task may end; with this error, where there is one."""

    error: str | None


@dataclass(frozen=True, slots=True)
class Traffic:
    """What was put on channels and taken from them. `replays`: something that a snapshot had under way is still to be fed
    in, or a timer of the micro-batch's time is due."""

    sent: int = 0
    taken: int = 0
    replays: bool = False

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent + other.sent, self.taken + other.taken, self.replays or other.replays)


Message: TypeAlias = (
    Register
    | Ready
    | Acknowledge
    | Decline
    | InputEnded
    | Failed
    | Noticed
    | Heartbeat
    | Delivered
    | Committed
    | Done
    | Deploy
    | Start
    | Trigger
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

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Register,
        Ready,
        Acknowledge,
        Decline,
        InputEnded,
        Failed,
        Noticed,
        Heartbeat,
        Delivered,
        Committed,
        Done,
        Deploy,
        Start,
        Trigger,
        EndInput,
        Complete,
        Abort,
        Shutdown,
        Offer,
        Assign,
        InputRead,
        Probe,
        Counted,
        MoveTime,
        Left,
        Verdict,
    )
}


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
