"""`drop-in`: the same `StatefulProcessor` on the same streaming query, Tidegate over Spark's own transformWithState.

A running sum and count in a value state over 100,000 keys, rows, on two cores. Both read the same Parquet files, two for
each micro-batch, write to nothing and keep their state durably at the end of every batch. The class and the stream are those
of peers_scripts/drop_in.py; the one line that differs is `tg.transform_with_state`. Counted are the batches behind the first
ones, when all keys are known and everything has been started; Spark is given fewer of them, which it needs minutes for.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import tidegate as tg
from benchmarks import peers
from benchmarks.peers_scripts.drop_in import FILES_PER_BATCH, OUTPUT, RunningSum, measure, records
from benchmarks.workloads import KEYS, Records, session

ROWS_PER_BATCH = 200_000
BATCHES = 12
WARM_UP_BATCHES = 4
PEER_BATCHES = 2
PEER_WARM_UP_BATCHES = 2


def run(scale: float) -> Iterator[dict[str, Any]]:
    batches, peer_batches = max(2, int(BATCHES * scale)), max(1, int(PEER_BATCHES * scale))
    with tempfile.TemporaryDirectory(prefix="tidegate-drop-in-") as folder:
        write_files(Path(folder) / "in", WARM_UP_BATCHES + batches)
        ours = _tidegate(folder)
        # The same files, as far as Spark is to get.
        write_files(Path(folder) / "peer", PEER_WARM_UP_BATCHES + peer_batches)
        peer = peers.drop_in(folder=f"{folder}/peer", warm_up_batches=PEER_WARM_UP_BATCHES)
    yield {"name": "drop-in", "against": "pyspark transformWithState (rows)",
           "ratio": round(ours["records_per_s"] / peer["records_per_s"], 1),
           "what": f"one StatefulProcessor, a running sum over {KEYS:,} keys, on one streaming query, "
                   f"{ROWS_PER_BATCH:,} rows in a micro-batch, 2 cores; steady state, {batches} batches, of Spark's "
                   f"{peer_batches}",
           "records_per_s": round(ours["records_per_s"]), "peer_records_per_s": round(peer["records_per_s"]),
           "tidegate": ours, "peer": peer}


def _tidegate(folder: str) -> dict[str, Any]:
    spark = session()
    result = tg.transform_with_state(records(spark, f"{folder}/in").groupBy("key"), RunningSum(), OUTPUT, "Update", "None",
                                     slots=2, snapshots=tg.Snapshots(to=f"{folder}/state"))
    measured = measure(result, f"{folder}/query", warm_up_batches=WARM_UP_BATCHES)
    counted = tg.read_state(spark, f"{folder}/state/transform_with_state", "sum").selectExpr("sum(value.n)").first()[0]
    total = sum(pq.read_metadata(path).num_rows for path in Path(f"{folder}/in").iterdir())
    assert counted == total, f"{total:,} rows were read and {counted:,} are in the state"
    spark.stop()
    return measured


def write_files(folder: Path, batches: int) -> None:
    """Spark takes the files in the order of their times."""
    folder.mkdir()
    make, rows = Records(), ROWS_PER_BATCH // FILES_PER_BATCH
    for number in range(FILES_PER_BATCH * batches):
        hidden, path = folder / f"_{number}.parquet", folder / f"{number:05}.parquet"
        pq.write_table(pa.table(make(number % FILES_PER_BATCH, number // FILES_PER_BATCH * rows, rows)), hidden)
        os.utime(hidden, (1e9 + number, 1e9 + number))
        hidden.rename(path)
