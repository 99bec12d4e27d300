"""Records as pandas DataFrames and back, for `transformWithStateInPandas`.

Spark's own functions convert the values, so that types, time zones and the session's settings have the same effect as in
Spark. Spark makes the DataFrames of a key from Python values, row by row, which changes some types; the same changes are
made here for thousands of rows at once.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql.conversion import ArrowBatchTransformer, PandasToArrowConversion
from pyspark.sql.pandas.types import from_arrow_schema

from tidegate.dataflow.operators.grouped import Groups
from tidegate.spark.processor_settings import ProcessorSettings
from tidegate.spark.processor_values import in_zone

if TYPE_CHECKING:
    import pandas as pd

REFUSALS = (
    pa.ArrowException,
    PySparkException,
    TypeError,
    ValueError,
    OverflowError,
    AttributeError,
    AssertionError,
    KeyError,
)
MAX_NAMED = 254  # with more columns, Spark's row is a plain tuple, and the columns of its DataFrame are named by numbers
EXACT_FLOAT = 2**53


def frames_of(groups: Groups, settings: ProcessorSettings) -> Iterator[Sequence[pd.DataFrame]]:
    """Yield the DataFrames of each key."""
    rows = groups.rows
    whole, retyped = _whole(rows, settings)
    mean = max(rows.nbytes / rows.num_rows, 1) if rows.num_rows else 1
    limit = max(1, min(settings.frame_rows, math.ceil(settings.frame_bytes / mean)))  # Spark cuts when the limit is reached
    start = 0
    for size in groups.sizes:
        yield [_part(whole, first, min(limit, start + size - first), retyped) for first in range(start, start + size, limit)]
        start += size


def batches_of(frames: Sequence[pd.DataFrame], returns: pa.Schema, settings: ProcessorSettings) -> Iterator[pa.RecordBatch]:
    """Yield what a processor gave as batches with the schema of the output. Raise one of `REFUSALS` if it doesn't fit."""
    together = _together(frames)
    if together is not None:
        try:
            yield _batch_of(together, returns, settings)
        except REFUSALS:
            pass  # one by one they may fit, as in Spark, or the error shows which one doesn't
        else:
            return
    for frame in frames:
        yield _batch_of(frame, returns, settings)


def _batch_of(frame: pd.DataFrame, returns: pa.Schema, settings: ProcessorSettings) -> pa.RecordBatch:
    batch = PandasToArrowConversion.convert(
        frame,
        from_arrow_schema(returns, prefer_timestamp_ntz=True),
        timezone=settings.zone,
        safecheck=settings.is_safe,
        arrow_cast=True,
        assign_cols_by_name=settings.by_name,
        int_to_decimal_coercion_enabled=settings.int_to_decimal,
    )
    columns = [
        column if column.type == field.type else column.cast(field.type)
        for column, field in zip(batch.columns, returns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=returns)


def _together(frames: Sequence[pd.DataFrame]) -> pd.DataFrame | None:
    """Return all frames as one, since that is faster; None if integers could lose digits by it, or there is only one."""
    import pandas as pd

    names = frames[0].columns if frames else None
    if len(frames) < 2 or not all(frame.columns is names or frame.columns.equals(names) for frame in frames):
        return None
    together = pd.concat(frames, ignore_index=True)
    # If another DataFrame has floats in a column, its integers have become floats, too.
    if any(
        kind.kind == "f" and (together.iloc[:, index].abs() >= EXACT_FLOAT).any()
        for index, kind in enumerate(together.dtypes)
    ):
        return None
    return together


def _whole(rows: pa.RecordBatch, settings: ProcessorSettings) -> tuple[pd.DataFrame, list[int]]:
    """Return all rows as one DataFrame, and the indexes of columns that may have another type in a part of it."""
    import pandas as pd

    types = [in_zone(kind, settings.zone) for kind in rows.schema.types]
    rows = pa.RecordBatch.from_arrays(
        [column if column.type == kind else column.cast(kind) for column, kind in zip(rows.columns, types, strict=True)],
        names=rows.schema.names,
    )
    found = ArrowBatchTransformer.to_pandas(rows, timezone=settings.zone, prefer_int_ext_dtype=settings.int_extensions)
    retyped = []
    for index, (series, kind) in enumerate(zip(found, types, strict=True)):
        if pd.api.types.is_extension_array_dtype(series.dtype):
            retyped.append(index)
        elif series.dtype.kind in "iu":
            found[index] = series.astype("int64")
        elif series.dtype.kind == "f":
            found[index] = series.astype("float64")
        elif pa.types.is_boolean(kind) and series.dtype == object:
            retyped.append(index)
    whole = pd.concat(found, axis=1)
    # In between, Spark's rows are named tuples, which replace names that can't be a field's by numbers.
    names: Sequence[str] = vars(namedtuple("Fields", rows.schema.names, rename=True))["_fields"]
    whole.columns = pd.Index(names) if len(names) <= MAX_NAMED else pd.RangeIndex(len(names))
    return whole, retyped


def _part(whole: pd.DataFrame, start: int, size: int, retyped: Sequence[int]) -> pd.DataFrame:
    """Return some rows, numbered from 0. No other part has them, so a processor may change them in place."""
    import pandas as pd

    part = whole.iloc[start : start + size]
    if retyped:
        part = part.copy()
        for index in retyped:
            part.isetitem(index, _retyped(part.iloc[:, index]))
    part.index = pd.RangeIndex(size)
    part._is_copy = None
    return part


def _retyped(series: pd.Series[Any]) -> pd.Series[Any]:
    """Return the series with the type of its values if it has no nulls, else as objects."""
    import pandas as pd

    if series.hasnans:
        return pd.Series(list(series), dtype=object, index=series.index)
    return series.astype(getattr(series.dtype, "numpy_dtype", bool))
