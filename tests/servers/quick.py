"""Spark's processes start quickly: most of those that the tests start have little to do, and are many.

- A JVM does without its second compiler, which takes half of the time of a short life and pays in a long one.
- It finds Spark's classes parsed and checked in an archive (`python -m tests.servers.class_archive`), which saves half of a
  start. A JVM that the archive doesn't fit, or finds none, takes longer and is the same otherwise. Its log is turned off,
  since it would tell of that on standard output.
- Python processes import the PySpark that is installed, compiled. Spark puts a copy of it before that, in a zip, out of
  which each process would compile it again; a Spark home of links hasn't got it.
- Python processes are forked by one that has imported Tidegate (`tests.servers.python_daemon`).
- Spark renames a file of a checkpoint without asking `readlink` ten times, in a process each, whether it is a link.
- No session has a page of its own to look at.

No pytest in here, nor pyspark.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "build" / "spark-home"
CLASS_ARCHIVE = ROOT / "build" / "spark-classes.jsa"
PYTHON_DAEMON = "tests.servers.python_daemon"
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
SETTINGS = {
    "spark.python.daemon.module": PYTHON_DAEMON,
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.ui.enabled": "false",
}


def spark_home() -> Path:
    """Of the PySpark that is installed."""
    installed = find_spec("pyspark")
    assert installed is not None and installed.origin is not None, "pyspark isn't installed"
    spark = Path(installed.origin).parent
    HOME.mkdir(parents=True, exist_ok=True)
    for name in ("bin", "jars"):
        link = HOME / name
        if not link.is_symlink() or link.readlink() != spark / name:
            link.unlink(missing_ok=True)
            link.symlink_to(spark / name)
    return HOME


def set_environment() -> None:
    """For the sessions of this process and of those that it starts."""
    os.environ["SPARK_HOME"] = str(spark_home())
    os.environ.setdefault("SPARK_SUBMIT_OPTS", java_options())
    os.environ.setdefault("SPARK_LAUNCHER_OPTS", JAVA_OPTIONS)
    settings = " ".join(f"--conf {name}={value}" for name, value in SETTINGS.items())
    os.environ.setdefault("PYSPARK_SUBMIT_ARGS", f"{settings} pyspark-shell")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or every process compiles what it imports


def java_options() -> str:
    """For a JVM with Spark's classes, which are those of `spark_home()`."""
    archive = f" -XX:SharedArchiveFile={CLASS_ARCHIVE} -Xlog:disable" if CLASS_ARCHIVE.exists() else ""
    return JAVA_OPTIONS + archive
