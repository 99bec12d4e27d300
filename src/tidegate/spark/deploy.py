"""Slots as the tasks of one gang-scheduled Spark stage.

`DataFrame.mapInArrow(…, barrier=True)` makes Spark ship the code, start all N tasks at once or none, allocate executors and
notice their loss. The tasks exchange records among themselves and give none to Spark. A failed stage of this kind is
aborted by Spark, never retried; the master deploys the next attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import cloudpickle
import pyarrow as pa

from tidegate.runtime.hosting import SlotLaunch, run_slot

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SparkDeployer:
    def __init__(self, spark: SparkSession, launch: SlotLaunch, master: tuple[str, int]) -> None:
        self._spark = spark
        self._launch = launch
        self._payload = cloudpickle.dumps(launch)
        self._master = master

    def deploy(self, attempt: int) -> SparkDeployment:
        name = f"tidegate {self._launch.settings.name}, attempt {attempt}"
        return SparkDeployment(self._spark, name, self._launch.plan.slots, _slot_task(self._payload, attempt, self._master))


class SparkDeployment:
    """One Spark job, run by a thread that waits for it."""

    def __init__(self, spark: SparkSession, name: str, slots: int, task: SlotTask) -> None:
        from pyspark import InheritableThread

        self._spark = spark
        self._name = name
        self._slots = slots
        self._task = task
        self._ended: str | None = None
        self._thread = InheritableThread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def ended(self) -> str | None:
        return self._ended

    def cancel(self) -> None:
        self._spark.sparkContext.cancelJobGroup(self._name)

    def _run(self) -> None:
        outcome = "the Spark job finished"
        try:
            context = self._spark.sparkContext
            context.setJobGroup(self._name, self._name, interruptOnCancel=True)
            tasks = self._spark.range(0, self._slots, 1, self._slots)
            tasks.mapInArrow(self._task, "slot int", barrier=True).collect()
        except Exception as error:  # noqa: BLE001  (whatever Spark says, the master decides)
            outcome = _short(error)
        finally:
            self._ended = outcome


SlotTask = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def _slot_task(payload: bytes, attempt: int, master: tuple[str, int]) -> SlotTask:
    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import BarrierTaskContext

        for _ in batches:
            pass
        run_slot(BarrierTaskContext.get().partitionId(), payload, attempt, master)
        return iter(())

    return task


def _short(error: Exception) -> str:
    """What a Spark error says, without Java's and Python's frames."""
    lines = [line for line in str(error).splitlines() if line[:1].strip() and not line.startswith("Driver stacktrace")]
    return f"{type(error).__name__}: " + "\n".join(lines[:12])
