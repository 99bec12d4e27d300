"""`tg.transform` on streaming DataFrames, on a real Spark, `local[4]`: one micro-batch, one epoch."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import StreamingQueryException

import tidegate as tg
from tests.spark.test_transform import DiesOnce, check_counts, counted, split
from tidegate.dataframes.gathering import Run, RunEnd
from tidegate.dataframes.micro_batches import MicroBatches
from tidegate.errors import JobError, NotFound
from tidegate.snapshots.catalog import SnapshotCatalog
from tidegate.spark import processes
from tidegate.store.opening import open_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

ROWS = 100
SCHEMA = "id long, key long"
COUNTS = "id long, key long, n long"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """The runs that were gathered since."""
    return noted_runs(monkeypatch)


def noted_runs(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    found: list[Run] = []
    conduct = MicroBatches.conduct

    def noted(self: MicroBatches, run: Run) -> RunEnd:
        found.append(run)
        return conduct(self, run)

    monkeypatch.setattr(MicroBatches, "conduct", noted)
    return found


def batches(runs: list[Run]) -> list[tuple[int | None, bool]]:
    """Each run's micro-batch, and whether its slots were held."""
    return [(run.offers[0].batch, all(offer.slot is not None for offer in run.offers)) for run in runs]


def add_files(folder: Path, count: int, *, first: int = 0, rows: int = ROWS) -> None:
    """Spark takes them in the order of their times."""
    folder.mkdir(exist_ok=True)
    for number in range(first, first + count):
        ids = range(number * ROWS, number * ROWS + rows)
        hidden, path = folder / f"_{number}.parquet", folder / f"{number:05}.parquet"
        pq.write_table(
            pa.table(
                {"id": list(ids), "key": [number % 7 for number in ids]},
                schema=pa.schema([("id", pa.int64()), ("key", pa.int64())]),
            ),
            hidden,
        )
        os.utime(hidden, (1e9 + number, 1e9 + number))
        hidden.rename(path)


class Desk:
    """A folder with input files, each of which makes a micro-batch, and a query that reads them."""

    def __init__(self, folder: Path, spark: SparkSession) -> None:
        self.folder = folder
        self.spark = spark
        self.source = folder / "in"
        self.source.mkdir(exist_ok=True, parents=True)
        self.files = len(list(self.source.iterdir()))

    def add(self, count: int = 1, rows: int = ROWS) -> None:
        add_files(self.source, count, first=self.files, rows=rows)
        self.files += count

    def stream(self, source: Path | None = None) -> DataFrame:
        return self.spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(source or self.source))

    def transform(
        self, pipeline: Any = counted, *, data: Any = None, slots: int = 2, snapshots: str = "snapshots", **rest: Any
    ) -> Any:
        return tg.transform(
            self.stream() if data is None else data,
            pipeline,
            name="counts",
            slots=slots,
            snapshots=tg.Snapshots(to=str(self.folder / snapshots)),
            **rest,
        )

    def start(self, frame: DataFrame, *, checkpoint: str = "checkpoint", trigger: Any = None) -> StreamingQuery:
        return (
            frame.writeStream.format("parquet")
            .option("checkpointLocation", str(self.folder / checkpoint))
            .trigger(**(trigger or {"availableNow": True}))
            .start(str(self.folder / "out"))
        )

    def run(self, frame: DataFrame | None = None, **rest: Any) -> None:
        query = self.start(self.transform() if frame is None else frame, **rest)
        try:
            assert query.awaitTermination(240)
        finally:
            query.stop()

    def rows(self) -> list[Any]:
        return self.spark.read.parquet(str(self.folder / "out")).collect()

    def check(self) -> None:
        check_counts(self.rows(), range(self.files * ROWS))

    def snapshots(self) -> list[int]:
        """The micro-batches that there are snapshots of."""
        catalog = SnapshotCatalog(open_store(str(self.folder / "snapshots" / "counts")))
        return [manifest.micro_batch.number for manifest in catalog.manifests() if manifest.micro_batch is not None]


