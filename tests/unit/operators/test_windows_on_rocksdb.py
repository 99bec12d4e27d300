"""Windows on RocksDB, with so little memory that rows are forgotten and read again all the time."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from tests.unit.operators.harness import GROUPS
from tests.unit.operators.windowing import check_random_run
from tidegate.dataflow.windows import Assigner, cumulating, sessions, sliding, tumbling
from tidegate.state.rocks_db import MIN_MEMORY_BYTES, SlotMemory
from tidegate.state.rocks_folder import Folder
from tidegate.state.rocksdb import RocksBackend

IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


def on_rocksdb(key_type: pa.DataType) -> RocksBackend:
    memory = SlotMemory(MIN_MEMORY_BYTES)
    memory.cache_bytes = 1
    return RocksBackend(key_type=key_type, key_group_count=GROUPS, folder=Folder(IN_MEMORY), memory=memory)


@pytest.mark.parametrize("lateness_ms", [0, 17])
@pytest.mark.parametrize(
    "assigner",
    [tumbling("ts", 10), sliding("ts", 20, 5), cumulating("ts", 30, 10), sessions("ts", 10)],
    ids=lambda each: each.text,
)
def test_results_are_the_same(assigner: Assigner, lateness_ms: int) -> None:
    for seed in range(4):
        check_random_run(assigner, seed, lateness_ms=lateness_ms, stops_in_the_middle=seed % 2 == 0, make_backend=on_rocksdb)
