"""Alignment: the rules one by one, then every interleaving of a small world."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from itertools import product

import pytest

from tidegate.protocol.alignment import (
    STORY_LENGTH,
    Alignment,
    AlignmentMode,
    Block,
    Effect,
    ForwardMarker,
    TakeSnapshot,
    Unblock,
)
from tidegate.protocol.ids import ChannelId

A, B, C = (ChannelId(edge=0, upstream=upstream, downstream=0) for upstream in range(3))


def test_the_last_marker_completes_in_the_order_snapshot_forward_unblock() -> None:
    alignment = Alignment([A, B])
    assert alignment.on_marker(A, 1) == [Block(A)]
    assert alignment.epoch_in_progress == 1
    assert alignment.blocked == {A}
    assert alignment.on_marker(B, 1) == [Block(B), TakeSnapshot(1), ForwardMarker(1), Unblock(frozenset({A, B}))]
    assert alignment.epoch_in_progress is None
    assert alignment.blocked == frozenset()


def test_a_single_channel_is_aligned_at_once() -> None:
    assert Alignment([A]).on_marker(A, 7) == [Block(A), TakeSnapshot(7), ForwardMarker(7), Unblock(frozenset({A}))]


def test_a_source_snapshots_and_forwards_when_triggered() -> None:
    source = Alignment([])
    assert source.on_trigger(3) == [TakeSnapshot(3), ForwardMarker(3)]
    assert source.on_trigger(4) == [TakeSnapshot(4), ForwardMarker(4)]


def test_a_source_ignores_a_trigger_that_is_repeated_or_comes_after_the_abort() -> None:
    source = Alignment([])
    source.on_trigger(3)
    assert source.on_trigger(3) == []
    source.on_abort(4)
    assert source.on_trigger(4) == []
    assert source.on_trigger(5) == [TakeSnapshot(5), ForwardMarker(5)]


def test_an_abort_releases_exactly_the_blocked_channels() -> None:
    alignment = Alignment([A, B, C])
    alignment.on_marker(A, 1)
    alignment.on_marker(C, 1)
    assert alignment.on_abort(1) == [Unblock(frozenset({A, C}))]
    assert alignment.epoch_in_progress is None
    assert alignment.on_abort(1) == []


def test_the_abort_of_a_later_epoch_ends_an_earlier_one_that_never_completed() -> None:
    alignment = Alignment([A, B])
    alignment.on_marker(A, 1)
    assert alignment.on_abort(2) == [Unblock(frozenset({A}))]
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
    assert alignment.on_marker(C, 2) == [Unblock(frozenset({A, B})), Block(C)]
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
    assert alignment.on_marker(B, 1) == [TakeSnapshot(1), ForwardMarker(1)]
    alignment.on_marker(A, 2)
    assert alignment.on_abort(2) == []
    assert alignment.on_marker(B, 2) == []


@pytest.mark.parametrize(("prepare", "channel", "epoch", "complaint"), [
    ([], C, 1, "no input"),
    ([(A, 1)], A, 2, "blocked"),
    ([(A, 2), (B, 2)], A, 2, "grow"),
    ([(A, 2), (B, 2)], A, 1, "grow"),
])
def test_an_illegal_marker_tells_the_story(prepare: list[tuple[ChannelId, int]], channel: ChannelId, epoch: int,
                                           complaint: str) -> None:
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

# A channel's script: records ("r") and markers (their epochs), in FIFO order.
Script = tuple[str | int, ...]
WHOLE: Script = ("r", 1, "r", 2, "r")
WITHOUT_1: Script = ("r", "r", 2, "r")      # upstream swallowed marker 1: the abort had reached it before
WITHOUT_2: Script = ("r", 1, "r", "r")


@dataclass
class World:
    """One subtask, its input scripts and the notices under way to it. `check` holds what must be true of any run."""

    scripts: dict[ChannelId, Script]
    notices: tuple[int, ...]                         # aborts under way, in order
    mode: AlignmentMode
    alignment: Alignment
    position: dict[ChannelId, int] = field(default_factory=dict)
    blocked: set[ChannelId] = field(default_factory=set)
    blocks: list[tuple[ChannelId, int]] = field(default_factory=list)
    snapshots: list[int] = field(default_factory=list)
    heard: tuple[int, ...] = ()

    def key(self) -> object:
        return (tuple(self.position.values()), self.heard, tuple(sorted(self.blocked)), tuple(self.snapshots),
                self.alignment.epoch_in_progress, tuple(sorted(self.blocks)))

    def moves(self) -> list[ChannelId | int]:
        channels = [channel for channel, script in self.scripts.items()
                    if self.position[channel] < len(script) and channel not in self.blocked
                    and self.exists(script[self.position[channel]])]
        return [*channels, *(notice for notice in self.notices[:1] if self.exists(notice))]

    def exists(self, element: str | int) -> bool:
        """Epoch 2 is triggered, and so marked or aborted anywhere, only when 1 was aborted or acknowledged by all."""
        return element != 2 or 1 in self.snapshots or 1 in (*self.notices, *self.heard)

    def after(self, move: ChannelId | int) -> World:
        world = copy.deepcopy(self)
        if isinstance(move, int):
            world.notices, world.heard = world.notices[1:], (*world.heard, move)
            world.execute(world.alignment.on_abort(move), move)
        else:
            element = world.scripts[move][world.position[move]]
            world.position[move] += 1
            if isinstance(element, int):
                world.execute(world.alignment.on_marker(move, element), element)
        return world

    def execute(self, effects: list[Effect], epoch: int) -> None:
        kinds = [type(effect) for effect in effects]
        if TakeSnapshot in kinds:
            at = kinds.index(TakeSnapshot)
            aligned = self.mode is AlignmentMode.EXACTLY_ONCE
            assert kinds[at + 1 :] == ([ForwardMarker, Unblock] if aligned else [ForwardMarker])
        for effect in effects:
            match effect:
                case Block(channel):
                    assert self.mode is AlignmentMode.EXACTLY_ONCE
                    assert channel not in self.blocked
                    self.blocked.add(channel)
                    self.blocks.append((channel, epoch))
                case Unblock(channels):
                    assert channels and channels <= self.blocked
                    self.blocked -= channels
                case TakeSnapshot(taken):
                    self.check_cut(taken)
                    self.snapshots.append(taken)
                case ForwardMarker(forwarded):
                    assert forwarded == self.snapshots[-1]
        assert self.blocked == self.alignment.blocked
        assert len(set(self.blocks)) == len(self.blocks), "a channel was blocked twice for one epoch"

    def check_cut(self, epoch: int) -> None:
        assert epoch not in self.heard, "a snapshot of an epoch that was known to be aborted"
        for channel, script in self.scripts.items():
            behind_marker = script.index(epoch) + 1
            if self.mode is AlignmentMode.EXACTLY_ONCE:
                assert self.position[channel] == behind_marker
            else:
                assert self.position[channel] >= behind_marker

    def check_end(self, aborted: tuple[int, ...]) -> None:
        """Nothing can move any more: the run must have come to its end."""
        assert all(self.position[channel] == len(script) for channel, script in self.scripts.items()), "stuck"
        assert not self.blocked
        assert self.alignment.epoch_in_progress is None
        assert self.snapshots == sorted(set(self.snapshots))
        assert {1, 2} - set(aborted) <= set(self.snapshots)


def explore(scripts: dict[ChannelId, Script], aborted: tuple[int, ...], mode: AlignmentMode) -> int:
    start = World(scripts, aborted, mode, Alignment(scripts, mode=mode), position=dict.fromkeys(scripts, 0))
    todo, seen = [start], {start.key()}
    while todo:
        world = todo.pop()
        moves = world.moves()
        if not moves:
            world.check_end(aborted)
        for move in moves:
            following = world.after(move)
            if following.key() not in seen:
                seen.add(following.key())
                todo.append(following)
    return len(seen)


@pytest.mark.parametrize("mode", AlignmentMode)
def test_every_interleaving_without_aborts_is_a_consistent_cut(mode: AlignmentMode) -> None:
    assert explore(dict.fromkeys((A, B, C), WHOLE), (), mode) > 20


@pytest.mark.parametrize("mode", AlignmentMode)
@pytest.mark.parametrize("scripts", list(product((WHOLE, WITHOUT_1), repeat=3)))
def test_every_interleaving_with_epoch_1_aborted_completes_epoch_2(scripts: tuple[Script, ...],
                                                                  mode: AlignmentMode) -> None:
    assert explore(dict(zip((A, B, C), scripts, strict=True)), (1,), mode) > 20


@pytest.mark.parametrize("mode", AlignmentMode)
@pytest.mark.parametrize("scripts", list(product((WHOLE, WITHOUT_2), repeat=3)))
def test_every_interleaving_with_epoch_2_aborted_ends_with_all_channels_open(scripts: tuple[Script, ...],
                                                                            mode: AlignmentMode) -> None:
    assert explore(dict(zip((A, B, C), scripts, strict=True)), (2,), mode) > 20


@pytest.mark.parametrize("mode", AlignmentMode)
def test_every_interleaving_with_both_epochs_aborted_ends_with_all_channels_open(mode: AlignmentMode) -> None:
    assert explore({A: WHOLE, B: WITHOUT_1, C: WITHOUT_2}, (1, 2), mode) > 20
