"""Columns whose bytes exceed what Arrow's offsets of 32 bits can hold: batches are joined and cut by bytes.

The bounds are lowered here. The test with real 2.2 GiB is marked `long`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tests.declaring import value
from tidegate.channels.memory import MemoryChannel
from tidegate.dataflow.operators.user_code import fit
from tidegate.hashing import hash_columns
from tidegate.keygroups import groups_of
from tidegate.protocol.ids import ChannelId
from tidegate.slot.inner import InnerSubtask
from tidegate.snapshots.writing import PieceWriter
from tidegate.state.cutting import cut_by_group
from tidegate.state.merging import LayerInMemory, merged_sections
from tidegate.state.sections import Section, StateInfo, StateKind
from tidegate.store.memory import MemoryStore
from tidegate.types import limits, parse_schema
from tidegate.types.limits import ColumnTooLarge, joined

GROUPS = 8
SCHEMA = pa.schema([pa.field("key", pa.int64()), pa.field("value", pa.string())])
INFO = StateInfo("texts", StateKind.KEYED, "value", SCHEMA)


@pytest.fixture
def low(monkeypatch: pytest.MonkeyPatch) -> None:
    """A column holds 4,000 bytes, and batches are joined up to 2,000."""
    monkeypatch.setattr(limits, "MAX_COLUMN_BYTES", 4_000)
    monkeypatch.setattr(limits, "JOINED_BYTES", 2_000)


def texts(start: int, count: int, size: int = 100) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {"key": list(range(start, start + count)), "value": [f"{key:0{size}}" for key in range(start, start + count)]},
        schema=SCHEMA,
    )


def rows_in(sections: list[Section]) -> dict[Any, Any]:
    rows = [row for section in sections for row in section.rows.to_pylist()]
    assert len(rows) == len({row["key"] for row in rows})
    return {row["key"]: row["value"] for row in rows}


def check_bounded(batches: list[pa.RecordBatch]) -> None:
    assert len(batches) > 1
    assert all(batch.nbytes <= 2_500 for batch in batches)


def test_batches_are_joined_up_to_a_number_of_bytes(low: None) -> None:
    found = list(joined(texts(start, 3) for start in range(0, 60, 3)))
    check_bounded(found)
    assert pa.Table.from_batches(found).equals(pa.Table.from_batches([texts(0, 60)]).combine_chunks())
    assert [batch.num_rows for batch in joined([texts(0, 100), texts(100, 1)])] == [100, 1], "a large one stays as it is"


def test_sections_are_cut_by_bytes(low: None) -> None:
    sections = list(cut_by_group("texts", [texts(start, 5) for start in range(0, 200, 5)], GROUPS))
    check_bounded([section.rows for section in sections])
    assert rows_in(sections) == {key: f"{key:0100}" for key in range(200)}


def test_a_merge_of_layers_joins_no_more_than_fits(low: None) -> None:
    layers = [
        LayerInMemory(
            cut_by_group("texts", [texts(start, 5) for start in range(first, 100, 5)], GROUPS), key_group_count=GROUPS
        )
        for first in (0, 50)
    ]
    sections = list(merged_sections(INFO, layers, key_group_count=GROUPS, with_deleted=False))
    check_bounded([section.rows for section in sections])
    assert rows_in(sections) == {key: f"{key:0100}" for key in range(100)}


def test_keys_that_are_too_large_together_are_merged(low: None) -> None:
    schema = pa.schema([pa.field("key", pa.string()), pa.field("value", pa.int64())])
    info = StateInfo("counts", StateKind.KEYED, "value", schema)

    def layer(start: int, count: int, value: int) -> LayerInMemory:
        keys = [f"{key:0200}" for key in range(start, start + count)]
        rows = pa.RecordBatch.from_pydict({"key": keys, "value": [value] * count}, schema=schema)
        return LayerInMemory(cut_by_group("counts", [rows], GROUPS), key_group_count=GROUPS)

    sections = merged_sections(info, [layer(0, 20, 1), layer(10, 20, 2)], key_group_count=GROUPS, with_deleted=False)
    found = {int(key): value for key, value in rows_in(list(sections)).items()}
    assert found == {key: 2 if key >= 10 else 1 for key in range(30)}


@pytest.mark.parametrize("backend", [tg.Heap(), tg.RocksDB(memory="16 MB")], ids=["heap", "rocksdb"])
def test_state_of_text_is_written_and_restored(low: None, backend: Any) -> None:
    def made() -> Any:
        return backend.create(key_type=pa.int64(), key_group_count=GROUPS, now_ms=lambda: 0)

    live = made()
    state = live.table(value("string", name="texts"))
    for live.cursor.key in range(100):
        state.set(f"{live.cursor.key:0200}")
    writer = PieceWriter("op", store=MemoryStore(), attempt=1, subtask=0, parallelism=1, key_group_count=GROUPS)
    frozen = live.freeze()
    entry = writer.write(frozen, epoch=1, base=0, full=True)
    frozen.release()
    assert sum(file.bytes for file in entry.pieces[0].files) > 20_000
    batches = list(live.rows("texts"))
    assert len(batches) > 1 and all(batch.nbytes <= 5_000 for batch in batches)
    assert {row["key"]: row["value"] for rows in batches for row in rows.to_pylist()} == {
        key: f"{key:0200}" for key in range(100)
    }
    live.close()


def test_batches_that_wait_on_a_channel_are_joined_by_bytes(low: None) -> None:
    channel = MemoryChannel(ChannelId(0, 0, 0))
    for start in range(0, 60, 3):
        channel.send(texts(start, 3))
    subtask: Any = SimpleNamespace(_max_batch_rows=1_000)
    found = []
    while channel:
        first = channel.take()
        assert isinstance(first, pa.RecordBatch)
        found.append(InnerSubtask._joined(subtask, channel, first))
    check_bounded(found)
    assert [key for batch in found for key in batch.column("key").to_pylist()] == list(range(60))


def test_a_function_may_return_more_than_fits_into_a_batch(low: None) -> None:
    rows = [(key, f"{key:0100}") for key in range(100)]
    batches = list(fit("op", rows, parse_schema("key long, value string")))
    assert [tuple(row.values()) for batch in batches for row in batch.to_pylist()] == rows
    assert len(batches) > 1


def test_a_record_that_is_too_large_is_named(low: None) -> None:
    with pytest.raises(
        ColumnTooLarge, match=r"operator 'op' gave a record that is too large: column 'value': a value has more"
    ):
        list(fit("op", [(1, "x" * 5_000)], parse_schema("key long, value string")))


def test_a_value_of_state_that_is_too_large_is_named_with_its_key(low: None) -> None:
    live = tg.Heap().create(key_type=pa.int64(), key_group_count=GROUPS, now_ms=lambda: 0)
    state = live.table(value("string", name="texts"))
    live.cursor.key = 7
    state.set("x" * 5_000)
    with pytest.raises(ColumnTooLarge, match=r"state 'texts', key 7: a value has more than 4,000 bytes"):
        list(live.freeze().sections())


@pytest.mark.long
def test_state_of_more_than_two_gibibytes_of_text_is_cut_and_merged() -> None:
    """Real bytes: 2.2 GiB in one column, of which half are set again."""
    big = texts(0, 1, size=1 << 20)
    column = big.column("value")

    def layer(first: int, count: int) -> LayerInMemory:
        batches = (
            pa.RecordBatch.from_arrays([pa.array(range(start, start + 50)), pa.concat_arrays([column] * 50)], schema=SCHEMA)
            for start in range(first, first + count, 50)
        )
        return LayerInMemory(cut_by_group("texts", batches, GROUPS), key_group_count=GROUPS)

    count = 2_250
    layers = [layer(0, count), layer(count // 2, 50)]
    keys: list[int] = []
    size_bytes = 0
    for section in merged_sections(INFO, layers, key_group_count=GROUPS, with_deleted=False):
        keys += section.rows.column("key").to_pylist()
        size_bytes += section.rows.nbytes
        assert groups_of(hash_columns([section.rows.column("key")]), GROUPS)[0] in (section.groups or ())
    assert sorted(keys) == list(range(count)) and size_bytes > 2.2 * 10**9
