"""Slots as plain processes of this machine: the same engine without Spark, for tests and small experiments.

    job = ProcessJob("counts", slots=2, snapshots=tg.Snapshots(every="1 s", to=folder))

Each slot is a process that gets the job through a pipe and connects to the coordinator like any other slot. It is forked
from a process that has imported Tidegate and nothing else (nursery.py).
"""

from __future__ import annotations

from tidegate.control.launch import SlotLaunch
from tidegate.driver import job
from tidegate.driver.deployment import Deployer
from tidegate.testing.nursery import Nursery

# Two, so that texts hash differently in a slot and its neighbour, as in processes that were started separately.
_NURSERIES = (Nursery(), Nursery())


class ProcessJob(job.Job):
    """A job whose slots are subprocesses."""

    def _deployer(self, launch: SlotLaunch, coordinator: tuple[str, int]) -> Deployer:
        return ProcessDeployer(launch, coordinator)


class ProcessDeployer:
    def __init__(self, launch: SlotLaunch, coordinator: tuple[str, int]) -> None:
        self._slots = launch.plan.slots
        self._payload = launch.packed()
        self._coordinator = coordinator

    def deploy(self, attempt: int) -> ProcessDeployment:
        return ProcessDeployment(self._slots, self._payload, attempt, self._coordinator)


class ProcessDeployment:
    def __init__(self, slots: int, payload: bytes, attempt: int, coordinator: tuple[str, int]) -> None:
        self.processes = [_NURSERIES[index % 2].start(index, payload, attempt, coordinator) for index in range(slots)]

    def ended(self) -> str | None:
        ended = [process.ended() for process in self.processes]
        return f"the processes {[process.pid for process in self.processes]} have ended" if all(ended) else None

    def cancel(self) -> None:
        # A process that was stopped (SIGSTOP) would get SIGTERM only when it continues.
        for process in self.processes:
            process.kill()