@pytest.fixture
def desk(tmp_path: Path, spark: SparkSession) -> Desk:
    return Desk(tmp_path, spark)


# --- batches -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "backend",
    [pytest.param(tg.Heap(), id="heap"), pytest.param(tg.RocksDB(memory="64 MB"), id="rocksdb", marks=pytest.mark.long)],
)
def test_state_stays_warm_in_a_query_and_goes_on_at_other_slots(desk: Desk, runs: list[Run], backend: Any) -> None:
    desk.add(3)
    desk.run(desk.transform(backend=backend))
    desk.check()
    assert batches(runs) == [(0, False), (1, True), (2, True)]
    assert desk.snapshots() == [1, 2]
    for slots in (3, 1):
        del runs[:]
        desk.add(2)
        desk.run(desk.transform(slots=slots, backend=backend))
        desk.check()
        assert [held for _, held in batches(runs)] == [False, True] and len(runs[0].offers) == slots
    assert desk.snapshots() == [5, 6]


@pytest.mark.long
def test_any_trigger_goes_and_a_batch_without_rows_is_one_too(desk: Desk, runs: list[Run]) -> None:
    frame = desk.transform()
    query = desk.start(frame, trigger={"processingTime": "0 seconds"})
    try:
        desk.add(1)
        query.processAllAvailable()
        desk.add(1, rows=0)
        query.processAllAvailable()
        desk.add(1)
        query.processAllAvailable()
    finally:
        query.stop()
    desk.add(1)
    desk.run(frame)  # the same DataFrame: its slots are still there
    assert batches(runs) == [(0, False), (1, True), (2, True), (3, True)]
    check_counts([row for row in desk.rows() if row.id < 100], range(100))
    assert sorted(row.id for row in desk.rows()) == [*range(100), *range(200, 400)]
    assert max(row.n for row in desk.rows() if row.key == 3) == sum(i % 7 == 3 for i in [*range(100), *range(200, 400)])


@pytest.mark.long
def test_two_streams_and_side_outputs_in_one_query(desk: Desk) -> None:
    other = desk.folder / "other"
    other.mkdir()
    desk.add(2)
    for path in desk.source.iterdir():
        shutil.copy(path, other / path.name)

    def pipeline(left: Any, right: Any) -> Any:
        return split(left.union(right))

    outputs = desk.transform(pipeline, data={"left": desk.stream(), "right": desk.stream(other)})

    def write(batch: DataFrame, number: int) -> None:
        batch.persist()
        for name, rows in outputs.split(batch).items():
            rows.write.mode("overwrite").parquet(str(desk.folder / name / f"{number}"))
        batch.unpersist()

    query = (
        outputs.together.writeStream.foreachBatch(write)
        .trigger(availableNow=True)
        .option("checkpointLocation", str(desk.folder / "checkpoint"))
        .start()
    )
    try:
        assert query.awaitTermination(240)
    finally:
        query.stop()
    found = {
        name: sorted(row.id for row in desk.spark.read.parquet(f"{desk.folder}/{name}/*").collect())
        for name in ("zeros", "others")
    }
    assert found["zeros"] == sorted(2 * [i for i in range(200) if i % 7 == 0])
    assert len(found["others"]) == 400 - len(found["zeros"])


class Remind(tg.KeyedProcess):
    def process(self, event: Any, ctx: Any) -> None:
        ctx.timers.event_time(event.at + 1000)

    def on_timer(self, at: int, ctx: Any) -> Iterator[tuple[int]]:
        yield (at,)


@pytest.mark.long
def test_event_time_goes_on_from_batch_to_batch(desk: Desk) -> None:
    desk.add(2)
    timed = desk.stream().selectExpr("key", "id * 100 as at")

    def remind(stream: Any) -> Any:
        return (
            stream.with_watermark("at", "0 s", idle_after="1 ms")
            .key_by("key")
            .process("remind", Remind(), returns="at long")
        )

    for files in (2, 3):
        desk.run(desk.transform(remind, data=timed))
        due = {number * 100 + 1000 for number in range(files * ROWS)}
        now = files * ROWS * 100 - 100
        told = [row.at for row in desk.rows()]
        assert {at for at in due if at < now} <= set(told) <= {at for at in due if at <= now}
        assert len(told) == len(set(told)), "each timer fires once"
        desk.add(1)


