"""Errors of users' functions, reported in the user's terms.

The error has the operator's name, the record, and the traceback of the user's own frames without the engine's. So do the
errors that led to it (`raise … from …`).

The error also says whether a restart can help. A missing module is final, and so are system errors that last
(system_errors.py) and `sys.exit()`. An error of the outside world (a service that is down, a network, a disk) may be over at
the next attempt, even if it happens again at the same record. Any other error that happens again at the same record is
caused by the program or the record (protocol/restart.py). Errors of the outside world are `OSError` (including
`ConnectionError` and `TimeoutError`), `MemoryError`, classes of libraries that have such a name, and every error that one of
these led to.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa

from tidegate.errors import JobError, SchemaError, TidegateError, UserFunctionError
from tidegate.system_errors import advice, lasts
from tidegate.types import batch_of, ddl_of
from tidegate.types.limits import ColumnTooLarge

_ENGINE = str(Path(__file__).resolve().parents[2]) + os.sep
_RECORD_TEXT_LIMIT = 500
# What a user's function may raise: also `SystemExit`, and the panic of a library in Rust, which is not an `Exception`.
RAISED = BaseException
EXIT_ADVICE = (
    "A function must not end its process, which holds the state of other keys, too. To skip a record, return; to "
    "let the job fail, raise an exception; to end the job, call handle.stop() in the program.\n"
)
# The names that drivers and clients give to their own errors of the outside world. All database drivers have an
# `OperationalError` for errors that the program didn't cause (PEP 249).
_OUTSIDE = {"ConnectionError", "TimeoutError", "OperationalError", "InterfaceError", "RpcError"}


def blame(operator: str, error: BaseException, record: Any = None, *, at: str | None = None) -> NoReturn:
    """Raise `UserFunctionError` for an error that a user's function raised.

    If there is no record, `at` says what was being processed. Errors that end the process (`KeyboardInterrupt`) or a
    generator (`GeneratorExit`) are raised unchanged.
    """
    if isinstance(error, KeyboardInterrupt | GeneratorExit):
        raise error
    told = traceback.TracebackException.from_exception(error)
    is_theirs = _leave_engine_out(told, seen=set())
    if record is not None:
        at = _text_of(record)
    what_to_do = final_advice(error)
    explains_itself = isinstance(error, TidegateError) and not is_theirs
    said = f"{type(error).__name__}: {error}\n" if explains_itself else "".join(told.format())
    raise UserFunctionError(
        operator=operator,
        user_traceback=said + (what_to_do or ""),
        record=None if at is None else _shown(at),
        signature=None if is_outside(error) else _signature(error, told, at),
        final=what_to_do is not None or isinstance(error, JobError),
    ) from error


def final_advice(error: BaseException) -> str | None:
    """Return what to do about an error that no restart cures, as lines, or None for any other error."""
    if isinstance(error, SystemExit):
        return EXIT_ADVICE
    if isinstance(error, ImportError):
        return missing_module_advice(error)
    return f"{advice(error)}\n" if lasts(error) and not isinstance(error, JobError) else None


def missing_module_advice(error: ImportError) -> str:
    """Return what to do about a module that a slot's process can't import, even if the driver can."""
    module = (error.name or "the module").partition(".")[0]
    return (
        f"This process runs {sys.executable} on {socket.gethostname()}, which can't import it. If {module} is a file of "
        f"your program, send it along: spark.sparkContext.addPyFile('{module}.py') before the job starts, or "
        f"spark-submit --py-files {module}.py. If it is a package, install it there, or let PYSPARK_PYTHON name a "
        f"Python that has it, before the session is made.\n"
    )


def is_outside(error: BaseException) -> bool:
    """Return whether the error, or one that led to it, is an error of the outside world."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        if isinstance(each, OSError | MemoryError) or any(kind.__name__ in _OUTSIDE for kind in type(each).__mro__):
            return True
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    return False


def _signature(error: BaseException, told: traceback.TracebackException, at: str | None) -> str:
    """Return the text by which the same error is recognised. The message shows only the beginning of `at`; here all of it
    counts."""
    place = f" at {told.stack[-1].filename}:{told.stack[-1].lineno}" if told.stack else ""
    text = f", {zlib.crc32(at.encode('utf-8', 'backslashreplace')):08x}" if at is not None else ""
    return f"{type(error).__module__}.{type(error).__qualname__}{place}{text}"


@contextmanager
def blaming(operator: str, *, at: str | None = None) -> Iterator[None]:
    """Blame an operator for errors of a call into a connector. The engine's own errors are raised unchanged."""
    try:
        yield
    except TidegateError:
        raise
    except RAISED as error:
        blame(operator, error, at=at)


def fit(operator: str, rows: list[Any], schema: pa.Schema, *, side: str | None = None) -> Iterator[pa.RecordBatch]:
    """Return the rows of a user's function in the declared schema: `returns`, or that of a side output. They are one batch,
    or several if they have too many bytes for one."""
    try:
        batch = batch_of(rows, schema)
    except ColumnTooLarge as error:
        if len(rows) == 1:
            raise ColumnTooLarge(f"operator {operator!r} gave a record that is too large: {error}") from error
        half = len(rows) // 2
        yield from fit(operator, rows[:half], schema, side=side)
        yield from fit(operator, rows[half:], schema, side=side)
    except SchemaError as error:
        argument = "returns=" if side is None else f"side_outputs[{side!r}]="
        raise SchemaError(
            f"operator {operator!r} is declared with {argument}{ddl_of(schema)!r}, and what its function "
            f"gave doesn't fit: {error}. Change the function or the declaration."
        ) from error
    else:
        yield batch


def _leave_engine_out(told: traceback.TracebackException | None, *, seen: set[int]) -> bool:
    """Remove the engine's frames, unless there are no others. Return whether there are frames of the user."""
    if told is None or id(told) in seen:
        return False
    seen.add(id(told))
    theirs = [frame for frame in told.stack if not frame.filename.startswith(_ENGINE)]
    if theirs:
        told.stack = traceback.StackSummary.from_list(theirs)
    _leave_engine_out(told.__cause__, seen=seen)
    _leave_engine_out(told.__context__, seen=seen)
    return bool(theirs)


def _text_of(record: Any) -> str:
    try:
        return repr(record)
    except Exception as error:  # noqa: BLE001  (a repr of the user's: the error to tell about is another one)
        return f"<a {type(record).__name__} that can't be shown: {error!r}>"


def _shown(text: str) -> str:
    return text if len(text) <= _RECORD_TEXT_LIMIT else text[: _RECORD_TEXT_LIMIT - 1] + "…"
