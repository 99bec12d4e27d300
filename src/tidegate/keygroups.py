"""Key-groups: which key belongs to which group, and which subtask owns a group.

A key's group is its stable hash modulo the job's key-group count, which never changes while the job's state lives.
Subtask i of p owns the half-open range ceil(i·G/p) … ceil((i+1)·G/p) of the G groups; the owner of group g is g·p // G.

Invariants (tested for every p ≤ G ≤ 256):
- the p ranges tile [0, G) exactly, in order, and each holds ⌊G/p⌋ or ⌈G/p⌉ groups;
- `owner_of` is the inverse of `key_groups_of`, and `owners_of` is `owner_of` over an array;
- the group of a key is Spark's `pmod(xxhash64(key), G)`: the remainder is never negative.

"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

IntArray: TypeAlias = "np.ndarray[Any, np.dtype[np.int32]]"

# As in Flink. With this limit, group · parallelism fits into an int32.
MAX_KEY_GROUP_COUNT = 1 << 15


def key_groups_of(subtask: int, *, parallelism: int, key_group_count: int) -> range:
    """Return the half-open range of a subtask. The `parallelism` ranges tile [0, key_group_count) exactly."""
    assert 0 <= subtask < parallelism <= key_group_count <= MAX_KEY_GROUP_COUNT
    return range(-(-subtask * key_group_count // parallelism), -(-(subtask + 1) * key_group_count // parallelism))


def overlap(one: range, other: range) -> range:
    """Return the key-groups, or items, that are in both ranges."""
    return range(max(one.start, other.start), min(one.stop, other.stop))


def owner_of(group: int, *, parallelism: int, key_group_count: int) -> int:
    """Return the subtask whose range contains `group`."""
    assert 0 <= group < key_group_count and 0 < parallelism <= key_group_count <= MAX_KEY_GROUP_COUNT
    return group * parallelism // key_group_count


def groups_of(hashes: np.ndarray[Any, np.dtype[np.int64]], key_group_count: int) -> IntArray:
    """Return the key-group of each hash, as Spark's pmod(hash, key_group_count)."""
    assert 0 < key_group_count <= MAX_KEY_GROUP_COUNT
    if key_group_count & (key_group_count - 1) == 0:
        # The same for a power of two, negative hashes included, at a fifth of the division's cost.
        return (hashes & (key_group_count - 1)).astype(np.int32)
    remainders: np.ndarray[Any, Any] = np.mod(hashes, key_group_count)
    return remainders.astype(np.int32)


def owners_of(groups: IntArray, *, parallelism: int, key_group_count: int) -> IntArray:
    """Return the owner of each group."""
    assert 0 < parallelism <= key_group_count <= MAX_KEY_GROUP_COUNT
    return groups.astype(np.int32, copy=False) * np.int32(parallelism) // np.int32(key_group_count)
