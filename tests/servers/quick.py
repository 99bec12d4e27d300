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
