"""Check a job while it is being built.

A check raises `SchemaError` or `GraphError`, with a message that names the operator and what to change, and has no other
effect. The optimiser compares parallelism with slots and key-groups, since it knows both. Operators find rows that don't
fit their declared schema, at run time.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import pyarrow as pa

from tidegate.dataflow.contracts import Sink, Source
from tidegate.dataflow.functions import BroadcastProcess, CoProcess, Function, KeyedBatchProcess, KeyedProcess, Process
from tidegate.dataflow.graph import Edge, LogicalGraph, Node
from tidegate.dataflow.loops import entered_sideways, reached_from, unfinished_loops
from tidegate.dataflow.side_outputs import how_to_declare
from tidegate.errors import GraphError, JobError, SchemaError
from tidegate.state.descriptors import DeclaredColumns, Descriptor, descriptors_of
from tidegate.state.sections import StateKind
from tidegate.types import ddl_of, parse_duration_ms, parse_schema

NAME_LENGTH_LIMIT = 64
_NAME = re.compile(r"\w[^/\\\x00-\x1f\x7f]*")

# Where each kind of function belongs, for errors about one in another place.
_BELONGS: dict[type[Function], str] = {
    KeyedProcess: "after key_by: stream.key_by(…).process(…)",
    KeyedBatchProcess: "after key_by: stream.key_by(…).process(…)",
    Process: "on a stream without key: stream.process(…)",
    CoProcess: "on two connected streams: left.connect(right).process(…)",
    BroadcastProcess: "on a stream connected with a broadcast one: stream.connect(rules.broadcast()).process(…)",
}

# The methods that the engine calls, and their arguments.
_METHODS: dict[str, tuple[str, ...]] = {
    "open": ("ctx",),
    "close": (),
    "on_snapshot_complete": ("epoch",),
    "process": ("record", "ctx"),
    "process_left": ("record", "ctx"),
    "process_right": ("record", "ctx"),
    "process_broadcast": ("record", "ctx"),
    "on_timer": ("at", "ctx"),
    "on_timers": ("at", "ctx"),
}
_WITHOUT_ROWS = ("open", "close", "on_snapshot_complete")  # methods that emit no rows


# ---------------------------------------------------------------------------------------------- names and numbers


def check_name(what: str, name: object) -> str:
    """Check a name that a user gave to `what` (source, sink, operator…). Snapshots and file names contain it."""
    if not isinstance(name, str):
        raise GraphError(f"the {what}'s name is {name!r}: give a text that names it in this job, such as 'bids'")
    if len(name) > NAME_LENGTH_LIMIT or not _NAME.fullmatch(name) or name != name.strip():
        raise GraphError(
            f"{what} {name!r}: a name begins with a letter or digit, has neither slashes nor control "
            f"characters, doesn't end with a space and has at most {NAME_LENGTH_LIMIT} characters"
        )
    return name


def check_aliases(what: str, name: str, alias: object) -> tuple[str, ...]:
    """Return an operator's former names, given as a text or a list of texts."""
    given = (alias,) if isinstance(alias, str) else alias
    if not isinstance(given, list | tuple):
        raise GraphError(f"{what} {name!r}: alias={_shown(alias)}; give the name that it had, or a list of names")
    aliases = tuple(check_name(f"{what} {name!r}, alias", each) for each in given)
    if name in aliases or len(set(aliases)) < len(aliases):
        raise GraphError(
            f"{what} {name!r}: alias={_shown(alias)}; give names that it had before, each once, and not the one that it has"
        )
    return aliases


def check_parallelism(operator: str, parallelism: object) -> int | None:
    if parallelism is None:
        return None
    if isinstance(parallelism, bool) or not isinstance(parallelism, int) or parallelism < 1:
        raise GraphError(
            f"operator {operator!r}: parallelism={parallelism!r}; give a whole number from 1 on, or omit "
            f"it for one subtask in each slot"
        )
    return parallelism


def duration_ms(operator: str, argument: str, duration: Any) -> int:
    """Return a user's duration in milliseconds."""
    try:
        return parse_duration_ms(duration)
    except JobError as error:
        raise GraphError(f"operator {operator!r}, {argument}: {error}") from error


# -------------------------------------------------------------------------------------------- schemas and columns


def declared_schema(operator: str, declared: Any, *, argument: str = "returns") -> pa.Schema:
    """Return the schema that the user declared for an output."""
    try:
        return parse_schema(declared)
    except SchemaError as error:
        raise SchemaError(f"operator {operator!r}, {argument}: {error}") from error


