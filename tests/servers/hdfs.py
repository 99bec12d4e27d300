"""A real HDFS on the loopback interface: a name node and a data node in one process, Hadoop's own mini-cluster.

    with HdfsCluster(folder) as cluster:
        ... cluster.address("folder") ...

It runs on the Hadoop that is among PySpark's jars; `JarsMissing` if the rest can't be had. No pytest in here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from tests.faults.cluster import free_port
from tests.servers.jars import SPARK_JARS, hdfs_cluster, jars_of, java

STARTS_WITHIN_S = 120.0
_OURS = ("hadoop-client-api", "hadoop-client-runtime", "slf4j-api", "log4j-*", "jcl-over-slf4j", "commons-cli")


class HdfsCluster:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        started, self._log_file = folder / "started.xml", folder / "hdfs.log"
        jars = [*jars_of(hdfs_cluster()), *(str(jar) for name in _OURS for jar in SPARK_JARS.glob(f"{name}-*.jar"))]
        self._port = free_port()
        command = [java(), "-Xmx400m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp", os.pathsep.join(jars)]
        command += ["org.apache.hadoop.test.MiniDFSClusterManager", "-format", "-datanodes", "1"]
        command += ["-nnport", str(self._port), "-httpport", str(free_port()), "-writeConfig", str(started)]
        with self._log_file.open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        give_up_s = time.monotonic() + STARTS_WITHIN_S
        while not (started.exists() and started.read_text().rstrip().endswith("</configuration>")):
            if self._process.poll() is not None or time.monotonic() > give_up_s:
                self.kill()
                raise AssertionError(f"HDFS isn't up:\n{self._log_file.read_text(errors='replace')[-3000:]}")
            time.sleep(0.05)

    def __enter__(self) -> HdfsCluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def address(self, folder: str) -> str:
        return f"hdfs://127.0.0.1:{self._port}/{folder}"

    def pause(self) -> None:
        """Answer nothing until `resume`."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
