"""A Spark session in a process of its own, for tests that need jars or settings which the shared session doesn't have.

    with SparkProcess(folder, jars=jars_of(SPARK_KAFKA), settings={…}) as process:
        rows = process.call(read_rows, path="/…")

A JVM takes its jars when it starts, and a Python process has one JVM. What is called is a function of a module that the
process can import; it gets the session and the arguments, which go through JSON, as its result does. No pytest in here.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


class SparkProcess:
    def __init__(
        self,
        folder: Path,
        *,
        jars: Sequence[str] = (),
        settings: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log_file = folder / "spark.log"
        self._log = self._log_file.open("ab")
        given = {
            "spark.master": "local[4]",
            "spark.ui.enabled": "false",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.sql.shuffle.partitions": "2",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
            "spark.jars": ",".join(jars),
            **(settings or {}),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.servers.spark_process", json.dumps(given)],
            text=True,
            bufsize=1,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
            env=os.environ | {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable, **(environment or {})},
        )

    def __enter__(self) -> SparkProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def call(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """What the function returned there. What it raised there is an `AssertionError` here, traceback and all."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([function.__module__, function.__qualname__, arguments]) + "\n")
        answer = self._process.stdout.readline()
        if not answer:
            raise AssertionError(
                f"the Spark process ended (exit code {self._process.wait()}):\n"
                f"{self._log_file.read_text(errors='replace')[-6000:]}"
            )
        result, raised = json.loads(answer)
        if raised is not None:
            raise AssertionError(f"{function.__name__} in the Spark process:\n{raised}")
        return result

    def kill(self) -> None:
        """It, its JVM, and the Python processes that the JVM started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._log.close()


def main() -> None:
    from pyspark.sql import SparkSession

    # Answers have their own way out: what else is printed, by Spark or by a function, goes to the log.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    builder = SparkSession.builder.appName("tidegate tests")
    for key, value in json.loads(sys.argv[1]).items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    for line in sys.stdin:
        module, name, arguments = json.loads(line)
        try:
            answer = [getattr(importlib.import_module(module), name)(spark, **arguments), None]
        except BaseException:  # noqa: BLE001  (whoever asked is told)
            answer = [None, traceback.format_exc()[-9000:]]
        answers.write(json.dumps(answer) + "\n")
    spark.stop()


if __name__ == "__main__":
    main()
