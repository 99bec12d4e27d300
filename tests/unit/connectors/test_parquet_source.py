"""Parquet files as input: when one is complete, what of it is read, and what is told of one that can't be."""

from __future__ import annotations

import io
import os
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as arrow_fs
import pyarrow.parquet as pq
import pytest

from tests.unit.connectors.conftest import Reading, write_parquet
from tidegate import sources
from tidegate.connectors import folders, parquet_source
from tidegate.errors import SchemaError, SourceError
from tidegate.types import ddl_of


def test_a_parquet_file_is_taken_when_its_footer_is_there(tmp_path: Path) -> None:
    write_parquet(tmp_path / "whole.parquet", [1, 2, 3])
    content = (tmp_path / "whole.parquet").read_bytes()
    (tmp_path / "slow.parquet").write_bytes(content[:-5])
    (tmp_path / "none.parquet").write_bytes(b"")
    reading = Reading(sources.parquet(tmp_path, schema="n long"))
    assert reading.now() == [1, 2, 3]
    assert reading.later() == []
    assert reading.offsets() == {"whole.parquet": ~3}
    (tmp_path / "slow.parquet").write_bytes(content)
    assert reading.later() == [1, 2, 3]
    assert reading.later() == []


def test_an_unfinished_parquet_file_is_an_error_for_a_source_that_stops_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(SourceError, match=r"torn.parquet in .* no valid Parquet footer"):
        Reading(sources.parquet(tmp_path, schema="n long", stop_at_end=True)).now()


def test_row_groups_before_the_offset_arent_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, list(range(3000)), group=1000)
    second = pq.ParquetFile(path).metadata.row_group(1).column(0)
    start = min(filter(None, [second.dictionary_page_offset, second.data_page_offset]))
    with path.open("r+b") as file:
        file.seek(4)
        file.write(b"\xff" * (start - 4))  # whoever reads the first row group now fails
    source = sources.parquet(tmp_path, schema="n long", stop_at_end=True)
    assert Reading(source, {"a.parquet": 1000}).now() == list(range(1000, 3000))
    assert Reading(source, {"a.parquet": 1500}).now() == list(range(1500, 3000))
    with pytest.raises(SourceError, match=r"a.parquet in .* can't be read after row 999"):
        Reading(source, {"a.parquet": 999}).now()


class _Away(io.BytesIO):
    def read(self, size: int | None = -1) -> bytes:
        raise OSError("AWS Error NETWORK_CONNECTION")  # as Arrow tells of it: with a text, without a number


def test_an_object_store_that_is_away_for_a_moment_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "in" / "a.parquet", [1, 2, 3])
    elsewhere = arrow_fs.SubTreeFileSystem(str(tmp_path), arrow_fs.LocalFileSystem())
    monkeypatch.setattr(folders, "locate", lambda address: (elsewhere, "in"))
    source = sources.parquet("s3://bucket/in", schema="n long")
    reading = Reading(source)
    with monkeypatch.context() as network:
        network.setattr(folders.InputFolder, "open", lambda self, name: pa.PythonFile(_Away(bytes(1000)), "r"))
        with pytest.raises(OSError, match="NETWORK_CONNECTION"):
            reading.now()  # taken for an unfinished file, it would wait for a change that never comes
    assert reading.offsets() == {}
    assert Reading(source).now() == [1, 2, 3]


def test_a_parquet_file_is_read_in_batches_of_bounded_size(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", list(range(100_000)), group=100_000)
    reader = Reading(sources.parquet(tmp_path)).reader
    batch = reader.poll(1_000_000)
    assert batch is not None
    assert batch.num_rows <= parquet_source.PARQUET_BATCH_ROWS


def test_a_replaced_parquet_file_is_an_error(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", [1, 2, 3])
    with pytest.raises(SourceError, match="has 3 rows, but had 5"):
        Reading(sources.parquet(tmp_path), {"a.parquet": 5}).now()


def test_a_parquet_file_with_another_schema_is_told(tmp_path: Path) -> None:
    pq.write_table(pa.table({"m": [1]}), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match=r"a.parquet in .* has no column 'n'; it has m"):
        Reading(sources.parquet(tmp_path, schema="n long")).now()
    pq.write_table(pa.table({"n": ["1"]}), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match=r"a.parquet in .* column 'n' is string, but is declared as long"):
        Reading(sources.parquet(tmp_path, schema="n long")).now()


def test_the_schema_is_taken_from_the_oldest_file(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"no Parquet file in .* give the source a schema"):
        sources.parquet(tmp_path)
    at = pa.array([datetime(2026, 1, 31, 12)], pa.timestamp("ns"))
    table = pa.table(
        {
            "i": pa.array([1], pa.int32()),
            "s": pa.array(["x"], pa.large_string()),
            "at": at,
            "l": [[1, 2]],
            "d": pa.array(["x"]).dictionary_encode(),
        }
    )
    pq.write_table(table, tmp_path / "old.parquet", use_deprecated_int96_timestamps=True)
    os.utime(tmp_path / "old.parquet", (10, 10))
    pq.write_table(pa.table({"i": [1]}), tmp_path / "new.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"")
    os.utime(tmp_path / "broken.parquet", (5, 5))
    source = sources.parquet(tmp_path)
    assert ddl_of(source.schema) == "i int, s string, at timestamp, l array<long>, d string"
    batch = Reading(source).reader.poll(1)
    assert batch is not None
    assert batch.schema.equals(source.schema)
    assert batch.to_pylist() == [{"i": 1, "s": "x", "at": datetime(2026, 1, 31, 12, tzinfo=UTC), "l": [1, 2], "d": "x"}]
