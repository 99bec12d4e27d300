"""`drop-in`: the same `StatefulProcessor` on the same streaming query, Tidegate over Spark's own transformWithState.

100,000 sensors, each of which reports once in a micro-batch, and two processors, by rows, on two cores: a running sum, which
is the least that a processor can do, and the downtime detector of Spark's programming guide, with a timer for each sensor.
Both engines read the same Parquet files, two for each micro-batch, write to nothing and keep their state durably at the end
of every batch. The classes and the stream are those of peers_scripts/drop_in.py; the one line that differs is
`tg.transform_with_state`. Counted are the batches behind the first ones, when all keys are known and Java has compiled what
it will: that is about a minute on either engine. Adaptive execution is off on both, which Spark sees to itself where the
state is its own, and docs/dataframes.md advises where it is Tidegate's.

Spark's own engine pays by key and state call, Tidegate by record: where a batch has several records of each key, the factor
is smaller.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import tidegate as tg
from benchmarks import peers
from benchmarks.peers_scripts.drop_in import CASES, FILES_PER_BATCH, LOG_FILES, grouped, measure
from benchmarks.workloads import KEYS, session

BATCHES = 24
WARM_UP_BATCHES = 72
PEER_BATCHES = 1
PEER_WARM_UP_BATCHES = 2
ADAPTIVE = "spark.sql.adaptive.streaming.stateless.enabled"
WHAT = {"sum": "a running sum", "downtime": "the downtime detector of Spark's guide, with timers,"}


def run(scale: float) -> Iterator[dict[str, Any]]:
    batches, warm_up = max(2, int(BATCHES * scale)), max(2, int(WARM_UP_BATCHES * scale))
    peer_batches = max(1, int(PEER_BATCHES * scale))
    with tempfile.TemporaryDirectory(prefix="tidegate-drop-in-") as folder:
        write_files(Path(folder) / "in", warm_up + batches)
        # The same files, as far as Spark is to get.
        write_files(Path(folder) / "peer", PEER_WARM_UP_BATCHES + peer_batches)
        for case in CASES:
            ours = _tidegate(case, folder, warm_up, batches)
            peer = peers.drop_in(case, folder=f"{folder}/peer", warm_up_batches=PEER_WARM_UP_BATCHES, batches=peer_batches)
            yield {
                "name": "drop-in",
                "against": "pyspark transformWithState (rows)",
                "processor": case,
                "ratio": round(ours["records_per_s"] / peer["records_per_s"], 1),
                "what": f"one StatefulProcessor, {WHAT[case]} over {KEYS:,} keys, on one streaming query, "
                f"each once in a micro-batch, 2 cores; steady state, {batches} batches, of Spark's "
                f"{peer_batches}",
                "settings": {ADAPTIVE: "false", LOG_FILES[0]: LOG_FILES[1]},
                "records_per_s": round(ours["records_per_s"]),
                "peer_records_per_s": round(peer["records_per_s"]),
                "tidegate": ours,
                "peer": peer,
            }


def _tidegate(name: str, folder: str, warm_up_batches: int, batches: int) -> dict[str, Any]:
    spark, case = session(), CASES[name]
    spark.conf.set(ADAPTIVE, "false")
    result = tg.transform_with_state(
        grouped(spark, f"{folder}/in", case),
        case.processor,
        case.output,
        "Update",
        case.time_mode,
        name=name,
        slots=2,
        snapshots=tg.Snapshots(to=f"{folder}/state"),
    )
    measured = measure(result, f"{folder}/query-{name}", warm_up_batches=warm_up_batches, batches=batches)
    _check(name, tg.read_state(spark, f"{folder}/state/{name}", case.state), f"{folder}/in")
    spark.stop()
    return measured


def _check(name: str, state: Any, folder: str) -> None:
    """The state is that of all records."""
    rows = pq.read_table(folder)
    if name == "sum":
        assert state.selectExpr("sum(value.n)").first()[0] == rows.num_rows
    else:
        latest = rows.group_by("key").aggregate([("at_ms", "max")])
        expected = latest.num_rows, sum(latest.column("at_ms_max").to_pylist())
        assert tuple(state.selectExpr("count(*)", "sum(value.at_ms)").first()) == expected


def write_files(folder: Path, batches: int) -> None:
    """Spark takes the files in the order of their times."""
    folder.mkdir()
    dice = np.random.default_rng(1)
    for number in range(FILES_PER_BATCH * batches):
        batch, part = divmod(number, FILES_PER_BATCH)
        if part == 0:
            shuffled = np.array_split(dice.permutation(KEYS), FILES_PER_BATCH)
        keys = shuffled[part]
        hidden = folder / f"_{number}.parquet"
        pq.write_table(pa.table({"key": keys, "amount": keys % 64, "at_ms": np.full(len(keys), 1000 * (batch + 1))}), hidden)
        os.utime(hidden, (1e9 + number, 1e9 + number))
        hidden.rename(folder / f"{number:05}.parquet")
