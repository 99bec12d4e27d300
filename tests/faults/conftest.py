"""A Spark cluster for the fault tests, and drivers on it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.faults.cluster import Cluster
from tests.jobs import alive

STARTS_WITHIN_S = 90.0
ANSWERS_WITHIN_S = 240.0


@pytest.hookimpl(tryfirst=True)  # xdist looks for groups when it is asked, and takes no notice of what comes later
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One process runs all of them, since they share a cluster; others run other tests meanwhile."""
    for item in items:
        if "tests/faults/" in item.path.as_posix():
            item.add_marker(pytest.mark.xdist_group("cluster"))


class Driver:
    """A driver process. Everything it has told is its story."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.story: list[dict[str, Any]] = []
        self._log_path = cluster.folder / f"driver-{name}.log"
        self._log = self._log_path.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.driver", cluster.url, cluster.java_options, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
            start_new_session=True,
            env=os.environ
            | {
                "SPARK_LOCAL_IP": "127.0.0.1",
                "PYSPARK_PYTHON": sys.executable,
                "SPARK_LOCAL_DIRS": str(cluster.folder / "local"),
            },
        )
        self.until("up", within_s=STARTS_WITHIN_S)

    def ask(self, **request: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")

    def until(self, event: str, *, count: int = 1, within_s: float = ANSWERS_WITHIN_S) -> dict[str, Any]:
        """Reads on until the event was told so many times (from now on); gives the last."""
        assert self._process.stdout is not None
        give_up_s = time.monotonic() + within_s
        while count:
            assert time.monotonic() < give_up_s, f"no {event!r} within {within_s} s:\n{self.told()}"
            line = self._process.stdout.readline()
            assert line, f"the driver ended (exit code {self._process.wait()}) before {event!r}:\n{self.told()}"
            self.story.append(json.loads(line))
            count -= self.story[-1]["event"] == event
        return self.story[-1]

    def told(self) -> str:
        return "\n".join(map(json.dumps, self.story))

    def log(self) -> str:
        """What it has written to stderr so far."""
        return self._log_path.read_text(errors="replace")

    def kill(self) -> None:
        """The Python process alone; the JVM beside it finds out by itself."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Ends it and its JVM, which is in its process group."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        if alive(self._process.pid) or _group_lives(self._process.pid):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def driver(cluster: Cluster) -> Iterator[Driver]:
    driver = Driver(cluster, "kills")
    yield driver
    driver.close()
