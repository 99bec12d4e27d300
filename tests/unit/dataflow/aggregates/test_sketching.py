"""Approximate distinct counts: how far off they are, also when sketches are merged and restored."""

from __future__ import annotations

import sys

import numpy as np
import pyarrow as pa
import pytest

from tidegate.dataflow.aggregates import declaring as tg
from tidegate.dataflow.aggregates.aggregation import Aggregation
from tidegate.dataflow.aggregates.numpy_columns import copy_rows, held_vectors
from tidegate.dataflow.aggregates.sketching import ApproxCountDistinct
from tidegate.errors import JobError, SchemaError

SCHEMA = pa.schema([("x", pa.int64())])
KEYS = 40


@pytest.mark.parametrize("relative_error", [0.05, 0.02])
def test_the_standard_error_is_what_was_asked_for(relative_error: float) -> None:
    """Of many sketches, each of values of its own, half of them merged from two parts that share values."""
    aggregation = Aggregation("here", {"n": tg.approx_count_distinct("x", relative_error=relative_error)}, SCHEMA)
    count = 5_000
    tables = [held_vectors(aggregation.accumulators, KEYS) for _ in range(2)]
    numbers = np.arange(KEYS * count)
    for table, part in zip(tables, (numbers % count < 3_000, numbers % count >= 2_000), strict=True):
        own = numbers[part]
        for values in np.array_split(own, 4):
            aggregation.add(table, values // count, [pa.array(values)])
    aggregation.merge(tables[0], np.arange(KEYS), tables[1], np.arange(KEYS))
    (estimates,) = aggregation.results(tables[0], np.arange(KEYS))
    errors = estimates.to_numpy() / count - 1
    assert np.sqrt(np.mean(errors**2)) < 1.5 * relative_error, "of 40 estimates"
    assert abs(errors).max() < 4 * relative_error
    assert len(set(estimates.to_pylist())) > KEYS // 2, "they are estimates"


def test_a_sketch_that_is_copied_is_not_changed_with_the_other_one() -> None:
    aggregation = Aggregation("here", {"n": tg.approx_count_distinct("x")}, SCHEMA)
    held, other = (held_vectors(aggregation.accumulators, 1) for _ in range(2))
    row = np.array([0])
    aggregation.add(held, np.zeros(3, np.int64), [pa.array([1, 2, 2])])
    copy_rows(other, row, held, row)
    aggregation.add(held, np.zeros(2, np.int64), [pa.array([3, None])])
    assert [each.results(vectors, row)[0].to_pylist() for each in [aggregation] for vectors in (held, other)] == [[3], [2]]


def test_more_places_are_used_for_a_smaller_error() -> None:
    def lg_k(relative_error: float) -> int:
        aggregate = tg.approx_count_distinct("x", relative_error=relative_error)
        assert isinstance(aggregate, ApproxCountDistinct)
        return aggregate.lg_k

    assert [lg_k(each) for each in (0.5, 0.05, 0.02, 0.003)] == [6, 9, 12, 17]


def test_what_can_not_be_counted_is_refused() -> None:
    with pytest.raises(JobError, match=r"approx_count_distinct\(relative_error=0\.0001\): give 0\.003 or more"):
        tg.approx_count_distinct("x", relative_error=0.0001)
    of_maps = pa.schema([("x", pa.map_(pa.string(), pa.int64()))])
    with pytest.raises(SchemaError, match="here, n: "):
        Aggregation("here", {"n": tg.approx_count_distinct("x")}, of_maps)


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasketches", None)
    with pytest.raises(JobError, match=r"pip install 'tidegate\[sketches\]'"):
        tg.approx_count_distinct("x")
