"""Pending commits: subsumption, order, and conservation under any sequence of epochs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.protocol.commit import PendingCommits


def test_nothing_is_handed_out_before_its_epoch_completes() -> None:
    pending: PendingCommits[str] = PendingCommits()
    pending.prepared(2, ["b"])
    assert pending.complete(1) == []
    assert pending.all() == ["b"]
    assert pending.complete(2) == ["b"]
    assert pending.all() == []


def test_output_of_an_aborted_epoch_is_in_the_next_snapshot_and_committed_with_it() -> None:
    pending: PendingCommits[str] = PendingCommits()
    pending.prepared(3, ["3a", "3b"])
    pending.prepared(4, ["4"])  # 3 was aborted in between: nothing is called
    assert pending.all() == ["3a", "3b", "4"]
    assert pending.complete(4) == ["3a", "3b", "4"]


def test_a_repeated_or_outdated_notice_commits_nothing_again() -> None:
    pending: PendingCommits[str] = PendingCommits()
    pending.prepared(1, ["a"])
    pending.complete(1)
    pending.prepared(2, ["b"])
    assert pending.complete(1) == []
    assert pending.all() == ["b"]


def test_epochs_prepared_out_of_order_are_committed_in_order() -> None:
    pending: PendingCommits[str] = PendingCommits()
    pending.prepared(6, ["6"])
    pending.prepared(5, ["5"])
    assert pending.all() == ["5", "6"]
    assert pending.complete(6) == ["5", "6"]


def test_output_that_missed_its_snapshot_is_a_bug() -> None:
    pending: PendingCommits[str] = PendingCommits()
    pending.complete(4)
    with pytest.raises(AssertionError, match="after snapshot 4"):
        pending.prepared(4, ["lost"])


def test_an_epoch_is_prepared_once() -> None:
    pending: PendingCommits[str] = PendingCommits()
    pending.prepared(4, [])
    with pytest.raises(AssertionError, match="twice"):
        pending.prepared(4, ["again"])


def test_restored_committables_are_committed_right_away_and_are_not_pending() -> None:
    pending: PendingCommits[str] = PendingCommits()
    assert pending.restored(["a", "b"]) == ["a", "b"]
    assert pending.all() == []


def test_restoring_after_the_start_is_a_bug() -> None:
    pending: PendingCommits[str] = PendingCommits()
    pending.prepared(1, ["a"])
    with pytest.raises(AssertionError, match="before anything else"):
        pending.restored(["b"])


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=20))
def test_every_committable_is_in_all_snapshots_until_it_is_committed_and_committed_once(
    epochs: list[tuple[int, bool]],
) -> None:
    pending: PendingCommits[tuple[int, int]] = PendingCommits()
    written: list[tuple[int, int]] = []
    committed: list[tuple[int, int]] = []
    for epoch, (count, completes) in enumerate(epochs, start=1):
        output = [(epoch, index) for index in range(count)]
        written += output
        pending.prepared(epoch, output)
        assert committed + pending.all() == written
        if completes:
            committed += pending.complete(epoch)
            assert committed == written
