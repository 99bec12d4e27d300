"""`tg.transform_with_state`: Spark's own stateful processors, unchanged, on Tidegate's engine.

    counts = df.groupBy("user").transformWithState(Counts(), "user string, n long", "Append", "None")
    counts = tg.transform_with_state(df.groupBy("user"), Counts(), "user string, n long", "Append", "None",
                                     name="counts", snapshots=tg.Snapshots(to="state/"))

A micro-batch is an epoch (transform.py), and the grouped operator handles an epoch at once (dataflow/operators/grouped.py).
The processor's states, which its `init` declares, are the operator's keyed states. docs/adr/011 gives the reasons, and what
differs from Spark.

The initial state of a streaming query can't be an input of the query: Spark doesn't unite a streaming DataFrame with one
that isn't. So a Spark job writes it to the folder of snapshots once, when the query is built, and the first micro-batch
reads it.
"""

from __future__ import annotations

import copy
import inspect
import re
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tidegate import arguments
from tidegate.control.settings import Backend, Snapshots, Tuning
from tidegate.dataflow.grouping import process_groups, with_event_time
from tidegate.dataflow.operators.grouped import EventTime, GroupedSpec, InitialFile, InitialFiles, SecondPort
from tidegate.dataflow.stream import Stream
from tidegate.errors import JobError, SchemaError
from tidegate.snapshots.catalog import SnapshotCatalog
from tidegate.spark.processor_evolution import ADVICE, Evolution, check_aliases, checked_evolve
from tidegate.spark.processor_settings import ProcessorSettings, has_ntz
from tidegate.spark.transform import DEFAULT_INPUT, checked_name, stream_schema, transform
from tidegate.state.descriptors import Names
from tidegate.state.timers import TimeKind
from tidegate.store.base import Store
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
WATERMARK_DELAY = "spark.watermarkDelayMs"  # withWatermark sets it in its column's metadata
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
    """`grouped.transformWithState(…)` on Tidegate, with the same processor. The arguments after the first are Spark's, in
    the same order. They may also be given under Spark's names (`statefulProcessor=`, `outputStructType=`, `outputMode=`,
    `timeMode=`, `initialState=`, `eventTimeColumnName=`).

        result = tg.transform_with_state(df.groupBy("user"), Counts(), "user string, n long", "Append", "None",
                                         name="counts", snapshots=tg.Snapshots(to="state/"))

    A streaming DataFrame needs `name` and `snapshots`; `slots`, `restore_from`, `savepoint_to`, `backend`, `tuning` and
    `drop_state` are as in `tg.transform`. The processor's states belong to the operator `name`, under the names that `init`
    gives them. If an earlier program wrote the state, `evolve` gives the earlier names of states and fields and the defaults
    of new fields (`evolve={"account": tg.Evolution(…)}`), and `alias` the earlier name of the operator.
    """
    return _built(_asked(locals()), is_pandas=False)


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
    """`grouped.transformWithStateInPandas(…)` on Tidegate: `transform_with_state` for a processor that takes and yields
    pandas DataFrames."""
    return _built(_asked(locals()), is_pandas=True)


def _asked(given: dict[str, Any]) -> SimpleNamespace:
    """Return the arguments of a call, all under Tidegate's names."""
    by_sparks_names = given.pop("by_sparks_names")
    unknown = set(by_sparks_names) - set(SPARKS_NAMES)
    if unknown:
        raise TypeError(f"transform_with_state has no argument {min(unknown)!r}")
    return SimpleNamespace(**{**given, **{SPARKS_NAMES[name]: value for name, value in by_sparks_names.items()}})


def _built(asked: SimpleNamespace, *, is_pandas: bool) -> DataFrame:
    from tidegate.spark.processor_function import FUNCTIONS

    drop_state = arguments.names("transform_with_state", "drop_state", asked.drop_state)
    _check_modes(asked)
    timers = TIMERS[asked.time_mode.lower()]
    data = _grouped_data(asked.grouped, "grouped")
    asked.name = checked_name(asked.name, streaming=data.isStreaming, default=DEFAULT_NAME)
    key = _grouping_key(asked.grouped, data, "grouped")
    returns = _output_schema(asked.output, data.sparkSession)
    recorded = _recorded(asked, timers)
    event_time = _event_time(data, timers) if data.isStreaming and timers is not None else None
    initial, initial_key = (None, ()) if asked.initial_state is None else _initial_grouping(asked.initial_state, data, key)
    schema = stream_schema(data)
    files, second = None, None if event_time is None else SecondPort.LATEST
    frames = {DEFAULT_INPUT: data}
    if initial is not None and not data.isStreaming:
        second = SecondPort.INITIAL
        frames[INITIAL_INPUT] = initial
    elif initial is not None and asked.snapshots is not None:
        files = _initial_files(initial, initial_key, asked.snapshots, asked.name)
    spec = GroupedSpec(
        FUNCTIONS[is_pandas](
            asked.processor,
            recorded.declared,
            returns=returns,
            settings=ProcessorSettings.of(data.sparkSession),
            time=timers,
            key_types=[schema.field(each).type for each in key],
        ),
        key,
        timers=timers,
        event_time=event_time,
        second=second,
        initial_key=initial_key,
        initial=files,
        is_bounded=not data.isStreaming,
        advice=ADVICE,
    )

    def pipeline(input: Stream, initial_state: Stream | None = None) -> Stream:
        if second is SecondPort.LATEST:
            return with_event_time(input, asked.name, spec, returns, alias=asked.alias)
        rows = None if initial_state is None else initial_state.key_by(*initial_key)
        return process_groups(input.key_by(*key), asked.name, spec, returns, second=rows, alias=asked.alias)

    result = transform(
        frames,
        pipeline,
        name=asked.name,
        slots=asked.slots,
        snapshots=asked.snapshots,
        restore_from=asked.restore_from,
        savepoint_to=asked.savepoint_to,
        backend=asked.backend,
        tuning=asked.tuning,
        drop_state=[*drop_state, *(f"{asked.name}.{state}" for state in sorted(recorded.deleted))],
    )
    return _with_event_time(result, asked.event_time_column, event_time)


