"""`state-read`: all of a state as a DataFrame, over Parquet with the same rows and over Spark's own `statestore` reader.

A reading is: make the DataFrame, and run all its rows through Spark (`noop`). The best of several counts, in a session that
is warm: what it costs to start Python processes is paid once.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import tidegate as tg
from benchmarks import peers
from benchmarks.workloads import session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

KEYS = 1_000_000
RUNS = 7


def run(scale: float) -> Iterator[dict[str, Any]]:
    keys = int(KEYS * scale)
    spark = session()
    folder = tempfile.mkdtemp(prefix="tidegate-bench-")
    rows = spark.range(keys).selectExpr("id AS key", "id % 64 AS value")
    tg.write_state(rows, f"{folder}/savepoint", operator="sum", state="total", parallelism=2)

    def ours() -> DataFrame:
        frame: DataFrame = spark.read.format("tidegate").option("state", "total").load(f"{folder}/savepoint")
        return frame

    assert ours().count() == keys
    ours().write.parquet(f"{folder}/parquet")
    ours_s, parquet_s = _best_s(ours, lambda: spark.read.parquet(f"{folder}/parquet"))
    common = {
        "name": "state-read",
        "what": f"{keys:,} keys (long to long) as a DataFrame, all columns, 2 slots",
        "read_s": round(ours_s, 3),
        "keys_per_s": round(keys / ours_s),
    }
    yield common | {
        "against": "spark.read.parquet of the same rows",
        "ratio": round(ours_s / parquet_s, 2),
        "peer_read_s": round(parquet_s, 3),
    }
    spark.stop()
    peer = peers.statestore(keys=keys, runs=RUNS)
    yield common | {
        "against": "spark's statestore reader",
        "ratio": round(ours_s / peer["read_s"], 3),
        "peer_read_s": peer["read_s"],
        "peer": peer,
    }


def _best_s(*frames: Callable[[], DataFrame]) -> list[float]:
    """Of each, in turns, so that what else the machine does is the same for all."""
    for frame in frames:
        _read_s(frame)
    return [min(times) for times in zip(*([_read_s(frame) for frame in frames] for _ in range(RUNS)), strict=True)]


def _read_s(frame: Callable[[], DataFrame]) -> float:
    started = time.perf_counter()
    frame().write.format("noop").mode("overwrite").save()
    return time.perf_counter() - started
