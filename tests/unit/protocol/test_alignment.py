"""Alignment: the rules one by one, then every interleaving of a small world."""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass, field
from itertools import product
from typing import TypeVar

import pytest

from tidegate.protocol.alignment import (
    STORY_LENGTH,
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

A, B, C = (ChannelId(edge=0, upstream=upstream, downstream=0) for upstream in range(3))
F = ChannelId(edge=1, upstream=0, downstream=0)  # feedback


def these(*channels: ChannelId) -> frozenset[ChannelId]:
    return frozenset(channels)


def test_the_last_marker_completes_in_the_order_snapshot_forward_unblock_finish() -> None:
    alignment = Alignment([A, B])
    assert alignment.on_marker(A, 1) == [Block(A)]
    assert alignment.epoch_in_progress == 1
    assert alignment.blocked == {A}
    assert alignment.on_marker(B, 1) == [
        Block(B),
        TakeSnapshot(1),
        ForwardMarker(1),
        Unblock(these(A, B)),
        FinishSnapshot(1),
    ]
    assert alignment.epoch_in_progress is None
    assert alignment.blocked == frozenset()


def test_a_single_channel_is_aligned_at_once() -> None:
    assert Alignment([A]).on_marker(A, 7) == [
        Block(A),
        TakeSnapshot(7),
        ForwardMarker(7),
        Unblock(these(A)),
        FinishSnapshot(7),
    ]


def test_a_source_snapshots_and_forwards_when_triggered() -> None:
    source = Alignment([])
    assert source.on_trigger(3) == [TakeSnapshot(3), ForwardMarker(3), FinishSnapshot(3)]
    assert source.on_trigger(4) == [TakeSnapshot(4), ForwardMarker(4), FinishSnapshot(4)]


def test_a_source_ignores_a_trigger_that_is_repeated_or_comes_after_the_abort() -> None:
    source = Alignment([])
    source.on_trigger(3)
    assert source.on_trigger(3) == []
    source.on_abort(4)
    assert source.on_trigger(4) == []
    assert source.on_trigger(5)[0] == TakeSnapshot(5)


def test_an_abort_releases_exactly_the_blocked_channels() -> None:
    alignment = Alignment([A, B, C])
    alignment.on_marker(A, 1)
    alignment.on_marker(C, 1)
    assert alignment.on_abort(1) == [Unblock(these(A, C))]
    assert alignment.epoch_in_progress is None
    assert alignment.on_abort(1) == []


def test_the_abort_of_a_later_epoch_ends_an_earlier_one_that_never_completed() -> None:
    alignment = Alignment([A, B])
    alignment.on_marker(A, 1)
    assert alignment.on_abort(2) == [Unblock(these(A))]
    assert alignment.on_marker(B, 1) == []
    assert alignment.on_marker(B, 2) == []


def test_late_markers_of_an_aborted_epoch_are_swallowed() -> None:
    alignment = Alignment([A, B])
    alignment.on_marker(A, 1)
    alignment.on_abort(1)
    assert alignment.on_marker(B, 1) == []
    assert alignment.blocked == frozenset()
    alignment.on_marker(A, 2)
    assert alignment.on_marker(B, 2)[1:3] == [TakeSnapshot(2), ForwardMarker(2)]


def test_an_abort_that_overtakes_every_marker_voids_them_all() -> None:
    alignment = Alignment([A, B])
    assert alignment.on_abort(2) == []
    assert alignment.on_marker(A, 1) == []
    assert alignment.on_marker(A, 2) == []
    assert alignment.on_marker(B, 2) == []
    assert alignment.on_marker(A, 3) == [Block(A)]


def test_an_abort_of_an_epoch_already_snapshotted_here_changes_nothing() -> None:
    alignment = Alignment([A, B])
    alignment.on_marker(A, 1)
    alignment.on_marker(B, 1)
    assert alignment.on_abort(1) == []
    assert alignment.on_marker(B, 2) == [Block(B)]


def test_a_newer_marker_abandons_the_epoch_in_progress() -> None:
    alignment = Alignment([A, B, C])
    alignment.on_marker(A, 1)
    alignment.on_marker(B, 1)
    assert alignment.on_marker(C, 2) == [Unblock(these(A, B)), Block(C)]
    assert alignment.epoch_in_progress == 2
    assert alignment.on_abort(1) == [], "the notice comes at last and must not touch epoch 2"
    assert alignment.blocked == {C}


def test_a_marker_of_the_abandoned_epoch_that_comes_still_later_is_swallowed() -> None:
    alignment = Alignment([A, B])
    alignment.on_marker(A, 2)
    assert alignment.on_marker(B, 1) == []
    assert alignment.blocked == {A}
    assert alignment.on_marker(B, 2)[1] == TakeSnapshot(2)


def test_at_least_once_counts_markers_and_blocks_nothing() -> None:
    alignment = Alignment([A, B], mode=AlignmentMode.AT_LEAST_ONCE)
    assert alignment.on_marker(A, 1) == []
    assert alignment.epoch_in_progress == 1
    assert alignment.blocked == frozenset()
    assert alignment.on_marker(B, 1) == [TakeSnapshot(1), ForwardMarker(1), FinishSnapshot(1)]
    alignment.on_marker(A, 2)
    assert alignment.on_abort(2) == []
    assert alignment.on_marker(B, 2) == []


# ------------------------------------------------------------------------------------------------------------- loops


def test_a_head_does_not_wait_for_feedback_but_logs_it_until_the_marker_returns() -> None:
    head = Alignment([A, B, F], feedback=[F])
    assert head.on_marker(A, 1) == [Block(A)]
    assert head.on_marker(B, 1) == [Block(B), TakeSnapshot(1), ForwardMarker(1), StartLog(these(F)), Unblock(these(A, B))]
    assert head.logged == {F}
    assert head.blocked == frozenset()
    assert head.epoch_in_progress == 1, "it is not finished"
    assert head.on_marker(F, 1) == [StopLog(these(F)), FinishSnapshot(1)]
    assert head.logged == frozenset()
    assert head.epoch_in_progress is None


def test_a_marker_that_returns_before_the_head_has_frozen_blocks_feedback_and_nothing_is_logged() -> None:
    head = Alignment([A, F], feedback=[F])
    assert head.on_marker(F, 1) == [Block(F)]
    assert head.on_marker(A, 1) == [Block(A), TakeSnapshot(1), ForwardMarker(1), Unblock(these(A, F)), FinishSnapshot(1)]


def test_at_least_once_logs_feedback_too() -> None:
    head = Alignment([A, F], feedback=[F], mode=AlignmentMode.AT_LEAST_ONCE)
    assert head.on_marker(A, 1) == [TakeSnapshot(1), ForwardMarker(1), StartLog(these(F))]
    assert head.on_marker(F, 1) == [StopLog(these(F)), FinishSnapshot(1)]
    assert head.on_marker(F, 2) == []
    assert head.on_marker(A, 2) == [TakeSnapshot(2), ForwardMarker(2), FinishSnapshot(2)]


def test_what_was_frozen_is_finished_when_the_epoch_is_aborted_before_the_marker_returns() -> None:
    head = Alignment([A, F], feedback=[F])
    head.on_marker(A, 1)
    assert head.on_abort(1) == [StopLog(these(F)), FinishSnapshot(1)]
    assert head.on_marker(F, 1) == []
    assert head.on_abort(1) == []


def test_what_was_frozen_is_finished_when_a_newer_marker_comes_before_the_marker_returns() -> None:
    head = Alignment([A, F], feedback=[F])
    head.on_marker(A, 1)
    assert head.on_marker(A, 2) == [
        StopLog(these(F)),
        FinishSnapshot(1),
        Block(A),
        TakeSnapshot(2),
        ForwardMarker(2),
        StartLog(these(F)),
        Unblock(these(A)),
    ]
    assert head.on_marker(F, 1) == []
    assert head.on_marker(F, 2) == [StopLog(these(F)), FinishSnapshot(2)]


@pytest.mark.parametrize(("channels", "feedback", "complaint"), [([A], [F], "inputs"), ([F], [F], "enters")])
def test_feedback_is_an_input_beside_others(channels: list[ChannelId], feedback: list[ChannelId], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        Alignment(channels, feedback=feedback)


# ---------------------------------------------------------------------------------------- hurried epochs, and logging


def test_a_hurried_epoch_freezes_at_the_first_marker_and_logs_the_other_channels() -> None:
    alignment = Alignment([A, B, C])
    assert alignment.on_hurry(1) == []
    assert alignment.is_hurried(1)
    assert alignment.on_marker(A, 1, overtook=True) == [
        TakeSnapshot(1),
        ForwardMarker(1),
        StartLog(these(B, C)),
        LogOvertaken(A),
    ]
    assert alignment.logged == {B, C}
    assert alignment.on_marker(B, 1, overtook=True) == [LogOvertaken(B), StopLog(these(B))]
    assert alignment.on_marker(C, 1) == [StopLog(these(C)), FinishSnapshot(1)]
    assert not alignment.is_hurried(1), "it is over"


def test_one_channel_that_is_hurried_needs_no_log_but_of_what_was_overtaken() -> None:
    alignment = Alignment([A])
    alignment.on_hurry(1)
    assert alignment.on_marker(A, 1, overtook=True) == [
        TakeSnapshot(1),
        ForwardMarker(1),
        LogOvertaken(A),
        FinishSnapshot(1),
    ]


def test_an_epoch_that_is_hurried_while_aligning_logs_only_what_is_missing() -> None:
    alignment = Alignment([A, B, C])
    alignment.on_marker(A, 1)
    alignment.on_marker(B, 1)
    assert alignment.on_hurry(1) == [TakeSnapshot(1), ForwardMarker(1), StartLog(these(C)), Unblock(these(A, B))]
    assert alignment.on_hurry(1) == []
    assert alignment.on_marker(C, 1, overtook=True) == [LogOvertaken(C), StopLog(these(C)), FinishSnapshot(1)]


def test_a_head_that_is_hurried_freezes_when_the_marker_returns_first() -> None:
    head = Alignment([A, F], feedback=[F])
    head.on_hurry(1)
    assert head.on_marker(F, 1) == [TakeSnapshot(1), ForwardMarker(1), StartLog(these(A))]
    assert head.on_marker(A, 1) == [StopLog(these(A)), FinishSnapshot(1)]


def test_a_head_may_be_hurried_while_it_logs_feedback() -> None:
    head = Alignment([A, F], feedback=[F])
    head.on_marker(A, 1)
    assert head.on_hurry(1) == []
    assert head.on_marker(F, 1, overtook=True) == [LogOvertaken(F), StopLog(these(F)), FinishSnapshot(1)]


def test_only_the_epoch_that_was_hurried_is() -> None:
    alignment = Alignment([A, B])
    alignment.on_hurry(1)
    alignment.on_marker(A, 1)
    alignment.on_marker(B, 1)
    assert alignment.on_hurry(1) == [], "it is over"
    assert not alignment.is_hurried(1)
    assert alignment.on_marker(A, 2) == [Block(A)]
    assert alignment.on_hurry(1) == []
    assert alignment.blocked == {A}


def test_hurrying_an_aborted_epoch_changes_nothing() -> None:
    alignment = Alignment([A, B])
    alignment.on_abort(1)
    assert alignment.on_hurry(1) == []
    assert not alignment.is_hurried(1)
    assert alignment.on_marker(A, 1) == []


def test_a_hurried_epoch_that_is_aborted_is_finished_and_its_late_markers_are_swallowed() -> None:
    alignment = Alignment([A, B])
    alignment.on_hurry(1)
    alignment.on_marker(A, 1)
    assert alignment.on_abort(1) == [StopLog(these(B)), FinishSnapshot(1)]
    assert alignment.may_overtake(1), "it is void, and one that counts may be queued behind it"
    assert alignment.on_marker(B, 1, overtook=True) == []


def test_a_hurried_marker_may_come_from_a_channel_that_an_aborted_epoch_has_blocked() -> None:
    alignment = Alignment([A, B])
    alignment.on_marker(A, 1)
    alignment.on_hurry(2)
    assert alignment.on_marker(A, 2, overtook=True) == [
        Unblock(these(A)),
        TakeSnapshot(2),
        ForwardMarker(2),
        StartLog(these(B)),
        LogOvertaken(A),
    ]
    assert alignment.on_marker(B, 1) == []
    assert alignment.on_marker(B, 2) == [StopLog(these(B)), FinishSnapshot(2)]


def test_logging_freezes_at_the_first_marker_of_any_epoch_but_a_full_one() -> None:
    alignment = Alignment([A, B], mode=AlignmentMode.LOGGING)
    assert alignment.on_marker(A, 1) == [TakeSnapshot(1), ForwardMarker(1), StartLog(these(B))]
    assert not alignment.may_overtake(1)
    assert alignment.on_marker(B, 1) == [StopLog(these(B)), FinishSnapshot(1)]
    assert alignment.on_marker(B, 2, full=True) == [Block(B)]
    assert alignment.on_marker(A, 2, full=True) == [
        Block(A),
        TakeSnapshot(2),
        ForwardMarker(2),
        Unblock(these(A, B)),
        FinishSnapshot(2),
    ]


@pytest.mark.parametrize("mode", [AlignmentMode.AT_LEAST_ONCE, AlignmentMode.LOGGING])
def test_what_never_waits_is_not_hurried(mode: AlignmentMode) -> None:
    with pytest.raises(AssertionError, match="nothing to hurry"):
        Alignment([A], mode=mode).on_hurry(1)


def test_a_marker_overtakes_only_where_its_epoch_is_hurried() -> None:
    with pytest.raises(AssertionError, match="only hurried markers overtake"):
        Alignment([A]).on_marker(A, 1, overtook=True)


def test_a_full_epoch_is_never_hurried() -> None:
    alignment = Alignment([A])
    alignment.on_hurry(1)
    with pytest.raises(AssertionError, match="never hurried"):
        alignment.on_marker(A, 1, full=True)


# ------------------------------------------------------------------------------------------------------ illegal events


@pytest.mark.parametrize(
    ("prepare", "channel", "epoch", "complaint"),
    [
        ([], C, 1, "not an input"),
        ([(A, 1)], A, 2, "blocked"),
        ([(A, 2), (B, 2)], A, 2, "grow"),
        ([(A, 2), (B, 2)], A, 1, "grow"),
    ],
)
def test_an_illegal_marker_tells_the_story(
    prepare: list[tuple[ChannelId, int]], channel: ChannelId, epoch: int, complaint: str
) -> None:
    alignment = Alignment([A, B])
    for earlier in prepare:
        alignment.on_marker(*earlier)
    with pytest.raises(AssertionError, match=complaint) as caught:
        alignment.on_marker(channel, epoch)
    assert str(caught.value).count("MarkerArrived") == len(prepare) + 1


def test_only_sources_are_triggered() -> None:
    with pytest.raises(AssertionError, match="markers only"):
        Alignment([A]).on_trigger(1)


def test_the_story_is_bounded() -> None:
    alignment = Alignment([A])
    for epoch in range(1_000):
        alignment.on_marker(A, epoch)
    with pytest.raises(AssertionError) as caught:
        alignment.on_marker(A, 0)
    assert str(caught.value).count("MarkerArrived") == STORY_LENGTH + 1


# -------------------------------------------------------------------------------- every interleaving of a small world

# A channel's script: records (names) and markers (their epochs), in FIFO order.
Script = tuple[str | int, ...]
WHOLE: Script = ("a", 1, "b", 2, "c")
WITHOUT_1: Script = ("a", "b", 2, "c")  # upstream swallowed marker 1: the abort had reached it before
WITHOUT_2: Script = ("a", 1, "b", "c")
Notice = tuple[str, int]  # ("abort" or "hurry", epoch)
Move = tuple[str, ChannelId | None]  # hear a notice, take from a channel, let a marker overtake on it


Copied = TypeVar("Copied")


def twin_of(one: Copied) -> Copied:
    """A copy, collections included; what is in them never changes."""
    twin = copy.copy(one)
    for name, value in vars(one).items():
        if isinstance(value, set | dict | deque):
            setattr(twin, name, copy.copy(value))
    return twin


@dataclass
class World:
    """One subtask, the queues of its inputs and the notices under way to it. What must hold in any run is checked."""

    scripts: dict[ChannelId, Script]
    notices: tuple[Notice, ...]  # under way, in order
    mode: AlignmentMode
    alignment: Alignment
    queues: dict[ChannelId, Script]
    heard: tuple[Notice, ...] = ()
    processed: dict[ChannelId, Script] = field(default_factory=dict)
    frozen: dict[ChannelId, Script] = field(default_factory=dict)  # processed when the state was frozen
    log: dict[ChannelId, Script] = field(default_factory=dict)
    blocked: set[ChannelId] = field(default_factory=set)
    logged: set[ChannelId] = field(default_factory=set)
    taken: tuple[int, ...] = ()
    finished: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.processed = dict.fromkeys(self.scripts, ())

    def key(self) -> object:
        return (
            *(tuple(each.values()) for each in (self.queues, self.processed, self.frozen, self.log)),
            self.heard,
            self.taken,
            self.finished,
            tuple(sorted(self.blocked)),
            self.alignment.epoch_in_progress,
        )

    def moves(self) -> list[Move]:
        moves: list[Move] = [
            ("take", channel)
            for channel, queue in self.queues.items()
            if queue and channel not in self.blocked and self.exists(queue[0])
        ]
        moves += [("overtake", channel) for channel in self.queues if self.can_overtake(channel)]
        return moves + [("hear", None) for _, epoch in self.notices[:1] if self.exists(epoch)]

    def first_marker(self, channel: ChannelId) -> int | None:
        return next((element for element in self.queues[channel] if isinstance(element, int)), None)

    def can_overtake(self, channel: ChannelId) -> bool:
        epoch = self.first_marker(channel)
        return epoch is not None and self.exists(epoch) and self.alignment.may_overtake(epoch)

    def exists(self, element: str | int) -> bool:
        """Epoch 2 is triggered, and so marked or aborted anywhere, only when 1 was aborted or acknowledged by all."""
        return element != 2 or 1 in self.finished or ("abort", 1) in (*self.notices, *self.heard)

    def after(self, move: Move) -> World:
        world = twin_of(self)
        world.alignment = twin_of(self.alignment)
        match move:
            case ("hear", None):
                (kind, epoch), world.notices = world.notices[0], world.notices[1:]
                world.heard = (*world.heard, (kind, epoch))
                hear = world.alignment.on_abort if kind == "abort" else world.alignment.on_hurry
                world.execute(hear(epoch))
            case ("overtake", ChannelId() as channel):
                queue = world.queues[channel]
                at = next(at for at, element in enumerate(queue) if isinstance(element, int))
                world.queues[channel] = queue[:at] + queue[at + 1 :]
                effects = world.alignment.on_marker(channel, world.first_of(queue), overtook=at > 0)
                world.execute(effects, overtaken=queue[:at])
            case ("take", ChannelId() as channel):
                element, world.queues[channel] = world.queues[channel][0], world.queues[channel][1:]
                if isinstance(element, int):
                    world.execute(world.alignment.on_marker(channel, element))
                else:
                    world.processed[channel] += (element,)
                    if channel in world.logged:
                        world.log[channel] += (element,)
        return world

    @staticmethod
    def first_of(queue: Script) -> int:
        return next(element for element in queue if isinstance(element, int))

    def execute(self, effects: list[Effect], overtaken: Script = ()) -> None:
        for at, effect in enumerate(effects):
            match effect:
                case Block(channel):
                    assert self.mode is AlignmentMode.EXACTLY_ONCE
                    assert channel not in self.blocked
                    self.blocked.add(channel)
                case Unblock(channels):
                    assert channels and channels <= self.blocked
                    self.blocked -= channels
                case TakeSnapshot(epoch):
                    assert ("abort", epoch) not in self.heard, "a snapshot of an epoch that was known to be aborted"
                    assert self.taken == self.finished, "one at a time"
                    assert effects[at + 1] == ForwardMarker(epoch)
                    self.taken = (*self.taken, epoch)
                    self.frozen, self.log = dict(self.processed), dict.fromkeys(self.scripts, ())
                case ForwardMarker(epoch):
                    assert epoch == self.taken[-1]
                case StartLog(channels):
                    assert channels and not self.logged
                    self.logged |= channels
                case LogOvertaken(channel):
                    assert overtaken
                    self.log[channel] += overtaken
                case StopLog(channels):
                    assert channels and channels <= self.logged
                    self.logged -= channels
                case FinishSnapshot(epoch):
                    assert not self.logged and not self.blocked
                    self.finished = (*self.finished, epoch)
                    assert self.finished == self.taken
                    if ("abort", epoch) not in (*self.notices, *self.heard):
                        self.check_cut(epoch)
                    self.frozen, self.log = {}, {}
        assert self.blocked == self.alignment.blocked
        assert self.logged == self.alignment.logged

    def check_cut(self, epoch: int) -> None:
        """State and log are the records before the marker (and maybe more, if they may be processed twice)."""
        for channel, script in self.scripts.items():
            before = tuple(element for element in script[: script.index(epoch)] if isinstance(element, str))
            accounted = self.frozen[channel] + self.log[channel]
            if self.mode is AlignmentMode.AT_LEAST_ONCE:
                assert accounted[: len(before)] == before
            else:
                assert accounted == before
            if channel != F and self.mode is not AlignmentMode.LOGGING and ("hurry", epoch) not in self.heard:
                assert not self.log[channel], "nothing in transit is stored where all is aligned and acyclic"

    def check_end(self, aborted: set[int]) -> None:
        """Nothing can move any more: the run must have come to its end."""
        assert not any(self.queues.values()), "stuck"
        assert not self.blocked and not self.logged
        assert self.alignment.epoch_in_progress is None
        assert self.taken == self.finished == tuple(sorted(set(self.finished)))
        assert {1, 2} - aborted <= set(self.finished)


def explore(scripts: dict[ChannelId, Script], notices: tuple[Notice, ...], mode: AlignmentMode) -> int:
    subject = Alignment(scripts, mode=mode, feedback=scripts.keys() & {F})
    start = World(scripts, notices, mode, subject, dict(scripts))
    todo, seen = [start], {start.key()}
    while todo:
        world = todo.pop()
        moves = world.moves()
        if not moves:
            world.check_end({epoch for kind, epoch in notices if kind == "abort"})
        for move in moves:
            following = world.after(move)
            if following.key() not in seen:
                seen.add(following.key())
                todo.append(following)
    return len(seen)


INPUTS = [(A, B, C), (A, B, F)]


@pytest.mark.parametrize("mode", AlignmentMode)
@pytest.mark.parametrize("channels", INPUTS)
def test_every_interleaving_without_aborts_is_a_consistent_cut(channels: tuple[ChannelId, ...], mode: AlignmentMode) -> None:
    assert explore(dict.fromkeys(channels, WHOLE), (), mode) > 20


@pytest.mark.parametrize("mode", AlignmentMode)
@pytest.mark.parametrize("scripts", list(product((WHOLE, WITHOUT_1), repeat=3)))
def test_every_interleaving_with_epoch_1_aborted_completes_epoch_2(scripts: tuple[Script, ...], mode: AlignmentMode) -> None:
    assert explore(dict(zip((A, B, C), scripts, strict=True)), (("abort", 1),), mode) > 20


@pytest.mark.parametrize("mode", AlignmentMode)
@pytest.mark.parametrize("scripts", list(product((WHOLE, WITHOUT_2), repeat=3)))
def test_every_interleaving_with_epoch_2_aborted_ends_with_all_channels_open(
    scripts: tuple[Script, ...], mode: AlignmentMode
) -> None:
    assert explore(dict(zip((A, B, C), scripts, strict=True)), (("abort", 2),), mode) > 20


@pytest.mark.parametrize("mode", AlignmentMode)
@pytest.mark.parametrize("channels", INPUTS)
def test_every_interleaving_with_both_epochs_aborted_ends_with_all_channels_open(
    channels: tuple[ChannelId, ...], mode: AlignmentMode
) -> None:
    scripts = dict(zip(channels, (WHOLE, WITHOUT_1, WITHOUT_2), strict=True))
    assert explore(scripts, (("abort", 1), ("abort", 2)), mode) > 20


@pytest.mark.parametrize("other", [B, F])
@pytest.mark.parametrize(
    ("notices", "first", "second"),
    [
        ((("hurry", 1), ("hurry", 2)), WHOLE, WHOLE),
        ((("hurry", 1), ("abort", 1)), WHOLE, WITHOUT_1),
        ((("hurry", 1), ("abort", 1), ("hurry", 2)), WITHOUT_1, WHOLE),
        ((("abort", 1), ("hurry", 1), ("hurry", 2)), WHOLE, WHOLE),
        ((("hurry", 2), ("abort", 1)), WHOLE, WITHOUT_1),
        ((("hurry", 2), ("abort", 2)), WITHOUT_2, WHOLE),
    ],
)
def test_every_interleaving_of_hurries_is_a_consistent_cut(
    notices: tuple[Notice, ...], first: Script, second: Script, other: ChannelId
) -> None:
    assert explore({A: first, other: second}, notices, AlignmentMode.EXACTLY_ONCE) > 20
