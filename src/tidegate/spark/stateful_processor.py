"""`tg.transform_with_state`: Spark's own stateful processors, unchanged, on Tidegate's engine.

    counts = df.groupBy("user").transformWithState(Counts(), "user string, n long", "Append", "None")
    counts = tg.transform_with_state(df.groupBy("user"), Counts(), "user string, n long", "Append", "None",
                                     name="counts", snapshots=tg.Snapshots(to="state/"))

A micro-batch is an epoch (transform.py), and an epoch is what the grouped operator takes for a batch (dataflow/operators/
grouped.py). The processor's states, which its `init` declares, are the operator's keyed states. Why it is like this, and
what is different from Spark's: docs/adr/011.

The initial state of a streaming query can't be an input of it: Spark unites no stream with what isn't one. So it is written
to the folder of snapshots once, by a job of Spark's own when the query is built, and read in the first micro-batch.
"""

from __future__ import annotations

import copy
import inspect
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tidegate import arguments
from tidegate.dataflow.grouping import process_groups, with_event_time
from tidegate.dataflow.operators.grouped import EventTime, GroupedSpec, InitialFiles, SecondPort
from tidegate.dataflow.stream import Stream
from tidegate.errors import JobError, SchemaError
from tidegate.runtime.settings import Backend, Snapshots, Tuning
from tidegate.spark.processor_evolution import ADVICE, Evolution, check_aliases, checked_evolve
from tidegate.spark.processor_settings import ProcessorSettings, has_ntz
from tidegate.spark.transform import DEFAULT_INPUT, checked_name, transform
from tidegate.state.descriptors import Names
from tidegate.state.timers import TimeKind
from tidegate.store.base import Store
from tidegate.store.catalog import SnapshotCatalog
from tidegate.store.layout import INITIAL, initial_state_name, job_address
from tidegate.store.opening import open_store
from tidegate.types import parse_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, GroupedData, SparkSession
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor
    from pyspark.sql.types import StructType

    from tidegate.spark.processor_states import DeclaredState, RecordingHandle

INITIAL_INPUT = "initial_state"
DEFAULT_NAME = "transform_with_state"
WATERMARK_DELAY = "spark.watermarkDelayMs"  # what withWatermark leaves with its column
TIMERS = {"none": None, "processingtime": TimeKind.PROCESSING, "eventtime": TimeKind.EVENT}
OUTPUT_MODES = ("append", "update")
ROWS_IN_A_FILE = 1 << 16
SPARKS_NAMES = {
    "statefulProcessor": "processor",
    "outputStructType": "output",
    "outputMode": "output_mode",
    "timeMode": "time_mode",
    "initialState": "initial_state",
    "eventTimeColumnName": "event_time_column",
}


def transform_with_state(
    grouped: GroupedData,
    processor: StatefulProcessor | None = None,
    output: StructType | str | None = None,
    output_mode: str = "Append",
    time_mode: str = "None",
    initial_state: GroupedData | None = None,
    *,
    event_time_column: str = "",
    name: str | None = None,
    slots: int | None = None,
    snapshots: Snapshots | None = None,
    restore_from: str | None = None,
    savepoint_to: str | None = None,
    backend: Backend | None = None,
    tuning: Tuning | None = None,
    drop_state: Sequence[str] = (),
    evolve: Mapping[str, Evolution] | None = None,
    alias: Names = (),
    **by_sparks_names: Any,
) -> DataFrame:
    """`grouped.transformWithState(…)` on Tidegate: the arguments after the first are Spark's own, in its order, and the
    processor is the same. Spark's names for them (`statefulProcessor=`, `outputStructType=`, `outputMode=`, `timeMode=`,
    `initialState=`, `eventTimeColumnName=`) do, too.

        result = tg.transform_with_state(df.groupBy("user"), Counts(), "user string, n long", "Append", "None",
                                         name="counts", snapshots=tg.Snapshots(to="state/"))

    On a streaming DataFrame `name` and `snapshots` are needed; `slots`, `restore_from`, `savepoint_to`, `backend`, `tuning`
    and `drop_state` are as in `tg.transform`. The processor's states are those of the operator `name`, under the names that
    `init` gives them. For state of an earlier program `evolve` says what states and fields were called and what new fields
    begin with (`evolve={"account": tg.Evolution(…)}`), and `alias` what the operator was called.
    """
    asked = _Asked(
        grouped,
        processor,
        output,
        output_mode,
        time_mode,
        initial_state,
        event_time_column,
        name=name,
        evolve=evolve,
        alias=alias,
    )
    return _built(
        _renamed(asked, by_sparks_names),
        is_pandas=False,
        slots=slots,
        snapshots=snapshots,
        restore_from=restore_from,
        savepoint_to=savepoint_to,
        backend=backend,
        tuning=tuning,
        drop_state=arguments.names("transform_with_state", "drop_state", drop_state),
    )


