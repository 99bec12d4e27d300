"""An expression that is ready to run, and its way into another process: as its text and its schema."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from tidegate.errors import ExpressionError, SchemaError
from tidegate.expressions.typed import DAYS, DURATION, MONTHS, Text, as_array
from tidegate.types import parse_type


class Compiled:
    """`compile_expression` returns it. Calling it with a record batch of its schema returns one array.

    A call raises `ExpressionError` if the expression has no value for a record.
    """

    __slots__ = ("_run", "columns", "field", "is_column", "schema", "text")

    def __init__(self, text: str, schema: pa.Schema) -> None:
        if not isinstance(text, str):
            raise SchemaError(f"an expression is text in Spark's SQL dialect, such as 'price * 0.9 AS euros', not {text!r}")
        source = Text(text)
        # sqlglot takes a tenth of a second to import: only programs with expressions pay for it.
        from tidegate.expressions.compiling import compile_text

        found = compile_text(source, schema)
        part = found.part
        self.text = text
        self.schema = schema
        self._run = part.run
        type, nullable = part.type, part.nullable
        self.columns = tuple(name for name in schema.names if name in found.columns)
        self.is_column = found.is_column
        if self.is_column:
            # A column as it is keeps its encoding, such as a dictionary.
            index = schema.names.index(part.sql)
            self._run = lambda batch: batch.column(index)
            type = schema.field(index).type
        if type in (DURATION, DAYS, MONTHS):
            source.fail("its value is an interval, which can't be a column; add it to a date or a timestamp")
        if pa.types.is_null(type):
            source.fail("its type isn't known; use CAST(NULL AS …)")
        parse_type(type)
        self.field = pa.field(found.name, type, nullable)
        self._check_kernels(source)

    def _check_kernels(self, source: Text) -> None:
        """Compute the expression for no rows: what Arrow has no kernel for is an error now, and not at the first record."""
        nothing = pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in self.schema], schema=self.schema)
        try:
            made = as_array(self._run(nothing), 0)
        except ExpressionError:
            return  # constants, such as 1 / 0: it fails if a record comes
        except pa.ArrowException as error:
            source.fail(f"Arrow can't compute it: {error}")
        assert made.type == self.type, f"{source.text}: {made.type}, not {self.type}"

    @property
    def name(self) -> str:
        """The alias, or else the name that Spark gives such a column."""
        return str(self.field.name)

    @property
    def type(self) -> pa.DataType:
        return self.field.type

    @property
    def nullable(self) -> bool:
        return bool(self.field.nullable)

    def __call__(self, batch: pa.RecordBatch) -> pa.Array:
        """Return the value of each row."""
        try:
            return as_array(self._run(batch), batch.num_rows)
        except pa.ArrowException as error:
            raise ExpressionError(f"Arrow can't compute {self.text}: {error}") from error

    def first_failing(self, batch: pa.RecordBatch) -> int:
        """Return the row at which the expression fails. It is known that one does."""
        low, high = 0, batch.num_rows
        while high - low > 1:
            middle = (low + high) // 2
            try:
                self(batch.slice(low, middle - low))
                low = middle
            except ExpressionError:
                high = middle
        return low

    def __reduce__(self) -> tuple[Any, ...]:
        return Compiled, (self.text, self.schema)

    def __repr__(self) -> str:
        return f"<expression {self.text!r}: {self.field}>"


def compile_expression(text: str, schema: pa.Schema) -> Compiled:
    """Return an expression in Spark's SQL dialect, compiled for record batches of a schema.

    Raise `SchemaError` if the text can't be read, if a column or a function isn't known, or if types don't fit.
    """
    return Compiled(text, schema)
