"""Laps: the rules one by one, then random loops, nested and with inputs from outside: they end, and not early."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from tidegate.protocol.ids import ChannelId, SubtaskId
from tidegate.protocol.iteration import LapOrigin, LapRelay, LoopEnded, LoopQuiet, SendLap

A, B, F = (ChannelId(edge, 0, 0) for edge in range(3))


def test_a_loop_that_nothing_comes_back_on_is_quiet_at_its_third_lap_and_ends_when_it_is_again() -> None:
    head = LapOrigin()
    assert head.on_input_ended() == SendLap(1, True)
    assert head.on_lap(1, True) == SendLap(2, False), "it asks"
    assert head.on_lap(2, False) == SendLap(3, False), "it tells what was answered"
    assert head.on_lap(3, False) == LoopQuiet(SendLap(4, True)), "the end of time may have set off timers"
    assert head.on_lap(4, True) == SendLap(5, True)
    assert not head.ended
    assert head.on_lap(5, True) == SendLap(6, False)
    assert head.on_lap(6, False) == SendLap(7, False)
    assert head.on_lap(7, False) == LoopEnded()
    assert head.ended


def test_what_timers_made_at_the_end_of_time_keeps_the_loop_going() -> None:
    head = LapOrigin()
    head.on_input_ended()
    assert [head.on_lap(number, False) for number in (1, 2, 3)][-1] == LoopQuiet(SendLap(4, True))
    assert head.on_lap(4, True) == SendLap(5, True)
    head.on_feedback_records()
    assert [head.on_lap(number, True) for number in (5, 6, 7)] == [SendLap(6, True), SendLap(7, True), SendLap(8, False)]
    assert [head.on_lap(number, False) for number in (8, 9)] == [SendLap(9, False), LoopEnded()]


def test_records_that_came_back_since_the_last_lap_keep_the_loop_going() -> None:
    head = LapOrigin()
    head.on_feedback_records()
    head.on_input_ended()
    head.on_feedback_records()
    assert head.on_lap(1, True) == SendLap(2, True)
    assert head.on_lap(2, True) == SendLap(3, True)
    assert head.on_lap(3, True) == SendLap(4, False)
    assert head.on_lap(4, False) == SendLap(5, False)
    assert head.on_lap(5, True) == SendLap(6, False), "another head was told otherwise"


def test_the_more_loops_are_inside_the_longer_it_takes_to_tell() -> None:
    head = LapOrigin(depth=3)
    head.on_input_ended()
    assert [head.on_lap(number, False) for number in range(1, 6)] == [
        *(SendLap(number, False) for number in range(2, 6)),
        LoopQuiet(SendLap(6, True)),
    ]


def test_a_subtask_forwards_a_lap_that_came_on_all_its_channels() -> None:
    relay = LapRelay([A, B], has_outside=False)
    assert relay.on_lap(A, 1, True) is None
    assert relay.on_lap(A, 2, False) is None, "another head is ahead"
    assert relay.on_lap(B, 1, True) == SendLap(1, True)
    assert relay.on_lap(B, 2, True) == SendLap(2, True)
    assert relay.on_lap(B, 3, False) is None
    assert relay.on_lap(A, 3, False) == SendLap(3, False)


def test_an_outside_channel_counts_until_it_had_ended_at_the_lap_before() -> None:
    relay = LapRelay([A], has_outside=True)
    relay.on_lap(A, 1, True)
    relay.on_outside_ended()
    assert relay.on_lap(A, 2, False) == SendLap(2, True)
    assert relay.on_lap(A, 3, False) == SendLap(3, False), "it tells, it does not ask"
    assert relay.on_lap(A, 4, False) == SendLap(4, False)


def test_records_of_ones_own_accord_count() -> None:
    relay = LapRelay([A], has_outside=False)
    relay.on_lap(A, 1, True)
    relay.on_own_records()
    assert relay.on_lap(A, 2, False) == SendLap(2, True)
    assert relay.on_lap(A, 3, False) == SendLap(3, False)


def test_the_head_of_an_inner_loop_waits_for_the_lap_before_to_return() -> None:
    relay = LapRelay([A], has_outside=False, feedback=F, depth=2)
    assert relay.on_lap(A, 1, True) == SendLap(1, True)
    assert relay.on_lap(A, 2, False) is None
    relay.on_feedback_records()
    assert relay.on_lap(F, 1, True) == SendLap(2, True), "records came back"
    assert relay.on_lap(F, 2, True) is None
    assert relay.on_lap(A, 3, False) == SendLap(3, True), "lap 2 came back with that answer"
    assert relay.on_lap(F, 3, False) is None
    assert relay.on_lap(A, 4, False) == SendLap(4, False)
    assert relay.on_lap(F, 4, True) is None
    assert relay.on_lap(A, 5, False) == SendLap(5, False), "lap 5 asks anew"


def test_what_can_not_be_is_a_bug() -> None:
    relay = LapRelay([A, B], has_outside=False)
    relay.on_lap(A, 1, True)
    with pytest.raises(AssertionError, match="lap 2 was due"):
        relay.on_lap(A, 3, True)
    with pytest.raises(AssertionError, match="only heads"):
        LapRelay([A], has_outside=False).on_feedback_records()
    with pytest.raises(AssertionError, match="at least 2"):
        LapRelay([A], has_outside=False, feedback=F)
    with pytest.raises(AssertionError, match="lap 2 returned"):
        LapOrigin().on_lap(2, True)
    head = LapOrigin()
    head.on_input_ended()
    for number in range(1, 8):
        head.on_lap(number, number in (4, 5))
    with pytest.raises(AssertionError, match="had found none"):
        head.on_feedback_records()


# ------------------------------------------------------------------------------------------------------- random loops


@dataclass(frozen=True)
class Record:
    way_left: int


@dataclass(frozen=True)
class Lap:
    number: int
    active: bool


@dataclass(frozen=True)
class End:
    pass


@dataclass(frozen=True)
class EndOfTime:
    pass


@dataclass(frozen=True)
class Edge:
    id: int
    up: int
    down: int
    to_all: bool
    feedback: bool = False


@dataclass
class Node:
    inputs: dict[ChannelId, Edge] = field(default_factory=dict)
    laps: LapOrigin | LapRelay | None = None  # None: outside the loop
    open_outside: set[ChannelId] = field(default_factory=set)
    timed: set[ChannelId] = field(default_factory=set)  # on which the end of time came, or the end


class Loop:
    """An outermost loop with others in it. Vertex 0 is the source outside; all vertices have one parallelism."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.parallelism = self.random.randint(1, 3)
        self.vertex_count = 1
        self.edges: list[Edge] = []
        self.depth = self.random.randint(1, 3)
        self.head = self.grow(0, self.depth)[0]
        self.queues: dict[ChannelId, deque[Record | Lap | End | EndOfTime]] = {
            ChannelId(edge.id, up, down): deque()
            for edge in self.edges
            for up in range(self.parallelism)
            for down in range(self.parallelism)
            if edge.to_all or up == down
        }
        self.nodes = {
            SubtaskId(vertex, index): self.node(SubtaskId(vertex, index))
            for vertex in range(self.vertex_count)
            for index in range(self.parallelism)
        }
        self.sources_left = {SubtaskId(0, index): self.random.randint(0, 30) for index in range(self.parallelism)}

    # ----------------------------------------------------------------------------------------------------- the graph

    def grow(self, entry: int, depth: int) -> list[int]:
        """A loop behind `entry`: its vertices, the head first and the tail last."""
        head, members = self.vertex(), []
        self.join(entry, head)
        members.append(head)
        for _ in range(self.random.randint(1, 2)):
            vertex = self.vertex()
            for up in self.random.sample(members, k=min(len(members), self.random.randint(1, 2))):
                self.join(up, vertex)
            if self.random.random() < 0.4:
                self.join(0, vertex)
            members.append(vertex)
        inner = self.grow(self.random.choice(members), depth - 1) if depth > 1 else []
        tail = self.vertex()
        for vertex in [*members, *inner[:1]]:
            if vertex in inner or not any(edge.up == vertex for edge in self.edges) or self.random.random() < 0.3:
                self.join(vertex, tail)
        self.join(tail, head, feedback=True)
        return [*members, *inner, tail]

    def vertex(self) -> int:
        self.vertex_count += 1
        return self.vertex_count - 1

    def join(self, up: int, down: int, *, feedback: bool = False) -> None:
        self.edges.append(Edge(len(self.edges), up, down, not feedback and self.random.random() < 0.5, feedback))

    def node(self, one: SubtaskId) -> Node:
        inputs = {
            channel: self.edges[channel.edge]
            for channel in self.queues
            if self.edges[channel.edge].down == one.vertex and channel.downstream == one.subtask
        }
        node = Node(inputs, open_outside={channel for channel, edge in inputs.items() if edge.up == 0})
        if one.vertex == self.head:
            node.laps = LapOrigin(depth=self.depth)
        elif one.vertex != 0:
            inside = [channel for channel, edge in inputs.items() if edge.up != 0 and not edge.feedback]
            feedback = next((channel for channel, edge in inputs.items() if edge.feedback), None)
            node.laps = LapRelay(inside, has_outside=bool(node.open_outside), feedback=feedback, depth=self.depth)
        return node

    # ------------------------------------------------------------------------------------------------------- the run

    def run(self) -> None:
        for _ in range(100_000):
            moves = [channel for channel, queue in self.queues.items() if queue]
            if self.sources_left and (not moves or self.random.random() < 0.1):
                self.emit(self.random.choice(sorted(self.sources_left)))
            elif moves:
                self.take(self.random.choice(moves))
            else:
                break
        heads = [node.laps for one, node in self.nodes.items() if one.vertex == self.head]
        assert all(isinstance(laps, LapOrigin) and laps.ended for laps in heads), "it does not end"

    def emit(self, source: SubtaskId) -> None:
        if self.sources_left[source]:
            self.sources_left[source] -= 1
            self.send_records(source, self.random.randint(1, 25))
        else:
            del self.sources_left[source]
            self.send(source, End())

    def send_records(self, one: SubtaskId, way_left: int) -> None:
        for edge in self.edges:
            if edge.up == one.vertex and self.random.random() < 0.6:
                down = self.random.randrange(self.parallelism) if edge.to_all else one.subtask
                self.queues[ChannelId(edge.id, one.subtask, down)].append(Record(way_left))

    def send(self, one: SubtaskId, element: Lap | End | EndOfTime) -> None:
        for channel, queue in self.queues.items():
            edge = self.edges[channel.edge]
            returns = edge.feedback and isinstance(element, EndOfTime)
            if channel.upstream == one.subtask and edge.up == one.vertex and not returns:
                queue.append(element)

    def end_time(self, one: SubtaskId, channel: ChannelId) -> None:
        """When it has come on all regular channels, timers fire and it goes on."""
        node = self.nodes[one]
        node.timed.add(channel)
        if node.timed == {each for each, edge in node.inputs.items() if not edge.feedback} and one.vertex != self.head:
            if self.random.random() < 0.3:
                self.send_records(one, self.random.randint(1, 25))
            self.send(one, EndOfTime())

    def take(self, channel: ChannelId) -> None:
        edge, element = self.edges[channel.edge], self.queues[channel].popleft()
        one = SubtaskId(edge.down, channel.downstream)
        laps = self.nodes[one].laps
        assert laps is not None
        match element:
            case Record(way_left):
                if edge.feedback:
                    laps.on_feedback_records()
                if way_left:
                    self.send_records(one, way_left - 1)
            case EndOfTime():
                self.end_time(one, channel)
            case End():
                self.end_time(one, channel)
                self.nodes[one].open_outside.remove(channel)
                if not self.nodes[one].open_outside:
                    if isinstance(laps, LapOrigin):
                        self.follow(one, laps.on_input_ended())
                    else:
                        laps.on_outside_ended()
                        self.follow(one, None)
            case Lap(number, active) if isinstance(laps, LapOrigin):
                self.follow(one, laps.on_lap(number, active))
            case Lap(number, active):
                assert isinstance(laps, LapRelay)
                self.follow(one, laps.on_lap(channel, number, active))

    def follow(self, one: SubtaskId, effect: SendLap | LoopQuiet | LoopEnded | None) -> None:
        if isinstance(effect, SendLap):
            self.send(one, Lap(effect.number, effect.active))
        elif isinstance(effect, LoopQuiet):
            self.send(one, EndOfTime())
            self.send(one, Lap(effect.lap.number, effect.lap.active))
        elif isinstance(effect, LoopEnded):
            self.check_nothing_can_come_to(one)

    def check_nothing_can_come_to(self, head: SubtaskId) -> None:
        todo, seen = [head], {head}
        while todo:
            node = self.nodes[todo.pop()]
            assert not node.open_outside, "an input is still open"
            for channel, edge in node.inputs.items():
                assert not any(isinstance(element, Record) for element in self.queues[channel]), "ended early"
                up = SubtaskId(edge.up, channel.upstream)
                if up not in seen:
                    seen.add(up)
                    todo.append(up)


@pytest.mark.parametrize("seed", range(300))
def test_a_loop_ends_when_nothing_is_in_flight_and_not_before(seed: int) -> None:
    Loop(seed).run()
