"""`tg.transform` between batch DataFrames, on a real Spark, `local[4]`."""

from __future__ import annotations

import datetime
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PythonException

import tidegate as tg
from tidegate.dataframes.gathering import Run, RunEnd
from tidegate.dataframes.transforming import Bounded
from tidegate.errors import AlreadyExists, GraphError, JobError, NotFound, SchemaError
from tidegate.snapshots.finding import find_snapshot

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Where Spark has tried again, it doesn't say that it was Python.
FAILED = (PythonException, Py4JJavaError)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """The runs that were gathered since."""
    found: list[Run] = []
    conduct = Bounded.conduct

    def counted(self: Bounded, run: Run) -> RunEnd:
        found.append(run)
        return conduct(self, run)

    monkeypatch.setattr(Bounded, "conduct", counted)
    return found


def events(spark: SparkSession, rows: int = 600, partitions: int = 3) -> DataFrame:
    return spark.range(0, rows, 1, partitions).selectExpr("id", "id % 7 as key")


class Count(tg.KeyedProcess):
    count = tg.value("long", default=0)

    def process(self, event: Any, ctx: Any) -> Iterator[tuple[int, int, int]]:
        self.count.set(self.count.get() + 1)
        yield event.id, event.key, self.count.get()


def counted(stream: Any) -> Any:
    return stream.key_by("key").process("count", Count(), returns="id long, key long, n long")


def check_counts(rows: list[Any], ids: range, *, since: int = 0) -> None:
    """Every id once, and every key counted without a gap."""
    assert sorted(row.id for row in rows) == list(ids)
    of: dict[int, list[int]] = {}
    for row in rows:
        of.setdefault(row.key, []).append(row.n)
    before = Counter(number % 7 for number in range(since))
    for key, numbers in of.items():
        assert sorted(numbers) == list(range(before[key] + 1, before[key] + 1 + len(numbers)))


# --- what a pipeline can do --------------------------------------------------------------------------------------------


def test_a_keyed_pipeline_is_a_dataframe_like_any_other(spark: SparkSession, runs: list[Run]) -> None:
    result = tg.transform(events(spark), counted, slots=3)
    assert runs == [], "nothing runs before an action"
    assert result.schema.simpleString() == "struct<id:bigint,key:bigint,n:bigint>"
    check_counts(result.collect(), range(600))
    assert [sorted(offer.task for offer in run.offers) for run in runs] == [[0, 1, 2]]
    # What Spark allows behind any DataFrame.
    assert len(result.limit(5).union(result.limit(5)).coalesce(1).take(20)) == 10
    assert result.groupBy("key").max("n").count() == 7


def test_records_of_a_partition_stay_in_order_within_their_key(spark: SparkSession) -> None:
    rows = tg.transform(events(spark, partitions=1), counted, slots=2).collect()
    for key in range(7):
        numbers = {row.n: row.id for row in rows if row.key == key}
        assert [numbers[n] for n in sorted(numbers)] == sorted(numbers.values())


class Match(tg.CoProcess):
    left = tg.list("long")
    right = tg.list("string")

    def process_left(self, order: Any, ctx: Any) -> Iterator[tuple[int, int, str]]:
        self.left.add(order.id)
        for name in self.right.get():
            yield order.key, order.id, name

    def process_right(self, person: Any, ctx: Any) -> Iterator[tuple[int, int, str]]:
        self.right.add(person.name)
        for number in self.left.get():
            yield person.key, number, person.name


def test_two_inputs_are_joined_by_key(spark: SparkSession) -> None:
    people = spark.createDataFrame([(key, f"person {key}") for key in range(7)], "key long, name string")
    joined = tg.transform(
        {"orders": events(spark), "people": people},
        lambda people, orders: (
            orders.key_by("key")
            .connect(people.key_by("key"))
            .process("match", Match(), returns="key long, id long, name string")
        ),
        slots=2,
    )
    assert Counter(map(tuple, joined.collect())) == Counter((i % 7, i, f"person {i % 7}") for i in range(600))


