# ruff: noqa: N803  (Spark's names)
"""What a stateful processor may catch is the same on Spark's own engine and on Tidegate's: its type, and its condition.

A case is one wrong use of the handle or of a state, and what comes of it. The processor catches it and writes it down.
Spark's engine can't continue after most of these, so each is a query of its own there, in `make long`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

import tidegate as tg
from tests.spark.processors import ROCKSDB_STATE_STORE, told

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ERROR = "PySparkRuntimeError"
TIME_MODE = "STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_TIME_MODE"
HANDLE_STATE = "STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_HANDLE_STATE"
TTL_MODE = "STATEFUL_PROCESSOR_INCORRECT_TIME_MODE_TO_ASSIGN_TTL"
LENGTH = "STRUCT_ARRAY_LENGTH_MISMATCH"


@dataclass(frozen=True)
class Case:
    """`do` is Python text. `comes`: "what the expression gives", or an error and its condition. `ours` where it differs."""

    do: str
    comes: str
    where: str = "rows"
    time: str = "None"
    ours: str | None = None


def error(condition: str | None = None) -> str:
    return f"{ERROR} {condition}"


CASES = {
    # A state that was deleted in init.
    "deleted value exists": Case("self.gone.exists()", error()),
    "deleted value get": Case("self.gone.get()", error()),
    "deleted value update": Case("self.gone.update((1,))", error()),
    "deleted value clear": Case("self.gone.clear()", error()),
    "deleted list get": Case("list(self.gone_list.get())", "list()"),
    "deleted list exists": Case("self.gone_list.exists()", error()),
    "deleted list put": Case("self.gone_list.put([(1,)])", error()),
    "deleted list append": Case("self.gone_list.appendValue((1,))", error()),
    "deleted list extend": Case("self.gone_list.appendList([(1,)])", error()),
    "deleted list clear": Case("self.gone_list.clear()", error()),
    "deleted map exists": Case("self.gone_map.exists()", error()),
    "deleted map get": Case("self.gone_map.getValue((1,))", error()),
    "deleted map has": Case("self.gone_map.containsKey((1,))", error()),
    "deleted map update": Case("self.gone_map.updateValue((1,), (1,))", error()),
    "deleted map remove": Case("self.gone_map.removeKey((1,))", error()),
    "deleted map keys": Case("list(self.gone_map.keys())", "list()"),
    "deleted map values": Case("list(self.gone_map.values())", "list()"),
    "deleted map iterator": Case("list(self.gone_map.iterator())", "list()"),
    "deleted map clear": Case("self.gone_map.clear()", error()),
    # Declarations.
    "twice": Case("handle.getValueState('value', 'n int, text string')", error(), "init"),
    "twice, a list": Case("handle.getListState('items', 'n int')", error(), "init"),
    "twice, a map": Case("handle.getMapState('words', 'n int', 'n int')", error(), "init"),
    "twice, as another kind": Case("handle.getListState('value', 'n int') and None", "NoneType None", "init", ours=error()),
    "declared later": Case("self.handle.getValueState('more', 'n int')", error(HANDLE_STATE)),
    "declared once more later": Case("self.handle.getValueState('value', 'n int, text string')", error()),
    "declared in close": Case("self.handle.getValueState('more', 'n int')", error(HANDLE_STATE), "close"),
    "deleted later": Case("self.handle.deleteIfExists('value')", error(HANDLE_STATE)),
    "deleted later, never there": Case("self.handle.deleteIfExists('more')", error(HANDLE_STATE)),
    "no name": Case(
        "handle.getValueState('', 'n int')", error("STATE_STORE_CANNOT_USE_COLUMN_FAMILY_WITH_INVALID_NAME"), "init"
    ),
    "no schema": Case("handle.getValueState('more', 'n nosuch')", error("UNSUPPORTED_DATATYPE"), "init", ours=error()),
    # Time to live.
    "ttl without time": Case("handle.getValueState('more', 'n int', 1000)", error(TTL_MODE), "init"),
    "ttl of a list without time": Case("handle.getListState('more', 'n int', 1000)", error(TTL_MODE), "init"),
    "ttl of a map without time": Case("handle.getMapState('more', 'n int', 'n int', 1000)", error(TTL_MODE), "init"),
    "ttl and event time": Case("handle.getValueState('more', 'n int', 1000)", error(TTL_MODE), "init", "EventTime"),
    "ttl below zero": Case(
        "handle.getValueState('more', 'n int', -1)",
        error("STATEFUL_PROCESSOR_TTL_DURATION_MUST_BE_POSITIVE"),
        "init",
        "ProcessingTime",
    ),
    "ttl of zero": Case("handle.getValueState('zero', 'n int', 0) and None", "NoneType None", "init"),
    "ttl that is no integer": Case("handle.getValueState('more', 'n int', 1.5)", "TypeError None", "init", "ProcessingTime"),
    # Timers.
    "timer without time": Case("self.handle.registerTimer(5)", error(TIME_MODE)),
    "no timer without time": Case("self.handle.deleteTimer(5)", error(TIME_MODE)),
    "timers without time": Case("list(self.handle.listTimers())", "list()", ours=error(TIME_MODE)),
    "timer in init": Case("handle.registerTimer(5)", error(HANDLE_STATE), "init", "ProcessingTime"),
    "no timer in init": Case("handle.deleteTimer(5)", error(HANDLE_STATE), "init", "ProcessingTime"),
    "timer in close": Case("self.handle.registerTimer(5)", error(HANDLE_STATE), "close", "ProcessingTime"),
    "timer below zero": Case(
        "self.handle.registerTimer(-5) or -5 in list(self.handle.listTimers())", "bool True", time="ProcessingTime"
    ),
    "timer in the past": Case(
        "self.handle.registerTimer(5) or 5 in list(self.handle.listTimers())", "bool True", time="ProcessingTime"
    ),
    "no such timer": Case("self.handle.deleteTimer(5)", "NoneType None", time="ProcessingTime"),
    "timer at a fraction": Case("self.handle.registerTimer(5.5)", "TypeError None", time="ProcessingTime"),
    "timer at a text": Case("self.handle.registerTimer('5')", "TypeError None", time="ProcessingTime"),
    "timer beyond all time": Case("self.handle.registerTimer(2**63)", "ValueError None", time="ProcessingTime"),
    # A state where there is no key.
    "used in init": Case("self.value.get()", error("INTERNAL_ERROR_TWS"), "init"),
    "used in close": Case("self.value.get()", error("INTERNAL_ERROR_TWS"), "close"),
    # Values.
    "value too short": Case("self.value.update((1,))", error(LENGTH)),
    "value too long": Case("self.value.update((1, 'x', 2))", error(LENGTH)),
    "value of no tuple": Case("self.value.update(5)", "TypeError None"),
    "value None": Case("self.value.update(None)", "TypeError None"),
    "value of another type": Case(
        "self.value.update(('x', 'y')) or self.value.get()", "tuple(NoneType None, str 'y')", ours=error()
    ),
    "item too short": Case("self.items.appendValue(())", error(LENGTH)),
    "item None": Case("self.items.appendValue(None)", "TypeError None"),
    "items None": Case("self.items.put(None)", "TypeError None"),
    "items of no tuples": Case("self.items.put([1, 2])", "TypeError None"),
    "item in put too short": Case("self.items.put([(1,), ()])", error(LENGTH)),
    "no items": Case("self.items.put([])", error("ILLEGAL_STATE_STORE_VALUE.EMPTY_LIST_VALUE"), ours="NoneType None"),
    "map key too short": Case("self.words.updateValue(('x',), (1,))", error(LENGTH)),
    "map key too short to be there": Case("self.words.containsKey(('x',))", error(LENGTH)),
    "map key None": Case("self.words.getValue(None)", "TypeError None"),
    "map key of another type": Case("self.words.updateValue((1, 'x'), (1,))", "NoneType None", ours=error()),
    "map value too short": Case("self.words.updateValue(('x', 1), ())", error(LENGTH)),
    "map value None": Case("self.words.updateValue(('x', 1), None)", "TypeError None"),
}


class Misuse(StatefulProcessor):
    """Does what its cases say, where they say it, and writes down what came of it. `insists`: and lets errors through."""

    def __init__(self, folder: Path, cases: dict[str, Case], *, insists: bool = False) -> None:
        self.folder = folder
        self.cases = cases
        self.insists = insists

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.value = handle.getValueState("value", "n int, text string")
        self.items = handle.getListState("items", "n int")
        self.words = handle.getMapState("words", "word string, part int", "n int")
        self.gone = handle.getValueState("gone", "n int")
        self.gone_list = handle.getListState("gone list", "n int")
        self.gone_map = handle.getMapState("gone map", "n int", "n int")
        for name in ("gone", "gone list", "gone map"):
            handle.deleteIfExists(name)
        self.try_all("init")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        list(rows)
        self.try_all("rows")
        return iter([])

    def close(self) -> None:
        self.try_all("close")

    def try_all(self, where: str) -> None:
        for name, case in self.cases.items():
            if case.where == where:
                self.try_one(name, case)

    def try_one(self, name: str, case: Case) -> None:
        try:
            came = told(eval(case.do, {"self": self, "handle": self.handle}))
        except Exception as caught:
            self.write(name, f"{kind_of(caught)} {condition_of(caught)}")
            if self.insists:
                raise
        else:
            self.write(name, came)

    def write(self, name: str, came: str) -> None:
        """What came first; both engines call init and close on the driver, too."""
        path = self.folder / name
        if not path.exists():
            path.write_text(came)


def kind_of(caught: Exception) -> str:
    """As whoever catches Spark's errors sees it."""
    return next(kind.__name__ for kind in type(caught).__mro__ if kind.__module__.startswith(("pyspark.", "builtins")))


