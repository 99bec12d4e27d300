"""JSON lines and CSV: what the values become, and what is told of lines that can't be read."""

from __future__ import annotations

import json
import re
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from tests.unit.connectors.conftest import Reading, append, jsons
from tidegate import sources
from tidegate.connectors import lines
from tidegate.errors import JobError, SchemaError, SourceError

# Lines that can't be read.


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ('{"n": 1.5}', "Failed to convert JSON to long"),
        ('{"n": "1"}', "column 'n': the value is a JSON string, declared is long"),
        ('{"n": 99999999999999999999}', "99999999999999999999"),
        ("null", "not one JSON object"),
        ("[1]", "not one JSON object"),
        ("nonsense", "not one JSON object"),
        ('{"n": 1', "not one JSON object"),
        ('{"n": 1}{"n": 2}', "not one record on each line"),
        ('{"n": 1} null {"n": 1}', "not one record on each line"),
        ('{"n":\n1}', "not one JSON object"),
        ('{"n": 1,}', "JSON parse error"),
        ('{"n": 1, "n": 2}', "twice"),
        ("\x00", "not one JSON object"),
    ],
)
def test_a_bad_line_is_told_with_file_line_byte_and_text(tmp_path: Path, bad: str, complaint: str) -> None:
    (tmp_path / "log.json").write_text('{"n": 1}\n\n{"n": 2}\n' + bad + '\n{"n": 3}\n')
    reading = Reading(jsons(tmp_path))
    batch = reading.reader.poll(10)
    assert batch is not None
    assert batch.column("n").to_pylist() == [1, 2], "what is before the bad line is read"
    with pytest.raises(SourceError, match=complaint) as raised:
        reading.reader.poll(10)
    for part in ("log.json", str(tmp_path), "line 4 (byte 19)", bad.split("\n")[0]):
        assert part in str(raised.value)
    (tmp_path / "log.json").write_text('{"n": 1}\n\n{"n": 2}\n{"n": 9}\n{"n": 3}\n')
    assert Reading(jsons(tmp_path), reading.offsets()).now() == [9, 3], "corrected, it goes on: nothing was lost"


@pytest.mark.parametrize(
    ("declared", "value", "complaint"),
    [
        ("boolean", "1", "column 'n': the value is a JSON number, declared is boolean"),
        ("string", "1", "column 'n': the value is a JSON number, declared is string"),
        ("struct<a:int>", '{"a": "x"}', "column 'n.a': the value is a JSON string, declared is int"),
        ("struct<a:int>", "5", "column 'n': the value is a JSON number, declared is struct<a: int>"),
        ("array<int>", '["x"]', "column 'n': an element of the value is a JSON string, declared is int"),
        ("int", "1.5", "Failed to convert JSON to int, couldn't parse:1.5"),
        ("timestamp", '"soon"', "Failed to convert JSON to timestamp, couldn't parse:soon"),
        ("date", '"soon"', "'soon' as a scalar of type date"),
        ("decimal(5,2)", '"12345678.123"', "Failed to convert JSON to decimal(5,2): 12345678.123 requires precision 11"),
    ],
)
def test_a_value_of_another_type_is_told_in_the_types_that_were_declared(
    tmp_path: Path, declared: str, value: str, complaint: str
) -> None:
    (tmp_path / "log.json").write_text(f'{{"n": {value}}}\n')
    with pytest.raises(SourceError) as raised:
        Reading(sources.json(tmp_path, schema=f"n {declared}")).now()
    assert f"log.json in {tmp_path}, line 1 (byte 0): " in str(raised.value) and complaint in str(raised.value)
    assert not re.search(r"int32|int64|decimal128|timestamp\[|date32", str(raised.value))


