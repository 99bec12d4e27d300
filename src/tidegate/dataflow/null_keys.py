"""Records without a key: kept, which is the rule, or refused.

A null is a key like any other: all records whose key is null have one state, and go to one subtask (in a key of several
columns, those that are null in the same columns and equal in the others). That is Spark's rule as well. Where a null is a
mistake, `key_by(…, nulls="refuse")` ends the job at the first one.
"""

from __future__ import annotations

import pyarrow as pa

from tidegate.errors import GraphError, SchemaError

KEEP, REFUSE = "keep", "refuse"


def check_nulls(where: str, nulls: str) -> bool:
    """Whether null keys are refused."""
    if nulls not in (KEEP, REFUSE):
        raise GraphError(f"{where}: nulls={nulls!r}; choose {KEEP!r} (null is a key like any other) or {REFUSE!r}")
    return nulls == REFUSE


def refuse_null_keys(batch: pa.RecordBatch, key: tuple[str, ...], operator: str) -> None:
    """`SchemaError` where a key column has a null. Arrow knows how many there are: it costs next to nothing."""
    for name in key:
        column = batch.column(name)
        if column.null_count:
            record = batch.slice(column.is_null().index(True).as_py(), 1).to_pylist()[0]
            raise SchemaError(
                f"operator {operator!r}: key column {name!r} is null in record {record}, and key_by(…, nulls={REFUSE!r}) "
                f"refuses it. Filter such records out before key_by, or omit nulls=: null is then a key like any other"
            )
