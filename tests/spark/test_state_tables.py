"""State as DataFrames on a real Spark: reading, comparing, writing, and a job that goes on from what was written."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
)

import tidegate as tg
from tests.unit.cli.made import GONE, GROUPS, Made, group_of, run
from tidegate.errors import AlreadyExists, JobError, NotFound, SchemaError
from tidegate.snapshots.finding import find_snapshot
from tidegate.spark.state_source import FILTERS_ARE_SAFE, PushingReader, groups_of_keys, groups_within, requested

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KEYS = 60


@pytest.fixture
def made(tmp_path: Path) -> Made:
    made = Made(tmp_path / "snapshots")
    made.write(1, {"count": {f"k{i}": i for i in range(KEYS)}, "scores": {"a": {"x": 1.0, "y": 2.0}}}, items=[5, 6])
    made.write(2, {"count": {"k1": GONE, "k2": 200}, "scores": {"b": {"z": 3.0}}}, on=1, items=[5, 7])
    return made


@pytest.fixture
def session(spark: SparkSession) -> SparkSession:
    tg.register(spark)
    return spark


def load(spark: SparkSession, path: object, **options: object) -> DataFrame:
    given: dict[str, Any] = {name: str(value) for name, value in options.items()}
    return spark.read.format("tidegate").options(**given).load(str(path))


def test_a_state_is_a_dataframe(session: SparkSession, made: Made) -> None:
    count = load(session, made.path, state="count")
    assert count.schema.simpleString() == "struct<key:string,value:bigint,key_group:int,epoch:bigint>"
    assert {(row.key, row.value) for row in count.collect()} == {
        (f"k{i}", 200 if i == 2 else i) for i in range(KEYS) if i != 1
    }
    assert count.where(f"key_group <> pmod(xxhash64(key), {GROUPS})").count() == 0
    scores = load(session, made.path, state="scores").orderBy("map_key").drop("key_group", "epoch")
    assert [tuple(row) for row in scores.collect()] == [("a", "x", 1.0), ("a", "y", 2.0), ("b", "z", 3.0)]
    whole = load(session, made.path, state="scores", per="key", key="name").select("name", "value")
    assert {row.name: row.value for row in whole.collect()} == {"a": {"x": 1.0, "y": 2.0}, "b": {"z": 3.0}}
    assert [row.value for row in load(session, made.path, state="offsets").orderBy("subtask").collect()] == [5, 7]


def test_every_session_of_a_process_reads_state(spark: SparkSession, made: Made) -> None:
    """Spark 4.3 refuses to register a source in a second session, if the first session of the process has registered it."""
    for session in (spark, spark.newSession(), spark, spark.newSession()):
        tg.register(session)
        assert tg.read_state(session, str(made.path), "count").count() == KEYS - 1


def test_a_dataframe_stays_with_its_snapshot(session: SparkSession, made: Made) -> None:
    count = load(session, made.path, state="count")
    made.write(3, {"count": {"later": 1}}, on=2)
    assert {row.epoch for row in count.collect()} == {2}
    assert {row.epoch for row in load(session, made.path, state="count").collect()} == {3}
    assert load(session, made.path, state="count", epoch=1).where("key = 'k1'").count() == 1


def test_only_what_is_asked_for_is_read(session: SparkSession, made: Made) -> None:
    """Every file of the other subtask is gone, and it doesn't matter."""
    subtask = group_of("k7") * 2 // GROUPS
    for file in made.manifests[2].operators["counting"].pieces[1 - subtask].files:
        made.store.delete(file.name)
    found = tg.read_state(session, str(made.path), "count", keys=["k7"])
    assert [row.value for row in found.collect()] == [7]
    assert load(session, made.path, state="count", keys='"k7"').rdd.getNumPartitions() == 1
    groups = range(subtask * GROUPS // 2, (subtask + 1) * GROUPS // 2)
    found = tg.read_state(session, str(made.path), "count", key_groups=groups)
    assert {row.key_group for row in found.collect()} <= set(groups)
    assert tg.read_state(session, str(made.path), "count", keys=[]).count() == 0
    with pytest.raises(Exception, match="has probably released epoch 2"):
        load(session, made.path, state="count").collect()


def test_queries_on_one_dataframe_do_not_disturb_each_other(session: SparkSession, made: Made) -> None:
    """Spark 4.3 mixes up what came of their filters, where a source takes them."""
    count = load(session, made.path, state="count")
    group = group_of("k7")
    of_group = {f"k{i}" for i in range(KEYS) if i != 1 and group_of(f"k{i}") == group}
    some, others = count.where(F.col("key_group") == group), count.where(F.col("key_group") != group)
    assert {row.key for row in some.collect()} == of_group
    assert count.count() == KEYS - 1
    assert some.union(others).count() == KEYS - 1
    count.createOrReplaceTempView("count_view")
    assert session.sql(
        "select (select count(*) from count_view where key = 'k7'), (select count(*) from count_view)"
    ).collect()[0][:] == (1, KEYS - 1)


def test_what_changed_is_a_dataframe(session: SparkSession, made: Made) -> None:
    for diff in (1, made.manifest_path(1)):
        changes = load(session, made.path, state="count", diff=diff)
        assert {(row.change, row.key, row.before, row.after) for row in changes.collect()} == {
            ("removed", "k1", 1, None),
            ("changed", "k2", 2, 200),
        }
    items = load(session, made.path, state="offsets", diff=1).collect()
    assert {(row.change, row.before, row.after) for row in items} == {("removed", 6, None), ("added", None, 7)}


def test_the_manifests_are_tables_too_and_sql_works(session: SparkSession, made: Made) -> None:
    session.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW the_states USING tidegate OPTIONS (path '{made.path}', table 'states', epoch '1')"
    )
    assert session.sql("select state, rows from the_states where kind = 'keyed' order by state").collect() == [
        ("count", KEYS),
        ("scores", 1),
    ]
    session.sql(f"CREATE OR REPLACE TEMPORARY VIEW counted USING tidegate OPTIONS (path '{made.path}', state 'count')")
    assert session.sql("select sum(value) from counted where key in ('k5', 'k6')").collect()[0][0] == 11
    snapshots = load(session, made.path, table="snapshots").orderBy("epoch").collect()
    assert [(row.epoch, row.created) for row in snapshots] == [
        (epoch, datetime.fromtimestamp(1_700_000_000 + epoch / 1000)) for epoch in (1, 2)
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"state": "cuont"}, "no state 'cuont'.*\n.*state 'count': keyed value long by string"),
        ({}, "no state is named"),
        ({"stat": "x"}, "no option 'stat', did you mean 'state'"),
        ({"table": "counts"}, "there are 'snapshots', 'operators'"),
        ({"state": "count", "epoch": "newest"}, "give a whole number"),
        ({"state": "count", "table": "states"}, "without .state. and .diff."),
    ],
)
def test_what_makes_no_sense_is_told_when_it_is_loaded(
    session: SparkSession, made: Made, options: dict[str, str], says: str
) -> None:
    with pytest.raises(AnalysisException, match=says):
        load(session, made.path, **options)