def test_so_are_values_of_csv(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("soon\n")
    with pytest.raises(SourceError, match=r"conversion error to timestamp: invalid value 'soon'"):
        Reading(sources.csv(tmp_path, schema="n timestamp", header=False)).now()


def test_bytes_that_are_no_text_are_a_bad_line(tmp_path: Path) -> None:
    (tmp_path / "log.json").write_bytes(b'{"s": "\xc3\xa9"}\n{"s": "\xff"}\n')
    reading = Reading(sources.json(tmp_path, schema="s string"))
    assert reading.reader.poll(10).column("s").to_pylist() == ["é"]  # type: ignore[union-attr]
    with pytest.raises(SourceError, match=r"line 2 .* codec can't decode"):
        reading.now()


def test_a_long_bad_line_is_shown_in_part(tmp_path: Path) -> None:
    (tmp_path / "log.json").write_text("x" * 10_000 + "\n")
    with pytest.raises(SourceError, match=r"x{200}…") as raised:
        Reading(jsons(tmp_path)).now()
    assert len(str(raised.value)) < 1000


def test_a_line_may_be_longer_than_a_block_but_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "x" * (3 * lines.BLOCK_BYTES)
    (tmp_path / "log.json").write_text(f'{{"s": "{text}"}}\n{{"s": "y"}}\n')
    assert Reading(sources.json(tmp_path, schema="s string")).now() == [text, "y"]
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", lines.BLOCK_BYTES)
    with pytest.raises(SourceError, match="line of more than"):
        Reading(sources.json(tmp_path, schema="s string")).now()


def test_a_missing_value_where_null_is_forbidden_is_a_bad_line(tmp_path: Path) -> None:
    (tmp_path / "log.json").write_text('{"n": 1}\n{"m": 2}\n')
    reading = Reading(sources.json(tmp_path, schema="n long not null"))
    assert reading.reader.poll(10) is not None
    with pytest.raises(SourceError, match=r"line 2 .* a required field was absent"):
        reading.now()
    (tmp_path / "log.json").write_text('{"n": 1}\n{"n": null}\n')
    with pytest.raises(SourceError, match=r"line 2 .*null"):
        Reading(sources.json(tmp_path, schema="n long not null"), reading.offsets()).now()


# Types of JSON lines and CSV.

TYPED = "b boolean, i int, d double, t string, day date, at timestamp, plain timestamp_ntz, price decimal(10,2)"
TYPED_ROW = {
    "b": True,
    "i": -7,
    "d": 1.5,
    "t": 'é,"x"',
    "day": date(2026, 1, 31),
    "at": datetime(2026, 1, 31, 11, 0, 0, 250_000, UTC),
    "plain": datetime(2026, 1, 31, 12),
    "price": Decimal("12.50"),
}


def test_json_values_have_the_declared_types(tmp_path: Path) -> None:
    line = {
        "b": True,
        "i": -7,
        "d": 1.5,
        "t": 'é,"x"',
        "day": "2026-01-31",
        "at": "2026-01-31T12:00:00.25+01:00",
        "plain": "2026-01-31T12:00:00",
        "price": "12.50",
        "l": [1, None],
        "s": {"x": 1, "y": 2},
        "ignored": {"a": []},
    }
    (tmp_path / "a.json").write_text(json.dumps(line) + "\n{}\n")
    source = sources.json(tmp_path, schema=TYPED + ", l array<long>, s struct<x: int>", stop_at_end=True)
    batch = Reading(source).reader.poll(10)
    assert batch is not None
    assert batch.schema.equals(source.schema)
    assert batch.to_pylist() == [TYPED_ROW | {"l": [1, None], "s": {"x": 1}}, dict.fromkeys(source.schema.names)]


def test_csv_values_have_the_declared_types(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        "day,other,at,b,i,d,t,plain,price\n"
        '2026-01-31,zzz,2026-01-31T12:00:00.25+01:00,true,-7,1.5,"é,""x""",2026-01-31 12:00:00,12.5\n'
        ',,,,,,"",,\n,,,,,,,,\n'
    )
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


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ("x,2", "conversion error to long"),
        ("1", "Expected 2 columns, got 1"),
        ("1,2,3", "Expected 2 columns, got 3"),
        ('1,"a\nb"', "not one record"),
        ('1,"a', "not one record"),
        ("1,2\r3,4", "carriage return"),
        ("1,\x00", "zero byte"),
    ],
)
def test_a_bad_csv_line_is_told(tmp_path: Path, bad: str, complaint: str) -> None:
    (tmp_path / "a.csv").write_text("n,s\n1,2\n" + bad + "\n5,6\n")
    reading = Reading(sources.csv(tmp_path, schema="n long, s string"))
    assert reading.reader.poll(10).column("n").to_pylist() == [1]  # type: ignore[union-attr]
    with pytest.raises(SourceError, match=complaint) as raised:
        reading.now()
    assert "a.csv" in str(raised.value)
    assert "line 3 (byte 8)" in str(raised.value)


def test_a_quote_that_stays_open_to_the_end_is_a_bad_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('s\n"a""b"\n"c\n')
    reading = Reading(sources.csv(tmp_path, schema="s string", stop_at_end=True))
    assert reading.reader.poll(10).column("s").to_pylist() == ['a"b']  # type: ignore[union-attr]
    with pytest.raises(SourceError, match=r"line 3 .*line breaks"):
        reading.now()
    (tmp_path / "a.csv").write_text('s,t\na"b,"c\n')
    with pytest.raises(SourceError, match=r"line 2 .*line breaks"):
        Reading(sources.csv(tmp_path, schema="s string, t string", stop_at_end=True)).now()


def test_a_csv_header_is_waited_for_and_checked(tmp_path: Path) -> None:
    source = sources.csv(tmp_path, schema="n long")
    append(tmp_path / "a.csv", "m,")
    reading = Reading(source)
    assert reading.now() == []
    append(tmp_path / "a.csv", "n\n1,2\n")
    assert reading.later() == [2]
    (tmp_path / "b.csv").write_text("m,o\n1,2\n")
    with pytest.raises(SourceError, match=r"b.csv in .*the header \['m', 'o'\] doesn't have 'n' exactly once"):
        reading.later()
    (tmp_path / "b.csv").write_text("n,n\n1,2\n")
    again = Reading(source)
    with pytest.raises(SourceError, match="once"):
        again.now()


@pytest.mark.parametrize("delimiter", ["", ",,", '"', "\n", "é"])
def test_a_delimiter_is_one_plain_character(tmp_path: Path, delimiter: str) -> None:
    with pytest.raises(JobError, match="delimiter"):
        sources.csv(tmp_path, schema="n long", delimiter=delimiter)
