"""`tg.Job`: a job whose slots are Spark tasks."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tidegate.control.launch import SlotLaunch
from tidegate.control.settings import DEFAULT_RESTART, Backend, JobSettings, Snapshots, Tuning
from tidegate.driver import job
from tidegate.driver.deployment import Deployer
from tidegate.errors import JobError
from tidegate.protocol.restart import RestartStrategy
from tidegate.spark.interpreters import name_python
from tidegate.spark.tables import register

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEFAULT_LOCAL_SLOTS = 2
SUBMITTED_VARIABLE = "PYSPARK_GATEWAY_PORT"  # set by spark-submit for the program that it starts


class Job(job.Job):
    """A dataflow on Spark.

    Without a session one is made on this machine, `local[slots]`, or as spark-submit was told. With one, `slots` defaults to
    its parallelism; the job holds that many task slots of it as long as it runs.
    """

    def __init__(
        self,
        name: str,
        spark: SparkSession | None = None,
        *,
        slots: int | None = None,
        backend: Backend | None = None,
        snapshots: Snapshots | None = None,
        restart: RestartStrategy = DEFAULT_RESTART,
        tuning: Tuning | None = None,
        restore_from: str | None = None,
        claim: bool = False,
        drop_state: Sequence[str] = (),
    ) -> None:
        if spark is not None and not hasattr(spark, "sparkContext"):
            raise JobError(
                f"tg.Job({name!r}, {spark!r}): the second argument is a SparkSession, or nothing for one on this machine"
            )
        if slots is None:
            slots = DEFAULT_LOCAL_SLOTS if spark is None else spark.sparkContext.defaultParallelism
        super().__init__(
            name,
            slots=slots,
            backend=backend,
            snapshots=snapshots,
            restart=restart,
            tuning=tuning,
            restore_from=restore_from,
            claim=claim,
            drop_state=drop_state,
        )
        self._spark = spark
        if spark is not None:
            register(spark)

    def _placed_settings(self) -> JobSettings:
        from tidegate.spark.deploy import placed

        return replace(self._settings, tuning=placed(self._settings.tuning, self._session()))

    def _deployer(self, launch: SlotLaunch, coordinator: tuple[str, int]) -> Deployer:
        from tidegate.spark.deploy import SparkDeployer

        return SparkDeployer(self._session(), launch, coordinator)

    def _session(self) -> SparkSession:
        return self._spark or local_session(self.slots)

    def _versions(self) -> dict[str, str]:
        import pyspark

        return {**super()._versions(), "spark": pyspark.__version__}


def local_session(slots: int) -> SparkSession:
    """A Spark session on this machine with that many task slots, or the one that runs already. Under spark-submit it is the
    one that spark-submit was told to make."""
    from pyspark.sql import SparkSession

    if SUBMITTED_VARIABLE in os.environ:
        name_python()
        submitted: SparkSession = SparkSession.builder.getOrCreate()
        register(submitted)
        return submitted
    if (active := SparkSession.getActiveSession()) is not None:
        register(active)
        return active
    # Spark starts its Python processes from the PATH; they need the packages and modules that this process has.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master(f"local[{slots}]").appName("tidegate")
    for key, value in {
        "spark.ui.enabled": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.showConsoleProgress": "false",  # a stage that lives as long as the job has none
        "spark.executorEnv.PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }.items():
        builder = builder.config(key, value)
    session: SparkSession = builder.getOrCreate()
    register(session)
    return session
