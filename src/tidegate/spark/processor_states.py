# ruff: noqa: N802, N803  (Spark's names)
"""What a stateful processor gets in `init`: Spark's handle and state variables, over Tidegate's tables.

`init` runs twice. On the driver, when the query is built, a `RecordingHandle` records the states, so that the operator can
declare them as keyed states: like any other state they are in snapshots, are rescaled and can be read as tables. On a slot,
when its subtask is opened, a `LiveHandle` returns the state variables. They work on the key that the operator's cursor is
at.

The methods of a state variable are set on the object, as plain functions over the table's methods, since a processor calls
them more often than anything else.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import index
from typing import Any

import pyarrow as pa
from pyspark.sql.streaming import stateful_processor as sparks
from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle

from tidegate.errors import JobError, SchemaError
from tidegate.spark.processor_errors import (
    INVALID_HANDLE_STATE,
    INVALID_NAME,
    INVALID_TIME_MODE,
    NO_KEY_HERE,
    TTL_IN_WRONG_TIME_MODE,
    TTL_NOT_POSITIVE,
    WRONG_LENGTH,
    ProcessorError,
    ProcessorSchemaError,
    misfit,
    refused,
)
from tidegate.spark.processor_evolution import UNCHANGED, Evolution
from tidegate.spark.processor_values import as_held, map_key_type, map_keys_in, map_keys_out, row_maker, rows_in, rows_out
from tidegate.state.descriptors import Descriptor
from tidegate.state.sections import StateKind
from tidegate.state.timers import TimeKind, TimerQueue, to_ms
from tidegate.state.values import form_of
from tidegate.types import parse_schema

IN_INIT = "declare all states in init, with the same arguments whenever it is called"
WITH_A_KEY = "use it in handleInputRows, handleExpiredTimer or handleInitialState"


@dataclass(frozen=True, slots=True)
class DeclaredState:
    """A state as `init` declared it. `key` is the schema of a map's keys; `evolution` describes earlier versions."""

    name: str
    shape: str
    value: pa.Schema
    key: pa.Schema | None = None
    ttl_ms: int | None = None
    evolution: Evolution = UNCHANGED

    @property
    def as_tuples(self) -> bool:
        """Whether the backend holds the values as tuples."""
        has_containers = any(form_of(field.type).copied is not None for field in self.value)
        return self.shape == "value" and self.ttl_ms is None and not has_containers

    def descriptor(self) -> Descriptor:
        before = self.evolution
        descriptor = Descriptor(
            kind=StateKind.KEYED,
            shape=self.shape,
            item=pa.struct(list(self.value)),
            name=self.name,
            ttl=self.ttl_ms,
            map_key=None if self.key is None else map_key_type(self.key),
            alias=before.alias,
            added=before.added,
            renamed=before.renamed,
            as_tuples=self.as_tuples,
        )
        descriptor.refuse = self._refused
        descriptor.map_key_parts = [] if self.key is None else self.key.types
        return descriptor

    def _refused(self, text: str, given: Any) -> ProcessorSchemaError:
        has_other_length = isinstance(given, tuple) and len(given) != len(self.value)
        return misfit(text, WRONG_LENGTH if has_other_length else None)


