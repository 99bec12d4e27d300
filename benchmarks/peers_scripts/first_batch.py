"""Runs a tiny streaming query in a new session, and another one in the same session; prints a JSON object for each.

The query reads a few small files, one for each micro-batch, with a processor of drop_in.py, on Tidegate or on Spark's own
transformWithState. What a user waits for is measured: to build the query, from `start()` to the first committed batch, and
to the end. The time of a commit is that of its file in Spark's log. The settings are those of drop_in.py.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from drop_in import CASES, LOG_FILES, Case  # beside this script
from peer_session import peer_session
from pyspark.sql import DataFrame, GroupedData, SparkSession

ADAPTIVE = "spark.sql.adaptive.streaming.stateless.enabled"
POLL_S = 0.01
TIMEOUT_S = 300


def on_spark(grouped: GroupedData, case: Case, folder: str) -> DataFrame:
    return grouped.transformWithState(case.processor, case.output, "Update", case.time_mode)


def on_tidegate(grouped: GroupedData, case: Case, folder: str) -> DataFrame:
    import tidegate as tg

    return tg.transform_with_state(
        grouped,
        case.processor,
        case.output,
        "Update",
        case.time_mode,
        name="tiny",
        slots=2,
        snapshots=tg.Snapshots(to=f"{folder}/state"),
    )


ENGINES = {"spark": on_spark, "tidegate": on_tidegate}


def run_through(spark: SparkSession, engine: str, case: Case, files: str, folder: str) -> dict[str, float]:
    """Return the seconds until the query is built, and those from then on. Spark doesn't end a query while it has timers."""
    batches, cpu_s = len(os.listdir(files)), _cpu_s()
    began = time.time()
    grouped = spark.readStream.schema(case.reads).option("maxFilesPerTrigger", 1).parquet(files).groupBy("key")
    result = ENGINES[engine](grouped, case, folder)
    built = time.time()
    query = (
        result.writeStream.format("noop")
        .outputMode("update")
        .option("checkpointLocation", f"{folder}/query")
        .trigger(availableNow=True)
        .start()
    )
    commits = [Path(folder, "query", "commits", str(number)) for number in range(batches)]
    while query.isActive and not commits[-1].exists() and time.time() - built < TIMEOUT_S:
        time.sleep(POLL_S)
    if case.time_mode == "None":
        query.awaitTermination(TIMEOUT_S)
    else:
        query.stop()
    ended = time.time()
    if not commits[-1].exists():
        raise query.exception() or RuntimeError(f"the query hasn't run its {batches} batches")
    return {
        "build_s": built - began,
        "first_batch_s": commits[0].stat().st_mtime - built,
        "whole_s": ended - built,
        "cpu_s": _cpu_s() - cpu_s,
    }


def _cpu_s() -> float:
    """Return the CPU time of this process and of all below it: Java, and Spark's Python processes."""
    stats = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stats[int(entry.name)] = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
    mine = {os.getpid()}
    while more := {pid for pid, of in stats.items() if int(of[1]) in mine} - mine:
        mine |= more
    return sum(int(ticks) for pid in mine for ticks in stats[pid][11:15]) / os.sysconf("SC_CLK_TCK")


def main(engine: str, name: str, files: str, folder: str) -> None:
    spark = peer_session(engine)
    spark.conf.set(*LOG_FILES)
    spark.conf.set(ADAPTIVE, "false")
    if engine == "tidegate":
        import tidegate  # noqa: F401  (Spark's own engine is imported by now, too)
    for number in range(2):
        print(json.dumps(run_through(spark, engine, CASES[name], files, f"{folder}/{number}")), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
