"""Which Python the executors run, and what to do where it isn't one that has what a job needs.

Spark starts its Python processes with `PYSPARK_PYTHON`, or with whatever `python3` is first in their PATH: in an environment
that wasn't activated, that is the system's Python, which has no Tidegate. So where we make the session we name the driver's
own Python, if it runs on this machine and nothing was named. With a session that is given nothing is tried in
advance: a task finds out by itself (`guarded`), which costs nothing where all is well, and the first error says what to
set and ends the job.

Different minor versions of Python are an error of Spark's own, whose text is passed on.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SlotTask = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]

PYTHON_VARIABLE, PYTHON_SETTING = "PYSPARK_PYTHON", "spark.pyspark.python"

_MISSING_MODULE = re.compile(r"^(?:\w+\.)*((?:ModuleNotFoundError|ImportError): .+)$", re.MULTILINE)
_OTHER_VERSION = re.compile(r"^.*(\[PYTHON_VERSION_MISMATCH\].+)$", re.MULTILINE)
_NO_PROGRAM = re.compile(r"(Cannot run program .+)$", re.MULTILINE)
_TOLD = "Executors run "


class Pythons(NamedTuple):
    """The driver's Python, and how Spark was told to start that of the executors."""

    driver: str
    executors: str


def pythons_of(spark: SparkSession) -> Pythons:
    return Pythons(sys.executable, str(spark.sparkContext.pythonExec))


def name_python() -> None:
    """For a session that spark-submit was told to make: on this machine, its Python processes run the driver's Python."""
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()
    if SparkConf().get("spark.master", "").startswith("local"):
        os.environ.setdefault(PYTHON_VARIABLE, sys.executable)


def guarded(task: SlotTask) -> SlotTask:
    """The task as Spark gets it: unpacked by itself, so that it can tell which Python it met where that fails."""
    from pyspark import cloudpickle

    packed: bytes = cloudpickle.dumps(task)
    driver = sys.executable

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
                f"{error}. Executors run {sys.executable} (Python {version}, on {socket.gethostname()}), the driver runs "
                f"{driver}. On one machine, set PYSPARK_PYTHON={driver} in the environment before the session is made: "
                f"os.environ['PYSPARK_PYTHON'] = sys.executable. On a cluster, let PYSPARK_PYTHON or spark.pyspark.python "
                f"name a Python that has Tidegate on every host, or send it along with --py-files or --archives "
                f"(docs/clusters.md)") from None
        yield from unpacked(batches)

    return unpack_and_run


def no_use_in_trying(error: Exception, pythons: Pythons) -> str | None:
    """What to say about an error of Spark's that comes of the Python that executors run, and comes again at every try."""
    text = str(error)
    if (found := _MISSING_MODULE.findall(text)) and _TOLD in found[-1]:
        return str(found[-1])
    if not found:
        found = _OTHER_VERSION.findall(text) or _NO_PROGRAM.findall(text)
    if not found:
        return None
    return (f"{found[-1]}. Executors were to run {pythons.executors}, the driver runs {pythons.driver}. {PYTHON_VARIABLE} "
            f"in the environment, or {PYTHON_SETTING}, names the Python of executors; set it before the session is made "
            f"(docs/clusters.md)")
