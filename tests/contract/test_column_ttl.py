"""What every backend with columnar state promises about a ttl: rows that ended are removed in small steps, on disk too.

On RocksDB there is so little memory that every step forgets what it may, so nearly all rows are on disk alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.contract.test_columnar_state import BACKENDS, GROUPS, IN_MEMORY, NO_MEMORY, entries_of
from tidegate.state.column_table import ColumnTable
from tidegate.state.column_ttl import NEVER, TOUCHED_FIELD, ColumnTtl
from tidegate.state.descriptors import Columns
from tidegate.state.merging import LayerInMemory, resolved_rows
from tidegate.state.rocks_columns import RocksColumnTable
from tidegate.state.rocksdb import RocksDB
from tidegate.state.vectors import VectorField

TTL_MS = 1000
PAIR = pa.struct([("a", pa.int64()), ("b", pa.string())])
WINDOW = 1


class Ending:
    """A state with a ttl. If it has windows, the rows of one window end, and those of its neighbours stay."""

    def __init__(
        self, name: str, *, key_type: pa.DataType = PAIR, windowed: bool = False, now_ms: int = 10_000, backend: Any = None
    ) -> None:
        self.name, self.key_type, self.windowed, self.now_ms = name, key_type, windowed, now_ms
        self.backend = BACKENDS[name](key_type) if backend is None else backend
        if name == "rocksdb":
            self.backend._memory = NO_MEMORY
        fields = [VectorField("text", pa.string()), VectorField("n", pa.int32()), TOUCHED_FIELD]
        self.state = self.backend.column_state(Columns("state", fields, windowed=windowed))
        self.layers: list[LayerInMemory] = []
        self.table: ColumnTable = self.state.window(WINDOW) if windowed else self.state.table()
        self.ttl = ColumnTtl(self.table, TTL_MS, lambda: self.now_ms)

    def columns(self, numbers: Sequence[int]) -> list[pa.Array]:
        keys = [None if number == 0 else number for number in numbers]
        if self.key_type == PAIR:
            return [pa.array(keys, pa.int64()), pa.array([f"key {key}" for key in keys])]
        return [pa.array(keys, self.key_type)]

    def write(self, numbers: Sequence[int], *, window: int = WINDOW, touched: bool = True) -> None:
        table = self.state.window(window) if self.windowed else self.table
        rows = table.rows_of(self.columns(numbers))
        table.change(rows)
        table.vectors["n"].values[rows], table.vectors["n"].valid[rows] = numbers, True  # type: ignore[index]
        if touched and window == WINDOW:
            self.ttl.touch(rows)

    def maintain(self, budget: int = 64) -> None:
        self.ttl.sweep(budget)
        self.backend.maintain(budget)

    def freeze(self) -> list[LayerInMemory]:
        """Return the layers of a version."""
        frozen = self.backend.freeze()
        layer = LayerInMemory(list(frozen.sections()), key_group_count=GROUPS)
        self.layers = [layer] if frozen.complete else [*self.layers, layer]
        frozen.release()
        return self.layers

    def held(self, *, window: int = WINDOW) -> set[int]:
        """Return the keys that a snapshot has now."""
        return numbers_of(self.freeze(), window)


def numbers_of(layers: list[LayerInMemory], window: int = WINDOW) -> set[int]:
    entries = entries_of(resolved_rows("state", layers, range(GROUPS)))
    return {value["n"] for (_, at), value in entries.items() if at in (None, window)}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("key_type", [pa.int64(), PAIR], ids=["long", "two columns"])
def test_rows_that_ended_are_removed_in_small_steps_and_those_that_were_renewed_stay(
    name: str, windowed: bool, key_type: pa.DataType
) -> None:
    state = Ending(name, key_type=key_type, windowed=windowed)
    state.write(range(300))
    if windowed:
        for window in (WINDOW - 1, WINDOW + 1):
            state.write(range(50), window=window)
    before = state.freeze()
    state.maintain()
    assert state.table.row_count == (0 if name == "rocksdb" else 300), "the rows were forgotten"
    state.now_ms += TTL_MS - 1
    state.write(range(0, 300, 3))  # renewed: some are in memory with a later time than on disk
    state.now_ms += 1
    counts = [300]
    while counts[-1] > 100:
        state.maintain(64)
        counts.append(len(state.held()))
        assert counts[-1] >= counts[-2] - 2 * 64, "a step examines as many rows in memory and on disk as it may"
        assert len(counts) < 40
    assert state.held() == set(range(0, 300, 3))
    assert numbers_of(before) == set(range(300)), "what was frozen before stays as it was"
    if windowed:
        assert state.held(window=WINDOW - 1) == state.held(window=WINDOW + 1) == set(range(50))
    state.now_ms += TTL_MS
    for _ in range(40):
        state.maintain(64)
    assert state.held() == set()
    state.backend.close()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_no_row_is_removed_before_its_end_and_all_are_after_it(name: str, windowed: bool, seed: int) -> None:
    """Random programs beside a dictionary of the times when keys were written last. Versions are read later."""
    rng = Random(seed)
    state = Ending(name, windowed=windowed)
    touched: dict[int, int] = {}
    frozen: list[tuple[Any, set[int], set[int]]] = []  # with the keys that must be there, and those that may be
    for number in range(150):
        match rng.randrange(6):
            case 0 | 1:
                some = rng.sample(range(200), rng.randrange(1, 30))
                state.write(some)
                touched |= dict.fromkeys(some, state.now_ms)
            case 2:
                state.now_ms += rng.randrange(400)
            case 3:
                frozen.append((state.backend.freeze(), living(touched, state.now_ms), set(touched)))
                if name == "heap" or len(frozen) == 4:
                    check(frozen.pop(0), complete=name == "rocksdb")
            case _:
                state.maintain(rng.choice((1, 8, 64)))
        if number % 10 == 9:
            asked = sorted(living(touched, state.now_ms))
            assert (state.table.find(state.columns(asked)) >= 0).all(), "it was written less than a ttl ago"
    while frozen:
        check(frozen.pop(0), complete=name == "rocksdb")
    state.now_ms += TTL_MS // 2
    for _ in range(200):
        state.maintain(16)
    state.backend.maintain(16)
    assert set(in_table(state)) == living(touched, state.now_ms)
    state.backend.close()


def living(touched: dict[int, int], now_ms: int) -> set[int]:
    return {key for key, at in touched.items() if at > now_ms - TTL_MS}


def check(frozen: tuple[Any, set[int], set[int]], *, complete: bool) -> None:
    version, there, known = frozen
    found = numbers_of([LayerInMemory(list(version.sections()), key_group_count=GROUPS)])
    version.release()
    assert found <= known
    assert not complete or there <= found


def in_table(state: Ending) -> list[int]:
    rows = state.table.rows()
    numbers: list[int] = state.table.vectors["n"].values[rows].tolist()
    return numbers


@pytest.mark.parametrize("name", BACKENDS)
def test_ended_rows_do_not_pile_up_however_fast_new_keys_come(name: str) -> None:
    """A ttl of 10 steps: 1,000 keys live. Steps with a budget of 10 rows would remove a fiftieth of what is added."""
    state = Ending(name, key_type=pa.int64())
    most = 0
    for step in range(80):
        state.write(range(step * 100, step * 100 + 100))
        state.now_ms += TTL_MS // 10
        state.maintain(10)
        if step % 5 == 4:
            most = max(most, len(state.held()))
    assert 1000 <= most <= 3000
    state.backend.close()


def test_rows_of_rocksdb_end_after_it_has_started_from_its_own_files(tmp_path: Path) -> None:
    first = Ending("rocksdb")
    first.write(range(200))
    frozen = first.backend.freeze()
    for file in frozen.files():
        shutil.copyfile(file.path, tmp_path / file.local)
    frozen.release()
    first.backend.close()
    backend = RocksDB("16 MB", IN_MEMORY).create(key_type=PAIR, key_group_count=GROUPS, native=tmp_path)
    again = Ending("rocksdb", backend=backend, now_ms=first.now_ms + TTL_MS - 1)
    again.write(range(5))
    again.now_ms += TTL_MS // 2
    for _ in range(20):
        again.maintain(16)
    assert again.held() == set(range(5))
    again.backend.close()


@pytest.mark.parametrize("name", BACKENDS)
def test_rows_from_before_there_was_a_ttl_live_for_one_ttl(name: str) -> None:
    state = Ending(name)
    state.write(range(100), touched=False)
    state.freeze()
    state.backend.maintain(100)
    state.now_ms += TTL_MS * 3
    for _ in range(10):
        state.maintain(64)
    assert len(state.held()) == 100, "their time has begun"
    state.now_ms += TTL_MS
    for _ in range(10):
        state.maintain(64)
    assert state.held() == set()
    state.backend.close()


def test_a_sweep_over_rocksdb_reads_few_rows_and_fetches_only_those_that_may_have_ended() -> None:
    state = Ending("rocksdb")
    state.write(range(200))
    state.backend.maintain(100)
    state.now_ms += 1
    state.write(range(200, 400))
    state.backend.maintain(100)
    assert isinstance(state.table, RocksColumnTable) and state.table.row_count == 0
    state.now_ms += TTL_MS - 1
    place, fetched, steps = b"", 0, 0
    while True:
        rows, place = state.table.fetch_from(place, 50, field=TOUCHED_FIELD.name, up_to=state.now_ms - TTL_MS)
        assert len(rows) <= 50
        fetched, steps = fetched + len(rows), steps + 1
        if not place:
            break
    assert (fetched, steps) == (200, 9)
    assert state.table.row_count == 200
    assert np.all(state.table.vectors[TOUCHED_FIELD.name].values[: state.table.top] != NEVER)
    state.backend.close()
