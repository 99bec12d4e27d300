"""Which Python the executors run, and errors that say what to set if that Python lacks what a job needs.

Spark starts its Python processes with `PYSPARK_PYTHON`, or with the first `python3` in their PATH: in an environment that
wasn't activated, that is the system's Python, which has no Tidegate. So a session that we make on this machine uses the
driver's Python if no other is named. With a session that is given, on this machine, a Python other than the driver's is
started once to see what it can import, before anything is deployed (`check_python`; it takes some 30 ms). In all other cases
a task finds out (`guarded`), and the first error says what to set and ends the job.

Different minor versions of Python are an error of Spark's own, whose text is passed on.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from tidegate.errors import JobError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SlotTask = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]

PYTHON_VARIABLE, PYTHON_SETTING = "PYSPARK_PYTHON", "spark.pyspark.python"

# What Spark's error shows if the Python was the cause: a module that is missing, another version, no such program.
_CAUSES = (
    re.compile(r"((?:ModuleNotFoundError|ImportError): (?:No module named|cannot import name) .+)$", re.MULTILINE),
    re.compile(r"^.*(\[PYTHON_VERSION_MISMATCH\].+)$", re.MULTILINE),
    re.compile(r"(Cannot run program .+)$", re.MULTILINE),
)
_EXECUTORS_RUN = "Executors run"
_ADVICE = (
    "On one machine, set PYSPARK_PYTHON={driver} in the environment before the session is made: "
    "os.environ['PYSPARK_PYTHON'] = sys.executable. On a cluster, let PYSPARK_PYTHON or spark.pyspark.python name a "
    "Python that has Tidegate on every host, or send it along with --py-files or --archives (docs/clusters.md)"
)
_ASK = (
    "import importlib.util, json, sys; print(json.dumps([sys.executable, [each for each in ('tidegate', 'pyarrow') "
    "if importlib.util.find_spec(each) is None]]))"
)
_ASKING_TIMEOUT_S = 20.0


class Pythons(NamedTuple):
    """The driver's Python, and the command with which Spark starts that of the executors."""

    driver: str
    executors: str


def pythons_of(spark: SparkSession) -> Pythons:
    named = str(spark.sparkContext.pythonExec)
    return Pythons(sys.executable, (shutil.which(named) or named) if _is_local(spark) else named)


def check_python(spark: SparkSession) -> None:
    """Raise `JobError` if the Python processes of a session on this machine can't import what a slot needs."""
    driver, executors = pythons_of(spark)
    if not _is_local(spark) or os.path.dirname(executors) == os.path.dirname(driver):
        return
    try:
        done = subprocess.run(
            [executors, "-c", _ASK],
            env=_environment_of(spark),
            capture_output=True,
            text=True,
            timeout=_ASKING_TIMEOUT_S,
            check=True,
        )
        python, missing = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return  # Spark's own error will say what is wrong with it
    if missing:
        raise JobError(
            f"No module named {missing[0]!r} for Spark's Python processes: they run {python}, the driver runs "
            f"{driver}. {_ADVICE.format(driver=driver)}"
        )


def _is_local(spark: SparkSession) -> bool:
    return bool(spark.sparkContext._jsc.sc().isLocal())


def _environment_of(spark: SparkSession) -> dict[str, str]:
    """Return the environment in which Spark's Python processes on this machine import modules."""
    from pyspark import SparkFiles

    context = spark.sparkContext
    sent = SparkFiles.getRootDirectory()
    path = [
        sent,
        *(os.path.join(sent, name) for name in context._python_includes or ()),
        context.environment.get("PYTHONPATH"),
        os.environ.get("PYTHONPATH"),
    ]
    return {**os.environ, **context.environment, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def name_python() -> None:
    """Let the Python processes of a session that spark-submit makes on this machine run the driver's Python."""
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()
    if SparkConf().get("spark.master", "").startswith("local"):
        os.environ.setdefault(PYTHON_VARIABLE, sys.executable)


def guarded(task: SlotTask) -> SlotTask:
    """Return the task in the form that Spark ships. It unpacks itself; if that fails, the error names the Python."""
    from pyspark import cloudpickle

    packed: bytes = cloudpickle.dumps(task)
    driver = sys.executable
    executors_run, advice = _EXECUTORS_RUN, _ADVICE.format(driver=driver)

    # It travels by value and must refer to nothing of ours.
    def unpack_and_run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pickle
        import socket
        import sys

        try:
            unpacked = pickle.loads(packed)
        except ImportError as error:
            version = ".".join(map(str, sys.version_info[:3]))
            raise ImportError(
                f"{error}. {executors_run} {sys.executable} (Python {version}, on {socket.gethostname()}), the driver "
                f"runs {driver}. {advice}"
            ) from None
        yield from unpacked(batches)

    return unpack_and_run


def no_use_in_trying(error: Exception, pythons: Pythons) -> str | None:
    """Return what to report if Spark's error was caused by the Python that executors run, as it will be at every try."""
    found = next(filter(None, (cause.findall(str(error)) for cause in _CAUSES)), None)
    if found is None:
        return None
    if _EXECUTORS_RUN in found[-1]:
        return str(found[-1])
    why = found[-1].rstrip(")")
    return (
        f"{why}. Executors were to run {pythons.executors}, the driver runs {pythons.driver}. {PYTHON_VARIABLE} in the "
        f"environment, or {PYTHON_SETTING}, names the Python of executors; set it before the session is made "
        f"(docs/clusters.md)"
    )
