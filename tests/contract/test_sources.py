"""What every source promises, asked of each: stop anywhere, go on anywhere, at any parallelism, in pieces of any size.

Every case yields records (split, n): n counts up within the split. So a record that is lost, doubled or out of order
within its split shows.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidegate import sources
from tidegate.connectors import lines, parquet_source
from tidegate.dataflow.contracts import Source, SourceContext, SourceReader, Splits
from tidegate.dataflow.finished_splits import FinishedSplits
from tidegate.testing.scripted import AwaitSnapshot, Pause, ScriptedSource

SCHEMA = "split long, n long"
Record = tuple[int, int]


@dataclass(frozen=True)
class Case:
    source: Source
    expected: list[Record]


def _records(*counts: int) -> list[Record]:
    return [(split, n) for split, count in enumerate(counts) for n in range(count)]


def _generator(folder: Path) -> Case:
    def make(split: int, start: int, count: int) -> dict[str, np.ndarray]:
        return {"split": np.full(count, split), "n": np.arange(start, start + count)}

    return Case(sources.generator(make, schema=SCHEMA, rows=14, splits=4), _records(4, 4, 3, 3))


def _generator_by_row(folder: Path) -> Case:
    source = sources.generator(make_row=lambda i: (i % 3, i // 3), schema=SCHEMA, rows=11, splits=3)
    return Case(source, _records(4, 4, 3))


def _rows(folder: Path) -> Case:
    return Case(sources.rows([(i % 3, i // 3) for i in range(13)], SCHEMA, splits=3), _records(5, 4, 4))


def _scripted(folder: Path) -> Case:
    scripts = [[(0, 0), Pause(2), (0, 1), (0, 2)], [(1, 0), (1, 1), AwaitSnapshot(), (1, 2), Pause(1)], []]
    return Case(ScriptedSource(*scripts, schema=SCHEMA, memory=folder), _records(3, 3))


def _parquet(folder: Path) -> Case:
    (folder / "deeper").mkdir()
    for split, (name, count, group) in enumerate([("a", 7, 3), ("b", 1, 5), ("deeper/c", 5, 1), ("empty", 0, 4)]):
        table = pa.table({"n": np.arange(count), "ignored": ["x"] * count, "split": np.full(count, split)})
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=group)
    (folder / "_tidegate").mkdir()
    (folder / "_tidegate" / "pending.parquet").write_bytes(b"not yet")
    return Case(sources.parquet(folder, schema=SCHEMA, stop_at_end=True), _records(7, 1, 5))


def _json(folder: Path) -> Case:
    def line(split: int, n: int) -> str:
        return json.dumps({"n": n, "other": "é\n" * (n % 3), "split": split})

    (folder / "a.json").write_text("\n".join(line(0, n) for n in range(5)))
    (folder / "b.json").write_text("\n\n  \n" + "\r\n".join(line(1, n) for n in range(4)) + "\r\n\r\n \n")
    (folder / "c.json").write_text("".join(f"  {line(2, n)}\t\n" for n in range(3)))
    (folder / "empty.json").write_text("")
    (folder / "blank.json").write_text("\n \n")
    return Case(sources.json(folder, schema=SCHEMA, stop_at_end=True), _records(5, 4, 3))


def _csv_with_header(folder: Path) -> Case:
    (folder / "a.csv").write_text("n,split\n" + "".join(f"{n},0\n" for n in range(6)))
    (folder / "b.csv").write_text('\ufeffsplit,"a, b",n\r\n' + "\r\n".join(f'1,"x, ""y""",{n}' for n in range(4)))
    (folder / "only_header.csv").write_text("n,split")
    (folder / "c.csv").write_text("split,n\n\n" + "\n\n".join(f"2,{n}" for n in range(3)) + "\n\n")
    return Case(sources.csv(folder, schema=SCHEMA, stop_at_end=True), _records(6, 4, 3))


def _csv_without_header(folder: Path) -> Case:
    for split, count in enumerate([6, 5]):
        (folder / f"{split}.csv").write_text("".join(f"{split};{n}\n" for n in range(count)))
    return Case(sources.csv(folder, schema=SCHEMA, header=False, delimiter=";", stop_at_end=True), _records(6, 5))


