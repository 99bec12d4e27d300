"""Windows on RocksDB, with so little memory that rows are forgotten and read again all the time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.unit.operators.harness import GROUPS, on_heap
from tests.unit.operators.windowing import Windows, check_random_run, spec_of
from tidegate.dataflow.aggregates.declaring import approx_count_distinct, count
from tidegate.dataflow.windows import Assigner, cumulating, sessions, sliding, tumbling
from tidegate.state.rocks_db import MIN_MEMORY_BYTES, SlotMemory
from tidegate.state.rocks_folder import Folder
from tidegate.state.rocksdb import RocksBackend

IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


def on_rocksdb(key_type: pa.DataType) -> RocksBackend:
    memory = SlotMemory(MIN_MEMORY_BYTES)
    memory.cache_bytes = 1
    return RocksBackend(key_type=key_type, key_group_count=GROUPS, folder=Folder(IN_MEMORY), memory=memory)


@pytest.mark.parametrize("make_backend", [on_heap, on_rocksdb])
def test_a_sketch_survives_snapshots_and_other_parallelisms(make_backend: Any) -> None:
    spec = spec_of(sliding("ts", 20, 10), aggregates={"count": count(), "total": approx_count_distinct("n")})
    windows = Windows(spec, make_backend=make_backend)
    for parallelism in (2, 1):
        windows.feed([(key, ts, key + ts) for key in range(3) for ts in (5, 6, 15, 16, 16)])
        windows = windows.restored(parallelism=parallelism)
    windows.watermark(0, 100)
    bounds = {(-10, 10): (4, 2), (0, 20): (10, 4), (10, 30): (6, 2)}
    assert sorted(windows.taken()[0]) == sorted(
        (key, *window, *numbers) for key in range(3) for window, numbers in bounds.items()
    )


@pytest.mark.parametrize("lateness_ms", [0, 17])
@pytest.mark.parametrize(
    "assigner",
    [tumbling("ts", 10), sliding("ts", 20, 5), cumulating("ts", 30, 10), sessions("ts", 10)],
    ids=lambda each: each.text,
)
def test_results_are_the_same(assigner: Assigner, lateness_ms: int) -> None:
    for seed in range(4):
        check_random_run(assigner, seed, lateness_ms=lateness_ms, stops_in_the_middle=seed % 2 == 0, make_backend=on_rocksdb)
