from __future__ import annotations

import json
import zlib
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from tidegate.errors import CorruptFile, RestoreError
from tidegate.snapshots.manifest import (
    FORMAT_VERSION,
    FileEntry,
    Manifest,
    OperatorEntry,
    PieceEntry,
    RestoredFrom,
    SavepointEntry,
    StateEntry,
)
from tidegate.snapshots.stats import EpochStats, SubtaskStats
from tidegate.state.sections import StateInfo, StateKind
from tidegate.types.json_form import from_json, to_json

SCHEMA = pa.schema(
    [
        pa.field("key", pa.struct([("a", pa.int64()), ("b", pa.string())]), nullable=False),
        pa.field("value", pa.map_(pa.string(), pa.list_(pa.decimal128(10, 2)))),
    ],
    metadata={"hint": "é"},
)
COUNT = StateEntry.of(StateInfo("count", StateKind.KEYED, "value", SCHEMA))
FILE = FileEntry(
    name="state/a0000000002-e0000000007-s00000-count.tgs", bytes=100, checksum=2**32 - 1, index_bytes=40, index_checksum=0
)
PIECES = (
    PieceEntry(subtask=0, key_groups=(0, 64), files=(FILE,), item_counts={"count": 3}),
    PieceEntry(subtask=1, key_groups=(64, 128), files=(), item_counts={}),
)
OPERATOR = OperatorEntry(parallelism=2, states=(COUNT,), pieces=PIECES)
MANIFEST = Manifest(
    job="bid counts",
    epoch=7,
    attempt=2,
    created_ms=1_700_000_000_000,
    key_group_count=128,
    ending=None,
    operators={"count 'é' \"x\"": OPERATOR, "": replace(OPERATOR, pieces=PIECES)},
    stats=EpochStats(bytes=100, pause_ms=12.5, subtasks={"v0[0]": SubtaskStats(pause_ms=12.5, alarm_ms=7)}),
)


def _enveloped(body: bytes) -> bytes:
    return b'{"crc32":"%08x","manifest":%b}\n' % (zlib.crc32(body), body)


def _with(path: tuple[Any, ...], value: object, *, of: Manifest = MANIFEST) -> bytes:
    """The manifest with one value replaced (or removed, where it is `...`) under a checksum that fits."""
    body = json.loads(of.to_bytes())["manifest"]
    inner = body
    for step in path[:-1]:
        inner = inner[step]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return _enveloped(json.dumps(body).encode())


def test_a_manifest_comes_back_as_it_was() -> None:
    assert Manifest.from_bytes(MANIFEST.to_bytes(), name="m") == MANIFEST
    ended = replace(MANIFEST, ending="stop", operators={}, stats=EpochStats())
    assert Manifest.from_bytes(ended.to_bytes(), name="m") == ended


SAVEPOINT = SavepointEntry(
    id="0123456789abcdef" * 2,
    created_ms=1_700_000_000_001,
    graph="in → count → out",
    versions={"tidegate": "0.1", "python": "3.11"},
    operator_bytes=MANIFEST.operator_bytes(),
)


def test_a_savepoints_manifest_comes_back_as_it_was() -> None:
    whole = replace(MANIFEST, savepoint=SAVEPOINT, restored_from=RestoredFrom(id="a", path="file:///somewhere"))
    assert Manifest.from_bytes(whole.to_bytes(), name="m") == whole


def test_a_file_that_pieces_share_counts_once_in_the_size_of_its_operator() -> None:
    shared = replace(PIECES[1], files=(FILE,))
    assert replace(MANIFEST, operators={"count": replace(OPERATOR, pieces=(PIECES[0], shared))}).operator_bytes() == {
        "count": 100
    }


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("savepoint", "id"), "x"),
        (("savepoint", "id"), ...),
        (("savepoint", "operator_bytes", ""), 99),
        (("savepoint", "versions", "python"), 3),
        (("savepoint", "surprise"), 1),
        (("savepoint",), []),
        (("restored_from",), "x"),
        (("restored_from", "path"), ...),
        (("restored_from", "id"), None),
    ],
)
def test_what_a_savepoint_says_of_itself_is_checked_as_well(path: tuple[Any, ...], value: object) -> None:
    whole = replace(MANIFEST, savepoint=SAVEPOINT, restored_from=RestoredFrom(id="a", path="b"))
    with pytest.raises(CorruptFile, match="manifests/7"):
        Manifest.from_bytes(_with(path, value, of=whole), name="manifests/7")


def test_a_manifest_is_plain_json() -> None:
    assert json.loads(MANIFEST.to_bytes())["manifest"]["epoch"] == 7


def test_the_same_manifest_has_the_same_bytes() -> None:
    turned = replace(MANIFEST, operators=dict(reversed(list(MANIFEST.operators.items()))))
    assert turned.to_bytes() == MANIFEST.to_bytes()


def test_a_schema_comes_back_exactly_and_can_be_read_by_people() -> None:
    found = Manifest.from_bytes(MANIFEST.to_bytes(), name="m").operators[""].states[0]
    assert found.arrow_schema().equals(SCHEMA, check_metadata=True)
    assert "value map<string, list<" in found.type


def test_its_files_are_listed() -> None:
    assert [file.name for file in MANIFEST.files()] == [FILE.name, FILE.name]


