"""The two ends of a channel: a TCP connection, non-blocking, served by the slot's single-threaded loop.

- Sending writes at once what the socket takes and queues the rest. An outlet is `full` above a bound of queued bytes.
  It is registered for writing only while something is queued.
- An inlet that is blocked, or holds more than its bound, isn't registered for reading. The kernel's buffers fill, then
  the sender's queue, and the sender finds its outlet full. Nothing is lost and no other channel waits.
- A hurried inlet has a larger bound than all that can be in flight when a marker is sent, so the marker arrives. There is
  still a bound, since a sender whose marker is late could otherwise fill this slot's memory.
- Each side sends a CLOSE frame before it closes. A connection that ends without one is lost, which each end reports
  once, to `on_lost`. Elements received before stay available.

Not here: how the two ends find each other (`tcp.py`).
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Callable
from enum import Enum

import pyarrow as pa

from tidegate.channels import frames
from tidegate.channels.element_queue import ElementQueue
from tidegate.channels.elements import Element
from tidegate.channels.frames import FrameAssembler, Kind, SendQueue
from tidegate.channels.handshake import READ, WRITE, Registration
from tidegate.errors import ProtocolError
from tidegate.protocol.ids import ChannelId

MAX_QUEUED_BYTES = 4 << 20
MAX_QUEUED_ELEMENTS = 1_024
MAX_HURRIED_BYTES = 64 << 20
MAX_HURRIED_ELEMENTS = 64 << 10


class ChannelLost(ProtocolError):
    """The connection of a channel ended without a CLOSE frame, or carried invalid data. The attempt can't continue."""

    def __init__(self, channel: ChannelId, reason: str) -> None:
        super().__init__(channel, reason)
        self.channel = channel
        self.reason = reason

    def __str__(self) -> str:
        return f"channel {self.channel} is lost: {self.reason}"


def receive(sock: socket.socket, assembler: FrameAssembler) -> list[frames.Frame] | None:
    """Read once, and return the frames that are complete; None at the end of the stream."""
    buffers = assembler.buffers()
    try:
        count = sock.recv_into(buffers[0]) if len(buffers) == 1 else sock.recvmsg_into(buffers)[0]
    except BlockingIOError:
        return []
    return assembler.advance(count) if count else None


def transmit(sock: socket.socket, queue: SendQueue) -> None:
    """Write what the socket takes."""
    try:
        while queue:
            queue.advance(sock.sendmsg(queue.front()))
    except BlockingIOError:
        return


class _End(Enum):
    """The state of a connection, as one of its ends knows it."""

    OPEN = "open"
    CLOSED_HERE = "closed here"
    CLOSED_THERE = "closed by the other side"
    LOST = "lost"


class TcpOutlet:
    """The sending end. It also reads, to notice when the other side closes or is lost."""

    def __init__(
        self,
        channel: ChannelId,
        schema: pa.Schema,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        *,
        on_lost: Callable[[ChannelLost], None],
        max_queued_bytes: int = MAX_QUEUED_BYTES,
        max_batch_bytes: int = frames.MAX_BATCH_BYTES,
    ) -> None:
        self.channel = channel
        self._schema = schema
        self._sock = sock
        self._on_lost = on_lost
        self._max_queued_bytes = max_queued_bytes
        self._max_batch_bytes = max_batch_bytes
        self._queue = SendQueue()
        self._heard = b""
        self._end = _End.OPEN
        self._registration = Registration(selector, sock, self._handle)
        self._registration.watch(READ)

    @property
    def full(self) -> bool:
        """True also once the channel is lost: elements sent then are dropped, and the loop is about to handle the loss."""
        return self._queue.byte_count > self._max_queued_bytes or self._end is not _End.OPEN

    def send(self, element: Element) -> None:
        assert self._end is not _End.CLOSED_HERE, f"channel {self.channel} is closed"
        if self._end is _End.CLOSED_THERE:
            self._lose(f"{type(element).__name__} was sent after the receiver had closed it")
        if self._end is _End.LOST:
            return
        waiting = bool(self._queue)
        self._queue.extend(frames.encode(element, self._schema, max_batch_bytes=self._max_batch_bytes))
        if not waiting:
            self._transmit()

    def close(self) -> None:
        """Close the end, with a CLOSE frame if the socket takes all that is queued. Otherwise the other side reports the
        channel lost."""
        if self._end is _End.OPEN:
            self._queue.extend([frames.CLOSE_FRAME])
            with contextlib.suppress(OSError):
                transmit(self._sock, self._queue)
            self._let_go()
        self._end = _End.CLOSED_HERE

    def _handle(self, events: int) -> None:
        if self._end is _End.OPEN and events & READ:
            self._receive_close()
        if self._end is _End.OPEN and events & WRITE:
            self._transmit()

    def _transmit(self) -> None:
        try:
            transmit(self._sock, self._queue)
        except OSError as error:
            self._lose(str(error))
        else:
            self._registration.watch(READ | WRITE if self._queue else READ)

    def _receive_close(self) -> None:
        try:
            arrived = self._sock.recv(len(frames.CLOSE_FRAME))
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(str(error))
            return
        self._heard += arrived
        if not arrived:
            self._lose("the receiver's connection ended without a farewell")
        elif not frames.CLOSE_FRAME.startswith(self._heard):
            self._lose("the receiver sent something other than a CLOSE frame")
        elif self._heard == frames.CLOSE_FRAME and self._queue:
            self._lose(f"the receiver closed it before taking {self._queue.byte_count} queued bytes")
        elif self._heard == frames.CLOSE_FRAME:
            self._let_go()
            self._end = _End.CLOSED_THERE

    def _lose(self, reason: str) -> None:
        self._let_go()
        self._end = _End.LOST
        self._on_lost(ChannelLost(self.channel, reason))

    def _let_go(self) -> None:
        self._registration.watch(0)
        self._sock.close()
        self._queue.clear()


