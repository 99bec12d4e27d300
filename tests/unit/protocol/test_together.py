"""EpochCoordinator, alignment and pending commits together, over a small graph and a network that delays and repeats.

    source[0] ─┬─► count[0] ─┐
               ╳             ├─► sink[0]
    source[1] ─┴─► count[1] ─┘

Every complete snapshot has to be a consistent cut (the theorem of the paper's §3.3): each record before the sources'
positions is in it exactly once at every stage, and none behind them. The sink's committed output is exactly what the
last complete snapshot accounts for. Files that a manifest lists exist; in the end there are no others.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest

from tidegate.protocol import alignment as local
from tidegate.protocol import epoch_coordinator as central
from tidegate.protocol.alignment import Alignment
from tidegate.protocol.commit import PendingCommits
from tidegate.protocol.epoch_coordinator import AbortReason, CoordinatorSettings, Ending, EpochCoordinator
from tidegate.protocol.ids import ChannelId, SubtaskId

Record = tuple[int, int]  # (source, number)
SOURCES = [SubtaskId(0, 0), SubtaskId(0, 1)]
COUNTS = [SubtaskId(1, 0), SubtaskId(1, 1)]
SINK = SubtaskId(2, 0)
INTO = {subtask: [ChannelId(edge=0, upstream=up, downstream=subtask.subtask) for up in (0, 1)] for subtask in COUNTS}
INTO[SINK] = [ChannelId(edge=1, upstream=up, downstream=0) for up in (0, 1)]
OUT_OF = {one: [ChannelId(edge=0, upstream=one.subtask, downstream=down) for down in (0, 1)] for one in SOURCES}
OUT_OF |= {count: [ChannelId(edge=1, upstream=count.subtask, downstream=0)] for count in COUNTS}
READER = {channel: subtask for subtask, channels in INTO.items() for channel in channels}


@dataclass
class Subtask:
    id: SubtaskId
    alignment: Alignment
    seen: list[Record] = field(default_factory=list)  # state of a count or the sink; what a source has emitted
    unflushed: list[Record] = field(default_factory=list)  # the sink's output of the present epoch
    pending: PendingCommits[Record] = field(default_factory=PendingCommits)
    stopped: bool = False


class World:
    def __init__(self, seed: int, *, records: int, faults: float, stop: Ending | None = None) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self.records = records
        self.stop = stop
        self.now_ms = 0
        self.subtasks = {one: Subtask(one, Alignment(INTO.get(one, []))) for one in [*SOURCES, *COUNTS, SINK]}
        self.channels: dict[ChannelId, deque[Record | int]] = {channel: deque() for channel in READER}
        self.blocked: set[ChannelId] = set()
        self.control: dict[SubtaskId, deque[central.Effect]] = {one: deque() for one in self.subtasks}
        self.answers: list[central.Event] = []  # to the coordinator, in no order
        self.files: dict[tuple[SubtaskId, int], list[Record]] = {}
        self.manifests: dict[int, dict[SubtaskId, Any]] = {}
        self.committed: list[Record] = []
        self.completed: list[int] = []
        self.finished: Ending | None = None
        self.coordinator = EpochCoordinator(
            subtasks=frozenset(self.subtasks),
            sources=frozenset(SOURCES),
            enders=frozenset(SOURCES),
            next_epoch=1,
            retained=(),
            now_ms=0,
            settings=CoordinatorSettings(interval_ms=20, timeout_ms=60, tolerable_failures=10**9, retain=2),
        )

    # ------------------------------------------------------------------------------------------------- the scheduler

    def run(self) -> World:
        for step in range(20_000):
            moves = self.moves()
            if self.finished and not moves:
                return self
            if step == 200 and self.stop:
                self.feed(central.StopRequested(drain=self.stop is Ending.DRAIN))
            if not moves or self.random.random() < 0.05:
                self.now_ms += 5
                self.feed(central.TimePassed(self.now_ms))
            else:
                kind, what = self.random.choice(moves)
                getattr(self, kind)(what)
            if step == 10_000:
                self.faults = 0.0  # healed: from here on it has to come to an end
        raise AssertionError("the job does not come to an end")

    def moves(self) -> list[tuple[str, Any]]:
        moves: list[tuple[str, Any]] = [("emit", one) for one in SOURCES if self.can_emit(self.subtasks[one])]
        moves += [("deliver", channel) for channel, queue in self.channels.items() if queue and channel not in self.blocked]
        moves += [("instruct", one) for one, queue in self.control.items() if queue]
        moves += [("answer", index) for index in range(len(self.answers))]
        return moves

    def can_emit(self, source: Subtask) -> bool:
        return not source.stopped and len(source.seen) < self.records

    def feed(self, event: central.Event) -> None:
        for effect in self.coordinator.handle(event):
            self.execute(effect)

    # ----------------------------------------------------------------------------------------------------- the slots

    def emit(self, one: SubtaskId) -> None:
        source = self.subtasks[one]
        record = (one.subtask, len(source.seen))
        source.seen.append(record)
        self.channels[self.random.choice(OUT_OF[one])].append(record)
        if not self.can_emit(source):
            self.answers.append(central.InputEnded(one))

    def deliver(self, channel: ChannelId) -> None:
        subtask, element = self.subtasks[READER[channel]], self.channels[channel].popleft()
        if isinstance(element, int):
            self.align(subtask, subtask.alignment.on_marker(channel, element))
            return
        subtask.seen.append(element)
        if subtask.id == SINK:
            subtask.unflushed.append(element)
        for output in OUT_OF.get(subtask.id, []):
            self.channels[output].append(element)

    def instruct(self, one: SubtaskId) -> None:
        subtask = self.subtasks[one]
        match self.control[one].popleft():
            case central.TriggerEpoch(epoch, ending):
                subtask.stopped = subtask.stopped or ending is not None
                self.align(subtask, subtask.alignment.on_trigger(epoch))
            case central.EndInput() if self.can_emit(subtask):
                subtask.stopped = True
                self.answers.append(central.InputEnded(one))
            case central.NotifyAborted(epoch):
                self.align(subtask, subtask.alignment.on_abort(epoch))
            case central.NotifyComplete(epoch):
                self.committed += subtask.pending.complete(epoch)
                if one == SINK:
                    assert self.committed == self.files[SINK, epoch], "committed: what the snapshot accounts for"

    def align(self, subtask: Subtask, effects: list[local.Effect]) -> None:
        for effect in effects:
            match effect:
                case local.Block(channel):
                    self.blocked.add(channel)
                case local.Unblock(channels):
                    self.blocked -= channels
                case local.ForwardMarker(epoch):
                    for output in OUT_OF.get(subtask.id, []):
                        self.channels[output].append(epoch)
                case local.TakeSnapshot(epoch):
                    self.freeze(subtask, epoch)
                case local.FinishSnapshot(epoch):
                    self.write(subtask, epoch)

    def freeze(self, subtask: Subtask, epoch: int) -> None:
        subtask.pending.prepared(epoch, subtask.unflushed)
        subtask.unflushed = []
        if subtask.id == SINK:
            accounted = self.committed + subtask.pending.all()
            assert accounted == subtask.seen

    def write(self, subtask: Subtask, epoch: int) -> None:
        if self.random.random() < self.faults:
            self.answers.append(central.SnapshotDeclined(subtask.id, epoch, AbortReason.DECLINED, "disk full"))
            return
        self.files[subtask.id, epoch] = list(subtask.seen)
        self.answers.append(central.SnapshotAcknowledged(subtask.id, epoch, (subtask.id, epoch)))

    # ----------------------------------------------------------------------------------------------- the coordinator

    def answer(self, index: int) -> None:
        event = self.answers[index]
        repeatable = isinstance(event, central.SnapshotAcknowledged | central.SnapshotDeclined | central.InputEnded)
        if not (repeatable and self.random.random() < self.faults):
            self.answers.pop(index)
        self.feed(event)

    def execute(self, effect: central.Effect) -> None:
        match effect:
            case central.TriggerEpoch() | central.EndInput():
                for one in SOURCES:
                    self.control[one].append(effect)
            case central.NotifyComplete(epoch, ending):
                self.check_cut(epoch)
                self.completed.append(epoch)
                self.finished = ending
                for queue in self.control.values():
                    queue.append(effect)
            case central.NotifyAborted():
                for queue in self.control.values():
                    queue.append(effect)
            case central.CreateManifest(epoch, payloads):
                fails = self.random.random() < self.faults
                if not fails or self.random.random() < 0.5:  # half of the failures are lost answers
                    self.manifests[epoch] = dict(payloads)
                self.answers.append(central.ManifestFailed(epoch, "no answer") if fails else central.ManifestCreated(epoch))
            case central.ReleaseSnapshots(epochs):
                for released in epochs:
                    for name in self.manifests.pop(released, {}).values():
                        del self.files[name]
            case central.Discard(payloads):
                for name in payloads:
                    assert all(name not in manifest.values() for manifest in self.manifests.values())
                    self.files.pop(name, None)
            case central.FailJob():
                raise AssertionError("more failures than tolerable")
        for manifest in self.manifests.values():
            assert manifest.keys() == self.subtasks.keys()
            assert all(name in self.files for name in manifest.values()), "a manifest lists a file that is gone"

    def check_cut(self, epoch: int) -> None:
        state = {one: self.files[name] for one, name in self.manifests[epoch].items()}
        emitted = sorted(state[SOURCES[0]] + state[SOURCES[1]])
        assert sorted(state[COUNTS[0]] + state[COUNTS[1]]) == emitted
        assert sorted(state[SINK]) == emitted


@pytest.mark.parametrize("seed", range(150))
def test_every_complete_snapshot_is_a_consistent_cut_and_the_job_comes_to_its_end(seed: int) -> None:
    world = World(seed, records=150, faults=(0.0, 0.05, 0.3)[seed % 3]).run()
    assert world.finished is Ending.INPUT_ENDED
    assert sorted(world.committed) == [(source, number) for source in (0, 1) for number in range(150)]
    assert not world.blocked
    assert world.completed == sorted(set(world.completed))
    assert set(world.manifests) == set(world.completed[-2:])
    assert set(world.files) == {name for manifest in world.manifests.values() for name in manifest.values()}


@pytest.mark.parametrize("ending", [Ending.STOP, Ending.DRAIN])
@pytest.mark.parametrize("seed", range(20))
def test_a_stopped_job_has_committed_exactly_what_its_sources_emitted(seed: int, ending: Ending) -> None:
    world = World(seed, records=10**6, faults=0.05, stop=ending).run()
    assert world.finished is ending
    assert sorted(world.committed) == sorted(record for one in SOURCES for record in world.subtasks[one].seen)


def test_the_same_seed_gives_the_same_run() -> None:
    one, other = (World(7, records=100, faults=0.1).run() for _ in range(2))
    assert (one.committed, one.completed, one.now_ms) == (other.committed, other.completed, other.now_ms)
