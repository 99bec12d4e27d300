"""A stateful processor of Spark's as the function of a grouped operator: by rows, and by pandas DataFrames.

Each key costs one call of the processor, a cursor that is set, and the rows' own making; everything else is done for
thousands of rows at once. So rows are of a class whose fields are shared (`row_class`), timer values are made once for each
epoch, and what the processor gives is turned into Arrow by column.

A row that doesn't fit the declared output is an error that names the operator, the row and what to change. Where Spark is
lenient (a number for a text, a datetime without zone) so is this: what Tidegate's own strict conversion refuses is given to
Arrow's, which Spark uses.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, islice, repeat
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, StatefulProcessor, TimerValues
from pyspark.sql.types import Row

from tidegate.dataflow.operators.grouped import NO_TIME_MS, GroupFunction, Groups, Times
from tidegate.dataflow.operators.user_code import blame
from tidegate.errors import SchemaError
from tidegate.spark.processor_errors import NoKey
from tidegate.spark.processor_states import DeclaredState, LiveHandle
from tidegate.spark.processor_values import python_columns, row_class, user_keys
from tidegate.state.descriptors import Descriptor
from tidegate.state.timers import TimeKind, TimerQueue
from tidegate.types import ddl_of, from_list

if TYPE_CHECKING:
    import pandas as pd

# Output becomes columns when there are so many rows (or DataFrames): soon, while they are in the processor's cache.
FLUSH_ROWS = 512
_REFUSALS = (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError)


class ProcessorFunction(GroupFunction):
    """`zone` is the session's time zone. Without a `time` (time mode None) a processor is told no times."""

    def __init__(self, processor: StatefulProcessor, declared: Mapping[str, DeclaredState], *, returns: pa.Schema,
                 key_types: Sequence[pa.DataType], zone: str, time: TimeKind | None) -> None:
        self._given = processor
        self._declared = dict(declared)
        self._returns = returns
        self._key_types = tuple(key_types)
        self._zone = zone
        self._time = time

    @property
    def states(self) -> Sequence[Descriptor]:
        return [declared.descriptor() for declared in self._declared.values()]

    def open(self, operator: str, tables: Mapping[str, Any], timers: TimerQueue | None, cursor: Any) -> None:
        self._operator = operator
        self._cursor = cursor
        self._user_keys = user_keys(self._key_types, self._zone)
        self._processor = copy.copy(self._given)        # the slots of a test may share a process, and the plan
        self._handle = LiveHandle(self._declared, tables, timers, self._time)
        cursor.key = NoKey()
        self._processor.init(self._handle)
        self._handle.end_init()

    def take_initial(self, groups: Groups, times: Times) -> None:
        handle, values, cursor = self._processor.handleInitialState, self._timer_values(times), self._cursor
        for key, user_key, group in zip(groups.keys, self._user_keys(groups.keys), self._parts(groups), strict=True):
            cursor.key = key
            try:
                for part in group:
                    handle(user_key, part, values)
            except Exception as error:
                blame(self._operator, error, at=f"the initial state of key {user_key!r}, {group[0]!r}")

    def take_records(self, groups: Groups, times: Times) -> Iterator[pa.RecordBatch]:
        handle, values, cursor = self._processor.handleInputRows, self._timer_values(times), self._cursor
        out: list[Any] = []
        for key, user_key, group in zip(groups.keys, self._user_keys(groups.keys), self._parts(groups), strict=True):
            cursor.key = key
            try:
                given = handle(user_key, iter(group), values)
                if given is not None:
                    out.extend(given)
            except Exception as error:
                blame(self._operator, error, at=f"the records of key {user_key!r}, the first of them {group[0]!r}")
            if len(out) >= FLUSH_ROWS:
                yield self._batch(out)
                out = []
        if out:
            yield self._batch(out)

    def take_expired(self, expired: Iterator[int], times: Times) -> Iterator[pa.RecordBatch]:
        handle, values, cursor = self._processor.handleExpiredTimer, self._timer_values(times), self._cursor
        out: list[Any] = []
        for at_ms in expired:
            (user_key,) = self._user_keys([cursor.key])
            try:
                given = handle(key=user_key, timerValues=values, expiredTimerInfo=ExpiredTimerInfo(at_ms))
                if given is not None:
                    out.extend(given)
            except Exception as error:
                blame(self._operator, error, at=f"the timer at {at_ms} of key {user_key!r}")
            if len(out) >= FLUSH_ROWS:
                yield self._batch(out)
                out = []
        if out:
            yield self._batch(out)

    def close(self) -> None:
        if hasattr(self, "_handle"):
            self._cursor.key = NoKey()
            self._handle.begin_close()
            self._processor.close()

    def _timer_values(self, times: Times) -> TimerValues:
        return TimerValues(*times) if self._time is not None else TimerValues(NO_TIME_MS, NO_TIME_MS)

    def _refused(self, what: str) -> SchemaError:
        return SchemaError(f"operator {self._operator!r} is declared with the output {ddl_of(self._returns)!r}, and {what}. "
                           f"Change what the processor yields, or the declared output.")

    @abstractmethod
    def _parts(self, groups: Groups) -> Iterator[Sequence[Any]]:
        """What `handleInputRows` iterates over, key by key, and what `handleInitialState` is called with one by one."""

    @abstractmethod
    def _batch(self, given: list[Any]) -> pa.RecordBatch:
        """What the processor gave."""


