"""A streaming query through `tg.transform` on a cluster whose executors are killed within and after the slots' stage.

The victims are chosen by records: the process that sees one of them for the first time kills the executor it hangs on, in
the slots themselves or in the stage behind them, which reads what the slots gave. The fault-free answer is known. There are
more executors than slots: without one to spare Spark refuses the stage until the next one is up, and the query fails.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.faults.cluster import Cluster
from tests.faults.queries import committed_files, run_driver, session_on, strike_once, struck
from tests.spark.test_transform import Count, check_counts
from tests.spark.test_transform_streaming import ROWS, Desk, add_files
from tidegate.snapshots.catalog import SnapshotCatalog
from tidegate.store.opening import open_store

FILES = 8
KILLS_IN_SLOTS = (150, 420)
KILLS_BEHIND = (260, 610)
STARTS = 6


class Lethal(Count):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def process(self, event: Any, ctx: Any) -> Iterator[tuple[int, int, int]]:
        if event.id in KILLS_IN_SLOTS:
            strike_once(self.folder, f"{event.id}", "executor")
        yield from super().process(event, ctx)


def lethal_behind(folder: str) -> Any:
    def look(frames: Iterator[Any]) -> Iterator[Any]:
        for frame in frames:
            for number in KILLS_BEHIND:
                if (frame["id"] == number).any():
                    strike_once(folder, f"{number}", "executor")
            yield frame

    return look


def main() -> None:
    from pyspark.errors import StreamingQueryException

    url, java_options, folder = sys.argv[1:4]
    desk = Desk(Path(folder), session_on(url, java_options, "transform kills"))
    for start in range(STARTS):
        counts = desk.transform(
            lambda s: s.key_by("key").process("count", Lethal(folder), returns="id long, key long, n long")
        )
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
    driver = run_driver(cluster, "tests.faults.test_transform_kills", tmp_path)
    told = f"{driver.stdout}\n{driver.stderr[-9000:]}"
    print(told)
    assert driver.returncode == 0, told
    assert struck(tmp_path) == {str(number) for number in (*KILLS_IN_SLOTS, *KILLS_BEHIND)}
    rows = [SimpleNamespace(**row) for path in committed_files(tmp_path / "out") for row in pq.read_table(path).to_pylist()]
    check_counts(rows, range(FILES * ROWS))
    catalog = SnapshotCatalog(open_store(str(tmp_path / "snapshots" / "counts")))
    assert [each.micro_batch.number for each in catalog.manifests() if each.micro_batch] == [FILES - 2, FILES - 1]
