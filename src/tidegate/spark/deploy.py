"""Slots as the tasks of one gang-scheduled Spark stage.

`DataFrame.mapInArrow(…, barrier=True)` makes Spark ship the code, start all N tasks at once or none, allocate executors
and notice their loss. The tasks exchange records among themselves and give none to Spark. Spark aborts a failed stage of
this kind and never retries it; the coordinator deploys the next attempt.

Spark checks only every 15 s whether there are enough executors for such a stage, and gives up after ten minutes with an
error about its own settings. So they are counted here first: a job that can never run is an error at once, and after the
loss of an executor the stage is submitted as soon as another executor is there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tidegate.control.launch import SlotLaunch
from tidegate.control.listening import EVERY_ADDRESS
from tidegate.control.settings import Tuning
from tidegate.driver.reports import Failure
from tidegate.errors import JobError
from tidegate.slot.hosting import run_slot
from tidegate.spark.interpreters import SlotTask, check_python, guarded, no_use_in_trying, pythons_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXECUTORS_POLL_S = 0.1
# Fields of `Tuning` that Spark's configuration can give instead.
CONFIGURATION = {
    "coordinator_bind_host": "spark.tidegate.coordinatorBindHost",
    "coordinator_host": "spark.tidegate.coordinatorHost",
    "coordinator_ports": "spark.tidegate.coordinatorPorts",
    "slot_ports": "spark.tidegate.slotPorts",
}
DRIVER_HOST, DRIVER_BIND_ADDRESS = "spark.driver.host", "spark.driver.bindAddress"


class SparkDeployer:
    def __init__(self, spark: SparkSession, launch: SlotLaunch, coordinator: tuple[str, int]) -> None:
        check_task_slots(spark, launch.plan.slots)
        self._spark = spark
        self._launch = launch
        self._payload = launch.packed()
        self._coordinator = coordinator

    def deploy(self, attempt: int) -> SparkDeployment:
        name = f"tidegate {self._launch.settings.name}, attempt {attempt}"
        return SparkDeployment(
            self._spark, name, self._launch.plan.slots, _slot_task(self._payload, attempt, self._coordinator)
        )


class SparkDeployment:
    """A Spark job that runs the slots, and the thread that waits for the job."""

    def __init__(self, spark: SparkSession, name: str, slots: int, task: SlotTask) -> None:
        from pyspark import InheritableThread

        self._spark = spark
        self._name = name
        self._slots = slots
        self._task = task
        self._ended: str | Failure | None = None
        self._cancelled = threading.Event()
        try:
            task_slot_count(spark)
            InheritableThread(target=self._run, name=name, daemon=True).start()
        except Exception as error:  # noqa: BLE001  (as below)
            self._ended = _short(error)

    def ended(self) -> str | Failure | None:
        return self._ended

    def cancel(self) -> None:
        self._cancelled.set()
        with contextlib.suppress(Exception):  # a session that was stopped has nothing to cancel, and the thread notices
            self._spark.sparkContext.cancelJobGroup(self._name)

    def _run(self) -> None:
        outcome: str | Failure = "the Spark job finished"
        try:
            if not self._executors_are_there():
                outcome = "it was cancelled before there were executors for it"
                return
            self._spark.sparkContext.setJobGroup(self._name, f"{self._name}: task i is slot i", interruptOnCancel=True)
            tasks = self._spark.range(0, self._slots, 1, self._slots)
            tasks.mapInArrow(guarded(self._task), "slot int", barrier=True).collect()
        except Exception as error:  # noqa: BLE001  (whatever the error is, the coordinator decides)
            why = no_use_in_trying(error, pythons_of(self._spark))
            outcome = _short(error) if why is None else Failure(why, permanent=True)
        finally:
            self._ended = outcome

    def _executors_are_there(self) -> bool:
        """Wait for enough executors. Return False if the coordinator, which decides how long to wait, cancels."""
        while task_slot_count(self._spark) < self._slots:
            if self._cancelled.wait(EXECUTORS_POLL_S):
                return False
        return not self._cancelled.is_set()


def placed(tuning: Tuning, spark: SparkSession) -> Tuning:
    """Return `tuning` with the addresses of Spark's configuration for those that the program didn't set."""
    # Not the context's getConf(), which takes a hundred round trips to the JVM.
    found = {key: spark.conf.get(key, None) for key in (*CONFIGURATION.values(), DRIVER_HOST, DRIVER_BIND_ADDRESS)}
    return placed_by(
        tuning,
        {key: value for key, value in found.items() if value is not None},
        is_local=bool(spark.sparkContext._jsc.sc().isLocal()),
    )


def placed_by(tuning: Tuning, configuration: Mapping[str, str], *, is_local: bool) -> Tuning:
    """On a cluster the coordinator listens where Spark's driver does, and slots find it by the same name: whatever was done
    to let executors reach the driver is enough. On one machine it listens on loopback, whatever Spark does."""
    configured: dict[str, Any] = {
        name: configuration[key]
        for name, key in CONFIGURATION.items()
        if getattr(tuning, name) is None and key in configuration
    }
    tuning = replace(tuning, **configured)
    driver = _bare(configuration.get(DRIVER_HOST))
    if is_local or driver is None:
        return tuning
    if tuning.coordinator_host is None and tuning.coordinator_bind_host in (None, *EVERY_ADDRESS):
        tuning = replace(tuning, coordinator_host=driver)
    if tuning.coordinator_bind_host is None:
        tuning = replace(tuning, coordinator_bind_host=_bare(configuration.get(DRIVER_BIND_ADDRESS)) or driver)
    return tuning


def _bare(host: str | None) -> str | None:
    """Return the host without the brackets that Spark puts around IPv6 addresses."""
    return None if host is None else host.removeprefix("[").removesuffix("]")


def task_slot_count(spark: SparkSession) -> int:
    """Return how many tasks the present executors, free or busy, can run at the same time."""
    if spark.sparkContext._jsc is None:
        raise ConnectionError("it was stopped")
    context = spark.sparkContext._jsc.sc()
    return int(context.maxNumConcurrentTasks(context.resourceProfileManager().defaultResourceProfile()))


def check_task_slots(spark: SparkSession, slots: int) -> None:
    """Raise `JobError` if Spark, as it was started, can never run that many slots at the same time, or can't run any."""
    context = spark.sparkContext
    if spark.conf.get("spark.dynamicAllocation.enabled", "false") == "true":
        raise JobError(
            "Spark starts all slots of a job at once or none, which it can't do with dynamic allocation: "
            "set spark.dynamicAllocation.enabled=false and spark.executor.instances"
        )
    check_python(spark)
    if not context._jsc.sc().isLocal():
        return  # executors come and go: the deployment waits for them
    count = task_slot_count(spark)
    if count < slots:
        raise JobError(
            f"the job asks for slots={slots}, which run at the same time, and this Spark ({context.master}) "
            f"has {count} task slots: give the job slots={count} or fewer, or start Spark with "
            f"master('local[{slots}]')"
        )


def _slot_task(payload: bytes, attempt: int, coordinator: tuple[str, int]) -> SlotTask:
    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import BarrierTaskContext

        for _ in batches:
            pass
        run_slot(BarrierTaskContext.get().partitionId(), payload, attempt, coordinator)
        return iter(())

    return task


def _short(error: Exception) -> str:
    """Return the text of a Spark error without Java's and Python's frames."""
    if isinstance(error, ConnectionError):
        return f"the Spark session is gone ({error}): start the program again, the job resumes from its last snapshot"
    lines = [
        line.removeprefix(": ")
        for line in str(error).splitlines()
        if line[:1].strip() and not line.startswith(("Driver stacktrace", "An error occurred while calling "))
    ]
    return "\n".join(lines[:12]) or type(error).__name__
