"""Channels and control links in the simulation: first in, first out, with delays, bounds, cuts and loss.

A channel belongs to one attempt. What was sent is on the wire until its time has come, and then waits at the inlet; both
count towards the bound. An inlet that is blocked, or holds half of the bound (unless it is hurried), leaves the rest on the
wire, as a socket does. When a process ends, the other ends of its channels are notified a little later; if it died, elements
that were still on the wire may be lost. Each direction of a control link is delayed and held up separately. Messages travel
on a link in their wire form.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import pyarrow as pa

from tidegate.channels.elements import Element, End, Marker, overtaken
from tidegate.control.messages import Message, from_wire, to_wire
from tidegate.errors import ProtocolError
from tidegate.protocol.ids import ChannelId
from tidegate.testing.simulation.world import World

if TYPE_CHECKING:
    from tidegate.testing.simulation.processes import CoordinatorProcess, SlotProcess

CHANNEL_US = 200
LINK_US = 400
NOTICE_US = 2_000


class Channel:
    """Both ends of one channel between two slots."""

    def __init__(
        self, world: World, channel: ChannelId, *, max_elements: int, on_marker: Callable[[SlotProcess], None]
    ) -> None:
        self.channel = channel
        self.blocked = False
        self.schema: pa.Schema | None = None
        self.upstream: SlotProcess | None = None
        self.downstream: SlotProcess | None = None
        self._world = world
        self._max_elements = max_elements
        self._on_marker = on_marker
        self._wire: deque[tuple[int, Element]] = deque()
        self._arrived: deque[Element] = deque()
        self._markers: deque[Marker] = deque()  # those that have arrived
        self._hurried = False
        self._stalled = False  # an element that was due was left on the wire
        self._last_us = 0
        self._ended = False
        self._cut = False

    # The outlet.

    @property
    def full(self) -> bool:
        return len(self._wire) + len(self._arrived) > self._max_elements

    def send(self, element: Element) -> None:
        if isinstance(element, pa.RecordBatch):
            if self._ended:
                self._world.violate(f"a batch after End on {self.channel}")
            if not element.schema.equals(self.schema):
                self._world.violate(f"{self.channel} was agreed to carry {self.schema}, not {element.schema}")
        elif isinstance(element, End):
            self._ended = True
        if self._cut:
            return
        self._last_us = max(self._last_us, self._world.now_us + self._world.delay_us("channel", CHANNEL_US))
        self._wire.append((self._last_us, element))
        self._world.at(self._last_us, self._arrive)

    def close(self) -> None:
        """Do nothing: the elements that were sent can still be taken."""

    # The inlet.

    def __len__(self) -> int:
        return 0 if self.blocked else len(self._arrived)

    def peek(self) -> Element | None:
        return self._arrived[0] if self._arrived and not self.blocked else None

    def take(self) -> Element:
        assert not self.blocked, f"{self.channel} is blocked"
        was_full = self.full
        element = self._arrived.popleft()
        if self._markers and element is self._markers[0]:
            self._markers.popleft()
        self._made_room(was_full)
        return element

    def marker(self) -> Marker | None:
        return self._markers[0] if self._markers else None

    def overtake(self) -> list[pa.RecordBatch]:
        was_full = self.full
        position, batches = overtaken(self._arrived)
        del self._arrived[position]
        self._markers.popleft()
        self._made_room(was_full)
        return batches

    def hurry(self, on: bool) -> None:
        self._hurried = on
        self._read_on()

    def block(self) -> None:
        self.blocked = True

    def unblock(self) -> None:
        self.blocked = False
        self._read_on()

    # The world.

    def cut(self, *, keeps: int) -> None:
        """Lose everything except the first `keeps` elements on the wire."""
        self._cut = True
        while len(self._wire) > keeps:
            self._wire.pop()

    def _made_room(self, was_full: bool) -> None:
        self._read_on()
        if was_full and not self.full and self.upstream is not None:
            self.upstream.wake_soon()

    def _read_on(self) -> None:
        if self._stalled and not self._holds_back:
            self._stalled = False
            self._world.at(self._world.now_us, self._arrive)

    @property
    def _holds_back(self) -> bool:
        return self.blocked or (not self._hurried and len(self._arrived) > self._max_elements // 2)

    def _arrive(self) -> None:
        # An element that was due may have been lost in a cut, or delivered together with one that was due before it.
        while self._wire and self._wire[0][0] <= self._world.now_us:
            if self._holds_back:
                self._stalled = True
                return
            self._deliver(self._wire.popleft()[1])

    def _deliver(self, element: Element) -> None:
        if self.downstream is None or not self.downstream.alive:
            return
        self._arrived.append(element)
        self.downstream.wake_soon()
        if isinstance(element, Marker):
            self._markers.append(element)
            self._world.tell(f"{self.downstream.name}: marker {element.epoch} is at {self.channel}")
            self._on_marker(self.downstream)


class Wiring:
    """The channels of one attempt."""

    def __init__(self, world: World, *, max_elements: int, on_marker: Callable[[SlotProcess], None]) -> None:
        self.slots: list[SlotProcess] = []
        self._world = world
        self._max_elements = max_elements
        self._on_marker = on_marker
        self._channels: dict[ChannelId, Channel] = {}

    def channel(self, channel: ChannelId) -> Channel:
        if channel not in self._channels:
            self._channels[channel] = Channel(
                self._world, channel, max_elements=self._max_elements, on_marker=self._on_marker
            )
        return self._channels[channel]

    def between_slots(self) -> list[Channel]:
        """Return the channels of which both ends are alive."""
        return [
            channel
            for _, channel in sorted(self._channels.items())
            if channel.upstream is not None
            and channel.upstream.alive
            and channel.downstream is not None
            and channel.downstream.alive
        ]

    def cut(self, channel: Channel, reason: str) -> None:
        """Cut the channel, and notify both ends."""
        channel.cut(keeps=self._world.rng.randrange(4))
        for end in (channel.upstream, channel.downstream):
            if end is not None:
                self._notify(end, f"{channel.channel} was cut: {reason}")

    def process_ended(self, gone: SlotProcess, *, died: bool) -> None:
        for _, channel in sorted(self._channels.items()):
            if gone is channel.upstream and died:
                channel.cut(keeps=self._world.rng.randrange(8))
            other = channel.downstream if gone is channel.upstream else channel.upstream
            if gone in (channel.upstream, channel.downstream) and other is not None and other.alive:
                self._notify(other, f"{channel.channel}: {gone.name} is gone")

    def _notify(self, end: SlotProcess, reason: str) -> None:
        self._world.after(self._world.delay_us("channel", NOTICE_US), lambda: end.channel_lost(reason))


class SlotNetwork:
    """`slot.slot.Network` of one slot."""

    def __init__(self, wiring: Wiring, slot: SlotProcess) -> None:
        self._wiring = wiring
        self._slot = slot
        self.outlet = self.inlet = wiring.channel

    def connect(
        self, *, outgoing: Mapping[ChannelId, tuple[tuple[str, int], pa.Schema]], incoming: Mapping[ChannelId, pa.Schema]
    ) -> None:
        for channel_id, ((_, port), schema) in outgoing.items():
            self._reach(port)
            channel = self._wiring.channel(channel_id)
            channel.upstream = self._slot
            self._agree(channel, schema)
        for channel_id, schema in incoming.items():
            self._reach(channel_id.upstream)
            channel = self._wiring.channel(channel_id)
            channel.downstream = self._slot
            self._agree(channel, schema)

    def _reach(self, index: int) -> None:
        if not self._wiring.slots[index].alive:
            raise ProtocolError(f"slot {index} can't be reached")

    def _agree(self, channel: Channel, schema: pa.Schema) -> None:
        if channel.schema is not None and not channel.schema.equals(schema):
            raise ProtocolError(f"{channel.channel}: its ends don't agree about the schema")
        channel.schema = schema


class _Direction:
    """One direction of a control link."""

    def __init__(self, world: World, deliver: Callable[[str | None], None]) -> None:
        self.held_until_us = 0
        self._world = world
        self._deliver = deliver
        self._waiting: deque[tuple[int, str | None]] = deque()
        self._last_us = 0
        self._closed = False

    def send(self, message: Message) -> None:
        if not self._closed:
            self._push(json.dumps(to_wire(message)), LINK_US)

    def close(self, *, keeps: int | None = None) -> None:
        """Deliver the messages that are on their way (only the first `keeps`), then None, to the other end."""
        if self._closed:
            return
        self._closed = True
        while keeps is not None and len(self._waiting) > keeps:
            self._waiting.pop()
        self._push(None, NOTICE_US)

    def _push(self, wire: str | None, typical_us: int) -> None:
        self._last_us = max(self._last_us, self._world.now_us + self._world.delay_us("link", typical_us))
        self._waiting.append((self._last_us, wire))
        self._world.at(self._last_us, self._arrive)

    def _arrive(self) -> None:
        if not self._waiting or self._waiting[0][0] > self._world.now_us:
            return
        if self._world.now_us < self.held_until_us:
            self._world.at(self.held_until_us, self._arrive)
            return
        self._deliver(self._waiting.popleft()[1])


class ControlLink:
    """The link between a slot and its coordinator."""

    def __init__(self, world: World, slot: SlotProcess, coordinator: CoordinatorProcess) -> None:
        self.slot = slot
        self.coordinator = coordinator
        self.up = _Direction(world, lambda wire: coordinator.arrived(self, wire))
        self.down = _Direction(world, slot.arrived)


class CoordinatorLinks:
    """`driver.coordinator.Links`."""

    def __init__(self, world: World, announced: Callable[[int, Message], None]) -> None:
        self.expected: int | None = None
        self._world = world
        self._announced = announced
        self._by_slot: dict[int, ControlLink] = {}

    def expect(self, attempt: int) -> None:
        self.expected = attempt
        for link in self._by_slot.values():
            link.down.close()
        self._by_slot = {}

    def send(self, slot: int, message: Message) -> None:
        if slot in self._by_slot:
            assert self.expected is not None
            self._announced(self.expected, message)
            self._by_slot[slot].down.send(message)

    def admit(self, link: ControlLink) -> bool:
        """Admit a link at its handshake, if it is of the expected attempt and the slot's first."""
        if link.slot.attempt != self.expected or link.slot.index in self._by_slot:
            return False
        self._by_slot[link.slot.index] = link
        return True

    def knows(self, link: ControlLink) -> bool:
        return self._by_slot.get(link.slot.index) is link

    def forget(self, link: ControlLink) -> None:
        del self._by_slot[link.slot.index]

    def close(self, *, died: bool) -> None:
        for link in self._by_slot.values():
            link.down.close(keeps=self._world.rng.randrange(4) if died else None)
        self._by_slot = {}


def decoded(wire: str) -> Message:
    return from_wire(json.loads(wire))
