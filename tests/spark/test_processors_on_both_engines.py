"""Spark's stateful processors, unchanged, on Spark's own engine and on Tidegate's: the same output, batch by batch.

A case is a processor and its input, a file for each micro-batch. Both engines read the same files, each with two tasks; what
each gives in each batch is compared after sorting. Spark keeps its state in RocksDB, as it must.
Batches without data, which Spark adds after the last file, are switched off: test_batches_without_data.py is about them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException

import tidegate as tg
from tests.spark.processors import (
    NESTED,
    ROCKSDB_STATE_STORE,
    Alarms,
    Best,
    Commands,
    EitherWay,
    Fading,
    First,
    HighWater,
    Nested,
    Pulses,
    Quiet,
    Sessions,
    Totals,
    Typed,
    Violations,
    Witness,
    Words,
    told,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, GroupedData, SparkSession
    from pyspark.sql.streaming import DataStreamWriter

Rows = list[tuple[Any, ...]]


@pytest.fixture(scope="module")
def session(spark: SparkSession) -> SparkSession:
    """Of the same Spark, with settings of its own."""
    session = spark.newSession()
    session.conf.set("spark.sql.shuffle.partitions", "2")
    session.conf.set("spark.sql.session.timeZone", "UTC")
    session.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "false")
    session.conf.set(
        "spark.sql.streaming.stateStore.providerClass",
        ROCKSDB_STATE_STORE,
    )
    return session


@dataclass(frozen=True)
class Case:
    processor: type[EitherWay]
    output: str
    input: str
    batches: list[Rows]
    contains: dict[int, list[str]]  # by batch: what a row of the output tells, to know that it happened at all
    key: tuple[str, ...] = ("id",)
    time_mode: str = "None"
    delay: str | None = None  # of the watermark on the column `at`
    initial: tuple[str, Rows] | None = None

    def frame(self, session: SparkSession, folder: Path) -> DataFrame:
        stream = session.readStream.schema(self.input).option("maxFilesPerTrigger", 1).json(str(folder))
        return stream if self.delay is None else stream.withWatermark("at", self.delay)

    def initial_state(self, session: SparkSession) -> GroupedData | None:
        if self.initial is None:
            return None
        schema, rows = self.initial
        return session.createDataFrame(rows, schema).groupBy(*self.key)

    def write(self, folder: Path, batches: range) -> None:
        """Spark takes the files in the order of their times."""
        folder.mkdir(exist_ok=True)
        names = [column.split()[0] for column in self.input.split(", ")]
        for number in batches:
            lines = [json.dumps(dict(zip(names, row, strict=True))) for row in self.batches[number]]
            hidden = folder / f"_{number}.json"
            hidden.write_text("\n".join(lines) + "\n")
            os.utime(hidden, (1e9 + number, 1e9 + number))
            hidden.rename(folder / f"{number:03}.json")


def at(second: int) -> str:
    return f"1970-01-01T00:{second // 60:02}:{second % 60:02}.000Z"


def timed(*batches: list[tuple[str, int]]) -> list[Rows]:
    return [[(name, at(second)) for name, second in batch] for batch in batches]


COMMANDS = [
    "value exists",
    "value get",
    "list exists",
    "list get",
    "map exists",
    "map get a 1",
    "map keys",
    "value set 1 one",
    "value exists",
    "value get",
    "value set nulls",
    "value exists",
    "value get",
    "list put 3 1 2",
    "list append 4",
    "list extend 5 6",
    "list get",
    "list twice",
    "list exists",
    "map set b 1 10",
    "map set a 2 20",
    "map set a 1 30",
    "map has a 1",
    "map has a 9",
    "map get a 1",
    "map get a 9",
    "map keys",
    "map values",
    "map iterator",
    "map remove b 1",
    "map remove z 0",
    "map iterator",
]
LATER = [
    "value get",
    "list get",
    "map iterator",
    "value set list",
    "value get",
    "value set row",
    "value get",
    "value clear",
    "value exists",
    "list exists",
    "list get",
    "list append 1",
    "list clear",
    "list exists",
    "map clear",
    "map exists",
    "map set c 1 1",
]

CASES = {
    "violations": Case(
        Violations,
        "id string, readings int, violations int, scratch string",
        "id string, temperature int",
        [
            [("0", 123), ("0", 46), ("1", 146), ("1", 346), ("2", None)],
            [("0", 123), ("0", 223), ("0", 323), ("1", 246), ("1", 6)],
        ],
        {0: ["2', 0, 0, 'refused'"], 1: ["'0', 3, 4", "'1', 2, 3"]},
    ),
    "initial state": Case(
        Totals,
        "area string, sensor long, total long",
        "area string, amount int, sensor long",
        [[("a", 123, 1), ("a", 46, 1), ("b", 146, 2)], [("a", 67, 1), ("c", 12, 3)]],
        {0: ["'a', 1, 958", "'b', 2, 146"], 1: ["'a', 1, 1025", "'c', 3, 1000"]},
        key=("area", "sensor"),
        initial=("opening int, area string, sensor long", [(789, "a", 1), (988, "c", 3), (7, "d", None)]),
    ),
    "timers of an initial state": Case(
        Alarms,
        "area string, sensor long, total long",
        "area string, amount int, sensor long",
        [[("a", 123, 1), ("b", 1, 2)], [("a", 67, 1), ("c", 12, 3)]],
        {0: ["'a', 1, 912", "'a expired', 1, 912", "'c expired', 3, 987"], 1: ["'c', 3, 999"]},
        key=("area", "sensor"),
        time_mode="ProcessingTime",
        initial=("area string, sensor long, opening int", [("a", 1, 789), ("c", 3, 987)]),
    ),
    "every method": Case(
        Commands,
        "id string, number int, said string",
        "id string, commands array<string>",
        [
            [("a", COMMANDS), ("b", COMMANDS[:9])],
            [("a", LATER), ("b", ["value get"])],
            [("a", ["map iterator", "list get"])],
        ],
        {
            0: ["list twice: list(tuple(int 3), tuple(int 1), tuple(int 3), list("],
            1: ["value get: tuple(int 1, str 'one')"],
            2: ["map iterator: list(tuple(tuple(str 'c', int 1), tuple(int 1)))"],
        },
    ),
    "best scores": Case(
        Best,
        "player string, score double",
        "player string, score double",
        [[("a", 1.0), ("a", 5.0), ("b", 2.5)], [("a", 3.0), ("a", 4.0), ("b", 0.5)], [("a", 9.0)]],
        {1: ["'a', 3.0", "'b', 0.5"], 2: ["'a', 9.0"]},
        key=("player",),
    ),
    "words": Case(
        Words,
        "user string, word string, n long",
        "user string, word string",
        [[("a", "tide"), ("a", "gate"), ("b", "tide")], [("a", "tide"), ("a", "tide"), ("b", "gate")]],
        {1: ["'a', 'tide', 3", "'b', 'gate', 1"]},
        key=("user",),
    ),
    "types in state": Case(
        Typed,
        "id string, what string, said string",
        "id string, n int",
        [[("a", 1), ("nulls", 0)], [("a", 2), ("nulls", 3)]],
        {0: ["NoneType None"], 1: ["'value', \"tuple(bool False, int 1, int -1, int 1000", "NoneType None, NoneType None"]},
    ),
    "types in the output": Case(Nested, NESTED, "id string, n int", [[("a", 1), ("b", 1)], [("a", 2)]], {1: ["['a', 'b']"]}),
    "keys and rows": Case(
        Witness,
        "said string",
        "id string, n int, at timestamp, day date, price decimal(10,2), flag boolean, tags array<string>, "
        "who struct<name:string>",
        [
            [
                ("a", 1, at(1), "2026-01-02", 1.5, True, ["x"], {"name": "Ada"}),
                ("a", 1, at(1), "2026-01-02", 1.5, True, ["x"], None),
                ("a", 2, at(1), "2026-01-02", 1.5, None, None, None),
                (None, None, at(2), None, None, None, None, None),
                (None, 3, None, "2026-01-02", 2, None, [], None),
            ]
        ],
        {0: ["tuple(NoneType None", "date datetime.date(2026, 1, 2), str"]},
        key=("price", "day", "id", "flag"),
    ),
    "event time": Case(
        HighWater,
        "id string, at_ms long, watermark_ms long",
        "id string, at timestamp",
        timed([("a", 20)], [("a", 4)], [("a", 2), ("a", 11), ("a", 13), ("a", 15)], [("b", 10), ("c", 11), ("d", 9)]),
        {0: ["'a expired', 0"], 1: ["'a', 4000", "'a expired', 10000"], 2: ["'a', 15000"], 3: ["'c', 11000"]},
        time_mode="EventTime",
        delay="10 seconds",
    ),
    "sessions": Case(
        Sessions,
        "id string, start_ms long, end_ms long, n int, timers string",
        "id string, at timestamp",
        timed(
            [("a", 10), ("a", 12), ("b", 11)],
            [("a", 16), ("c", 30)],
            [("a", 50), ("d", 40)],
            [("d", 70), ("e", 29)],
            [("e", 90)],
        ),
        {2: ["'b ended', 11000, 11000, 1"], 3: ["'c ended', 30000, 30000, 1"], 4: ["'a ended', 10000, 50000, 4"]},
        time_mode="EventTime",
        delay="1 second",
    ),
    "timers that make timers": Case(
        Pulses,
        "id string, at_ms long",
        "id string, at timestamp",
        timed([("a", 10), ("a", 11), ("b", 10)], [("c", 13)], [("c", 14)], [("c", 30)], [("a", 40)]),
        {0: ["'a waits', 12000"], 2: ["'a fired', 12000", "'b fired', 13000"], 3: ["'a fired', 12001"]},
        time_mode="EventTime",
        delay="0 seconds",
    ),
    "processing time": Case(
        Quiet,
        "id string, n int, timers int",
        "id string, n int",
        [[("timed", 1), ("b", 1)], [("timed", 1), ("timed", 2), ("b", 1)], [("timed", 1), ("b", 1)], [("b", 1)]],
        {
            1: ["'timed', 3", "'timed expired', 3", "'b', 2"],
            2: ["'timed', 1", "'timed expired', 1"],
            3: ["'timed expired', -1"],
        },
        time_mode="ProcessingTime",
    ),
    "time to live": Case(
        Fading,
        "id string, state string, said string",
        "id string, n int",
        [[("a", 1)], [("a", 2), ("b", 1)], [("a", 3)]],
        {
            1: ["'value_brief', 'tuple(bool False, NoneType None)'", "'list_long', 'tuple(bool True, list(tuple(int 1)))'"],
            2: ["'value_ever', 'tuple(bool True, tuple(int 2))'"],
        },
        time_mode="ProcessingTime",
    ),
    "a watermark, but no event time": Case(
        Witness,
        "said string",
        "id string, at timestamp",
        timed([("a", 20)], [("a", 4)], [("a", 2)]),
        {2: ["00:00:02"]},
        delay="10 seconds",
    ),
}
# By signature; the others are in `make long`. (`sessions` has a test of its own, too.)
IN_MAKE_TEST = {
    "rows": {"every method", "types in state", "event time", "processing time", "time to live"},
    "pandas": {"initial state", "types in the output"},
}


def cases() -> list[Any]:
    on_heap = [
        pytest.param(
            CASES[name],
            signature == "pandas",
            tg.Heap(),
            id=f"{name}-{signature}",
            marks=() if name in now else pytest.mark.long,
        )
        for name in CASES
        for signature, now in IN_MAKE_TEST.items()
    ]
    on_rocksdb = [
        pytest.param(case, False, tg.RocksDB(memory="64 MB"), id=f"{name}-rows-rocksdb", marks=pytest.mark.long)
        for name, case in CASES.items()
    ]
    return on_heap + on_rocksdb


def run_query(writer: DataStreamWriter) -> None:
    """All that there is, to its end."""
    query = writer.trigger(availableNow=True).start()
    try:
        assert query.awaitTermination(240), "the query doesn't end"
    finally:
        query.stop()


def patiently(run: Callable[[], None]) -> None:
    """Spark gives a process of its driver ten seconds to start, which a busy machine may not have. Both engines need one."""
    while True:
        try:
            run()
            return
        except StreamingQueryException as error:
            if "Python worker failed to connect back" not in str(error):
                raise


class Engines:
    """The same case on both, in one folder."""

    def __init__(self, case: Case, *, pandas: bool, session: SparkSession, folder: Path) -> None:
        self.case = case
        self.pandas = pandas
        self.session = session
        self.folder = folder
        self.outputs: dict[str, dict[int, list[str]]] = {"spark": {}, "tidegate": {}}

    def spark(self, grouped: GroupedData) -> DataFrame:
        run = grouped.transformWithStateInPandas if self.pandas else grouped.transformWithState
        return run(
            self.case.processor(pandas=self.pandas),
            self.case.output,
            "Update",
            self.case.time_mode,
            self.case.initial_state(self.session),
        )

    def tidegate(self, grouped: GroupedData, **options: Any) -> DataFrame:
        run = tg.transform_with_state_in_pandas if self.pandas else tg.transform_with_state
        return run(
            grouped,
            self.case.processor(pandas=self.pandas),
            self.case.output,
            "Update",
            self.case.time_mode,
            self.case.initial_state(self.session),
            name="transform_with_state",
            **options,
        )

    def run(self, *, slots: int = 2, backend: Any = None) -> None:
        stream = self.case.frame(self.session, self.folder / "in")
        grouped = stream.groupBy(*self.case.key)
        ours = self.tidegate(grouped, slots=slots, snapshots=tg.Snapshots(to=str(self.folder / "state")), backend=backend)
        self.query("tidegate", ours)
        self.on_spark(grouped)

    def on_spark(self, grouped: GroupedData) -> None:
        self.query("spark", self.spark(grouped))

    def query(self, engine: str, frame: DataFrame, mode: str = "update") -> None:
        def take(batch: DataFrame, number: int) -> None:
            self.outputs[engine][number] = sorted(str(tuple(row)) for row in batch.collect())

        patiently(
            lambda: run_query(
                frame.writeStream.foreachBatch(take)
                .outputMode(mode)
                .option("checkpointLocation", str(self.folder / f"{engine}-query"))
            )
        )

    def check(self) -> None:
        ours, theirs = self.outputs["tidegate"], self.outputs["spark"]
        assert sorted(theirs) == list(range(len(self.case.batches)))
        for number, texts in self.case.contains.items():
            assert not [text for text in texts if not any(text in row for row in theirs[number])], (number, theirs[number])
        assert ours == theirs


@pytest.fixture
def engines(session: SparkSession, tmp_path: Path) -> Callable[..., Engines]:
    def of(case: Case, *, pandas: bool = False) -> Engines:
        return Engines(case, pandas=pandas, session=session, folder=tmp_path)

    return of


@pytest.mark.parametrize(("case", "pandas", "backend"), cases())
def test_the_output_is_that_of_spark(engines: Callable[..., Engines], case: Case, pandas: bool, backend: Any) -> None:
    both = engines(case, pandas=pandas)
    case.write(both.folder / "in", range(len(case.batches)))
    both.run(backend=backend)
    both.check()


def test_a_query_that_is_started_again_goes_on_as_sparks_does(engines: Callable[..., Engines]) -> None:
    """Tidegate's at another number of slots, too."""
    both = engines(CASES["sessions"])
    both.case.write(both.folder / "in", range(3))
    both.run()
    both.case.write(both.folder / "in", range(3, len(both.case.batches)))
    both.run(slots=1)
    both.check()