# --- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_process_that_is_killed_within_a_batch_costs_nothing_but_time(desk: Desk, runs: list[Run]) -> None:
    desk.add(3)
    flag = str(desk.folder / "flag")
    desk.run(desk.transform(lambda s: s.key_by("key").process("count", DiesOnce(flag, 150), returns=COUNTS)))
    desk.check()
    assert batches(runs) == [(0, False), (1, True), (1, False), (2, True)]


@pytest.mark.long
def test_processes_that_are_killed_between_batches_are_replaced(desk: Desk, runs: list[Run]) -> None:
    frame = desk.transform()
    query = desk.start(frame, trigger={"processingTime": "0 seconds"})
    try:
        desk.add(1)
        query.processAllAvailable()
        (place,) = [place for place, let in enumerate(processes._places) if let.tenant.query == query.id]
        variable = f"{processes.VARIABLE}={place}\0".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment, parent = (folder / "environ").read_bytes(), (folder / "stat").read_text().split()[3]
                if variable in environment and variable in Path(f"/proc/{parent}/environ").read_bytes():
                    os.kill(int(folder.name), signal.SIGKILL)
                    break  # one of two is enough
            except OSError:
                continue
        else:
            raise AssertionError("no process of the transform was found")
        time.sleep(1)
        desk.add(2)
        query.processAllAvailable()
    finally:
        query.stop()
    desk.check()
    assert batches(runs)[0] == (0, False) and batches(runs)[-1][0] == 2


def test_a_batch_that_spark_runs_again_goes_on_from_the_one_before(desk: Desk, runs: list[Run]) -> None:
    """The state of a batch is complete, and its output is lost."""
    desk.add(3)
    failures = [1]

    def write(batch: DataFrame, number: int) -> None:
        rows = batch.collect()
        if number in failures:
            failures.remove(number)
            raise RuntimeError("the sink fails")
        desk.spark.createDataFrame(rows, batch.schema).write.mode("overwrite").parquet(f"{desk.folder}/out/{number}")

    for attempt in range(2):
        query = (
            desk.transform()
            .writeStream.foreachBatch(write)
            .trigger(availableNow=True)
            .option("checkpointLocation", str(desk.folder / "checkpoint"))
            .start()
        )
        if attempt == 0:
            with pytest.raises(StreamingQueryException, match="the sink fails"):
                query.awaitTermination(240)
            assert desk.snapshots() == [0, 1], "Spark hasn't committed 1"
        else:
            assert query.awaitTermination(240)
        query.stop()
    assert batches(runs) == [(0, False), (1, True), (1, False), (2, True)]
    check_counts(desk.spark.read.parquet(f"{desk.folder}/out/*").collect(), range(300))
    assert desk.snapshots() == [1, 2]


@pytest.mark.long
def test_an_error_in_a_users_function_ends_the_query_and_harms_no_state(desk: Desk, runs: list[Run]) -> None:
    desk.add(2)
    desk.run()
    desk.add(2)
    del runs[:]
    with pytest.raises(StreamingQueryException, match=r"(?s)in operator 'boom'.*id=350"):
        desk.run(desk.transform(lambda s: counted(s.filter(fails_at_350, name="boom"))))
    assert batches(runs) == [(2, False), (3, True)], "an error of the program isn't tried again"
    desk.run()
    desk.check()


def fails_at_350(event: Any) -> bool:
    assert event.id != 350
    return True


SCRIPT = """
import sys
from pathlib import Path
from tests.spark.test_transform_streaming import Desk
from tidegate.spark.job import local_session

desk = Desk(Path(sys.argv[1]), local_session(2))
desk.spark.sparkContext.setLogLevel("OFF")
desk.run()
"""


