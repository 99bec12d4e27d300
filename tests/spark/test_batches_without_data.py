# ruff: noqa: N803  (Spark's names)
"""Timers fire, and a watermark takes effect, though no data comes: batches without data, as Spark's own engine runs them."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException

import tidegate as tg
from tests.spark.processors import ROCKSDB_STATE_STORE, EitherWay
from tests.spark.test_processes import collected
from tests.spark.test_processors_on_both_engines import CASES, Case, Engines, patiently, run_query
from tidegate.spark import alarm as alarms
from tidegate.spark import alarm_source
from tidegate.spark.alarm import Alarm
from tidegate.spark.alarm_source import FORMAT, AlarmFile, AlarmReader, source_stream
from tidegate.spark.alarm_stream import NAME

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SOON_MS = 3000


class DeadSensors(EitherWay):
    """Spark's own example: a sensor of which nothing is heard for `patience_ms` is dead."""

    columns = ("id", "said")

    def __init__(self, patience_ms: int) -> None:
        super().__init__()
        self.patience_ms = patience_ms

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        for timer in list(self.handle.listTimers()):
            self.handle.deleteTimer(timer)
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + self.patience_ms)
        yield from self.result((key[0], f"{len(list(rows))} readings"))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        yield from self.result((key[0], "dead"))


SENSORS = Case(DeadSensors, "id string, said string", "id string", [[("a",), ("b",), ("a",)]], {})
SAID = [("a", "2 readings"), ("a", "dead"), ("b", "1 readings"), ("b", "dead")]


class Sink:
    """The rows of each batch. It is down once, at the batch with the number `down_at`."""

    def __init__(self, *, down_at: int | None = None) -> None:
        self.batches: dict[int, list[tuple[Any, ...]]] = {}
        self._down_at = down_at

    def __call__(self, batch: DataFrame, number: int) -> None:
        if number == self._down_at:
            self._down_at = None
            raise ConnectionError("the sink is down")
        self.batches[number] = sorted(tuple(row) for row in batch.collect())

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        return sorted(row for batch in list(self.batches.values()) for row in batch)

    def run(self, frame: DataFrame, checkpoint: Path) -> None:
        patiently(
            lambda: run_query(
                frame.writeStream.foreachBatch(self).outputMode("update").option("checkpointLocation", str(checkpoint))
            )
        )

    def run_until(self, rows: int, frame: DataFrame, checkpoint: Path, *, begun: Callable[[], None]) -> None:
        """Until there are so many, with a trigger of 0.1 s."""
        query = (
            frame.writeStream.foreachBatch(self)
            .option("checkpointLocation", str(checkpoint))
            .trigger(processingTime="100 milliseconds")
            .start()
        )
        begun()
        try:
            deadline = time.monotonic() + 240
            while len(self.rows) < rows:
                assert time.monotonic() < deadline, self.batches
                query.awaitTermination(0.05)  # type: ignore[arg-type]  # raises where it has failed
        finally:
            query.stop()


@pytest.fixture(scope="module")
def session(spark: SparkSession) -> SparkSession:
    """Of the same Spark, with settings of its own. Batches without data are on, as by default."""
    session = spark.newSession()
    session.conf.set("spark.sql.session.timeZone", "UTC")
    session.conf.set(
        "spark.sql.streaming.stateStore.providerClass",
        ROCKSDB_STATE_STORE,
    )
    return session


def dead_sensors(
    session: SparkSession,
    folder: Path,
    *,
    time_mode: str = "ProcessingTime",
    patience_ms: int = SOON_MS,
    restore_from: str | None = None,
) -> DataFrame:
    (folder / "in").mkdir(parents=True, exist_ok=True)
    return tg.transform_with_state(
        SENSORS.frame(session, folder / "in").groupBy("id"),
        DeadSensors(patience_ms),
        SENSORS.output,
        "Append",
        time_mode,
        name="sensors",
        slots=2,
        snapshots=tg.Snapshots(to=str(folder / "state")),
        restore_from=restore_from,
    )


