"""Folders that grow: what is read when, what waits, and what is told of input that can't be read."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as arrow_fs
import pyarrow.parquet as pq
import pytest

from tidegate import sources
from tidegate.connectors import files
from tidegate.dataflow.contracts import Source, SourceContext, SourceReader
from tidegate.errors import CorruptFile, JobError, RestoreError, SchemaError
from tidegate.types import ddl_of


class Clock:
    ms = 1_000_000

    def __call__(self) -> int:
        return self.ms


class Reading:
    """A reader at parallelism 1 and its clock."""

    def __init__(self, source: Source, restored: Mapping[str, Any] | None = None) -> None:
        self.clock = Clock()
        self.reader: SourceReader = source.open(SourceContext(0, 1, restored or {}, self.clock))

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
        return dict(self.reader.offsets())


def _jsons(folder: Path, **options: Any) -> Source:
    return sources.json(folder, schema="n long", **options)


def _append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def _parquet(path: Path, values: list[int], group: int = 1000) -> None:
    pq.write_table(pa.table({"n": pa.array(values, pa.int64())}), path, row_group_size=group)


# What grows.

def test_lines_are_read_as_they_are_finished(tmp_path: Path) -> None:
    log = tmp_path / "log.json"
    _append(log, '{"n": 1}\n{"n": ')
    reading = Reading(_jsons(tmp_path))
    assert reading.now() == [1]
    assert reading.offsets() == {"log.json": 9}
    assert reading.later() == []
    _append(log, "2}")
    assert reading.later() == []
    _append(log, '\n{"n": 3}\n')
    assert reading.now() == [], "a look at the folder is due every second only"
    assert reading.later() == [2, 3]
    assert reading.offsets() == {"log.json": ~27}
    assert not reading.reader.finished


def test_new_files_are_picked_up(tmp_path: Path) -> None:
    reading = Reading(_jsons(tmp_path / "later", discover_every="5 s"))
    assert reading.now() == []
    (tmp_path / "later" / "deeper").mkdir(parents=True)
    _append(tmp_path / "later" / "deeper" / "a.json", '{"n": 1}\n')
    reading.clock.ms += 4999
    assert reading.now() == []
    reading.clock.ms += 1
    assert reading.now() == [1]
    assert reading.offsets() == {"deeper/a.json": ~9}


def test_a_clock_that_was_set_back_doesnt_stop_discovery(tmp_path: Path) -> None:
    reading = Reading(_jsons(tmp_path))
    _append(tmp_path / "a.json", '{"n": 1}\n')
    reading.clock.ms -= 3_600_000
    assert reading.now() == [1]


def test_started_files_come_first_then_older_ones_then_by_name(tmp_path: Path) -> None:
    for name, n, mtime in [("z", 1, 10), ("b", 2, 20), ("a", 3, 20), ("started", 4, 99)]:
        _append(tmp_path / f"{name}.json", f'{{"n": 0}}\n{{"n": {n}}}\n')
        os.utime(tmp_path / f"{name}.json", (mtime, mtime))
    assert Reading(_jsons(tmp_path), {"started.json": 9}).now() == [4, 0, 1, 0, 3, 0, 2]


def test_a_file_that_grows_all_the_time_doesnt_hold_up_the_others(tmp_path: Path) -> None:
    _append(tmp_path / "a.json", '{"n": 1}\n' * 3)
    _append(tmp_path / "b.json", '{"n": 2}\n' * 3)
    os.utime(tmp_path / "a.json", (10, 10))
    reading = Reading(_jsons(tmp_path))
    read = []
    for _ in range(6):
        reading.clock.ms += 1000
        batch = reading.reader.poll(2)
        assert batch is not None
        read += batch.column("n").to_pylist()
        _append(tmp_path / "a.json", '{"n": 1}\n' * 2)
    assert read == [1, 1, 1, 2, 2, 2, 1, 1, 1, 1][:len(read)]
    assert 2 in read
    assert reading.offsets()["a.json"] >= 0, "more of it is known to be there"
    read += reading.later()
    assert sorted(read) == [1] * 15 + [2] * 3


def test_a_source_that_stops_at_the_end_reads_what_is_there_when_opened(tmp_path: Path) -> None:
    _append(tmp_path / "a.json", '{"n": 1}\n{"n": 2}')
    reading = Reading(_jsons(tmp_path, stop_at_end=True))
    assert not reading.reader.finished
    _append(tmp_path / "a.json", '\n{"n": 3}\n')
    _append(tmp_path / "b.json", '{"n": 4}\n')
    assert reading.later() == [1, 2], "the last line has no line break, but nothing more is waited for"
    assert reading.reader.finished
    again = Reading(_jsons(tmp_path, stop_at_end=True), reading.offsets())
    assert again.now() == [3, 4]


def test_an_empty_folder_is_finished_at_once_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    assert Reading(_jsons(tmp_path, stop_at_end=True)).reader.finished
    with pytest.raises(JobError, match=r"there is no .*nowhere"):
        Reading(_jsons(tmp_path / "nowhere", stop_at_end=True))


def test_a_single_file_is_a_source_too(tmp_path: Path) -> None:
    _append(tmp_path / "_one.json", '{"n": 1}\n')
    _append(tmp_path / "two.json", '{"n": 2}\n')
    reading = Reading(_jsons(tmp_path / "_one.json"))
    assert reading.now() == [1]
    assert reading.offsets() == {"_one.json": ~9}
    _append(tmp_path / "_one.json", '{"n": 3}\n')
    assert reading.later() == [3]


def test_a_single_file_may_come_later(tmp_path: Path) -> None:
    reading = Reading(_jsons(tmp_path / "later.json"))
    assert reading.now() == []
    _append(tmp_path / "later.json", '{"n": 1}\n')
    assert reading.later() == [1]


@pytest.mark.parametrize("name", ["_SUCCESS", ".a.json.crc", "a.json.tmp", "_tidegate/a.json", ".hidden/a.json"])
def test_names_for_unfinished_things_are_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    _append(tmp_path / name, "not for us")
    assert Reading(_jsons(tmp_path, stop_at_end=True)).now() == []


def test_the_owner_of_a_file_is_a_stable_function_of_its_name(tmp_path: Path) -> None:
    names = [f"part-{i}.json" for i in range(40)]
    for name in names:
        _append(tmp_path / name, '{"n": 1}\n')
    for subtask in range(3):
        reader = _jsons(tmp_path, stop_at_end=True).open(SourceContext(subtask, 3, {}, Clock()))
        while reader.poll(100) is not None:
            pass
        assert set(reader.offsets()) == {name for name in names if zlib.crc32(name.encode()) % 3 == subtask}
        assert 5 < len(reader.offsets()) < 25


def test_another_file_system_is_read_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = arrow_fs.SubTreeFileSystem(str(tmp_path), arrow_fs.LocalFileSystem())
    monkeypatch.setattr(files, "locate", lambda address: (elsewhere, "in"))
    (tmp_path / "in" / "_hidden").mkdir(parents=True)
    (tmp_path / "in" / "deeper").mkdir()
    _append(tmp_path / "in" / "deeper" / "a.json", '{"n": 1}\n')
    _append(tmp_path / "in" / "_hidden" / "a.json", '{"n": 2}\n')
    reading = Reading(sources.json("s3://bucket/in", schema="n long"))
    assert reading.now() == [1]
    _append(tmp_path / "in" / "deeper" / "a.json", '{"n": 3}\n')
    assert reading.later() == [3]
    assert reading.offsets() == {"deeper/a.json": ~18}


def test_an_address_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="no file system"):
        Reading(_jsons("nonsense://here"))      # type: ignore[arg-type]


# What must not change.

def test_a_file_that_shrank_is_an_error(tmp_path: Path) -> None:
    log = tmp_path / "log.json"
    log.write_text('{"n": 1}\n{"n": 2}\n')
    reading = Reading(_jsons(tmp_path))
    assert reading.now() == [1, 2]
    offsets = reading.offsets()
    log.write_text('{"n": 1}\n')
    with pytest.raises(RestoreError, match=r"log.json in .* has 9 bytes, but had 18 .*truncated or replaced"):
        reading.later()
    with pytest.raises(RestoreError, match="truncated or replaced"):
        Reading(_jsons(tmp_path), offsets)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    log = tmp_path / "log.json"
    log.write_text('{"n": 1}\n{"n": 2}\n')
    reading = Reading(_jsons(tmp_path))
    os.truncate(log, 9)
    with pytest.raises(RestoreError, match="truncated or replaced"):
        reading.now()


def test_a_file_that_was_replaced_by_a_longer_one_is_an_error(tmp_path: Path) -> None:
    log = tmp_path / "log.json"
    log.write_text('{"n": 1}\n')
    reading = Reading(_jsons(tmp_path))
    assert reading.now() == [1]
    log.write_text('{"n": 1000}\n{"n": 2000}\n')
    with pytest.raises(RestoreError, match="isn't the start of a line: it was replaced"):
        reading.later()


def test_a_file_may_go_when_it_was_read_to_its_end_but_not_before(tmp_path: Path) -> None:
    log = tmp_path / "log.json"
    log.write_text('{"n": 1}\n{"n": 2}\n')
    reading = Reading(_jsons(tmp_path))
    reading.reader.poll(1)
    half, _ = reading.offsets(), reading.now()
    log.unlink()
    assert reading.later() == []
    assert Reading(_jsons(tmp_path), reading.offsets()).now() == []
    with pytest.raises(RestoreError, match=r"log.json in .* is gone, and only 9 bytes"):
        Reading(_jsons(tmp_path), half)


def test_a_file_that_goes_before_it_was_begun_was_never_there(tmp_path: Path) -> None:
    for name in ("a", "b"):
        _append(tmp_path / f"{name}.json", '{"n": 1}\n')
    reading = Reading(_jsons(tmp_path))
    (tmp_path / "a.json").unlink()
    assert reading.now() == [1]
    assert set(reading.offsets()) == {"b.json"}


# Lines that can't be read.

@pytest.mark.parametrize(("bad", "complaint"), [
    ('{"n": 1.5}', "int64"),
    ('{"n": "1"}', "changed from number to string"),
    ('{"n": 99999999999999999999}', "99999999999999999999"),
    ("null", "no JSON object"),
    ("[1]", "no JSON object"),
    ("nonsense", "no JSON object"),
    ('{"n": 1', "no JSON object"),
    ('{"n": 1}{"n": 2}', "not one record on each line"),
    ('{"n": 1} null {"n": 1}', "not one record on each line"),
    ('{"n":\n1}', "no JSON object"),
    ('{"n": 1,}', "JSON parse error"),
    ('{"n": 1, "n": 2}', "twice"),
    ("\x00", "no JSON object"),
])
def test_a_bad_line_is_told_with_file_line_byte_and_text(tmp_path: Path, bad: str, complaint: str) -> None:
    (tmp_path / "log.json").write_text('{"n": 1}\n\n{"n": 2}\n' + bad + '\n{"n": 3}\n')
    reading = Reading(_jsons(tmp_path))
    batch = reading.reader.poll(10)
    assert batch is not None
    assert batch.column("n").to_pylist() == [1, 2], "what is before the bad line is read"
    with pytest.raises(SchemaError, match=complaint) as raised:
        reading.reader.poll(10)
    for part in ("log.json", str(tmp_path), "line 4 (byte 19)", bad.split("\n")[0]):
        assert part in str(raised.value)
    (tmp_path / "log.json").write_text('{"n": 1}\n\n{"n": 2}\n{"n": 9}\n{"n": 3}\n')
    assert Reading(_jsons(tmp_path), reading.offsets()).now() == [9, 3], "corrected, it goes on: nothing was lost"


def test_bytes_that_are_no_text_are_a_bad_line(tmp_path: Path) -> None:
    (tmp_path / "log.json").write_bytes(b'{"s": "\xc3\xa9"}\n{"s": "\xff"}\n')
    reading = Reading(sources.json(tmp_path, schema="s string"))
    assert reading.reader.poll(10).column("s").to_pylist() == ["é"]     # type: ignore[union-attr]
    with pytest.raises(SchemaError, match=r"line 2 .* codec can't decode"):
        reading.now()


def test_a_long_bad_line_is_shown_in_part(tmp_path: Path) -> None:
    (tmp_path / "log.json").write_text("x" * 10_000 + "\n")
    with pytest.raises(SchemaError, match=r"x{200}…") as raised:
        Reading(_jsons(tmp_path)).now()
    assert len(str(raised.value)) < 1000


def test_a_line_may_be_longer_than_a_block_but_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "x" * (3 * files.BLOCK_BYTES)
    (tmp_path / "log.json").write_text(f'{{"s": "{text}"}}\n{{"s": "y"}}\n')
    assert Reading(sources.json(tmp_path, schema="s string")).now() == [text, "y"]
    monkeypatch.setattr(files, "MAX_LINE_BYTES", files.BLOCK_BYTES)
    with pytest.raises(SchemaError, match="line of more than"):
        Reading(sources.json(tmp_path, schema="s string")).now()


def test_a_missing_value_where_null_is_forbidden_is_a_bad_line(tmp_path: Path) -> None:
    (tmp_path / "log.json").write_text('{"n": 1}\n{"m": 2}\n')
    reading = Reading(sources.json(tmp_path, schema="n long not null"))
    assert reading.reader.poll(10) is not None
    with pytest.raises(SchemaError, match=r"line 2 .* a required field was absent"):
        reading.now()
    (tmp_path / "log.json").write_text('{"n": 1}\n{"n": null}\n')
    with pytest.raises(SchemaError, match=r"line 2 .*null"):
        Reading(sources.json(tmp_path, schema="n long not null"), reading.offsets()).now()


# Types of JSON lines and CSV.

TYPED = "b boolean, i int, d double, t string, day date, at timestamp, plain timestamp_ntz, price decimal(10,2)"
TYPED_ROW = {"b": True, "i": -7, "d": 1.5, "t": "é,\"x\"", "day": date(2026, 1, 31),
             "at": datetime(2026, 1, 31, 11, 0, 0, 250_000, UTC), "plain": datetime(2026, 1, 31, 12),
             "price": Decimal("12.50")}


def test_json_values_have_the_declared_types(tmp_path: Path) -> None:
    line = {"b": True, "i": -7, "d": 1.5, "t": "é,\"x\"", "day": "2026-01-31", "at": "2026-01-31T12:00:00.25+01:00",
            "plain": "2026-01-31T12:00:00", "price": "12.50", "l": [1, None], "s": {"x": 1, "y": 2}, "ignored": {"a": []}}
    (tmp_path / "a.json").write_text(json.dumps(line) + "\n{}\n")
    source = sources.json(tmp_path, schema=TYPED + ", l array<long>, s struct<x: int>", stop_at_end=True)
    batch = Reading(source).reader.poll(10)
    assert batch is not None
    assert batch.schema.equals(source.schema)
    assert batch.to_pylist() == [TYPED_ROW | {"l": [1, None], "s": {"x": 1}}, dict.fromkeys(source.schema.names)]


def test_csv_values_have_the_declared_types(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        'day,other,at,b,i,d,t,plain,price\n'
        '2026-01-31,zzz,2026-01-31T12:00:00.25+01:00,true,-7,1.5,"é,""x""",2026-01-31 12:00:00,12.5\n'
        ',,,,,,"",,\n,,,,,,,,\n')
    source = sources.csv(tmp_path, schema=TYPED, stop_at_end=True)
    batch = Reading(source).reader.poll(10)
    assert batch is not None
    assert batch.schema.equals(source.schema)
    nothing = dict.fromkeys(source.schema.names)
    assert batch.to_pylist() == [TYPED_ROW, nothing | {"t": ""}, nothing]


