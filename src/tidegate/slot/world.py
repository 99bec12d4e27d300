"""What a slot uses of the outside world. It is injected, so that a Spark task and the simulation run the same code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import pyarrow as pa

from tidegate.channels.ports import Inlet, Outlet
from tidegate.control.background import Background
from tidegate.control.clock import BatchTime, Clock
from tidegate.control.messages import Message
from tidegate.dataflow.operators.budget import Budget
from tidegate.logs import Speak, keep_silent
from tidegate.protocol.ids import ChannelId
from tidegate.slot.memory import MemoryWatch
from tidegate.store.base import Store


class Network(Protocol):
    """Channels to other slots."""

    def connect(
        self, *, outgoing: Mapping[ChannelId, tuple[tuple[str, int], pa.Schema]], incoming: Mapping[ChannelId, pa.Schema]
    ) -> None: ...

    def outlet(self, channel: ChannelId) -> Outlet: ...

    def inlet(self, channel: ChannelId) -> Inlet: ...


@dataclass(frozen=True, slots=True)
class SlotWorld:
    """What a slot uses of the outside world."""

    network: Network
    store: Store
    clock: Clock
    background: Background
    tell: Callable[[Message], None]
    speak: Speak = keep_silent  # the logger
    make_budget: Callable[[], Budget] | None = None  # of a subtask's steps, if `clock` doesn't measure them
    memory: MemoryWatch = field(default_factory=partial(MemoryWatch, None, resident_bytes=lambda: 0))
    batch_time: BatchTime | None = None  # what users' functions see in place of the clock, in a micro-batch
