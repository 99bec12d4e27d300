"""AND, OR, CASE and COALESCE, which compute their parts only for the rows that need them.

`CASE WHEN n = 0 THEN 0 ELSE total / n END` must not divide by zero. If a part may fail, it is computed for a batch of the
rows that reach it, and its values are spread over the rows again. Parts that can't fail are computed for all rows, which
is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.expressions.typed import BOOLEAN, Run, Typed, Value, apply, as_array


def negation(part: Typed) -> Typed:
    return apply(pc.invert, [part], BOOLEAN, f"(NOT {part.sql})")


def conjunction(left: Typed, right: Typed) -> Typed:
    return _connective(left, right, "AND", stops_at=False)


def disjunction(left: Typed, right: Typed) -> Typed:
    return _connective(left, right, "OR", stops_at=True)


def _connective(left: Typed, right: Typed, word: str, *, stops_at: bool) -> Typed:
    kernel = pc.or_kleene if stops_at else pc.and_kleene
    sql = f"({left.sql} {word} {right.sql})"
    if not right.may_fail:
        return apply(kernel, [left, right], BOOLEAN, sql)

    def run(batch: pa.RecordBatch) -> Value:
        first = as_array(left.run(batch), batch.num_rows)
        decided = pc.fill_null(first if stops_at else pc.invert(first), False)
        return kernel(first, on_rows(batch, _mask(pc.invert(decided)), right.run, BOOLEAN))

    return Typed(BOOLEAN, run, sql, left.nullable or right.nullable, may_fail=True)


def case(branches: Sequence[tuple[Typed, Typed]], otherwise: Typed, type: pa.DataType, sql: str) -> Typed:
    """Return `CASE WHEN … THEN … ELSE otherwise END`; all values are of `type`."""
    conditions = [condition for condition, _ in branches]
    values = [value for _, value in branches]
    nullable = otherwise.nullable or any(value.nullable for value in values)
    if not any(part.may_fail for part in (*conditions[1:], *values, otherwise)):
        return apply(_first_true, [*conditions, *values, otherwise], type, sql, nullable=nullable)

    def run(batch: pa.RecordBatch) -> Value:
        row_count = batch.num_rows
        open_rows = np.ones(row_count, dtype=bool)
        result = pa.nulls(row_count, type)
        for condition, value in branches:
            holds = pc.fill_null(on_rows(batch, open_rows, condition.run, BOOLEAN), False)
            chosen = _mask(holds)
            result = pc.if_else(pa.array(chosen), on_rows(batch, chosen, value.run, type), result)
            open_rows &= ~chosen
        return pc.if_else(pa.array(open_rows), on_rows(batch, open_rows, otherwise.run, type), result)

    return Typed(type, run, sql, nullable, may_fail=True)


def _first_true(*parts: Value) -> Value:
    count = len(parts) // 2
    conditions, values, otherwise = parts[:count], parts[count:-1], parts[-1]
    result = otherwise
    for condition, value in zip(reversed(conditions), reversed(values), strict=True):
        result = pc.if_else(pc.fill_null(condition, False), value, result)
    return result


def coalesce(parts: Sequence[Typed], type: pa.DataType, sql: str) -> Typed:
    """Return the first part that isn't null; all are of `type`."""
    nullable = all(part.nullable for part in parts)
    if not any(part.may_fail for part in parts[1:]):
        return apply(pc.coalesce, parts, type, sql, nullable=nullable)

    def run(batch: pa.RecordBatch) -> Value:
        def next_one(found: pa.Array, part: Typed) -> pa.Array:
            missing = found.is_null()
            return pc.if_else(missing, on_rows(batch, _mask(missing), part.run, type), found)

        return reduce(next_one, parts[1:], as_array(parts[0].run(batch), batch.num_rows))

    return Typed(type, run, sql, nullable, may_fail=True)


def on_rows(batch: pa.RecordBatch, mask: np.ndarray[Any, Any], run: Run, type: pa.DataType) -> pa.Array:
    """Return the values for the rows of the mask, null in the other rows; nothing is computed for these."""
    count = int(np.count_nonzero(mask))
    if count == len(mask):
        return as_array(run(batch), len(mask))
    if count == 0:
        return pa.nulls(len(mask), type)
    some = as_array(run(batch.filter(pa.array(mask))), count)
    return some.take(pa.array(np.cumsum(mask) - 1, mask=~mask))


def _mask(array: pa.Array) -> np.ndarray[Any, Any]:
    mask: np.ndarray[Any, Any] = array.to_numpy(zero_copy_only=False)
    return mask.copy()