def declared_sides(operator: str, side_outputs: object) -> Mapping[str, pa.Schema]:
    """Return the schemas of the side outputs, by tag."""
    if not isinstance(side_outputs, Mapping) or not all(isinstance(tag, str) and tag for tag in side_outputs):
        raise GraphError(
            f"operator {operator!r}: side_outputs is {_shown(side_outputs)}; give a dictionary from tags "
            f"to schemas, such as {{'late': 'auction long, price double'}}"
        )
    return {
        tag: declared_schema(operator, declared, argument=f"side_outputs[{tag!r}]") for tag, declared in side_outputs.items()
    }


def no_such_column(where: str, column: str, schema: pa.Schema) -> SchemaError:
    return SchemaError(
        f"{where}: there is no column {column!r}.{_closest(column, schema.names)} The columns are: {ddl_of(schema)}"
    )


def check_key(where: str, columns: Sequence[object], schema: pa.Schema, *, method: str = "key_by") -> tuple[str, ...]:
    """Return the key columns given to `key_by`, or to another method."""
    if not columns:
        raise SchemaError(f"{where}: name at least one column, such as {method}({schema.names[0]!r})")
    for column in columns:
        if not isinstance(column, str):
            advice = (
                f"unpack them: {method}(*columns)"
                if isinstance(column, list | tuple)
                else "compute the key into a column with map, then name that column"
                if callable(column)
                else "give the column's name"
            )
            raise SchemaError(f"{where}: {method} takes names of columns, not {_shown(column)}; {advice}")
        if column not in schema.names:
            if not column.isidentifier():
                raise SchemaError(
                    f"{where}: there is no column {column!r}; to key by an expression, make it a column first: "
                    f'with_columns(key="{column}").{method}("key")'
                )
            raise no_such_column(where, column, schema)
        if has_map(schema.field(column).type):
            raise SchemaError(
                f"{where}: column {column!r} is of type {ddl_of(schema.field(column).type)}, and a map "
                f"has no order, so it can't be a key; take the entries that matter into columns with map"
            )
    key = tuple(str(column) for column in columns)
    if len(set(key)) < len(key):
        raise SchemaError(f"{where}: {method} names a column twice: {_listed(key)}; name each once")
    return key


def check_new_columns(where: str, columns: Sequence[str], added: Iterable[str]) -> None:
    """Check that columns that an operator adds aren't there already."""
    for name in added:
        if name in columns:
            raise SchemaError(
                f"{where}: {name}=… has the name of a column that the result has already; choose another name than one "
                f"of {_listed(columns)}"
            )


def check_renamed(where: str, renamed: Mapping[str, str], aggregates: Mapping[str, object]) -> Mapping[str, str]:
    """Return the former names of aggregates, by their names now."""
    for name, before in renamed.items():
        if name not in aggregates or before in aggregates:
            raise GraphError(
                f"{where}: renamed={_shown(dict(renamed))} says that {name!r} was called {before!r}; give former names, by "
                f"the names of aggregates that there are now: {_listed(aggregates)}"
            )
    return dict(renamed)


def check_same_key_types(where: str, *, left: Sequence[pa.Field], right: Sequence[pa.Field]) -> None:
    """The keys of two connected streams must hash alike, so their types must be the same."""
    shown = f"the left key is ({_ddl(left)}), the right one ({_ddl(right)})"
    if len(left) != len(right):
        raise SchemaError(f"{where}: {shown}; key both sides by as many columns")
    for one, other in zip(left, right, strict=True):
        if ddl_of(one.type) != ddl_of(other.type):
            widens = pa.types.is_integer(one.type) and pa.types.is_integer(other.type)
            is_left = widens and one.type.bit_width < other.type.bit_width
            name, to = (one.name, other.type) if is_left else (other.name, one.type)
            raise SchemaError(
                f"{where}: {shown}, so {one.name!r} and {other.name!r} would never meet; bring one to the other's type "
                f"before key_by, such as {'left' if is_left else 'right'}"
                f".with_columns({name}='CAST({name} AS {ddl_of(to)})')"
            )


def check_same_schema(where: str, *, first: pa.Schema, other: pa.Schema) -> None:
    """Check that streams in a union have the same columns in the same order. Only nullability may differ."""
    if [(field.name, field.type) for field in first] == [(field.name, field.type) for field in other]:
        return
    one, two = ddl_of(first), ddl_of(other)
    if one == two:  # types that differ only in Arrow, such as string and large_string
        one, two = (", ".join(f"{field.name} {field.type}" for field in schema) for schema in (first, other))
    raise SchemaError(f"{where}: the streams have different schemas, ({one}) and ({two}); bring them to one with map")


