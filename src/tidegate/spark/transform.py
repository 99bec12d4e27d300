"""`tg.transform`: a Tidegate pipeline between Spark DataFrames.

The plan that Spark sees, for S slots:

    inputs ─► tagged, as one DataFrame ─► observed ─► exchange into S partitions ─► mapInArrow, gang-scheduled: the slots
           ─► exchange by slot ─► one filter and projection for each output

Spark can't leave an observed DataFrame out of a plan, so a micro-batch without data runs its slots, too. The exchange before
the slots gives each slot whole partitions of the inputs, in their order. The exchange after them lets anything follow that
Spark allows (a gang-scheduled stage must keep its number of partitions, so it can't contain a `limit`, `coalesce` or
`union`). It also makes Spark try the slots' stage again when a task is lost; otherwise Spark would give up.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, overload

import pyarrow as pa

from tidegate import arguments
from tidegate.connectors.handover import SLOT, TICK, WHICH, columns_of
from tidegate.control.listening import Listening
from tidegate.control.messages import Offer
from tidegate.control.no_event_time import check_windows
from tidegate.control.settings import Backend, Snapshots, Tuning, check_snapshots
from tidegate.dataflow.stream import Stream
from tidegate.dataframes.gathering import Gathering, Run, RunEnd
from tidegate.dataframes.guest import Invitation, run_task
from tidegate.dataframes.micro_batches import MicroBatches
from tidegate.dataframes.queries import StoreHolders, twice_in_a_query
from tidegate.dataframes.transforming import Bounded, TransformJob
from tidegate.driver.attempts import Restore
from tidegate.errors import JobError, JobFailed, TidegateError
from tidegate.protocol.alignment import AlignmentMode
from tidegate.snapshots.finding import find_snapshot, resolved
from tidegate.snapshots.savepoints import check_empty
from tidegate.spark.alarm import alarm_of
from tidegate.spark.deploy import check_task_slots, placed
from tidegate.spark.forgetting import forget_when
from tidegate.spark.interpreters import SlotTask, guarded
from tidegate.spark.processes import in_own_processes, unreferenced
from tidegate.spark.processor_settings import has_ntz
from tidegate.spark.queries import SparkQueries, abandon_stage, transforms_in
from tidegate.spark.unused_batches import unwatch, watch
from tidegate.store.layout import job_address, shown
from tidegate.store.opening import open_store
from tidegate.store.writable import check_writable
from tidegate.types import ddl_of, parse_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

DEFAULT_INPUT = "input"
DEFAULT_NAME = "transform"
MIN_RETAINED = 2
OBSERVED_ROWS = "rows"
HIDE_TRACEBACK = "SPARK_HIDE_TRACEBACK"
# Set by Spark for the tasks of a micro-batch.
QUERY_PROPERTY, BATCH_PROPERTY = "sql.streaming.queryId", "streaming.sql.batchId"

_gatherings: dict[Listening, Gathering] = {}
_holders = StoreHolders()
_gatherings_lock = threading.Lock()


@overload
def transform(
    data: DataFrame | Mapping[str, DataFrame],
    pipeline: Callable[..., Stream],
    *,
    name: str | None = ...,
    slots: int | None = ...,
    snapshots: Snapshots | None = ...,
    restore_from: str | None = ...,
    savepoint_to: str | None = ...,
    drain: bool | None = ...,
    backend: Backend | None = ...,
    tuning: Tuning | None = ...,
    drop_state: Sequence[str] = ...,
) -> DataFrame: ...


@overload
def transform(
    data: DataFrame | Mapping[str, DataFrame],
    pipeline: Callable[..., Mapping[str, Stream]],
    *,
    name: str | None = ...,
    slots: int | None = ...,
    snapshots: Snapshots | None = ...,
    restore_from: str | None = ...,
    savepoint_to: str | None = ...,
    drain: bool | None = ...,
    backend: Backend | None = ...,
    tuning: Tuning | None = ...,
    drop_state: Sequence[str] = ...,
) -> Outputs: ...


def transform(
    data: DataFrame | Mapping[str, DataFrame],
    pipeline: Callable[..., Any],
    *,
    name: str | None = None,
    slots: int | None = None,
    snapshots: Snapshots | None = None,
    restore_from: str | None = None,
    savepoint_to: str | None = None,
    drain: bool | None = None,
    backend: Backend | None = None,
    tuning: Tuning | None = None,
    drop_state: Sequence[str] = (),
) -> DataFrame | Outputs:
    """Return the DataFrame, or several by name, that a pipeline makes of one or several. Nothing runs until an action needs
    a result.

        def pipeline(bids):
            return bids.key_by("auction").process("count", CountBids(), returns="auction long, n long")

        counts = tg.transform(bids, pipeline)

    `pipeline` gets a stream for each DataFrame, by name if there are several (`tg.transform({"bids": bids, "rules": rules},
    pipeline)` calls `pipeline(bids=…, rules=…)`), and returns a stream or a dict of them. Every action runs the pipeline
    again: cache a result that is used twice, as with any DataFrame.

    A streaming transform needs a `name`, under which its state is stored in `snapshots`: each transform of a program has a
    different name, which is the same at every start.

    `slots` tasks run at the same time, by default as many as the session has. `restore_from` is a savepoint (or another
    folder that `tg.Job` accepts) to begin with, `savepoint_to` a folder for the state at the end. With `drain`, event time
    ends with the input, so that all timers of event time fire; this is the default if no savepoint is taken.
    """
    inputs = _checked_inputs(data)
    spark = next(iter(inputs.values())).sparkSession
    streaming = any(frame.isStreaming for frame in inputs.values())
    _check_arguments(pipeline, restore_from=restore_from, savepoint_to=savepoint_to, drain=drain)
    own = _checked_snapshots(snapshots, savepoint_to=savepoint_to, drain=drain) if streaming else _no_snapshots(snapshots)
    job = _SparkTransformJob(
        checked_name(name, streaming=streaming),
        {each: stream_schema(frame) for each, frame in inputs.items()},
        slots=spark.sparkContext.defaultParallelism if slots is None else slots,
        tuning=tuning,
        backend=backend,
        drop_state=drop_state,
        writes_state=streaming or savepoint_to is not None,
        drains=savepoint_to is None if drain is None else drain,
        snapshots=own,
    )
    job.place(spark)
    outputs = job.take_outputs(pipeline(*job.inputs.values()) if set(inputs) == {DEFAULT_INPUT} else pipeline(**job.inputs))
    check_task_slots(spark, job.slots)
    restore = Restore(path=None if restore_from is None else resolved(restore_from))
    launch = job.launch()
    payload = launch.packed()  # this may fail, and nothing has to be undone yet
    conducted = (
        _streaming(spark, job, inputs, restore, own)
        if streaming
        else _bounded(spark, job, restore, savepoint_to=savepoint_to)
    )
    given = _handed(spark, job, inputs, conducted, payload, launch.settings.tuning)
    if outputs is None:
        return _only(given, 0, job.handover.output_columns[0])
    return Outputs(given, dict(zip(outputs, job.handover.output_columns, strict=True)))


@dataclass(frozen=True, slots=True)
class _Conducted:
    """How the runs of a transform are conducted. `ticks` are rows that belong to no input, so that there are tasks even if
    the inputs have no rows; `forget` is called when nothing can use them any more."""

    transform: str
    conduct: Callable[[Run], RunEnd]
    ticks: DataFrame | None
    forget: Callable[[], None]
    tenant: MicroBatches | None = None
    observed_as: str | None = None


def _streaming(
    spark: SparkSession, job: _SparkTransformJob, inputs: Mapping[str, DataFrame], restore: Restore, snapshots: Snapshots
) -> _Conducted:
    transform_id = uuid.uuid4().hex
    observed = _observed_in(inputs, job.name, shown(snapshots.to))
    observed_as = f"{observed}{transform_id[:8]}"
    plan = job.plan()
    check_windows(plan)
    store = open_store(job_address(snapshots.to, job.name))
    check_writable(store)
    alarm = alarm_of(plan, store, restore, spark)
    tenant = MicroBatches(
        job,
        transform=transform_id,
        store=store.address,
        restore=restore,
        queries=SparkQueries(spark),
        holders=_holders,
        set_alarm=alarm.set_alarm,
        observed_as=observed,
    )
    return _Conducted(transform_id, tenant.conduct, alarm.stream, alarm.forget, tenant, observed_as)


def _bounded(spark: SparkSession, job: _SparkTransformJob, restore: Restore, *, savepoint_to: str | None) -> _Conducted:
    if restore.path is not None:
        find_snapshot(restore.path)
    # Spark starts no tasks for a DataFrame that it knows to be empty. A row for each slot prevents that.
    ticks = spark.range(0, job.slots, 1, job.slots)
    if savepoint_to is not None:
        check_empty(open_store(savepoint_to := resolved(savepoint_to)))
    bounded = Bounded(job=job, restore=restore, savepoint_to=savepoint_to)
    return _Conducted(uuid.uuid4().hex, bounded.conduct, ticks, lambda: None)


def _handed(
    spark: SparkSession,
    job: _SparkTransformJob,
    inputs: Mapping[str, DataFrame],
    conducted: _Conducted,
    payload: bytes,
    tuning: Tuning,
) -> DataFrame:
    """Return what the slots hand to Spark, all outputs as one DataFrame. If that fails, nothing of the transform remains."""
    slots, transform_id, tenant, observed_as = job.slots, conducted.transform, conducted.tenant, conducted.observed_as
    gathering = _gathering_at(tuning.coordinator_listening)
    invitation = Invitation(payload, gathering.address, gathering.identity.secret)
    with contextlib.ExitStack() as undo:
        undo.callback(conducted.forget)
        together = _together(inputs, conducted.ticks, slots, observed_as=observed_as)
        task, schema = guarded(_task(invitation, transform_id, slots)), _spark_schema(spark, job.handover.output_schema)
        handed = in_own_processes(spark, tenant, slots, lambda: together.mapInArrow(task, schema, barrier=True))
        forget_when(
            unreferenced(spark, handed),
            undo.pop_all().close,
            functools.partial(gathering.remove, transform_id),
            functools.partial(unwatch, observed_as or ""),
        )
    gathering.add(
        transform_id,
        slots,
        conducted.conduct,
        patience_s=tuning.deploy_timeout_ms / 1000,
        abandon=functools.partial(abandon_stage, spark),
        begun=(lambda: None) if tenant is None else tenant.begin,
    )
    if tenant is not None and observed_as is not None:
        watch(spark, observed_as, job.name, lambda: tenant.done)
    # By slot and not by task: Spark may run tasks of the next stage again when the slots have moved to other tasks.
    return handed.repartitionById(slots, SLOT)


class Outputs(dict[str, "DataFrame"]):
    """The DataFrames of a pipeline with several outputs, by name. Each action on one of them runs the pipeline; after
    `persist()` they share the results of one run.

    A streaming query has one DataFrame: use `together` with `writeStream.foreachBatch`, and `split(batch)` there for the
    outputs of the batch.
    """

    def __init__(self, given: DataFrame, columns: Mapping[str, Sequence[str]]) -> None:
        self._columns = dict(columns)
        self.together = given
        super().__init__(self.split(given))

    def split(self, together: DataFrame) -> dict[str, DataFrame]:
        """Return the outputs by name, of `together` or of a micro-batch of it."""
        return {name: _only(together, index, columns) for index, (name, columns) in enumerate(self._columns.items())}

    def persist(self) -> Outputs:
        """Persist the results of one run, for all outputs."""
        self.together.persist()
        return self

    def unpersist(self) -> Outputs:
        """Release what `persist` has stored."""
        self.together.unpersist()
        return self


class _SparkTransformJob(TransformJob):
    def place(self, spark: SparkSession) -> None:
        self._settings = replace(self._settings, tuning=placed(self._settings.tuning, spark))

    def _versions(self) -> dict[str, str]:
        import pyspark

        return {**super()._versions(), "spark": pyspark.__version__}


def _check_arguments(pipeline: object, *, restore_from: str | None, savepoint_to: str | None, drain: bool | None) -> None:
    arguments.function("transform", "pipeline", pipeline, "a function of the streams, such as pipeline(bids)")
    if restore_from is not None:
        arguments.text("transform", "restore_from", restore_from, "the folder of a savepoint or of snapshots")
    if savepoint_to is not None:
        arguments.text("transform", "savepoint_to", savepoint_to, "the folder for the savepoint")
    if drain is not None:
        arguments.flag("transform", "drain", drain)


def _checked_inputs(data: object) -> dict[str, DataFrame]:
    from pyspark.sql.classic.dataframe import DataFrame

    if not isinstance(data, Mapping):
        data = {DEFAULT_INPUT: data}
    if not data:
        raise JobError("a transform needs a DataFrame: give one, or a dict of them by name")
    for name, frame in data.items():
        if not isinstance(frame, DataFrame):
            raise JobError(
                f"a transform takes DataFrames of a session in this process (not of Spark Connect), or a dict of "
                f"them by name, and {name!r} is {type(frame).__name__}"
            )
        if frame.isStreaming is not next(iter(data.values())).isStreaming:
            raise JobError(
                f"a transform takes streaming DataFrames or batch ones, not both, and {name!r} is "
                f"{'a streaming' if frame.isStreaming else 'a batch'} one: read it with "
                f"{'read' if frame.isStreaming else 'readStream'}, or join it in Spark before"
            )
        if not isinstance(name, str) or not name.isidentifier():
            raise JobError(
                f"the DataFrame {name!r}: the pipeline gets its stream under that name, as an argument; choose a "
                f"name that can be one"
            )
    return dict(data)


def stream_schema(frame: DataFrame) -> pa.Schema:
    """Return the schema with every column nullable: whether Spark marks a column NOT NULL isn't up to the user."""
    return pa.schema([field.with_nullable(True) for field in parse_schema(frame.schema)])