# --------------------------------------------------------------------------------------------------------- arguments


def _check_modes(asked: SimpleNamespace) -> None:
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    if isinstance(asked.processor, type) or not isinstance(asked.processor, StatefulProcessor):
        raise JobError(
            f"the processor is {asked.processor!r}: give an instance of a subclass of "
            f"pyspark.sql.streaming.StatefulProcessor"
        )
    for method in ("init", "close", "handleInitialState"):
        if inspect.isgeneratorfunction(getattr(asked.processor, method)):
            raise JobError(
                f"{type(asked.processor).__name__}.{method} is a generator, and nobody iterates over what it returns, so "
                f"its code would never run. Remove its yield; yield rows in handleInputRows and handleExpiredTimer"
            )
    if not isinstance(asked.output_mode, str) or asked.output_mode.lower() not in OUTPUT_MODES:
        raise JobError(
            f"outputMode={asked.output_mode!r}: a processor's rows are written once, as it yields them; give 'Append' "
            f"or 'Update', which mean the same here"
        )
    if not isinstance(asked.time_mode, str) or asked.time_mode.lower() not in TIMERS:
        raise JobError(f"timeMode={asked.time_mode!r}: give 'None', 'ProcessingTime' or 'EventTime'")


def _grouped_data(grouped: Any, what: str) -> DataFrame:
    from pyspark.sql.group import GroupedData

    if not isinstance(grouped, GroupedData):
        raise JobError(
            f"{what} is {type(grouped).__name__}: give what df.groupBy(…) returns, of a session in this process "
            f"(not of Spark Connect)"
        )
    data: DataFrame = grouped._df
    return data


def _grouping_key(grouped: GroupedData, data: DataFrame, what: str) -> tuple[str, ...]:
    """Return the columns of the DataFrame by which it was grouped."""
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


def _output_schema(output: Any, spark: SparkSession) -> pa.Schema:
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


def _recorded(asked: SimpleNamespace, timers: TimeKind | None) -> RecordingHandle:
    """Return what the processor's `init` declares. It runs on a copy: what `init` sets must not travel to the slots."""
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
    """Return the earlier names of a state."""
    try:
        return declared.descriptor().aliases
    except JobError as error:
        raise JobError(f"evolve={{{declared.name!r}: …}}: {error}") from error


def _event_time(data: DataFrame, timers: TimeKind) -> EventTime | None:
    """Return the event time that withWatermark set on the input."""
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
        # United or joined streams have a watermark each. Spark tracks all of them, and takes the slowest or the fastest.
        is_of_query=len(re.findall(r"(?m)^\W*EventTimeWatermark\b", data._jdf.queryExecution().analyzed().treeString())) > 1,
    )


def _with_event_time(result: DataFrame, column: str, event_time: EventTime | None) -> DataFrame:
    """Return the result with `column` marked as the event time for the operators that follow. Spark allows withWatermark
    once in a query, so the mark is made without it, and the watermark is that of the input."""
    if not column:
        return result
    if column not in result.columns:
        raise JobError(f"eventTimeColumnName={column!r} is none of the output's columns: {', '.join(result.columns)}")
    return result if event_time is None else result.withMetadata(column, {WATERMARK_DELAY: event_time.delay_ms})


# ---------------------------------------------------------------------------------------------------- initial state


def _initial_grouping(grouped: Any, data: DataFrame, key: tuple[str, ...]) -> tuple[DataFrame, tuple[str, ...]]:
    initial = _grouped_data(grouped, "initialState")
    initial_key = _grouping_key(grouped, initial, "initialState")
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
    """Write the initial state. If the second micro-batch has a snapshot, the first one never runs again: then return None,
    and delete the files that earlier starts wrote."""
    store = open_store(job_address(snapshots.to, job))
    intact, _ = SnapshotCatalog(store).intact_manifests()
    numbers = [each.micro_batch.number for each in intact if each.micro_batch is not None]
    if max(numbers, default=0) > 0:
        for name in store.list(INITIAL):
            store.delete(name)
        return None
    write = _writer(store.address, uuid.uuid4().hex)
    rows = initial.mapInArrow(write, "name string, bytes long, checksum long").collect()
    files = tuple(InitialFile(row.name, row.bytes, row.checksum) for row in rows)
    return InitialFiles(store.address, files, stream_schema(initial), key)


def _writer(address: str, folder: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a function that writes the rows of a partition, and yields the names, lengths and checksums of its files."""

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
        stream.write_table(pa.Table.from_batches(batches))
    content = memoryview(sink.getvalue())
    store.write(name, [content])
    return pa.RecordBatch.from_pydict({"name": [name], "bytes": [content.nbytes], "checksum": [zlib.crc32(content)]})
