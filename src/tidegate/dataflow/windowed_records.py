"""What works on the records of windows themselves: functions of whole windows, joins and co-groups by key and window.

These functions add the nodes for the methods of windowed streams, and check what can be checked when the job is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tidegate import arguments
from tidegate.dataflow import checks
from tidegate.dataflow.aggregates.aggregation import Aggregation
from tidegate.dataflow.aggregates.declaring import count
from tidegate.dataflow.flow import Names, SchemaLike, called, check_same_pipeline
from tidegate.dataflow.join_inputs import check_how
from tidegate.dataflow.operators.function_windows import FunctionWindowSpec
from tidegate.dataflow.operators.record_windows import RecordWindowSpec, plain_schema
from tidegate.dataflow.operators.session_records import SessionRecordSpec
from tidegate.dataflow.operators.showing import Showing
from tidegate.dataflow.operators.window import END, START, time_type
from tidegate.dataflow.operators.window_results import CallFunction, JoinRecords, WindowResults
from tidegate.dataflow.windows import Global, Paned, Sessions
from tidegate.errors import GraphError, SchemaError

if TYPE_CHECKING:
    from tidegate.dataflow.stream import Stream
    from tidegate.dataflow.windowed_stream import WindowedStream

_COLLECT = "collect what you need with aggregate(…, values=tg.collect_list(…))"
JOINS = ("inner", "left", "right", "full", "semi", "anti")


def add_function(
    windowed: WindowedStream,
    name: str,
    function: Callable[..., Any],
    returns: SchemaLike,
    *,
    rows: bool,
    parallelism: int | None,
    alias: Names,
) -> Stream:
    """Add a function of whole windows, which is called with all records of each."""
    name = windowed._pipeline._new_name("operator", name)
    checks.check_callable(name, "apply", function)
    schema = checks.declared_schema(name, returns)
    results = CallFunction(function, arguments.flag("apply", "rows", rows))
    if isinstance(windowed._assigner, Global):
        return _add_global(name, windowed, schema, results, parallelism, alias)
    return _add(name, (windowed,), schema, results, "window function", parallelism, alias)


def add_cogroup(
    left: WindowedStream,
    name: str,
    right: object,
    function: Callable[..., Any],
    returns: SchemaLike,
    *,
    rows: bool,
    parallelism: int | None,
    alias: Names,
) -> Stream:
    """Add a function that is called with the records of each window of two inputs."""
    name = left._pipeline._new_name("operator", name)
    other = _other(name, "cogroup", left, right)
    checks.check_callable(name, "cogroup", function)
    schema = checks.declared_schema(name, returns)
    results = CallFunction(function, arguments.flag("cogroup", "rows", rows))
    return _add(name, (left, other), schema, results, "co-group", parallelism, alias)


def add_join(left: WindowedStream, name: str, right: object, *, how: str, parallelism: int | None, alias: Names) -> Stream:
    """Add a join of the records of each window of two inputs."""
    name = left._pipeline._new_name("operator", name)
    check_how(f"operator {name!r}", how, JOINS)
    other = _other(name, "join", left, right)
    schema, results = _joined(f"operator {name!r}", left, other, how)
    return _add(name, (left, other), schema, results, "window join", parallelism, alias)


def _joined(where: str, left: WindowedStream, right: WindowedStream, how: str) -> tuple[pa.Schema, JoinRecords]:
    """Return the columns of a join: the left ones, the right ones, and the bounds of the window. Columns of the key that
    have one name on both sides come once."""
    of_left, of_right = plain_schema(left._schema), plain_schema(right._schema)
    is_one_sided = how in ("semi", "anti")
    common = [(name, part) for part, name in enumerate(left._key) if right._key[part] == name]
    shared = {name for name, _ in common} if not is_one_sided else set()
    fields = [field.with_nullable(field.nullable or how in ("right", "full")) for field in of_left]
    if not is_one_sided:
        fields += [
            field.with_nullable(field.nullable or how in ("left", "full")) for field in of_right if field.name not in shared
        ]
    bound = _bound_type(left)
    fields += [pa.field(bound_name, bound, nullable=False) for bound_name in (START, END)]
    names = [field.name for field in fields]
    twice = next((each for each in names if names.count(each) > 1), None)
    if twice is not None:
        advice = (
            f"the result has a column {twice!r} for the window's bounds: rename it before window(…)"
            if twice in (START, END)
            else f"both inputs have a column {twice!r}: rename one before window(…), such as with select('{twice} AS "
            f"right_{twice}', …)"
        )
        raise SchemaError(f"{where}: {advice}")
    return pa.schema(fields), JoinRecords(
        how,
        tuple(of_left.names),
        () if is_one_sided else tuple(of_right.names),
        () if is_one_sided else tuple(common),
    )


def _other(name: str, method: str, left: WindowedStream, right: object) -> WindowedStream:
    """Return the right input, checked to be in the same windows by the same key."""
    from tidegate.dataflow.windowed_stream import WindowedStream  # which imports this module

    where = f"operator {name!r}"
    if not isinstance(right, WindowedStream):
        raise GraphError(
            f"{where}: {method} takes a stream in windows, not {called(right)}; give other.key_by(…).window(…) with the "
            f"same windows"
        )
    check_same_pipeline(where, left, right)
    if bool(left._key) != bool(right._key):
        raise GraphError(f"{where}: one input has a key, and the other has none; use key_by on both, or on neither")
    if left._key:
        checks.check_same_key_types(
            where,
            left=[left._schema.field(column) for column in left._key],
            right=[right._schema.field(column) for column in right._key],
        )
    for one in (left, right):
        _timed(where, one, instead="without windows, left.key_by(…).join(name, right.key_by(…)) joins all records of a key")
        if one._trigger.of:
            raise GraphError(f"{where}: a {method} emits each window once, when it is complete: omit early= and trigger=")
        if one._allowed_lateness is not None:
            raise GraphError(
                f"{where}: a {method} takes no late records: omit allowed_lateness, and give with_watermark a larger delay"
            )
    if replace(_timed(where, left), column="") != replace(_timed(where, right), column=""):
        raise GraphError(
            f"{where}: the left input is in windows {left._assigner.text}, and the right one in {right._assigner.text}; "
            f"give both the same"
        )
    if _bound_type(left) != _bound_type(right):
        raise SchemaError(
            f"{where}: the time columns have the types {_bound_type(left)} and {_bound_type(right)}; bring one to the "
            f"other's type with with_columns"
        )
    if left._late is not None and left._late == right._late:
        raise GraphError(f"{where}: both inputs have late={left._late!r}; give their side outputs different names")
    return right


def _timed(where: str, windowed: WindowedStream, *, instead: str = _COLLECT) -> Paned | Sessions:
    assigner = windowed._assigner
    if isinstance(assigner, Global) or assigner.column is None:
        raise GraphError(f"{where}: it needs windows of event time, and not {assigner.text}; {instead}")
    return assigner


def _showing(where: str, windowed: WindowedStream) -> Showing | None:
    """Return when a function is called before the windows are complete."""
    trigger = windowed._trigger
    if not trigger.of:
        return None
    by_records = trigger.by_records
    triggers = Aggregation(where, {"records": count()}, windowed._schema, triggers=by_records) if by_records else None
    return Showing(triggers, trigger.after_ms, windowed._purges)


def _add_global(
    name: str,
    windowed: WindowedStream,
    schema: pa.Schema,
    results: WindowResults,
    parallelism: int | None,
    alias: Names,
) -> Stream:
    """Add a function of windows of a number of records, or of all records."""
    assigner = windowed._assigner
    assert isinstance(assigner, Global)
    showing = _showing(f"operator {name!r}", windowed)
    return windowed._pipeline._add(
        FunctionWindowSpec(assigner, windowed._key, results, plain_schema(windowed._schema), showing),
        name=name,
        schema=schema,
        inputs=(windowed,),
        parallelism=parallelism if windowed._key else 1,
        named_by_user=True,
        aliases=windowed._pipeline._new_aliases("operator", name, alias),
    )


def _bound_type(windowed: WindowedStream) -> pa.DataType:
    assert not isinstance(windowed._assigner, Global) and windowed._assigner.column is not None
    return time_type(windowed._schema.field(windowed._assigner.column).type)


def _add(
    name: str,
    inputs: Sequence[WindowedStream],
    schema: pa.Schema,
    results: WindowResults,
    kind: str,
    parallelism: int | None,
    alias: Names,
) -> Stream:
    first, where = inputs[0], f"operator {name!r}"
    lateness = 0 if first._allowed_lateness is None else first._allowed_lateness
    assigners = [_timed(where, each) for each in inputs]
    keys = tuple(each._key for each in inputs)
    schemas = tuple(plain_schema(each._schema) for each in inputs)
    late = tuple(each._late for each in inputs)
    lateness_ms = checks.duration_ms(name, "allowed_lateness", lateness)
    spec: RecordWindowSpec | SessionRecordSpec
    if isinstance(first._assigner, Sessions):
        sessions = tuple(each for each in assigners if isinstance(each, Sessions))
        spec = SessionRecordSpec(sessions, keys, results, schemas, _bound_type(first), late, lateness_ms, kind)
    else:
        paned = tuple(each for each in assigners if isinstance(each, Paned))
        showing = _showing(where, first)
        spec = RecordWindowSpec(paned, keys, results, schemas, _bound_type(first), late, lateness_ms, showing, kind)
    return first._pipeline._add(
        spec,
        name=name,
        schema=schema,
        inputs=inputs,
        side_schemas={each._late: each._schema for each in inputs if each._late is not None},
        parallelism=parallelism if first._key else 1,
        named_by_user=True,
        aliases=first._pipeline._new_aliases("operator", name, alias),
    )
