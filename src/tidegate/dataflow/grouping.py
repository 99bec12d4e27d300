"""A grouped operator as a node of the graph: how Spark's stateful processors come into a pipeline.

    counts = process_groups(bids.key_by("auction"), "count", GroupedSpec(function, ("auction",)), returns=schema)

No part of the user's way to a graph (stream.py): `tg.transform_with_state` calls it.
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
    """`second` is what comes on port 1, if the spec says that something does."""
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
    """The same where the spec has an event time: every subtask hears of the latest."""
    assert spec.event_time is not None and spec.second is SecondPort.LATEST
    latest = stream.map_batches(Latest(spec.event_time.column), returns=LATEST, name=f"{name}-event-time")
    return process_groups(stream.key_by(*spec.key), name, spec, returns, second=latest.broadcast(), alias=alias)