class RowFunction(ProcessorFunction):
    """Rows in, rows out."""

    def open(self, operator: str, tables: Mapping[str, Any], timers: TimerQueue | None, cursor: Any) -> None:
        self._classes: dict[tuple[str, ...], type[Row]] = {}
        self._names = list(self._returns.names)
        self._orders: dict[tuple[str, ...], list[int]] = {}
        super().open(operator, tables, timers, cursor)

    def _parts(self, groups: Groups) -> Iterator[Sequence[Any]]:
        names = tuple(groups.rows.schema.names)
        kind = self._classes.get(names) or self._classes.setdefault(names, row_class(names))
        rows = map(tuple.__new__, repeat(kind), zip(*python_columns(groups.rows, self._zone), strict=True))
        if len(groups.sizes) == groups.rows.num_rows:
            return zip(rows, strict=False)      # each has one
        stops = list(accumulate(groups.sizes, initial=0))
        return map(list(rows).__getitem__, map(slice, stops, islice(stops, 1, None)))

    def _batch(self, given: list[Any]) -> pa.RecordBatch:
        names = self._names
        try:
            rows = [row if row.__fields__ == names else self._in_order(row) for row in given]
        except AttributeError:
            rows = [self._in_order(row) for row in given]
        columns = zip(*rows, strict=True)
        return pa.RecordBatch.from_arrays([self._column(list(values), field, rows)
                                           for values, field in zip(columns, self._returns, strict=True)],
                                          schema=self._returns)

    def _in_order(self, row: Any) -> Sequence[Any]:
        """The row's values in the order of the output. Fields go by their names, as in Spark."""
        names = self._names
        fields = getattr(row, "__fields__", None)
        if fields is None and isinstance(row, tuple | list) and len(row) == len(names):
            return row
        if fields is None:
            raise self._refused(f"the processor gave {row!r}, which is no Row of these columns")
        order = self._orders.get(tuple(fields))
        if order is None:
            if sorted(fields) != sorted(names):
                raise self._refused(f"the processor gave {row!r}, whose fields are not these columns")
            order = self._orders[tuple(fields)] = [list(fields).index(name) for name in names]
        return [tuple.__getitem__(row, index) for index in order]

    def _column(self, values: list[Any], field: pa.Field, rows: Sequence[Any]) -> pa.Array:
        if field.type.num_fields:
            values = list(map(_without_rows, values))
        try:
            return from_list(values, field.type)
        except SchemaError:
            try:
                return pa.array(values, type=field.type)
            except _REFUSALS as error:
                index = next((index for index, value in enumerate(values) if not _is_of(value, field.type)), 0)
                raise self._refused(f"the column {field.name!r} of the row {rows[index]!r} doesn't fit: {error}") from error


