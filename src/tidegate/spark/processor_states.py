# ruff: noqa: N802, N803  (Spark's names)
"""What a stateful processor is given in `init`: Spark's handle and state variables, over Tidegate's tables.

`init` runs twice. On the driver, when the query is built, a `RecordingHandle` notes what states there are, so that they can
be declared as keyed states of the operator: they are in snapshots, are rescaled and can be read as tables like any other. On
a slot, once when its subtask is opened, a `LiveHandle` gives out the state variables. They work on the key that the
operator's cursor is at.

A state variable's methods are made with it, as plain functions over the table's own: they are what a processor calls most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.streaming import stateful_processor as sparks
from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle

from tidegate.errors import JobError, SchemaError
from tidegate.spark.processor_values import as_held, map_key_type, map_keys_in, map_keys_out, row_maker, rows_in, rows_out
from tidegate.state.descriptors import Descriptor, list_, map_
from tidegate.state.heap_tables import HeapRow
from tidegate.state.sections import StateKind
from tidegate.state.timers import TimerQueue, to_ms
from tidegate.state.values import form_of
from tidegate.types import parse_schema

IN_INIT = "declare all states in init, with the same arguments whenever it is called"


@dataclass(frozen=True, slots=True)
class DeclaredState:
    """As `init` declared it. `key` is the schema of a map's keys."""

    name: str
    shape: str
    value: pa.Schema
    key: pa.Schema | None = None
    ttl_ms: int | None = None

    def descriptor(self) -> Descriptor:
        struct = pa.struct(list(self.value))
        descriptor: Descriptor
        if self.key is not None:
            descriptor = map_(map_key_type(self.key), struct, name=self.name, ttl=self.ttl_ms)
        elif self.shape == "list":
            descriptor = list_(struct, name=self.name, ttl=self.ttl_ms)
        else:
            has_containers = any(form_of(field.type).copied is not None for field in self.value)
            descriptor = Descriptor(kind=StateKind.KEYED, shape="value", item=struct, name=self.name, ttl=self.ttl_ms,
                                    as_tuples=self.ttl_ms is None and not has_containers)
        return descriptor


class RecordingHandle(StatefulProcessorHandle):
    """On the driver. `allows_ttl` says whether the time mode does."""

    def __init__(self, *, allows_ttl: bool) -> None:
        self.declared: dict[str, DeclaredState] = {}
        self.deleted: set[str] = set()
        self._allows_ttl = allows_ttl

    def getValueState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> Any:
        return self._declare(stateName, "value", schema, None, ttlDurationMs)

    def getListState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> Any:
        return self._declare(stateName, "list", schema, None, ttlDurationMs)

    def getMapState(self, stateName: str, userKeySchema: Any, valueSchema: Any,
                    ttlDurationMs: int | None = None) -> Any:
        return self._declare(stateName, "map", valueSchema, userKeySchema, ttlDurationMs)

    def deleteIfExists(self, stateName: str) -> None:
        self.declared.pop(stateName, None)      # a variable of it may have been given out; it is of no use then
        self.deleted.add(stateName)

    def registerTimer(self, expiryTimestampMs: int) -> None:
        raise _no_key_in_init("registerTimer")

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        raise _no_key_in_init("deleteTimer")

    def listTimers(self) -> Iterator[int]:
        raise _no_key_in_init("listTimers")

    def _declare(self, name: Any, shape: str, values: Any, keys: Any, ttl_ms: int | None) -> Any:
        if not isinstance(name, str) or not name or name.startswith("__"):
            raise JobError(f"a state is named {name!r}: give a text that doesn't begin with '__'")
        if name in self.declared or name in self.deleted:
            raise JobError(f"init declares two states named {name!r}, or deletes one of that name: give one of them another "
                           f"name")
        if ttl_ms is not None and not self._allows_ttl:
            raise JobError(f"the state {name!r} has ttlDurationMs={ttl_ms}, which is a duration of processing time: give "
                           f"timeMode='ProcessingTime', or leave the duration away")
        if ttl_ms is not None and ttl_ms <= 0:
            raise JobError(f"the state {name!r} has ttlDurationMs={ttl_ms}: give a millisecond or more, or leave it away to "
                           f"keep the state for ever")
        self.declared[name] = DeclaredState(name, shape, _schema_of(name, values),
                                            None if keys is None else _schema_of(name, keys), ttl_ms)
        self.declared[name].descriptor()        # or why there can't be one
        return _Unusable(f"the state {name!r} was used in init, where there is no key: use it in handleInputRows, "
                         f"handleExpiredTimer or handleInitialState")


def _schema_of(state: str, declared: Any) -> pa.Schema:
    try:
        schema = parse_schema(declared)
    except SchemaError as error:
        raise SchemaError(f"the schema of the state {state!r}: {error}") from error
    if not len(schema):
        raise SchemaError(f"the state {state!r} has a schema without fields: give it one, such as 'count long'")
    return pa.schema([field.with_nullable(True) for field in schema])


def _no_key_in_init(method: str) -> JobError:
    return JobError(f"{method} in init: timers belong to a key, and there is none yet; use it in handleInputRows, "
                    f"handleExpiredTimer or handleInitialState")