def _spark_schema(spark: SparkSession, schema: pa.Schema) -> str | StructType:
    """Return the schema for Spark: as a text, unless the session reads 'timestamp' in texts as one without a time zone."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(schema, prefer_timestamp_ntz=True) if has_ntz(spark) else ddl_of(schema)


def _gathering_at(listening: Listening) -> Gathering:
    """Return the gathering that all transforms of this process with these addresses share."""
    with _gatherings_lock:
        if listening not in _gatherings:
            _gatherings[listening] = Gathering(listening)
            atexit.register(_gatherings[listening].close)
        return _gatherings[listening]


def checked_name(name: str | None, *, streaming: bool, default: str = DEFAULT_NAME) -> str:
    if name is None and streaming:
        raise JobError(
            "a transform of a streaming DataFrame keeps its state under a name: give name=…, another one for "
            "each transform, and the same at every start of the query"
        )
    return default if name is None else name


def _no_snapshots(snapshots: Snapshots | None) -> Snapshots:
    """Return the settings of a transform of batch DataFrames, which takes no snapshots."""
    if snapshots is not None:
        raise JobError(
            "snapshots= is for streaming DataFrames: a batch that fails runs again from its beginning. To keep the "
            "state at its end, give savepoint_to="
        )
    return Snapshots(to="memory://transform", every=None)


def _checked_snapshots(snapshots: Snapshots | None, *, savepoint_to: str | None, drain: bool | None) -> Snapshots:
    """Return the settings of a streaming transform, with which each micro-batch takes one snapshot."""
    if snapshots is None:
        raise JobError(
            "a transform of a streaming DataFrame keeps its state in snapshots, one for each micro-batch: give "
            "snapshots=tg.Snapshots(to=…), a folder that belongs to the query as its checkpointLocation does"
        )
    check_snapshots(snapshots)
    if savepoint_to is not None or drain is not None:
        raise JobError(
            "savepoint_to= and drain= are for batch DataFrames: a streaming query has no end. To take its state "
            "elsewhere, stop it and give its folder of snapshots as restore_from="
        )
    if snapshots.alignment_mode is not AlignmentMode.EXACTLY_ONCE or snapshots.logs_in_flight or snapshots.halts_sources:
        raise JobError(
            "a micro-batch ends when all its records have been processed, so its snapshots are aligned: omit "
            "mode and alignment_timeout"
        )
    if snapshots.retain < MIN_RETAINED:
        raise JobError(
            f"Snapshots(retain={snapshots.retain}): a query needs the snapshots of its last two micro-batches, "
            f"since Spark may run the last one again: retain={MIN_RETAINED} or more"
        )
    return replace(snapshots, every=None)


def _observed_in(inputs: Mapping[str, DataFrame], name: str, folder: str) -> str:
    """Return the beginning of the name under which rows are observed. The name ends with the transform's id. Without the id,
    Spark would refuse two transforms of one name and folder in a query with an error of its own. If one is in the other's
    input, this refuses it; otherwise the query's first batch does."""
    observed = f"tidegate {name} in {folder}, transform "
    for frame in inputs.values():
        plan: Any = frame._jdf
        if transforms_in(plan.queryExecution().analyzed().toString(), observed):
            raise JobError(twice_in_a_query(name, folder))
    return observed