class Rules(tg.BroadcastProcess):
    """Keeps what comes before the last rule."""

    rules = tg.broadcast_map("long", "string")
    early = tg.operator_list("struct<id: long, key: long>", redistribute="split")

    def process(self, event: Any, ctx: Any) -> Iterator[tuple[int, str | None]]:
        if len(dict(self.rules.items())) < 7:
            self.early.add({"id": event.id, "key": event.key})
        else:
            yield event.id, self.rules.get(event.key)

    def process_broadcast(self, rule: Any, ctx: Any) -> Iterator[tuple[int, str | None]]:
        self.rules.put(rule.key, rule.name)
        if len(dict(self.rules.items())) == 7:
            for event in self.early.get():
                yield event["id"], self.rules.get(event["key"])
            self.early.clear()


def test_a_broadcast_input_reaches_every_slot(spark: SparkSession) -> None:
    rules = spark.createDataFrame([(key, f"rule {key}") for key in range(7)], "key long, name string")
    named = tg.transform(
        {"events": events(spark), "rules": rules},
        lambda events, rules: events.connect(rules.broadcast()).process("apply", Rules(), returns="id long, name string"),
        slots=3,
    )
    assert Counter(map(tuple, named.collect())) == Counter((i, f"rule {i % 7}") for i in range(600))


class Split(tg.Process):
    def process(self, event: Any, ctx: Any) -> Iterator[tuple[int]]:
        if event.key == 0:
            ctx.side("zeros", (event.id, "zero"))
        else:
            yield (event.id,)


def split(stream: Any) -> dict[str, Any]:
    parts = stream.process("split", Split(), returns="id long", side_outputs={"zeros": "id long, why string"})
    return {"others": parts, "zeros": parts.side_output("zeros")}


def test_side_outputs_are_dataframes_and_share_one_run_once_persisted(spark: SparkSession, runs: list[Run]) -> None:
    outputs = tg.transform(events(spark), split, slots=2)
    assert sorted(outputs) == ["others", "zeros"] and outputs["zeros"].columns == ["id", "why"]
    outputs.persist()
    try:
        assert sorted(row.id for row in outputs["zeros"].collect()) == list(range(0, 600, 7))
        assert outputs["others"].count() == 600 - 86
        assert len(runs) == 1
    finally:
        outputs.unpersist()


def test_a_loop_runs_until_no_record_is_in_it(spark: SparkSession) -> None:
    def collatz(numbers: Any) -> Any:
        def body(rows: Any) -> tuple[Any, Any]:
            stepped = rows.map(
                lambda row: (
                    row.id,
                    row.n if row.n == 1 else row.n // 2 if row.n % 2 == 0 else 3 * row.n + 1,
                    row.steps + (row.n != 1),
                ),
                returns="id long, n long, steps long",
            ).rebalance()
            return stepped.filter(lambda row: row.n != 1), stepped.filter(lambda row: row.n == 1)

        return numbers.iterate("collatz", body)

    start = spark.range(1, 60, 1, 2).selectExpr("id", "id as n", "0L as steps")
    steps = {row.id: row.steps for row in tg.transform(start, collatz, slots=2).collect()}
    assert len(steps) == 59 and steps[1] == 0 and steps[27] == 111 and steps[54] == 112


class Quiet(tg.KeyedProcess):
    """Tells a second after a key's last event."""

    last = tg.value("long")

    def process(self, event: Any, ctx: Any) -> None:
        self.last.set(max(event.at, self.last.get() or 0))
        ctx.timers.event_time(event.at + 1000)

    def on_timer(self, at: int, ctx: Any) -> Iterator[tuple[int, int]]:
        if at == (self.last.get() or 0) + 1000:
            yield ctx.key, at


def quiet(stream: Any) -> Any:
    return stream.with_watermark("at", "0 s").key_by("key").process("quiet", Quiet(), returns="key long, at long")


def test_event_time_ends_with_the_input(spark: SparkSession) -> None:
    timed = events(spark).selectExpr("key", "id * 100 as at")
    rows = tg.transform(timed, quiet, slots=2).collect()
    last = {key: max(i for i in range(600) if i % 7 == key) * 100 + 1000 for key in range(7)}
    assert {row.key: max(r.at for r in rows if r.key == row.key) for row in rows} == last