@pytest.mark.parametrize("make", [sources.json, sources.csv])
def test_a_type_that_the_format_cant_hold_is_refused_when_the_source_is_built(tmp_path: Path, make: Any) -> None:
    with pytest.raises(SchemaError, match="map"):
        make(tmp_path, schema="m map<string, long>")
    with pytest.raises(SchemaError, match="nosuch"):
        make(tmp_path, schema="n nosuch")


@pytest.mark.parametrize(("bad", "complaint"), [
    ("x,2", "int64"),
    ("1", "Expected 2 columns, got 1"),
    ("1,2,3", "Expected 2 columns, got 3"),
    ('1,"a\nb"', "not one record"),
    ('1,"a', "not one record"),
    ("1,2\r3,4", "carriage return"),
    ("1,\x00", "zero byte"),
])
def test_a_bad_csv_line_is_told(tmp_path: Path, bad: str, complaint: str) -> None:
    (tmp_path / "a.csv").write_text("n,s\n1,2\n" + bad + "\n5,6\n")
    reading = Reading(sources.csv(tmp_path, schema="n long, s string"))
    assert reading.reader.poll(10).column("n").to_pylist() == [1]       # type: ignore[union-attr]
    with pytest.raises(SchemaError, match=complaint) as raised:
        reading.now()
    assert "a.csv" in str(raised.value)
    assert "line 3 (byte 8)" in str(raised.value)