def _without_rows(value: Any) -> Any:
    if isinstance(value, Row):
        return value.asDict(True)
    if isinstance(value, list):
        return list(map(_without_rows, value))
    if isinstance(value, dict):
        return {key: _without_rows(item) for key, item in value.items()}
    return value


def _is_of(value: Any, kind: pa.DataType) -> bool:
    try:
        pa.array([value], type=kind)
    except _REFUSALS:
        return False
    return True


class PandasFunction(ProcessorFunction):
    """DataFrames in, DataFrames out. The rows of a key are one DataFrame."""

    def _parts(self, groups: Groups) -> Iterator[Sequence[Any]]:
        frame = self._frame(groups.rows)
        start = 0
        for size in groups.sizes:
            yield (_part(frame, start, size),)
            start += size

    def _frame(self, rows: pa.RecordBatch) -> pd.DataFrame:
        import pandas as pd

        return pd.DataFrame({name: _series(column, self._zone) for name, column in
                             zip(rows.schema.names, rows.columns, strict=True)}, copy=False)

    def _batch(self, given: list[Any]) -> pa.RecordBatch:
        import pandas as pd

        for frame in given:
            if not isinstance(frame, pd.DataFrame):
                raise self._refused(f"the processor gave {frame!r}, which is no pandas.DataFrame")
        frames = [frame for frame in given if len(frame)]
        if not frames:
            return pa.RecordBatch.from_pylist([], schema=self._returns)
        together = frames[0] if len(frames) == 1 else pd.concat(frames, ignore_index=True)
        by_name = any(isinstance(label, str) for label in together.columns)
        missing = set(self._returns.names) - set(together.columns) if by_name else set()
        if missing or len(together.columns) < len(self._returns):
            raise self._refused(f"the processor gave a DataFrame with the columns {list(map(str, together.columns))}")
        columns = [self._column(together[field.name] if by_name else together.iloc[:, index], field)
                   for index, field in enumerate(self._returns)]
        return pa.RecordBatch.from_arrays(columns, schema=self._returns)

    def _column(self, series: pd.Series[Any], field: pa.Field) -> pa.Array:
        kind = field.type
        if pa.types.is_timestamp(kind) and kind.tz is not None and series.dtype.kind == "M":
            series = _in_utc(series, self._zone)
        try:
            return pa.Array.from_pandas(series, type=kind)
        except _REFUSALS:
            try:
                return pa.Array.from_pandas(series).cast(kind)
            except _REFUSALS as error:
                raise self._refused(f"the column {field.name!r} of a DataFrame that the processor gave, of pandas's type "
                                    f"{series.dtype}, doesn't fit: {error}") from error


def _part(frame: pd.DataFrame, start: int, size: int) -> pd.DataFrame:
    """A key's rows, numbered from 0. They are in no other part, so that they may be changed in place."""
    import pandas as pd

    part = frame.iloc[start:start + size]
    part.index = pd.RangeIndex(size)
    part._is_copy = None
    return part


def _series(column: pa.Array, zone: str) -> Any:
    kind = column.type
    if pa.types.is_integer(kind):
        column = column.cast(pa.int64())
    elif pa.types.is_floating(kind):
        column = column.cast(pa.float64())
    series = column.to_pandas(coerce_temporal_nanoseconds=True)
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return series.dt.tz_convert(zone).dt.tz_localize(None)
    return series


def _in_utc(series: Any, zone: str) -> Any:
    aware = series if getattr(series.dt, "tz", None) is not None else series.dt.tz_localize(zone, ambiguous=False)
    return aware.dt.tz_convert("UTC")


FUNCTIONS: dict[bool, Callable[..., ProcessorFunction]] = {False: RowFunction, True: PandasFunction}
"""By whether it is for pandas."""