def condition_of(caught: Exception) -> str | None:
    found = re.search(r"\[([A-Z][A-Z_.]+)\]", str(caught))
    assert not isinstance(caught, PySparkRuntimeError) or caught.getCondition() is None
    return None if found is None else found[1]


def frame(spark: SparkSession, time: str) -> DataFrame:
    data = spark.createDataFrame([("a", 1)], "key string, n int").coalesce(1)
    if time == "EventTime":
        return data.selectExpr("key", "timestamp_seconds(n) AS at").withWatermark("at", "1 second")
    return data


def came_of(folder: Path, name: str) -> str:
    return (folder / name).read_text() if (folder / name).exists() else "nothing"


@pytest.mark.parametrize(
    "backend",
    [pytest.param(tg.Heap(), id="heap"), pytest.param(tg.RocksDB(memory="64 MB"), id="rocksdb", marks=pytest.mark.long)],
)
def test_what_a_processor_catches_here(spark: SparkSession, tmp_path: Path, backend: Any) -> None:
    for time in ("None", "ProcessingTime", "EventTime"):
        cases = {name: case for name, case in CASES.items() if case.time == time}
        tg.transform_with_state(
            frame(spark, time).groupBy("key"), Misuse(tmp_path, cases), "x string", "Update", time, slots=1, backend=backend
        ).collect()
    found = {name: came_of(tmp_path, name) for name in CASES}
    assert found == {name: case.ours or case.comes for name, case in CASES.items()}


