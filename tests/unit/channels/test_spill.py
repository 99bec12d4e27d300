"""A queue that goes to disk: order, bounds, space, and a disk that fails."""

from __future__ import annotations

import gc
import os
import random
import resource
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from tidegate.channels.spill import Spill, SpillError
from tidegate.errors import SchemaError, TidegateError

SCHEMA = pa.schema([("n", pa.int64()), ("text", pa.string())])


@pytest.fixture(autouse=True)
def _no_file_is_left_open() -> Iterator[None]:
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) <= before


def batch(number: int, rows: int = 100) -> pa.RecordBatch:
    texts = pa.array([None, *["x"] * (rows - 1)])
    return pa.record_batch([pa.array([number] * rows, type=pa.int64()), texts], schema=SCHEMA)


BATCH_BYTES = batch(0).get_total_buffer_size()


def numbers(batches: Iterator[pa.RecordBatch]) -> list[int]:
    return [each.column("n")[0].as_py() for each in batches]


def file_bytes(spill: Spill) -> int:
    """What its files take on the disk."""
    return sum(os.fstat(segment._file.fileno()).st_blocks * 512 for segment in spill._segments)


@pytest.mark.parametrize("memory_bytes", [0, 3 * BATCH_BYTES, 1 << 30])
def test_batches_come_back_as_and_in_the_order_they_went_in(memory_bytes: int) -> None:
    spill = Spill(SCHEMA, memory_bytes=memory_bytes)
    sent = [batch(number, rows=1 + number * 40) for number in range(20)]
    for each in sent:
        spill.append(each)
    assert len(spill) == 20
    assert list(spill.batches()) == list(spill.batches()) == sent
    assert [spill.popleft() for _ in sent] == sent
    assert len(spill) == 0
    assert spill.byte_count == 0
    assert list(spill.batches()) == []
    spill.close()


def test_memory_is_used_up_to_the_bound_and_no_file_is_made_before() -> None:
    spill = Spill(SCHEMA, memory_bytes=3 * BATCH_BYTES)
    for number in range(3):
        spill.append(batch(number))
    assert spill.byte_count == 3 * BATCH_BYTES
    assert spill.spilled_bytes == 0
    assert not spill._segments
    spill.append(batch(3))
    assert spill.byte_count == 3 * BATCH_BYTES + spill.spilled_bytes
    assert spill.spilled_bytes >= BATCH_BYTES
    spill.close()


def test_a_batch_that_would_fit_waits_behind_those_on_disk() -> None:
    spill = Spill(SCHEMA, memory_bytes=2 * BATCH_BYTES)
    for number in range(4):
        spill.append(batch(number))
    assert numbers(iter([spill.popleft(), spill.popleft()])) == [0, 1]
    spill.append(batch(4))
    assert [spill.popleft() for _ in range(3)] == [batch(2), batch(3), batch(4)]
    spill.append(batch(5))
    assert spill.spilled_bytes == 0, "all was taken back, so memory is used again"
    spill.close()


def test_to_look_at_the_oldest_leaves_it() -> None:
    spill = Spill(SCHEMA, memory_bytes=0)
    spill.append(batch(1))
    spill.append(batch(2))
    assert spill.peekleft() == spill.peekleft() == batch(1)
    assert len(spill) == 2
    assert list(spill.batches()) == [batch(1), batch(2)]
    assert [spill.popleft(), spill.popleft()] == [batch(1), batch(2)]
    spill.close()


def test_slices_and_empty_batches_and_odd_columns_survive() -> None:
    schema = pa.schema([("points", pa.list_(pa.struct([("x", pa.float64())]))), ("on", pa.bool_()), ("no", pa.null())])
    rows = pa.record_batch(
        [
            pa.array([[{"x": 1.0}], None, [], [{"x": None}]], type=schema.field("points").type),
            pa.array([True, None, False, True]),
            pa.nulls(4),
        ],
        schema=schema,
    )
    sent = [rows, rows.slice(1, 2), rows.slice(0, 0), rows.slice(3)]
    spill = Spill(schema, memory_bytes=0)
    for each in sent:
        spill.append(each)
    for each in sent:
        back = spill.popleft()
        back.validate(full=True)
        assert back == each
    spill.close()


def test_a_slice_takes_only_its_own_rows_to_the_disk() -> None:
    spill = Spill(SCHEMA, memory_bytes=0)
    spill.append(batch(1, rows=100_000).slice(10, 5))
    assert spill.byte_count < 2_000
    spill.close()


