"""The functions that an expression can call by name. A name that isn't here is an error, with the nearest ones."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence

from tidegate.expressions.functions import dates, nested, numbers, strings
from tidegate.expressions.functions.calls import Call
from tidegate.expressions.typed import Text, Typed

_FUNCTIONS: Mapping[str, Callable[[Call], Typed]] = {
    **numbers.FUNCTIONS,
    **strings.FUNCTIONS,
    **dates.FUNCTIONS,
    **nested.FUNCTIONS,
}
_CLOCKS = ("current_timestamp", "now", "current_date", "curdate", "localtimestamp", "rand", "random", "uuid", "randn")
_AGGREGATES = ("count", "sum", "min", "max", "avg", "mean", "first", "last", "collect_list", "collect_set", "row_number")


_INSTEAD = {
    **dict.fromkeys(
        ("explode", "explode_outer"),
        "it makes several records of one, as the operator .explode(…) does: stream.explode('array AS x')",
    ),
    "from_unixtime": "use timestamp_seconds(…), and date_format(…) for a text",
    "window": "windows are operators: key_by(…).window(tg.tumbling(…)).aggregate(…)",
    "session_window": "windows are operators: key_by(…).window(tg.sessions(…)).aggregate(…)",
}


def names() -> tuple[str, ...]:
    """Return the names of all functions."""
    return tuple(sorted(_FUNCTIONS))


def call(name: str, parts: Sequence[Typed], source: Text, at: int | None, *, fields: Sequence[str | None] = ()) -> Typed:
    """Return the part that is the call of a function."""
    function = _FUNCTIONS.get(name)
    if function is None:
        source.fail(f"function {name!r} is not supported; {_advice(name)}", at)
    return function(Call(name, parts, source, at, fields))


def _advice(name: str) -> str:
    if name in _CLOCKS:
        return "its value would change when records are processed again after a failure: make it in the source"
    if name in _AGGREGATES:
        return "an aggregate needs several records: use key_by(…).aggregate(…)"
    if name in _INSTEAD:
        return _INSTEAD[name]
    near = difflib.get_close_matches(name, _FUNCTIONS, n=3)
    return f"did you mean {', '.join(near)}?" if near else "docs/columns.md lists those that are, and map_batches takes any"
