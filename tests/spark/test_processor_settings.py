# ruff: noqa: N803  (Spark's names)
"""The settings of a session that change what a processor is given and what may become of its output, on both engines.

Each case has a setting and a processor on which it shows: with the setting both give the same, and Spark something else
without. What both give without settings is here, too, where only conversions decide it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

import tidegate as tg
from tests.spark.processors import ROCKSDB_STATE_STORE
from tidegate.spark import processor_settings as settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MOMENT = datetime(2024, 1, 2, 3, 4, 5)
NEW_YORK = {settings.TIME_ZONE: "America/New_York"}
NTZ = {settings.TIMESTAMP_TYPE: "TIMESTAMP_NTZ"}
LONG = pytest.mark.long


class Gives(StatefulProcessor):
    """What a function makes of the rows, or DataFrames, of a key."""

    def __init__(self, give: Callable[[list[Any]], list[Any]]) -> None:
        self.give = give

    def init(self, handle: Any) -> None:
        handle.getValueState("state", "n int")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        return iter(self.give(list(rows)))


def frame(**columns: Any) -> Callable[[list[Any]], list[Any]]:
    return lambda _: [pd.DataFrame(columns)]


def frames(*each: dict[str, Any]) -> Callable[[list[Any]], list[Any]]:
    return lambda _: [pd.DataFrame(columns) for columns in each]


def rows(*each: dict[str, Any]) -> Callable[[list[Any]], list[Any]]:
    return lambda _: [Row(**values) for values in each]


def seen(given: list[Any]) -> list[Any]:
    """Which DataFrames a processor was given: names, types and values, with theirs."""

    def of(name: str, series: pd.Series[Any]) -> tuple[Any, ...]:
        return name, str(series.dtype), [(type(value).__name__, str(value)) for value in series]

    return [
        pd.DataFrame(
            {
                "said": [
                    str([[of(str(name), each.iloc[:, index]) for index, name in enumerate(each.columns)] for each in given])
                ]
            }
        )
    ]


def sizes(given: list[Any]) -> list[Any]:
    """How many rows each DataFrame of a key has; or how many a call got, of a processor of rows."""
    if given and not isinstance(given[0], pd.DataFrame):
        return [Row(said=str(len(given)))]
    return [pd.DataFrame({"said": [str(list(map(len, given)))]})]


@dataclass(frozen=True)
class Case:
    give: Callable[[list[Any]], list[Any]]
    output: str = "said string"
    conf: dict[str, str] = field(default_factory=dict)
    input: str = "k string, n int"
    given: tuple[tuple[Any, ...], ...] = (("a", 1), ("a", 2), ("b", 3))
    pandas: bool = True


TYPES = (
    "k string, n int, m long, b byte, f float, flag boolean, day date, at timestamp, wall timestamp_ntz, "
    "items array<int>, limits map<string,int>, who struct<name:string,tags:array<string>>, moments array<timestamp>, "
    "raw binary, price decimal(5,2)"
)
FULL = (
    "a",
    1,
    2**60 + 1,
    3,
    1.1,
    True,
    date(2024, 1, 2),
    MOMENT,
    MOMENT,
    [1, 2],
    {"x": 1},
    ("Ada", ["q"]),
    [MOMENT],
    b"x",
    Decimal("1.50"),
)
NULLS = (None,) * 14

SETTINGS = {
    "integers for decimals": Case(frame(d=[1, 2]), "d decimal(10,2)", {settings.INT_TO_DECIMAL: "true"}),
    "unsafe conversion": Case(frame(n=[1.5]), "n int", {settings.CONVERT_SAFELY: "false"}),
    "by position": Case(frame(b=[1], a=["x"]), "a int, b string", {settings.BY_NAME: "false"}),
    "by position, other names": Case(frame(y=[1], z=["x"], more=[2]), "a int, b string", {settings.BY_NAME: "false"}),
    "extension integers": Case(
        seen,
        conf={settings.INT_EXTENSIONS: "true"},
        input="k string, n int, m long",
        given=(("a", 1, 2**60 + 1), ("b", None, None), ("b", 2, 2**60 + 3)),
    ),
    "rows in a DataFrame": Case(seen, conf={settings.FRAME_ROWS: "3"}, given=(*(("a", n) for n in range(7)), ("b", 1))),
    "bytes in a DataFrame": Case(
        sizes,
        conf={settings.FRAME_BYTES: "25000"},
        input="k string, t string",
        given=(*(("a", str(n) * 10_000) for n in range(8)), ("b", "x" * 10_000)),
    ),
    "time zone of what comes": Case(seen, conf=NEW_YORK, input=TYPES, given=(FULL,)),
    "time zone of what goes": Case(
        frame(t=[MOMENT], all=[[MOMENT]], by=[{"a": MOMENT}]),
        "t timestamp, all array<timestamp>, by map<string,timestamp>",
        NEW_YORK,
    ),
    "timestamps without a zone": Case(frame(t=[MOMENT]), "t timestamp", {**NEW_YORK, **NTZ}),
    "timestamps without a zone, rows": Case(rows({"t": MOMENT}), "t timestamp", NTZ, pandas=False),
}
CONVERSIONS = {
    "every type": Case(seen, input=TYPES, given=(FULL,)),
    "every type, null in others": Case(seen, input=TYPES, given=(FULL, ("b", *NULLS), ("a", *NULLS), ("c", *FULL[1:]))),
    "odd names": Case(seen, input="k string, `a b` int, class int, _x int", given=(("a", 1, 2, 3),)),
    "integers beside nothing": Case(frames({"n": [2**60 + 1]}, {"n": [np.nan]}), "n long"),
    "integers beside texts": Case(frames({"n": [2**60 + 1]}, {"n": ["7"]}), "n long"),
    "columns in another order": Case(frames({"a": [1], "b": ["x"]}, {"b": ["y"], "a": [2]}), "a int, b string"),
    "categories": Case(frame(s=pd.Categorical(["a", "b"])), "s string"),
    "a nested row": Case(frame(s=[{"x": 1, "y": "q"}], t=[(1, "q")]), "s struct<x:int,y:string>, t struct<x:int,y:string>"),
    "no name": Case(lambda _: [pd.DataFrame([[1, "x"]])], "a int, b string"),
    "large texts": Case(frame(s=["x"]), "s string", {"spark.sql.execution.arrow.useLargeVarTypes": "true"}),
    "large texts, rows": Case(
        rows({"s": "x"}), "s string", {"spark.sql.execution.arrow.useLargeVarTypes": "true"}, pandas=False
    ),
    "compressed": Case(seen, conf={"spark.sql.execution.arrow.compression.codec": "zstd"}),
    "values of rows": Case(
        rows({"n": 1.5, "d": 1, "t": MOMENT, "s": (1, "q")}),
        "n int, d decimal(10,2), t timestamp, s struct<a:int,b:string>",
        NEW_YORK,
        pandas=False,
    ),
    "a column that can't be null": Case(rows({"n": None}), "n int NOT NULL", pandas=False),
}
REFUSED = {
    "an integer for a decimal": Case(frame(d=[1, 2]), "d decimal(10,2)"),
    "a fraction for an integer": Case(frame(n=[1.5]), "n int"),
    "too large": Case(frame(n=[2**40]), "n int"),
    "an integer for a text": Case(frame(s=[1]), "s string"),
    "a text for a date": Case(frame(s=["2024-01-02"]), "s date"),
    "a column that is missing": Case(frame(a=[1]), "a int, b int"),
    "a column that is missing in the second": Case(frames({"a": [1], "b": [1]}, {"a": [1]}), "a int, b int"),
    "no DataFrame": Case(lambda _: [pd.Series([1])], "n int"),
    "a bool for an integer, rows": Case(rows({"n": True}), "n int", pandas=False),
    "an integer for a text, rows": Case(rows({"s": 1}), "s string", pandas=False),
}
IN_MAKE_TEST = {
    "integers for decimals",
    "unsafe conversion",
    "by position",
    "extension integers",
    "rows in a DataFrame",
    "bytes in a DataFrame",
    "time zone of what comes",
    "time zone of what goes",
    "timestamps without a zone, rows",
    "every type, null in others",
    "integers beside nothing",
}


def some(cases: dict[str, Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "case", [pytest.param(case, id=name, marks=() if name in IN_MAKE_TEST else LONG) for name, case in cases.items()]
    )


def result(
    spark: SparkSession, case: Case, conf: dict[str, str], *, on_spark: bool, initial: list[Any] | None = None
) -> tuple[str, list[str]]:
    session = spark.newSession()
    for name, value in {
        **conf,
        "spark.sql.shuffle.partitions": "1",
        "spark.sql.streaming.stateStore.providerClass": ROCKSDB_STATE_STORE,
    }.items():
        session.conf.set(name, value)
    grouped = session.createDataFrame(list(case.given), case.input).coalesce(1).groupBy("k")
    first = None if initial is None else session.createDataFrame(initial, "k string, n int").groupBy("k")
    if on_spark:
        run = grouped.transformWithStateInPandas if case.pandas else grouped.transformWithState
        found = run(Gives(case.give), case.output, "Update", "None", first)
    else:
        ours = tg.transform_with_state_in_pandas if case.pandas else tg.transform_with_state
        found = ours(grouped, Gives(case.give), case.output, "Update", "None", first, slots=1)
    return found.schema.simpleString(), sorted(str(tuple(row)) for row in found.collect())


@some(SETTINGS)
def test_a_setting_does_what_it_does_in_spark(spark: SparkSession, case: Case) -> None:
    theirs = result(spark, case, case.conf, on_spark=True)
    assert result(spark, case, case.conf, on_spark=False) == theirs
    try:
        without = result(spark, case, {}, on_spark=True)
    except Exception:  # an error is something else, too
        return
    assert without != theirs, "the case doesn't show what the setting does"


@pytest.mark.long
@pytest.mark.parametrize("pandas", [False, True])
def test_with_an_initial_state_spark_calls_a_processor_of_rows_again(spark: SparkSession, pandas: bool) -> None:
    """In the batch that takes the initial state in, for every maxRecordsPerBatch rows of a key (docs/migrating.md)."""
    case = Case(sizes, conf={settings.FRAME_ROWS: "4"}, given=tuple(("a", n) for n in range(11)), pandas=pandas)
    theirs, ours = (result(spark, case, case.conf, on_spark=on_spark, initial=[("a", 1)])[1] for on_spark in (True, False))
    assert theirs == (["('[3, 4, 4]',)"] if pandas else ["('3',)", "('4',)", "('4',)"])
    assert ours == (["('[4, 4, 3]',)"] if pandas else ["('11',)"])


@some(CONVERSIONS)
def test_values_are_converted_as_in_spark(spark: SparkSession, case: Case) -> None:
    assert result(spark, case, case.conf, on_spark=False) == result(spark, case, case.conf, on_spark=True)


@some(REFUSED)
def test_what_spark_refuses_is_refused(spark: SparkSession, case: Case) -> None:
    with pytest.raises(Exception, match="is declared with the output"):
        result(spark, case, {}, on_spark=False)
    with pytest.raises(Exception, match="Traceback"):
        result(spark, case, {}, on_spark=True)