def test_what_spark_calls_a_type_comes_through(spark: SparkSession) -> None:
    at = datetime.datetime(2026, 3, 1, 12, 0, 0, 123456)
    columns = (
        "b boolean, i int, f float, d double, s string, x binary, day date, at timestamp, plain timestamp_ntz, "
        "amount decimal(10,2), tags array<string>, by map<string,long>, inner struct<a: long, b: array<int>>"
    )
    rows = [
        (True, 1, 1.5, 2.5, "ä", b"\x00\x01", at.date(), at, at, Decimal("12.50"), ["a", None], {"k": 1}, (1, [2, 3])),
        (None,) * 13,
    ]
    frame = spark.createDataFrame(rows, columns)
    for each in (lambda s: s, lambda s: s.map(lambda row: row, returns=columns)):
        back = tg.transform(frame, lambda stream, each=each: each(stream), slots=2)
        assert back.schema == frame.schema
        assert sorted(map(str, back.collect())) == sorted(map(str, frame.collect()))


# --- from savepoint to savepoint ---------------------------------------------------------------------------------------


def test_history_in_batch_then_live_from_its_savepoint(tmp_path: Path, spark: SparkSession, runs: list[Run]) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    history = tg.transform(events(spark), counted, name="history", slots=2, savepoint_to=first)
    check_counts(history.collect(), range(600))
    assert find_snapshot(first).manifest.savepoint is not None
    assert history.count() == 600
    assert len(runs) == 2, "a second action runs it again, and leaves the savepoint as it is"
    assert [path.name for path in tmp_path.iterdir()] == ["first"], "nothing but the savepoint is left"

    more = events(spark, 900).where("id >= 600")
    check_counts(
        tg.transform(more, counted, slots=3, restore_from=first, savepoint_to=second).collect(), range(600, 900), since=600
    )

    live = tg.Job("live", spark, slots=2, restore_from=second, snapshots=tg.Snapshots(to=str(tmp_path / "live")))
    rows = [(number, number % 7) for number in range(900, 1000)]
    counted(live.source("events", tg.sources.rows(rows, "id long, key long"))).to("out", tg.sinks.collect())
    handle = live.start()
    assert handle.wait("2 minutes") is tg.Status.FINISHED
    check_counts(handle.results("out"), range(900, 1000), since=900)


def test_timers_wait_in_a_savepoint_unless_it_is_drained(tmp_path: Path, spark: SparkSession) -> None:
    timed = events(spark, 7, 1).selectExpr("key", "id * 1000 as at")
    open_end = tg.transform(timed, quiet, slots=2, savepoint_to=str(tmp_path / "open"))
    told = {row.key for row in open_end.collect()}
    assert 6 not in told, "event time hasn't got so far"
    nothing = timed.where("false")
    rest = {row.key for row in tg.transform(nothing, quiet, slots=2, restore_from=str(tmp_path / "open")).collect()}
    assert told | rest == set(range(7)) and 6 in rest, "no row comes in, and the timers fire all the same"
    drained = tg.transform(timed, quiet, slots=2, savepoint_to=str(tmp_path / "drained"), drain=True)
    assert {row.key for row in drained.collect()} == set(range(7))


# --- what goes wrong ---------------------------------------------------------------------------------------------------


class Divides(tg.KeyedProcess):
    def process(self, event: Any, ctx: Any) -> Iterator[tuple[float]]:
        yield (1 / (event.id - 500),)


def test_an_error_in_a_users_function_is_told_and_not_tried_again(spark: SparkSession, runs: list[Run]) -> None:
    result = tg.transform(events(spark), lambda s: s.key_by("key").process("divide", Divides(), returns="r double"), slots=2)
    with pytest.raises(FAILED) as failed:
        result.collect()
    told = str(failed.value)
    assert "in operator 'divide', at record" in told and "id=500" in told and "ZeroDivisionError" in told
    assert "in operator 'divide'" in "".join(told.splitlines()[:2]), "the user's error comes first"
    assert "maximum allowable" not in told and "guest.py" not in told
    assert len(runs) == 1
    check_counts(tg.transform(events(spark), counted, slots=2).collect(), range(600))


