"""Readers hold back a split that is too far ahead of other sources, and read those that aren't."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tidegate as tg
from tests.unit.connectors.conftest import write_parquet
from tidegate.dataflow.contracts import Source, SourceContext, Splits
from tidegate.testing.scripted import ScriptedSource


class Watermarks:
    """Event time of the splits is the last value that was read; one of more than `limit` is ahead."""

    waits = False

    def __init__(self) -> None:
        self.limit = -1
        self.read: dict[str, int] = {}

    def watermark_ms(self, split: str) -> int:
        return self.read.get(split, -(2**63))

    def is_ahead(self, split: str) -> bool:
        return self.watermark_ms(split) > self.limit

    def on_discovered(self, splits: Any) -> None: ...

    def on_finished(self, split: str) -> None: ...


def reading(source: Source) -> tuple[Watermarks, Any]:
    watermarks, splits = Watermarks(), Splits()
    splits.is_followed, splits.member = True, watermarks
    reader = source.open(SourceContext(0, 1, {}, lambda: 0, splits))
    splits.follow(watermarks)

    def read(limit: int) -> list[int]:
        watermarks.limit = limit
        values = []
        while (batch := reader.poll(2)) is not None:
            values += batch.column(0).to_pylist()
            watermarks.read[splits.current] = values[-1]
        return sorted(values)

    assert splits.holds_back
    return watermarks, read


def parquet(folder: Path) -> Source:
    for split in range(2):
        write_parquet(folder / f"{split}.parquet", list(range(split, 20, 2)), group=2)
    return tg.sources.parquet(folder, schema="n long", stop_at_end=True)


def jsons(folder: Path) -> Source:
    for split in range(2):
        (folder / f"{split}.json").write_text("".join(f'{{"n": {n}}}\n' for n in range(split, 20, 2)))
    return tg.sources.json(folder, schema="n long", stop_at_end=True)


SOURCES: dict[str, Any] = {
    "rows": lambda folder: tg.sources.rows([(n,) for n in range(20)], "n long", splits=2),
    "generator": lambda folder: tg.sources.generator(make_row=lambda n: (n,), schema="n long", rows=20, splits=2),
    "script": lambda folder: ScriptedSource(
        [(n,) for n in range(0, 20, 2)], [(n,) for n in range(1, 20, 2)], schema="n long", memory=folder
    ),
    "parquet": parquet,
    "json": jsons,
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_split_is_read_while_it_is_not_ahead(tmp_path: Path, name: str) -> None:
    _, read = reading(SOURCES[name](tmp_path))
    assert read(-1) == [0, 1, 2, 3], "each split was read once, two records each"
    assert read(1) == [], "both are ahead"
    assert read(6) == [4, 5, 6, 7, 8, 10], "5 and 7 make the second split ahead, and 8 and 10 the first"
    assert read(10**6) == [9, *range(11, 20)]


def test_among_too_many_files_one_that_can_not_be_closed_is_read_on(tmp_path: Path) -> None:
    """Or the files behind it, for which it waits, would never be opened."""
    for file in range(200):
        write_parquet(tmp_path / f"{file:03}.parquet", [file, file + 1000, file + 2000, file + 3000], group=4)
    _, read = reading(tg.sources.parquet(tmp_path, schema="n long", stop_at_end=True))
    assert set(range(200)) <= set(read(-1))
