"""The job of a transform, and a run of it over bounded input.

A `TransformJob` is built like any job, except at its ends: its sources and sinks hand records over (connectors/handover.py),
and its slots are the tasks that were gathered (gathering.py). Every run of a bounded transform is a job from its beginning
to its end. If Spark runs the stage again, for another action or after a failure, the job begins again.

When the tasks have read their input, the coordinator ends the job. Event time ends as well, so that all timers of event
time fire (`drains`), unless the state is to be used elsewhere. Then the last snapshot becomes a savepoint, once: a run that
Spark repeats later doesn't change it.
"""

from __future__ import annotations

import secrets
import shutil
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from tidegate.connectors.handover import HandedSink, HandedSource, Handover
from tidegate.control.clock import SystemClock
from tidegate.control.launch import STORE_OF_A_RUN, SlotLaunch
from tidegate.control.settings import Tuning, check_tuning
from tidegate.dataflow.changelog import check_appended
from tidegate.dataflow.keyed_stream import BroadcastStream, ConnectedStreams, KeyedStream
from tidegate.dataflow.stream import Stream
from tidegate.dataflow.windowed_stream import WindowedStream
from tidegate.dataframes.gathering import Run, RunEnd
from tidegate.dataframes.task_slots import TaskSlots
from tidegate.driver import job
from tidegate.driver.attempts import Restore
from tidegate.driver.hosting import CoordinatorHost
from tidegate.errors import GraphError, JobFailed
from tidegate.protocol.restart import NoRestart
from tidegate.snapshots.catalog import SnapshotCatalog
from tidegate.snapshots.manifest import MicroBatch
from tidegate.snapshots.savepoints import export_snapshot
from tidegate.snapshots.snapshot import Snapshot
from tidegate.store.layout import job_address
from tidegate.store.local import LocalStore
from tidegate.store.opening import forget_memory_store, open_store

DEFAULT_OUTPUT = "output"
SECRET_BYTES = 32
# A slot says nothing while Spark takes its output or gets it the next batch; a lost task is noticed by its link.
HEARTBEAT_TIMEOUT = "10 minutes"
MEMORY = "memory://"
AT_THE_END = "the action or query ends, unless Spark tries its tasks again"


class TransformJob(job.Job):
    """The sources, operators and sinks of one transform. `inputs` has the sources by name, and what tasks get and give
    goes through `handover`."""

    time_by_epoch = True

    def __init__(
        self,
        name: str,
        inputs: Mapping[str, pa.Schema],
        *,
        slots: int,
        tuning: Tuning | None = None,
        writes_state: bool,
        drains: bool = False,
        **rest: Any,
    ) -> None:
        super().__init__(name, slots=slots, restart=NoRestart(), tuning=_for_tasks(tuning or Tuning()), **rest)
        self._settings = replace(
            self._settings, writes_state=writes_state, writers_rest=False, drains=drains, at_the_end=AT_THE_END
        )
        self.handover = Handover(list(inputs.values()))
        self.inputs = {
            each: self.source(each, HandedSource(self.handover, index, schema))
            for index, (each, schema) in enumerate(inputs.items())
        }
        self._outputs: list[str] = []
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._noticed: set[str] = set()  # by users: each text is for the life of the transform, not of an attempt

    def take_outputs(self, given: object) -> list[str] | None:
        """Take what a user's function returned: a stream, or several by name. Return the names; None for a single stream."""
        named = given if isinstance(given, Mapping) else {DEFAULT_OUTPUT: given}
        if not named:
            raise GraphError("the pipeline returned no stream: return one, or a dict of them by name")
        inner = [node.name for node in self._nodes if node.sink is not None]
        if inner:
            raise GraphError(
                f"sink {inner[0]!r}: a transform has no sinks, because Spark writes the DataFrames that it gives. Return "
                f"the stream instead of calling .to(…); return several streams as a dict by name"
            )
        for name, stream in named.items():
            if not isinstance(stream, Stream):
                what = (
                    "a keyed stream; return it before key_by"
                    if isinstance(stream, KeyedStream)
                    else "a broadcast stream; return it before broadcast"
                    if isinstance(stream, BroadcastStream)
                    else "records in windows; return what .aggregate(…) or .apply(…) makes of them"
                    if isinstance(stream, WindowedStream)
                    else "two connected streams; return what .process(…) makes of them"
                    if isinstance(stream, ConnectedStreams)
                    else f"{stream!r}; return a stream, or a dict of streams by name"
                )
                raise GraphError(f"the pipeline returned, as {name!r}, {what}")
            where = f"the pipeline returned, as {name!r},"
            check_appended(self._nodes, where, stream._edges, "the rows of a DataFrame are appended")
            stream.to(name, HandedSink(self.handover, self.handover.add_output(stream.schema)))
            self._outputs.append(name)
        return self._outputs if isinstance(given, Mapping) else None

    def launch(self, store: str = "") -> SlotLaunch:
        return SlotLaunch(plan=self.plan(), settings=self._settings, store=store, secret=self._secret)

    def host(
        self, slots: TaskSlots, *, store: str, restore: Restore, micro_batch: MicroBatch | None = None
    ) -> CoordinatorHost:
        """Make the coordinator of an attempt whose slots are these tasks."""
        return CoordinatorHost(
            self.launch(store),
            slots,
            replan=self._plan_at,
            explain=self._explain,
            versions=self._versions(),
            restore=restore,
            micro_batch=micro_batch,
            noticed=self._noticed,
        )


