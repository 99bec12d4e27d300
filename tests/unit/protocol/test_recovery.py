"""Recovery: conservation of state from p to q subtasks, and errors with names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import RestoreError
from tidegate.keygroups import key_groups_of
from tidegate.protocol.recovery import (
    ItemsShare,
    KeyedShare,
    Piece,
    StateKind,
    SubtaskShares,
    newest_complete,
    shares_of,
)

KEYED, SPLIT, WHOLE, UNION, BROADCAST = StateKind
GROUPS = 24
PARALLELISM = st.integers(1, 8)
# One subtask's part of an operator's state: its key-groups' contents by group, and a list by state.
Keyed = dict[int, str]
Items = dict[str, list[str]]


def test_the_kinds_are_called_what_manifests_call_them() -> None:
    assert [kind.value for kind in StateKind] == ["keyed", "split", "whole", "union", "broadcast"]


def test_the_newest_complete_snapshot_is_the_one_to_go_on_from() -> None:
    assert newest_complete([]) is None
    assert newest_complete([3, 9, 7]) == 9


def pieces_of(parallelism: int, **counts: list[int]) -> list[Piece]:
    return [
        Piece(
            subtask,
            key_groups_of(subtask, parallelism=parallelism, key_group_count=GROUPS),
            {state: per_subtask[subtask] for state, per_subtask in counts.items()},
        )
        for subtask in range(parallelism)
    ]


def plan(pieces: list[Piece], kinds: dict[str, StateKind], parallelism: int) -> tuple[SubtaskShares, ...]:
    return shares_of(pieces, kinds, parallelism=parallelism, key_group_count=GROUPS)


def test_keyed_state_is_read_in_growing_ranges_across_old_pieces() -> None:
    restores = plan(pieces_of(3), {"count": KEYED}, 2)
    assert restores == (
        SubtaskShares(keyed=(KeyedShare(0, range(8)), KeyedShare(1, range(8, 12)))),
        SubtaskShares(keyed=(KeyedShare(1, range(12, 16)), KeyedShare(2, range(16, 24)))),
    )


def test_split_items_are_dealt_out_in_contiguous_runs() -> None:
    restores = plan(pieces_of(3, todo=[5, 0, 2]), {"todo": SPLIT}, 2)
    assert [restore.items for restore in restores] == [
        (ItemsShare(0, "todo", 0, 3),),
        (ItemsShare(0, "todo", 3, 5), ItemsShare(2, "todo", 0, 2)),
    ]
    assert all(restore.keyed == () for restore in restores), "nothing is keyed, so no key-groups are read"


def test_whole_pieces_stay_together_so_that_committables_are_committed_in_the_order_of_their_epochs() -> None:
    restores = plan(pieces_of(3, pending=[5, 0, 2]), {"pending": WHOLE}, 2)
    assert [restore.items for restore in restores] == [
        (ItemsShare(0, "pending", 0, 5), ItemsShare(2, "pending", 0, 2)),
        (),
    ]


@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=8), parallelism=st.integers(1, 8))
def test_every_whole_piece_goes_to_exactly_one_subtask(counts: list[int], parallelism: int) -> None:
    restores = plan(pieces_of(len(counts), pending=counts), {"pending": WHOLE}, parallelism)
    reads = sorted((read.piece, read.start, read.stop) for restore in restores for read in restore.items)
    assert reads == [(piece, 0, count) for piece, count in enumerate(counts) if count]


def test_union_items_go_to_everyone() -> None:
    everything = (ItemsShare(0, "offsets", 0, 1), ItemsShare(2, "offsets", 0, 4))
    restores = plan(pieces_of(3, offsets=[1, 0, 4]), {"offsets": UNION}, 2)
    assert [restore.items for restore in restores] == [everything] * 2


def test_broadcast_state_is_read_by_everyone_from_the_one_piece_that_holds_it() -> None:
    restores = plan(pieces_of(2, rules=[7, 0]), {"rules": BROADCAST}, 3)
    assert [restore.items for restore in restores] == [(ItemsShare(0, "rules", 0, 7),)] * 3


def test_states_are_read_in_the_order_in_which_they_are_listed() -> None:
    restores = plan(pieces_of(1, b=[1], a=[1]), {"b": UNION, "count": KEYED, "a": SPLIT}, 1)
    assert [read.state for read in restores[0].items] == ["b", "a"]


def test_a_new_operator_restores_nothing() -> None:
    assert plan([], {}, 2) == (SubtaskShares(), SubtaskShares())


def test_pieces_without_key_groups_will_do_where_nothing_is_keyed() -> None:
    pieces = [Piece(0, range(0), {"todo": 1}), Piece(1, range(0), {"todo": 1})]
    assert [restore.items for restore in plan(pieces, {"todo": SPLIT}, 1)] == [
        (ItemsShare(0, "todo", 0, 1), ItemsShare(1, "todo", 0, 1))
    ]


@pytest.mark.parametrize(
    ("ranges", "complaint"),
    [
        ([range(8), range(10, 24)], r"missing: 8-9\)"),
        ([range(12), range(11, 24)], r"more than one subtask: 11\)"),
        ([range(12), range(12, 26)], r"out of range: 24-25\)"),
        ([range(3), range(4, 12), range(10, 12), range(13, 24)], r"missing: 3, 12; written by more than one subtask: 10-11"),
        ([], r"missing: 0-23"),
    ],
)
def test_key_groups_that_do_not_tile_are_named(ranges: list[range], complaint: str) -> None:
    with pytest.raises(RestoreError, match=complaint):
        plan([Piece(subtask, groups) for subtask, groups in enumerate(ranges)], {"count": KEYED}, 2)


def test_ranges_are_checked_even_where_no_state_is_keyed() -> None:
    with pytest.raises(RestoreError, match="missing: 16-23"):
        plan(pieces_of(3)[:2], {}, 2)


def test_pieces_of_the_wrong_subtasks_are_named() -> None:
    with pytest.raises(RestoreError, match=r"subtasks \[0, 2\]"):
        plan([Piece(0, range(12)), Piece(2, range(12, 24))], {"count": KEYED}, 2)


def test_items_of_an_unknown_state_are_named() -> None:
    with pytest.raises(RestoreError, match="forgotten"):
        plan(pieces_of(1, forgotten=[1]), {}, 1)


def test_a_negative_count_is_an_error() -> None:
    with pytest.raises(RestoreError, match="-1"):
        plan(pieces_of(1, todo=[-1]), {"todo": SPLIT}, 1)


def test_broadcast_state_in_two_pieces_is_an_error() -> None:
    with pytest.raises(RestoreError, match=r"'rules'.*\[0, 2\]"):
        plan(pieces_of(3, rules=[1, 0, 1]), {"rules": BROADCAST}, 2)


# ---------------------------------------------------------------------------------------------------- conservation

KINDS = {"count": KEYED, "todo": SPLIT, "offsets": UNION, "rules": BROADCAST}


def restore(old: list[tuple[Keyed, Items]], parallelism: int) -> list[tuple[Keyed, Items]]:
    """Executes a plan the way a runtime would; the keyed reads have to come in growing order."""
    pieces = [
        Piece(
            subtask,
            key_groups_of(subtask, parallelism=len(old), key_group_count=GROUPS),
            {state: len(items) for state, items in lists.items()},
        )
        for subtask, (_, lists) in enumerate(old)
    ]
    new: list[tuple[Keyed, Items]] = []
    for todo in shares_of(pieces, KINDS, parallelism=parallelism, key_group_count=GROUPS):
        groups = [(read.piece, group) for read in todo.keyed for group in read.groups]
        assert groups == sorted(groups, key=lambda pair: pair[1])
        items: Items = {state: [] for state, kind in KINDS.items() if kind is not KEYED}
        for read in todo.items:
            assert read.start < read.stop, "an empty read is no read"
            items[read.state] += old[read.piece][1][read.state][read.start : read.stop]
        new.append(({group: old[piece][0][group] for piece, group in groups}, items))
    return new


def written(state: list[tuple[Keyed, Items]]) -> list[tuple[Keyed, Items]]:
    """What subtasks write of what they hold: of union state their own share, of broadcast state subtask 0's copy."""
    return [
        (
            keyed,
            {
                "todo": items["todo"],
                "offsets": items["offsets"][subtask :: len(state)],
                "rules": items["rules"] if subtask == 0 else [],
            },
        )
        for subtask, (keyed, items) in enumerate(state)
    ]


