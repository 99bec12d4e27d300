"""Spark's processes start quickly: most of those that the tests start have little to do, and are many.

- A JVM does without its second compiler, which takes half of the time of a short life and pays in a long one.
- Python processes import the PySpark that is installed, compiled. Spark puts a copy of it before that, in a zip, out of
  which each process would compile it again; a Spark home of links hasn't got it.

No pytest in here, nor pyspark.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "build" / "spark-home"
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def environment() -> dict[str, str]:
    """For whoever starts Spark, or a process that does."""
    found = {"SPARK_SUBMIT_OPTS": JAVA_OPTIONS, "SPARK_LAUNCHER_OPTS": JAVA_OPTIONS}
    installed = find_spec("pyspark")
    if installed is not None and installed.origin is not None:
        found["SPARK_HOME"] = str(_home_of_links(Path(installed.origin).parent))
    return found


def _home_of_links(spark: Path) -> Path:
    HOME.mkdir(parents=True, exist_ok=True)
    for name in ("bin", "jars"):
        link = HOME / name
        if not link.is_symlink() or link.readlink() != spark / name:
            link.unlink(missing_ok=True)
            link.symlink_to(spark / name)
    return HOME