@pytest.mark.parametrize(
    ("path", "options", "error", "says"),
    [
        (
            "",
            {"state": "cuont"},
            NotFound,
            r"has no state 'cuont' \(did you mean 'count'\?\)\. Give one of these:\n  operator",
        ),
        ("", {"state": "count", "operator": "cuonting"}, NotFound, r"no operator 'cuonting' \(did you mean 'counting'\?\)"),
        ("", {"state": "count", "epoch": 7}, NotFound, r"epoch 7 is not a complete snapshot in .*; there are: 1, 2"),
        ("", {"state": "count", "per": "row"}, JobError, "a row is for each 'entry' of a list or map, or for each 'key'"),
        ("none", {"state": "count"}, NotFound, r"nothing is there\. Give the folder of a savepoint, or a job's folder"),
        ("state", {"state": "count"}, NotFound, r"it holds other files\. Give the folder of a savepoint, or a job's folder"),
        ("..", {"state": "count"}, NotFound, "has folders of the jobs .*: give the path of one, such as file://"),
        ("state/file", {"state": "count"}, NotFound, "no snapshots in .*A part of the path is a file and not a folder"),
    ],
)
def test_read_state_says_what_there_is_in_its_own_words(
    session: SparkSession, made: Made, path: str, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    folder = Path(str(made.path))
    (folder / "state" / "file").write_bytes(b"")
    state = options.pop("state")
    with pytest.raises(error, match=says) as refused:
        tg.read_state(session, str(folder / path), state, **options)
    assert str(refused.value).startswith(("the snapshot", "epoch", "the option", "file://", "there are"))


def test_spark_shows_no_frames_of_ours_with_what_cant_be_loaded(session: SparkSession, made: Made) -> None:
    with pytest.raises(AnalysisException) as refused:
        load(session, made.path, state="cuont")
    assert "instance: tidegate.errors.NotFound: the snapshot has no state 'cuont'" in str(refused.value).splitlines()[0]
    assert "state_source.py" not in str(refused.value)


def test_options_of_keys_are_checked(made: Made) -> None:
    for options, says in (
        ({"keys": "k7"}, "not JSON"),
        ({"keys": "[7]"}, r"a key is \(key string\)"),
        ({"key_groups": "3-x"}, "write numbers and ranges"),
    ):
        request = requested({"path": str(made.path), "state": "count", **options})
        table = request.open()[1]
        assert table.keys is not None
        with pytest.raises(JobError, match=says):
            request.groups(table.keys, GROUPS)
    with pytest.raises(JobError, match="has no keys"):
        requested({"path": str(made.path), "state": "offsets", "keys": "[7]"}).open()


def test_filters_that_a_later_spark_may_hand_over(made: Made) -> None:
    group = ("key_group",)
    for condition, expected in (
        (EqualTo(group, 3), {3}),
        (In(group, (1, 2, None)), {1, 2}),
        (GreaterThan(group, 13), {14, 15}),
        (GreaterThanOrEqual(group, 14), {14, 15}),
        (LessThan(group, 2), {0, 1}),
        (LessThanOrEqual(group, -1), set()),
    ):
        assert set(groups_within(condition) or ()) & set(range(GROUPS)) == expected
    assert groups_within(Not(EqualTo(group, 3))) is None and groups_within(EqualTo(("key",), 3)) is None
    request = requested({"path": str(made.path), "state": "count"})
    keys = request.open()[1].keys
    assert keys is not None
    assert groups_of_keys([EqualTo(("key",), "k7")], keys, GROUPS) == {group_of("k7")}
    assert groups_of_keys([In(("key",), ("k7", "k8")), IsNull(("value",))], keys, GROUPS) == {group_of("k7"), group_of("k8")}
    assert groups_of_keys([EqualNullSafe(("key",), None)], keys, GROUPS) == {group_of(None)}
    assert groups_of_keys([EqualTo(("key",), 7)], keys, GROUPS) is None
    assert groups_of_keys([GreaterThan(("key",), "k")], keys, GROUPS) is None
    reader = PushingReader(request, None, None)  # type: ignore[arg-type]
    left = list(reader.pushFilters([EqualTo(("key",), "k7"), LessThan(group, GROUPS), IsNull(("value",))]))
    assert left == [EqualTo(("key",), "k7"), IsNull(("value",))]
    assert [part.value for part in reader.partitions()] == [((group_of("k7"), group_of("k7") + 1),)]
    assert not FILTERS_ARE_SAFE, "this Spark seems to keep filters to their query: let the tests above use them"


# Writing.


class Count(tg.KeyedProcess):
    count = tg.value("long", default=0)
    recent = tg.list("string")
    by_kind = tg.map("string", "long", ttl="1 day")

    def process(self, record: Any, ctx: Any) -> Any:
        self.count.set(self.count.get() + 1)
        yield record.key, self.count.get(), list(self.recent.get()), self.by_kind.get("x", 0)

    def on_timer(self, at: int, ctx: Any) -> Any:
        yield ctx.key, -at, [], 0


def counting(
    spark: SparkSession, folder: Path, *, to: str, out: str = "out", backend: Any = None, rows: int = 20, **rest: Any
) -> tg.Job:
    job = tg.Job(
        "counting",
        spark,
        slots=2,
        restart=tg.NoRestart(),
        backend=backend,
        snapshots=tg.Snapshots(to=str(folder / to), every=None),
        **rest,
    )
    (
        job.source(
            "in", tg.sources.generator(make_row=lambda number: (number % 10,), schema="key long", rows=rows, splits=1)
        )
        .key_by("key")
        .process("count", Count(), returns="key long, n long, recent array<string>, x long")
        .to("out", tg.sinks.parquet(folder / out))
    )
    return job


def committed(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(folder).to_pylist()
    return rows


def test_a_job_goes_on_from_what_spark_wrote(session: SparkSession, tmp_path: Path) -> None:
    counts = session.range(1000).select(F.col("id").alias("key"), (F.col("id") * 100).alias("value"))
    made = tg.write_state(counts, str(tmp_path / "one"), operator="count", state=Count.count, job="counting")
    assert made.epoch == 1 and run("snapshots", "verify", tmp_path / "one").exit_code == 0
    items = session.createDataFrame([(3, 1, "b"), (3, 0, "a"), (4, 0, "c")], "key long, position int, value string")
    tg.write_state(items, str(tmp_path / "two"), base=str(tmp_path / "one"), operator="count", state=Count.recent, add=True)
    ends = datetime(2100, 1, 1, tzinfo=UTC)
    kinds = session.createDataFrame(
        [(3, "x", 7, ends), (3, "y", 8, ends), (5, "x", 9, datetime(2001, 1, 1, tzinfo=UTC))],
        "key long, map_key string, value long, expires timestamp",
    )
    tg.write_state(
        kinds, str(tmp_path / "three"), base=str(tmp_path / "two"), operator="count", state=Count.by_kind, add=True
    )
    timers = session.createDataFrame([(6, 5_000), (6, 4_000)], "key long, at_ms long")
    tg.write_state(
        timers, str(tmp_path / "four"), base=str(tmp_path / "three"), operator="count", state="__event_timers", add=True
    )
    assert run("snapshots", "verify", tmp_path / "four").exit_code == 0

    for backend, to in ((tg.Heap(), "heap"), (tg.RocksDB(memory="64 MB"), "rocks")):
        counting(session, tmp_path, to=to, out=f"{to}-out", backend=backend, restore_from=str(tmp_path / "four")).run()
        rows = {(row["key"], row["n"]): row for row in committed(tmp_path / f"{to}-out")}
        assert {n for key, n in rows if key == 7} == {701, 702}
        assert rows[3, 301]["recent"] == ["a", "b"] and rows[3, 301]["x"] == 7
        assert rows[5, 501]["x"] == 0, "it expired long ago"
        assert {n for key, n in rows if key == 6} == {601, 602, -4_000, -5_000}
        # And Spark reads what the job left: its chain or database has the keys that it never saw, too.
        after = tg.read_state(session, str(tmp_path / to / "counting"), "count", keys=[7, 999]).collect()
        assert {(row.key, row.value) for row in after} == {(7, 702), (999, 99_900)}
        assert tg.read_state(session, str(tmp_path / to / "counting"), "count").count() == 1000
        left = tg.read_state(session, str(tmp_path / to / "counting"), "by_kind").collect()
        assert {(row.key, row.map_key, row.value) for row in left} == {(3, "x", 7), (3, "y", 8)}
        assert tg.read_state(session, str(tmp_path / to / "counting"), "__offsets").count() == 1


def test_one_state_is_rewritten_from_itself(session: SparkSession, tmp_path: Path) -> None:
    counting(session, tmp_path, to="job", rows=100).run()
    base = str(tmp_path / "job" / "counting")
    count = tg.read_state(session, base, "count")
    doubled = count.where("key < 5").withColumn("value", F.col("value") * 2)
    tg.write_state(doubled, str(tmp_path / "sp"), base=base, operator="count", state="count")
    assert run("snapshots", "verify", tmp_path / "sp").exit_code == 0
    changes = tg.read_state(session, str(tmp_path / "sp"), "count", diff=base).collect()
    assert {(row.change, row.key, row.before, row.after) for row in changes} == {
        ("changed" if key < 5 else "removed", key, 10, 20 if key < 5 else None) for key in range(10)
    }
    point = find_snapshot(str(tmp_path / "sp"))
    assert set(point.manifest.operators) >= {"in", "count", "out"} and point.is_savepoint
    counting(session, tmp_path, to="next", rows=120, restore_from=str(tmp_path / "sp")).run()
    expected = [(key, n) for key in range(10) for n in (*range(1, 11), *((21, 22) if key < 5 else (1, 2)))]
    assert sorted((row["key"], row["n"]) for row in committed(tmp_path / "out")) == sorted(expected)
    nothing = count.where("key < 0")
    tg.write_state(nothing, str(tmp_path / "none"), base=str(tmp_path / "sp"), operator="count", state="count", add=True)
    assert tg.read_state(session, str(tmp_path / "none"), "count").count() == 0
    assert run("snapshots", "verify", tmp_path / "none").exit_code == 0


def test_keys_of_several_columns(session: SparkSession, tmp_path: Path) -> None:
    rows = session.range(200).select(
        (F.col("id") % 7).cast("string").alias("shop"),
        F.col("id").alias("order"),
        F.struct(F.col("id").alias("n")).alias("value"),
    )
    path = str(tmp_path / "sp")
    tg.write_state(rows, path, operator="op", state="s", key=["shop", "order"], parallelism=3, key_group_count=10)
    assert run("snapshots", "verify", path).exit_code == 0
    table = tg.read_state(session, path, "s")
    assert table.columns == ["shop", "order", "value", "key_group", "epoch"] and table.count() == 200
    assert tg.read_state(session, path, "s", keys=[("3", 3), ("3", 4)]).select("value.n").collect() == [(3,)]
    tg.write_state(table.limit(10), str(tmp_path / "ten"), base=path, operator="op", state="s")
    assert tg.read_state(session, str(tmp_path / "ten"), "s").count() == 10


def test_what_can_not_be_written_is_told_and_leaves_nothing(session: SparkSession, made: Made, tmp_path: Path) -> None:
    rows = session.createDataFrame([("a", 1)], "key string, value long")
    to, base = str(tmp_path / "sp"), str(made.path)
    with pytest.raises(NotFound, match=r"no state 'cuont'(.|\n)*'count'"):
        tg.write_state(rows, to, base=base, operator="counting", state="cuont")
    narrow = rows.withColumn("value", F.col("value").cast("int"))
    with pytest.raises(SchemaError, match=r"are   \(key string, value long\)\n.*these are  \(key string, value int\)"):
        tg.write_state(narrow, to, base=base, operator="counting", state="count")
    with pytest.raises(SchemaError, match="'value' is missing"):
        tg.write_state(rows.select("key"), to, operator="counting", state="count")
    with pytest.raises(SchemaError, match="'more' isn't used"):
        tg.write_state(rows.withColumn("more", F.lit(1)), to, operator="counting", state="count")
    with pytest.raises(JobError, match="only keyed state can be written"):
        tg.write_state(rows, to, base=base, operator="counting", state="offsets")
    with pytest.raises(JobError, match="'a' comes more than once"):
        tg.write_state(rows.union(rows), to, operator="counting", state="count")
    assert not Path(to).exists()
    entries: dict[str, tuple[str, list[tuple[Any, ...]], str]] = {
        "position": (
            r"position 1 of the key \(?'a'",
            [("a", 0, "x"), ("a", 1, "y"), ("b", 1, "y"), ("a", 1, "z")],
            "key string, position int, value string",
        ),
        "map_key": (
            r"map_key one of the key 'a'",
            [("a", "one", 1), ("b", "one", 1), ("a", "one", 1)],
            "key string, map_key string, value long",
        ),
        "timer": (
            r"timer at 5000 of the key 'a'",
            [("a", 5_000), ("b", 5_000), ("a", 5_000), ("a", 4_000)],
            "key string, at_ms long",
        ),
        "timers": (
            r"timer at 5000 of the key 'a'",
            [("b", [5_000]), ("a", [5_000, 4_000, 5_000])],
            "key string, value array<long>",
        ),
    }
    for name, (says, doubled, columns) in entries.items():
        state = "__event_timers" if name.startswith("timer") else f"by_{name}"
        more: dict[str, Any] = {"base": base, "add": True} if name in ("position", "timer") else {}
        if name == "map_key":
            session.conf.set("spark.sql.mapKeyDedupPolicy", "LAST_WIN")
        with pytest.raises(JobError, match=f"{says}.* comes more than once"):
            tg.write_state(
                session.createDataFrame(doubled, columns).repartition(len(doubled)),
                to,
                operator="counting",
                state=state,
                **more,
            )
        session.conf.unset("spark.sql.mapKeyDedupPolicy")
        if name == "position":
            for beside in ((), (("a", 2, "y"),)):
                without = session.createDataFrame([("a", None, "x"), *beside], columns)
                with pytest.raises(JobError, match="the position of an entry of the key 'a' is null"):
                    tg.write_state(without, to, operator="counting", state=state)
        assert not Path(to).exists()
    (tmp_path / "sp").mkdir()
    (tmp_path / "sp" / "mine.txt").touch()
    with pytest.raises(AlreadyExists, match="is not empty"):
        tg.write_state(rows, to, operator="counting", state="count")
    with pytest.raises(AnalysisException, match=r"write state with tg\.write_state"):
        rows.write.format("tidegate").mode("append").save(to)
