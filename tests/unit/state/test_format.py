"""The state file: what goes in comes out, by ranges; what is damaged never does. docs/promises.md, row 14."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import CorruptFile, SchemaError
from tidegate.hashing import hash_columns
from tidegate.keygroups import groups_of
from tidegate.state import format as state_format
from tidegate.state.format import FileSummary, StateFileEncoder, StateFileReader
from tidegate.state.sections import Section, StateInfo, StateKind, deleted_schema

KEYED = pa.schema([("key", pa.string()), ("value", pa.int64())])
ITEMS = pa.schema([("value", pa.list_(pa.float64()))])
COUNT = StateInfo("count", StateKind.KEYED, "value", KEYED)
SEEN = StateInfo("seen", StateKind.KEYED, "map", KEYED.with_metadata({"since": "é"}))
OFFSETS = StateInfo("offsets", StateKind.SPLIT, "offsets", ITEMS)
RULES = StateInfo("rules", StateKind.BROADCAST, "map", KEYED)


@dataclass
class File:
    """An encoded file in memory, and what was read of it."""

    content: bytes
    summary: FileSummary
    reads: list[tuple[int, int]] = field(default_factory=list)

    def read(self, offset: int, length: int) -> bytes:
        self.reads.append((offset, length))
        return self.content[offset : offset + length]

    def reader(self) -> StateFileReader:
        return StateFileReader(
            self.read,
            bytes=self.summary.bytes,
            index_bytes=self.summary.index_bytes,
            index_checksum=self.summary.index_checksum,
            name="the file",
        )


def _encode(states: Sequence[StateInfo], sections: Sequence[Section]) -> File:
    encoder = StateFileEncoder(key_group_count=128)
    content = b"".join(encoder.chunks(states, sections))
    return File(content, encoder.summary)


def _keyed(state: StateInfo, group: int, *numbers: int) -> Section:
    rows = [{"key": f"k{number}", "value": number} for number in numbers]
    return Section(state.name, range(group, group + 1), pa.RecordBatch.from_pylist(rows, schema=state.schema))


def _deleted(state: StateInfo, group: int, *numbers: int) -> Section:
    rows = pa.record_batch([pa.array([f"k{number}" for number in numbers])], schema=deleted_schema(state.schema))
    return Section(state.name, range(group, group + 1), rows, deleted=True)


def _items(state: StateInfo, *numbers: int) -> Section:
    rows = [{"value": [float(number)]} for number in numbers]
    return Section(state.name, None, pa.RecordBatch.from_pylist(rows, schema=state.schema))


def _groups(reader: StateFileReader, state: str, groups: range) -> Iterator[pa.RecordBatch]:
    return (section.rows for section in reader.read_sections(state, groups))


def _values(batches: Iterator[pa.RecordBatch]) -> list[object]:
    return [value for batch in batches for value in batch.column("value").to_pylist()]


STATES = (COUNT, OFFSETS, SEEN, RULES)
SECTIONS = (
    _keyed(COUNT, 3, 1, 2),
    _keyed(COUNT, 3, 3),
    _keyed(COUNT, 4, 4),
    _keyed(COUNT, 9, 5, 6, 7),
    _items(OFFSETS, 1, 2),
    _items(OFFSETS, 3),
    _items(OFFSETS, 4, 5, 6),
    _keyed(SEEN, 0, 8),
)


def test_key_groups_come_back_by_range() -> None:
    reader = _encode(STATES, SECTIONS).reader()
    assert _values(_groups(reader, "count", range(128))) == [1, 2, 3, 4, 5, 6, 7]
    assert _values(_groups(reader, "count", range(3, 4))) == [1, 2, 3]
    assert _values(_groups(reader, "count", range(4, 9))) == [4]
    assert _values(_groups(reader, "count", range(5, 9))) == []
    assert _values(_groups(reader, "count", range(9, 10))) == [5, 6, 7]
    assert _values(_groups(reader, "count", range(0))) == []
    assert _values(_groups(reader, "seen", range(128))) == [8]


def test_sections_say_their_key_group() -> None:
    found = list(_encode(STATES, SECTIONS).reader().read_sections("count", range(4, 128)))
    assert [(section.state, section.groups) for section in found] == [("count", range(4, 5)), ("count", range(9, 10))]
    assert _values(section.rows for section in found) == [4, 5, 6, 7]


def test_items_come_back_by_row_range_over_section_borders() -> None:
    reader = _encode(STATES, SECTIONS).reader()
    for start in range(7):
        for stop in range(start, 7):
            expected = [[float(number)] for number in range(1, 7)][start:stop]
            assert _values(reader.read_items("offsets", start, stop)) == expected


@pytest.mark.parametrize(("start", "stop"), [(0, 7), (6, 7), (-1, 2), (4, 3)])
def test_items_that_are_not_there_are_an_error(start: int, stop: int) -> None:
    reader = _encode(STATES, SECTIONS).reader()
    with pytest.raises(CorruptFile):
        list(reader.read_items("offsets", start, stop))


def test_the_states_come_back_exactly() -> None:
    found = _encode(STATES, SECTIONS).reader().states
    assert found == STATES
    for mine, theirs in zip(STATES, found, strict=True):
        assert mine.schema.equals(theirs.schema, check_metadata=True)


def test_the_summary_is_what_a_manifest_needs() -> None:
    file = _encode(STATES, SECTIONS)
    assert file.summary.bytes == len(file.content)
    assert file.summary.checksum == zlib.crc32(file.content)
    assert file.summary.rows == {"count": 7, "offsets": 6, "seen": 1, "rules": 0}
    assert file.summary.groups == range(10)
    assert file.reader().row_count("offsets") == 6


def test_a_file_without_sections_is_a_file() -> None:
    for states in ((), STATES):
        file = _encode(states, [])
        assert file.reader().states == states
        assert file.summary.groups == range(0)
        file.reader().verify(file.summary.checksum)
    assert list(_groups(file.reader(), "count", range(128))) == []
    assert list(file.reader().read_items("offsets", 0, 0)) == []
    assert file.reader().row_count("rules") == 0


def test_sections_without_rows_are_left_out() -> None:
    assert (
        _encode(STATES, [_keyed(COUNT, 1), _keyed(COUNT, 2, 1), _items(OFFSETS)]).content
        == _encode(STATES, [_keyed(COUNT, 2, 1)]).content
    )


def test_a_slice_of_a_batch_is_stored_as_just_that() -> None:
    whole = _keyed(COUNT, 1, *range(10_000)).rows
    file = _encode([COUNT], [Section("count", range(1, 2), whole.slice(17, 2))])
    assert _values(_groups(file.reader(), "count", range(2))) == [17, 18]
    assert file.summary.bytes < 10_000


TYPES = [
    pa.int64(),
    pa.float64(),
    pa.string(),
    pa.binary(),
    pa.bool_(),
    pa.date32(),
    pa.timestamp("us", "UTC"),
    pa.decimal128(20, 3),
    pa.list_(pa.string()),
    pa.map_(pa.string(), pa.int32()),
    pa.struct([("a", pa.int8()), ("b", pa.list_(pa.float32()))]),
]


@pytest.mark.parametrize("declared", TYPES, ids=str)
def test_every_type_of_spark_comes_back_with_its_nulls(declared: pa.DataType) -> None:
    schema = pa.schema([("value", declared)])
    rows = pa.record_batch([pa.nulls(5, declared)], schema=schema)
    info = StateInfo("any", StateKind.UNION, "list", schema)
    found = _encode([info], [Section("any", None, rows)]).reader().read_items("any", 0, 5)
    assert [batch.equals(rows) for batch in found] == [True]


@pytest.mark.parametrize(
    "declared", [pa.dictionary(pa.int8(), pa.string()), pa.list_(pa.struct([("a", pa.dictionary(pa.int8(), pa.string()))]))]
)
def test_a_dictionary_type_is_refused_by_name(declared: pa.DataType) -> None:
    info = StateInfo("coded", StateKind.SPLIT, "list", pa.schema([("value", declared)]))
    with pytest.raises(SchemaError, match="coded"):
        list(StateFileEncoder(key_group_count=128).chunks([info], []))


@pytest.mark.parametrize(
    "sections",
    [
        [_keyed(COUNT, 4, 1), _keyed(COUNT, 3, 1)],  # key-groups grow
        [_items(OFFSETS, 1), _keyed(COUNT, 3, 1)],  # states come in their order
        [Section("offsets", range(3, 4), _items(OFFSETS, 1).rows)],  # only keyed states have key-groups
        [Section("count", None, _keyed(COUNT, 1, 1).rows)],  # and they have one
        [Section("count", range(3, 4), _items(OFFSETS, 1).rows)],  # rows fit the state's schema
        [Section("count", range(3, 129), _keyed(COUNT, 1, 1).rows)],  # there are 128
        [_deleted(COUNT, 3, 1), _keyed(COUNT, 4, 1)],
    ],
)  # deleted keys come last
def test_sections_that_break_the_contract_are_a_bug(sections: list[Section]) -> None:
    with pytest.raises(AssertionError):
        list(StateFileEncoder(key_group_count=128).chunks(STATES, sections))


def test_a_state_is_not_read_as_what_it_is_not() -> None:
    reader = _encode(STATES, SECTIONS).reader()
    for wrong in (_groups(reader, "offsets", range(128)), reader.read_items("count", 0, 1)):
        with pytest.raises(AssertionError):
            list(wrong)


def test_a_state_that_the_file_doesn_t_know_has_no_rows() -> None:
    """It was declared later than the file was written."""
    reader = _encode(STATES, SECTIONS).reader()
    assert list(_groups(reader, "nosuch", range(128))) == [] and reader.row_count("nosuch") == 0


def test_of_a_section_with_several_groups_only_those_asked_for_come_back() -> None:
    keys = pa.array([f"k{number}" for number in range(500)])
    groups = groups_of(hash_columns([keys]), 128)
    order = np.argsort(groups, kind="stable")
    rows = pa.record_batch([keys.take(pa.array(order)), pa.array(groups[order].astype(np.int64))], schema=KEYED)
    gone = pa.record_batch([keys.take(pa.array(order))], schema=deleted_schema(KEYED))
    half = int(np.searchsorted(groups[order], 64))
    reader = _encode(
        [COUNT],
        [
            Section("count", range(64), rows.slice(0, half)),
            Section("count", range(64, 128), rows.slice(half)),
            Section("count", range(128), gone, deleted=True),
        ],
    ).reader()
    assert reader.row_count("count") == 1000
    for start, stop in [(0, 128), (0, 1), (60, 70), (64, 128), (127, 128), (5, 5)]:
        found = list(reader.read_sections("count", range(start, stop)))
        wanted = sorted(group for group in groups.tolist() if start <= group < stop)
        assert sorted(_values(section.rows for section in found if not section.deleted)) == wanted
        deleted = [key for section in found if section.deleted for key in section.rows.column("key").to_pylist()]
        assert deleted == [
            key
            for key, group in zip(keys.take(pa.array(order)).to_pylist(), sorted(groups), strict=True)
            if start <= group < stop
        ]
        assert all(
            section.groups is not None and start <= section.groups.start and section.groups.stop <= stop for section in found
        )


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 4)), max_size=40), st.integers(0, 20), st.integers(0, 20))
def test_any_range_of_any_file_holds_just_its_groups(cut: list[tuple[int, int]], start: int, stop: int) -> None:
    cut = sorted(cut)
    sections = [_keyed(COUNT, group, *range(number * 10, number * 10 + rows)) for number, (group, rows) in enumerate(cut)]
    expected = [
        value
        for section in sections
        if section.groups is not None and start <= section.groups.start < stop
        for value in section.rows.column("value").to_pylist()
    ]
    file = _encode([COUNT], sections)
    assert _values(_groups(file.reader(), "count", range(start, stop))) == expected
    file.reader().verify(file.summary.checksum)


# How it is read and written.


def test_adjacent_sections_are_read_at_once_and_others_not_at_all() -> None:
    file = _encode(STATES, SECTIONS)
    reader = file.reader()
    assert file.reads == []
    list(_groups(reader, "count", range(4)))
    index, sections = file.reads
    assert sum(index) == file.summary.bytes
    assert sections[0] == len(state_format.MAGIC)
    file.reads.clear()
    list(_groups(reader, "count", range(128)))
    list(reader.read_items("offsets", 2, 4))
    assert len(file.reads) == 2
    assert file.reads[0][0] + file.reads[0][1] < file.reads[1][0]


def test_a_read_is_bounded_unless_one_section_is_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    sections = [_keyed(COUNT, group, *range(200 if group == 5 else 10)) for group in range(20)]
    file = _encode([COUNT], sections)
    monkeypatch.setattr(state_format, "READ_BYTES", 2000)
    reader = file.reader()
    assert reader.states == (COUNT,)
    file.reads.clear()
    assert len(_values(_groups(reader, "count", range(20)))) == 390
    larger = [length for _, length in file.reads if length > 2000]
    assert len(larger) == 1
    assert 2 < len(file.reads) < 20
    ends = [offset + length for offset, length in file.reads]
    assert [offset for offset, _ in file.reads[1:]] == ends[:-1]
    file.reader().verify(file.summary.checksum)


def test_chunks_stream_and_small_sections_are_put_together() -> None:
    taken_bytes = 0
    section_bytes = _keyed(COUNT, 0, *range(1000)).rows.serialize().size

    def sections() -> Iterator[Section]:
        nonlocal taken_bytes
        for group in range(120):
            taken_bytes += section_bytes
            yield _keyed(COUNT, group, *range(1000))

    written_bytes, sizes = 0, []
    encoder = StateFileEncoder(key_group_count=128)
    for chunk in encoder.chunks([COUNT], sections()):
        written_bytes += len(chunk)
        sizes.append(len(chunk))
        assert taken_bytes - written_bytes <= state_format.BLOCK_BYTES + section_bytes
    assert written_bytes == encoder.summary.bytes
    assert len(sizes) > 4
    assert all(state_format.BLOCK_BYTES <= size <= state_format.BLOCK_BYTES + section_bytes for size in sizes[:-1])


def test_the_first_chunk_comes_before_the_last_section_is_asked_for() -> None:
    large = _keyed(COUNT, 0, *range(100_000))

    def sections() -> Iterator[Section]:
        yield large
        raise ZeroDivisionError

    chunks = StateFileEncoder(key_group_count=128).chunks([COUNT], sections())
    first = next(chunks)
    assert bytes(first) == state_format.MAGIC
    assert isinstance(next(chunks), memoryview)
    with pytest.raises(ZeroDivisionError):
        next(chunks)


def test_there_is_no_summary_before_the_end_and_no_second_file() -> None:
    encoder = StateFileEncoder(key_group_count=128)
    chunks = encoder.chunks(STATES, SECTIONS)
    with pytest.raises(AssertionError):
        _ = encoder.summary
    list(chunks)
    assert encoder.summary.bytes > 0
    with pytest.raises(AssertionError):
        list(encoder.chunks(STATES, SECTIONS))


# Damage.


def _everything(reader: StateFileReader) -> list[object]:
    return [
        reader.states,
        *(_values(_groups(reader, name, range(128))) for name in ("count", "seen")),
        _values(reader.read_items("offsets", 0, 6)),
    ]


def _check_damaged(whole: File, damaged: bytes) -> bool:
    """Whether reading found the damage; it must not give anything else than the truth. `verify` always finds it."""
    file = File(damaged, whole.summary)
    with pytest.raises(CorruptFile):
        file.reader().verify(whole.summary.checksum)
    try:
        assert _everything(file.reader()) == _everything(whole.reader())
    except CorruptFile:
        return True
    return False


def test_no_flipped_bit_is_ever_loaded() -> None:
    whole = _encode(STATES, SECTIONS)
    for position in range(len(whole.content)):
        for bit in {position % 8, (position * 5 + 3) % 8}:
            damaged = bytearray(whole.content)
            damaged[position] ^= 1 << bit
            found = _check_damaged(whole, bytes(damaged))
            # All that is read is under a checksum; the magic at the front isn't read.
            assert found or position < len(state_format.MAGIC), f"bit {bit} of byte {position}"


def test_no_truncated_file_is_ever_loaded() -> None:
    whole = _encode(STATES, SECTIONS)
    for length in range(len(whole.content)):
        assert _check_damaged(whole, whole.content[:length]), length


def test_bytes_that_went_missing_or_came_in_are_noticed() -> None:
    whole = _encode(STATES, SECTIONS)
    for position in range(0, len(whole.content) - 8, 7):
        gone = whole.content[:position] + whole.content[position + 1 :]
        for damaged in (gone, gone + b"\0", whole.content[:position] + b"\0" + whole.content[position:]):
            if damaged[: len(whole.content)] != whole.content:
                _check_damaged(whole, damaged)
        zeroed = whole.content[:position] + bytes(8) + whole.content[position + 8 :]
        if zeroed != whole.content:
            _check_damaged(whole, zeroed)


def test_two_sections_that_changed_places_are_noticed() -> None:
    whole = _encode([COUNT], [_keyed(COUNT, 0, 1), _keyed(COUNT, 1, 2)])
    start = len(state_format.MAGIC)
    length = (len(whole.content) - start - whole.summary.index_bytes - 20) // 2
    first, second = (whole.content[start + i * length : start + (i + 1) * length] for i in range(2))
    swapped = File(whole.content[:start] + second + first + whole.content[start + 2 * length :], whole.summary)
    assert len(swapped.content) == len(whole.content)
    with pytest.raises(CorruptFile):
        list(_groups(swapped.reader(), "count", range(2)))


def test_a_file_that_is_whole_but_not_the_one_listed_is_refused() -> None:
    listed, other = _encode(STATES, SECTIONS), _encode(STATES, SECTIONS[:-1])
    with pytest.raises(CorruptFile, match="the file"):
        _everything(File(other.content, listed.summary).reader())
    with pytest.raises(CorruptFile):
        other.reader().verify(listed.summary.checksum)


@pytest.mark.parametrize(("size_bytes", "index_bytes"), [(0, 0), (8, 0), (27, 0), (28, 1), (100, 2**50)])
def test_lengths_that_can_not_be_are_refused_before_anything_is_read(size_bytes: int, index_bytes: int) -> None:
    file = _encode(STATES, SECTIONS)
    reader = StateFileReader(file.read, bytes=size_bytes, index_bytes=index_bytes, index_checksum=0)
    with pytest.raises(CorruptFile):
        _ = reader.states
    assert file.reads == []


def test_what_is_read_before_the_damage_is_right() -> None:
    sections = [_keyed(COUNT, group, group) for group in range(10)]
    whole = _encode([COUNT], sections)
    damaged = bytearray(whole.content)
    damaged[len(state_format.MAGIC) + (len(damaged) - whole.summary.index_bytes) // 2] ^= 1
    batches = _groups(File(bytes(damaged), whole.summary).reader(), "count", range(10))
    found: list[object] = []
    with pytest.raises(CorruptFile):
        found.extend(value for batch in batches for value in batch.column("value").to_pylist())
    assert found == list(range(len(found)))
    assert 0 < len(found) < 10
