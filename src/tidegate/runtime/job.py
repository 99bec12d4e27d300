"""A job: a pipeline with what it takes to run it.

This class knows nothing of Spark: whoever subclasses it says how slots are deployed (`tidegate.spark.job`, or plain
processes in `tidegate.testing`).
"""

from __future__ import annotations

import secrets
import tempfile

from tidegate.dataflow.explain import explain_logical, explain_optimised, explain_physical
from tidegate.dataflow.optimiser import make_plan
from tidegate.dataflow.plan import Plan
from tidegate.dataflow.stream import Pipeline
from tidegate.errors import JobError
from tidegate.protocol.restart import RestartStrategy
from tidegate.runtime.handle import Handle
from tidegate.runtime.hosting import MasterHost, SlotLaunch
from tidegate.runtime.master import Deployer
from tidegate.runtime.reports import Status
from tidegate.runtime.settings import DEFAULT_RESTART, Backend, Heap, JobSettings, Snapshots, Tuning
from tidegate.store.layout import job_address
from tidegate.store.opening import open_store

_SECRET_BYTES = 32


class Job(Pipeline):
    """Sources, operators and sinks, and how they run. Built like a `Pipeline`; then `run()` or `start()`."""

    def __init__(self, name: str, *, slots: int, backend: Backend | None = None, snapshots: Snapshots | None = None,
                 restart: RestartStrategy = DEFAULT_RESTART, tuning: Tuning | None = None) -> None:
        super().__init__()
        if not name or not isinstance(name, str):
            raise JobError(f"a job needs a name: its snapshots are kept under it (got {name!r})")
        if slots < 1:
            raise JobError(f"slots={slots}: a job needs at least one")
        self.name = name
        self.slots = slots
        self._settings = JobSettings(
            name=name, restart=restart, tuning=tuning or Tuning(), backend=backend or Heap(),
            snapshots=snapshots or Snapshots(to=tempfile.mkdtemp(prefix="tidegate-")))

    def plan(self) -> Plan:
        """The physical plan at this job's slots."""
        tuning = self._settings.tuning
        return make_plan(self.build(), slots=self.slots, key_group_count=tuning.key_group_count, chaining=tuning.chaining)

    def explain(self) -> str:
        """Three graphs: what you wrote, what the optimiser made of it, and what is deployed."""
        plan = self.plan()
        return "\n\n".join((explain_logical(self.build()), explain_optimised(plan), explain_physical(plan)))

    def start(self) -> Handle:
        """Starts the job and returns at once. Where its folder holds snapshots it goes on from the newest complete
        one."""
        plan = self.plan()
        store = open_store(job_address(self._settings.snapshots.to, self.name))
        launch = SlotLaunch(plan=plan, settings=self._settings, store=store.address,
                            secret=secrets.token_bytes(_SECRET_BYTES))
        host = MasterHost(launch, self._deployer)
        return host.start()

    def run(self) -> Status:
        """Runs the job until its input ends, it is stopped, or it fails (`JobFailed`)."""
        handle = self.start()
        try:
            return handle.wait()
        except BaseException:
            if not handle.status.terminal:
                handle.cancel()
            raise

    def _deployer(self, launch: SlotLaunch, master: tuple[str, int]) -> Deployer:
        """How this job's slots are brought up."""
        raise AssertionError(f"{type(self).__name__} doesn't say how slots are deployed")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, slots={self.slots})"
