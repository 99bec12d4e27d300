"""Random changes, what a table is after them, and a backend that forgets rows all the time; for tests of operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa

from tests.unit.operators.harness import GROUPS
from tidegate.dataflow.row_kinds import DELETED, INSERTED
from tidegate.state.rocks_db import MIN_MEMORY_BYTES, SlotMemory
from tidegate.state.rocks_folder import Folder
from tidegate.state.rocksdb import RocksBackend

IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None

Row = tuple[Any, ...]


def on_rocksdb(key_type: pa.DataType) -> RocksBackend:
    """Return a backend that keeps nothing in memory for longer than it must."""
    memory = SlotMemory(MIN_MEMORY_BYTES)
    memory.cache_bytes = 1
    return RocksBackend(key_type=key_type, key_group_count=GROUPS, folder=Folder(IN_MEMORY), memory=memory)


def applied(changes: Iterable[Row], table: Counter[Row] | None = None) -> Counter[Row]:
    """Return the rows of a table after these changes. Each deletion must be of a row that is there."""
    table = Counter() if table is None else table
    for kind, *rest in changes:
        row = tuple(tuple(each) if isinstance(each, list) else each for each in rest)
        if kind == INSERTED:
            table[row] += 1
        else:
            assert kind == DELETED and table[row] > 0, f"{row} is deleted, and not there: {table}"
            table[row] -= 1
            if not table[row]:
                del table[row]
    return table


def random_changes(rng: Random, table: list[Row], rows: Sequence[Row], count: int, *, delete: float = 0.4) -> list[Row]:
    """Return changes of a table, which is changed with them: insertions of some of these rows, and deletions of its own."""
    made: list[Row] = []
    for _ in range(count):
        if table and rng.random() < delete:
            made.append((DELETED, *table.pop(rng.randrange(len(table)))))
        else:
            row = rng.choice(rows)
            table.append(row)
            made.append((INSERTED, *row))
    return made
