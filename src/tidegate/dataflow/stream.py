"""The user's way to a logical graph: streams that are transformed into streams, checked at every step.

    pipeline = Pipeline()
    bids = pipeline.source("bids", source).with_watermark("ts", "5 seconds")
    counts = bids.key_by("auction").process("count", CountBids(), returns="auction long, n long")
    counts.to("out", sink)
    graph = pipeline.build()

A stream is a handle to outputs of nodes: several where streams were united. It is immutable and may be used any number
of times; each use is one more consumer of the same records. `key_by`, `union`, `rebalance`, `broadcast`, `connect` and
`side_output` add no node: they say how the next one gets its records.

What the user got wrong is an error here, at the line that has it (`checks.py`). Nothing here knows slots, chains or how
an operator runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar

import pyarrow as pa

from tidegate.dataflow import checks
from tidegate.dataflow.contracts import Sink, Source
from tidegate.dataflow.functions import BroadcastProcess, CoProcess, Function, KeyedProcess, Process
from tidegate.dataflow.graph import Edge, LogicalGraph, Node, Partitioning, Spec, sources_above
from tidegate.dataflow.null_keys import KEEP, check_nulls
from tidegate.dataflow.operators.broadcast import BroadcastProcessSpec
from tidegate.dataflow.operators.iteration import IterationHeadSpec, IterationTailSpec
from tidegate.dataflow.operators.process import CoProcessSpec, KeyedProcessSpec, ProcessSpec
from tidegate.dataflow.operators.simple import FilterSpec, FlatMapSpec, MapBatchesSpec, MapSpec
from tidegate.dataflow.operators.sink import SinkSpec
from tidegate.dataflow.operators.source import SourceSpec, WatermarkSpec
from tidegate.errors import GraphError
from tidegate.types import ddl_of

# Spark DDL text such as "auction long, price double", a pyarrow.Schema or a pyspark StructType.
SchemaLike: TypeAlias = Any
Duration: TypeAlias = str | int | float | timedelta
# Names that an operator had: what snapshots hold under one of them is its state.
Names: TypeAlias = "str | Sequence[str]"
S = TypeVar("S", bound="Stream | KeyedStream | BroadcastStream")

_NO_OUTPUT = pa.schema([])


class Pipeline:
    """Collects the nodes of one job. `time_by_epoch`: watermarks move when an epoch ends, since records come in no order."""

    time_by_epoch = False

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._names: dict[str, Node] = {}
        self._aliases: dict[str, Node] = {}
        self._functions: dict[int, str] = {}  # id of a process function → the operator that has it

    def source(self, name: str, source: Source, *, parallelism: int | None = None, alias: Names = ()) -> Stream:
        """A stream of the records of a source. Its offsets are kept in snapshots under `name`.

        To rename something that has state (a source, a process, a sink), give its old name as `alias`: it goes on from a
        snapshot that has it under that one.
        """
        name = self._new_name("source", name)
        schema = checks.check_source(name, source)
        return self._add(
            SourceSpec(source),
            name=name,
            schema=schema,
            parallelism=parallelism,
            named_by_user=True,
            aliases=self._new_aliases("source", name, alias),
        )

    def build(self) -> LogicalGraph:
        """The graph as it is now, checked for loose ends."""
        graph = LogicalGraph(tuple(self._nodes))
        checks.check_complete(graph)
        return graph

    def _new_name(self, kind: str, name: str | None) -> str:
        """A name that no operator has yet: the user's, or a generated one (such as "map-1") where that is None."""
        if name is None:
            number = 1 + sum(not node.named_by_user and node.spec.kind == kind for node in self._nodes)
            while f"{kind}-{number}" in self._names | self._aliases:
                number += 1
            return f"{kind}-{number}"
        name = checks.check_name(kind, name)
        taken = self._names.get(name)
        if taken is not None:
            whose = "" if taken.named_by_user else ", by a generated name"
            article = "an" if taken.spec.kind[0] in "aeiou" else "a"
            raise GraphError(
                f"{kind} {name!r}: the name is already taken by {article} {taken.spec.kind}{whose}; names are "
                f"unique in a job, since state is found by them: choose another"
            )
        if name in self._aliases:
            raise GraphError(
                f"{kind} {name!r}: the name is an alias of {self._aliases[name].name!r}, and what a snapshot "
                f"holds under a name goes to one operator: leave that alias away, or choose another name"
            )
        return name

    def _new_aliases(self, kind: str, name: str, alias: Names) -> tuple[str, ...]:
        aliases = checks.check_aliases(kind, name, alias)
        for each in aliases:
            taken = self._names.get(each) or self._aliases.get(each)
            if taken is not None:
                raise GraphError(
                    f"{kind} {name!r}, alias={each!r}: that is a name or alias of the {taken.spec.kind} "
                    f"{taken.name!r}, and what a snapshot holds under a name goes to one operator"
                )
        return aliases

    def _add(
        self,
        spec: Spec,
        *,
        name: str,
        schema: pa.Schema,
        edges: tuple[Edge, ...] = (),
        input_schemas: tuple[pa.Schema, ...] = (),
        side_schemas: Mapping[str, pa.Schema] | None = None,
        parallelism: int | None = None,
        named_by_user: bool,
        aliases: tuple[str, ...] = (),
    ) -> Stream:
        parallelism = checks.check_parallelism(name, parallelism)
        node = Node(
            id=len(self._nodes),
            name=name,
            spec=spec,
            inputs=edges,
            schema=schema,
            input_schemas=input_schemas,
            side_schemas=dict(side_schemas or {}),
            parallelism=parallelism,
            named_by_user=named_by_user,
            aliases=aliases,
        )
        self._nodes.append(node)
        self._names[name] = node
        self._aliases |= dict.fromkeys(aliases, node)
        return Stream(self, (Edge(node.id, None, 0, Partitioning.FORWARD),), schema)

    def _add_process(
        self,
        spec: Spec,
        function: Any,
        *,
        takes: _Takes,
        name: str,
        inputs: tuple[_Input, ...],
        returns: SchemaLike,
        side_outputs: Mapping[str, SchemaLike] | None,
        parallelism: int | None,
        alias: Names,
    ) -> Stream:
        """A node with a process function. `inputs` are by port."""
        name = self._new_name("operator", name)
        aliases = self._new_aliases("operator", name, alias)
        checks.check_function(name, function, expected=takes.expected, here=takes.here)
        checks.check_states(name, function, keyed=takes.keyed)
        other = self._functions.get(id(function))
        if other is not None:
            raise GraphError(
                f"operator {name!r}: this {type(function).__name__} is already the function of {other!r}, "
                f"and an instance holds the state of one operator; make a second one"
            )
        schema = _NO_OUTPUT if returns is None else checks.declared_schema(name, returns)
        stream = self._add(
            spec,
            name=name,
            schema=schema,
            edges=tuple(edge for input in inputs for edge in input.edges),
            input_schemas=tuple(input.schema for input in inputs),
            parallelism=parallelism,
            named_by_user=True,
            aliases=aliases,
            side_schemas=checks.declared_sides(name, {} if side_outputs is None else side_outputs),
        )
        self._functions[id(function)] = name
        return stream


