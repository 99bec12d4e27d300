"""What a user can set about snapshots, restarts and the running of a job, with the defaults that fit most."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import ClassVar, Literal, Protocol, TypeAlias, get_args

import pyarrow as pa

from tidegate import arguments, logs
from tidegate.arguments import ClockDuration, Size
from tidegate.control.listening import LOOPBACK, Listening, parse_ports, slot_listening
from tidegate.dataflow.operators.base import KeyedBackend
from tidegate.dataflow.operators.combine import CombineLimits
from tidegate.errors import JobError
from tidegate.protocol.alignment import AlignmentMode
from tidegate.protocol.epoch_coordinator import CoordinatorSettings
from tidegate.protocol.restart import Exponential, FixedDelay, NoRestart, RestartStrategy
from tidegate.state.heap import HeapBackend

Mode: TypeAlias = Literal["exactly_once", "at_least_once", "unaligned"]
MODES: tuple[Mode, ...] = get_args(Mode)
MAX_KEY_GROUPS = 32_768


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshots:
    """How often snapshots of the job's state are taken, and where they are kept.

    `every=None` takes a snapshot only at the end of bounded input, at `stop()` and at `handle.snapshot()`. `retain`
    complete snapshots are kept; older ones are deleted. `local_copies` is a folder on the slots' own disks. It keeps copies
    of what slots write, up to `local_copies_size`, so that a slot that restarts on its host need not download its state.

    `mode` is what a rollback promises and what a snapshot costs (docs/consistency.md). "exactly_once" blocks the channels
    that are ahead until the other channels have caught up. "unaligned" blocks none and keeps the records in flight in the
    snapshot, for jobs under back-pressure. "at_least_once" blocks none and keeps no records, so after a rollback records may
    be processed twice. An exactly-once snapshot that takes longer than `alignment_timeout` continues unaligned.
    """

    to: str
    every: ClockDuration | None = "10 s"
    min_pause: ClockDuration = 0
    timeout: ClockDuration = "10 minutes"
    tolerable_failures: int = 3
    retain: int = 2
    local_copies: str | None = None
    local_copies_size: Size = "16 GB"
    mode: Mode = "exactly_once"
    alignment_timeout: ClockDuration | None = None

    def __post_init__(self) -> None:
        arguments.text("Snapshots", "to", self.to, "the folder, such as 'snapshots/' or 's3://bucket/snapshots'")
        if self.every is not None and arguments.clock_ms("Snapshots", "every", self.every) == 0:
            raise JobError(f"Snapshots(every={self.every!r}): give a time, or None for snapshots at the end only")
        arguments.clock_ms("Snapshots", "min_pause", self.min_pause)
        if arguments.clock_ms("Snapshots", "timeout", self.timeout) == 0:
            raise JobError(f"Snapshots(timeout={self.timeout!r}): no snapshot would ever be complete in time")
        arguments.whole_number("Snapshots", "tolerable_failures", self.tolerable_failures)
        if arguments.whole_number("Snapshots", "retain", self.retain) == 0:
            raise JobError(f"Snapshots(retain={self.retain}): at least one snapshot must be kept to recover from")
        if self.local_copies is not None:
            arguments.text("Snapshots", "local_copies", self.local_copies, "a folder on the slots' own disks, or None")
        arguments.byte_count("Snapshots", "local_copies_size", self.local_copies_size, at_least=1)
        arguments.one_of("Snapshots", "mode", self.mode, MODES)
        if self.alignment_timeout is not None:
            arguments.clock_ms("Snapshots", "alignment_timeout", self.alignment_timeout)
        if self.mode != "exactly_once" and self.alignment_timeout is not None:
            raise JobError(
                f"Snapshots(mode={self.mode!r}, alignment_timeout={self.alignment_timeout!r}): only exactly-once "
                f"snapshots are aligned, so leave one of the two out"
            )

    @property
    def local_copies_bytes(self) -> int:
        """`local_copies_size` as a number."""
        return arguments.byte_count("Snapshots", "local_copies_size", self.local_copies_size)

    @property
    def alignment_mode(self) -> AlignmentMode:
        """What subtasks do with a channel that is ahead."""
        return AlignmentMode.AT_LEAST_ONCE if self.mode == "at_least_once" else AlignmentMode.EXACTLY_ONCE

    @property
    def hurry_after_ms(self) -> int | None:
        """How long an epoch may be under way before its markers overtake; None: they never do."""
        if self.mode == "unaligned":
            return 0
        return None if self.alignment_timeout is None else self._ms("alignment_timeout")

    @property
    def logs_in_flight(self) -> bool:
        """Whether snapshots may hold records that were under way."""
        return self.hurry_after_ms is not None or self.alignment_mode is AlignmentMode.LOGGING

    @property
    def halts_sources(self) -> bool:
        """Whether sources pause while a snapshot is taken. No mode does that; experiments may."""
        return False

    def coordinator_settings(self) -> CoordinatorSettings:
        """What the coordinator goes by, as numbers."""
        return CoordinatorSettings(
            interval_ms=None if self.every is None else self._ms("every"),
            min_pause_ms=self._ms("min_pause"),
            timeout_ms=self._ms("timeout"),
            tolerable_failures=self.tolerable_failures,
            retain=self.retain,
        )

    def _ms(self, name: str) -> int:
        return arguments.clock_ms("Snapshots", name, getattr(self, name))


# How much larger batches get under load by default, and from what size on.
GROWTH, LEAST_GROWN_ROWS = 8, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How the engine runs. The defaults are measured (`benchmarks/`); change them for a reason."""

    max_batch_rows: int = 8192  # a source's batch; also what small batches are joined to
    # The same under load, if no operator handles records one by one. None: eight times `max_batch_rows` if that is 1,024 or
    # more. Fewer are given by those who want few records in a batch.
    max_column_rows: int | None = None
    linger: ClockDuration = "2 ms"  # how long a source waits for more records before it sends a small batch
    key_group_count: int = 128  # fixed for the life of a job's state
    chaining: bool = True
    # How long records may wait under load to be aggregated before the exchange, so that those of a key cross it as one.
    # None: every record crosses it.
    combine: ClockDuration | None = "50 ms"
    coordinator_bind_host: str | None = (
        None  # where the coordinator listens; None: loopback, on a cluster as Spark's driver does
    )
    coordinator_host: str | None = None  # where slots find it, if that isn't where it listens (NAT, a service's name)
    coordinator_ports: int | str | None = None  # "40000-40019": the first that is free; None: any
    slot_ports: int | str | None = None  # the same on the slots' hosts
    heartbeat: ClockDuration = "1 s"
    heartbeat_timeout: ClockDuration = "30 s"  # longer than any single call of a user's function may take
    deploy_timeout: ClockDuration = "2 minutes"
    loop_memory: Size = "64 MB"  # what a loop's way back holds in memory; more goes to the slot's disk
    log_format: Literal["text", "json"] = "text"  # both for a program that sets up no logging itself
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    # What the engine reads, some of it in every step: the same as numbers.
    linger_ms: int = field(init=False, repr=False, compare=False)
    heartbeat_ms: int = field(init=False, repr=False, compare=False)
    heartbeat_timeout_ms: int = field(init=False, repr=False, compare=False)
    deploy_timeout_ms: int = field(init=False, repr=False, compare=False)
    loop_memory_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        arguments.whole_number("Tuning", "key_group_count", self.key_group_count, at_least=1, at_most=MAX_KEY_GROUPS)
        arguments.whole_number("Tuning", "max_batch_rows", self.max_batch_rows, at_least=1)
        if self.max_column_rows is not None:
            arguments.whole_number("Tuning", "max_column_rows", self.max_column_rows, at_least=self.max_batch_rows)
        arguments.flag("Tuning", "chaining", self.chaining)
        if self.combine is not None:
            arguments.clock_ms("Tuning", "combine", self.combine, at_least_ms=1)
        for name in ("coordinator_bind_host", "coordinator_host"):
            if getattr(self, name) is not None:
                arguments.text("Tuning", name, getattr(self, name), "the name or address of a host, or None")
        for name, at_least_ms in {"linger": 0, "heartbeat": 1, "heartbeat_timeout": 1, "deploy_timeout": 1}.items():
            ms = arguments.clock_ms("Tuning", name, getattr(self, name), at_least_ms=at_least_ms)
            object.__setattr__(self, f"{name}_ms", ms)
        object.__setattr__(self, "loop_memory_bytes", arguments.byte_count("Tuning", "loop_memory", self.loop_memory))
        if self.heartbeat_timeout_ms <= 2 * self.heartbeat_ms:
            raise JobError(
                f"Tuning(heartbeat={self.heartbeat!r}, heartbeat_timeout={self.heartbeat_timeout!r}): give a timeout more "
                f"than twice as long as the heartbeat"
            )
        arguments.one_of("Tuning", "log_format", self.log_format, logs.FORMATS)
        arguments.one_of("Tuning", "log_level", self.log_level, logs.LEVELS)
        parse_ports(self.coordinator_ports, setting="coordinator_ports")
        parse_ports(self.slot_ports, setting="slot_ports")

    @property
    def max_grown_rows(self) -> int:
        """`max_column_rows`, or its default."""
        if self.max_column_rows is not None:
            return self.max_column_rows
        return self.max_batch_rows * (GROWTH if self.max_batch_rows >= LEAST_GROWN_ROWS else 1)

    @property
    def combine_limits(self) -> CombineLimits | None:
        """What operators that aggregate before the exchange go by; None: there are none."""
        if self.combine is None:
            return None
        return CombineLimits(hold_ms=arguments.clock_ms("Tuning", "combine", self.combine, at_least_ms=1))

    @property
    def coordinator_listening(self) -> Listening:
        """Where the coordinator listens, and where slots find it."""
        return Listening(
            who="the coordinator",
            bind_host=self.coordinator_bind_host or LOOPBACK,
            ports=parse_ports(self.coordinator_ports, setting="coordinator_ports"),
            host=self.coordinator_host,
            bind_setting="tg.Tuning(coordinator_bind_host=…)",
            host_setting="tg.Tuning(coordinator_host=…)",
            ports_setting='tg.Tuning(coordinator_ports="40000-40019")',
        )

    def slot_listening(self, index: int, *, own_end: str) -> Listening:
        """Return where a slot listens, in its process. `own_end` is its address on its connection to the coordinator."""
        return slot_listening(
            index, own_end=own_end, environment=os.environ, ports=parse_ports(self.slot_ports, setting="slot_ports")
        )


