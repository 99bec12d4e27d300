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
from tidegate.spark.interpreters import PYTHON_VARIABLE, name_python
from tidegate.spark.tables import register

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEFAULT_LOCAL_SLOTS = 2
SUBMITTED_VARIABLE = "PYSPARK_GATEWAY_PORT"  # set by spark-submit for the program that it starts


class Job(job.Job):
    """A dataflow on Spark.

    Without a session, one is made: `local[slots]` on this machine, or what spark-submit was asked for. With a session,
    `slots` defaults to its parallelism. The job occupies that many of its task slots as long as it runs.
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
    """Return the session that spark-submit was asked for, the active one, or a new one on this machine with that many task
    slots."""
    from pyspark.sql import SparkSession

    session: SparkSession | None = None
    if SUBMITTED_VARIABLE in os.environ:
        name_python()
        session = SparkSession.builder.getOrCreate()
    session = session or SparkSession.getActiveSession() or _new_session(slots)
    register(session)
    return session


def _new_session(slots: int) -> SparkSession:
    from pyspark.sql import SparkSession

    # Spark starts its Python processes from the PATH; they need the packages and modules that this process has.
    os.environ.setdefault(PYTHON_VARIABLE, sys.executable)
    settings: dict[str, bool | float | int | str | None] = {
        "spark.ui.enabled": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.showConsoleProgress": "false",  # a stage that lives as long as the job makes none
        "spark.executorEnv.PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    return SparkSession.builder.master(f"local[{slots}]").appName("tidegate").config(map=settings).getOrCreate()