def test_the_users_error_comes_first_whatever_the_action(spark: SparkSession) -> None:
    """In front of it stands what py4j and Spark say of any error, in two lines."""
    result = tg.transform(events(spark), lambda s: s.key_by("key").process("divide", Divides(), returns="r double"), slots=2)
    actions: list[Callable[[DataFrame], object]] = [
        lambda frame: frame.count(),
        lambda frame: frame.write.format("noop").mode("overwrite").save(),
    ]
    for action in actions:
        with pytest.raises(FAILED) as failed:
            action(result)
        lines = str(failed.value).splitlines()
        assert "in operator 'divide', at record" in lines[1] and lines[2].startswith("Traceback"), lines[:4]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("5", "Gives.process returned 5, and not several rows. Give each row with `yield row`"),
        ("(1, 2)", r"Gives.process returned \(1, 2\), and not several rows"),
        ("sys.exit(3)", r"SystemExit: 3\nA function must not end its process"),
    ],
)
def test_what_a_function_must_not_do_is_said_and_not_tried_again(
    spark: SparkSession, runs: list[Run], given: str, says: str
) -> None:
    class Gives(tg.KeyedProcess):
        def process(self, record: Any, ctx: Any) -> Any:
            return eval(given, {"sys": sys})

    result = tg.transform(events(spark), lambda s: s.key_by("key").process("give", Gives(), returns="n long"), slots=2)
    with pytest.raises(FAILED, match=says):
        result.collect()
    assert len(runs) == 1


class DiesOnce(Count):
    """Its process is killed at a record, the first time."""

    def __init__(self, flag: str, at: int) -> None:
        self.flag = flag
        self.at = at

    def process(self, event: Any, ctx: Any) -> Iterator[tuple[int, int, int]]:
        if event.id == self.at and not Path(self.flag).exists():
            Path(self.flag).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        yield from super().process(event, ctx)


def test_a_process_that_is_killed_costs_another_run(tmp_path: Path, spark: SparkSession, runs: list[Run]) -> None:
    result = tg.transform(
        events(spark),
        lambda s: s.key_by("key").process(
            "count", DiesOnce(str(tmp_path / "flag"), 500), returns="id long, key long, n long"
        ),
        slots=2,
    )
    check_counts(result.collect(), range(600))
    assert len(runs) == 2 and runs[0].offers[0].stage == runs[1].offers[0].stage, "Spark tries the stage again"


def test_what_cant_be_is_said_at_once(tmp_path: Path, spark: SparkSession) -> None:
    frame = events(spark, 10)
    with pytest.raises(GraphError, match=r"'output', a keyed stream; return it before key_by"):
        tg.transform(frame, lambda s: s.key_by("key"))
    with pytest.raises(GraphError, match=r"as 'a', None; return a stream"):
        tg.transform(frame, lambda s: {"a": None})  # type: ignore[arg-type, return-value]
    with pytest.raises(GraphError, match=r"sink 'out'.*Return the stream instead"):
        tg.transform(frame, lambda s: (s.to("out", tg.sinks.collect()), s)[1])
    with pytest.raises(JobError, match=r"slots=9.*has 4 task slots"):
        tg.transform(frame, counted, slots=9)
    with pytest.raises(JobError, match=r"Spark Connect.*'input' is list"):
        tg.transform([1, 2], counted)  # type: ignore[call-overload]
    with pytest.raises(JobError, match=r"'my bids'.*choose a name that can be one"):
        tg.transform({"my bids": frame}, counted)
    with pytest.raises(SchemaError, match="twice"):
        tg.transform(frame.selectExpr("id", "id"), lambda s: s)
    with pytest.raises(NotFound, match="nothing is there"):
        tg.transform(frame, counted, restore_from=str(tmp_path / "nowhere"))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(AlreadyExists, match="not empty"):
        tg.transform(frame, counted, savepoint_to=str(tmp_path / "taken"))


def test_a_savepoint_that_doesnt_fit_is_refused_when_it_runs(tmp_path: Path, spark: SparkSession) -> None:
    tg.transform(events(spark), counted, slots=2, savepoint_to=str(tmp_path / "sp")).count()
    other = tg.transform(events(spark), split, slots=2, restore_from=str(tmp_path / "sp"))["zeros"]
    with pytest.raises(FAILED, match=r"the snapshot holds state of it .*drop_state=\['count'\]"):
        other.collect()
    assert (
        tg.transform(events(spark), split, slots=2, restore_from=str(tmp_path / "sp"), drop_state=["count"])["zeros"].count()
        == 86
    )