class ProcessorHandle(StatefulProcessorHandle):
    """What both handles have in common: they record what `init` declares, and refuse what Spark's handle refuses, in the
    same calls. `time` is the kind of the processor's timers."""

    def __init__(self, time: TimeKind | None) -> None:
        self.declared: dict[str, DeclaredState] = {}
        self.deleted: set[str] = set()
        self._time = time
        self._in_init = True

    def getValueState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> Any:
        return self._declare(stateName, "value", schema, None, ttlDurationMs)

    def getListState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> Any:
        return self._declare(stateName, "list", schema, None, ttlDurationMs)

    def getMapState(self, stateName: str, userKeySchema: Any, valueSchema: Any, ttlDurationMs: int | None = None) -> Any:
        return self._declare(stateName, "map", valueSchema, userKeySchema, ttlDurationMs)

    def end_init(self) -> None:
        self._in_init = False

    def deleteIfExists(self, stateName: str) -> None:
        """Drop the state when the query is restored (`drop_state`)."""
        if not self._in_init:
            raise refused(f"deleteIfExists({stateName!r}) outside of init: call it in init", INVALID_HANDLE_STATE)
        self.declared.pop(stateName, None)  # a variable that was returned for it refuses to be used
        self.deleted.add(stateName)

    def registerTimer(self, expiryTimestampMs: int) -> None:
        raise self._no_timers("registerTimer")

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        raise self._no_timers("deleteTimer")

    def listTimers(self) -> Iterator[int]:
        raise self._no_timers("listTimers")

    def _declare(self, name: Any, shape: str, values: Any, keys: Any, ttl_ms: int | None) -> Any:
        if not isinstance(name, str) or not name or name.startswith("__"):
            raise refused(f"a state is named {name!r}: give a text that doesn't begin with '__'", INVALID_NAME)
        if name in self.declared or name in self.deleted:
            raise refused(
                f"a state named {name!r} already exists, or init deletes one of that name: give one of them "
                f"another name, and declare it once"
            )
        if not self._in_init:
            raise refused(f"the state {name!r} is declared outside of init: {IN_INIT}", INVALID_HANDLE_STATE)
        declared = DeclaredState(
            name, shape, _schema_of(name, values), None if keys is None else _schema_of(name, keys), self._ttl(name, ttl_ms)
        )
        try:
            declared.descriptor()
        except JobError as error:
            raise misfit(f"the state {name!r}: {error}") from error
        self.declared[name] = declared
        return self._variable_of(declared)

    def _ttl(self, name: str, ttl_ms: int | None) -> int | None:
        """Return the time to live, if it is allowed. As in Spark, 0 means none."""
        if ttl_ms is None or not (ttl_ms := index(ttl_ms)):
            return None
        if self._time is not TimeKind.PROCESSING:
            raise refused(
                f"the state {name!r} has ttlDurationMs={ttl_ms}, which is a duration of processing time: give "
                f"timeMode='ProcessingTime', or omit the duration",
                TTL_IN_WRONG_TIME_MODE,
            )
        if ttl_ms < 0:
            raise refused(
                f"the state {name!r} has ttlDurationMs={ttl_ms}: give a millisecond or more, or omit it to keep "
                f"the state forever",
                TTL_NOT_POSITIVE,
            )
        return ttl_ms

    def _no_timers(self, method: str) -> ProcessorError:
        if self._time is None:
            return refused(
                f"{method}: timers need a time mode: give timeMode='ProcessingTime', or 'EventTime' and a watermark on the "
                f"input",
                INVALID_TIME_MODE,
            )
        return refused(
            f"{method} in init or close: timers belong to a key, and there is none; {WITH_A_KEY}", INVALID_HANDLE_STATE
        )

    @abstractmethod
    def _variable_of(self, declared: DeclaredState) -> Any:
        """Return the state variable that the processor gets."""


class RecordingHandle(ProcessorHandle):
    """The handle on the driver, whose state variables can't be used."""

    def _variable_of(self, declared: DeclaredState) -> Any:
        return _unusable(
            declared.shape,
            f"the state {declared.name!r} was used in init or close, where there is no key; {WITH_A_KEY}",
            NO_KEY_HERE,
        )


def _schema_of(state: str, declared: Any) -> pa.Schema:
    try:
        schema = parse_schema(declared)
    except SchemaError as error:
        raise misfit(f"the schema of the state {state!r}: {error}") from error
    if not len(schema):
        raise misfit(f"the state {state!r} has a schema without fields: give it one, such as 'count long'")
    return pa.schema([field.with_nullable(True) for field in schema])


