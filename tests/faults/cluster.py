"""A standalone Spark cluster from PySpark's own jars: one master, two workers, on loopback or on hosts of their own.

Everything it starts is in process groups of its own and is ended by their ids. Executors, which the workers start, are in
their worker's group; Python processes, which the executors start, end themselves when their executor is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tests.jobs import alive, until
from tests.servers import quick

QUIET = """
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss.SSS} %p %c{1}: %m%n%ex
"""


@dataclass(frozen=True, slots=True)
class Host:
    """What processes see of the network: this machine's loopback interface, or a network namespace of its own."""

    address: str = "127.0.0.1"
    namespace: str | None = None

    def command(self, *words: str) -> list[str]:
        """Run by the same process, in the namespace."""
        return [*words] if self.namespace is None else ["ip", "netns", "exec", self.namespace, *words]


HERE = Host()


class Cluster:
    """The first of the hosts has the master and is for drivers, the others have the workers, in turn. There are cores enough
    for two applications at a time: one of two slots, and one of three that has an executor to spare."""

    def __init__(self, folder: Path, *, workers: int = 2, cores: int = 3, hosts: Sequence[Host] = (HERE, HERE)) -> None:
        self.folder = folder
        self.host = hosts[0]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: list[IO[bytes]] = []
        self.log4j = folder / "log4j2.properties"
        self.log4j.write_text(QUIET)
        try:
            self.url = self._start_master()
            for number in range(workers):
                host = hosts[1 + number % (len(hosts) - 1)]
                self._start(
                    host,
                    f"worker-{number}",
                    "org.apache.spark.deploy.worker.Worker",
                    "--host",
                    host.address,
                    "--cores",
                    str(cores),
                    "--memory",
                    "2g",
                    "--webui-port",
                    "0",
                    "--work-dir",
                    str(folder / f"work-{number}"),
                    self.url,
                )
        except BaseException:
            self.close()
            raise

    @property
    def java_options(self) -> str:
        return f"-Dlog4j2.configurationFile=file:{self.log4j} {quick.java_options()}"

    def close(self) -> None:
        for process in reversed(self._processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for log in self._logs:
            log.close()

    def log(self) -> str:
        """The ends of all log files, for a failure."""
        return "\n".join(
            f"--- {path.relative_to(self.folder)}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted([*self.folder.glob("*.log"), *self.folder.glob("work-*/*/*/stderr")])
            if path.stat().st_size
        )

    def _start_master(self) -> str:
        """Spark takes the next free port where the one asked for isn't; the first lines of its log would tell it, if
        they weren't kept quiet. So a port is found first, and another one if somebody else was quicker."""
        for _ in range(5):
            port = free_port()
            process = self._start(
                self.host,
                "master",
                "org.apache.spark.deploy.master.Master",
                "--host",
                self.host.address,
                "--port",
                str(port),
                "--webui-port",
                "0",
            )
            give_up_s = time.monotonic() + 30
            while process.poll() is None and time.monotonic() < give_up_s:
                if port in listening_ports_of(process.pid):
                    return f"spark://{self.host.address}:{port}"
                time.sleep(0.05)
            process.kill()
        raise AssertionError(f"no master of a Spark cluster came up:\n{self.log()}")

    def _start(self, host: Host, name: str, *command: str) -> subprocess.Popen[bytes]:
        log = (self.folder / f"{name}.log").open("ab")
        self._logs.append(log)
        env = os.environ | {
            "SPARK_HOME": str(quick.spark_home()),
            "SPARK_LOCAL_IP": host.address,
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": f"{self.java_options} -Dspark.deploy.maxExecutorRetries=-1",
            "SPARK_LOCAL_DIRS": str(self.folder / "local"),
            "PYSPARK_PYTHON": sys.executable,
        }
        process = subprocess.Popen(
            host.command(str(quick.spark_home() / "bin" / "spark-class"), *command),
            env=env,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._processes.append(process)
        return process


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def listening_ports_of(pid: int) -> set[int]:
    """The ports on which the process listens, out of /proc."""
    sockets = set()
    with contextlib.suppress(OSError):
        for descriptor in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(descriptor.path).removeprefix("socket:[").removesuffix("]"))
    ports = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/net/{table}") as lines:
            for line in list(lines)[1:]:
                columns = line.split()
                if columns[3] == "0A" and columns[9] in sockets:
                    ports.add(int(columns[1].rpartition(":")[2], 16))
    return ports


def executor_of(pid: int) -> int:
    """The JVM that a slot's Python process hangs on: worker.py ← daemon.py ← executor."""
    while pid > 1:
        stat = Path(f"/proc/{pid}/stat").read_text()
        pid = int(stat.rpartition(")")[2].split()[1])
        if b"CoarseGrainedExecutorBackend" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError("this process hangs on no executor")


def await_end(pids: list[int]) -> None:
    until(lambda: not any(map(alive, pids)), f"the end of the processes {pids}")
