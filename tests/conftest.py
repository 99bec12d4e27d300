"""What every test shares: one Spark session, reproducible property tests, a check for leaked threads.

Nothing here imports pyspark until a test asks for `spark`, so that unit tests start in no time.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tests.servers import quick

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parent.parent

# Set before any JVM starts, and inherited by it: Spark's Python processes run this interpreter and can import
# `tests.…`, so that classes defined in a test module unpickle there. So can processes that a test starts itself.
_PATHS = [str(ROOT), str(ROOT / "src"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(_PATHS))
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

quick.set_environment()

# The same examples at every run, so that a red build is about the change. `make long` runs more of
# them, and `HYPOTHESIS_PROFILE=explore` looks further.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True, max_examples=40)
hypothesis.settings.register_profile("long", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

_THREADS_END_WITHIN_S = 5.0


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A local Spark with four task slots, shared by all tests that ask for it. Leave its configuration as it is."""
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master("local[4]")
        .appName("tidegate tests")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@pytest.fixture
def no_leaked_threads() -> Iterator[None]:
    """Ask for it (`@pytest.mark.usefixtures("no_leaked_threads")`) where the test must leave no thread running."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + _THREADS_END_WITHIN_S
    while (leaked := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        next(iter(leaked)).join(timeout=0.1)
    assert not leaked, f"left running: {sorted(thread.name for thread in leaked)}"
