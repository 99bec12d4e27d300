"""`micro-batch-overhead`: the time of an empty micro-batch through Tidegate over one through plain `mapInArrow`.

Both queries read the same source, whose batches hold no row, at two partitions, and write to nothing. Tidegate's has a
keyed count over two slots, with 100,000 keys in its state, and takes a snapshot with every batch. What Spark itself needs
for a batch (planning, its logs of offsets and commits) is in both. The two run in turn, and the figure is the median over
the batches of all rounds, without each round's first ones.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from typing import Any

import tidegate as tg
from benchmarks.workloads import session, wait_until

BATCHES = 40
FIRST_BATCHES = 10
ROUNDS = 2
KEYS = 100_000
COUNTS = "key long, n long"


class Count(tg.KeyedProcess):
    n = tg.value("long", default=0)

    def process(self, row: Any, ctx: Any) -> Iterator[tuple[int, int]]:
        self.n.set(self.n.get() + 1)
        yield row.key, self.n.get()


def counted(rows: Any) -> Any:
    return rows.key_by("key").process("count", Count(), returns=COUNTS)


def run(scale: float) -> Iterator[dict[str, Any]]:
    batches = max(FIRST_BATCHES + 5, int(BATCHES * scale))
    with tempfile.TemporaryDirectory(prefix="tidegate-micro-batch-") as folder:
        history = session().range(0, KEYS, 1, 2).selectExpr("id as key")
        tg.transform(history, counted, slots=2, savepoint_to=f"{folder}/savepoint").count()
        times: dict[str, list[float]] = {"plain": [], "tidegate": []}
        for number in range(ROUNDS):
            for name in times:
                times[name] += _batch_times_ms(name, f"{folder}/{name}-{number}", f"{folder}/savepoint", batches)
    medians = {name: statistics.median(of) for name, of in times.items()}
    yield {
        "name": "micro-batch-overhead",
        "against": "plain mapInArrow",
        "ratio": round(medians["tidegate"] / medians["plain"], 3),
        "what": "time of an empty micro-batch",
        "batches": len(times["plain"]),
        "keys": KEYS,
        "median_ms": {name: round(of, 1) for name, of in medians.items()},
    }


def _batch_times_ms(name: str, folder: str, savepoint: str, batches: int) -> list[float]:
    source = (
        session()
        .readStream.format("rate-micro-batch")
        .option("rowsPerBatch", 2)
        .option("numPartitions", 2)
        .load()
        .where("value < 0")
        .selectExpr("value as key")
    )
    if name == "plain":
        result = source.mapInArrow(lambda rows: rows, "key long")
    else:
        result = tg.transform(
            source, counted, name="counts", slots=2, restore_from=savepoint, snapshots=tg.Snapshots(to=f"{folder}/snapshots")
        )
    query = (
        result.writeStream.format("noop")
        .option("checkpointLocation", f"{folder}/query")
        .trigger(processingTime="0 seconds")
        .start()
    )
    try:
        wait_until(
            lambda: query.exception() is not None or (query.lastProgress or {"batchId": -1})["batchId"] >= batches,
            timeout_s=300,
        )
        if query.exception() is not None:
            raise RuntimeError(str(query.exception()))
        progress = [each for each in query.recentProgress if FIRST_BATCHES <= each["batchId"] <= batches]
    finally:
        query.stop()
    return [float(each["durationMs"]["triggerExecution"]) for each in progress]
