"""What a user can set about snapshots, restarts and the running of a job, with the defaults that fit most."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from numbers import Integral
from pathlib import Path
from typing import ClassVar, Protocol

import pyarrow as pa

from tidegate.dataflow.operators.base import KeyedBackend
from tidegate.errors import JobError
from tidegate.protocol.alignment import AlignmentMode
from tidegate.protocol.epoch_coordinator import CoordinatorSettings
from tidegate.protocol.restart import Exponential, FixedDelay, NoRestart, RestartStrategy
from tidegate.runtime.listening import Listening, coordinator_listening, parse_ports, slot_listening
from tidegate.state.heap import HeapBackend
from tidegate.types import parse_duration_ms

Duration = str | int | float | timedelta

MODES = ("exactly_once", "at_least_once", "unaligned")
EXPERIMENTS = ("chandy_lamport", "stop_the_world")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshots:
    """How often the job's state is kept, and where.

    `every=None` takes a snapshot only at the end of bounded input, at `stop()` and at `handle.snapshot()`. `retain`
    complete snapshots are kept; older ones are deleted. `local_copies` is a folder on the slots' own disks: what they write
    is kept there, too, up to `local_copies_bytes`, so that a slot that comes back on its host need not download it.

    `mode` is what a rollback promises and what a snapshot costs (docs/consistency.md): "exactly_once" stops the channels
    that are ahead until the others have caught up; "unaligned" stops none and keeps the records under way in the snapshot
    instead, for jobs under back-pressure; "at_least_once" stops none and keeps nothing, and after a rollback records may
    be processed twice. `alignment_timeout` lets an exactly-once snapshot that isn't through after that time go on unaligned.
    `experimental_protocol` is for measuring the protocols that the paper argues against: "chandy_lamport" or
    "stop_the_world".
    """

    to: str
    every: Duration | None = "10 s"
    min_pause: Duration = 0
    timeout: Duration = "10 minutes"
    tolerable_failures: int = 3
    retain: int = 2
    local_copies: str | None = None
    local_copies_bytes: int = 16 << 30
    mode: str = "exactly_once"
    alignment_timeout: Duration | None = None
    experimental_protocol: str | None = None

    def __post_init__(self) -> None:
        if self.retain < 1:
            raise JobError(f"Snapshots(retain={self.retain}): at least one snapshot must be kept to recover from")
        if self.every is not None and parse_duration_ms(self.every) == 0:
            raise JobError(f"Snapshots(every={self.every!r}): give a time, or None for snapshots at the end only")
        if parse_duration_ms(self.timeout) == 0:
            raise JobError(f"Snapshots(timeout={self.timeout!r}): no snapshot would ever be complete in time")
        if self.tolerable_failures < 0:
            raise JobError(f"Snapshots(tolerable_failures={self.tolerable_failures}): 0 or more may fail in a row")
        if self.local_copies_bytes < 1:
            raise JobError(f"Snapshots(local_copies_bytes={self.local_copies_bytes}): give a number of bytes")
        self._check_mode()
        self.coordinator_settings()

    def _check_mode(self) -> None:
        if self.mode not in MODES:
            raise JobError(f"Snapshots(mode={self.mode!r}): choose one of {', '.join(map(repr, MODES))}")
        if self.experimental_protocol not in (None, *EXPERIMENTS):
            raise JobError(
                f"Snapshots(experimental_protocol={self.experimental_protocol!r}): choose None or one of "
                f"{', '.join(map(repr, EXPERIMENTS))}"
            )
        if self.mode != "exactly_once" and self.alignment_timeout is not None:
            raise JobError(
                f"Snapshots(mode={self.mode!r}, alignment_timeout={self.alignment_timeout!r}): only exactly-once "
                f"snapshots are aligned, so leave one of the two out"
            )
        if self.experimental_protocol is not None and (self.mode != "exactly_once" or self.alignment_timeout is not None):
            raise JobError(
                f"Snapshots(experimental_protocol={self.experimental_protocol!r}) is a protocol of its own: "
                f"leave mode and alignment_timeout out"
            )

    @property
    def alignment_mode(self) -> AlignmentMode:
        if self.experimental_protocol == "chandy_lamport":
            return AlignmentMode.LOGGING
        return AlignmentMode.AT_LEAST_ONCE if self.mode == "at_least_once" else AlignmentMode.EXACTLY_ONCE

    @property
    def hurry_after_ms(self) -> int | None:
        """How long an epoch may be under way before its markers overtake; None: they never do."""
        if self.mode == "unaligned":
            return 0
        return None if self.alignment_timeout is None else parse_duration_ms(self.alignment_timeout)

    @property
    def keeps_in_flight(self) -> bool:
        """Whether snapshots may hold records that were under way."""
        return self.hurry_after_ms is not None or self.alignment_mode is AlignmentMode.LOGGING

    @property
    def halts_sources(self) -> bool:
        return self.experimental_protocol == "stop_the_world"

    def coordinator_settings(self) -> CoordinatorSettings:
        return CoordinatorSettings(
            interval_ms=None if self.every is None else parse_duration_ms(self.every),
            min_pause_ms=parse_duration_ms(self.min_pause),
            timeout_ms=parse_duration_ms(self.timeout),
            tolerable_failures=self.tolerable_failures,
            retain=self.retain,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How the engine runs. The defaults are measured (`benchmarks/`); change them for a reason."""

    max_batch_rows: int = 8192  # a source's batch; also what small batches are joined to
    linger_ms: int = 2  # how long a source waits for more records before it sends a small batch
    key_group_count: int = 128  # fixed for the life of a job's state
    chaining: bool = True
    coordinator_bind_host: str | None = (
        None  # where the coordinator listens; None: loopback, on a cluster as Spark's driver does
    )
    coordinator_host: str | None = None  # where slots find it, if that isn't where it listens (NAT, a service's name)
    coordinator_ports: int | str | None = None  # "40000-40019": the first that is free; None: any
    slot_ports: int | str | None = None  # the same on the slots' hosts
    heartbeat_ms: int = 1_000
    heartbeat_timeout_ms: int = 30_000  # longer than any single call of a user's function may take
    deploy_timeout_ms: int = 120_000
    loop_memory_bytes: int = 64 << 20  # what a loop's way back holds in memory; more goes to the slot's disk

    def __post_init__(self) -> None:
        if not 1 <= self.key_group_count <= 32_768:
            raise JobError(f"key_group_count={self.key_group_count}: choose 1 to 32768")
        if self.max_batch_rows < 1 or self.linger_ms < 0:
            raise JobError("max_batch_rows must be at least 1 and linger_ms at least 0")
        if self.heartbeat_ms < 1 or self.heartbeat_timeout_ms <= 2 * self.heartbeat_ms:
            raise JobError("heartbeat_ms must be at least 1, and heartbeat_timeout_ms more than twice as much")
        if self.deploy_timeout_ms < 1:
            raise JobError(f"deploy_timeout_ms={self.deploy_timeout_ms}: no slot would ever be ready in time")
        if self.loop_memory_bytes < 0:
            raise JobError(f"loop_memory_bytes={self.loop_memory_bytes}: give a number of bytes, 0 for none")
        parse_ports(self.coordinator_ports, setting="coordinator_ports")
        parse_ports(self.slot_ports, setting="slot_ports")

    @property
    def coordinator_listening(self) -> Listening:
        return coordinator_listening(
            bind_host=self.coordinator_bind_host,
            host=self.coordinator_host,
            ports=parse_ports(self.coordinator_ports, setting="coordinator_ports"),
        )

    def slot_listening(self, index: int, *, own_end: str) -> Listening:
        """In the slot's process, whose address on its connection to the coordinator is given."""
        return slot_listening(
            index, own_end=own_end, environment=os.environ, ports=parse_ports(self.slot_ports, setting="slot_ports")
        )


