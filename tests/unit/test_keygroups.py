"""Key-group arithmetic, exhaustively: every p ≤ G ≤ 256."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

from tidegate.keygroups import MAX_KEY_GROUP_COUNT, groups_of, key_groups_of, owner_of, owners_of

SIZES = range(1, 257)


def test_ranges_tile_and_owners_are_their_inverse_for_all_sizes() -> None:
    for key_group_count in SIZES:
        groups = np.arange(key_group_count, dtype=np.int32)
        for parallelism in range(1, key_group_count + 1):
            ranges = [
                key_groups_of(subtask, parallelism=parallelism, key_group_count=key_group_count)
                for subtask in range(parallelism)
            ]
            sizes = list(map(len, ranges))
            # One after the other, without gap or overlap, they are all groups in order; and none is much larger.
            assert list(chain.from_iterable(ranges)) == groups.tolist()
            assert min(sizes) == key_group_count // parallelism and max(sizes) == -(-key_group_count // parallelism)
            owners = owners_of(groups, parallelism=parallelism, key_group_count=key_group_count)
            assert owners.tolist() == np.repeat(np.arange(parallelism), sizes).tolist()


def test_one_group_has_the_owner_that_many_have() -> None:
    for key_group_count in (1, 2, 7, 100, 128, 255, 256, MAX_KEY_GROUP_COUNT):
        groups = np.unique(np.linspace(0, key_group_count - 1, 300).astype(np.int32))
        for parallelism in {1, 2, 3, key_group_count // 2, key_group_count - 1, key_group_count} & {
            *range(1, key_group_count + 1)
        }:
            owners = [owner_of(group, parallelism=parallelism, key_group_count=key_group_count) for group in groups.tolist()]
            assert owners_of(groups, parallelism=parallelism, key_group_count=key_group_count).tolist() == owners
            assert all(
                group in key_groups_of(owner, parallelism=parallelism, key_group_count=key_group_count)
                for group, owner in zip(groups.tolist(), owners, strict=True)
            )


def test_every_hash_has_a_group_and_negative_ones_count_from_above() -> None:
    edges = [0, 1, -1, 2**63 - 1, -(2**63), 127, 128, -128, -129]
    hashes = np.array(edges + np.random.default_rng(15).integers(-(2**63), 2**63 - 1, 2000).tolist(), dtype=np.int64)
    for key_group_count in (*SIZES, MAX_KEY_GROUP_COUNT - 1, MAX_KEY_GROUP_COUNT):
        groups = groups_of(hashes, key_group_count)
        assert groups.dtype == np.int32
        # Python's % is Spark's pmod for a positive divisor.
        assert groups.tolist() == [value % key_group_count for value in hashes.tolist()]


def test_the_owner_of_a_hash_does_not_change_with_the_way_it_is_asked() -> None:
    hashes = np.random.default_rng(7).integers(-(2**63), 2**63 - 1, 5000)
    for parallelism, key_group_count in ((1, 128), (2, 128), (3, 128), (7, 100), (128, 128)):
        groups = groups_of(hashes, key_group_count)
        owners = owners_of(groups, parallelism=parallelism, key_group_count=key_group_count)
        for subtask in range(parallelism):
            owned = key_groups_of(subtask, parallelism=parallelism, key_group_count=key_group_count)
            assert np.array_equal(owners == subtask, (groups >= owned.start) & (groups < owned.stop))


@pytest.mark.parametrize(
    ("subtask", "parallelism", "key_group_count"),
    [(0, 0, 8), (-1, 2, 8), (2, 2, 8), (0, 9, 8), (0, 1, MAX_KEY_GROUP_COUNT + 1)],
)
def test_impossible_assignments_are_bugs(subtask: int, parallelism: int, key_group_count: int) -> None:
    with pytest.raises(AssertionError):
        key_groups_of(subtask, parallelism=parallelism, key_group_count=key_group_count)