@pytest.mark.long
def test_the_watermark_takes_effect_after_the_last_data_as_in_spark(session: SparkSession, tmp_path: Path) -> None:
    """In every batch what Spark gives, over two runs. Ours fails in its first batch without data, and has another number of
    slots in the second run."""
    both = Engines(CASES["sessions"], pandas=False, session=session, folder=tmp_path)
    ours, theirs = Sink(down_at=3), Sink()
    for files, slots in ((range(3), 2), (range(3, 5), 1)):
        both.case.write(tmp_path / "in", files)
        grouped = both.case.frame(session, tmp_path / "in").groupBy("id")
        frame = both.tidegate(grouped, slots=slots, snapshots=tg.Snapshots(to=str(tmp_path / "state")))
        if slots == 2:
            with pytest.raises(StreamingQueryException, match="the sink is down"):
                ours.run(frame, tmp_path / "ours")
        ours.run(frame, tmp_path / "ours")
        theirs.run(both.spark(grouped), tmp_path / "theirs")
    assert ours.batches == theirs.batches
    assert sorted(ours.batches) == list(range(7)), "three files, one batch without data, two files, one batch without data"
    assert [[row[0] for row in ours.batches[number]] for number in (3, 6)] == [["c ended", "d ended"], ["d ended"]]


def test_a_timer_fires_where_nothing_comes_any_more_as_in_spark(session: SparkSession, tmp_path: Path) -> None:
    """The query is there before the data."""
    sinks = {"ours": Sink(), "theirs": Sink()}
    frames = {
        "ours": dead_sensors(session, tmp_path, patience_ms=500),
        "theirs": SENSORS.frame(session, tmp_path / "in")
        .groupBy("id")
        .transformWithState(DeadSensors(500), SENSORS.output, "Append", "ProcessingTime"),
    }
    for engine, sink in sinks.items():
        begun = partial(SENSORS.write, tmp_path / "in", range(1))
        patiently(partial(sink.run_until, len(SAID), frames[engine], tmp_path / engine, begun=begun))
    assert sinks["ours"].rows == sinks["theirs"].rows == SAID
    # The first one, that with the data, and one for each slot's timers: none is in vain, unlike in Spark.
    assert len(sinks["ours"].batches) <= 4


def test_what_is_due_when_a_query_begins_is_available_now(session: SparkSession, tmp_path: Path) -> None:
    """With timers of processing time Spark's own engine finds no end here."""
    SENSORS.write(tmp_path / "in", range(1))
    sink = Sink()
    sink.run(dead_sensors(session, tmp_path), tmp_path / "query")
    time.sleep(SOON_MS / 1000)
    sink.run(dead_sensors(session, tmp_path), tmp_path / "query")
    assert sink.rows == SAID and 1 <= max(sink.batches) <= 2
    before = len(sink.batches)
    sink.run(dead_sensors(session, tmp_path), tmp_path / "query")
    assert len(sink.batches) == before, "there is nothing to do"


def test_what_is_due_in_the_state_that_a_query_begins_with_is_available_now(session: SparkSession, tmp_path: Path) -> None:
    """It never gets data of its own."""
    SENSORS.write(tmp_path / "in", range(1))
    first, second = Sink(), Sink()
    # However long it takes, the first query fires no timer: nothing asks for a batch without data.
    session.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "false")
    try:
        first.run(dead_sensors(session, tmp_path), tmp_path / "query")
    finally:
        session.conf.unset("spark.sql.streaming.noDataMicroBatches.enabled")
    time.sleep(SOON_MS / 1000)
    state = str(tmp_path / "state" / "sensors")
    second.run(dead_sensors(session, tmp_path / "second", restore_from=state), tmp_path / "second" / "query")
    assert second.rows == [("a", "dead"), ("b", "dead")]
    assert sorted([*first.rows, *second.rows]) == SAID


def test_nothing_is_added_to_a_query_without_time(session: SparkSession, tmp_path: Path) -> None:
    plans = {
        mode: str(dead_sensors(session, tmp_path, time_mode=mode)._jdf.queryExecution().logical())
        for mode in ("None", "ProcessingTime")
    }
    assert NAME in plans["ProcessingTime"] and NAME not in plans["None"]


def test_no_python_process_is_started_for_the_stream(session: SparkSession, tmp_path: Path) -> None:
    """It would take longer to start than a tiny query takes to run."""
    query = (
        dead_sensors(session, tmp_path, patience_ms=3_600_000)
        .writeStream.format("noop")
        .outputMode("update")
        .option("checkpointLocation", str(tmp_path / "query"))
        .start()
    )
    try:
        SENSORS.write(tmp_path / "in", range(1))
        query.processAllAvailable()
        progress = query.lastProgress
        assert progress is not None and progress["batchId"] == 0
        assert not [line for line in _command_lines() if "python_streaming_source_runner" in line]
    finally:
        query.stop()


