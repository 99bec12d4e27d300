"""Calling a user's function: what went wrong is told in the user's terms.

The error carries the operator's name, the record at hand and the traceback of the user's own frames, without the
engine's; so do the errors that led to it (`raise … from …`).
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa

from tidegate.errors import SchemaError, TidegateError, UserFunctionError
from tidegate.types import batch_of, ddl_of

_ENGINE = str(Path(__file__).resolve().parents[2]) + os.sep
_RECORD_TEXT_LIMIT = 500


def blame(operator: str, error: BaseException, record: Any = None, *, at: str | None = None) -> NoReturn:
    """Raises `UserFunctionError` for an error that came out of a user's function.

    Where there is no record, `at` says what was being processed.
    """
    told = traceback.TracebackException.from_exception(error)
    _leave_engine_out(told, seen=set())
    if record is not None:
        at = _shown(record)
    raise UserFunctionError(operator=operator, user_traceback="".join(told.format()), record=at) from error


@contextmanager
def blaming(operator: str, *, at: str | None = None) -> Iterator[None]:
    """Around a call of a connector. An error that is one of the engine's own passes as it is."""
    try:
        yield
    except TidegateError:
        raise
    except Exception as error:
        blame(operator, error, at=at)


def fit(operator: str, rows: list[Any], schema: pa.Schema, *, side: str | None = None) -> pa.RecordBatch:
    """Rows that a user's function gave, under the schema declared for them: `returns`, or that of a side output."""
    try:
        return batch_of(rows, schema)
    except SchemaError as error:
        argument = "returns=" if side is None else f"side_outputs[{side!r}]="
        raise SchemaError(f"operator {operator!r} is declared with {argument}{ddl_of(schema)!r}, and what its function "
                          f"gave doesn't fit: {error}. Change the function or the declaration.") from error


def _leave_engine_out(told: traceback.TracebackException | None, *, seen: set[int]) -> None:
    if told is None or id(told) in seen:
        return
    seen.add(id(told))
    theirs = [frame for frame in told.stack if not frame.filename.startswith(_ENGINE)]
    if theirs:
        told.stack = traceback.StackSummary.from_list(theirs)
    _leave_engine_out(told.__cause__, seen=seen)
    _leave_engine_out(told.__context__, seen=seen)


def _shown(record: Any) -> str:
    try:
        text = repr(record)
    except Exception as error:  # noqa: BLE001  (a repr of the user's: the error to tell about is another one)
        text = f"<a {type(record).__name__} that can't be shown: {error!r}>"
    return text if len(text) <= _RECORD_TEXT_LIMIT else text[:_RECORD_TEXT_LIMIT - 1] + "…"