def test_a_quote_that_stays_open_to_the_end_is_a_bad_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('s\n"a""b"\n"c\n')
    reading = Reading(sources.csv(tmp_path, schema="s string", stop_at_end=True))
    assert reading.reader.poll(10).column("s").to_pylist() == ['a"b']       # type: ignore[union-attr]
    with pytest.raises(SchemaError, match=r"line 3 .*line breaks"):
        reading.now()
    (tmp_path / "a.csv").write_text('s,t\na"b,"c\n')
    with pytest.raises(SchemaError, match=r"line 2 .*line breaks"):
        Reading(sources.csv(tmp_path, schema="s string, t string", stop_at_end=True)).now()


def test_a_csv_header_is_waited_for_and_checked(tmp_path: Path) -> None:
    source = sources.csv(tmp_path, schema="n long")
    _append(tmp_path / "a.csv", "m,")
    reading = Reading(source)
    assert reading.now() == []
    _append(tmp_path / "a.csv", "n\n1,2\n")
    assert reading.later() == [2]
    (tmp_path / "b.csv").write_text("m,o\n1,2\n")
    with pytest.raises(SchemaError, match=r"b.csv in .*the header \['m', 'o'\] must name 'n', once"):
        reading.later()
    (tmp_path / "b.csv").write_text("n,n\n1,2\n")
    again = Reading(source)
    with pytest.raises(SchemaError, match="once"):
        again.now()