def _unusable(shape: str, why: str, condition: str | None = None, *, is_empty: bool = False) -> Any:
    """Return a state variable that raises an error when used. With `is_empty` its iterators are empty, like Spark's."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise refused(why, condition)

    kind = _SPARKS[shape]
    variable = kind.__new__(kind)
    for method in [name for name in vars(kind) if not name.startswith("_")]:
        iterates = is_empty and method in _ITERATING[shape]
        setattr(variable, method, (lambda: iter(())) if iterates else refuse)
    return variable


_SPARKS: dict[str, Any] = {"value": sparks.ValueState, "list": sparks.ListState, "map": sparks.MapState}
_ITERATING = {"value": (), "list": ("get",), "map": ("keys", "values", "iterator")}


class LiveHandle(ProcessorHandle):
    """The handle on a slot. `known` are the states that `init` declared when the query was built."""

    def __init__(
        self,
        known: Mapping[str, DeclaredState],
        tables: Mapping[str, Any],
        timers: TimerQueue | None,
        time: TimeKind | None = None,
    ) -> None:
        super().__init__(time)
        self._known = known
        self._tables = tables
        self._timers = timers

    def end_init(self) -> None:
        super().end_init()
        timers = self._timers
        if timers is not None:
            vars(self).update(
                registerTimer=lambda expiryTimestampMs: timers.set(to_ms(expiryTimestampMs)),
                deleteTimer=lambda expiryTimestampMs: timers.delete(to_ms(expiryTimestampMs)),
                listTimers=lambda: iter(timers.times()),
            )

    def begin_close(self) -> None:
        for method in ("registerTimer", "deleteTimer", "listTimers"):
            vars(self).pop(method, None)

    def deleteIfExists(self, stateName: str) -> None:
        if self._in_init and stateName in self._known:
            raise refused(f"init deletes the state {stateName!r} here and didn't when the query was built: {IN_INIT}")
        super().deleteIfExists(stateName)

    def _variable_of(self, declared: DeclaredState) -> Any:
        name, known = declared.name, self._known.get(declared.name)
        if known is None:
            return _unusable(
                declared.shape,
                f"the state {name!r} was deleted in init, or not declared when the query was built: {IN_INIT}",
                is_empty=True,
            )
        if known.shape != declared.shape:
            raise refused(
                f"init declares the {declared.shape} state {name!r} here and didn't when the query was built: {IN_INIT}"
            )
        return VARIABLES[known.shape](known, self._tables[name])


class ValueVariable(sparks.ValueState):
    def __init__(self, declared: DeclaredState, table: Any) -> None:
        into, out = rows_in(declared.value), rows_out(declared.value, are_tuples=declared.as_tuples)
        held, keep = table.get, table.set

        def get() -> Any:
            row = held()
            return None if row is None else out(row)

        vars(self).update(
            get=held if out is as_held else get,
            update=keep if into is tuple and declared.as_tuples else lambda newValue: keep(into(newValue)),
            exists=lambda: held() is not None,
            clear=table.clear,
        )


class ListVariable(sparks.ListState):
    def __init__(self, declared: DeclaredState, table: Any) -> None:
        into, out = rows_in(declared.value), rows_out(declared.value)

        vars(self).update(
            get=lambda: map(out, table.get()),
            put=lambda newState: table.replace(list(map(into, newState))),
            appendValue=lambda newState: table.add(into(newState)),
            appendList=lambda newState: table.extend(list(map(into, newState))),
            exists=lambda: bool(table.get()),
            clear=table.clear,
        )


class MapVariable(sparks.MapState):
    def __init__(self, declared: DeclaredState, table: Any) -> None:
        assert declared.key is not None
        into, out = rows_in(declared.value), rows_out(declared.value)
        key_in, key_out = map_keys_in(declared.key), map_keys_out(declared.key)
        make = row_maker(declared.value.names)  # here Spark returns a Row, and everywhere else a plain tuple

        def get_value(key: Any) -> Any:
            row = table.get(key_in(key))
            return None if row is None else make(out(row))

        vars(self).update(
            getValue=get_value,
            containsKey=lambda key: key_in(key) in table,
            updateValue=lambda key, value: table.put(key_in(key), into(value)),
            removeKey=lambda key: table.remove(key_in(key)),
            iterator=lambda: ((key_out(key), out(row)) for key, row in table.items()),
            keys=lambda: map(key_out, table.keys()),
            values=lambda: map(out, table.values()),
            exists=lambda: len(table) > 0,
            clear=table.clear,
        )


VARIABLES: dict[str, Callable[[DeclaredState, Any], Any]] = {
    "value": ValueVariable,
    "list": ListVariable,
    "map": MapVariable,
}
