"""Tidegate: the state management of Apache Flink for PySpark.

    import tidegate as tg

The public names are those in `__all__`, and some more: `tg.list` and `tg.map`, which declare states, and the aggregates
`tg.all`, `tg.any`, `tg.max`, `tg.min` and `tg.sum`. They are not in `__all__`, because `from tidegate import *` would
replace Python's own.
"""

from __future__ import annotations

from tidegate import sinks, sources
from tidegate.arguments import ClockDuration, Duration, Size
from tidegate.control.settings import Backend, Heap, Snapshots, Tuning
from tidegate.dataflow.aggregates.base import Accumulator, Aggregate, IntArray, Vectors
from tidegate.dataflow.aggregates.declaring import (
    all_ as _all,
)
from tidegate.dataflow.aggregates.declaring import (
    any_ as _any,
)
from tidegate.dataflow.aggregates.declaring import (
    approx_count_distinct,
    collect_list,
    collect_set,
    count,
    count_distinct,
    first,
    last,
    max_by,
    mean,
    min_by,
    stddev,
    variance,
)
from tidegate.dataflow.aggregates.declaring import (
    max_ as _max,
)
from tidegate.dataflow.aggregates.declaring import (
    min_ as _min,
)
from tidegate.dataflow.aggregates.declaring import (
    sum_ as _sum,
)
from tidegate.dataflow.changelog import Changelog
from tidegate.dataflow.contracts import (
    Committable,
    Offset,
    Sink,
    SinkContext,
    SinkWriter,
    Source,
    SourceContext,
    SourceReader,
    Splits,
)
from tidegate.dataflow.functions import (
    BatchContext,
    Batches,
    BatchTimers,
    BroadcastProcess,
    Context,
    CoProcess,
    Instant,
    Instants,
    KeyedBatchProcess,
    KeyedProcess,
    Process,
    Row,
    Rows,
    Timers,
)
from tidegate.dataflow.keyed_stream import BroadcastStream, ConnectedStreams, KeyedStream
from tidegate.dataflow.operators.lookup import Lookup
from tidegate.dataflow.operators.window_results import KeyedWindow
from tidegate.dataflow.stream import Stream
from tidegate.dataflow.triggers import AnyTrigger, Trigger, after, every_records
from tidegate.dataflow.windowed_stream import WindowedStream
from tidegate.dataflow.windows import cumulating, global_window, sessions, sliding, tumbling
from tidegate.driver.handle import Handle
from tidegate.driver.job import plan_restore
from tidegate.driver.reports import AttemptReport, EpochReport, Failure, SlotReport, Status
from tidegate.errors import (
    AlreadyExists,
    CommitError,
    CorruptFile,
    ExpressionError,
    FencedOff,
    GraphError,
    HandshakeError,
    JobError,
    JobFailed,
    NotFound,
    ProtocolError,
    RescaleFailed,
    RestoreError,
    SchemaError,
    SourceError,
    StoreError,
    TidegateError,
    UserFunctionError,
)
from tidegate.protocol.restart import Exponential, FixedDelay, NoRestart, RestartStrategy
from tidegate.snapshots.plan import Fate, OperatorPlan, RestorePlan, StatePlan
from tidegate.snapshots.savepoints import SavepointInfo
from tidegate.spark.job import Job
from tidegate.spark.processor_evolution import Evolution
from tidegate.spark.state_writer import write_state
from tidegate.spark.stateful_processor import transform_with_state, transform_with_state_in_pandas
from tidegate.spark.tables import read_state, register
from tidegate.spark.transform import Outputs, transform
from tidegate.state.batch_keys import Keys
from tidegate.state.declaring import aggregating, broadcast_map, columns, operator_list, reducing, value
from tidegate.state.declaring import list_ as _list
from tidegate.state.declaring import map_ as _map
from tidegate.state.handles import (
    AggregatingState,
    BroadcastState,
    ColumnsState,
    ListState,
    MapState,
    OperatorListState,
    ReducingState,
    ValueState,
)
from tidegate.state.pickled import pickled
from tidegate.state.rocksdb import RocksDB

all = _all
any = _any
list = _list
map = _map
max = _max
min = _min
sum = _sum

__all__ = [
    "Accumulator",
    "Aggregate",
    "AggregatingState",
    "AlreadyExists",
    "AnyTrigger",
    "AttemptReport",
    "Backend",
    "BatchContext",
    "BatchTimers",
    "Batches",
    "BroadcastProcess",
    "BroadcastState",
    "BroadcastStream",
    "CoProcess",
    "ColumnsState",
    "CommitError",
    "Changelog",
    "Committable",
    "ConnectedStreams",
    "Context",
    "CorruptFile",
    "ClockDuration",
    "Duration",
    "EpochReport",
    "Evolution",
    "Exponential",
    "ExpressionError",
    "Failure",
    "Fate",
    "FencedOff",
    "FixedDelay",
    "GraphError",
    "Handle",
    "HandshakeError",
    "Heap",
    "Instant",
    "Instants",
    "IntArray",
    "Job",
    "JobError",
    "JobFailed",
    "KeyedBatchProcess",
    "KeyedProcess",
    "KeyedStream",
    "Keys",
    "KeyedWindow",
    "ListState",
    "Lookup",
    "MapState",
    "NoRestart",
    "NotFound",
    "Offset",
    "OperatorListState",
    "OperatorPlan",
    "Outputs",
    "Process",
    "ProtocolError",
    "ReducingState",
    "RestartStrategy",
    "RescaleFailed",
    "RestoreError",
    "RestorePlan",
    "RocksDB",
    "Row",
    "Rows",
    "SavepointInfo",
    "SchemaError",
    "Sink",
    "SinkContext",
    "SinkWriter",
    "Size",
    "SlotReport",
    "Snapshots",
    "Source",
    "SourceContext",
    "SourceError",
    "SourceReader",
    "Splits",
    "StatePlan",
    "Status",
    "StoreError",
    "Stream",
    "TidegateError",
    "Timers",
    "Trigger",
    "Tuning",
    "UserFunctionError",
    "ValueState",
    "Vectors",
    "WindowedStream",
    "after",
    "aggregating",
    "approx_count_distinct",
    "broadcast_map",
    "collect_list",
    "collect_set",
    "columns",
    "count",
    "count_distinct",
    "cumulating",
    "every_records",
    "first",
    "global_window",
    "last",
    "max_by",
    "mean",
    "min_by",
    "operator_list",
    "pickled",
    "plan_restore",
    "read_state",
    "reducing",
    "register",
    "sessions",
    "sinks",
    "sliding",
    "sources",
    "stddev",
    "transform",
    "transform_with_state",
    "transform_with_state_in_pandas",
    "tumbling",
    "value",
    "variance",
    "write_state",
]
