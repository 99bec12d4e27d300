"""The column `row_kind`, which says what each record of a stream of changes does.

    +I   the row is inserted
    -D   a row that is equal to this one, and was inserted before, is deleted

An update is the deletion of the old row and the insertion of the new one. The words are Flink's; its -U and +U are not used,
since a filter or key_by may part the two halves of an update.

All kinds are texts of two bytes, so a column of them is read and made as an array of numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

ROW_KIND = "row_kind"
INSERTED, DELETED = "+I", "-D"
KIND_FIELD = pa.field(ROW_KIND, pa.string(), nullable=False)

_WIDTH = 2
_CODE = np.dtype("<u2")
_INSERTED_CODE, _DELETED_CODE = (int.from_bytes(each.encode(), "little") for each in (INSERTED, DELETED))


def signs_of(kinds: pa.Array) -> npt.NDArray[np.int64]:
    """Return 1 for each insertion and -1 for each deletion."""
    codes = _codes(kinds)
    inserts = codes == _INSERTED_CODE
    assert (inserts | (codes == _DELETED_CODE)).all(), f"{kinds} has other kinds than {INSERTED} and {DELETED}"
    return np.where(inserts, 1, -1)


def kinds_of(inserts: npt.NDArray[np.bool_]) -> pa.Array:
    """Return the column for insertions where `inserts` is true, and deletions elsewhere."""
    codes = np.where(inserts, _INSERTED_CODE, _DELETED_CODE).astype(_CODE)
    offsets = np.arange(0, _WIDTH * len(codes) + 1, _WIDTH, dtype=np.int32)
    return pa.Array.from_buffers(pa.string(), len(codes), [None, pa.py_buffer(offsets), pa.py_buffer(codes)])


def takes_back_earlier(groups: npt.NDArray[np.int64], signs: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return which records of a batch are deletions of what came before the batch: those for which it has no insertion
    before them, in their group, that an earlier deletion hasn't taken back."""
    order = np.argsort(groups, kind="stable")
    inside = groups[order]
    firsts = np.append(True, inside[1:] != inside[:-1])[: len(inside)]
    sums = np.cumsum(signs[order])
    numbers = np.cumsum(firsts) - 1
    sums -= np.append(0, sums)[np.flatnonzero(firsts)][numbers]  # up to each record, in its group
    apart = 2 * len(groups) + 1  # so that each group is below the one before it
    lowest = np.minimum.accumulate(np.minimum(sums, 0) - numbers * apart) + numbers * apart
    before = np.where(firsts, 0, np.append(0, lowest[:-1])) if len(lowest) else lowest
    found = np.empty(len(groups), bool)
    found[order] = lowest < before
    return found


def _codes(kinds: pa.Array) -> npt.NDArray[Any]:
    if not len(kinds):
        return np.empty(0, _CODE)
    _, offsets, text = kinds.buffers()
    start = np.frombuffer(offsets, np.int32, 1, kinds.offset * 4)[0]
    return np.frombuffer(text, _CODE, len(kinds), int(start))