class Backend(Protocol):
    """Where live keyed state is kept; picklable. `native` names the form of its own files in snapshots, where it has any,
    and `folder` is where it wants them while it takes them in."""

    @property
    def native(self) -> str | None: ...

    @property
    def folder(self) -> str | None: ...

    def create(
        self, *, key_type: pa.DataType, key_group_count: int, now_ms: Callable[[], int], native: Path | None = None
    ) -> KeyedBackend:
        """A backend; with a folder of its files, one that goes on from them. `now_ms` is the slot's clock, for state with a
        ttl."""


@dataclass(frozen=True, slots=True)
class Heap:
    """State in the slot's own memory: the fastest, as long as it fits."""

    native: ClassVar[None] = None
    folder: ClassVar[None] = None

    def create(
        self, *, key_type: pa.DataType, key_group_count: int, now_ms: Callable[[], int], native: Path | None = None
    ) -> KeyedBackend:
        assert native is None, "the heap has no files of its own"
        return HeapBackend(key_type=key_type, key_group_count=key_group_count, now_ms=now_ms)


DEFAULT_RESTART: RestartStrategy = Exponential(
    initial_ms=500, maximum_ms=30_000, multiplier=2.0, attempts=10, reset_after_ms=300_000
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """Everything the coordinator needs to know beside the plan."""

    name: str
    snapshots: Snapshots
    restart: RestartStrategy = DEFAULT_RESTART
    tuning: Tuning = field(default_factory=Tuning)
    backend: Backend = field(default_factory=Heap)
    drop_state: tuple[str, ...] = ()
    keeps_state: bool = True  # False: epochs end as ever, and nothing is written of their state
    writers_rest: bool = True  # False: nothing is processed while a snapshot is written, so nobody needs to give way
    at_the_end: str = "the job ends"  # what the log says follows a failure after which there is no restart

    def __post_init__(self) -> None:
        """What isn't of its class would be an error of Python's much later."""
        check_snapshots(self.snapshots)
        _check(
            "restart",
            self.restart,
            isinstance(self.restart, NoRestart | FixedDelay | Exponential),
            "tg.NoRestart(), tg.FixedDelay(attempts=3, delay_ms=1_000) or tg.Exponential(…)",
        )
        _check("tuning", self.tuning, isinstance(self.tuning, Tuning), "tg.Tuning(…)")
        is_backend = all(hasattr(self.backend, name) for name in ("native", "folder", "create"))
        _check("backend", self.backend, is_backend and not isinstance(self.backend, type), "tg.Heap() or tg.RocksDB()")


def check_snapshots(snapshots: object) -> None:
    _check("snapshots", snapshots, isinstance(snapshots, Snapshots), 'tg.Snapshots(to="snapshots/")')


def check_slots(slots: object) -> None:
    _check("slots", slots, isinstance(slots, Integral) and not isinstance(slots, bool), "a number")


def _check(name: str, value: object, is_one: bool, give: str) -> None:
    if not is_one:
        raise JobError(f"{name}={value!r}: give {give}")