def test_what_a_processor_does_not_catch_names_both_classes(spark: SparkSession, tmp_path: Path) -> None:
    wrong = {name: CASES[name] for name in ("ttl without time",)}
    with pytest.raises(PySparkRuntimeError, match=rf"\[{TTL_MODE}\].*give timeMode='ProcessingTime'") as caught:
        tg.transform_with_state(frame(spark, "None").groupBy("key"), Misuse(tmp_path, wrong, insists=True), "x string")
    assert isinstance(caught.value, tg.JobError)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_spark_says_so(spark: SparkSession, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    session = spark.newSession()
    session.conf.set(
        "spark.sql.streaming.stateStore.providerClass",
        ROCKSDB_STATE_STORE,
    )
    session.conf.set("spark.sql.shuffle.partitions", "1")
    query = (
        frame(session, case.time)
        .groupBy("key")
        .transformWithState(Misuse(tmp_path, {name: case}, insists=True), "x string", "Update", case.time)
    )
    try:
        query.collect()
    except Exception as error:
        print(error)
    assert came_of(tmp_path, name) == case.comes


class Gives(StatefulProcessor):
    """Returns what the text says."""

    def __init__(self, what: str) -> None:
        self.what = what

    def init(self, handle: Any) -> None: ...

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Any:
        return eval(self.what, {"Row": Row, "pd": pd, "sys": sys})

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("Row(n=5)", r"Gives.handleInputRows returned Row\(n=5\), and not several rows. Give each row with `yield row`"),
        ("5", "Gives.handleInputRows returned 5, and not several rows"),
        ("sys.exit(3)", r"SystemExit: 3\nA function must not end its process"),
        ("pd.DataFrame({'n': [5]})", "Gives.handleInputRows returned one DataFrame, and not several DataFrames. Give"),
    ],
)
def test_what_a_processor_must_not_do_is_said_and_not_tried_again(spark: SparkSession, what: str, says: str) -> None:
    grouped = spark.range(4).groupBy("id")
    form = tg.transform_with_state_in_pandas if "pd" in what else tg.transform_with_state
    result = form(grouped, Gives(what), "n long", "Append", "None", slots=2)
    with pytest.raises(Exception, match=says) as failed:
        result.collect()
    assert "maximum allowable" not in str(failed.value) and "guest.py" not in str(failed.value)


def test_an_init_that_is_a_generator_is_refused_when_the_query_is_built(spark: SparkSession) -> None:
    class Yields(Gives):
        def init(self, handle: Any) -> Any:
            yield handle

    with pytest.raises(tg.JobError, match=r"Yields.init is a generator.*its code would never run. Remove its yield"):
        tg.transform_with_state(spark.range(4).groupBy("id"), Yields("()"), "n long", "Append", "None", slots=2)