@pytest.mark.parametrize("delimiter", ["", ",,", '"', "\n", "é"])
def test_a_delimiter_is_one_plain_character(tmp_path: Path, delimiter: str) -> None:
    with pytest.raises(JobError, match="delimiter"):
        sources.csv(tmp_path, schema="n long", delimiter=delimiter)


# Parquet.

def test_a_parquet_file_is_taken_when_its_footer_is_there(tmp_path: Path) -> None:
    _parquet(tmp_path / "whole.parquet", [1, 2, 3])
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
    with pytest.raises(CorruptFile, match=r"torn.parquet in .* no valid Parquet footer"):
        Reading(sources.parquet(tmp_path, schema="n long", stop_at_end=True)).now()


def test_row_groups_before_the_offset_arent_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    _parquet(path, list(range(3000)), group=1000)
    second = pq.ParquetFile(path).metadata.row_group(1).column(0)
    start = min(filter(None, [second.dictionary_page_offset, second.data_page_offset]))
    with path.open("r+b") as file:
        file.seek(4)
        file.write(b"\xff" * (start - 4))       # whoever reads the first row group now fails
    source = sources.parquet(tmp_path, schema="n long", stop_at_end=True)
    assert Reading(source, {"a.parquet": 1000}).now() == list(range(1000, 3000))
    assert Reading(source, {"a.parquet": 1500}).now() == list(range(1500, 3000))
    with pytest.raises(CorruptFile, match=r"a.parquet in .* can't be read behind row 999"):
        Reading(source, {"a.parquet": 999}).now()