@pytest.mark.parametrize(("name", "pandas"), [("initial state", False), ("every method", True)])
def test_a_batch_dataframe_gives_what_spark_gives(engines: Callable[..., Engines], name: str, pandas: bool) -> None:
    both = engines(CASES[name], pandas=pandas)
    both.case.write(both.folder / "in", range(1))
    frame = both.session.read.schema(both.case.input).json(str(both.folder / "in"))
    ours, theirs = (
        sorted(str(tuple(row)) for row in result.collect())
        for result in (both.tidegate(frame.groupBy(*both.case.key)), both.spark(frame.groupBy(*both.case.key)))
    )
    assert ours == theirs != []


@pytest.mark.long
def test_states_and_timers_of_sparks_go_on_here(engines: Callable[..., Engines]) -> None:
    """As docs/migrating.md says."""
    both = engines(CASES["sessions"])
    both.case.write(both.folder / "in", range(3))
    both.on_spark(both.case.frame(both.session, both.folder / "in").groupBy("id"))
    name, folder = "transform_with_state", str(both.folder / "spark-query")
    sessions = (
        both.session.read.format("statestore").option("stateVarName", "session").load(folder).selectExpr("key.id", "value")
    )
    tg.write_state(sessions, str(both.folder / "one"), operator=name, state="session", key="id", job=name)
    timers = (
        both.session.read.format("statestore")
        .option("readRegisteredTimers", True)
        .load(folder)
        .selectExpr("key.id", "expiration_timestamp_ms AS at_ms")
    )
    tg.write_state(
        timers,
        str(both.folder / "all"),
        base=str(both.folder / "one"),
        operator=name,
        state="__event_timers",
        key="id",
        add=True,
    )
    both.case.write(both.folder / "later", range(3, 5))
    grouped = both.case.frame(both.session, both.folder / "later").groupBy("id")
    both.query(
        "tidegate",
        both.tidegate(
            grouped, slots=2, restore_from=str(both.folder / "all"), snapshots=tg.Snapshots(to=str(both.folder / "state"))
        ),
    )
    ended = [row for row in both.outputs["tidegate"][1] if "ended" in row]
    assert ended == ["('a ended', 10000, 50000, 4, '')", "('c ended', 30000, 30000, 1, '')"]


