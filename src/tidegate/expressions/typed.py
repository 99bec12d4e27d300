"""A part of an expression whose type is known, and how it is computed.

`Typed.run` computes the part for a record batch: an Arrow array, or a scalar that stands for the same value in every row.
A part all of whose arguments are constants is computed once, when it is built.

In Spark's ANSI mode a part may fail: an overflow, a division by zero, an invalid cast. `may_fail` marks such parts.
Whatever decides whether a part is computed for a row (CASE, AND, COALESCE) computes it for these rows only
(conditions.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeAlias

import pyarrow as pa

from tidegate.errors import ExpressionError, SchemaError
from tidegate.types import ddl_of

Value: TypeAlias = "pa.Array | pa.Scalar"
Run: TypeAlias = Callable[[pa.RecordBatch], Value]

BOOLEAN, INT, LONG, FLOAT, DOUBLE = pa.bool_(), pa.int32(), pa.int64(), pa.float32(), pa.float64()
STRING, BINARY, DATE, NULL = pa.string(), pa.binary(), pa.date32(), pa.null()
TIMESTAMP, TIMESTAMP_NTZ = pa.timestamp("us", tz="UTC"), pa.timestamp("us")
DURATION = pa.duration("us")
"""Spark's day-time interval. It is never the type of a column."""
DAYS = pa.duration("s")
"""Such an interval in days alone."""
MONTHS = pa.month_day_nano_interval()
"""Spark's year-month interval, which is always a constant here: an int of months."""


@dataclass(frozen=True, slots=True)
class Typed:
    """`sql` is what Spark calls the part in column names. `constant` is its value, if that is known already. `encoded`
    returns the values as a dictionary array, if the part is a column of text that is encoded so."""

    type: pa.DataType
    run: Run
    sql: str
    nullable: bool = True
    may_fail: bool = False
    constant: pa.Scalar | None = None
    encoded: Run | None = None

    @property
    def is_null_literal(self) -> bool:
        return self.constant is not None and not self.constant.is_valid

    def named(self, sql: str) -> Typed:
        return replace(self, sql=sql)


@dataclass(frozen=True, slots=True)
class Text:
    """The text of an expression, for errors."""

    text: str

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        """Raise the error."""
        raise self.error(message, at)

    def error(self, message: str, at: int | None = None) -> SchemaError:
        """Return the error of an expression that can't be compiled, with the position that it is about."""
        shown = " ".join(self.text.splitlines())
        where = "" if at is None else f"\n    {' ' * at}^"
        position = "" if at is None else f" (at position {at})"
        return SchemaError(f"can't compile the expression: {message}{position}\n    {shown}{where}")


def constant(value: Any, type: pa.DataType, sql: str) -> Typed:
    """Return a constant of a Python value."""
    return of_scalar(pa.scalar(value, type), sql)


def of_scalar(scalar: pa.Scalar, sql: str, *, type: pa.DataType | None = None) -> Typed:
    return Typed(type or scalar.type, lambda batch: scalar, sql, nullable=not scalar.is_valid, constant=scalar)


def as_array(value: Value, row_count: int) -> pa.Array:
    """Return the array of a value, which may be a scalar or a chunked array of one chunk."""
    if isinstance(value, pa.Scalar):
        return pa.repeat(value, row_count) if row_count else pa.nulls(0, value.type)
    return value.combine_chunks() if isinstance(value, pa.ChunkedArray) else value


def apply(
    function: Callable[..., Value],
    arguments: Sequence[Typed],
    type: pa.DataType,
    sql: str,
    *,
    nullable: bool | None = None,
    fails: str | None = None,
    on_arrays: bool = False,
) -> Typed:
    """Return the part that is `function` of the arguments' values.

    `nullable`: by default it is null if an argument is. `fails`: what to say if Arrow refuses the values; without it no
    value is refused. `on_arrays`: the function takes arrays only.
    """
    runs = [each.run for each in arguments]

    def compute(values: list[Value], row_count: int) -> Value:
        if on_arrays:
            values = [as_array(value, row_count) for value in values]
        if fails is None:
            return function(*values)
        try:
            return function(*values)
        except pa.ArrowInvalid as error:
            raise ExpressionError(f"{fails}, in {sql}") from error

    def run(batch: pa.RecordBatch) -> Value:
        return compute([each(batch) for each in runs], batch.num_rows)

    # Of null it is null, and it never fails for an entry of a dictionary that no row has: so entries are computed once.
    may_use_entries = nullable is None and fails is None
    made = Typed(
        type,
        (_by_entries(compute, run, arguments) if may_use_entries else None) or run,
        sql,
        nullable=any(each.nullable for each in arguments) if nullable is None else nullable,
        may_fail=fails is not None or any(each.may_fail for each in arguments),
    )
    return _folded(made) if all(each.constant is not None for each in arguments) else made


def _by_entries(compute: Callable[[list[Value], int], Value], run: Run, arguments: Sequence[Typed]) -> Run | None:
    """Return how to compute the entries of a dictionary instead of the rows, if one argument is encoded and the others are
    constants."""
    varying = [index for index, each in enumerate(arguments) if each.constant is None]
    if len(varying) != 1 or (encoded := arguments[varying[0]].encoded) is None:
        return None

    def run_by_entries(batch: pa.RecordBatch) -> Value:
        column = encoded(batch)
        entry_count = len(column.dictionary)
        if entry_count >= batch.num_rows:
            return run(batch)
        values = [column.dictionary if each.constant is None else each.constant for each in arguments]
        return as_array(compute(values, entry_count), entry_count).take(column.indices)

    return run_by_entries


_ONE_ROW = pa.record_batch([pa.nulls(1)], names=["row"])


def _folded(made: Typed) -> Typed:
    """Return the constant that a part without columns is. If it fails, it fails when it is needed: a branch may not be."""
    try:
        value = made.run(_ONE_ROW)
    except ExpressionError:
        return made
    scalar = value if isinstance(value, pa.Scalar) else as_array(value, 1)[0]
    return replace(made, run=lambda batch: scalar, constant=scalar, may_fail=False, nullable=not scalar.is_valid)


def type_name(type: pa.DataType) -> str:
    """Return Spark's name of a type, for messages."""
    names = {DURATION: "interval", DAYS: "interval", MONTHS: "interval", NULL: "void"}
    return names.get(type) or ddl_of(type)