def test_no_flipped_bit_goes_unnoticed() -> None:
    content = bytearray(MANIFEST.to_bytes())
    for index in range(len(content)):
        for bit in range(8):
            content[index] ^= 1 << bit
            with pytest.raises(CorruptFile):
                Manifest.from_bytes(bytes(content), name="m")
            content[index] ^= 1 << bit


def test_no_truncation_and_no_addition_goes_unnoticed() -> None:
    content = MANIFEST.to_bytes()
    damaged = [content[:length] for length in range(len(content))]
    damaged += [content + tail for tail in (b"\n", b" ", b"\0", content)]
    for each in damaged:
        with pytest.raises(CorruptFile):
            Manifest.from_bytes(each, name="m")


PIECE = ("operators", "", "pieces", 0)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("epoch",), ...),
        (("epoch",), "7"),
        (("epoch",), True),
        (("epoch",), 7.0),
        (("epoch",), 0),
        (("attempt",), -1),
        (("key_group_count",), 127),
        (("job",), None),
        (("ending",), 1),
        (("operators",), []),
        (("stats",), []),
        (("surprise",), 1),
        (("operators", "", "parallelism"), 3),
        (("operators", "", "parallelism"), 0),
        (("operators", "", "pieces", 1), ...),
        (("operators", "", "pieces", 1, "subtask"), 0),
        (("operators", "", "states", 0, "kind"), 1),
        (("operators", "", "states", 0, "shape"), ...),
        ((*PIECE, "key_groups"), [0]),
        ((*PIECE, "key_groups"), [5, 3]),
        ((*PIECE, "key_groups"), [0, None]),
        ((*PIECE, "item_counts"), {"x": 1}),
        ((*PIECE, "item_counts", "count"), -1),
        ((*PIECE, "files", 0, "bytes"), -1),
        ((*PIECE, "files", 0, "bytes"), 39),
        ((*PIECE, "files", 0, "checksum"), 2**32),
        ((*PIECE, "files", 0, "name"), "../../etc/passwd"),
        ((*PIECE, "files", 0, "name"), "/etc/passwd"),
    ],
)
def test_what_does_not_fit_the_schema_is_corrupt_and_names_the_file(path: tuple[Any, ...], value: object) -> None:
    with pytest.raises(CorruptFile, match="manifests/7"):
        Manifest.from_bytes(_with(path, value), name="manifests/7")


def test_the_message_says_where_in_the_manifest() -> None:
    with pytest.raises(CorruptFile, match=r"operators\[''\]\.pieces\[0\]\.files\[0\]\.bytes: expected an integer"):
        Manifest.from_bytes(_with((*PIECE, "files", 0, "bytes"), "x"), name="m")


@pytest.mark.parametrize(
    "body",
    [
        b"{}}",
        b'{"a":}',
        b"{" + b'"a":[' * 100_000 + b"}",
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' + b"1" * 5000 + b"}",
    ],
)
def test_what_python_can_not_take_for_json_is_corrupt(body: bytes) -> None:
    with pytest.raises(CorruptFile):
        Manifest.from_bytes(_enveloped(body), name="m")


def test_a_later_format_is_not_called_corrupt() -> None:
    with pytest.raises(RestoreError, match=f"format {FORMAT_VERSION + 1}"):
        Manifest.from_bytes(_with(("format",), FORMAT_VERSION + 1), name="m")


def test_pieces_travel_by_themselves() -> None:
    for piece in PIECES:
        assert from_json(PieceEntry, json.loads(json.dumps(to_json(piece))), "piece") == piece
    assert from_json(OperatorEntry, json.loads(json.dumps(to_json(OPERATOR))), "operator") == OPERATOR


@pytest.mark.parametrize(
    "value",
    [
        None,
        1,
        "x",
        [],
        {},
        {"subtask": 0},
        {**to_json(PIECES[0]), "more": 1},
        {**to_json(PIECES[0]), "files": [{}]},
        {**to_json(PIECES[0]), "subtask": -1},
    ],
)
def test_what_is_not_a_piece_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="piece"):
        from_json(PieceEntry, value, "piece")
    with pytest.raises(ValueError):
        from_json(OperatorEntry, value, "operator")


def test_an_operator_can_be_put_together_piece_by_piece_but_a_manifest_needs_all() -> None:
    part = OperatorEntry(parallelism=2, states=(COUNT,), pieces=PIECES[:1])
    with pytest.raises(ValueError, match="1 pieces of 2 subtasks"):
        replace(MANIFEST, operators={"count": part})


def test_stats_that_json_has_no_word_for_are_refused_when_written() -> None:
    with pytest.raises(ValueError):
        replace(MANIFEST, stats=EpochStats(pause_ms=float("nan"))).to_bytes()


@pytest.mark.parametrize("stats", [{}, {"bytes": 1, "subtasks": {"v0[0]": {"pause_ms": 2, "wake_ms": 3}}, "took_ms": None}])
def test_stats_of_other_versions_are_read_as_far_as_they_are_known(stats: dict[str, Any]) -> None:
    found = Manifest.from_bytes(_with(("stats",), stats), name="m").stats
    assert found.bytes == len(stats.get("subtasks", ()))
    assert found.alarm_ms == (3 if stats else None)  # it was `wake_ms`
    assert [each.pause_ms for each in found.subtasks.values()] == [2] * found.bytes


def test_a_damaged_schema_is_corrupt() -> None:
    for schema in ("", "!!!", "AAAA", COUNT.schema[:40]):
        with pytest.raises(CorruptFile, match="count"):
            replace(COUNT, schema=schema).arrow_schema()