@pytest.mark.long
def test_what_follows_goes_by_an_event_time_of_the_output(engines: Callable[..., Engines]) -> None:
    case = Case(
        First,
        "id string, first timestamp",
        "id string, at timestamp",
        timed([("a", 10), ("b", 15)], [("a", 11), ("c", 25)], [("a", 5), ("d", 40)]),
        {1: ["(datetime.datetime(1970, 1, 1, 0, 0, 10), 1)"], 2: ["(datetime.datetime(1970, 1, 1, 0, 0, 15), 1)"]},
        time_mode="EventTime",
        delay="5 seconds",
    )
    both = engines(case)
    case.write(both.folder / "in", range(3))
    grouped = case.frame(both.session, both.folder / "in").groupBy("id")
    both.query(
        "tidegate",
        tg.transform_with_state(
            grouped,
            First(),
            case.output,
            "Append",
            "EventTime",
            event_time_column="first",
            slots=2,
            name="first",
            snapshots=tg.Snapshots(to=str(both.folder / "state")),
        )
        .groupBy("first")
        .count(),
        mode="append",
    )
    both.query(
        "spark",
        grouped.transformWithState(First(), case.output, "Append", "EventTime", eventTimeColumnName="first")
        .groupBy("first")
        .count(),
        mode="append",
    )
    both.check()


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "theirs", "ours"),
    [
        ("timer", "timeMode=NoTime", "timers need a time"),
        ("value set short", "STRUCT_ARRAY_LENGTH_MISMATCH", r"is no struct<n: int, text: string>"),
        ("map set short", "STRUCT_ARRAY_LENGTH_MISMATCH", r"a key of the map is a tuple of \(word string, part int\)"),
    ],
)
def test_both_refuse(engines: Callable[..., Engines], command: str, theirs: str, ours: str) -> None:
    both = engines(CASES["every method"])
    grouped = both.session.createDataFrame([("a", [command])], both.case.input).groupBy("id")
    for run, says in ((both.spark, theirs), (both.tidegate, ours)):
        with pytest.raises(Exception, match=says):
            run(grouped).collect()


def test_what_is_told_tells_types() -> None:
    """Else the comparisons above would see less than they say."""
    assert told((1, True, 1.0, None, [b"x"])) == "tuple(int 1, bool True, float 1.0, NoneType None, list(bytes b'x'))"
