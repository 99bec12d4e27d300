"""A job: a pipeline, and how it runs.

This class knows nothing of Spark. Its subclasses deploy the slots: as Spark tasks (`tidegate.spark.job`), or as plain
processes (`tidegate.testing`).
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tidegate import arguments
from tidegate.control.launch import SlotLaunch
from tidegate.control.no_event_time import warnings_of
from tidegate.control.settings import DEFAULT_RESTART, Backend, Heap, JobSettings, Snapshots, Tuning, check_slots
from tidegate.dataflow.declared import declared_operators
from tidegate.dataflow.explain import explain_logical, explain_optimised, explain_physical
from tidegate.dataflow.optimiser import make_plan
from tidegate.dataflow.pipeline import Pipeline
from tidegate.dataflow.plan import Plan
from tidegate.driver.attempts import Restore
from tidegate.driver.deployment import Deployer
from tidegate.driver.handle import Handle
from tidegate.driver.hosting import CoordinatorHost, SlotLinks
from tidegate.driver.job_log import LOGGER
from tidegate.driver.reports import Status
from tidegate.errors import JobError
from tidegate.protocol.restart import RestartStrategy
from tidegate.snapshots.finding import find_snapshot, resolved
from tidegate.snapshots.plan import RestorePlan
from tidegate.snapshots.savepoints import versions_here
from tidegate.store.layout import job_address
from tidegate.store.opening import open_store
from tidegate.store.writable import check_writable

_SECRET_BYTES = 32


class Job(Pipeline):
    """Sources, operators and sinks, and how they run. Built like a `Pipeline`; then `run()` or `start()`.

    `restore_from` is what the job begins with as long as it has no snapshots of its own: the folder of a savepoint, another
    job's folder of snapshots, or a manifest in it. `claim=True` gives the savepoint away: it is deleted as soon as the job
    has a snapshot of its own. `drop_state` names operators ("count") and states ("count.total") that are in the snapshot and
    are to be discarded, because the job no longer has them.
    """

    def __init__(
        self,
        name: str,
        *,
        slots: int,
        backend: Backend | None = None,
        snapshots: Snapshots | None = None,
        restart: RestartStrategy = DEFAULT_RESTART,
        tuning: Tuning | None = None,
        restore_from: str | None = None,
        claim: bool = False,
        drop_state: Sequence[str] = (),
    ) -> None:
        super().__init__()
        if not name or not isinstance(name, str):
            raise JobError(f"a job needs a name: its snapshots are kept under it (got {name!r})")
        check_slots(slots)
        if slots < 1:
            raise JobError(f"slots={slots}: a job needs at least one")
        if restore_from is not None:
            arguments.text("Job", "restore_from", restore_from, "the folder of a savepoint or of snapshots")
        if arguments.flag("Job", "claim", claim) and restore_from is None:
            raise JobError("claim=True lets the job delete what it begins with, and there is no restore_from: give both")
        drop_state = arguments.names("Job", "drop_state", drop_state)
        self.name = name
        self.slots = slots
        self._is_temporary = snapshots is None
        self._handle: Handle | None = None
        self._restore = Restore(path=None if restore_from is None else resolved(restore_from), claim=claim)
        self._settings = JobSettings(
            name=name,
            restart=restart,
            tuning=tuning or Tuning(),
            backend=backend or Heap(),
            drop_state=drop_state,
            snapshots=snapshots or Snapshots(to=tempfile.mkdtemp(prefix="tidegate-")),
        )

    def plan(self) -> Plan:
        """Return the physical plan at this job's slots."""
        return self._plan_at(self.slots, {})

    def _plan_at(self, slots: int, parallelism: Mapping[str, int]) -> Plan:
        """Return the plan for this many slots, with this parallelism of some operators."""
        tuning, graph = self._settings.tuning, self.build()
        names = {node.name for node in graph.nodes}
        for name, count in parallelism.items():
            if name not in names:
                raise JobError(f"there is no operator {name!r} to rescale; there are {sorted(names)}")
            if count < 1:
                raise JobError(f"operator {name!r}: parallelism={count}, it needs at least one")
        graph = replace(
            graph,
            nodes=tuple(replace(node, parallelism=parallelism.get(node.name, node.parallelism)) for node in graph.nodes),
        )
        return make_plan(
            graph,
            slots=slots,
            key_group_count=tuning.key_group_count,
            chaining=tuning.chaining,
            combine=tuning.combine_limits,
        )

    def explain(self) -> str:
        """Return three graphs as text: what you wrote, what the optimiser made of it, and what is deployed."""
        return self._explain(self.plan())

    def _explain(self, plan: Plan) -> str:
        return "\n\n".join((explain_logical(self.build()), explain_optimised(plan), explain_physical(plan)))

    def start(self) -> Handle:
        """Start the job and return at once. If its folder has snapshots, the job resumes from the newest complete one;
        otherwise it begins with `restore_from`."""
        if self._handle is not None and not self._handle.status.terminal:
            raise JobError(
                f"job {self.name!r} runs already: this program has started it. Use the handle that start() returned, or "
                f"stop the job first"
            )
        plan = self.plan()
        store = open_store(job_address(self._settings.snapshots.to, self.name))
        check_writable(store)
        launch = SlotLaunch(
            plan=plan, settings=self._placed_settings(), store=store.address, secret=secrets.token_bytes(_SECRET_BYTES)
        )
        host = CoordinatorHost(
            launch,
            SlotLinks(launch, self._deployer),
            replan=self._plan_at,
            explain=self._explain,
            versions=self._versions(),
            restore=self._restore,
        )
        if self._is_temporary:
            LOGGER.warning(
                "Job %r has no snapshots=, so its state lives in the temporary folder %s and is lost with it. Give "
                "tg.Snapshots(to=…) to keep it",
                self.name,
                self._settings.snapshots.to,
                extra={"event": "temporary", "job": self.name},
            )
        for text in warnings_of(plan):
            LOGGER.warning("Job %r: %s", self.name, text, extra={"event": "noticed", "job": self.name})
        self._handle = host.start()
        return self._handle

    def run(self) -> Status:
        """Run the job until its input ends, it is stopped, or it fails (`JobFailed`)."""
        handle = self.start()
        try:
            return handle.wait()
        except BaseException:
            if not handle.status.terminal:
                handle.cancel()
            raise

    def _placed_settings(self) -> JobSettings:
        """Return the settings with the addresses for the place where the job runs."""
        return self._settings

    def _deployer(self, launch: SlotLaunch, coordinator: tuple[str, int]) -> Deployer:
        """Return what deploys this job's slots."""
        raise AssertionError(f"{type(self).__name__} doesn't say how slots are deployed")

    def _versions(self) -> dict[str, str]:
        """Return the versions of the software that runs the job, for its savepoints."""
        return versions_here()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, slots={self.slots})"


def plan_restore(job: Job, path: str) -> RestorePlan:
    """Return what would happen to every state if the job were started with `restore_from=path`.

    Only the manifest is read; nothing is written or started. Print the result. Its `check()` raises the error that the job
    would fail with.
    """
    if not isinstance(job, Job):
        raise JobError(f"plan_restore({job!r}, …): give the job that would begin with it")
    arguments.text("plan_restore", "path", path, "the folder of a savepoint or of snapshots")
    plan, settings = job.plan(), job._settings
    snapshot = find_snapshot(path).still_to_commit()
    return snapshot.plan(declared_operators(plan), key_group_count=plan.key_group_count, drop=settings.drop_state)
