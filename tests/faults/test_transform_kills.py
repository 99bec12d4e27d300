"""A streaming query through `tg.transform` on a cluster whose executors are killed within and after the slots' stage.

The victims are chosen by records: the process that sees one of them for the first time kills the executor it hangs on, in
the slots themselves or in the stage behind them, which reads what the slots gave. The fault-free answer is known. There are
more executors than slots: without one to spare Spark refuses the stage until the next one is up, and the query fails.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow.parquet as pq
import pytest

from tests.faults.cluster import Cluster, executor_of
from tests.spark.test_transform import Count, check_counts
from tests.spark.test_transform_streaming import ROWS, Desk, add_files
from tidegate.store.catalog import SnapshotCatalog
from tidegate.store.opening import open_store

FILES = 8
KILLS_IN_SLOTS = (150, 420)
KILLS_BEHIND = (260, 610)
STARTS = 6


def kill_executor_once(folder: str, number: int) -> None:
    """Whoever comes first."""
    try:
        os.close(os.open(f"{folder}/killed-{number}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(executor_of(os.getpid()), signal.SIGKILL)


class Lethal(Count):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def process(self, event: Any, ctx: Any) -> Iterator[tuple[int, int, int]]:
        if event.id in KILLS_IN_SLOTS:
            kill_executor_once(self.folder, event.id)
        yield from super().process(event, ctx)


def lethal_behind(folder: str) -> Any:
    def look(frames: Iterator[Any]) -> Iterator[Any]:
        for frame in frames:
            for number in KILLS_BEHIND:
                if (frame["id"] == number).any():
                    kill_executor_once(folder, number)
            yield frame

    return look


def main() -> None:
    from pyspark.errors import StreamingQueryException
    from pyspark.sql import SparkSession

    url, java_options, folder = sys.argv[1:4]
    builder = SparkSession.builder.master(url).appName("transform kills")
    for key, value in {
            "spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1",
            "spark.executor.cores": "1", "spark.cores.max": "4", "spark.executor.memory": "512m",
            "spark.driver.memory": "512m", "spark.driver.extraJavaOptions": java_options,
            "spark.executor.extraJavaOptions": java_options, "spark.ui.showConsoleProgress": "false",
            "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
            "spark.executorEnv.PYTHONPATH": os.environ["PYTHONPATH"]}.items():
        builder = builder.config(key, value)
    desk = Desk(Path(folder), builder.getOrCreate())
    for start in range(STARTS):
        counts = desk.transform(lambda s: s.key_by("key").process("count", Lethal(folder),
                                                                  returns="id long, key long, n long"))
        try:
            desk.run(counts.mapInPandas(lethal_behind(folder), counts.schema))
        except StreamingQueryException as error:
            print(f"start {start}: {str(error)[:2000]}", flush=True)
        else:
            print(f"done at start {start}", flush=True)
            return
    raise SystemExit(1)


@pytest.mark.long
def test_killed_executors_change_nothing_in_the_output(cluster: Cluster, tmp_path: Path) -> None:
    add_files(tmp_path / "in", FILES)
    driver = subprocess.run(
        [sys.executable, "-c", "from tests.faults.test_transform_kills import main; main()", cluster.url,
         cluster.java_options, str(tmp_path)], env=os.environ | {"SPARK_LOCAL_IP": "127.0.0.1",
                                                                 "PYSPARK_PYTHON": sys.executable,
                                                                 "SPARK_LOCAL_DIRS": str(cluster.folder / "local")},
        capture_output=True, text=True, timeout=280, check=False)
    told = f"{driver.stdout}\n{driver.stderr[-9000:]}"
    print(told)
    assert driver.returncode == 0, told
    killed = {int(path.name.partition("-")[2]) for path in tmp_path.glob("killed-*")}
    assert killed == {*KILLS_IN_SLOTS, *KILLS_BEHIND}
    rows = [SimpleNamespace(**row) for path in committed_files(tmp_path / "out") for row in pq.read_table(path).to_pylist()]
    check_counts(rows, range(FILES * ROWS))
    catalog = SnapshotCatalog(open_store(str(tmp_path / "snapshots" / "counts")))
    assert [each.micro_batch.number for each in catalog.manifests() if each.micro_batch] == [FILES - 2, FILES - 1]


def committed_files(out: Path) -> list[Path]:
    """Those that the log of Spark's file sink lists."""
    found = set()
    for log in (out / "_spark_metadata").glob("[0-9]*"):
        for line in log.read_text().splitlines()[1:]:
            entry = json.loads(line)
            found.add(Path(unquote(urlsplit(entry["path"]).path)))
    return sorted(found)
