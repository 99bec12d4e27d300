"""Records whose key is null: kept by default, or refused.

As in Spark, null is a key like any other: all records whose key is null share one state and go to one subtask. In a key of
several columns, those records share a state that are null in the same columns and equal in the others. If a null key is a
mistake, use `key_by(…, nulls="refuse")`, which ends the job at the first one.
"""

from __future__ import annotations

import pyarrow as pa

from tidegate.errors import GraphError, SchemaError

KEEP, REFUSE = "keep", "refuse"


def check_nulls(where: str, nulls: str) -> bool:
    """Return whether null keys are refused."""
    if nulls not in (KEEP, REFUSE):
        raise GraphError(f"{where}: nulls={nulls!r}; choose {KEEP!r} (null is a key like any other) or {REFUSE!r}")
    return nulls == REFUSE


def refuse_null_keys(batch: pa.RecordBatch, key: tuple[str, ...], operator: str) -> None:
    """Raise `SchemaError` if a key column has a null. This costs next to nothing, since Arrow counts nulls."""
    for name in key:
        column = batch.column(name)
        if column.null_count:
            record = batch.slice(column.is_null().index(True).as_py(), 1).to_pylist()[0]
            raise SchemaError(
                f"operator {operator!r}: key column {name!r} is null in record {record}, and key_by(…, nulls={REFUSE!r}) "
                f"refuses it. Filter such records out before key_by, or omit nulls=: null is then a key like any other"
            )
