"""A real Kafka broker on the loopback interface, from Apache Kafka's own jars: one node, KRaft, no ZooKeeper.

    with KafkaBroker(folder) as broker:
        ... broker.address ...
        broker.kill(); broker.start()       # the same address and the same data

Topics come into being when they are first used, with `partitions` partitions. Its process is in a group of its own and is
ended by its id. No pytest in here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from base64 import urlsafe_b64encode
from pathlib import Path
from typing import IO

from tests.faults.cluster import free_port
from tests.servers.jars import KAFKA_BROKER, SPARK_JARS, jars_of, java

STARTS_WITHIN_S = 60.0
STARTED = "Kafka Server started"
JAVA_OPTIONS = ("-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
LOGGING = """
rootLogger.level = warn
rootLogger.appenderRef.stderr.ref = stderr
logger.started.name = kafka.server.KafkaRaftServer
logger.started.level = info
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss.SSS} %p %c{1}: %m%n%ex
"""


class KafkaBroker:
    def __init__(self, folder: Path, *, partitions: int = 3) -> None:
        self.folder = folder
        self._partitions = partitions
        self._jars = jars_of(KAFKA_BROKER)
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self._logging = folder / "log4j2.properties"
        self._logging.write_text(LOGGING)
        for _ in range(5):
            self._settle()
            with contextlib.suppress(ChildProcessError):  # somebody else was quicker to take a port
                self.start()
                return
        raise AssertionError(f"no Kafka broker came up:\n{self.log()}")

    def __enter__(self) -> KafkaBroker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def start(self) -> None:
        """`ChildProcessError` where it ends at once."""
        assert self._process is None, "it runs"
        began_at = self._log_file.stat().st_size if self._log_file.exists() else 0
        self._log = self._log_file.open("ab")
        self._process = subprocess.Popen(
            [*self._java(), "kafka.Kafka", str(self._properties)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        give_up_s = time.monotonic() + STARTS_WITHIN_S
        while STARTED.encode() not in self._log_file.read_bytes()[began_at:]:
            if self._process.poll() is not None or time.monotonic() > give_up_s:
                self.kill()
                raise ChildProcessError(f"the Kafka broker isn't up after {STARTS_WITHIN_S:.0f} s:\n{self.log()}")
            time.sleep(0.05)

    def kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def log(self) -> str:
        """Its end, for a failure."""
        return self._log_file.read_text(errors="replace")[-3000:] if self._log_file.exists() else ""

    @property
    def _log_file(self) -> Path:
        return self.folder / "kafka.log"

    @property
    def _properties(self) -> Path:
        return self.folder / "server.properties"

    def _java(self) -> list[str]:
        """Kafka says nothing without a logger; Spark's jars have one."""
        loggers = [
            str(path)
            for name in ("slf4j-api", "log4j-api", "log4j-core", "log4j-slf4j2-impl")
            for path in SPARK_JARS.glob(f"{name}-*.jar")
        ]
        return [
            java(),
            *JAVA_OPTIONS,
            f"-Dlog4j2.configurationFile=file:{self._logging}",
            "-cp",
            os.pathsep.join([*loggers, *self._jars]),
        ]

    def _settle(self) -> None:
        """Addresses, and an empty log."""
        broker, controller = free_port(), free_port()
        self.address = f"127.0.0.1:{broker}"
        data = self.folder / f"data-{broker}"
        self._properties.write_text(
            "\n".join(
                f"{key}={value}"
                for key, value in {
                    "process.roles": "broker,controller",
                    "node.id": 1,
                    "listeners": f"PLAINTEXT://{self.address},CONTROLLER://127.0.0.1:{controller}",
                    "advertised.listeners": f"PLAINTEXT://{self.address}",
                    "controller.listener.names": "CONTROLLER",
                    "controller.quorum.bootstrap.servers": f"127.0.0.1:{controller}",
                    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
                    "log.dirs": data,
                    "num.partitions": self._partitions,
                    "auto.create.topics.enable": "true",
                    "offsets.topic.num.partitions": 1,
                    "offsets.topic.replication.factor": 1,
                    "transaction.state.log.num.partitions": 1,
                    "transaction.state.log.replication.factor": 1,
                    "transaction.state.log.min.isr": 1,
                    "group.initial.rebalance.delay.ms": 0,
                }.items()
            )
        )
        cluster = "t" + urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()[1:]  # no option
        done = subprocess.run(
            [
                *self._java(),
                "kafka.tools.StorageTool",
                "format",
                "--standalone",
                "--cluster-id",
                cluster,
                "--config",
                str(self._properties),
            ],
            capture_output=True,
            text=True,
            timeout=STARTS_WITHIN_S,
            check=False,
        )
        assert done.returncode == 0, f"Kafka's folder couldn't be made:\n{done.stdout}\n{done.stderr}"