def test_a_parquet_file_is_read_in_batches_of_bounded_size(tmp_path: Path) -> None:
    _parquet(tmp_path / "a.parquet", list(range(100_000)), group=100_000)
    reader = Reading(sources.parquet(tmp_path)).reader
    batch = reader.poll(1_000_000)
    assert batch is not None
    assert batch.num_rows <= files.PARQUET_BATCH_ROWS


def test_a_replaced_parquet_file_is_an_error(tmp_path: Path) -> None:
    _parquet(tmp_path / "a.parquet", [1, 2, 3])
    with pytest.raises(RestoreError, match="has 3 rows, but had 5"):
        Reading(sources.parquet(tmp_path), {"a.parquet": 5}).now()


def test_a_parquet_file_that_vanished_half_read_is_an_error(tmp_path: Path) -> None:
    _parquet(tmp_path / "a.parquet", [1, 2, 3])
    reading = Reading(sources.parquet(tmp_path))
    reading.reader.poll(1)
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(RestoreError, match="is gone, and only 1 "):
        reading.later()


def test_finished_parquet_files_may_go(tmp_path: Path) -> None:
    _parquet(tmp_path / "a.parquet", [1, 2, 3])
    reading = Reading(sources.parquet(tmp_path))
    assert reading.now() == [1, 2, 3]
    (tmp_path / "a.parquet").unlink()
    assert reading.later() == []
    assert Reading(sources.parquet(tmp_path, schema="n long"), reading.offsets()).now() == []