class TcpInlet(ElementQueue):
    """The receiving end. It reads until it is blocked or over its bound, and again once it is below half the bound."""

    def __init__(
        self,
        channel: ChannelId,
        schema: pa.Schema,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        *,
        on_lost: Callable[[ChannelLost], None],
        max_queued_bytes: int = MAX_QUEUED_BYTES,
        max_queued_elements: int = MAX_QUEUED_ELEMENTS,
        max_batch_bytes: int = frames.MAX_BATCH_BYTES,
    ) -> None:
        super().__init__(channel)
        self._schema = schema
        self._sock = sock
        self._on_lost = on_lost
        self._bounds = (max_queued_bytes, max_queued_elements)
        self._max_bytes, self._max_elements = self._bounds  # the present bounds: larger while hurried
        self._assembler = FrameAssembler(frames.channel_lengths(max_batch_bytes))
        self._over_bound = False
        self._hurried = False
        self._end = _End.OPEN
        self._registration = Registration(selector, sock, self._handle)
        self._registration.watch(READ)

    def take(self) -> Element:
        element = super().take()
        if self._over_bound:
            self._read_on_below_half()
        return element

    def overtake(self) -> list[pa.RecordBatch]:
        batches = super().overtake()
        if self._over_bound:
            self._read_on_below_half()
        return batches

    def hurry(self, on: bool) -> None:
        self._hurried = on
        max_bytes, max_elements = self._bounds
        self._max_bytes = max(max_bytes, MAX_HURRIED_BYTES) if on else max_bytes
        self._max_elements = max(max_elements, MAX_HURRIED_ELEMENTS) if on else max_elements
        self._over_bound = self._is_over_bound()
        self._watch()

    def block(self) -> None:
        super().block()
        self._watch()

    def unblock(self) -> None:
        super().unblock()
        self._watch()

    def close(self) -> None:
        """Drop what was not taken, and send a CLOSE frame."""
        if self._end is _End.OPEN:
            with contextlib.suppress(OSError):
                self._sock.send(frames.CLOSE_FRAME)
            self._let_go()
        self._end = _End.CLOSED_HERE
        self._clear()

    def _is_over_bound(self) -> bool:
        return self._queued_bytes > self._max_bytes or len(self._queue) > self._max_elements

    def _read_on_below_half(self) -> None:
        if self._queued_bytes <= self._max_bytes // 2 and len(self._queue) <= self._max_elements // 2:
            self._over_bound = False
            self._watch()

    def _watch(self) -> None:
        if self._end is _End.OPEN:
            self._registration.watch(0 if self.blocked or self._over_bound else READ)

    def _handle(self, events: int) -> None:
        # Events of a round may be stale: an earlier handler of the round may have blocked or closed this channel.
        if self._end is not _End.OPEN or self.blocked:
            return
        # A hurried channel is read until its marker is there, or nothing is left, since a busy loop rarely calls this.
        while self._read() and self._hurried and not self._markers and not self._is_over_bound():
            pass
        if self._is_over_bound():
            self._over_bound = True
            self._watch()

    def _read(self) -> bool:
        """Read once, and return whether anything was read."""
        before = self._assembler.byte_count
        try:
            arrived = receive(self._sock, self._assembler)
            if arrived is None:
                where = "in the middle of a frame" if self._assembler.partial else "without a farewell"
                raise ProtocolError(f"the sender's connection ended {where}")
            for kind, payload in arrived:
                if kind == Kind.CLOSE:
                    self._let_go()
                    self._end = _End.CLOSED_THERE
                    return False
                self._append(frames.decode(kind, payload, self._schema), len(payload))
        except (ProtocolError, OSError) as error:
            self._let_go()
            self._end = _End.LOST
            self._on_lost(ChannelLost(self.channel, str(error)))
            return False
        return self._assembler.byte_count > before

    def _append(self, element: Element, element_bytes: int) -> None:
        if self._ended and isinstance(element, pa.RecordBatch):
            raise ProtocolError("a batch came after End")
        super()._append(element, element_bytes)

    def _let_go(self) -> None:
        self._registration.watch(0)
        self._sock.close()