def test_queries_that_are_over_leave_no_connection(session: SparkSession, tmp_path: Path) -> None:
    stream = alarms.new_alarm(session).stream
    assert stream is not None
    server: Any = session.sparkContext._gateway._callback_server  # type: ignore[union-attr]
    open_after = []
    for number in range(4):
        query = (
            stream.writeStream.format("noop")
            .option("checkpointLocation", f"{tmp_path}/{number}")
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(60)
        open_after.append(sum(each.socket is not None for each in list(server.connections)))
    assert max(open_after[1:]) <= open_after[0] + 1, f"that of the last one: {open_after}"


def _command_lines() -> Iterator[str]:
    """Yield those of all processes below this one: Spark's JVM, and the Python processes that it has started."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parent = stat
            while (pid := int(parent.read_text().rpartition(")")[2].split()[1])) > 1:
                if pid == os.getpid():
                    yield (stat.parent / "cmdline").read_text().replace("\0", " ")
                    break
                parent = Path(f"/proc/{pid}/stat")


@pytest.mark.long
def test_a_query_continues_whichever_stream_wakes_it(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a version of Spark that may not take an object of the driver's the stream is a Python data source."""
    sink, known = Sink(), alarms.KNOWN_SPARK
    sensors = replace(SENSORS, batches=[*SENSORS.batches, [("a",)]])
    for file, versions, rows in ((0, (), 2), (None, known, 4), (1, known, 5), (None, (), 6)):
        monkeypatch.setattr(alarms, "KNOWN_SPARK", versions)
        if file is not None:
            sensors.write(tmp_path / "in", range(file, file + 1))
        frame = dead_sensors(session, tmp_path, patience_ms=1000)
        assert (NAME if versions else FORMAT) in frame._jdf.queryExecution().logical().toString()
        sink.run(frame, tmp_path / "query")
        assert len(sink.rows) >= rows
        time.sleep(1)
    assert sink.rows == sorted([*SAID, ("a", "1 readings"), ("a", "dead")])


def test_the_alarm_goes_off_when_its_time_has_come() -> None:
    alarm = Alarm()
    now_ms = int(time.time() * 1000)
    assert not alarm.goes_off()
    for at_ms, goes_off in ((now_ms, True), (now_ms + 3_600_000, False), (0, True), (None, False)):
        alarm.set(at_ms)
        assert alarm.goes_off() is goes_off


def test_the_reader_has_a_row_when_the_alarm_goes_off() -> None:
    alarm = AlarmFile()
    reader = AlarmReader(alarm.path)
    rows, begun = reader.read(reader.initialOffset())
    assert _count(rows) == 1, "Spark runs a first batch in any case"
    now_ms = int(time.time() * 1000)
    for at_ms, has_row in ((None, False), (now_ms + 3_600_000, False), (now_ms, True), (0, True)):
        alarm.set(at_ms)
        rows, end = reader.read(begun)
        assert _count(rows) == _count(reader.readBetweenOffsets(begun, end)) == has_row
        assert (end != begun) is has_row
    shutil.rmtree(alarm.path.parent)
    assert reader.read(begun)[1] != begun, "files for a while may be tidied away"
    alarm.set(None)
    assert reader.read(begun)[1] == begun


def test_an_alarm_that_can_not_be_written_goes_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot of the batch is complete by then, so it must not fail."""
    alarm = AlarmFile()
    reader = AlarmReader(alarm.path)
    _, begun = reader.read(reader.initialOffset())

    def is_full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", is_full)
        alarm.set(int(time.time() * 1000) + 3_600_000)
    assert reader.read(begun)[1] != begun
    alarm.set(None)
    assert reader.read(begun)[1] == begun


def test_the_file_of_an_alarm_goes_with_its_transform(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alarms, "KNOWN_SPARK", ())
    made: list[AlarmFile] = []

    def alarm_file() -> AlarmFile:
        made.append(AlarmFile())
        return made[-1]

    monkeypatch.setattr(alarm_source, "AlarmFile", alarm_file)
    frame = dead_sensors(session, tmp_path)
    assert made[0].path.exists()
    del frame
    for _ in range(3):
        collected(session)
        dead_sensors(session, tmp_path)  # whoever builds one looks through the others
    assert not made[0].path.exists()
    monkeypatch.setattr(transform_module(), "_together", lambda *_, **__: pytest.fail("no such column"))
    with pytest.raises(pytest.fail.Exception):
        dead_sensors(session, tmp_path)
    assert not made[-1].path.exists(), "of one that can't be built, at once"


def transform_module() -> Any:
    return sys.modules["tidegate.spark.transform"]


def _count(batches: Iterator[Any]) -> int:
    return sum(batch.num_rows for batch in batches)


def test_every_session_has_a_source_of_its_own(spark: SparkSession) -> None:
    """Spark refuses to register a source in a session where the first of all has one of that name, and doesn't find that one
    either."""
    for each in (spark, spark.newSession(), spark, spark.newSession()):
        assert source_stream(AlarmFile(), each).isStreaming
