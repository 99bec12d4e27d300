"""Tidegate: the state management of Apache Flink for PySpark.

    import tidegate as tg

Everything a user needs is here by name; what is not in `__all__` is not public.
"""

from __future__ import annotations

from tidegate import sinks, sources
from tidegate.dataflow.contracts import Sink, SinkContext, SinkWriter, Source, SourceContext, SourceReader
from tidegate.dataflow.functions import BroadcastProcess, CoProcess, KeyedProcess, Process
from tidegate.errors import JobError, JobFailed, SourceError, TidegateError
from tidegate.protocol.restart import Exponential, FixedDelay, NoRestart
from tidegate.runtime.handle import Handle
from tidegate.runtime.job import plan_restore
from tidegate.runtime.reports import Status
from tidegate.runtime.settings import Heap, Snapshots, Tuning
from tidegate.spark.job import Job
from tidegate.spark.processor_evolution import Evolution
from tidegate.spark.state_writer import write_state
from tidegate.spark.stateful_processor import transform_with_state, transform_with_state_in_pandas
from tidegate.spark.tables import read_state, register
from tidegate.spark.transform import transform
from tidegate.state.descriptors import aggregating, broadcast_map, operator_list, reducing, value
from tidegate.state.descriptors import list_ as list
from tidegate.state.descriptors import map_ as map
from tidegate.state.pickled import pickled
from tidegate.state.rocksdb import RocksDB

__all__ = [
    "BroadcastProcess",
    "CoProcess",
    "Evolution",
    "Exponential",
    "FixedDelay",
    "Handle",
    "Heap",
    "Job",
    "JobError",
    "JobFailed",
    "KeyedProcess",
    "NoRestart",
    "Process",
    "RocksDB",
    "Sink",
    "SinkContext",
    "SinkWriter",
    "Snapshots",
    "Source",
    "SourceContext",
    "SourceError",
    "SourceReader",
    "Status",
    "TidegateError",
    "Tuning",
    "aggregating",
    "broadcast_map",
    "list",
    "map",
    "operator_list",
    "pickled",
    "plan_restore",
    "read_state",
    "reducing",
    "register",
    "sinks",
    "sources",
    "transform",
    "transform_with_state",
    "transform_with_state_in_pandas",
    "value",
    "write_state",
]