# An interpreter with Arrow and no state takes about half of that.
MIN_HEAP_BYTES = 256 << 20


class Backend(Protocol):
    """Where live keyed state is kept; picklable. `native` names the form of the backend's own files in snapshots, if it has
    any, and `folder` is where these files are put while the backend loads them."""

    @property
    def native(self) -> str | None:
        """The name of the form of its files, or None if it has none."""

    @property
    def folder(self) -> str | None:
        """A folder on the slots' own disks, or None for the system's."""

    def create(
        self, *, key_type: pa.DataType, key_group_count: int, now_ms: Callable[[], int], native: Path | None = None
    ) -> KeyedBackend:
        """Return a backend for one operator in one subtask, with the state in `native` if that folder of its files is given.
        `now_ms` is the slot's clock, for state with a ttl."""


@dataclass(frozen=True, slots=True)
class Heap:
    """State in the slot's own memory: the fastest, as long as it fits.

    `memory` is how much a slot's process may take: "4 GB". At 80 % of that the slot logs a warning, and above it the job
    fails with an error that says what to do. None: there is no limit but that of the system, which kills the process. Leave
    a fifth of the memory that the process really has, for what it allocates between two measurements.
    """

    memory: Size | None = None
    native: ClassVar[None] = None
    folder: ClassVar[None] = None

    def __post_init__(self) -> None:
        if self.memory is not None:
            arguments.byte_count("Heap", "memory", self.memory, at_least=MIN_HEAP_BYTES)

    @property
    def memory_limit_bytes(self) -> int | None:
        """The number of bytes that `memory` means."""
        return None if self.memory is None else arguments.byte_count("Heap", "memory", self.memory)

    def create(
        self, *, key_type: pa.DataType, key_group_count: int, now_ms: Callable[[], int], native: Path | None = None
    ) -> KeyedBackend:
        """Return a backend for one operator in one subtask."""
        assert native is None, "the heap has no files of its own"
        return HeapBackend(key_type=key_type, key_group_count=key_group_count, now_ms=now_ms)