def _no_time() -> JobError:
    return JobError("timers need a time: give timeMode='ProcessingTime', or 'EventTime' and a watermark on the input")


class _Unusable:
    """A state variable that can't be used here, and says why: on the driver, and of a state that was deleted."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, method: str) -> Any:
        if method.startswith("__"):     # asked by whoever copies or pickles it
            raise AttributeError(method)
        raise JobError(self._why)


class LiveHandle(StatefulProcessorHandle):
    """On a slot."""

    def __init__(self, declared: Mapping[str, DeclaredState], tables: Mapping[str, Any], timers: TimerQueue | None) -> None:
        self._declared = declared
        self._tables = tables
        if timers is not None:
            self.registerTimer = lambda expiryTimestampMs: timers.set(to_ms(expiryTimestampMs))     # type: ignore[method-assign]
            self.deleteTimer = lambda expiryTimestampMs: timers.delete(to_ms(expiryTimestampMs))    # type: ignore[method-assign]
            self.listTimers = lambda: iter(timers.times())                                          # type: ignore[method-assign]

    def getValueState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> Any:
        return self._variable(ValueVariable, stateName, "value")

    def getListState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> Any:
        return self._variable(ListVariable, stateName, "list")

    def getMapState(self, stateName: str, userKeySchema: Any, valueSchema: Any,
                    ttlDurationMs: int | None = None) -> Any:
        return self._variable(MapVariable, stateName, "map")

    def deleteIfExists(self, stateName: str) -> None:
        """What there was of it was let go when the query was restored (`drop_state`)."""
        if stateName in self._declared:
            raise JobError(f"deleteIfExists({stateName!r}): the state is in use; delete it in init, which then doesn't "
                           f"declare it")

    def registerTimer(self, expiryTimestampMs: int) -> None:
        raise _no_time()

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        raise _no_time()

    def listTimers(self) -> Iterator[int]:
        raise _no_time()

    def _variable(self, kind: Callable[[DeclaredState, Any], Any], name: str, shape: str) -> Any:
        declared = self._declared.get(name)
        if declared is None:
            return _Unusable(f"the state {name!r} was deleted in init, or not declared when the query was built: {IN_INIT}")
        if declared.shape != shape:
            raise JobError(f"init declares the {shape} state {name!r} here and didn't when the query was built: {IN_INIT}")
        return kind(declared, self._tables[name])


class ValueVariable(sparks.ValueState):
    def __init__(self, declared: DeclaredState, table: Any) -> None:
        into, out = rows_in(declared.value), rows_out(declared.value, are_tuples=isinstance(table, HeapRow))
        held, keep = table.get, table.set

        def get() -> Any:
            row = held()
            return None if row is None else out(row)

        self.get = held if out is as_held else get                                          # type: ignore[method-assign]
        self.update = (keep if into is tuple and isinstance(table, HeapRow) else            # type: ignore[method-assign]
                       lambda newValue: keep(into(newValue)))
        self.exists = lambda: held() is not None                                            # type: ignore[method-assign]
        self.clear = table.clear                                                            # type: ignore[method-assign]


class ListVariable(sparks.ListState):
    def __init__(self, declared: DeclaredState, table: Any) -> None:
        into, out = rows_in(declared.value), rows_out(declared.value)

        def put(newState: Iterable[Any]) -> None:
            table.replace(list(map(into, newState)))

        def append_list(newState: Iterable[Any]) -> None:
            table.extend(list(map(into, newState)))

        self.get = lambda: map(out, table.get())                            # type: ignore[method-assign]
        self.put = put                                                      # type: ignore[method-assign]
        self.appendValue = lambda newState: table.add(into(newState))       # type: ignore[method-assign]
        self.appendList = append_list                                       # type: ignore[method-assign]
        self.exists = lambda: bool(table.get())                             # type: ignore[method-assign]
        self.clear = table.clear                                            # type: ignore[method-assign]


class MapVariable(sparks.MapState):
    def __init__(self, declared: DeclaredState, table: Any) -> None:
        assert declared.key is not None
        into, out = rows_in(declared.value), rows_out(declared.value)
        key_in, key_out = map_keys_in(declared.key), map_keys_out(declared.key)
        make = row_maker(declared.value.names)      # what Spark gives is a Row here, and a plain tuple everywhere else

        def get_value(key: Any) -> Any:
            row = table.get(key_in(key))
            return None if row is None else make(out(row))

        def items() -> Iterator[Any]:
            return ((key_out(key), out(row)) for key, row in table.items())

        self.getValue = get_value                                                           # type: ignore[method-assign]
        self.containsKey = lambda key: key_in(key) in table                                 # type: ignore[method-assign]
        self.updateValue = lambda key, value: table.put(key_in(key), into(value))           # type: ignore[method-assign]
        self.removeKey = lambda key: table.remove(key_in(key))                              # type: ignore[method-assign]
        self.iterator = items                                                               # type: ignore[method-assign]
        self.keys = lambda: map(key_out, table.keys())                                      # type: ignore[method-assign]
        self.values = lambda: map(out, table.values())                                      # type: ignore[method-assign]
        self.exists = lambda: len(table) > 0                                                # type: ignore[method-assign]
        self.clear = table.clear                                                            # type: ignore[method-assign]
