"""Slots as plain processes of this machine: the same engine without Spark, for tests and small experiments.

    job = ProcessJob("counts", slots=2, snapshots=tg.Snapshots(every="1 s", to=folder))

Each slot is a fresh Python process that imports Tidegate, gets the job through a pipe and connects to the master like
any other.
"""

from __future__ import annotations

import subprocess
import sys

import cloudpickle

from tidegate.runtime import job
from tidegate.runtime.deployment import Deployer
from tidegate.runtime.hosting import SlotLaunch

_BODY = """
import pickle, sys
index, attempt, host, port = sys.argv[1:5]
sys.path[:0] = pickle.loads(sys.stdin.buffer.read(int(sys.argv[5])))
from tidegate.runtime.hosting import run_slot
run_slot(int(index), sys.stdin.buffer.read(), int(attempt), (host, int(port)))
"""


class ProcessJob(job.Job):
    """A job whose slots are subprocesses."""

    def _deployer(self, launch: SlotLaunch, master: tuple[str, int]) -> Deployer:
        return ProcessDeployer(launch, master)


class ProcessDeployer:
    def __init__(self, launch: SlotLaunch, master: tuple[str, int]) -> None:
        self._slots = launch.plan.slots
        self._payload = launch.packed()
        self._master = master

    def deploy(self, attempt: int) -> ProcessDeployment:
        return ProcessDeployment(self._slots, self._payload, attempt, self._master)


class ProcessDeployment:
    def __init__(self, slots: int, payload: bytes, attempt: int, master: tuple[str, int]) -> None:
        path = cloudpickle.dumps(sys.path)
        self.processes = []
        for index in range(slots):
            process = subprocess.Popen(
                [sys.executable, "-c", _BODY, str(index), str(attempt), master[0], str(master[1]), str(len(path))],
                stdin=subprocess.PIPE)
            assert process.stdin is not None
            process.stdin.write(path + payload)
            process.stdin.close()
            self.processes.append(process)

    def ended(self) -> str | None:
        codes = [process.poll() for process in self.processes]
        return None if None in codes else f"exit codes {codes}"

    def cancel(self) -> None:
        # SIGTERM would wait for a process that was stopped (SIGSTOP) to go on.
        for process in self.processes:
            if process.poll() is None:
                process.kill()
