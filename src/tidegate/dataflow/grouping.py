"""A grouped operator as a node of the graph: how Spark's stateful processors come into a pipeline.

    counts = process_groups(bids.key_by("auction"), "count", GroupedSpec(function, ("auction",)), returns=schema)

Users don't call this: `tg.transform_with_state` does.
"""

from __future__ import annotations

import pyarrow as pa

from tidegate.dataflow.keyed_stream import BroadcastStream, KeyedStream
from tidegate.dataflow.operators.grouped import LATEST, GroupedSpec, Latest, SecondPort
from tidegate.dataflow.stream import Stream
from tidegate.state.descriptors import Names


def process_groups(
    keyed: KeyedStream,
    name: str,
    spec: GroupedSpec,
    returns: pa.Schema,
    *,
    second: KeyedStream | BroadcastStream | None = None,
    alias: Names = (),
) -> Stream:
    """Add a grouped operator. `second` is the input of port 1, if the spec has one."""
    assert (second is None) == (spec.second is None)
    pipeline = keyed._pipeline
    name = pipeline._new_name("operator", name)
    return pipeline._add(
        spec,
        name=name,
        schema=returns,
        inputs=[keyed] if second is None else [keyed, second],
        named_by_user=True,
        aliases=pipeline._new_aliases("operator", name, alias),
    )


def with_event_time(stream: Stream, name: str, spec: GroupedSpec, returns: pa.Schema, *, alias: Names = ()) -> Stream:
    """Add a grouped operator that has event time: every subtask receives the latest event time of the stream."""
    assert spec.event_time is not None and spec.second is SecondPort.LATEST
    latest = stream.map_batches(Latest(spec.event_time.column), returns=LATEST, name=f"{name}-event-time")
    return process_groups(stream.key_by(*spec.key), name, spec, returns, second=latest.broadcast(), alias=alias)