DEFAULT_RESTART: RestartStrategy = Exponential(
    initial="500 ms", maximum="30 s", multiplier=2.0, attempts=10, reset_after="5 minutes", outlasts="1 day"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """Everything the coordinator needs to know besides the plan."""

    name: str
    snapshots: Snapshots
    restart: RestartStrategy = DEFAULT_RESTART
    tuning: Tuning = field(default_factory=Tuning)
    backend: Backend = field(default_factory=Heap)
    drop_state: tuple[str, ...] = ()
    writes_state: bool = True  # False: epochs end as ever, and nothing is written of their state
    writers_rest: bool = True  # False: nothing is processed while a snapshot is written, so nobody needs to give way
    drains: bool = False  # whether event time ends with the input of a transform of batch DataFrames
    at_the_end: str = "the job ends"  # what the log says follows a failure after which there is no restart

    def __post_init__(self) -> None:
        """Check the classes, which would otherwise be an error of Python's much later."""
        check_snapshots(self.snapshots)
        _check(
            "restart",
            self.restart,
            isinstance(self.restart, NoRestart | FixedDelay | Exponential),
            "tg.NoRestart(), tg.FixedDelay(attempts=3, delay='1 s') or tg.Exponential(…)",
        )
        check_tuning(self.tuning)
        is_backend = all(hasattr(self.backend, name) for name in ("native", "folder", "create"))
        _check("backend", self.backend, is_backend and not isinstance(self.backend, type), "tg.Heap() or tg.RocksDB()")


def check_snapshots(snapshots: object) -> None:
    _check("snapshots", snapshots, isinstance(snapshots, Snapshots), 'tg.Snapshots(to="snapshots/")')


def check_tuning(tuning: object) -> None:
    _check("tuning", tuning, isinstance(tuning, Tuning), "tg.Tuning(…)")


def check_slots(slots: object) -> None:
    _check("slots", slots, isinstance(slots, Integral) and not isinstance(slots, bool), "a number")


def _check(name: str, value: object, is_one: bool, give: str) -> None:
    if not is_one:
        raise JobError(f"{name}={value!r}: give {give}")