@st.composite
def operator_states(draw: st.DrawFn) -> list[tuple[Keyed, Items]]:
    parallelism = draw(PARALLELISM)
    state: list[tuple[Keyed, Items]] = []
    for subtask in range(parallelism):
        groups = key_groups_of(subtask, parallelism=parallelism, key_group_count=GROUPS)
        state.append(
            (
                {group: f"group {group}" for group in groups},
                {
                    "todo": [f"todo {subtask}.{index}" for index in range(draw(st.integers(0, 5)))],
                    "offsets": [f"split {subtask}.{index}" for index in range(draw(st.integers(0, 3)))],
                    "rules": [f"rule {index}" for index in range(draw(st.integers(0, 3)) if subtask == 0 else 0)],
                },
            )
        )
    return state


def flat(state: list[tuple[Keyed, Items]], name: str) -> list[str]:
    return [item for _, items in state for item in items[name]]


@given(operator_states(), PARALLELISM)
def test_nothing_is_lost_and_nothing_doubled_from_p_to_q(old: list[tuple[Keyed, Items]], q: int) -> None:
    new = restore(old, q)
    assert len(new) == q
    assert [group for keyed, _ in new for group in keyed] == list(range(GROUPS))
    assert flat(new, "todo") == flat(old, "todo"), "split items keep their order"
    lengths = [len(items["todo"]) for _, items in new]
    assert max(lengths) - min(lengths) <= 1
    for keyed, items in new:
        assert keyed == {group: f"group {group}" for group in keyed}
        assert items["offsets"] == flat(old, "offsets")
        assert items["rules"] == flat(old, "rules")


@given(operator_states(), PARALLELISM)
def test_from_p_to_q_and_back_restores_the_original(old: list[tuple[Keyed, Items]], q: int) -> None:
    p = len(old)
    balanced = restore(old, p)  # items as a running job of p subtasks holds them
    back = restore(written(restore(written(balanced), q)), p)
    for (keyed, items), (keyed_back, items_back) in zip(balanced, back, strict=True):
        assert keyed_back == keyed
        assert items_back["todo"] == items["todo"]
        assert sorted(items_back["offsets"]) == sorted(items["offsets"])
        assert items_back["rules"] == items["rules"]


@given(operator_states())
def test_ten_restarts_do_not_multiply_union_state(old: list[tuple[Keyed, Items]]) -> None:
    state = restore(old, len(old))
    for parallelism in range(1, 9):
        state = restore(written(state), parallelism)
    assert sorted(state[0][1]["offsets"]) == sorted(flat(old, "offsets"))
