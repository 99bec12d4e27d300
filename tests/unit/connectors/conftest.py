"""What the tests of folders and of the formats in them share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tidegate import sources
from tidegate.dataflow.contracts import Source, SourceContext, SourceReader
from tidegate.dataflow.finished_splits import FinishedSplits


class Clock:
    ms = 1_000_000

    def __call__(self) -> int:
        return self.ms


class Reading:
    """A reader at parallelism 1 and its clock."""

    def __init__(self, source: Source, restored: Mapping[str, Any] | None = None) -> None:
        self.clock = Clock()
        self.finished = FinishedSplits()
        self.reader: SourceReader = source.open(SourceContext(0, 1, restored or {}, self.clock, finished=self.finished))

    def now(self, max_rows: int = 1000) -> list[Any]:
        """What can be read at once: the values of the first column."""
        values: list[Any] = []
        while (batch := self.reader.poll(max_rows)) is not None:
            values += batch.column(0).to_pylist()
        return values

    def later(self) -> list[Any]:
        self.clock.ms += 1000
        return self.now()

    def offsets(self) -> dict[str, Any]:
        """In the form of older snapshots: with the finished files, whose offsets are inverted."""
        offsets = dict(self.reader.offsets())
        finished = self.finished.all()
        assert offsets.keys().isdisjoint(finished)
        return offsets | {name: ~end for name, end in finished.items()}


def jsons(folder: Path, **options: Any) -> Source:
    return sources.json(folder, schema="n long", **options)


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def write_parquet(path: Path, values: list[int], group: int = 1000) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"n": pa.array(values, pa.int64())}), path, row_group_size=group)
