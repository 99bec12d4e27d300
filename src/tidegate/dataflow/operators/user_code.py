"""Calling a user's function: what went wrong is told in the user's terms.

The error carries the operator's name, the record at hand and the traceback of the user's own frames, without the engine's.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa

from tidegate.errors import SchemaError, UserFunctionError
from tidegate.types import batch_of, ddl_of

_ENGINE = str(Path(__file__).resolve().parents[2])
_RECORD_TEXT_LIMIT = 500


def blame(operator: str, error: BaseException, record: Any = None) -> NoReturn:
    """Raises `UserFunctionError` for an error that came out of a user's function."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(_ENGINE)] or list(frames)
    text = "Traceback (most recent call last):\n" + "".join(traceback.format_list(theirs))
    text += "".join(traceback.format_exception_only(error))
    shown = None if record is None else repr(record)[:_RECORD_TEXT_LIMIT]
    raise UserFunctionError(operator=operator, user_traceback=text, record=shown) from error


def fit(operator: str, rows: list[Any], schema: pa.Schema) -> pa.RecordBatch:
    """Rows that a user's function gave, under its declared schema."""
    try:
        return batch_of(rows, schema)
    except SchemaError as error:
        raise SchemaError(f"operator {operator!r} is declared with returns={ddl_of(schema)!r}, and what its function gave "
                          f"doesn't fit: {error}. Change the function or the declaration.") from error
