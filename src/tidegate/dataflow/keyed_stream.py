"""Keyed streams, broadcast streams and connected streams: inputs for the next operator, which returns a `Stream` again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NoReturn, TypeAlias

import pyarrow as pa

from tidegate.arguments import ClockDuration, Duration
from tidegate.dataflow import checks
from tidegate.dataflow.aggregates.aggregation import Aggregation
from tidegate.dataflow.aggregates.base import Aggregate
from tidegate.dataflow.changelog import check_no_row_kind, check_reads_no_row_kind, meaning, without_row_kind
from tidegate.dataflow.contracts import Sink
from tidegate.dataflow.flow import Flow, Names, SchemaLike, Takes, columns_text, connectable
from tidegate.dataflow.functions import BroadcastProcess, CoProcess, KeyedBatchProcess, KeyedProcess
from tidegate.dataflow.graph import Edge, Spec
from tidegate.dataflow.operators.aggregate import AggregateSpec, AggregatingSpec, RunningSpec
from tidegate.dataflow.operators.aggregate_changes import AggregateOfChangesSpec
from tidegate.dataflow.operators.broadcast import BroadcastProcessSpec
from tidegate.dataflow.operators.changelog import changes_schema
from tidegate.dataflow.operators.keyed_batch import KeyedBatchSpec
from tidegate.dataflow.operators.process import CoProcessSpec, KeyedProcessSpec
from tidegate.dataflow.ranking import (
    deduplicate_of_changes_spec,
    deduplicate_spec,
    over_spec,
    ranked_schema,
    rate_limit_spec,
    top_of_changes_spec,
    top_spec,
)
from tidegate.dataflow.regular_joins import regular_join
from tidegate.dataflow.timed_joins import check_kind_of_join, interval_join, temporal_join
from tidegate.dataflow.triggers import AnyTrigger
from tidegate.dataflow.windowed_stream import WindowedStream
from tidegate.dataflow.windows import Assigner
from tidegate.errors import GraphError
from tidegate.types import ddl_of

if TYPE_CHECKING:
    from tidegate.dataflow.pipeline import Pipeline
    from tidegate.dataflow.stream import Stream

JoinKind: TypeAlias = Literal["inner", "left", "right", "full", "semi", "anti"]


class KeyedStream(Flow):
    """Records by key: what `key_by` returns."""

    __slots__ = ("_key",)

    def __init__(self, pipeline: Pipeline, edges: tuple[Edge, ...], schema: pa.Schema, key: tuple[str, ...]) -> None:
        super().__init__(pipeline, edges, schema)
        self._key = key

    @property
    def key(self) -> tuple[str, ...]:
        """The key columns."""
        return self._key

    def process(
        self,
        name: str,
        function: KeyedProcess | KeyedBatchProcess,
        returns: SchemaLike = None,
        *,
        side_outputs: Mapping[str, SchemaLike] | None = None,
        parallelism: int | None = None,
        alias: Names = (),
    ) -> Stream:
        """Run a `KeyedProcess`, record by record, or a `KeyedBatchProcess`, on whole batches. The other arguments are as in
        `Stream.process`."""
        in_batches = isinstance(function, KeyedBatchProcess)
        expected = KeyedBatchProcess if in_batches else KeyedProcess
        takes = Takes(expected, f"a stream keyed by {columns_text(self._key)}", keyed=True)
        spec: Spec = KeyedBatchSpec(function, self._key) if in_batches else KeyedProcessSpec(function, self._key)
        return self._pipeline._add_process(
            spec,
            function,
            takes=takes,
            name=name,
            inputs=(self,),
            returns=returns,
            side_outputs=side_outputs,
            parallelism=parallelism,
            alias=alias,
        )

    def aggregate(
        self,
        name: str,
        /,
        *,
        ttl: Duration | None = None,
        renamed: Mapping[str, str] | None = None,
        parallelism: int | None = None,
        alias: Names = (),
        **aggregates: Aggregate,
    ) -> Stream:
        """Aggregate all records of each key: `bids.key_by("auction").aggregate("bids", n=tg.count(), best=tg.max("price"))`.

        The columns of the result are the key's and one for each aggregate. Whenever records of a key come, its new result is
        emitted, once for each batch: an upsert by key, which replaces the one before. Sinks must take upserts; use
        `.as_append()` to write every update. A key that has no record for the `ttl` begins again.

        Of a stream of changes, the result is changes too: the former result is deleted and the new one inserted. A key of
        which every record was deleted has no result any more.

        Aggregates may be added, which then start empty, and removed. To keep the state of one that gets another name, say
        which it had: `renamed={"bids": "n"}`.
        """
        return self._aggregate(name, AggregateSpec, aggregates, ttl, renamed or {}, parallelism, alias)

    def running(
        self,
        name: str,
        /,
        *,
        ttl: Duration | None = None,
        renamed: Mapping[str, str] | None = None,
        parallelism: int | None = None,
        alias: Names = (),
        **aggregates: Aggregate,
    ) -> Stream:
        """Add the aggregates of its key so far to each record: `bids.key_by("auction").running("rank", nth=tg.count())`.

        The columns are the input's and one for each aggregate, which includes the record itself. The rest is as in
        `aggregate`.
        """
        return self._aggregate(name, RunningSpec, aggregates, ttl, renamed or {}, parallelism, alias)

    def over(
        self,
        name: str,
        order_by: str | Sequence[str],
        rows: int,
        /,
        *,
        late: str | None = None,
        parallelism: int | None = None,
        alias: Names = (),
        **aggregates: Aggregate,
    ) -> Stream:
        """Add aggregates of the last records of its key to each record, in the order of event time:
        `sales.key_by("seller").over("last ten", "sold", 10, average=tg.mean("price"))`.

        The columns are the input's and one for each aggregate, of the record itself and up to `rows - 1` records before it:
        SQL's `OVER (PARTITION BY … ORDER BY … ROWS BETWEEN 9 PRECEDING AND CURRENT ROW)`. The first column of `order_by` is
        that of event time; further ones, and then the order of arrival, decide between equal ones. A record is emitted when
        the watermark has reached its time. One that comes later is dropped, or goes to the side output that `late` names.
        Records without a time are dropped.
        """
        name = self._pipeline._new_name("operator", name)
        aliases = self._pipeline._new_aliases("operator", name, alias)
        spec = over_spec(name, self._schema, self._key, order_by=order_by, rows=rows, late=late, aggregates=aggregates)
        return self._pipeline._add(
            spec,
            name=name,
            schema=pa.schema([*self._schema, *spec.aggregation.fields]),
            inputs=(self,),
            side_schemas={} if late is None else {late: self._schema},
            parallelism=parallelism,
            named_by_user=True,
            aliases=aliases,
        )

    def deduplicate(
        self,
        name: str,
        *,
        keep: Literal["first", "last"] = "first",
        order_by: str | None = None,
        ttl: Duration | None = None,
        parallelism: int | None = None,
        alias: Names = (),
    ) -> Stream:
        """Keep one record of each key: `orders.key_by("id").deduplicate("orders")`.

        The first one by arrival is emitted at once, and all later ones are dropped. With `keep="last"`, or if first and last
        are by the order of a column, such as `order_by="ts"`, a record may be replaced later: the result is upserts by key.
        The state of a key is forgotten `ttl` after a record of it was emitted.

        Of changes, all records are kept: if the one that was emitted is deleted, the next one takes its place. The result is
        changes, with one row for each key.
        """
        name = self._pipeline._new_name("operator", name)
        aliases = self._pipeline._new_aliases("operator", name, alias)
        retracts, rows = self._rows()
        spec = deduplicate_spec(name, rows, self._key, keep=keep, order_by=order_by, ttl=ttl, retracts=retracts)
        return self._pipeline._add(
            deduplicate_of_changes_spec(name, rows, spec) if retracts else spec,
            name=name,
            schema=changes_schema(rows) if retracts else rows,
            inputs=(self,),
            parallelism=parallelism,
            named_by_user=True,
            aliases=aliases,
            upserts_by=self._key if retracts or spec.keep_last or spec.order_by is not None else (),
            retracts=retracts,
        )

    def top(
        self,
        name: str,
        count: int,
        *,
        by: str | Sequence[str],
        descending: bool | Sequence[bool] = False,
        rank: str = "rank",
        ttl: Duration | None = None,
        parallelism: int | None = None,
        alias: Names = (),
    ) -> Stream:
        """Keep the first `count` records of each key in an order: `.top("best", 10, by="price", descending=True)`.

        The result has the columns of the records and their rank, from 1. Whenever the record at a rank changes, the new one
        is emitted: an upsert by key and rank. Of records that are equal in order, the one that arrived first is first. A key
        whose ranks haven't changed for the `ttl` begins again.

        Of changes, all records are kept: if one of the best is deleted, those behind it move up. The result is changes.
        """
        name = self._pipeline._new_name("operator", name)
        aliases = self._pipeline._new_aliases("operator", name, alias)
        where = f"operator {name!r}"
        retracts, rows = self._rows()
        spec = top_spec(name, rows, self._key, count=count, by=by, descending=descending, ttl=ttl)
        schema = ranked_schema(where, rows, rank)
        if retracts:
            check_no_row_kind(where, schema.names)
        return self._pipeline._add(
            top_of_changes_spec(name, rows, spec) if retracts else spec,
            name=name,
            schema=changes_schema(schema) if retracts else schema,
            inputs=(self,),
            parallelism=parallelism,
            named_by_user=True,
            aliases=aliases,
            upserts_by=(*self._key, rank),
            retracts=retracts,
        )

    def rate_limit(
        self,
        name: str,
        count: int,
        *,
        per: ClockDuration,
        burst: int | None = None,
        excess: str | None = None,
        parallelism: int | None = None,
        alias: Names = (),
    ) -> Stream:
        """Let at most `count` records of each key pass in a time: `.rate_limit("alerts", 10, per="1 minute")`.

        Time is that of the clock. Every key has a bucket of `burst` tokens (by default `count`), which is full at first and
        gets `count` tokens in that time, evenly. A record takes one. A record that finds none is dropped, or goes to the
        side output that `excess` names.
        """
        name = self._pipeline._new_name("operator", name)
        aliases = self._pipeline._new_aliases("operator", name, alias)
        return self._pipeline._add(
            rate_limit_spec(name, self._key, count=count, per=per, burst=burst, excess=excess),
            name=name,
            schema=self._schema,
            inputs=(self,),
            side_schemas={} if excess is None else {excess: self._schema},
            parallelism=parallelism,
            named_by_user=True,
            aliases=aliases,
        )

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
        """Put each key's records into windows: `.window(tg.tumbling("ts", "10 s")).aggregate("per window", n=tg.count())`.

        A window is complete when the watermark has reached its end. A record that comes later is dropped, or goes to the
        side output that `late` names: `result.side_output("late")`. Within `allowed_lateness` after the window's end a late
        record is counted and the window's result is emitted again, so that the newest row of a key and window is the right
        one. Records without a time are in no window.

        `trigger` says when the results so far of open windows are emitted: `tg.after("10 s")`, ten seconds (of processing
        time) after they have changed; `tg.every_records(100)`; both, joined by `|`; or one of your own (`tg.Trigger`).
        `early="10 s"` is short for the first. With `purge`, what was shown is dropped: every record is in one result.
        """
        return WindowedStream(
            self._pipeline,
            self._edges,
            self._schema,
            key=self._key,
            assigner=assigner,
            allowed_lateness=allowed_lateness,
            late=late,
            early=early,
            trigger=trigger,
            purge=purge,
        )

    def connect(self, other: KeyedStream | BroadcastStream) -> ConnectedStreams:
        """Connect two streams keyed alike for one `CoProcess`, or this one and a broadcast one for a `BroadcastProcess`."""
        where = f"connect after {self._origin()}"
        right = connectable(where, self, other)
        if not isinstance(right, KeyedStream | BroadcastStream):
            raise GraphError(
                f"{where}: the left stream is keyed by {columns_text(self._key)}, the right one isn't; use "
                f"key_by on both, or on neither (or broadcast() on the right one)"
            )
        if isinstance(right, KeyedStream):
            checks.check_same_key_types(
                where,
                left=[self._schema.field(column) for column in self._key],
                right=[right._schema.field(column) for column in right._key],
            )
        return ConnectedStreams(self, right)

    def join(
        self,
        name: str,
        other: KeyedStream,
        /,
        *,
        how: JoinKind = "inner",
        ttl: Duration | None = None,
        between: tuple[Duration, Duration] | None = None,
        times: str | tuple[str, str] | None = None,
        as_of: str | tuple[str, str] | None = None,
        late: tuple[str | None, str | None] | None = None,
        parallelism: int | None = None,
        alias: Names = (),
    ) -> Stream:
        """Join two streams by key: `bids.key_by("auction").join("sold", auctions.key_by("id"), how="left", ttl="1 day")`.

        The columns are those of the left side, then those of the right; columns of the key that have one name on both
        sides are one column. Null equals nothing. Both sides are kept under `name`.

        *Regular.* The result is, at any time, the join of all records that have arrived, or with a `ttl`, of what came
        within it. `how` is inner, left, right, full, semi or anti. Inner and semi joins of appended records are appended
        records. All other results are changes, with a `row_kind`.

        *Within an interval* of event time: `between=("0 s", "1 hour"), times=("placed", "paid")`. A pair matches if the
        right record's time is from and to so long after the left record's, bounds included; negative durations are before
        it. `times` are the columns of event time. A record without a match is emitted when the watermark says that none can
        come, so that all records of the result are appended.

        *As of a version*: `as_of=("placed", "since")`. Each right record is a new version of its key, valid since its time.
        A left record is joined with the version that was valid at its own time, when the watermark has passed that. `how`
        is inner or left. With a `ttl`, the versions of a key are forgotten when it was neither asked for nor updated for
        that time.

        In joins by event time, records that come after the watermark has passed them are dropped, or go to the side outputs
        that `late` names, for the left and the right side.
        """
        check_kind_of_join(name, ttl=ttl, between=between, times=times, as_of=as_of, late=late)
        if as_of is not None:
            return temporal_join(
                self, name, other, how=how, as_of=as_of, ttl=ttl, late=late, parallelism=parallelism, alias=alias
            )
        if between is not None:
            return interval_join(
                self, name, other, how=how, between=between, times=times, late=late, parallelism=parallelism, alias=alias
            )
        return regular_join(self, name, other, how=how, ttl=ttl, parallelism=parallelism, alias=alias)

    def to(self, name: str, sink: Sink, *, parallelism: int | None = None, alias: Names = ()) -> None:
        """Write the records to a sink. The records of a key go to one subtask of the sink, in their order."""
        self._pipeline._add_sink(self, name, sink, parallelism, alias)

    def _aggregate(
        self,
        name: str,
        kind: type[AggregatingSpec],
        aggregates: Mapping[str, Aggregate],
        ttl: Duration | None,
        renamed: Mapping[str, str],
        parallelism: int | None,
        alias: Names,
    ) -> Stream:
        name = self._pipeline._new_name("operator", name)
        aliases = self._pipeline._new_aliases("operator", name, alias)
        where = f"operator {name!r}"
        is_upsert = kind is AggregateSpec
        given = meaning(self._pipeline._nodes, *self._edges)
        retracts = is_upsert and given.retracts
        aggregation = Aggregation(where, aggregates, self._schema, retracting=retracts)
        ttl_ms = None if ttl is None else checks.duration_ms(name, "ttl", ttl)
        before = [self._schema.field(column) for column in self._key] if is_upsert else list(self._schema)
        checks.check_new_columns(where, [field.name for field in before], aggregates)
        schema = pa.schema([*before, *aggregation.fields])
        if retracts:
            check_reads_no_row_kind(where, given, sorted(aggregation.columns), aggregation.text)
            check_no_row_kind(where, schema.names)
            kind, schema = AggregateOfChangesSpec, changes_schema(schema)
        return self._pipeline._add(
            kind(aggregation, self._key, ttl_ms, checks.check_renamed(where, renamed, aggregates)),
            name=name,
            schema=schema,
            inputs=(self,),
            parallelism=parallelism,
            named_by_user=True,
            aliases=aliases,
            upserts_by=self._key if is_upsert else (),
            retracts=retracts,
        )

    def _rows(self) -> tuple[bool, pa.Schema]:
        """Return whether the records are changes, and the columns of their rows."""
        retracts = meaning(self._pipeline._nodes, *self._edges).retracts
        return retracts, without_row_kind(self._schema) if retracts else self._schema

    def __repr__(self) -> str:
        return f"<stream of {self._origin()} keyed by {columns_text(self._key)}: {ddl_of(self._schema)}>"

    def _called(self) -> str:
        return "a keyed stream"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            from tidegate.dataflow.stream import Stream  # which imports this module

            known = isinstance(getattr(Stream, name, None), property) or callable(getattr(Stream, name, None))
            advice = f": call .{name}(…) before key_by, or a process after it" if known else ""
            raise AttributeError(f"a keyed stream has no {name!r}{advice}")


class BroadcastStream(Flow):
    """Records that go to every subtask: what `broadcast` returns. Connect another stream with it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<broadcast stream: {ddl_of(self._schema)}>"

    def _called(self) -> str:
        return "a broadcast stream"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"a broadcast stream has no {name!r}: it is the right side of a connection, "
                f"stream.connect(rules.broadcast()).process(name, function, returns=…)"
            )


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class ConnectedStreams:
    """Two streams that are input to one operator: what `connect` returns."""

    _left: Stream | KeyedStream
    _right: Stream | KeyedStream | BroadcastStream

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
        """Run a `CoProcess`, or a `BroadcastProcess` if the right stream is broadcast."""
        left, right = self._left, self._right
        key = left.key if isinstance(left, KeyedStream) else ()
        spec: Spec
        if isinstance(right, BroadcastStream):
            takes = Takes(BroadcastProcess, "a stream connected with a broadcast one", keyed=bool(key))
            spec = BroadcastProcessSpec(function, key)
        else:
            takes = Takes(CoProcess, "two connected streams", keyed=bool(key))
            spec = CoProcessSpec(function, (key, right.key) if isinstance(right, KeyedStream) else None)
        return left._pipeline._add_process(
            spec,
            function,
            takes=takes,
            name=name,
            inputs=(left, right),
            returns=returns,
            side_outputs=side_outputs,
            parallelism=parallelism,
            alias=alias,
        )

    def __repr__(self) -> str:
        return f"<{self._left!r} connected with {self._right!r}>"
