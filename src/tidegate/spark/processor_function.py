"""A stateful processor of Spark's as the function of a grouped operator: by rows, and by pandas DataFrames.

Each key costs one call of the processor, setting the cursor, and creating the rows; everything else is done for thousands of
rows at once. So all rows share a class (`row_class`), timer values are made once for each epoch, and the output is converted
to Arrow by column.

A row that doesn't fit the declared output is an error that names the operator, the row and what to change. If Spark accepts
a value of another type (a number for a text, a datetime without a time zone), so does this: values that Tidegate's strict
conversion refuses are passed to Arrow's, which Spark uses.
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
from tidegate.dataflow.operators.returned import taker
from tidegate.dataflow.operators.user_code import RAISED, blame
from tidegate.errors import SchemaError
from tidegate.spark import processor_pandas
from tidegate.spark.processor_errors import NoKey
from tidegate.spark.processor_settings import ProcessorSettings
from tidegate.spark.processor_states import DeclaredState, LiveHandle
from tidegate.spark.processor_values import python_column, row_class, user_keys
from tidegate.state.descriptors import Descriptor
from tidegate.state.timers import TimeKind, TimerQueue
from tidegate.types import ddl_of, from_list

if TYPE_CHECKING:
    import pandas as pd

FLUSH_ROWS = 512  # that many rows or DataFrames become columns, while they are still in the CPU's cache
_REFUSALS = (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError)


class ProcessorFunction(GroupFunction):
    """A processor as a `GroupFunction`. `settings` are the session's. Without a `time` (time mode None) a processor gets no
    times. `gives` is the word for what it yields, in errors."""

    gives: str

    def __init__(
        self,
        processor: StatefulProcessor,
        declared: Mapping[str, DeclaredState],
        *,
        returns: pa.Schema,
        key_types: Sequence[pa.DataType],
        settings: ProcessorSettings,
        time: TimeKind | None,
    ) -> None:
        self._given = processor
        self._declared = dict(declared)
        self._returns = returns
        self._key_types = tuple(key_types)
        self._settings = settings
        self._time = time

    @property
    def states(self) -> Sequence[Descriptor]:
        return [declared.descriptor() for declared in self._declared.values()]

    def open(self, operator: str, tables: Mapping[str, Any], timers: TimerQueue | None, cursor: Any) -> None:
        self._operator = operator
        self._cursor = cursor
        self._user_keys = user_keys(self._key_types, self._settings.zone)
        self._processor = copy.copy(self._given)  # the slots of a test may share a process, and the plan
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
            except RAISED as error:
                blame(self._operator, error, at=f"the initial state of key {user_key!r}, {group[0]!r}")

    def take_records(self, groups: Groups, times: Times) -> Iterator[pa.RecordBatch]:
        handle, values, cursor = self._processor.handleInputRows, self._timer_values(times), self._cursor
        out: list[Any] = []
        take = taker(handle, out, item=self.gives)
        for key, user_key, group in zip(groups.keys, self._user_keys(groups.keys), self._parts(groups), strict=True):
            cursor.key = key
            try:
                given = handle(user_key, iter(group), values)
                if given is not None:
                    take(given)
            except RAISED as error:
                blame(self._operator, error, at=f"the records of key {user_key!r}, the first of them {group[0]!r}")
            if len(out) >= FLUSH_ROWS:
                yield from self._batches(out)
                out.clear()
        if out:
            yield from self._batches(out)

    def take_expired(self, expired: Iterator[int], times: Times) -> Iterator[pa.RecordBatch]:
        handle, values, cursor = self._processor.handleExpiredTimer, self._timer_values(times), self._cursor
        out: list[Any] = []
        take = taker(handle, out, item=self.gives)
        for at_ms in expired:
            (user_key,) = self._user_keys([cursor.key])
            try:
                given = handle(key=user_key, timerValues=values, expiredTimerInfo=ExpiredTimerInfo(at_ms))
                if given is not None:
                    take(given)
            except RAISED as error:
                blame(self._operator, error, at=f"the timer at {at_ms} of key {user_key!r}")
            if len(out) >= FLUSH_ROWS:
                yield from self._batches(out)
                out.clear()
        if out:
            yield from self._batches(out)

    def close(self) -> None:
        if hasattr(self, "_handle"):
            self._cursor.key = NoKey()
            self._handle.begin_close()
            self._processor.close()

    def _timer_values(self, times: Times) -> TimerValues:
        return TimerValues(*times) if self._time is not None else TimerValues(NO_TIME_MS, NO_TIME_MS)

    def _refused(self, what: str) -> SchemaError:
        return SchemaError(
            f"operator {self._operator!r} is declared with the output {ddl_of(self._returns)!r}, and {what}. "
            f"Change what the processor yields, or the declared output."
        )

    @abstractmethod
    def _parts(self, groups: Groups) -> Iterator[Sequence[Any]]:
        """Yield, for each key, what `handleInputRows` iterates over. `handleInitialState` is called with one item each."""

    @abstractmethod
    def _batches(self, given: list[Any]) -> Iterator[pa.RecordBatch]:
        """Yield what the processor gave as batches of the declared output."""


class RowFunction(ProcessorFunction):
    """A processor that takes and yields rows."""

    gives = "row"

    def open(self, operator: str, tables: Mapping[str, Any], timers: TimerQueue | None, cursor: Any) -> None:
        self._classes: dict[tuple[str, ...], type[Row]] = {}
        self._names = list(self._returns.names)
        self._orders: dict[tuple[str, ...], list[int]] = {}
        super().open(operator, tables, timers, cursor)

    def _parts(self, groups: Groups) -> Iterator[Sequence[Any]]:
        names = tuple(groups.rows.schema.names)
        kind = self._classes.get(names) or self._classes.setdefault(names, row_class(names))
        columns = [python_column(column, self._settings.zone) for column in groups.rows.columns]
        rows = map(tuple.__new__, repeat(kind), zip(*columns, strict=True))
        if len(groups.sizes) == groups.rows.num_rows:
            return zip(rows, strict=False)  # every key has one row
        stops = list(accumulate(groups.sizes, initial=0))
        return map(list(rows).__getitem__, map(slice, stops, islice(stops, 1, None)))

    def _batches(self, given: list[Any]) -> Iterator[pa.RecordBatch]:
        names = self._names
        try:
            rows = [row if row.__fields__ == names else self._in_order(row) for row in given]
        except AttributeError:
            rows = [self._in_order(row) for row in given]
        columns = zip(*rows, strict=True)
        yield pa.RecordBatch.from_arrays(
            [self._column(list(values), field, rows) for values, field in zip(columns, self._returns, strict=True)],
            schema=self._returns,
        )

    def _in_order(self, row: Any) -> Sequence[Any]:
        """Return the row's values in the order of the output. Fields are matched by name, as in Spark."""
        names = self._names
        fields = getattr(row, "__fields__", None)
        if fields is None and isinstance(row, tuple | list) and len(row) == len(names):
            return row
        if fields is None:
            raise self._refused(f"the processor gave {row!r}, which is not a Row of these columns")
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
    """A processor that takes and yields pandas DataFrames."""

    gives = "DataFrame"

    def _parts(self, groups: Groups) -> Iterator[Sequence[Any]]:
        return processor_pandas.frames_of(groups, self._settings)

    def _batches(self, given: list[Any]) -> Iterator[pa.RecordBatch]:
        import pandas as pd

        for frame in given:
            if not isinstance(frame, pd.DataFrame):
                raise self._refused(f"the processor gave {frame!r}, which is not a pandas.DataFrame")
            self._check_columns(frame)
        frames = [frame for frame in given if len(frame)]
        try:
            yield from processor_pandas.batches_of(frames, self._returns, self._settings)
        except processor_pandas.REFUSALS as error:
            raise self._refused(f"a DataFrame that the processor gave doesn't fit: {error}") from error

    def _check_columns(self, frame: pd.DataFrame) -> None:
        names = frame.columns
        by_name = self._settings.by_name and any(isinstance(name, str) for name in names)
        missing = set(self._returns.names) - set(names) if by_name else set()
        if len(frame) and (missing or len(names) < len(self._returns)):
            raise self._refused(f"the processor gave a DataFrame with the columns {list(map(str, names))}")


# By whether the processor is for pandas.
FUNCTIONS: dict[bool, Callable[..., ProcessorFunction]] = {False: RowFunction, True: PandasFunction}