def _to_time(column: str, kind: pa.DataType) -> str:
    """Return an expression that makes an event time of a column."""
    return f"CAST({column} AS {'TIMESTAMP' if pa.types.is_string(kind) else 'LONG'})"


def check_time_column(where: str, column: object, schema: pa.Schema) -> str:
    if not isinstance(column, str):
        raise SchemaError(f"{where}: event time takes the name of a column, not {_shown(column)}")
    if column not in schema.names:
        raise no_such_column(where, column, schema)
    kind = schema.field(column).type
    if not (pa.types.is_int64(kind) or pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
        raise SchemaError(
            f"{where}: column {column!r} is of type {ddl_of(kind)}; event time is a timestamp, a date or "
            f"a long of milliseconds since 1970: convert it, for example with "
            f'with_columns({column}="{_to_time(column, kind)}")'
        )
    return column


def has_map(kind: pa.DataType) -> bool:
    if pa.types.is_map(kind):
        return True
    return any(has_map(kind.field(index).type) for index in range(kind.num_fields))


# ----------------------------------------------------------------------------------------------- sources and sinks


def check_source(name: str, source: object) -> pa.Schema:
    """Check a source, and return its schema."""
    if isinstance(source, type):
        raise GraphError(f"source {name!r}: {source.__name__} is a class; pass an instance: {source.__name__}(…)")
    if not isinstance(source, Source):
        raise GraphError(
            f"source {name!r}: {_shown(source)} is not a source; pass one of tg.sources or of a subclass of tg.Source"
        )
    return declared_schema(name, source.schema, argument="the source's schema")


def check_sink(name: str, sink: object, schema: pa.Schema) -> None:
    if isinstance(sink, type):
        raise GraphError(f"sink {name!r}: {sink.__name__} is a class; pass an instance: {sink.__name__}(…)")
    if not isinstance(sink, Sink):
        raise GraphError(f"sink {name!r}: {_shown(sink)} is not a sink; pass one of tg.sinks or of a subclass of tg.Sink")
    try:
        sink.check(schema)
    except SchemaError as error:
        raise SchemaError(f"sink {name!r} can't take records of ({ddl_of(schema)}): {error}") from error


# ------------------------------------------------------------------------------------------------- user's functions


def check_callable(operator: str, method: str, function: object) -> None:
    """Check a function given to a method of a stream. Most call it with one argument, a record or a batch."""
    where = f"operator {operator!r}"
    if isinstance(function, Function) or (isinstance(function, type) and issubclass(function, Function)):
        raise GraphError(
            f"{where}: {_shown(function)} is a process function; use .process(name, function, returns=…) "
            f"instead of .{method}(…)"
        )
    if not callable(function):
        raise GraphError(f"{where}: {method} takes a function, not {_shown(function)}")
    _check_plain(where, function)
    if method in ("apply", "cogroup"):
        given = ("window", "records") if method == "apply" else ("window", "left", "right")
        _check_arguments(where, function, given, f"{method} calls it as function({', '.join(given)})")
        return
    argument = "record" if method in ("map", "flat_map", "filter") else "batch"
    _check_arguments(where, function, (argument,), f"{method} calls it with one argument, the {argument}")
    if method in ("map", "filter") and inspect.isgeneratorfunction(function):
        advice = "return the row, or use flat_map" if method == "map" else "return True or False"
        raise GraphError(
            f"{where}: {_shown(function)} is a generator, and {method} needs one result for each record; {advice}"
        )


def check_function(operator: str, function: object, *, expected: type[Function], here: str) -> None:
    """Check a function given to `process`. `here` describes the stream."""
    where = f"operator {operator!r}"
    if isinstance(function, type):
        raise GraphError(f"{where}: {function.__name__} is a class; pass an instance: {function.__name__}(…)")
    takes = f"process on {here} takes an instance of a subclass of tg.{expected.__name__}"
    if not isinstance(function, expected):
        for kind, place in _BELONGS.items():
            if isinstance(function, kind):
                raise GraphError(
                    f"{where}: {type(function).__name__} is a {kind.__name__}, which belongs {place}. "
                    f"Change that, or make it a {expected.__name__}: {takes}"
                )
        plain = "; for a plain function there are map, flat_map and filter" if callable(function) else ""
        raise GraphError(f"{where}: {takes}, not {_shown(function)}{plain}")
    for method, arguments in _METHODS.items():
        bound = getattr(function, method, None)
        if bound is not None:
            there = f"{where}: {type(function).__name__}.{method}"
            if not callable(bound):
                raise GraphError(f"{there} must be a method, not {_shown(bound)}")
            _check_plain(there, bound)
            if method in _WITHOUT_ROWS and inspect.isgeneratorfunction(bound):
                raise GraphError(
                    f"{there} is a generator, and this method emits no rows, so its body would never "
                    f"run. Remove its yield; rows come from process and on_timer"
                )
            given = ", ".join(("self", *arguments))
            _check_arguments(there, bound, arguments, f"write it as {method}({given})")


def check_states(operator: str, function: Function, *, keyed: bool) -> None:
    """Check the declared states: keyed state needs a key, and broadcast state a broadcast side."""
    where = f"operator {operator!r}"
    for attribute, declared in vars(function).items():
        if isinstance(declared, Descriptor):
            raise GraphError(
                f"{where}: the state {attribute!r} is set on an instance of {type(function).__name__}; "
                f"declare it in the class body, beside the methods"
            )
    try:
        descriptors = descriptors_of(function)
    except JobError as error:
        raise GraphError(f"{where}: {error}") from error
    for attribute, descriptor in descriptors.items():
        if descriptor.name is None or not descriptor.name or descriptor.name.startswith("__"):
            raise GraphError(
                f"{where}: the state {attribute!r} is named {descriptor.name!r}; names beginning with "
                f"'__' are the engine's: give it another name="
            )
        if isinstance(descriptor, DeclaredColumns) is not isinstance(function, KeyedBatchProcess):
            raise GraphError(
                f"{where}: {type(function).__name__} declares the state {descriptor.name!r} as tg.{descriptor.shape}(…). A "
                f"KeyedBatchProcess has state that tg.columns(…) declares, and no other function has: change the "
                f"declaration, or the base class"
            )
        if descriptor.kind is StateKind.KEYED and not keyed:
            raise GraphError(
                f"{where}: the state {descriptor.name!r} ({descriptor.shape}) is state of a key, and "
                f"the stream has no key; use key_by first{_keyed_kind(function)}, or declare the state as "
                f"tg.operator_list"
            )
        if descriptor.kind is StateKind.BROADCAST and not isinstance(function, BroadcastProcess):
            raise GraphError(
                f"{where}: the state {descriptor.name!r} is broadcast state, which only a "
                f"BroadcastProcess can have; connect the stream with a broadcast one, or declare the "
                f"state as tg.map or tg.operator_list"
            )


def _keyed_kind(function: Function) -> str:
    if isinstance(function, Process):
        return f" and make {type(function).__name__} a KeyedProcess"
    return " on both streams" if isinstance(function, CoProcess) else ""


def _check_plain(where: str, function: Callable[..., Any]) -> None:
    called = function if inspect.isroutine(function) else getattr(type(function), "__call__", function)  # noqa: B004
    if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
        raise GraphError(
            f"{where}: {_shown(function)} is asynchronous; make it a plain function or generator (def, not async def)"
        )


def _check_arguments(where: str, function: Callable[..., Any], arguments: tuple[str, ...], advice: str) -> None:
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # some built-in functions have no signature
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise GraphError(f"{where}: {_shown(function)} has the arguments {signature} ({error}); {advice}") from error


# ---------------------------------------------------------------------------------------------------------- loops


def check_body(loop: str, body: object) -> None:
    """Check a function given to iterate, which calls it once with the loop's stream."""
    where = f"loop {loop!r}"
    if not callable(body):
        raise GraphError(
            f"{where}: iterate takes a function of the loop's stream that returns two streams, the feedback "
            f"and the output, not {_shown(body)}"
        )
    _check_plain(where, body)
    _check_arguments(where, body, ("stream",), "iterate calls it with one argument, the loop's stream")
    if inspect.isgeneratorfunction(body):
        raise GraphError(f"{where}: {_shown(body)} is a generator; return the two streams: return feedback, output")


def check_feedback(
    loop: str, head: Node, nodes: Sequence[Node], feedback: Sequence[Edge], output: Sequence[Edge], schema: pa.Schema
) -> None:
    """Check the feedback that a loop's body returned. `nodes` are all nodes of the job so far, `schema` the feedback's."""
    where = f"loop {loop!r}"
    _check_feedback_schema(where, feedback=schema, loop=head.schema)
    if any(edge.source == head.id for edge in feedback):
        raise GraphError(
            f"{where}: the feedback is the loop's own stream as it is, so that every record would go round "
            f"forever; feed back what an operator in the body made of it, such as stream.filter(…)"
        )
    if not any(edge.source == head.id for edge in (*output, *(edge for node in nodes for edge in node.inputs))):
        raise GraphError(
            f"{where}: the body doesn't use the stream that it is called with, so that nothing would ever be "
            f"in the loop; build the feedback from that stream"
        )
    if not any(edge.source in reached_from(head.id, nodes) for edge in feedback):
        raise GraphError(
            f"{where}: the feedback ({_listed(dict.fromkeys(nodes[edge.source].name for edge in feedback))}) "
            f"doesn't depend on the loop's stream, so that nothing goes round; build it from the stream that "
            f"the body is called with, or use union instead of iterate"
        )


def _check_feedback_schema(where: str, *, feedback: pa.Schema, loop: pa.Schema) -> None:
    """Check that both have the same columns in the same order, and that the feedback has no further nullable columns."""
    one, two = ddl_of(feedback), ddl_of(loop)
    if [(field.name, field.type) for field in feedback] != [(field.name, field.type) for field in loop]:
        if one == two:  # types that differ only in Arrow, such as string and large_string
            one, two = (", ".join(f"{field.name} {field.type}" for field in schema) for schema in (feedback, loop))
        raise SchemaError(
            f"{where}: the feedback is of ({one}), and the loop's stream of ({two}); records that go back "
            f"must be like those that came in: bring the feedback to that schema with map"
        )
    loose = [field.name for field, promised in zip(feedback, loop, strict=True) if field.nullable and not promised.nullable]
    if loose:
        raise SchemaError(
            f"{where}: the feedback is of ({one}), and the loop's stream of ({two}): {_listed(loose)} may be "
            f"null in the feedback alone; declare it NOT NULL there, or nullable in front of the loop"
        )


# ---------------------------------------------------------------------------------------------------- whole graph


def check_side_output(where: str, tag: object, node: Node) -> str:
    if tag not in node.side_schemas:
        there = f"It has {_listed(node.side_schemas)}." if node.side_schemas else "It has none."
        raise GraphError(
            f"{where}: operator {node.name!r} declares no side output {tag!r}."
            f"{_closest(str(tag), node.side_schemas)} {there} {how_to_declare(tag, node)}"
        )
    assert isinstance(tag, str)
    return tag


def check_complete(graph: LogicalGraph) -> None:
    """Check that every stream leads to a sink or to an operator without output, and that every loop is complete."""
    if not graph.nodes:
        raise GraphError("the job is empty; begin with job.source(name, source) and end with .to(name, sink)")
    for head in unfinished_loops(graph.nodes):
        raise GraphError(
            f"loop {head.name!r} is not complete: its body failed, or is still running; correct the body and "
            f"build the job again"
        )
    for inner, outer in entered_sideways(graph.nodes):
        raise GraphError(
            f"loop {inner.head.name!r} gets records of the loop {outer.head.name!r} inside its body, and none "
            f"where it begins; begin it with them: stream.union(…).iterate({inner.head.name!r}, …)"
        )
    consumed = {edge.source for node in graph.nodes for edge in node.inputs}
    for node in graph.nodes:
        if node.id not in consumed and node.schema.names:
            is_process = isinstance(getattr(node.spec, "function", None), Function)
            advice = ", or omit returns= if it emits nothing" if is_process else ""
            raise GraphError(f"the output of {node.spec.kind} {node.name!r} goes nowhere; add .to(name, sink){advice}")


# ------------------------------------------------------------------------------------------------------- wording


def _closest(word: str, words: Iterable[str]) -> str:
    found = get_close_matches(word, list(words), n=1)
    return f" Did you mean {found[0]!r}?" if found else ""


def _listed(words: Iterable[str]) -> str:
    return ", ".join(repr(word) for word in words)


def _ddl(fields: Sequence[pa.Field]) -> str:
    return ddl_of(pa.schema(fields))


def _shown(given: object) -> str:
    """Return a value as messages show it: a function's name, or a short repr."""
    name = getattr(given, "__qualname__", None)
    text = str(name) if name is not None else repr(given)
    return text if len(text) <= 60 else f"{text[:59]}…"