def _for_tasks(tuning: Tuning) -> Tuning:
    """Return the tuning with defaults that suit a transform. No source lingers, because Spark's records come
    in batches, and reading them waits for them."""
    check_tuning(tuning)
    usual = Tuning()
    suited: dict[str, Any] = {"heartbeat_timeout": HEARTBEAT_TIMEOUT, "linger": 0}
    return replace(
        tuning, **{name: value for name, value in suited.items() if getattr(tuning, name) == getattr(usual, name)}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded:
    """The runs of a transform over bounded input. `written` has the savepoint once it is there."""

    job: TransformJob
    restore: Restore
    savepoint_to: str | None
    lock: threading.Lock = field(default_factory=threading.Lock)
    written: list[str] = field(default_factory=list)

    def conduct(self, run: Run) -> RunEnd:
        """Run the job, and return how it ended. Nothing is raised, because the tasks wait for their verdict."""
        store = f"{STORE_OF_A_RUN}{uuid.uuid4().hex}"
        if self.savepoint_to is not None:
            store = job_address(f"{self.savepoint_to.rstrip('/')}.work-{uuid.uuid4().hex[:8]}", self.job.name)
        slots = TaskSlots(run, store=store)
        try:
            slots.start(lambda slots: self.job.host(slots, store=store, restore=self.restore))
            slots.wait()
            self._save(store)
        except Exception as error:  # noqa: BLE001
            return RunEnd(told(error), final=slots.failed_finally or not isinstance(error, JobFailed))
        finally:
            _clear(store)
        return RunEnd()

    def _save(self, store: str) -> None:
        if self.savepoint_to is None:
            return
        with self.lock:
            if self.savepoint_to in self.written:
                return
            catalog = SnapshotCatalog(open_store(store))
            export_snapshot(
                Snapshot(catalog.store, catalog.load(catalog.epochs()[-1])),
                open_store(self.savepoint_to),
                created_ms=SystemClock().now_ms(),
                graph=self.job.explain(),
                versions=self.job._versions(),
            )
            self.written.append(self.savepoint_to)


def told(error: Exception) -> str:
    """Return the text of an error that tasks get."""
    return str(error) if isinstance(error, JobFailed) else f"{type(error).__name__}: {error}"


def _clear(address: str) -> None:
    """Delete the snapshot of a run that is over."""
    if address.startswith(MEMORY):
        forget_memory_store(address.removeprefix(MEMORY))
        return
    store = open_store(address)
    if isinstance(store, LocalStore):
        folder = Path(unquote(urlsplit(store.address).path)).parent  # around the job's own
        shutil.rmtree(folder, ignore_errors=True)
        return
    for name in store.list(""):
        store.delete(name)