def test_the_file_is_emptied_when_all_was_taken_and_used_again() -> None:
    spill = Spill(SCHEMA, memory_bytes=0)
    spill.append(batch(0, rows=50_000))
    (segment,) = spill._segments
    assert file_bytes(spill) > 400_000
    assert spill.popleft() == batch(0, rows=50_000)
    assert file_bytes(spill) == 0
    spill.append(batch(1))
    assert list(spill._segments) == [segment]
    assert spill.popleft() == batch(1)
    spill.close()


def test_a_queue_that_is_never_empty_does_not_grow_on_disk() -> None:
    spill = Spill(SCHEMA, memory_bytes=0, segment_bytes=100_000)
    for number in range(10):
        spill.append(batch(number))
    for number in range(10, 2_000):
        spill.append(batch(number))
        assert spill.popleft() == batch(number - 10)
        assert len(spill._segments) <= 3
        assert file_bytes(spill) < 400_000
    assert numbers(spill.batches()) == list(range(1_990, 2_000))
    spill.close()


@pytest.mark.parametrize("seed", range(5))
def test_no_order_of_appending_looking_and_taking_loses_or_reorders(seed: int) -> None:
    chance = random.Random(seed)
    spill = Spill(SCHEMA, memory_bytes=chance.choice([0, 5, 20]) * BATCH_BYTES, segment_bytes=30_000)
    expected: deque[pa.RecordBatch] = deque()
    for number in range(1_500):
        match chance.randrange(5 if number % 500 < 300 else 8):
            case 0 | 1 | 2:
                expected.append(batch(number, rows=chance.choice([1, 100, 300])))
                spill.append(expected[-1])
            case 3 if expected and chance.random() < 0.1:
                assert list(spill.batches()) == list(expected)
            case 3 if expected:
                assert spill.peekleft() == expected[0]
            case _ if expected:
                assert spill.popleft() == expected.popleft()
        assert len(spill) == len(expected)
        assert spill.byte_count >= 0
    assert list(spill.batches()) == list(expected), f"seed {seed}"
    spill.close()


def test_another_thread_may_read_it() -> None:
    spill = Spill(SCHEMA, memory_bytes=2 * BATCH_BYTES)
    for number in range(50):
        spill.append(batch(number))
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.extend(numbers(spill.batches())))
    thread.start()
    thread.join()
    assert seen == list(range(50))
    spill.close()


def test_no_file_can_be_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spill = Spill(SCHEMA, memory_bytes=0)
    spill.append(batch(1))
    assert list(tmp_path.iterdir()) == []
    spill.close()


def test_to_close_drops_everything_and_can_be_done_twice() -> None:
    spill = Spill(SCHEMA, memory_bytes=BATCH_BYTES)
    for number in range(5):
        spill.append(batch(number))
    for _ in range(2):
        spill.close()
        assert len(spill) == spill.byte_count == 0
    with pytest.raises(AssertionError, match="closed"):
        spill.append(batch(1))


def test_a_batch_of_another_schema_is_refused() -> None:
    spill = Spill(SCHEMA, memory_bytes=1 << 20)
    with pytest.raises(SchemaError, match="was queued among batches with"):
        spill.append(pa.record_batch([pa.array([1])], names=["n"]))
    spill.close()


def test_columns_that_can_t_be_written_alone_are_refused_at_once() -> None:
    with pytest.raises(SchemaError, match="dictionary-encoded"):
        Spill(pa.schema([("d", pa.dictionary(pa.int32(), pa.string()))]), memory_bytes=0)


# --- a disk that fails -----------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_there_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spill = Spill(SCHEMA, memory_bytes=BATCH_BYTES)
    spill.append(batch(0))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(SpillError, match=r"gone: .*No such file or directory.*set TMPDIR to a folder with more"):
        spill.append(batch(1))
    assert list(spill.batches()) == [batch(0)]
    spill.close()


def test_a_disk_that_takes_no_more_is_an_error_and_what_it_took_before_is_there() -> None:
    spill = Spill(SCHEMA, memory_bytes=0)
    for number in range(3):
        spill.append(batch(number))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The next message is written in part only; Python ignores the signal that comes with it.
    resource.setrlimit(resource.RLIMIT_FSIZE, (spill.spilled_bytes + 100, hard))
    try:
        with pytest.raises(SpillError, match="Make room there") as caught:
            spill.append(batch(3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(caught.value, TidegateError)
    assert len(spill) == 3
    spill.append(batch(4))
    assert [spill.popleft() for _ in range(4)] == [batch(0), batch(1), batch(2), batch(4)]
    spill.close()


def test_a_file_that_lost_its_end_is_an_error() -> None:
    spill = Spill(SCHEMA, memory_bytes=0)
    spill.append(batch(0))
    spill._segments[0]._file.truncate(100)
    with pytest.raises(SpillError, match=r"can't be read: the file ends .* bytes too soon"):
        spill.popleft()
    spill.close()