CASES: list[Callable[[Path], Case]] = [
    _generator,
    _generator_by_row,
    _rows,
    _scripted,
    _parquet,
    _json,
    _csv_with_header,
    _csv_without_header,
]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that files of a few lines have several blocks, with lines across their bounds and lines longer than one."""
    monkeypatch.setattr(lines, "BLOCK_BYTES", 22)
    monkeypatch.setattr(parquet_source, "PARQUET_BATCH_ROWS", 2)


@pytest.fixture(params=CASES, ids=lambda make: make.__name__.strip("_"))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    made: Case = request.param(tmp_path)
    return made


class Follower:
    """Follows the splits of a reader as the engine does; the event time of a record is its number within its split."""

    def __init__(self) -> None:
        self.splits = Splits()
        self.splits.is_followed = True
        self.live: dict[str, int] = {}
        self.of: dict[int, str] = {}  # the source's name of a split

    def on_discovered(self, splits: Mapping[str, bool]) -> None:
        for split in splits:
            self.live.setdefault(split, -1)

    def on_finished(self, split: str) -> None:
        del self.live[split]

    def watermark_ms(self, split: str) -> int:
        return self.live.get(split, -1)

    def opened(self, reader: SourceReader) -> SourceReader:
        self.splits.follow(self)
        self.on_discovered(self.splits.live)
        return reader

    def polled(self, batch: pa.RecordBatch | None) -> None:
        self.splits.tell_discovered()
        if batch is not None:
            numbers, name = batch.column("split").unique().to_pylist(), self.splits.current
            assert len(numbers) == 1, "a batch is of one split"
            assert self.of.setdefault(numbers[0], name) == name
            assert name in self.live, "it was discovered before it was read"
            self.live[name] = batch.column("n")[-1].as_py()
        self.splits.tell_finished()


class Deployment:
    """All readers of a source at one parallelism. Stopped and opened again, it is another one. With `followed`, event time
    is followed in their splits. Finished splits are in the offsets, inverted, as older versions have written them; at an odd
    parallelism they are restored as keyed state."""

    def __init__(self, source: Source, parallelism: int, restored: Mapping[str, Any], *, followed: bool = False) -> None:
        clock = itertools.count()
        self.schema = source.schema
        self.records: list[Record] = []
        self.followers = [Follower() if followed else None for _ in range(parallelism)]
        self.readers: list[SourceReader] = []
        self.finished = [FinishedSplits(subtask=each, parallelism=parallelism) for each in range(parallelism)]
        if source.finishes_splits and parallelism % 2:
            ends = {name: ~offset for name, offset in restored.items() if offset < 0}
            restored = {name: offset for name, offset in restored.items() if offset >= 0}
            for finished in self.finished:
                for name in itertools.compress(ends, finished.owned(list(ends))):
                    finished.add(name, ends[name])
        for subtask, follower in enumerate(self.followers):
            splits = Splits() if follower is None else follower.splits
            finished = self.finished[subtask]
            reader = source.open(SourceContext(subtask, parallelism, restored, lambda: next(clock), splits, finished))
            self.readers.append(reader if follower is None else follower.opened(reader))

    def polls(self, max_rows: int) -> Iterator[pa.RecordBatch]:
        """The batches of all readers in turn, until all are finished."""
        idle = 0
        while not all(reader.finished for reader in self.readers):
            idle += 1
            assert idle < 100, "neither finished nor any record"
            for reader, follower in zip(self.readers, self.followers, strict=True):
                batch = reader.poll(max_rows)
                if follower is not None:
                    follower.polled(batch)
                if batch is not None:
                    assert 0 < batch.num_rows <= max_rows
                    assert batch.schema.equals(self.schema)
                    idle = 0
                    self.records += zip(*(column.to_pylist() for column in batch.columns), strict=True)
                    yield batch
            self.offsets()

    def stop_after(self, poll_count: int, max_rows: int) -> Mapping[str, Any]:
        polls = self.polls(max_rows)
        for _ in range(poll_count):
            next(polls, None)
        return self.close()

    def run(self, max_rows: int) -> list[Record]:
        for _ in self.polls(max_rows):
            pass
        self.close()
        return self.records

    def offsets(self) -> dict[str, Any]:
        """As a snapshot keeps them: through JSON, and of all subtasks."""
        each = [json.loads(json.dumps(dict(reader.offsets()))) for reader in self.readers]
        each += [{name: ~end for name, end in finished.all().items()} for finished in self.finished]
        merged = {split: offset for offsets in each for split, offset in offsets.items()}
        assert len(merged) == sum(map(len, each)), "two readers own one split"
        return merged

    def close(self) -> dict[str, Any]:
        offsets = self.offsets()
        for reader in self.readers:
            reader.close()
        return offsets


def _check(read: list[Record], expected: list[Record]) -> None:
    assert Counter(read) == Counter(expected)
    for split in {split for split, _ in expected}:
        numbers = [n for of, n in read if of == split]
        assert numbers == sorted(numbers), f"split {split} came out of order"


@pytest.mark.parametrize("parallelism", [1, 2, 3, 7])
@pytest.mark.parametrize("max_rows", [1, 2, 3, 1000])
def test_everything_is_read_once_and_in_order(case: Case, parallelism: int, max_rows: int) -> None:
    _check(Deployment(case.source, parallelism, {}).run(max_rows), case.expected)


@pytest.mark.parametrize("most_open", [1, 2, 100])
@pytest.mark.parametrize("max_rows", [1, 2, 1000])
def test_followed_splits_are_read_once_in_order_and_side_by_side(
    case: Case, max_rows: int, most_open: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for form in (lines.JsonLines, lines.CsvLines, parquet_source.ParquetFormat):
        monkeypatch.setattr(form, "most_open", most_open)
    for parallelism in (1, 2):
        deployment = Deployment(case.source, parallelism, {}, followed=True)
        _check(deployment.run(max_rows), case.expected)
        for follower in deployment.followers:
            assert follower is not None
            follower.polled(None)
            assert follower.live == {}, "every split that was discovered was finished"
    if max_rows == 1 and most_open == 100 and not isinstance(case.source, ScriptedSource):
        read = Deployment(case.source, 1, {}, followed=True).run(max_rows)
        assert [n for _, n in read] == sorted(n for _, n in read), "in the order of event time"


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_stop_at_any_record_loses_and_repeats_nothing(case: Case, before: int, after: int) -> None:
    for poll_count in range(len(case.expected) + 2):
        first = Deployment(case.source, before, {}, followed=poll_count % 2 == 0)
        offsets = first.stop_after(poll_count, max_rows=1)
        assert len(first.records) == min(poll_count, len(case.expected))
        second = Deployment(case.source, after, offsets, followed=poll_count % 3 == 0)
        _check(first.records + second.run(max_rows=2), case.expected)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stops=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4), st.integers(1, 6)), max_size=6))
def test_any_number_of_stops_loses_and_repeats_nothing(case: Case, stops: list[tuple[int, int, int]]) -> None:
    offsets: Mapping[str, Any] = {}
    read: list[Record] = []
    for parallelism, poll_count, max_rows in stops:
        deployment = Deployment(case.source, parallelism, offsets)
        offsets = deployment.stop_after(poll_count, max_rows)
        read += deployment.records
    _check(read + Deployment(case.source, 2, offsets).run(max_rows=4), case.expected)


def test_a_finished_source_stays_finished(case: Case) -> None:
    deployment = Deployment(case.source, 2, {})
    deployment.run(max_rows=3)
    again = Deployment(case.source, 3, deployment.offsets())
    assert again.run(max_rows=3) == []


def test_going_on_leaves_the_state_as_small_as_it_was(case: Case) -> None:
    first = Deployment(case.source, 2, {})
    first.run(max_rows=3)
    offsets = first.offsets()
    for parallelism in range(1, 11):
        again = Deployment(case.source, parallelism, offsets)
        again.run(max_rows=3)
        assert again.offsets() == offsets


def test_a_snapshot_doesnt_change_when_reading_goes_on(case: Case) -> None:
    reader = Deployment(case.source, 1, {}).readers[0]
    reader.poll(1)
    taken = reader.offsets()
    before = dict(taken)
    while reader.poll(2) is not None:
        pass
    assert dict(taken) == before
    reader.close()


def test_a_source_travels_to_the_slots_as_a_pickle(case: Case) -> None:
    travelled = cloudpickle.loads(cloudpickle.dumps(case.source))
    assert travelled.bounded
    assert travelled.schema.equals(case.source.schema)
    _check(Deployment(travelled, 2, {}).run(max_rows=5), case.expected)
