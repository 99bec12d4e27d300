"""Streams without a key, and how they are transformed into other streams, checked at every step.

    counts = bids.key_by("auction").process("count", CountBids(), returns="auction long, n long")

`key_by`, `union`, `rebalance`, `broadcast`, `connect` and `side_output` add no node: they define how the next node gets its
records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import pyarrow as pa

from tidegate.arguments import ClockDuration, Duration
from tidegate.dataflow import checks, column_steps
from tidegate.dataflow.changelog import check_ordered, meaning
from tidegate.dataflow.changing import as_changelog, as_upserts
from tidegate.dataflow.contracts import Sink
from tidegate.dataflow.flow import Flow, Names, SchemaLike, Takes, called, check_same_pipeline, columns_text, connectable
from tidegate.dataflow.functions import Process
from tidegate.dataflow.graph import Partitioning, Spec, sources_above
from tidegate.dataflow.keyed_stream import BroadcastStream, ConnectedStreams, KeyedStream
from tidegate.dataflow.lookup_stream import LookupFlow
from tidegate.dataflow.null_keys import check_nulls
from tidegate.dataflow.operators.columns import ColumnsSpec, Filter
from tidegate.dataflow.operators.iteration import IterationHeadSpec, IterationTailSpec
from tidegate.dataflow.operators.process import ProcessSpec
from tidegate.dataflow.operators.simple import FilterSpec, FlatMapSpec, MapBatchesSpec, MapSpec
from tidegate.dataflow.operators.source import WatermarkFunction
from tidegate.dataflow.triggers import AnyTrigger
from tidegate.dataflow.watermarking import watermark_spec
from tidegate.dataflow.windowed_stream import WindowedStream
from tidegate.dataflow.windows import Assigner
from tidegate.errors import GraphError
from tidegate.types import ddl_of

if TYPE_CHECKING:
    from tidegate.dataflow.pipeline import Pipeline

NO_OUTPUT = pa.schema([])

# What those look for who know Spark's DataFrames, and what keyed streams have.
_INSTEAD = {
    "aggregate": "call key_by(…) before it, or window(…) for results of all keys together",
    "running": "call key_by(…) before it",
    "deduplicate": "call key_by(…) before it",
    "top": "call key_by(…) before it, or window(…) for the best records of all keys together",
    "rate_limit": "call key_by(…) before it",
    "dropDuplicates": "call key_by(…).deduplicate(name)",
    "agg": "call key_by(…).aggregate(…)",
    "groupBy": "call key_by(…)",
    "group_by": "call key_by(…)",
    "join": "key both streams alike, and call left.key_by(…).join(name, right.key_by(…))",
    "where": "call filter(…)",
    "withColumn": "call with_columns(…)",
    "withColumns": "call with_columns(…)",
    "selectExpr": "call select(…)",
    "withWatermark": "call with_watermark(…)",
}


class Stream(LookupFlow):
    """A stream of records of one schema, without a key. `source` returns the first one."""

    __slots__ = ()

    # Operators.

    def map(
        self, function: Callable[[Any], Any], returns: SchemaLike, *, name: str | None = None, parallelism: int | None = None
    ) -> Stream:
        """Make a row of each record: `bids.map(lambda bid: (bid.auction, bid.price / 2), returns="a long, half double")`."""
        return self._simple("map", MapSpec(function), function, returns, name, parallelism)

    def flat_map(
        self,
        function: Callable[[Any], Iterable[Any] | None],
        returns: SchemaLike,
        *,
        name: str | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """Make any number of rows of each record: the function returns an iterable, is a generator, or returns None."""
        return self._simple("flat_map", FlatMapSpec(function), function, returns, name, parallelism)

    def filter(
        self, condition: str | Callable[[Any], bool], *, name: str | None = None, parallelism: int | None = None
    ) -> Stream:
        """Keep the records for which a condition is true: `bids.filter("price > 100")`.

        The condition is an expression in Spark's SQL dialect, computed for whole columns, or a function that is called with
        each record: `bids.filter(lambda bid: bid.price > 100)`.
        """
        if isinstance(condition, str):
            text = condition
            return self._columns("filter", lambda op: column_steps.filtered(op, text, self._schema), name, parallelism)
        return self._simple("filter", FilterSpec(condition), condition, None, name, parallelism)

    def select(self, *expressions: str, name: str | None = None, parallelism: int | None = None) -> Stream:
        """Make records of these expressions: `bids.select("auction", "price * 0.9 AS euros")`.

        Each is text in Spark's SQL dialect, computed for whole columns; docs/columns.md lists the functions.
        """
        return self._columns("select", lambda op: column_steps.select(op, expressions, self._schema), name, parallelism)

    def with_columns(
        self,
        columns: Mapping[str, str] | None = None,
        /,
        *,
        name: str | None = None,
        parallelism: int | None = None,
        **expressions: str,
    ) -> Stream:
        """Add or replace columns by expressions: `bids.with_columns(euros="price * 0.9")`.

        The expressions see the columns as they were before. Give a column whose name isn't a Python name, or is an argument
        of this method, in a dict: `bids.with_columns({"name": "upper(name)"})`.
        """
        if isinstance(columns, str):
            raise GraphError(
                f'with_columns takes the name of a column before its expression, with_columns(name="…"), not {columns!r}'
            )
        texts = {**(columns or {}), **expressions}
        return self._columns(
            "with_columns", lambda op: column_steps.with_columns(op, texts, self._schema), name, parallelism
        )

    def explode(
        self, array: str, *, keep_empty: bool = False, name: str | None = None, parallelism: int | None = None
    ) -> Stream:
        """Make a record of each element of an array: `posts.explode("tags AS tag")`.

        A column that is exploded gives place to its elements. The elements of another expression, such as
        `"split(text, ' ') AS word"`, are a new column. A record whose array is empty or null is left out, or kept with null
        if `keep_empty`.
        """
        return self._columns(
            "explode",
            lambda op: column_steps.explode(op, array, self._schema, keep_empty=keep_empty),
            name,
            parallelism,
        )

    def map_batches(
        self,
        function: Callable[[pa.RecordBatch], pa.RecordBatch | Iterable[pa.RecordBatch] | None],
        returns: SchemaLike,
        *,
        name: str | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """Call a function with Arrow record batches; it returns a batch, an iterable of batches, or None.

        The batches it returns have exactly the declared schema. How records are cut into batches has no meaning.
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
        """Run a `Process`. Omit `returns` if it emits nothing on its main output.

        `side_outputs={"late": "auction long, ts long"}` declares what `ctx.side("late", row)` takes; get that stream
        with `.side_output("late")` on what this returns. `alias` is the name that the operator had before, if any.
        """
        takes = Takes(Process, "a stream without key", keyed=False)
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
        self,
        column: str | None = None,
        delay: Duration | None = None,
        *,
        by: WatermarkFunction | None = None,
        idle_after: ClockDuration | None = None,
        max_ahead: Duration | None = None,
        group: str | None = None,
        name: str | None = None,
    ) -> Stream:
        """Take event time from a column (timestamp, date, or long of epoch milliseconds). No record is expected to be more
        than `delay` behind the latest one seen. Or pass a function as `by`: it takes a batch and returns the watermark that
        follows the batch, or None.

        Put it directly after the source. A split or subtask without records for `idle_after` no longer holds back the
        others. With `max_ahead`, the source stops reading while it is further than that ahead of the slowest source of its
        `group` (by default, of all sources with `max_ahead`), so that a fast source doesn't fill the state of operators that
        wait for a slow one.
        """
        input = self._input()
        given, name = name is not None, self._pipeline._new_name("watermark", name)
        spec = watermark_spec(
            name,
            self._schema,
            column=column,
            delay=delay,
            by=by,
            idle_after=idle_after,
            max_ahead=max_ahead,
            group=group,
            sources=sources_above(self._pipeline._nodes, input._edges),
            by_epoch=self._pipeline.time_by_epoch,
        )
        return self._pipeline._add(
            spec,
            name=name,
            schema=self._schema,
            inputs=(input,),
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
        """Make a loop. `body(stream)` gets this stream's records and those that come back, and returns two streams: the
        feedback, which goes back to the beginning of the loop, and the output, which is what this returns.

            def body(orders):
                tried = orders.key_by("account").process("try", Try(), returns=ORDER)
                return tried.filter(lambda order: order.failed), tried.filter(lambda order: not order.failed)

            done = orders.iterate("retry", body)

        The feedback has this stream's schema. The body may hold anything: other streams, sinks, further loops. The loop
        ends when its input has ended and no record is in flight in it, so every record must leave it at some point. Event
        time comes from the input alone: a record that comes back may be late. Snapshots hold the records in flight under
        `name`.
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
            inputs=(input,),
            parallelism=parallelism,
            named_by_user=True,
            aliases=aliases,
        )
        head = pipeline._nodes[-1]
        feedback, output = _ends_of_loop(stream, name, body(stream))
        back = feedback._input()
        checks.check_feedback(name, head, pipeline._nodes, back._edges, output._input()._edges, back.schema)
        tail = _new_tail_name(pipeline, name)
        pipeline._add(
            IterationTailSpec(head.id),
            name=tail,
            schema=NO_OUTPUT,
            inputs=(Flow(pipeline, back._edges, input.schema),),
            named_by_user=False,
            aliases=pipeline._new_aliases("feedback", tail, [_tail_name(each) for each in aliases]),
        )
        return output

    def to(self, name: str, sink: Sink, *, parallelism: int | None = None, alias: Names = ()) -> None:
        """Write the records to a sink. Its pending commits are kept in snapshots under `name`."""
        self._pipeline._add_sink(self, name, sink, parallelism, alias)

    # How the next operator gets the records.

    def key_by(self, *columns: str, nulls: Literal["keep", "refuse"] = "keep") -> KeyedStream:
        """Send records with equal values in these columns to one subtask, which has state for them.

        Null is a key like any other: all records without a key share one state. `nulls="refuse"` ends the job at the first
        such record instead.
        """
        input, where = self._input(), f"key_by after {self._origin()}"
        key = checks.check_key(where, columns, self._schema)
        edges = input._repartitioned(Partitioning.HASH, key, refuses_nulls=check_nulls(where, nulls))
        return KeyedStream(self._pipeline, edges, self._schema, key)

    def union(self, *others: Stream) -> Stream:
        """Unite streams that have the same columns in the same order. Records of different streams come in no order."""
        edges = list(self._input()._edges)
        fields = list(self._schema)
        where = f"union after {self._origin()}"
        for other in others:
            if not isinstance(other, Stream):
                raise GraphError(
                    f"{where}: {called(other)} can't be united; unite the streams first, then key_by or broadcast the result"
                )
            check_same_pipeline(where, self, other)
            edges += other._input()._edges
            checks.check_same_schema(f"{where} with {other._origin()}", first=self._schema, other=other._schema)
            for each in (self, other):
                reason = "in a union the updates of a key come in no order"
                check_ordered(self._pipeline._nodes, f"{where} with {other._origin()}", each._edges, reason)
            fields = [
                field.with_nullable(field.nullable or also.nullable)
                for field, also in zip(fields, other._schema, strict=True)
            ]
        return Stream(self._pipeline, tuple(edges), pa.schema(fields) if others else self._schema)

    def as_append(self) -> Stream:
        """Take every update of an upsert stream for a record of its own, such as for a log of updates in Parquet files:

            bids.key_by("auction").aggregate("bids", n=tg.count()).as_append().to("log", tg.sinks.parquet("updates/"))

        Of a stream of changes, `row_kind` becomes a column like any other. A stream that is appended to stays as it is.
        """
        edges = tuple(replace(edge, as_append=True, upserts_by=()) for edge in self._edges)
        return Stream(self._pipeline, edges, self._schema)

    def as_upserts(self, *key: str) -> Stream:
        """Take each record of an appended stream for the new row of its key, which replaces the one before. The records of
        a key must arrive in their order: from one split, or behind an operator that is keyed alike."""
        return as_upserts(self, key)

    def as_changelog(
        self, name: str, /, *, ttl: Duration | None = None, parallelism: int | None = None, alias: Names = ()
    ) -> Stream:
        """Turn upserts into changes: the deletion of a key's former row, if there was one, and the insertion of the new one.

            counts = bids.key_by("auction").aggregate("counts", n=tg.count())
            counts.as_changelog("changed counts").filter("n > 10").key_by("n").aggregate("auctions", auctions=tg.count())

        The output has the column `row_kind` in front, which is "+I" or "-D" (docs/columns.md). Its state is the last row of
        each key, kept under `name`. A row that isn't replaced within the `ttl` is forgotten, and not deleted.
        """
        return as_changelog(self, name, ttl, parallelism, alias)

    def rebalance(self) -> Stream:
        """Spread the records evenly over the next operator's subtasks. The order of records is lost."""
        reason = "rebalance brings records out of order"
        where = f"rebalance after {self._origin()}"
        check_ordered(self._pipeline._nodes, where, self._edges, reason, retracts_too=True)
        return Stream(self._pipeline, self._input()._repartitioned(Partitioning.REBALANCE), self._schema)

    def broadcast(self) -> BroadcastStream:
        """Send every record to every subtask, for `connect` and `lookup_join`."""
        edges = self._input()._repartitioned(Partitioning.BROADCAST)
        return BroadcastStream(self._pipeline, edges, self._schema)

    def window(
        self,
        assigner: Assigner,
        *,
        allowed_lateness: Duration | None = None,
        late: str | None = None,
        early: ClockDuration | None = None,
        trigger: AnyTrigger | None = None,
        purge: bool = False,
    ) -> WindowedStream:
        """Put all records into windows, whatever their key: one subtask computes the aggregates. The rest is as in
        `KeyedStream.window`."""
        input = self._input()
        return WindowedStream(
            self._pipeline,
            input._edges,
            self._schema,
            key=(),
            assigner=assigner,
            allowed_lateness=allowed_lateness,
            late=late,
            early=early,
            trigger=trigger,
            purge=purge,
        )

    def connect(self, other: Stream | BroadcastStream) -> ConnectedStreams:
        """Connect two streams for one `CoProcess`, or this one and a broadcast one for a `BroadcastProcess`."""
        where = f"connect after {self._origin()}"
        if isinstance(other, KeyedStream):
            raise GraphError(
                f"{where}: the right stream is keyed by {columns_text(other.key)}, the left one isn't; use "
                f"key_by on both, or on neither"
            )
        return ConnectedStreams(self, connectable(where, self, other))

    def side_output(self, tag: str) -> Stream:
        """Return what the operator that made this stream emits with `ctx.side(tag, row)`."""
        where = f"side_output({tag!r}) after {self._origin()}"
        edge = self._edges[0]
        if len(self._edges) > 1 or edge.tag is not None or edge.partitioning is not Partitioning.FORWARD:
            raise GraphError(f"{where}: side outputs belong to an operator; call side_output on what process(…) returned")
        node = self._pipeline._nodes[edge.source]
        tag = checks.check_side_output(where, tag, node)
        return Stream(self._pipeline, (replace(edge, tag=tag, upserts_by=()),), node.side_schemas[tag])

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            advice = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise AttributeError(f"a stream has no {name!r}{advice}")

    def __repr__(self) -> str:
        return f"<stream of {self._origin()}: {ddl_of(self._schema) or 'no output'}>"

    # Inside.

    def _common_parallelism(self) -> int | None:
        """Return the parallelism that all upstream operators have, so that a watermark sees a source subtask's records in
        their order."""
        found = {
            self._pipeline._nodes[edge.source].parallelism if edge.partitioning is Partitioning.FORWARD else None
            for edge in self._edges
        }
        return found.pop() if len(found) == 1 else None

    def _columns(
        self,
        method: str,
        make: Callable[[str], column_steps.AnyStep],
        name: str | None,
        parallelism: int | None,
    ) -> Stream:
        """Add an operator of one step, which `make` returns for the operator's name."""
        input = self._input()
        given, name = name is not None, self._pipeline._new_name(method, name)
        step, takes, made = column_steps.keeping(name, make(name), meaning(self._pipeline._nodes, *input._edges))
        return self._pipeline._add(
            ColumnsSpec(method, step, takes),
            name=name,
            schema=input.schema if isinstance(step, Filter) else step.schema,
            inputs=(input,),
            parallelism=parallelism,
            named_by_user=given,
            upserts_by=made.key,
            retracts=made.retracts,
        )

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
            inputs=(input,),
            parallelism=parallelism,
            named_by_user=given,
        )


def _ends_of_loop(stream: Stream, loop: str, given: object) -> tuple[Stream, Stream]:
    """Return the feedback and the output that a loop's body returned."""
    where = f"loop {loop!r}"
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise GraphError(
            f"{where}: the body returned {called(given)}; return two streams, the feedback and the output "
            f"(they may be the same): return feedback, output"
        )
    for what, end in zip(("feedback", "output"), given, strict=True):
        if not isinstance(end, Stream):
            advice = (
                "return the stream before key_by or broadcast, and use these on what iterate returns"
                if isinstance(end, KeyedStream | BroadcastStream)
                else "return a stream made from the body's argument"
            )
            raise GraphError(f"{where}: the {what} that the body returned is {called(end)}; {advice}")
        check_same_pipeline(f"{where}, {what}", stream, end)
    return given[0], given[1]


def _tail_name(loop: str) -> str:
    return f"{loop}-feedback"


def _new_tail_name(pipeline: Pipeline, loop: str) -> str:
    return pipeline._new_name(f"loop {loop!r}, whose feedback is called", _tail_name(loop))
