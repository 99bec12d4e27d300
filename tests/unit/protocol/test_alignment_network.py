"""Alignments in a network: random graphs with loops, bounded FIFO queues, epochs that are hurried and aborted at will.

What a channel's sender had sent when it sent the marker is known here. So the theorem can be checked as it stands: of
every snapshot that completes, state and log of the receiver are exactly that, for every channel, loops included. And
since queues are bounded, except those of feedback, it is seen that no way of aligning holds the graph up for ever.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from tidegate.protocol.alignment import (
    Alignment,
    AlignmentMode,
    Block,
    Effect,
    FinishSnapshot,
    ForwardMarker,
    LogOvertaken,
    StartLog,
    StopLog,
    TakeSnapshot,
    Unblock,
)
from tidegate.protocol.ids import ChannelId

QUEUE_BOUND = 4
LONGEST_WAY = 9  # a record is passed on that often, round loops too


@dataclass(frozen=True)
class Record:
    number: int  # on its channel, from 0
    way: int  # how often it was passed on


@dataclass(frozen=True)
class Marker:
    epoch: int


@dataclass
class Channel:
    id: ChannelId
    feedback: bool
    queue: deque[Record | Marker] = field(default_factory=deque)
    sent: int = 0
    sent_before: dict[int, int] = field(default_factory=dict)  # epoch -> records before its marker

    @property
    def full(self) -> bool:
        return not self.feedback and len(self.queue) >= QUEUE_BOUND


@dataclass
class Node:
    """A subtask. Its state is the records that it has processed, by channel."""

    alignment: Alignment
    inputs: dict[ChannelId, Channel]
    outputs: list[Channel]
    may_hurry: bool
    notices: deque[tuple[str, int]] = field(default_factory=deque)
    processed: dict[ChannelId, list[int]] = field(default_factory=dict)
    frozen: dict[ChannelId, list[int]] = field(default_factory=dict)
    log: dict[ChannelId, list[int]] = field(default_factory=dict)
    hurried: set[int] = field(default_factory=set)
    finished: list[int] = field(default_factory=list)


class Network:
    """Nodes in topological order, sources first; back edges are feedback."""

    def __init__(self, seed: int, mode: AlignmentMode, *, hurry: float = 0.0) -> None:
        self.random, self.mode = random.Random(seed), mode
        self.source_count = self.random.randint(1, 2)
        count = self.source_count + self.random.randint(2, 5)
        edges = [(self.random.randrange(node), node, False) for node in range(self.source_count, count)]
        edges += [(self.random.randrange(node), node, False) for node in range(self.source_count, count)]
        for _ in range(self.random.randint(0, 2)):
            head = self.random.randrange(self.source_count, count)
            edges.append((self.random.randrange(head, count), head, True))
        self.channels = {
            channel.id: channel
            for edge, (up, down, back) in enumerate(edges)
            for channel in [Channel(ChannelId(edge, up, down), back)]
        }
        self.nodes = [self.node(index) for index in range(count)]
        # Who is hurried sends records behind the marker before it has read those before it. Someone downstream who
        # waits, blocking these, could hold up the very records that the others' markers are behind. So all there hurry.
        for index in reversed(range(self.source_count, count)):
            readers = [self.nodes[each.id.downstream] for each in self.nodes[index].outputs if not each.feedback]
            self.nodes[index].may_hurry = all(each.may_hurry for each in readers) and self.random.random() < hurry
        self.epoch = 0
        self.full_epochs: set[int] = set()
        self.aborted: set[int] = set()
        self.complete: set[int] = set()

    def node(self, index: int) -> Node:
        inputs = {each.id: each for each in self.channels.values() if each.id.downstream == index}
        feedback = [each.id for each in inputs.values() if each.feedback]
        return Node(
            Alignment(inputs, mode=self.mode, feedback=feedback),
            inputs,
            [each for each in self.channels.values() if each.id.upstream == index],
            may_hurry=False,
            processed={channel: [] for channel in inputs},
        )

    # ------------------------------------------------------------------------------------------------- the scheduler

    def run(self, steps: int = 800) -> None:
        for _ in range(steps):
            self.coordinate(abort=0.008)
            nothing: Callable[[], object] = lambda: None  # noqa: E731
            self.random.choice([*self.moves(emit=True), nothing])()
        while moves := self.moves(emit=False):
            self.random.choice(moves)()
        self.coordinate(abort=0.0)  # the last one: it is not aborted, so it completes
        while moves := self.moves(emit=False):
            self.random.choice(moves)()
        self.coordinate(abort=0.0, begin=False)
        for node in self.nodes:
            assert not node.alignment.blocked and not node.alignment.logged
            assert node.alignment.epoch_in_progress is None
        assert not any(channel.queue for channel in self.channels.values()), "stuck"
        assert self.complete | self.aborted == set(range(1, self.epoch + 1))
        assert self.epoch in self.complete

    def coordinate(self, *, abort: float, begin: bool = True) -> None:
        """One epoch at a time, from trigger to completion or abort. Notices come in order to each node, at any time."""
        if self.epoch and self.epoch not in self.complete | self.aborted:
            if all(self.epoch in node.finished for node in self.nodes):
                self.complete.add(self.epoch)
            elif self.random.random() < abort:
                self.aborted.add(self.epoch)
                self.notify("abort", self.nodes)
        if begin and (not self.epoch or self.epoch in self.complete | self.aborted):
            self.epoch += 1
            if self.random.random() < 0.2:
                self.full_epochs.add(self.epoch)
            self.notify("trigger", self.nodes[: self.source_count])
            if self.epoch not in self.full_epochs:
                self.notify("hurry", [node for node in self.nodes if node.may_hurry])

    def notify(self, kind: str, nodes: list[Node]) -> None:
        for node in nodes:
            node.notices.append((kind, self.epoch))

    def moves(self, *, emit: bool) -> list[Callable[[], None]]:
        moves: list[Callable[[], None]] = [partial(self.hear, node) for node in self.nodes if node.notices]
        if emit:
            moves += [partial(self.send, node, 0) for node in self.nodes[: self.source_count] if self.has_room(node)]
        for node in self.nodes:
            for channel in node.inputs.values():
                if channel.queue and channel.id not in node.alignment.blocked and self.has_room(node):
                    moves.append(partial(self.take, node, channel))
                marker = next((each for each in channel.queue if isinstance(each, Marker)), None)
                if marker and node.alignment.may_overtake(marker.epoch):
                    moves.append(partial(self.overtake, node, channel))
        return moves

    # ----------------------------------------------------------------------------------------------------- the slots

    def has_room(self, node: Node) -> bool:
        return not any(channel.full for channel in node.outputs)

    def hear(self, node: Node) -> None:
        kind, epoch = node.notices.popleft()
        if kind == "hurry":
            node.hurried.add(epoch)
        subject = node.alignment
        hear = {"trigger": subject.on_trigger, "hurry": subject.on_hurry, "abort": subject.on_abort}[kind]
        self.execute(node, hear(epoch))

    def send(self, node: Node, way: int) -> None:
        for channel in node.outputs:
            if self.random.random() < 0.6:
                channel.queue.append(Record(channel.sent, way))
                channel.sent += 1

    def take(self, node: Node, channel: Channel) -> None:
        element = channel.queue.popleft()
        if isinstance(element, Marker):
            full = element.epoch in self.full_epochs
            self.execute(node, node.alignment.on_marker(channel.id, element.epoch, full=full))
            return
        node.processed[channel.id].append(element.number)
        if channel.id in node.alignment.logged:
            node.log[channel.id].append(element.number)
        if element.way < LONGEST_WAY:
            self.send(node, element.way + 1)

    def overtake(self, node: Node, channel: Channel) -> None:
        at, marker = next((at, each) for at, each in enumerate(channel.queue) if isinstance(each, Marker))
        ahead = [each.number for each in list(channel.queue)[:at] if isinstance(each, Record)]
        del channel.queue[at]
        self.execute(node, node.alignment.on_marker(channel.id, marker.epoch, overtook=bool(ahead)), ahead)

    def execute(self, node: Node, effects: list[Effect], overtaken: list[int] | None = None) -> None:
        for effect in effects:
            match effect:
                case TakeSnapshot(epoch):
                    assert epoch not in node.finished
                    node.frozen = {channel: list(numbers) for channel, numbers in node.processed.items()}
                    node.log = {channel: [] for channel in node.inputs}
                case ForwardMarker(epoch):
                    for channel in node.outputs:
                        channel.queue.append(Marker(epoch))
                        channel.sent_before[epoch] = channel.sent
                case LogOvertaken(channel_id):
                    assert overtaken
                    node.log[channel_id] += overtaken
                case FinishSnapshot(epoch):
                    node.finished.append(epoch)
                    if epoch not in self.aborted:
                        self.check(node, epoch)
                case Block() | Unblock() | StartLog() | StopLog():
                    pass  # the alignment's own `blocked` and `logged` are used

    def check(self, node: Node, epoch: int) -> None:
        for channel in node.inputs.values():
            accounted = node.frozen[channel.id] + node.log[channel.id]
            sent = list(range(channel.sent_before[epoch]))
            if self.mode is AlignmentMode.AT_LEAST_ONCE:
                assert accounted[: len(sent)] == sent
            else:
                assert accounted == sent
            logging = self.mode is AlignmentMode.LOGGING and epoch not in self.full_epochs
            if not channel.feedback and not logging and epoch not in node.hurried:
                assert not node.log[channel.id], "aligned: nothing in transit is stored"


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("mode", AlignmentMode)
def test_state_and_logs_are_what_was_sent_before_the_markers(seed: int, mode: AlignmentMode) -> None:
    Network(seed, mode).run()


@pytest.mark.parametrize("seed", range(80))
def test_it_is_the_same_where_some_or_all_hurry(seed: int) -> None:
    Network(seed, AlignmentMode.EXACTLY_ONCE, hurry=(1.0, 0.7)[seed % 2]).run()