@dataclass(frozen=True, slots=True)
class _Takes:
    """What kind of function a stream takes in `process`, and how to say which stream that is."""

    expected: type[Function]
    here: str
    keyed: bool


@dataclass(frozen=True, slots=True)
class _Input:
    """What arrives at one port."""

    edges: tuple[Edge, ...]
    schema: pa.Schema


class Stream:
    """Records of one schema on their way, without a key. See the module's text; get one from `source`."""

    __slots__ = ("_edges", "_pipeline", "_schema")

    def __init__(self, pipeline: Pipeline, edges: tuple[Edge, ...], schema: pa.Schema) -> None:
        self._pipeline = pipeline
        self._edges = edges
        self._schema = schema

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    # Operators.

    def map(
        self, function: Callable[[Any], Any], returns: SchemaLike, *, name: str | None = None, parallelism: int | None = None
    ) -> Stream:
        """One row for each record: `bids.map(lambda bid: (bid.auction, bid.price / 2), returns="a long, half double")`."""
        return self._simple("map", MapSpec(function), function, returns, name, parallelism)

    def flat_map(
        self,
        function: Callable[[Any], Iterable[Any] | None],
        returns: SchemaLike,
        *,
        name: str | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """Any number of rows for each record: the function returns an iterable, is a generator, or returns None."""
        return self._simple("flat_map", FlatMapSpec(function), function, returns, name, parallelism)

    def filter(self, function: Callable[[Any], bool], *, name: str | None = None, parallelism: int | None = None) -> Stream:
        """The records for which the function is true: `bids.filter(lambda bid: bid.price > 100)`."""
        return self._simple("filter", FilterSpec(function), function, None, name, parallelism)

    def map_batches(
        self,
        function: Callable[[pa.RecordBatch], pa.RecordBatch | Iterable[pa.RecordBatch] | None],
        returns: SchemaLike,
        *,
        name: str | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """Vectorised: the function gets an Arrow record batch and gives one, an iterable of them, or None.

        The batches it gives have exactly the schema declared. How records are cut into batches means nothing.
        """
        return self._simple("map_batches", MapBatchesSpec(function), function, returns, name, parallelism)

    def process(
        self,
        name: str,
        function: Process,
        returns: SchemaLike = None,
        *,
        side_outputs: Mapping[str, SchemaLike] | None = None,
        parallelism: int | None = None,
        alias: Names = (),
    ) -> Stream:
        """Runs a `Process`. Leave `returns` away for one that emits nothing on its main output.

        `side_outputs={"late": "auction long, ts long"}` declares what `ctx.side("late", row)` takes; get the stream
        with `.side_output("late")` on what this returns. `alias` is the name that the operator had before, if any.
        """
        takes = _Takes(Process, "a stream without key", keyed=False)
        return self._pipeline._add_process(
            ProcessSpec(function),
            function,
            takes=takes,
            name=name,
            inputs=(self._input(),),
            returns=returns,
            side_outputs=side_outputs,
            parallelism=parallelism,
            alias=alias,
        )

    def with_watermark(
        self, column: str, delay: Duration, *, idle_after: Duration | None = None, name: str | None = None
    ) -> Stream:
        """Event time from a column (timestamp, date, or long of epoch milliseconds): no record is expected to be more
        than `delay` behind the latest one seen.

        Put it right behind the source. A subtask without records for `idle_after` no longer holds back the others.
        """
        input = self._input()
        given, name = name is not None, self._pipeline._new_name("watermark", name)
        column = checks.check_time_column(name, column, self._schema)
        delay_ms = checks.duration_ms(name, "delay", delay)
        idle_after_ms = None if idle_after is None else checks.duration_ms(name, "idle_after", idle_after)
        if idle_after_ms == 0:
            raise GraphError(
                f"operator {name!r}: idle_after={idle_after!r} makes every pause between two batches "
                f"idle; give a time longer than the source's usual pauses, such as '30 seconds'"
            )
        return self._pipeline._add(
            WatermarkSpec(
                column,
                delay_ms,
                idle_after_ms,
                sources_above(self._pipeline._nodes, input.edges),
                by_epoch=self._pipeline.time_by_epoch,
            ),
            name=name,
            schema=self._schema,
            edges=input.edges,
            input_schemas=(self._schema,),
            parallelism=self._common_parallelism(),
            named_by_user=given,
        )

    def iterate(
        self,
        name: str,
        body: Callable[[Stream], tuple[Stream, Stream]],
        *,
        parallelism: int | None = None,
        alias: Names = (),
    ) -> Stream:
        """A loop. `body(stream)` gets this stream's records and those that come back, and returns two streams: the
        feedback, which goes back to the beginning of the loop, and the output, which is what this returns.

            def body(orders):
                tried = orders.key_by("account").process("try", Try(), returns=ORDER)
                return tried.filter(lambda order: order.failed), tried.filter(lambda order: not order.failed)

            done = orders.iterate("retry", body)

        The feedback has this stream's schema. The body may hold anything: other streams, sinks, further loops. The loop
        ends when its input has ended and no record is under way in it, so records must leave it some time. Event time comes
        from the input alone: a record that comes back may be late. What is under way is kept in snapshots under `name`.
        """
        pipeline, input = self._pipeline, self._input()
        name = pipeline._new_name("loop", name)
        aliases = pipeline._new_aliases("loop", name, alias)
        checks.check_body(name, body)
        _new_tail_name(pipeline, name)
        stream = pipeline._add(
            IterationHeadSpec(),
            name=name,
            schema=input.schema,
            edges=input.edges,
            input_schemas=(input.schema,),
            parallelism=parallelism,
            named_by_user=True,
            aliases=aliases,
        )
        head = pipeline._nodes[-1]
        feedback, output = _ends_of_loop(stream, name, body(stream))
        back = feedback._input()
        checks.check_feedback(name, head, pipeline._nodes, back.edges, output._input().edges, back.schema)
        tail = _new_tail_name(pipeline, name)
        pipeline._add(
            IterationTailSpec(head.id),
            name=tail,
            schema=_NO_OUTPUT,
            edges=back.edges,
            input_schemas=(input.schema,),
            named_by_user=False,
            aliases=pipeline._new_aliases("feedback", tail, [_tail_name(each) for each in aliases]),
        )
        return output

    def to(self, name: str, sink: Sink, *, parallelism: int | None = None, alias: Names = ()) -> None:
        """Writes the records to a sink. Its pending commits are kept in snapshots under `name`."""
        _add_sink(self._pipeline, self._input(), name, sink, parallelism, alias)

    # How the next operator gets the records.

    def key_by(self, *columns: str, nulls: str = KEEP) -> KeyedStream:
        """Records with equal values in these columns go to one subtask, which has state for them.

        Null is a key like any other: all records without a key share one state. `nulls="refuse"` ends the job at the first
        such record instead.
        """
        input, where = self._input(), f"key_by after {self._origin()}"
        key = checks.check_key(where, columns, self._schema)
        edges = _repartitioned(input.edges, Partitioning.HASH, key, refuses_nulls=check_nulls(where, nulls))
        return KeyedStream(self._pipeline, edges, self._schema, key)

    def union(self, *others: Stream) -> Stream:
        """The records of all streams, which have the same columns in the same order. No order among the streams."""
        edges = list(self._input().edges)
        fields = list(self._schema)
        where = f"union after {self._origin()}"
        for other in others:
            if not isinstance(other, Stream):
                raise GraphError(
                    f"{where}: {_called(other)} can't be united; unite the streams first, then key_by or "
                    f"broadcast the result"
                )
            _same_pipeline(where, self, other)
            edges += other._input().edges
            checks.check_same_schema(f"{where} with {other._origin()}", first=self._schema, other=other._schema)
            fields = [
                field.with_nullable(field.nullable or also.nullable)
                for field, also in zip(fields, other._schema, strict=True)
            ]
        return Stream(self._pipeline, tuple(edges), pa.schema(fields) if others else self._schema)

    def rebalance(self) -> Stream:
        """Spreads the records evenly over the next operator's subtasks. The order of records is lost."""
        return Stream(self._pipeline, _repartitioned(self._input().edges, Partitioning.REBALANCE), self._schema)

    def broadcast(self) -> BroadcastStream:
        """Every record to every subtask: for the right side of `connect`."""
        edges = _repartitioned(self._input().edges, Partitioning.BROADCAST)
        return BroadcastStream(self._pipeline, edges, self._schema)

    def connect(self, other: Stream | BroadcastStream) -> ConnectedStreams:
        """Two streams for one `CoProcess`, or this one and a broadcast one for a `BroadcastProcess`."""
        where = f"connect after {self._origin()}"
        if isinstance(other, KeyedStream):
            raise GraphError(
                f"{where}: the right stream is keyed by {_columns(other.key)}, the left one isn't; use "
                f"key_by on both, or on neither"
            )
        return ConnectedStreams(self, _connectable(where, self, other))

    def side_output(self, tag: str) -> Stream:
        """What the operator that made this stream emits with `ctx.side(tag, row)`."""
        where = f"side_output({tag!r}) after {self._origin()}"
        edge = self._edges[0]
        if len(self._edges) > 1 or edge.tag is not None or edge.partitioning is not Partitioning.FORWARD:
            raise GraphError(f"{where}: side outputs belong to an operator; call side_output on what process(…) gave")
        node = self._pipeline._nodes[edge.source]
        tag = checks.check_side_output(where, tag, node)
        return Stream(self._pipeline, (replace(edge, tag=tag),), node.side_schemas[tag])

    def __repr__(self) -> str:
        return f"<stream of {self._origin()}: {ddl_of(self._schema) or 'no output'}>"

    # Inside.

    def _input(self) -> _Input:
        if not self._schema.names:
            operator = self._pipeline._nodes[self._edges[0].source].name
            raise GraphError(
                f"operator {operator!r} has no output that could be used: declare one with "
                f"process({operator!r}, …, returns='column type, …')"
            )
        return _Input(self._edges, self._schema)

    def _origin(self) -> str:
        return " and ".join(dict.fromkeys(_output_name(self._pipeline, edge) for edge in self._edges))

    def _common_parallelism(self) -> int | None:
        """What the upstream operators have, so that a watermark sees a source subtask's records in their order."""
        found = {
            self._pipeline._nodes[edge.source].parallelism if edge.partitioning is Partitioning.FORWARD else None
            for edge in self._edges
        }
        return found.pop() if len(found) == 1 else None

    def _simple(
        self, method: str, spec: Spec, function: Any, returns: SchemaLike, name: str | None, parallelism: int | None
    ) -> Stream:
        input = self._input()
        given, name = name is not None, self._pipeline._new_name(method, name)
        checks.check_callable(name, method, function)
        schema = input.schema if method == "filter" else checks.declared_schema(name, returns)
        return self._pipeline._add(
            spec,
            name=name,
            schema=schema,
            edges=input.edges,
            input_schemas=(input.schema,),
            parallelism=parallelism,
            named_by_user=given,
        )


class KeyedStream:
    """Records that go by key: what `key_by` gives."""

    __slots__ = ("_edges", "_key", "_pipeline", "_schema")

    def __init__(self, pipeline: Pipeline, edges: tuple[Edge, ...], schema: pa.Schema, key: tuple[str, ...]) -> None:
        self._pipeline = pipeline
        self._edges = edges
        self._schema = schema
        self._key = key

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    @property
    def key(self) -> tuple[str, ...]:
        """The key columns."""
        return self._key

    def process(
        self,
        name: str,
        function: KeyedProcess,
        returns: SchemaLike = None,
        *,
        side_outputs: Mapping[str, SchemaLike] | None = None,
        parallelism: int | None = None,
        alias: Names = (),
    ) -> Stream:
        """Runs a `KeyedProcess`. The other arguments are as in `Stream.process`."""
        takes = _Takes(KeyedProcess, f"a stream keyed by {_columns(self._key)}", keyed=True)
        return self._pipeline._add_process(
            KeyedProcessSpec(function, self._key),
            function,
            takes=takes,
            name=name,
            inputs=(_Input(self._edges, self._schema),),
            returns=returns,
            side_outputs=side_outputs,
            parallelism=parallelism,
            alias=alias,
        )

    def connect(self, other: KeyedStream | BroadcastStream) -> ConnectedStreams:
        """Two streams keyed alike for one `CoProcess`, or this one and a broadcast one for a `BroadcastProcess`."""
        where = f"connect after {self._origin()}"
        if isinstance(other, Stream):
            raise GraphError(
                f"{where}: the left stream is keyed by {_columns(self._key)}, the right one isn't; use "
                f"key_by on both, or on neither (or broadcast() on the right one)"
            )
        if isinstance(other, KeyedStream):
            checks.check_same_key_types(
                where,
                left=[self._schema.field(column) for column in self._key],
                right=[other._schema.field(column) for column in other._key],
            )
        return ConnectedStreams(self, _connectable(where, self, other))

    def to(self, name: str, sink: Sink, *, parallelism: int | None = None, alias: Names = ()) -> None:
        """Writes the records to a sink; those of one key to one subtask of it, in their order."""
        _add_sink(self._pipeline, _Input(self._edges, self._schema), name, sink, parallelism, alias)

    def __repr__(self) -> str:
        return f"<stream of {self._origin()} keyed by {_columns(self._key)}: {ddl_of(self._schema)}>"

    def _origin(self) -> str:
        return " and ".join(dict.fromkeys(_output_name(self._pipeline, edge) for edge in self._edges))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            known = isinstance(getattr(Stream, name, None), property) or callable(getattr(Stream, name, None))
            advice = f": call .{name}(…) before key_by, or a process after it" if known else ""
            raise AttributeError(f"a keyed stream has no {name!r}{advice}")


class BroadcastStream:
    """Records that go to every subtask: what `broadcast` gives. Connect another stream with it."""

    __slots__ = ("_edges", "_pipeline", "_schema")

    def __init__(self, pipeline: Pipeline, edges: tuple[Edge, ...], schema: pa.Schema) -> None:
        self._pipeline = pipeline
        self._edges = edges
        self._schema = schema

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    def __repr__(self) -> str:
        return f"<broadcast stream: {ddl_of(self._schema)}>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"a broadcast stream has no {name!r}: it is the right side of a connection, "
                f"stream.connect(rules.broadcast()).process(name, function, returns=…)"
            )


class ConnectedStreams:
    """Two streams on their way into one operator: what `connect` gives."""

    __slots__ = ("_left", "_right")

    def __init__(self, left: Stream | KeyedStream, right: Stream | KeyedStream | BroadcastStream) -> None:
        self._left = left
        self._right = right

    def process(
        self,
        name: str,
        function: CoProcess | BroadcastProcess,
        returns: SchemaLike = None,
        *,
        side_outputs: Mapping[str, SchemaLike] | None = None,
        parallelism: int | None = None,
        alias: Names = (),
    ) -> Stream:
        """Runs a `CoProcess`, or a `BroadcastProcess` where the right stream is broadcast."""
        left, right = self._left, self._right
        key = left.key if isinstance(left, KeyedStream) else ()
        spec: Spec
        if isinstance(right, BroadcastStream):
            takes = _Takes(BroadcastProcess, "a stream connected with a broadcast one", keyed=bool(key))
            spec = BroadcastProcessSpec(function, key)
        else:
            takes = _Takes(CoProcess, "two connected streams", keyed=bool(key))
            spec = CoProcessSpec(function, (key, right.key) if isinstance(right, KeyedStream) else None)
        inputs = (
            _Input(left._edges, left.schema),
            _Input(tuple(replace(edge, port=1) for edge in right._edges), right.schema),
        )
        return left._pipeline._add_process(
            spec,
            function,
            takes=takes,
            name=name,
            inputs=inputs,
            returns=returns,
            side_outputs=side_outputs,
            parallelism=parallelism,
            alias=alias,
        )

    def __repr__(self) -> str:
        return f"<{self._left!r} connected with {self._right!r}>"


# ---------------------------------------------------------------------------------------------------------- shared


def _add_sink(pipeline: Pipeline, input: _Input, name: str, sink: Sink, parallelism: int | None, alias: Names) -> None:
    name = pipeline._new_name("sink", name)
    aliases = pipeline._new_aliases("sink", name, alias)
    checks.check_sink(name, sink, input.schema)
    pipeline._add(
        SinkSpec(sink),
        name=name,
        schema=_NO_OUTPUT,
        edges=input.edges,
        input_schemas=(input.schema,),
        parallelism=parallelism,
        named_by_user=True,
        aliases=aliases,
    )


def _ends_of_loop(stream: Stream, loop: str, given: object) -> tuple[Stream, Stream]:
    """The feedback and the output, as a loop's body gave them."""
    where = f"loop {loop!r}"
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise GraphError(
            f"{where}: the body returned {_called(given)}; return two streams, the feedback and the output "
            f"(they may be the same): return feedback, output"
        )
    for what, end in zip(("feedback", "output"), given, strict=True):
        if not isinstance(end, Stream):
            advice = (
                "return the stream before key_by or broadcast, and use these on what iterate gives"
                if isinstance(end, KeyedStream | BroadcastStream)
                else "return a stream made from the body's argument"
            )
            raise GraphError(f"{where}: the {what} that the body returned is {_called(end)}; {advice}")
        _same_pipeline(f"{where}, {what}", stream, end)
    return given[0], given[1]


def _tail_name(loop: str) -> str:
    return f"{loop}-feedback"


def _new_tail_name(pipeline: Pipeline, loop: str) -> str:
    return pipeline._new_name(f"loop {loop!r}, whose feedback is called", _tail_name(loop))


def _repartitioned(
    edges: tuple[Edge, ...], partitioning: Partitioning, key: tuple[str, ...] = (), *, refuses_nulls: bool = False
) -> tuple[Edge, ...]:
    return tuple(replace(edge, partitioning=partitioning, key=key, refuses_nulls=refuses_nulls) for edge in edges)


def _connectable(where: str, left: Stream | KeyedStream, right: S) -> S:
    if not isinstance(right, Stream | KeyedStream | BroadcastStream):
        raise GraphError(f"{where}: connect takes a stream, not {_called(right)}")
    _same_pipeline(where, left, right)
    for side in (left, right):
        if isinstance(side, Stream):
            side._input()
    return right


def _same_pipeline(where: str, one: Stream | KeyedStream, other: Stream | KeyedStream | BroadcastStream) -> None:
    if one._pipeline is not other._pipeline:
        raise GraphError(f"{where}: the two streams are of different jobs; build both from the sources of one")


def _output_name(pipeline: Pipeline, edge: Edge) -> str:
    name = repr(pipeline._nodes[edge.source].name)
    return name if edge.tag is None else f"side output {edge.tag!r} of {name}"


def _columns(key: tuple[str, ...]) -> str:
    return ", ".join(key)


def _called(given: object) -> str:
    return {KeyedStream: "a keyed stream", BroadcastStream: "a broadcast stream"}.get(type(given), repr(given))
