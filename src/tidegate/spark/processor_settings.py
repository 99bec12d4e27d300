"""The settings of a Spark session that change what a processor is given, or what may become of its output.

They are read once, when the query is built, as Spark reads them when a query starts. docs/migrating.md lists them, and the
settings of Spark's Python workers that change nothing here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TIME_ZONE = "spark.sql.session.timeZone"
TIMESTAMP_TYPE = "spark.sql.timestampType"
# The rest is for pandas.
CONVERT_SAFELY = "spark.sql.execution.pandas.convertToArrowArraySafely"
INT_TO_DECIMAL = "spark.sql.execution.pythonUDF.pandas.intToDecimalCoercionEnabled"
INT_EXTENSIONS = "spark.sql.execution.pythonUDF.pandas.preferIntExtensionDtype"
BY_NAME = "spark.sql.legacy.execution.pandas.groupedMap.assignColumnsByName"
FRAME_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
FRAME_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorSettings:
    """`zone` is that of timestamps. The rest is about DataFrames: `frame_rows` and `frame_bytes` limit those that a
    processor is given; with `int_extensions` integers don't become floats beside nulls. In its output columns go by name
    or by position, a value that would be cut is an error if it `is_safe`, and with `int_to_decimal` integers may stand for
    decimals."""

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
            return text(name).lower() == "true"

        def text(name: str) -> str:
            found: Any = spark.conf.get(name)
            return str(found)

        rows = int(text(FRAME_ROWS))
        return cls(
            zone=text(TIME_ZONE),
            is_safe=is_on(CONVERT_SAFELY),
            int_to_decimal=is_on(INT_TO_DECIMAL),
            int_extensions=is_on(INT_EXTENSIONS),
            by_name=is_on(BY_NAME),
            frame_rows=rows if rows > 0 else 2**31 - 1,
            frame_bytes=_bytes_of(spark),
        )


def _bytes_of(spark: SparkSession) -> int:
    """Spark reads '64MB'."""
    limit: int = spark._jsparkSession.sessionState().conf().arrowMaxBytesPerBatch()
    return limit


def has_ntz(spark: SparkSession) -> bool:
    """Whether 'timestamp' in a text is one without a time zone."""
    return str(spark.conf.get(TIMESTAMP_TYPE)).upper() == "TIMESTAMP_NTZ"
