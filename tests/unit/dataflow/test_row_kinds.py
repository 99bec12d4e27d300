"""Which deletions of a batch are of records from before it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tidegate.dataflow.row_kinds import takes_back_earlier


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([1, -1]))))
def test_a_deletion_without_an_insertion_before_it_is_of_an_earlier_record(changes: list[tuple[int, int]]) -> None:
    there = dict.fromkeys(range(4), 0)
    wanted = []
    for group, sign in changes:
        is_earlier = sign < 0 and not there[group]
        there[group] += 0 if is_earlier else sign
        wanted.append(is_earlier)
    groups, signs = (np.array([change[which] for change in changes], np.int64) for which in (0, 1))
    assert takes_back_earlier(groups, signs).tolist() == wanted
