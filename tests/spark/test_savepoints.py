"""Savepoint, restore and rescaling on a real Spark: the slots of the old layout give their places to those of the new."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import tidegate as tg
from tests.jobs import build_ledger, check_clean, check_ledger, committed, completed, until
from tidegate.errors import JobError
from tidegate.store.savepoints import find_restore_point

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = 30_000


def ledger(folder: Path, spark: SparkSession, *, to: str, **rest: Any) -> tg.Handle:
    job = tg.Job(
        "job",
        spark,
        slots=2,
        restart=tg.FixedDelay(attempts=3, delay=0),
        snapshots=tg.Snapshots(to=str(folder / to), every="200 ms"),
        **rest,
    )
    build_ledger(job, tg.sinks.parquet(folder / "out"), rows=ROWS, rate=3_000, gate=folder / "gate")
    return job.start()


def test_a_savepoint_is_begun_with_and_the_job_rescaled_twice(tmp_path: Path, spark: SparkSession) -> None:
    first = ledger(tmp_path, spark, to="a")
    until(lambda: completed(first), "a snapshot", handle=first)
    assert first.stop(savepoint=str(tmp_path / "sp")) is tg.Status.STOPPED
    savepoint = find_restore_point(str(tmp_path / "sp")).manifest.savepoint
    assert savepoint is not None and savepoint.versions["spark"] == spark.version

    second = ledger(tmp_path, spark, to="b", restore_from=str(tmp_path / "sp"), claim=True)
    try:
        until(lambda: not (tmp_path / "sp").exists(), "the claim", handle=second)
        with pytest.raises(JobError, match="has 4 task slots"):
            second.rescale(slots=5)
        for slots in (4, 1):
            second.rescale(slots=slots)
            assert len(second.attempts[-1].slots) == slots
            epoch = second.attempts[-1].restored_epoch
            until(lambda epoch=epoch: completed(second)[-1] > epoch, "a snapshot", handle=second)
        (tmp_path / "gate").touch()
        assert second.wait("2 minutes") is tg.Status.FINISHED
    finally:
        if not second.status.terminal:
            second.cancel()
    assert second.failures == []
    check_ledger(committed(tmp_path / "out"), ROWS)
    check_clean(tmp_path / "b", "job", tmp_path / "out")