def _together(inputs: Mapping[str, DataFrame], ticks: DataFrame | None, slots: int, *, observed_as: str | None) -> DataFrame:
    """Return all inputs, and the `ticks`, as one DataFrame with one partition for each slot."""
    from pyspark.sql import functions

    names = [columns_of(index, len(frame.columns)) for index, frame in enumerate(inputs.values())]
    absent = [[functions.lit(None).cast(field.dataType) for field in frame.schema] for frame in inputs.values()]

    def tagged(frame: DataFrame, which: int) -> DataFrame:
        columns = [
            functions.col(name) if index == which else nothing.alias(name)
            for index in range(len(names))
            for name, nothing in zip(names[index], absent[index], strict=True)
        ]
        # The inputs begin at different slots, so that several with one partition each don't all go to the first.
        slot = (functions.spark_partition_id() + max(which, 0)) % slots
        renamed = frame if which == TICK else frame.toDF(*names[which])
        return renamed.select(functions.lit(which).alias(WHICH), slot.alias(SLOT), *columns)

    frames = [tagged(frame, which) for which, frame in enumerate(inputs.values())]
    if ticks is not None:
        frames.append(tagged(ticks, TICK))
    together = functools.reduce(lambda one, other: one.union(other), frames)
    if observed_as is not None:
        # In a micro-batch without data Spark makes each source an empty relation and leaves out operators that would only
        # pass on its rows: the exchange, and with it all slots. It can't leave out an observed DataFrame.
        together = together.observe(observed_as, functions.count_if(together[WHICH] != TICK).alias(OBSERVED_ROWS))
    # Nothing may stand between this exchange and the slots. In a batch without rows, adaptive execution leaves out whatever
    # follows an exchange, up to a Python function: with a projection there, not even the tasks would be started.
    return together.repartitionById(slots, SLOT)


def _only(given: DataFrame, index: int, names: Sequence[str]) -> DataFrame:
    """Return one of the outputs, with its own names."""
    return given.where(given[WHICH] == index).select(columns_of(index, len(names))).toDF(*names)


def _task(invitation: Invitation, transform: str, slots: int) -> SlotTask:
    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        together = len(context.getTaskInfos())
        if together < slots:
            # Spark has kept the output of the others from an earlier try. When this one fails, it starts all of them.
            raise TidegateError(f"Spark has started {together} of {slots} slots, which work only together: all are needed")
        batch = context.getLocalProperty(BATCH_PROPERTY)
        offer = Offer(
            transform,
            context.stageId(),
            context.partitionId(),
            context.taskAttemptId(),
            context.getLocalProperty(QUERY_PROPERTY),
            None if batch is None else int(batch),
        )
        try:
            yield from run_task(invitation, offer, batches)
        except JobFailed:
            # The message says what went wrong, and where, so Spark shows it without our frames. The process ends with it.
            os.environ[HIDE_TRACEBACK] = "1"
            raise

    return task
