"""Windowed streams: what `window` returns. The next operator computes something of each window."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import pyarrow as pa

from tidegate import arguments
from tidegate.arguments import ClockDuration, Duration
from tidegate.dataflow import checks, windowed_records
from tidegate.dataflow.aggregates.aggregation import Aggregation
from tidegate.dataflow.aggregates.base import Aggregate
from tidegate.dataflow.flow import Flow, Names, SchemaLike, columns_text
from tidegate.dataflow.graph import Edge
from tidegate.dataflow.operators.window import END, START, time_type
from tidegate.dataflow.operators.window_aggregates import WindowSettings
from tidegate.dataflow.operators.window_spec import WindowSpec
from tidegate.dataflow.ranking import ranked_schema, window_top_spec
from tidegate.dataflow.triggers import After, AnyOf, AnyTrigger, parts
from tidegate.dataflow.windows import Assigner, Global, Paned, Sessions
from tidegate.errors import GraphError, SchemaError

if TYPE_CHECKING:
    from tidegate.dataflow.pipeline import Pipeline
    from tidegate.dataflow.stream import Stream


class WindowedStream(Flow):
    """Records by key and window."""

    __slots__ = ("_allowed_lateness", "_assigner", "_key", "_late", "_purges", "_trigger")

    def __init__(
        self,
        pipeline: Pipeline,
        edges: tuple[Edge, ...],
        schema: pa.Schema,
        *,
        key: tuple[str, ...],
        assigner: object,
        allowed_lateness: Duration | None,
        late: Any,
        early: ClockDuration | None,
        trigger: AnyTrigger | None,
        purge: bool,
    ) -> None:
        super().__init__(pipeline, edges, schema)
        where = f"window after {self._origin()}"
        if not isinstance(assigner, Assigner):
            raise GraphError(f"{where}: {assigner!r} is not a window; give one such as tg.tumbling('ts', '10 s')")
        column = None if isinstance(assigner, Global) else assigner.column
        if column is not None:
            checks.check_time_column(where, column, schema)
        elif allowed_lateness is not None or late is not None:
            raise GraphError(
                f"{where}: allowed_lateness and late are for windows of event time, and these have none: omit them"
            )
        if late is not None and (not isinstance(late, str) or not late):
            raise GraphError(f"{where}: late={late!r}; give a name for the side output of late records, such as late='late'")
        self._trigger = _triggers(early, trigger)
        self._purges = arguments.flag("window", "purge", purge)
        _check_trigger(where, assigner, self._trigger, purges=purge, has_lateness=allowed_lateness is not None)
        self._key = key
        self._assigner = assigner
        self._allowed_lateness = allowed_lateness
        self._late = late

    def aggregate(
        self,
        name: str,
        /,
        *,
        renamed: Mapping[str, str] | None = None,
        parallelism: int | None = None,
        alias: Names = (),
        **aggregates: Aggregate,
    ) -> Stream:
        """Compute aggregates of the records of each window: `.aggregate("per window", n=tg.count(), total=tg.sum("price"))`.

        The output has the key columns, `window_start` and `window_end` (of the time column's type), and a column for each
        aggregate. A row is emitted when the watermark has passed the window's end. With an allowed lateness or a trigger
        that doesn't purge, the output is upserts by key and window: a window's row is emitted again with each new result.

        Aggregates may be added, which then start empty, and removed; `renamed` is as in `KeyedStream.aggregate`.
        """
        name = self._pipeline._new_name("window", name)
        aliases = self._pipeline._new_aliases("window", name, alias)
        where = f"operator {name!r}"
        aggregation = Aggregation(
            where, aggregates, self._schema, triggers=self._trigger.by_records, numbering=self._assigner.merges
        )
        before = [self._schema.field(column) for column in self._key]
        if not isinstance(self._assigner, Global):
            before += [pa.field(bound, self._time_type(), nullable=False) for bound in (START, END)]
        names = [field.name for field in before]
        if len(set(names)) < len(names):
            raise SchemaError(f"{where}: a key column is called {START!r} or {END!r}, as the window's bounds are: rename it")
        checks.check_new_columns(where, names, aggregates)
        lateness = 0 if self._allowed_lateness is None else self._allowed_lateness
        settings = WindowSettings(
            self._key,
            aggregation,
            lateness_ms=checks.duration_ms(name, "allowed_lateness", lateness),
            late=self._late,
            early_ms=self._trigger.after_ms,
            purges=self._purges,
            renamed=checks.check_renamed(where, renamed or {}, aggregates),
        )
        return self._pipeline._add(
            WindowSpec(self._assigner, settings),
            name=name,
            schema=pa.schema([*before, *aggregation.fields]),
            inputs=(self,),
            side_schemas={} if self._late is None else {self._late: self._schema},
            parallelism=parallelism if self._key else 1,
            named_by_user=True,
            aliases=aliases,
            upserts_by=tuple(names) if settings.lateness_ms or (self._trigger.of and not self._purges) else (),
        )

    def apply(
        self,
        name: str,
        function: Callable[..., Any],
        returns: SchemaLike,
        *,
        rows: bool = False,
        parallelism: int | None = None,
        alias: Names = (),
    ) -> Stream:
        """Call a function with all records of each window, when it is complete:

            def spread(window, records):
                prices = records["price"]
                yield window.key, window.start, pc.max(prices).as_py() - pc.min(prices).as_py()

            bids.key_by("auction").window(tg.tumbling("ts", "10 s")).apply("spread", spread, returns=SPREAD)

        The function gets a `tg.KeyedWindow` and an Arrow record batch, or with `rows` a list of named tuples, in the order
        in which the records arrived. It returns rows, record batches of the declared schema, or None. For records within an
        allowed lateness it is called again with all records of the window.
        """
        return windowed_records.add_function(self, name, function, returns, rows=rows, parallelism=parallelism, alias=alias)

    def join(
        self, name: str, right: WindowedStream, *, how: str = "inner", parallelism: int | None = None, alias: Names = ()
    ) -> Stream:
        """Join the records of each key and window with those of another stream in the same windows, when these are
        complete. `how` is "inner", "left", "right", "full", "semi" or "anti".

        The result has the columns of both, `window_start` and `window_end`. Columns of the key that have one name on both
        sides come once; other columns must have different names. "semi" and "anti" have the left columns only.
        """
        return windowed_records.add_join(self, name, right, how=how, parallelism=parallelism, alias=alias)

    def cogroup(
        self,
        name: str,
        right: WindowedStream,
        function: Callable[..., Any],
        returns: SchemaLike,
        *,
        rows: bool = False,
        parallelism: int | None = None,
        alias: Names = (),
    ) -> Stream:
        """Call a function with the records that a key has in each window of this stream and of another one, either of
        which may be empty: `function(window, left, right)`. The rest is as in `apply`."""
        return windowed_records.add_cogroup(
            self, name, right, function, returns, rows=rows, parallelism=parallelism, alias=alias
        )

    def top(
        self,
        name: str,
        count: int,
        *,
        by: str | Sequence[str],
        descending: bool | Sequence[bool] = False,
        rank: str = "rank",
        parallelism: int | None = None,
        alias: Names = (),
    ) -> Stream:
        """Keep the first `count` records of each key and window in an order: `.top("best", 3, by="price", descending=True)`.

        The windows must be tumbling ones of event time. The output has the columns of the records, `window_start`,
        `window_end` and their rank, from 1. A window's records are emitted when the watermark has passed its end, and are
        appended.
        """
        name = self._pipeline._new_name("window", name)
        aliases = self._pipeline._new_aliases("window", name, alias)
        if self._allowed_lateness is not None or self._trigger.of:
            raise GraphError(f"operator {name!r}: top emits each window once: omit allowed_lateness, early and trigger")
        spec = window_top_spec(
            name,
            self._schema,
            self._key,
            assigner=self._assigner,
            count=count,
            by=by,
            descending=descending,
            late=self._late,
        )
        return self._pipeline._add(
            spec,
            name=name,
            schema=ranked_schema(f"operator {name!r}", self._schema, rank, time_column=spec.assigner.column),
            inputs=(self,),
            side_schemas={} if self._late is None else {self._late: self._schema},
            parallelism=parallelism if self._key else 1,
            named_by_user=True,
            aliases=aliases,
        )

    def __repr__(self) -> str:
        by = f" keyed by {columns_text(self._key)}" if self._key else ""
        return f"<stream of {self._origin()}{by} in windows: {self._assigner}>"

    def _called(self) -> str:
        return "a windowed stream"

    def _time_type(self) -> pa.DataType:
        column = self._assigner.column if isinstance(self._assigner, Paned | Sessions) else None
        return pa.timestamp("us", tz="UTC") if column is None else time_type(self._schema.field(column).type)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"a windowed stream has no {name!r}: call .aggregate(name, n=tg.count(), …), .top, .apply or .join on it"
            )


def _triggers(early: ClockDuration | None, trigger: AnyTrigger | None) -> AnyOf:
    given = () if trigger is None else parts(trigger)
    if early is not None:
        given = (*given, After(arguments.clock_ms("window", "early", early, at_least_ms=1)))
    return AnyOf(given)


def _check_trigger(where: str, assigner: Assigner, trigger: AnyOf, *, purges: bool, has_lateness: bool) -> None:
    """Check that windows of this kind can show results before they are complete."""
    if isinstance(assigner, Global):
        if assigner.count is None and not trigger.of:
            raise GraphError(
                f"{where}: a global window has no end: give it count=, or a trigger such as trigger=tg.after('10 s')"
            )
        if assigner.count is not None and trigger.of:
            raise GraphError(
                f"{where}: a window of {assigner.count} records is emitted when it is full: omit count=, or the trigger"
            )
    elif trigger.of and not (isinstance(assigner, Paned) and assigner.column is not None):
        raise GraphError(
            f"{where}: early results need windows whose bounds are known before they end, which are tumbling, sliding and "
            f"cumulating windows of event time, and the global window: omit early= and trigger="
        )
    elif trigger.by_records and isinstance(assigner, Paned) and not assigner.is_one_pane:
        raise GraphError(
            f"{where}: trigger {trigger.by_records[0].label!r} goes by the records, and a record is in several of these "
            f"windows; use trigger=tg.after('10 s'), or tumbling windows"
        )
    if not purges:
        return
    if not trigger.of:
        raise GraphError(f"{where}: purge=True drops what a trigger has shown: give a trigger, or omit it")
    if has_lateness or (isinstance(assigner, Paned) and not assigner.is_one_pane):
        raise GraphError(
            f"{where}: purge=True is for tumbling windows without allowed_lateness and for the global window, because other "
            f"windows need their records again"
        )