def test_a_parquet_file_with_another_schema_is_told(tmp_path: Path) -> None:
    pq.write_table(pa.table({"m": [1]}), tmp_path / "a.parquet")
    with pytest.raises(SchemaError, match=r"a.parquet in .* has no column 'n'; it has m"):
        Reading(sources.parquet(tmp_path, schema="n long")).now()
    pq.write_table(pa.table({"n": ["1"]}), tmp_path / "a.parquet")
    with pytest.raises(SchemaError, match=r"a.parquet in .* column 'n' is string, but long is declared"):
        Reading(sources.parquet(tmp_path, schema="n long")).now()


def test_the_schema_is_taken_from_the_oldest_file(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"no Parquet file in .* give the source a schema"):
        sources.parquet(tmp_path)
    at = pa.array([datetime(2026, 1, 31, 12)], pa.timestamp("ns"))
    table = pa.table({"i": pa.array([1], pa.int32()), "s": pa.array(["x"], pa.large_string()), "at": at,
                      "l": [[1, 2]], "d": pa.array(["x"]).dictionary_encode()})
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
    assert batch.to_pylist() == [{"i": 1, "s": "x", "at": datetime(2026, 1, 31, 12, tzinfo=UTC), "l": [1, 2],
                                  "d": "x"}]


def test_the_state_is_one_small_number_for_each_file(tmp_path: Path) -> None:
    for i in range(100):
        _parquet(tmp_path / f"part-{i:03}.parquet", [i])
    reading = Reading(sources.parquet(tmp_path))
    assert len(reading.now()) == 100
    assert len(json.dumps(reading.offsets())) < 100 * 30


def test_a_relative_path_is_the_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _append(tmp_path / "a.json", '{"n": 1}\n')
    monkeypatch.chdir(tmp_path)
    source = _jsons(Path())
    monkeypatch.chdir("/")
    assert Reading(source).now() == [1]


def test_finished_files_cost_next_to_nothing_to_look_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(50):
        _parquet(tmp_path / f"{i}.parquet", [i])
    reading = Reading(sources.parquet(tmp_path))
    assert len(reading.now()) == 50
    asked: list[str] = []
    monkeypatch.setattr(files, "Found", lambda name, *rest: asked.append(name))
    assert reading.later() == []
    assert asked == [], "only files that may have more are asked for their size"
