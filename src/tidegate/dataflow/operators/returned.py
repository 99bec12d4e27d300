"""The rows that a user's function returns, or an error that says what it should have returned.

Everything that a generator function yields is taken as it comes: either it is a row, or it doesn't fit the declared schema
(user_code.fit). A value that a generator function returns would be lost, so that is an error. Checking for it costs time for
each record, so it is checked only if the function's code has a `return` with a value.

Any other function may have returned one row instead of a list of rows, a text (whose letters would be rows) or a dict (whose
keys would be rows). Then nothing of it is taken. What is in a list is checked when the rows become columns (user_code.fit).
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Generator, Mapping
from types import CodeType
from typing import Any

from tidegate.errors import SchemaError
from tidegate.types import shown

# Classes of libraries whose objects are whole tables, and yield no rows when they are iterated over.
FRAMES = {
    ("pandas", "DataFrame"),
    ("pyspark", "DataFrame"),
    ("polars", "DataFrame"),
    ("pyarrow", "Table"),
    ("pyarrow", "RecordBatch"),
}


def taker(function: Callable[..., Any], out: list[Any], *, item: str = "row") -> Callable[[Any], None]:
    """Return a callable that appends what the function returned to `out`. It is not called with None."""
    extend = out.extend
    if inspect.isgeneratorfunction(function):
        return functools.partial(_take_checked, function, extend, item) if _may_return(function) else extend

    def take(given: Any) -> None:
        _check(function, given, item)
        extend(given)

    return take


def _take_checked(
    function: Callable[..., Any], extend: Callable[[Any], None], item: str, given: Generator[Any, None, Any]
) -> None:
    returned: Any = None

    def drained() -> Generator[Any, None, None]:
        nonlocal returned
        returned = yield from given

    extend(drained())
    if returned is not None:
        raise SchemaError(
            f"{_name(function)} returned {_shown(returned)} and has a `yield` elsewhere, so that what it returns is lost. "
            f"Give each {item} with `yield {item}`, and end with `return` alone"
        )


def _may_return(function: Callable[..., Any]) -> bool:
    """Return whether the function's code has a `return` with a value other than None."""
    while isinstance(function, functools.partial):
        function = function.func
    code: CodeType | None = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and _returns_something(code)


# The answer takes some hundred microseconds, and is needed for every batch. Spark's processes live long, and receive new
# code with every job, so the cache is bounded.
@functools.lru_cache(maxsize=256)
def _returns_something(code: CodeType) -> bool:
    before = None
    for each in dis.get_instructions(code):
        if each.opname == "RETURN_CONST" and each.argval is not None:
            return True
        if each.opname == "RETURN_VALUE" and (
            each.is_jump_target or before is None or before.opname != "LOAD_CONST" or before.argval is not None
        ):
            return True
        before = each
    return False


def _check(function: Callable[..., Any], given: Any, item: str) -> None:
    if _is_one(given) or isinstance(given, Mapping) or (isinstance(given, tuple) and len(given) > 0 and _is_value(given[0])):
        raise SchemaError(
            f"{_name(function)} returned {_shown(given)}, and not several {item}s. Give each {item} with `yield {item}`, "
            f"all of them with `return [{item}, …]`, or none with `return`"
        )


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__)).rpartition("<locals>.")[2]


def _shown(given: Any) -> str:
    return f"one {type(given).__name__}" if _is_frame(given) else shown(given)


def _is_one(given: Any) -> bool:
    """Return whether it has no rows, or is a single DataFrame, whose column names would be taken for rows."""
    return _is_value(given) or _is_frame(given)


def _is_frame(given: Any) -> bool:
    """Return whether it is a DataFrame, by its class, since none of the libraries may be imported for this. Other objects
    with columns may well be rows, such as the result of a database query."""
    return hasattr(given, "columns") and any(
        (each.__module__.partition(".")[0], each.__name__) in FRAMES for each in type(given).__mro__
    )


def _is_value(given: Any) -> bool:
    return isinstance(given, str | bytes) or not hasattr(given, "__iter__")