def transform_with_state_in_pandas(
    grouped: GroupedData,
    processor: StatefulProcessor | None = None,
    output: StructType | str | None = None,
    output_mode: str = "Append",
    time_mode: str = "None",
    initial_state: GroupedData | None = None,
    *,
    event_time_column: str = "",
    name: str | None = None,
    slots: int | None = None,
    snapshots: Snapshots | None = None,
    restore_from: str | None = None,
    savepoint_to: str | None = None,
    backend: Backend | None = None,
    tuning: Tuning | None = None,
    drop_state: Sequence[str] = (),
    evolve: Mapping[str, Evolution] | None = None,
    alias: Names = (),
    **by_sparks_names: Any,
) -> DataFrame:
    """`grouped.transformWithStateInPandas(…)` on Tidegate: as `transform_with_state`, for a processor that takes and gives
    pandas DataFrames."""
    asked = _Asked(
        grouped,
        processor,
        output,
        output_mode,
        time_mode,
        initial_state,
        event_time_column,
        name=name,
        evolve=evolve,
        alias=alias,
    )
    return _built(
        _renamed(asked, by_sparks_names),
        is_pandas=True,
        slots=slots,
        snapshots=snapshots,
        restore_from=restore_from,
        savepoint_to=savepoint_to,
        backend=backend,
        tuning=tuning,
        drop_state=arguments.names("transform_with_state", "drop_state", drop_state),
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the user asked for."""

    grouped: Any
    processor: Any
    output: Any
    output_mode: Any
    time_mode: Any
    initial_state: Any
    event_time_column: str
    name: Any
    evolve: Any
    alias: Any


def _renamed(asked: _Asked, by_sparks_names: dict[str, Any]) -> _Asked:
    """With what was given under Spark's names."""
    unknown = set(by_sparks_names) - set(SPARKS_NAMES)
    if unknown:
        raise TypeError(f"transform_with_state has no argument {min(unknown)!r}")
    return replace(asked, **{SPARKS_NAMES[name]: given for name, given in by_sparks_names.items()})


def _built(
    asked: _Asked, *, is_pandas: bool, snapshots: Snapshots | None, drop_state: Sequence[str], **rest: Any
) -> DataFrame:
    from tidegate.spark.processor_function import FUNCTIONS

    _check_modes(asked)
    timers = TIMERS[asked.time_mode.lower()]
    data = _grouped_data(asked.grouped, "grouped")
    asked = replace(asked, name=checked_name(asked.name, streaming=data.isStreaming, default=DEFAULT_NAME))
    key = _grouping_key(asked.grouped, data, "grouped")
    returns = _output_schema(asked, data.sparkSession)
    recorded = _recorded(asked, timers)
    event_time = _event_time(data, timers) if data.isStreaming and timers is not None else None
    initial, initial_key = (None, ()) if asked.initial_state is None else _initial_grouping(asked, data, key)
    schema = pa.schema([field.with_nullable(True) for field in parse_schema(data.schema)])
    function = FUNCTIONS[is_pandas](
        asked.processor,
        recorded.declared,
        returns=returns,
        settings=ProcessorSettings.of(data.sparkSession),
        time=timers,
        key_types=[schema.field(each).type for each in key],
    )
    files = None
    if initial is not None and data.isStreaming and snapshots is not None:
        files = _initial_files(initial, initial_key, snapshots, asked.name)
    second = None if event_time is None else SecondPort.LATEST
    if initial is not None and not data.isStreaming:
        second = SecondPort.INITIAL
    spec = GroupedSpec(
        function,
        key,
        timers=timers,
        event_time=event_time,
        second=second,
        initial_key=initial_key,
        initial=files,
        is_bounded=not data.isStreaming,
        advice=ADVICE,
    )

    def pipeline(**inputs: Stream) -> Stream:
        stream = inputs[DEFAULT_INPUT]
        if second is SecondPort.LATEST:
            return with_event_time(stream, asked.name, spec, returns, alias=asked.alias)
        initial_rows = inputs[INITIAL_INPUT].key_by(*initial_key) if second is SecondPort.INITIAL else None
        return process_groups(stream.key_by(*key), asked.name, spec, returns, second=initial_rows, alias=asked.alias)

    frames = {DEFAULT_INPUT: data}
    if initial is not None and second is SecondPort.INITIAL:
        frames[INITIAL_INPUT] = initial
    result = transform(
        frames,
        lambda *streams, **named: pipeline(**dict(zip(frames, streams, strict=False)), **named),
        name=asked.name,
        snapshots=snapshots,
        drop_state=[*drop_state, *(f"{asked.name}.{state}" for state in sorted(recorded.deleted))],
        **rest,
    )
    return _with_event_time(result, asked, event_time)


# ------------------------------------------------------------------------------------------------- what is asked for


def _check_modes(asked: _Asked) -> None:
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    if isinstance(asked.processor, type) or not isinstance(asked.processor, StatefulProcessor):
        raise JobError(
            f"the processor is {asked.processor!r}: give an instance of a subclass of "
            f"pyspark.sql.streaming.StatefulProcessor"
        )
    for method in ("init", "close", "handleInitialState"):
        if inspect.isgeneratorfunction(getattr(asked.processor, method)):
            raise JobError(
                f"{type(asked.processor).__name__}.{method} is a generator, which is called for what it does and "
                f"not for rows: nothing of it would run. Remove its yield; rows come from handleInputRows and "
                f"handleExpiredTimer"
            )
    if not isinstance(asked.output_mode, str) or asked.output_mode.lower() not in OUTPUT_MODES:
        raise JobError(
            f"outputMode={asked.output_mode!r}: what a processor yields is what is written, once; give 'Append' "
            f"or 'Update', which mean the same here"
        )
    if not isinstance(asked.time_mode, str) or asked.time_mode.lower() not in TIMERS:
        raise JobError(f"timeMode={asked.time_mode!r}: give 'None', 'ProcessingTime' or 'EventTime'")


def _grouped_data(grouped: Any, what: str) -> DataFrame:
    from pyspark.sql.group import GroupedData

    if not isinstance(grouped, GroupedData):
        raise JobError(
            f"{what} is {type(grouped).__name__}: give what df.groupBy(…) gives, of a session in this process "
            f"(not of Spark Connect)"
        )
    data: DataFrame = grouped._df
    return data


def _grouping_key(grouped: GroupedData, data: DataFrame, what: str) -> tuple[str, ...]:
    """By which of the DataFrame's columns it was grouped."""
    found: list[str] = []
    for name in grouped.count().columns[:-1]:
        same = [column for column in data.columns if column == name] or [
            column for column in data.columns if column.lower() == name.lower()
        ]
        if len(same) != 1:
            raise JobError(
                f"{what} is grouped by {name!r}, which is not one of its columns ({', '.join(data.columns)}): "
                f"make the expression a column first, with df.withColumn(…), and group by that"
            )
        found += same
    if not found:
        raise JobError(f"{what} is grouped by no column: give df.groupBy(…) at least one, since state is kept for each key")
    return tuple(found)


def _output_schema(asked: _Asked, spark: SparkSession) -> pa.Schema:
    output = asked.output
    try:
        schema = parse_schema(output)
        if isinstance(output, str) and has_ntz(spark):
            schema = parse_schema(spark._parse_ddl(output))
    except SchemaError as error:
        raise SchemaError(f"outputStructType: {error}") from error
    if not len(schema):
        raise SchemaError(
            "outputStructType has no columns: give those of the rows that the processor yields, such as "
            "'user string, n long'"
        )
    return pa.schema([field.with_nullable(True) for field in schema])


def _recorded(asked: _Asked, timers: TimeKind | None) -> RecordingHandle:
    """What the processor's `init` declares. It runs on a copy: what it sets there shall not travel to the slots."""
    from tidegate.spark.processor_states import RecordingHandle

    handle = RecordingHandle(timers)
    processor = copy.copy(asked.processor)
    processor.init(handle)
    handle.end_init()
    processor.close()
    for name, evolution in checked_evolve(asked.evolve, declared=handle.declared, operator=asked.name).items():
        handle.declared[name] = replace(handle.declared[name], evolution=evolution)
    check_aliases({name: _evolving(declared) for name, declared in handle.declared.items()})
    return handle


def _evolving(declared: DeclaredState) -> tuple[str, ...]:
    """The names that a state had; or why they and its changed fields can't be."""
    try:
        return declared.descriptor().aliases
    except JobError as error:
        raise JobError(f"evolve={{{declared.name!r}: …}}: {error}") from error


def _event_time(data: DataFrame, timers: TimeKind) -> EventTime | None:
    """What the input's withWatermark says."""
    found = [field for field in data.schema.fields if WATERMARK_DELAY in (field.metadata or {})]
    if len(found) > 1:
        raise JobError(
            f"the input has several event times ({', '.join(field.name for field in found)}): use withWatermark "
            f"on one column"
        )
    if not found:
        if timers is TimeKind.EVENT:
            raise JobError(
                "timeMode='EventTime' needs a watermark: use df.withWatermark(column, delay) before groupBy, and "
                "leave the column among those of the input"
            )
        return None
    return EventTime(
        found[0].name,
        int(found[0].metadata[WATERMARK_DELAY]),
        drops_late=timers is TimeKind.EVENT,
        is_of_query=_has_several_watermarks(data),
    )


def _has_several_watermarks(data: DataFrame) -> bool:
    """Those of streams that were united or joined, each with its column and delay. Spark follows them all, and takes the
    slowest or the fastest."""
    plan: str = data._jdf.queryExecution().analyzed().treeString()
    return len(re.findall(r"(?m)^\W*EventTimeWatermark\b", plan)) > 1


def _with_event_time(result: DataFrame, asked: _Asked, event_time: EventTime | None) -> DataFrame:
    """What follows may go by a column of the output's. It is marked as withWatermark would mark it, which Spark allows once
    in a query: the watermark is that of the input."""
    column = asked.event_time_column
    if not column:
        return result
    if column not in result.columns:
        raise JobError(f"eventTimeColumnName={column!r} is none of the output's columns: {', '.join(result.columns)}")
    return result if event_time is None else result.withMetadata(column, {WATERMARK_DELAY: event_time.delay_ms})


# ---------------------------------------------------------------------------------------------------- initial state


def _initial_grouping(asked: _Asked, data: DataFrame, key: tuple[str, ...]) -> tuple[DataFrame, tuple[str, ...]]:
    initial = _grouped_data(asked.initial_state, "initialState")
    initial_key = _grouping_key(asked.initial_state, initial, "initialState")
    if initial.isStreaming:
        raise JobError(
            "initialState is a streaming DataFrame: give one that isn't, since all of it is read in the first micro-batch"
        )
    types = [
        [frame.schema[each].dataType.simpleString() for each in columns]
        for frame, columns in ((data, key), (initial, initial_key))
    ]
    if types[0] != types[1]:
        raise JobError(
            f"the input is grouped by ({', '.join(key)}) of the types {', '.join(types[0])}, and initialState by "
            f"({', '.join(initial_key)}) of {', '.join(types[1])}: group both by keys of the same types"
        )
    return initial, initial_key


def _initial_files(initial: DataFrame, key: tuple[str, ...], snapshots: Snapshots, job: str) -> InitialFiles | None:
    """None where the first micro-batch is over for good: its successor has a snapshot. Then nobody needs the files that
    earlier starts wrote."""
    store = open_store(job_address(snapshots.to, job))
    numbers = [each.micro_batch.number for each in SnapshotCatalog(store).manifests() if each.micro_batch is not None]
    if max(numbers, default=0) > 0:
        for name in store.list(INITIAL):
            store.delete(name)
        return None
    write = _writer(store.address, uuid.uuid4().hex)
    names = [row.name for row in initial.mapInArrow(write, "name string").collect()]
    schema = pa.schema([field.with_nullable(True) for field in parse_schema(initial.schema)])
    return InitialFiles(store.address, tuple(names), schema, key)


def _writer(address: str, folder: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A function that writes the rows of a partition, and gives the names of its files."""

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        store = open_store(address)
        held: list[pa.RecordBatch] = []
        for batch in batches:
            held.append(batch)
            if sum(each.num_rows for each in held) >= ROWS_IN_A_FILE:
                yield _written(store, folder, held)
                held = []
        if held:
            yield _written(store, folder, held)

    return write


def _written(store: Store, folder: str, batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    name = initial_state_name(folder, uuid.uuid4().hex)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
    store.write(name, [memoryview(sink.getvalue())])
    return pa.record_batch([pa.array([name])], names=["name"])
