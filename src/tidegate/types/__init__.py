"""Types as Spark names them, Arrow's types, and conversions between Python values and Arrow columns.

The engine works with Arrow types only; users write DDL text, and their functions see Python values.

    ddl         DDL text and pyspark's types to Arrow types, and back to text
    durations   "1 s" to milliseconds
    limits      how many bytes go into one column
    columns     one column to Python values, and back
    rows        a batch to named tuples, and back
    json_form   frozen dataclasses to JSON, and back

Not here: casts between Arrow types, schema evolution.
"""

from __future__ import annotations

from tidegate.types.columns import from_list, shown, to_list
from tidegate.types.ddl import ddl_of, parse_schema, parse_type
from tidegate.types.durations import parse_duration_ms
from tidegate.types.rows import batch_of, row_class, rows_of

__all__ = [
    "batch_of",
    "ddl_of",
    "from_list",
    "parse_duration_ms",
    "parse_schema",
    "parse_type",
    "row_class",
    "rows_of",
    "shown",
    "to_list",
]
