"""Slots that can't find the driver say where they looked, and what to set."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import tidegate as tg
from tests.jobs import build_ledger

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ASTRAY = tg.Tuning(coordinator_host="127.0.0.9")  # where nobody listens
TOLD = r"can't reach the coordinator at \('127\.0\.0\.9', \d+\)(.|\n)*tg\.Tuning\(coordinator_host=…\)"


def test_the_slots_of_a_job_say_so(spark: SparkSession, tmp_path: Path) -> None:
    job = tg.Job("astray", spark, slots=2, restart=tg.NoRestart(), tuning=ASTRAY, snapshots=tg.Snapshots(to=str(tmp_path)))
    with pytest.raises(tg.JobFailed, match=TOLD):
        build_ledger(job, tg.sinks.collect(), rows=10).run()


@pytest.mark.long
def test_the_tasks_of_a_transform_say_so(spark: SparkSession) -> None:
    from py4j.protocol import Py4JJavaError

    with pytest.raises(Py4JJavaError, match=TOLD):
        tg.transform(spark.range(10), lambda numbers: numbers, slots=2, tuning=ASTRAY).count()