@pytest.mark.long
def test_a_driver_that_is_killed_is_followed_by_one_that_goes_on_exactly(desk: Desk) -> None:
    desk.add(12)

    def driver() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", SCRIPT, str(desk.folder)], start_new_session=True)

    def is_behind(batch: int) -> bool:
        try:
            return max(desk.snapshots(), default=-1) < batch
        except NotFound:  # the driver has let it go since it was listed
            return True

    for after in (2, 6):
        process = driver()
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and is_behind(after):
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)  # the driver, its JVM and what they started
        process.wait()
        assert max(desk.snapshots(), default=-1) >= after
    assert driver().wait(240) == 0
    desk.check()


# --- drift -------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_spark_and_the_snapshots_cant_drift_apart_in_silence(desk: Desk) -> None:
    desk.add(3)
    desk.run()
    backup = desk.folder / "backup"
    shutil.copytree(desk.folder / "snapshots", backup)
    desk.add(2)
    with pytest.raises(StreamingQueryException, match=r"micro-batch 3 of the query .* micro-batch 2, and .* holds none"):
        desk.run(desk.transform(snapshots="elsewhere"))
    with pytest.raises(StreamingQueryException, match=r"are of the query .* give the transform another name"):
        desk.run(checkpoint="another")
    desk.run()
    desk.check()
    shutil.rmtree(desk.folder / "snapshots")
    backup.rename(desk.folder / "snapshots")
    desk.add(1)
    with pytest.raises(StreamingQueryException, match=r"has those of the micro-batches \[1, 2\].*would drift apart"):
        desk.run()


@pytest.mark.long
def test_a_query_begins_with_a_savepoint_and_ends_in_a_job(desk: Desk) -> None:
    history = desk.spark.range(0, 200, 1, 2).selectExpr("id", "id % 7 as key")
    savepoint = str(desk.folder / "savepoint")
    tg.transform(history, counted, slots=3, savepoint_to=savepoint).count()
    desk.files = 2
    desk.add(2)
    desk.run(desk.transform(restore_from=savepoint))
    desk.add(1)
    desk.run(desk.transform(restore_from=savepoint))  # the same program, started again
    check_counts(desk.rows(), range(200, 500), since=200)
    live = tg.Job(
        "live",
        desk.spark,
        slots=2,
        restore_from=str(desk.folder / "snapshots" / "counts"),
        snapshots=tg.Snapshots(to=str(desk.folder / "live")),
    )
    counted(live.source("events", tg.sources.rows([(i, i % 7) for i in range(500, 600)], SCHEMA))).to(
        "out", tg.sinks.collect()
    )
    handle = live.start()
    assert handle.wait("2 minutes") is tg.Status.FINISHED
    check_counts(handle.results("out"), range(500, 600), since=500)


def test_what_cant_be_is_said_at_once(desk: Desk) -> None:
    desk.add(1)
    static = desk.spark.range(10).selectExpr("id", "id as key")
    with pytest.raises(JobError, match=r"give snapshots=tg.Snapshots\(to=…\)"):
        tg.transform(desk.stream(), counted)
    with pytest.raises(JobError, match=r"savepoint_to= and drain= are for batch DataFrames"):
        desk.transform(savepoint_to=str(desk.folder / "sp"))
    with pytest.raises(JobError, match=r"retain=1.*retain=2 or more"):
        tg.transform(desk.stream(), counted, snapshots=tg.Snapshots(to=str(desk.folder), retain=1))
    with pytest.raises(JobError, match=r"its snapshots are aligned"):
        tg.transform(desk.stream(), counted, snapshots=tg.Snapshots(to=str(desk.folder), mode="unaligned"))
    with pytest.raises(JobError, match=r"not both, and 'b' is a batch one"):
        tg.transform({"a": desk.stream(), "b": static}, lambda a, b: a, snapshots=tg.Snapshots(to=str(desk.folder)))
    with pytest.raises(JobError, match=r"snapshots= is for streaming DataFrames"):
        tg.transform(static, counted, snapshots=tg.Snapshots(to=str(desk.folder)))
