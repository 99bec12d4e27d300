"""`state-memory`: the memory of columnar state on the heap, in bytes a key, over that of the bare arrays (16 bytes).

A new process makes a state with one sum of doubles, adds the keys in random order in batches, and says by how much its
resident memory has grown. Everything counts: the index, flags, what changed since the last freeze, room for growth.
The speed of the key index is measured beside it, for a look-up and a sum of each record's value in a state that knows all
keys.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KEYS = 1_000_000
BATCH_ROWS = 65_536
BARE_BYTES = 16
LOOKUPS = 40

_PROGRAM = """
import ctypes, gc, json, sys, time
import numpy as np, pyarrow as pa
from tidegate.state.column_table import VectorField
from tidegate.state.descriptors import Columns
from tidegate.state.heap import HeapBackend

key_type, count, batch_rows, lookups = sys.argv[1], *map(int, sys.argv[2:])
kind = pa.int64() if key_type == "long" else pa.string()

def resident_bytes():
    gc.collect()
    pa.default_memory_pool().release_unused()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

random = np.random.default_rng(1)
numbers = random.permutation(count)
backend = HeapBackend(key_type=kind, key_group_count=128)
state = backend.column_state(Columns("sum", [VectorField("total", pa.float64())]))
table, total = state.table(), None

def add(keys, values):
    rows = table.rows_of([keys])
    table.change(rows)
    total = table.vectors["total"]
    np.add.at(total.values, rows, values)
    total.valid[rows] = True

values = random.random(batch_rows)
warm = HeapBackend(key_type=kind, key_group_count=128).column_state(Columns("sum", [VectorField("total", pa.float64())]))
warm.table().rows_of([pa.array(numbers[:batch_rows]).cast(kind)])
del warm
before = resident_bytes()
for start in range(0, count, batch_rows):
    some = pa.array(numbers[start : start + batch_rows]).cast(kind)
    add(some, values[: len(some)])
    del some
grown = resident_bytes() - before
held = state.nbytes
batches = [pa.array(random.integers(0, count, batch_rows)).cast(kind) for _ in range(lookups)]
times = []
for batch in batches:
    started = time.perf_counter()
    add(batch, values)
    times.append(time.perf_counter() - started)
times.sort()
print(json.dumps({"grown": grown, "held": held, "rows_per_s": batch_rows / times[len(times) // 2]}))
"""


def run(scale: float) -> Iterator[dict[str, Any]]:
    keys = int(KEYS * scale)
    for key_type, what in (("long", "64-bit keys"), ("string", "keys of text, up to 6 characters")):
        found = _measured(key_type, keys)
        yield {
            "name": "state-memory",
            "what": f"{keys:,} {what} and one sum of doubles, on the heap, in a new process",
            "against": f"the bare arrays, {BARE_BYTES} bytes a key",
            "ratio": round(found["grown"] / keys / BARE_BYTES, 2),
            "bytes_per_key": round(found["grown"] / keys, 1),
            "bytes_per_key_of_arrays": round(found["held"] / keys, 1),
            "batch_rows": BATCH_ROWS,
            "rows_per_s": round(found["rows_per_s"]),
        }


def _measured(key_type: str, keys: int) -> dict[str, float]:
    command = [sys.executable, "-c", _PROGRAM, key_type, str(keys), str(BATCH_ROWS), str(LOOKUPS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent)
    found: dict[str, float] = json.loads(done.stdout)
    return found
