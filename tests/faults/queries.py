"""Streaming queries on the tests' cluster: a driver process for a query, and kills at a point that is known beforehand.

Who is to be killed, and where, is told by the place: a record, a timer, a batch. The process that comes there first strikes,
once in the life of the test's folder, however often the query comes there again. So a run can be told in advance.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from tests.faults.cluster import Cluster, executor_of
from tests.jobs import alive
from tests.servers import quick
from tidegate.errors import StoreError
from tidegate.store.local import LocalStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DRIVER = "driver.pid"
STRUCK = "struck"
DRIVER_ENDS_WITHIN_S = 280.0


@dataclass(frozen=True, slots=True)
class OneProcess:
    """In the place of a cluster: the driver is the executor, too. Without a second number Spark would try no task again that
    isn't of the slots' stage."""

    folder: Path
    url: str = "local[4, 4]"
    java_options: str = quick.java_options()

    def log(self) -> str:
        return ""


def session_on(url: str, java_options: str, name: str, *, cores: int = 4) -> SparkSession:
    """An executor has one core. Spark looks often whether there are enough of them."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(url).appName(name)
    for key, value in {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.executor.cores": "1",
        "spark.cores.max": str(cores),
        "spark.executor.memory": "512m",
        "spark.driver.memory": "512m",
        "spark.driver.extraJavaOptions": java_options,
        "spark.executor.extraJavaOptions": java_options,
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
        "spark.executorEnv.PYTHONPATH": os.environ["PYTHONPATH"],
    }.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def run_driver(cluster: Cluster | OneProcess, module: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs `main()` of a module with the cluster's address, its options for Java, the folder and the words, and waits. The
    driver and its JVM are a process group, which is killed as a whole where it takes too long."""
    driver = subprocess.Popen(
        [sys.executable, "-c", f"from {module} import main; main()", cluster.url, cluster.java_options, str(folder), *words],
        env=os.environ
        | {
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_DIRS": str(cluster.folder / "local"),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    (folder / DRIVER).write_text(str(driver.pid))
    try:
        told, errors = driver.communicate(timeout=DRIVER_ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        os.killpg(driver.pid, signal.SIGKILL)
        told, errors = driver.communicate()
        errors += f"\nstill running after {DRIVER_ENDS_WITHIN_S} s\n{cluster.log()}"
    return subprocess.CompletedProcess(driver.args, driver.returncode, told, errors)


def strike_once(folder: str | Path, place: str, victim: str) -> None:
    """Called in a slot, or in a task behind it. The victim is this "process", its "executor" or the "driver".

    A driver dies once, so if two slots come to such places at the same moment, one of them leaves its place for the next
    driver.
    """
    if Path(folder, STRUCK, place).exists():
        return
    if victim == "driver" and not _is_first(folder, "", f"killed-{_driver_of(folder)}"):
        return
    if not _is_first(folder, STRUCK, place):
        return
    if victim == "driver":
        strike_driver(folder)
    else:
        os.kill(os.getpid() if victim == "process" else executor_of(os.getpid()), signal.SIGKILL)


def strike_slot_once(folder: str | Path, place: str, victim: str, slots: list[int]) -> None:
    """Called in the driver, with the Python processes of slots: the first that lives is the victim, or its executor."""
    if _is_first(folder, STRUCK, place):
        process = next(pid for pid in slots if alive(pid) and pid != os.getpid())  # a processor's init runs here, too
        os.kill(process if victim == "process" else executor_of(process), signal.SIGKILL)


def fail_write_once(folder: str | Path, place: str) -> None:
    """Called in a slot: its next file in a store isn't written, as on a disk that is full for a moment. Nobody dies."""
    if not _is_first(folder, STRUCK, place):
        return
    write = LocalStore.write

    def fails(self: LocalStore, name: str, chunks: Any) -> int:
        LocalStore.write = write  # type: ignore[method-assign]
        raise StoreError(f"no space left for {name}")

    LocalStore.write = fails  # type: ignore[method-assign]


def strike_driver(folder: str | Path) -> None:
    """And its JVM, at the same moment."""
    os.killpg(_driver_of(folder), signal.SIGKILL)


def _driver_of(folder: str | Path) -> int:
    return int((Path(folder) / DRIVER).read_text())


def struck(folder: Path) -> set[str]:
    """The places where it happened."""
    return {path.name for path in (folder / STRUCK).iterdir()}


def _is_first(folder: str | Path, under: str, name: str) -> bool:
    path = Path(folder, under, name)
    path.parent.mkdir(exist_ok=True)
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def committed_files(out: Path) -> list[Path]:
    """Those that the log of Spark's file sink lists."""
    found = set()
    for log in (out / "_spark_metadata").glob("[0-9]*"):
        for line in log.read_text().splitlines()[1:]:
            entry: dict[str, Any] = json.loads(line)
            found.add(Path(unquote(urlsplit(entry["path"]).path)))
    return sorted(found)
