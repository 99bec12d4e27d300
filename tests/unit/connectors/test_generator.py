"""The generator: rate, shares of the splits, what `make` may return, and what a changed source is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate import sources
from tidegate.dataflow.contracts import Source, SourceContext, SourceReader
from tidegate.errors import JobError, RestoreError, SchemaError
from tidegate.types import parse_schema


class Clock:
    def __init__(self) -> None:
        self.ms = 1_000_000

    def __call__(self) -> int:
        return self.ms


def _numbers(split: int, start: int, count: int) -> dict[str, Any]:
    return {"n": np.arange(start, start + count)}


def _open(
    source: Source,
    clock: Clock | None = None,
    *,
    subtask: int = 0,
    parallelism: int = 1,
    restored: Mapping[str, Any] | None = None,
) -> SourceReader:
    return source.open(SourceContext(subtask, parallelism, restored or {}, clock or Clock()))


def _poll_count(reader: SourceReader, max_rows: int = 1_000_000) -> int:
    batch = reader.poll(max_rows)
    return 0 if batch is None else int(batch.num_rows)


def test_a_rate_is_met_evenly_over_time() -> None:
    clock = Clock()
    reader = _open(sources.generator(_numbers, schema="n long", rate=250), clock)
    counts = []
    for _ in range(100):
        clock.ms += 10
        counts.append(_poll_count(reader))
    assert sum(counts) == 250
    assert set(counts) <= {2, 3}


def test_a_rate_is_shared_by_the_readers() -> None:
    clock = Clock()
    source = sources.generator(_numbers, schema="n long", rate=90, splits=8)
    readers = [_open(source, clock, subtask=subtask, parallelism=3) for subtask in range(3)]
    assert [_poll_count(reader) for reader in readers] == [0, 0, 0]
    clock.ms += 10_000
    counts = [_poll_count(reader) for reader in readers]
    assert sum(counts) == 900
    assert max(counts) <= 900 * 3 / 8 + 3, "three of eight splits are the most that a reader has"


def test_what_didnt_fit_into_a_poll_is_due_at_the_next() -> None:
    clock = Clock()
    reader = _open(sources.generator(_numbers, schema="n long", rate=1000), clock)
    clock.ms += 1_000
    assert [_poll_count(reader, 300) for _ in range(5)] == [300, 300, 300, 100, 0]


def test_after_a_restore_there_is_no_burst() -> None:
    clock = Clock()
    source = sources.generator(_numbers, schema="n long", rate=1000, splits=2)
    reader = _open(source, clock)
    clock.ms += 1_000
    assert _poll_count(reader) == 1000
    offsets = reader.offsets()
    clock.ms += 50_000  # the job was down for so long
    again = _open(source, clock, restored=offsets)
    assert _poll_count(again) == 0
    clock.ms += 100
    batch = again.poll(1000)
    assert batch is not None
    assert sorted(batch.column("n").to_pylist()) == sorted([*range(500, 550), *range(500, 550)])


@pytest.mark.parametrize("jump_ms", [-3_600_000, 3_600_000])
def test_a_jump_of_the_clock_neither_stops_nor_floods(jump_ms: int) -> None:
    clock = Clock()
    reader = _open(sources.generator(_numbers, schema="n long", rate=1000), clock)
    clock.ms += jump_ms
    assert _poll_count(reader) <= 60_000
    clock.ms += 100
    assert _poll_count(reader) == 100


@given(rows=st.integers(0, 200), splits=st.integers(1, 9), parallelism=st.integers(1, 12), max_rows=st.integers(1, 50))
def test_every_number_is_made_once(rows: int, splits: int, parallelism: int, max_rows: int) -> None:
    source = sources.generator(make_row=lambda i: (i,), schema="n long", rows=rows, splits=splits)
    made: list[int] = []
    for subtask in range(parallelism):
        reader = _open(source, subtask=subtask, parallelism=parallelism)
        while not reader.finished:
            batch = reader.poll(max_rows)
            assert batch is not None
            made += batch.column("n").to_pylist()
        assert reader.poll(max_rows) is None
    assert sorted(made) == list(range(rows))


def test_without_a_limit_a_poll_is_filled_from_one_split() -> None:
    calls: list[tuple[int, int, int]] = []

    def make(split: int, start: int, count: int) -> dict[str, Any]:
        calls.append((split, start, count))
        return _numbers(split, start, count)

    reader = _open(sources.generator(make, schema="n long", splits=2))
    for _ in range(4):
        assert _poll_count(reader, 1000) == 1000
    assert calls == [(0, 0, 1000), (1, 0, 1000), (0, 1000, 1000), (1, 1000, 1000)]
    assert not reader.finished


def test_a_reader_without_splits_is_finished() -> None:
    reader = _open(sources.generator(_numbers, schema="n long", splits=2), subtask=2, parallelism=3)
    assert reader.finished
    assert reader.poll(10) is None
    assert reader.offsets() == {}


SCHEMA = "n long, x double, s string, at timestamp"
_AT = np.array(["2026-01-31T12:00", "2026-01-31T13:00"], dtype="datetime64[s]")


@pytest.mark.parametrize(
    "made",
    [
        {"n": np.array([1, 2], np.int32), "x": np.array([1, 2]), "s": ["a", None], "at": _AT},
        {"s": pa.array(["a", None]).dictionary_encode(), "n": [1, 2], "x": [1, 2.0], "at": pa.array(_AT)},
        pa.table(
            {
                "at": pa.chunked_array([_AT[:1], _AT[1:]]),
                "n": [1, 2],
                "x": [1.0, 2.0],
                "s": pa.array(["a", None], pa.large_string()),
            }
        ),
        pa.record_batch(
            {
                "n": pa.array([1, 2], pa.int16()),
                "x": pa.array([1, 2], pa.float32()),
                "s": ["a", None],
                "at": pa.array(_AT).cast(pa.timestamp("ns", "Europe/Berlin")),
            }
        ),
    ],
)
def test_columns_come_out_in_the_declared_types(made: Any) -> None:
    batch = _open(sources.generator(lambda split, start, count: made, schema=SCHEMA)).poll(2)
    assert batch is not None
    assert batch.schema.equals(parse_schema(SCHEMA))
    assert batch.column("n").to_pylist() == [1, 2]
    assert batch.column("x").to_pylist() == [1.0, 2.0]
    assert batch.column("s").to_pylist() == ["a", None]
    assert [at.isoformat() for at in batch.column("at").to_pylist()] == [
        "2026-01-31T12:00:00+00:00",
        "2026-01-31T13:00:00+00:00",
    ]


@pytest.mark.parametrize(
    ("made", "complaint"),
    [
        ({"m": [1, 2]}, r"returned the columns \['m'\], the schema declares \['n'\]"),
        ({"n": [1, 2], "m": [1, 2]}, r"returned the columns \['m', 'n'\]"),
        ({"n": np.array([1.0, 2.0])}, "column 'n' is double, but is declared as long"),
        ({"n": np.array(["1", "2"])}, "column 'n' is string, but is declared as long"),
        ({"n": _AT}, "column 'n' is timestamp_ntz, but is declared as long"),
        ({"n": [1, "2"]}, "2"),
        ({"n": np.array([1, 2], np.uint64)}, "uint64"),
        ({"n": [1]}, "returned 1 records"),
        ({"n": np.array([[1], [2]])}, "column 'n'"),
        ([1, 2], "returned list"),
        (None, "returned NoneType"),
    ],
)
def test_what_doesnt_fit_is_told_with_the_place(made: Any, complaint: str) -> None:
    reader = _open(sources.generator(lambda split, start, count: made, schema="n long"))
    with pytest.raises(SchemaError, match=complaint):
        reader.poll(2)


def test_columns_of_different_lengths_are_an_error() -> None:
    reader = _open(sources.generator(lambda split, start, count: {"a": [1, 2], "b": [1]}, schema="a long, b long"))
    with pytest.raises(SchemaError, match=r"different lengths: \[2, 1\]"):
        reader.poll(2)


def test_a_null_in_a_column_that_must_not_be_null_is_an_error() -> None:
    reader = _open(sources.generator(lambda split, start, count: {"a": [1, None]}, schema="a long not null"))
    with pytest.raises(SchemaError, match="not null"):
        reader.poll(2)


def test_another_number_of_splits_is_refused_at_a_restore() -> None:
    reader = _open(sources.generator(_numbers, schema="n long", splits=4))
    for splits in (2, 8):
        with pytest.raises(RestoreError, match=rf"with 4 splits .* has {splits} now"):
            _open(sources.generator(_numbers, schema="n long", splits=splits), restored=reader.offsets())


@pytest.mark.parametrize(
    "wrong",
    [
        dict(splits=0),
        dict(rows=-1),
        dict(rate=0),
        dict(rate=-5.0),
        dict(rate=float("nan")),
        dict(make_row=lambda i: (i,)),
    ],
)
def test_a_wrong_number_is_refused_when_the_source_is_built(wrong: dict[str, Any]) -> None:
    with pytest.raises(JobError):
        sources.generator(_numbers, schema="n long", **wrong)


def test_a_generator_needs_something_that_makes_records() -> None:
    with pytest.raises(JobError, match="make"):
        sources.generator(schema="n long")
