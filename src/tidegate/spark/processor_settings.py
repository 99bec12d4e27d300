"""The settings of a Spark session that change the values a processor gets, or how its output is converted.

They are read once, when the query is built, as Spark reads them when a query starts. docs/migrating.md lists them, and the
settings of Spark's Python workers that have no effect here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TIME_ZONE = "spark.sql.session.timeZone"
TIMESTAMP_TYPE = "spark.sql.timestampType"
# The following are for pandas.
CONVERT_SAFELY = "spark.sql.execution.pandas.convertToArrowArraySafely"
INT_TO_DECIMAL = "spark.sql.execution.pythonUDF.pandas.intToDecimalCoercionEnabled"
INT_EXTENSIONS = "spark.sql.execution.pythonUDF.pandas.preferIntExtensionDtype"
BY_NAME = "spark.sql.legacy.execution.pandas.groupedMap.assignColumnsByName"
FRAME_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
FRAME_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorSettings:
    """`zone` is the time zone of timestamps. The other settings are for pandas: `frame_rows` and `frame_bytes` limit the
    DataFrames that a processor gets, and with `int_extensions` a column of integers with nulls doesn't become one of floats.
    In its output, columns are matched `by_name` or by position, a value that would be cut is an error if the conversion
    `is_safe`, and with `int_to_decimal` integers are accepted for decimals."""

    zone: str
    is_safe: bool = True
    int_to_decimal: bool = False
    int_extensions: bool = False
    by_name: bool = True
    frame_rows: int = 10_000
    frame_bytes: int = 2**31 - 1

    @classmethod
    def of(cls, spark: SparkSession) -> ProcessorSettings:
        def is_on(name: str) -> bool:
            return str(spark.conf.get(name)).lower() == "true"

        rows = int(str(spark.conf.get(FRAME_ROWS)))
        return cls(
            zone=str(spark.conf.get(TIME_ZONE)),
            is_safe=is_on(CONVERT_SAFELY),
            int_to_decimal=is_on(INT_TO_DECIMAL),
            int_extensions=is_on(INT_EXTENSIONS),
            by_name=is_on(BY_NAME),
            frame_rows=rows if rows > 0 else 2**31 - 1,
            # Spark's own method reads texts such as '64MB'.
            frame_bytes=spark._jsparkSession.sessionState().conf().arrowMaxBytesPerBatch(),
        )


def has_ntz(spark: SparkSession) -> bool:
    """Whether 'timestamp' in a schema's text means a timestamp without a time zone."""
    return str(spark.conf.get(TIMESTAMP_TYPE)).upper() == "TIMESTAMP_NTZ"
